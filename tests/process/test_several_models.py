"""A main and a draft model behind one weight manager, on real worker processes: both change together, or neither."""

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from safetensors.numpy import save_file

from fastdeploy_rl import WeightPublisher, namespaced
from fastdeploy_rl.checksum import of_bytes
from fastdeploy_rl.coverage import Coverage, FusedPart, ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, random_weights
from fastdeploy_rl.errors import CoverageError, StepFailedError
from fastdeploy_rl.plan.conventions import TensorRule, by_namespace, hugging_face
from fastdeploy_rl.publish.fastdeploy_files import write_model_state, write_version
from fastdeploy_rl.publish.publisher import Published
from fastdeploy_rl.report import UpdateReport
from fastdeploy_rl.sources import registry
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine, held_bytes
from tests.process.test_rank_death import await_recovery, kill
from tests.process.trainer import Trainer

Weights = dict[str, np.ndarray]

MAIN = NumpyModel(
    (
        ParameterSpec("embed", "F32", (12, 6), 0),
        ParameterSpec("norm", "F32", (6,), None),
        ParameterSpec("q_proj.weight", "F32", (6, 18), 1),
        ParameterSpec("head", "F32", (12, 6), 0, Coverage.TIED, "embed"),
    )
)
DRAFT = NumpyModel(
    (
        ParameterSpec("embed", "F32", (12, 6), 0),
        ParameterSpec("norm", "F32", (6,), None),
        ParameterSpec("qk", "F32", (6, 12), 1, fused=(FusedPart("q", 6), FusedPart("k", 6)), fused_axis=1),
    )
)
"""Two of its names are those of the main model, one parameter is fused of two."""
NUM_RANKS = 2
AXES = {spec.name: spec.shard_axis for spec in MAIN.specs} | {"q": 1, "k": 1}


def as_the_engine(name: str, shape: tuple[int, ...]) -> TensorRule:
    return TensorRule(name, AXES[name])


CONVENTION = by_namespace(as_the_engine, draft=as_the_engine)


def both(seed: int) -> tuple[Weights, Weights]:
    return random_weights(MAIN, seed), random_weights(DRAFT, seed + 100)


def together(weights: tuple[Weights, Weights]) -> Weights:
    main, draft = weights
    return {**main, **namespaced(draft, "draft")}


def publish(trainer: Trainer | WeightPublisher, tensors: dict[str, Any], step: int, layout: str = "full") -> Published:
    return trainer.publish(tensors, step=step, layout=layout, convention=CONVENTION)


def bytes_of(model: NumpyModel, weights: Weights, rank: int) -> dict[str, bytes]:
    updated = [spec for spec in model.specs if spec.coverage is Coverage.UPDATED]
    return {spec.name: held_bytes(spec, weights, rank, NUM_RANKS) for spec in updated}


def live(engine: NumpyEngine) -> list[dict[str, bytes]]:
    """What each rank's main, then draft model holds."""
    questions = [(rank, prefix) for rank in range(NUM_RANKS) for prefix in ("", "draft ")]
    found = [engine.ask(rank, f"{prefix}dump") for rank, prefix in questions]
    return [{name: bytes.fromhex(text) for name, text in dump.items()} for dump in found]


def expected(weights: tuple[Weights, Weights]) -> list[dict[str, bytes]]:
    return [
        bytes_of(model, own, rank)
        for rank in range(NUM_RANKS)
        for model, own in zip((MAIN, DRAFT), weights, strict=True)
    ]


def slices_of_rank(weights: tuple[Weights, Weights], rank: int) -> Weights:
    """Both models' parameters as the rank has them, as FastDeploy's trainers write them."""
    own: list[Weights] = []
    for model, tensors in zip((MAIN, DRAFT), weights, strict=True):
        shapes = {spec.name: spec.local_shape(NUM_RANKS) for spec in model.specs}
        held = bytes_of(model, tensors, rank)
        own.append({name: np.frombuffer(data, np.float32).reshape(shapes[name]) for name, data in held.items()})
    return together((own[0], own[1]))


def check_receipt(report: UpdateReport, weights: tuple[Weights, Weights], published: Published) -> None:
    receipt = report.receipt
    assert receipt.read == {name: of_bytes(value.tobytes()).hex() for name, value in together(weights).items()}
    assert receipt.live.keys() == {"embed", "norm", "q_proj.weight", "draft/embed", "draft/norm", "draft/qk"}
    assert receipt.content_digest == published.manifest.content_digest


def start(channel: Path, **more: Any) -> NumpyEngine:
    return NumpyEngine(MAIN, draft=DRAFT, channel=channel, num_ranks=NUM_RANKS, update_s=20.0, **more)


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    return tmp_path / "channel"


# --- both change together -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "apply_mode"), [*((name, "auto") for name in registry.load_strategies()), ("ipc", "copy")]
)
def test_both_models_change_together_and_stand_in_one_receipt(channel: Path, strategy: str, apply_mode: str) -> None:
    a, b = both(1), both(2)
    with (
        start(channel, load_strategy=strategy, apply_mode=apply_mode) as engine,
        Trainer(strategy, channel) as trainer,
        BoardClient(engine.port) as client,
    ):
        for step, (layout, weights) in enumerate([("full", a), (f"tp:{NUM_RANKS}", b), ("full", a)], 1):
            published = publish(trainer, together(weights), step, layout)
            report = client.update()
            assert (report.outcome, report.version) == ("done", str(published.version))
            assert live(engine) == expected(weights)
            check_receipt(report, weights, published)
            answers = [engine.ask(rank, f"{prefix}answer")[1] for rank in range(NUM_RANKS) for prefix in ("", "draft ")]
            assert answers == [str(published.version)] * (2 * NUM_RANKS)
        assert client.receipt(recompute=True) == report.receipt
        # Copied onto what is bound, nothing is bound anew; else once in each update. The first bind is the start's.
        num_binds = 1 if apply_mode == "copy" else 4
        for question in ("calls", "draft calls"):
            assert [engine.ask(rank, question).count("bind") for rank in range(NUM_RANKS)] == [num_binds] * NUM_RANKS


@pytest.mark.parametrize("kind", ["numpy", "paddle"])
def test_tensors_of_any_framework_take_a_namespace(channel: Path, kind: str) -> None:
    weights = both(3)
    tensors = together(weights)
    with start(channel) as engine, WeightPublisher(channel) as publisher, BoardClient(engine.port) as client:
        given = {name: paddle.to_tensor(value) for name, value in tensors.items()} if kind == "paddle" else tensors
        published = publish(publisher, given, 1)
        check_receipt(client.update(), weights, published)
        assert live(engine) == expected(weights)


def test_an_embedding_that_both_models_share_is_published_and_held_once(channel: Path) -> None:
    main, draft = both(4)
    draft["embed"] = main["embed"]
    with (
        start(channel, apply_mode="alias") as engine,
        WeightPublisher(channel) as publisher,
        BoardClient(engine.port) as client,
    ):
        published = publish(publisher, together((main, draft)), 1, f"tp:{NUM_RANKS}")
        assert published.manifest.aliases == {"draft/embed": "embed"}
        client.update()
        assert live(engine) == expected((main, draft))
        for rank in range(NUM_RANKS):
            assert engine.ask(rank, "address embed") == engine.ask(rank, "draft address embed")
        publish(publisher, together(both(5)), 2)
        client.update()
        assert live(engine) == expected(both(5))


def test_torch_layout_is_turned_in_both_models(channel: Path) -> None:
    """`hugging_face` looks at what a tensor is called inside its model."""
    draft_model = NumpyModel((ParameterSpec("q_proj.weight", "F32", (6, 12), 1),))
    main, draft = random_weights(MAIN, 6), random_weights(draft_model, 7)
    stored = {**main, **namespaced(draft, "draft")}
    stored |= {name: value.T.copy() for name, value in stored.items() if name.endswith("q_proj.weight")}
    with (
        NumpyEngine(MAIN, draft=draft_model, channel=channel, num_ranks=NUM_RANKS) as engine,
        WeightPublisher(channel) as publisher,
        BoardClient(engine.port) as client,
    ):
        for step, convention in enumerate([hugging_face, by_namespace(hugging_face, draft=hugging_face)], 1):
            publisher.publish(stored, step=step, convention=convention)
            client.update()
            found = live(engine)
            assert found[::2] == [bytes_of(MAIN, main, rank) for rank in range(NUM_RANKS)]
            assert found[1::2] == [bytes_of(draft_model, draft, rank) for rank in range(NUM_RANKS)]


def test_files_that_fastdeploys_trainers_write_have_both_models(channel: Path, tmp_path: Path) -> None:
    """The sign between namespace and name is only ever inside a file."""
    weights = both(8)
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    with (
        start(channel, load_strategy="ipc_snapshot", model_dir=model_dir) as engine,
        BoardClient(engine.port) as client,
    ):
        for rank in range(NUM_RANKS):
            write_model_state(model_dir, slices_of_rank(weights, rank), rank=rank, gpu=rank, num_parts=2)
        write_version(model_dir, 7)
        assert client.update().outcome == "done"
        assert live(engine) == expected(weights)
        assert [path for path in model_dir.iterdir() if path.is_dir()] == []


def test_a_hugging_face_directory_may_hold_both_models(tmp_path: Path) -> None:
    draft_model = NumpyModel(
        (ParameterSpec("q_proj.weight", "F32", (6, 12), 1), ParameterSpec("norm", "F32", (6,), None))
    )
    main, draft = random_weights(MAIN, 9), random_weights(draft_model, 10)
    stored = {**main, **namespaced(draft, "draft")}
    stored |= {name: value.T.copy() for name, value in stored.items() if name.endswith("q_proj.weight")}
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    save_file(stored, directory / "model.safetensors")
    with (
        NumpyEngine(
            MAIN, draft=draft_model, channel=directory, num_ranks=NUM_RANKS, load_strategy="ipc_snapshot"
        ) as engine,
        BoardClient(engine.port) as client,
    ):
        client.update()
        found = live(engine)
        assert found[::2] == [bytes_of(MAIN, main, rank) for rank in range(NUM_RANKS)]
        assert found[1::2] == [bytes_of(draft_model, draft, rank) for rank in range(NUM_RANKS)]


# --- neither changes ----------------------------------------------------------------------------------


def test_an_uncovered_or_half_covered_model_is_refused_and_neither_changes(channel: Path) -> None:
    good, other = both(1), both(2)
    incomplete = {
        r"draft/embed: missing[^|]*draft/k: missing \(part of draft/qk\)": other[0],
        r"draft/k: missing \(part of draft/qk\)": {n: v for n, v in together(other).items() if n != "draft/k"},
        "embed: missing.*norm: missing": namespaced(other[1], "draft"),
        "drafd/norm: not a tensor of this model": together(good) | namespaced({"norm": other[1]["norm"]}, "drafd"),
    }
    axes_of_all = by_namespace(as_the_engine, draft=as_the_engine, drafd=as_the_engine)
    with (
        start(channel) as engine,
        WeightPublisher(channel) as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, together(good), 1)
        before = client.update()
        calls = [engine.ask(rank, f"{prefix}calls") for rank in range(NUM_RANKS) for prefix in ("", "draft ")]
        for step, (message, tensors) in enumerate(incomplete.items(), 2):
            publisher.publish(tensors, step=step, convention=axes_of_all)
            with pytest.raises(CoverageError, match=f"(?s){message}"):
                client.update()
            assert live(engine) == expected(good)
        assert client.status().version == before.version
        assert client.receipt(recompute=True) == before.receipt
        now = [engine.ask(rank, f"{prefix}calls") for rank in range(NUM_RANKS) for prefix in ("", "draft ")]
        assert [[c for c in each if c == "bind"] for each in now] == [
            [c for c in each if c == "bind"] for each in calls
        ]


@pytest.mark.parametrize(
    ("apply_mode", "fault"),
    [
        ("auto", "draft refuse one bind"),
        ("auto", "refuse one bind"),
        ("auto", 'fault {"act": "raise", "step": "recapture_graphs", "when": "end"}'),
        ("copy", 'fault {"act": "raise", "step": "install", "when": "end"}'),
    ],
)
def test_a_fault_brings_both_models_back_to_the_bit(channel: Path, apply_mode: str, fault: str) -> None:
    """One rank fails, in one of its models or after both were swapped: all ranks hold the old version of both."""
    a, b = both(1), both(2)
    with (
        start(channel, apply_mode=apply_mode, module="fastdeploy_rl.testing.faulty_worker") as engine,
        WeightPublisher(channel) as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, together(a), 1)
        before = client.update()
        publish(publisher, together(b), 2)
        assert engine.ask(1, fault) in ("refusing", "armed")
        with pytest.raises(StepFailedError):
            client.update()
        assert live(engine) == expected(a)
        assert client.status().version == before.version
        assert client.receipt(recompute=True) == before.receipt
        client.update()
        assert live(engine) == expected(b)


# --- asleep and awake ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_draft_frozen", [False, True])
def test_both_models_sleep_and_wake_and_a_frozen_one_stays_where_it_is(channel: Path, is_draft_frozen: bool) -> None:
    a, b = ((random_weights(MAIN, seed), random_weights(DRAFT, 1 if is_draft_frozen else seed)) for seed in (1, 2))

    def trained(weights: tuple[Weights, Weights]) -> Weights:
        return weights[0] if is_draft_frozen else together(weights)

    with (
        start(channel, is_draft_frozen=is_draft_frozen) as engine,
        WeightPublisher(channel) as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, trained(a), 1)
        client.update(kv="keep")
        for level in (1, 2):
            client.sleep(level=level)
            assert live(engine)[::2] == [{}] * NUM_RANKS
            assert live(engine)[1::2] == (expected(a)[1::2] if is_draft_frozen else [{}] * NUM_RANKS)
            if level == 2:
                publish(publisher, trained(b), 2)
            client.wake()
            assert live(engine) == expected(a if level == 1 else b)
        calls = engine.ask(0, "draft calls")
        assert calls.count("bind") == (1 if is_draft_frozen else 4)
        assert calls.count("keep_kv_cache") == 1
        assert calls[-1] == "version 1.2"


# --- a frozen draft -----------------------------------------------------------------------------------


def test_a_frozen_draft_is_bound_at_its_start_and_never_again(channel: Path) -> None:
    """Updates neither ask for it nor take it; it is there after a clear, and after its rank was started anew."""
    a, b = random_weights(MAIN, 1), random_weights(MAIN, 2)
    with (
        start(channel, is_draft_frozen=True, is_restarted_on_death=True) as engine,
        WeightPublisher(channel) as publisher,
        BoardClient(engine.port) as client,
    ):
        held = live(engine)[1::2]
        assert held == [bytes_of(DRAFT, random_weights(DRAFT, 1), rank) for rank in range(NUM_RANKS)]
        for step, weights in enumerate([a, b, a], 1):
            publish(publisher, weights, step)
            assert client.update().receipt.read.keys() == a.keys()
        publish(publisher, together(both(3)), 4)
        with pytest.raises(CoverageError, match="draft/norm: frozen in this engine, cannot be published"):
            client.update()
        client.clear()
        publish(publisher, b, 5)
        client.update()
        expected_now = [bytes_of(MAIN, b, rank) for rank in range(NUM_RANKS)]
        assert (live(engine)[::2], live(engine)[1::2]) == (expected_now, held)
        kill(engine, 1)
        await_recovery(engine, client, 1)
        assert (live(engine)[::2], live(engine)[1::2]) == (expected_now, held)
        for rank in range(NUM_RANKS):
            calls = engine.ask(rank, "draft calls")
            assert [call for call in calls if "bind" in call] == ["bind"]
