"""The embedded engine end to end, as `serve` runs it: what its ranks hold and say after an update is what a cold engine
would hold and say, to the bit; what is refused or cleared leaves what it promises.

Bytes are judged from outside, out of the workers' memory: no checksum of the product is believed.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest
from served_engine import DEADLINE_S, Model, ServedEngine, greedy

from fastdeploy_rl.errors import ChecksumMismatchError, CoverageError
from fastdeploy_rl.publish.publisher import Published, WeightPublisher
from fastdeploy_rl.report import UpdateReport

PROMPTS = ([1, 2, 3], [7] * 40, list(range(100, 117)))
CLI = [sys.executable, "-m", "fastdeploy_rl.cli"]
UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"


class Setup(NamedTuple):
    num_ranks: int
    apply_mode: str
    is_tied: bool


# Of the twelve, those in which every two properties meet in every way.
SETUPS = (
    Setup(1, "alias", True),
    Setup(1, "copy", False),
    Setup(2, "alias", False),
    Setup(2, "copy", True),
    Setup(3, "alias", True),
    Setup(3, "copy", False),
)


def setup_name(setup: Setup) -> str:
    return f"{setup.num_ranks} ranks {setup.apply_mode} {'tied' if setup.is_tied else 'untied'}"


class Pair:
    """An engine started on A, which tests update, and one that started on B and stays as it is."""

    def __init__(self, setup: Setup, a: Model, b: Model, warm: ServedEngine, cold: ServedEngine) -> None:
        self.setup = setup
        self.a, self.b = a, b
        self.warm, self.cold = warm, cold
        self.bytes_of_a = [warm.bytes_of(rank) for rank in range(setup.num_ranks)]
        self.tokens_of_a, self.tokens_of_b = answers(warm), answers(cold)


class Rig:
    """A pair of engines, and the trainer of one test that updates the warm one."""

    def __init__(self, pair: Pair, publisher: WeightPublisher) -> None:
        self.setup, self.a, self.b = pair.setup, pair.a, pair.b
        self.warm, self.cold = pair.warm, pair.cold
        self.bytes_of_a, self.tokens_of_a, self.tokens_of_b = pair.bytes_of_a, pair.tokens_of_a, pair.tokens_of_b
        self._publisher = publisher
        self._step = 0

    def publish(self, weights: Mapping[str, Any], layout: str = "full") -> Published:
        self._step += 1
        return self._publisher.publish(weights, step=self._step, layout=layout)

    def take(self, weights: Mapping[str, Any], layout: str = "full") -> UpdateReport:
        """Publishes, and updates the warm engine."""
        return self.warm.control.update(self.publish(weights, layout).version)


def answers(engine: ServedEngine) -> list[list[int]]:
    return [engine.tokens(prompt, 24) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Model]:
    root = tmp_path_factory.mktemp("models")
    return {
        (name, is_tied): Model.write(root / f"{name}{is_tied}", seed=seed, is_tied=is_tied)
        for name, seed in (("a", 1), ("b", 2))
        for is_tied in (False, True)
    }


@pytest.fixture(scope="module", params=SETUPS, ids=setup_name)
def pair(
    request: pytest.FixtureRequest,
    models: dict[tuple[str, bool], Model],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    setup: Setup = request.param
    a, b = models["a", setup.is_tied], models["b", setup.is_tied]
    place = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        warm, cold = (
            stack.enter_context(
                ServedEngine(
                    model,
                    place / name,
                    num_ranks=setup.num_ranks,
                    apply_mode=setup.apply_mode,
                    options=("--rollback", rollback_of(setup)),
                )
            )
            for name, model in (("warm", a), ("cold", b))
        )
        warm.await_ready()
        cold.await_ready()
        yield Pair(setup, a, b, warm, cold)


def rollback_of(setup: Setup) -> str:
    return "refetch" if setup.num_ranks == 3 else "keep"


@pytest.fixture
def rig(pair: Pair) -> Iterator[Rig]:
    with WeightPublisher(pair.warm.channel) as publisher:
        yield Rig(pair, publisher)


def only(*setups: Setup) -> pytest.MarkDecorator:
    """Runs a test on these setups alone."""
    return pytest.mark.parametrize("pair", setups, ids=setup_name, indirect=True)


# --- what is live ----------------------------------------------------------------------------------


def test_a_cold_engine_holds_its_slices_of_the_checkpoint(rig: Rig) -> None:
    assert rig.cold.differing(rig.b) == []
    assert rig.bytes_of_a == [rig.a.slices(rank, rig.setup.num_ranks) for rank in range(rig.setup.num_ranks)]
    assert rig.tokens_of_a != rig.tokens_of_b


@pytest.mark.parametrize("layout", ["full", "tp:N", "tp:other"])
def test_warm_is_cold_to_the_bit_and_back(rig: Rig, layout: str) -> None:
    """A -> B is B started cold, A -> B -> A is A as it was: every live byte of every rank, and the tokens."""
    num_ranks = rig.setup.num_ranks
    layout = {"full": "full", "tp:N": f"tp:{num_ranks}", "tp:other": "tp:2" if num_ranks == 3 else "tp:3"}[layout]
    report = rig.take(rig.b.weights, layout)
    assert report.outcome == "done"
    for rank in range(num_ranks):
        assert rig.warm.bytes_of(rank) == rig.cold.bytes_of(rank)
    assert answers(rig.warm) == rig.tokens_of_b
    assert rig.take(rig.a.weights, layout).outcome == "done"
    assert [rig.warm.bytes_of(rank) for rank in range(num_ranks)] == rig.bytes_of_a
    assert answers(rig.warm) == rig.tokens_of_a


def test_alias_binds_published_memory_and_copy_fills_its_own(rig: Rig) -> None:
    """Cut for the engine's ranks, every parameter can be used in place; with copy no address ever changes."""
    rig.take(rig.a.weights)
    ranks = range(rig.setup.num_ranks)
    before = [rig.warm.places(rank) for rank in ranks]
    published = rig.publish(rig.b.weights, f"tp:{rig.setup.num_ranks}")
    report = rig.warm.control.update(published.version)
    segments = {f"/dev/shm/{segment.locator}" for segment in published.manifest.segments}
    files = {rig.warm.file_of(rank, name) for rank in ranks for name in before[rank]}
    total = sum(size for places in before for _, size in places.values())
    if rig.setup.apply_mode == "alias":
        assert files == segments
        assert (report.aliased_bytes, report.copied_bytes) == (total, 0)
    else:
        assert not any("/dev/shm" in file for file in files)
        assert [rig.warm.places(rank) for rank in ranks] == before
        assert (report.aliased_bytes, report.copied_bytes) == (0, total)
        assert {rank.rollback for rank in report.ranks} == {rollback_of(rig.setup)}


def test_the_receipt_is_that_of_the_publication(rig: Rig) -> None:
    published = rig.publish(rig.b.weights, f"tp:{rig.setup.num_ranks}")
    receipt = rig.warm.control.update(published.version).receipt
    assert receipt is not None
    assert receipt.content_digest == published.manifest.content_digest
    assert receipt.read == {tensor.name: tensor.checksum for tensor in published.manifest.tensors}
    assert receipt == rig.warm.control.receipt() == rig.warm.control.receipt(recompute=True)


@only(Setup(2, "copy", True), Setup(3, "alias", True))
@pytest.mark.parametrize("layout", ["full", "tp:N"])
def test_bf16_published_into_float32_is_exact(rig: Rig, layout: str) -> None:
    layout = layout.replace("N", str(rig.setup.num_ranks))
    halves = {name: top_halves(value) for name, value in rig.b.weights.items()}
    rig.take({name: as_bf16(bits) for name, bits in halves.items()}, layout)
    wide = Model(rig.b.directory, {name: widened(bits) for name, bits in halves.items()})
    assert rig.warm.differing(wide) == []


def top_halves(value: np.ndarray) -> np.ndarray:
    """The BF16 bits that a float32 array begins with."""
    return (value.view(np.uint32) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def as_bf16(bits: np.ndarray) -> Any:
    import paddle

    return paddle.to_tensor(bits.view(np.int16)).view("bfloat16")


@only(Setup(2, "alias", False), Setup(2, "copy", True))
def test_tied_heads_may_be_published_under_both_names(rig: Rig) -> None:
    """A trainer that keeps one memory under two names publishes it once; a tied engine takes either name."""
    embedding = rig.b.weights["model.embed_tokens.weight"]
    published = rig.publish(rig.b.weights | {"lm_head.weight": embedding}, f"tp:{rig.setup.num_ranks}")
    assert published.manifest.aliases
    rig.warm.control.update(published.version)
    head = {} if rig.setup.is_tied else {"lm_head.weight": embedding}
    assert rig.warm.differing(Model(rig.b.directory, rig.b.weights | head)) == []
    rig.take(rig.a.weights)
    assert answers(rig.warm) == rig.tokens_of_a


# --- requests in flight ----------------------------------------------------------------------------

NUM_LONG = 250
NUM_COMPARED = 40


@only(Setup(1, "alias", True), Setup(2, "copy", True), Setup(3, "alias", True))
def test_requests_in_flight_go_on_under_the_new_version(rig: Rig) -> None:
    """Their spans add up to their tokens; what follows the switch is what an engine that started on the new version
    makes of prompt + tokens so far."""
    before = rig.take(rig.a.weights).version
    after = str(rig.publish(rig.b.weights, f"tp:{rig.setup.num_ranks}").version)
    with rig.warm.stream(PROMPTS[0], NUM_LONG) as first, rig.warm.stream(PROMPTS[1], NUM_LONG) as second:
        begun = [next(first)], [next(second)]
        rig.warm.control.update()
        told = [[*begun[0], *first], [*begun[1], *second]]
    assert rig.warm.differing(rig.b) == []
    rig.take(rig.a.weights)
    for index, prompt in enumerate(PROMPTS[:2]):
        (old, new), made = told[index][-1]["weight_versions"], tokens_of(told[index])
        assert (old["version"], new["version"]) == (before, after)
        assert (old["start"], old["end"], new["end"]) == (0, new["start"], NUM_LONG)
        assert len(made) == NUM_LONG
        kept, rest = made[: old["end"]], made[old["end"] :][:NUM_COMPARED]
        assert kept == rig.warm.tokens(prompt, len(kept))
        assert rest == rig.cold.tokens([*prompt, *kept], len(rest))


def tokens_of(events: list[dict[str, Any]]) -> list[int]:
    return [token for event in events for token in event["choices"][0].get("completion_token_ids", ())]


@only(Setup(2, "alias", False))
def test_tokens_say_which_version_made_them(rig: Rig) -> None:
    for weights in (rig.a.weights, rig.b.weights):
        version = rig.take(weights).version
        spans = rig.warm.complete(PROMPTS[0], 9)["weight_versions"]
        assert spans == [{"version": version, "start": 0, "end": 9}]
    assert rig.cold.complete(PROMPTS[0], 9)["weight_versions"] == [{"version": "0.0", "start": 0, "end": 9}]


# --- refused ---------------------------------------------------------------------------------------


@only(Setup(2, "alias", False), Setup(3, "copy", False))
def test_a_broken_publication_is_refused_by_name_and_nobody_notices(rig: Rig) -> None:
    """One tensor missing and one of a wrong shape: both are named, everywhere; bytes, tokens, receipt and a request in
    flight stay as they are."""
    before = rig.take(rig.a.weights, f"tp:{rig.setup.num_ranks}")
    undisturbed = rig.warm.tokens(PROMPTS[0], 200)
    broken = {name: value for name, value in rig.b.weights.items() if name != UP}
    broken[DOWN] = broken[DOWN][:, :-6].copy()
    rig.publish(broken)
    with rig.warm.stream(PROMPTS[0], 200) as events:
        begun = [next(events)]
        with pytest.raises(CoverageError) as caught:
            rig.warm.control.update()
        answer = rig.warm.http.get("/update_model_weight")
        told = begun + list(events)
    assert answer.status_code == 409
    for text in (str(caught.value), answer.json()["message"]):
        assert UP in text
        assert DOWN in text
        assert "expected [1536, 384] got [1536, 378]" in text
    assert tokens_of(told) == undisturbed
    assert told[-1]["weight_versions"] == [{"version": before.version, "start": 0, "end": 200}]
    assert rig.warm.differing(rig.a) == []
    assert rig.warm.control.status().version == before.version
    assert rig.warm.control.receipt() == before.receipt == rig.warm.control.receipt(recompute=True)
    assert answers(rig.warm) == rig.tokens_of_a


# --- cleared ---------------------------------------------------------------------------------------


@only(Setup(2, "copy", True))
def test_clear_ends_requests_with_the_reason_and_refuses_new_ones(rig: Rig) -> None:
    rig.take(rig.a.weights)
    with ThreadPoolExecutor(1) as pool, rig.warm.stream(PROMPTS[0], NUM_LONG) as events:
        next(events)
        body = greedy(PROMPTS[1], NUM_LONG)
        whole = pool.submit(rig.warm.http.post, "/v1/completions", json=body, timeout=DEADLINE_S)
        for _ in range(10):
            next(events)
        rig.warm.control.clear()
        rest, refused = list(events), whole.result(DEADLINE_S)
    assert len(rest) < NUM_LONG
    assert "cleared" in rest[-1]["error"]["message"]
    assert_unavailable(refused.status_code, refused.headers, refused.json()["error"]["message"])
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    for answer in (
        rig.warm.http.post("/v1/completions", json=body),
        rig.warm.http.post("/v1/completions", json=body | {"stream": True}),
        rig.warm.http.post("/v1/chat/completions", json=chat),
        rig.warm.http.get("/health"),
    ):
        assert_unavailable(answer.status_code, answer.headers, answer.json()["error"]["message"])
    assert rig.warm.places(0) == rig.warm.places(1) == {}
    rig.warm.control.update()
    assert rig.warm.differing(rig.a) == []
    assert answers(rig.warm) == rig.tokens_of_a


def assert_unavailable(status: int, headers: Mapping[str, str], message: str) -> None:
    assert status == 503
    assert int(headers["Retry-After"]) > 0
    assert "cleared" in message


@only(Setup(1, "alias", True), Setup(2, "alias", False), Setup(3, "copy", False))
def test_clear_gives_the_memory_back_each_time(rig: Rig) -> None:
    """RssAnon + RssShmem of every worker falls by nine tenths of its weights at least, to that much less than a worker
    has that holds its weights and nothing else.

    No token is made after the first time, so that the KV cache, which goes too, has no part in the later falls."""
    ranks = range(rig.setup.num_ranks)
    rig.take(rig.b.weights, f"tp:{rig.setup.num_ranks}")
    weight_bytes = np.array([sum(size for _, size in rig.warm.places(rank).values()) for rank in ranks])
    cold = resident(rig.cold)
    for _ in range(3):
        live = resident(rig.warm)
        assert rig.warm.control.clear().outcome == "done"
        left = resident(rig.warm)
        assert (live - left >= 0.9 * weight_bytes).all(), (live, left)
        assert (cold - left >= 0.9 * weight_bytes).all(), (cold, left)
        rig.warm.control.update()
        assert rig.warm.differing(rig.b) == []
    assert answers(rig.warm) == rig.tokens_of_b


def resident(engine: ServedEngine) -> np.ndarray:
    return np.array([engine.resident_bytes(rank) for rank in range(engine.num_ranks)])


# --- flipped ---------------------------------------------------------------------------------------


@only(Setup(3, "copy", False))
def test_a_flipped_byte_of_one_rank_is_named_and_the_next_update_mends_it(rig: Rig) -> None:
    rig.take(rig.a.weights)
    rig.warm.flip(1, UP, 4321)
    assert rig.warm.differing(rig.a) == [(1, UP)]
    done = subprocess.run(
        [*CLI, "receipt", "--recompute", "--engine", str(rig.warm.board_port)],
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fastdeploy-rl: error: 1 live tensors")
    assert done.stderr.endswith(f"{UP} on rank 1\n")
    rig.take(rig.a.weights)
    rig.warm.control.receipt(recompute=True)
    assert rig.warm.differing(rig.a) == []


@only(Setup(2, "alias", False))
def test_a_flipped_byte_of_an_engine_that_was_never_updated_is_named(rig: Rig) -> None:
    for rank, name in ((0, "model.norm.weight"), (1, "lm_head.weight")):
        rig.cold.flip(rank, name, 0)
        with pytest.raises(ChecksumMismatchError, match=rf"1 live tensors .*: {name} on rank {rank}$"):
            rig.cold.control.receipt(recompute=True)
        rig.cold.flip(rank, name, 0)
    rig.cold.control.receipt(recompute=True)
    assert rig.cold.differing(rig.b) == []
