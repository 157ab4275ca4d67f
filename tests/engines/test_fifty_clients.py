"""Fifty clients stream while an engine of two ranks takes twenty versions over, in every way there is: each token of
each answer is held against what the version that it is stamped with makes of everything before it."""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path

from lively_model import SETTINGS, lively_weights, write_lively_model
from served_engine import ServedEngine
from streaming_clients import StreamingClients
from switching_reference import Version, disagreements

from fastdeploy_rl.config import ABORT, KEEP, REBUILD, WAIT
from fastdeploy_rl.control.controller import EngineController
from fastdeploy_rl.engines.embedded.page_allocator import PAGE_TOKENS
from tests.process.trainer import Trainer

NUM_CLIENTS, NUM_UPDATES, NUM_RUNNING = 50, 20, 16
PROMPTS = [[(3 * place) % 250 for place in range(2 * PAGE_TOKENS)] + [number] for number in range(7)] + [[5, 6], [8]]
LENGTHS = (16, 48, 80, 33)
TOKENS_EACH = 100


def update(control: EngineController, kv: str, in_flight: str) -> None:
    control.update(kv=kv, in_flight=in_flight)


def update_while_paused(control: EngineController, kv: str, mode: str) -> None:
    control.pause(mode)
    control.update(kv=kv)
    control.resume()


def update_and_offload(control: EngineController, kv: str, mode: str) -> None:
    """Weights go to the host and come back; keys and values stay."""
    control.update(kv=kv, in_flight=KEEP)
    control.sleep("weight", level=1, mode=mode)
    control.wake("weight")


def update_by_waking(control: EngineController, kv: str, mode: str) -> None:
    """Weights are dropped, and the newest version comes in their place."""
    control.sleep("weight", level=2, mode=mode)
    control.wake(kv=kv)


def update_and_drop_all(control: EngineController, kv: str, mode: str) -> None:
    control.update(kv=kv, in_flight=KEEP)
    control.sleep(level=2, mode=mode)
    control.wake()


Round = tuple[Callable[[EngineController, str, str], None], str, str]
# Where keys and values were dropped under requests that go on, a rebuild comes before and after: a request that has not
# had its turn in between computes them anew, and says nothing of it.
ROUNDS: tuple[Round, ...] = (
    (update, REBUILD, KEEP),
    (update, KEEP, KEEP),
    (update, KEEP, ABORT),
    (update, KEEP, WAIT),
    (update_while_paused, KEEP, KEEP),
    (update_while_paused, REBUILD, WAIT),
    (update_while_paused, KEEP, ABORT),
    (update_while_paused, REBUILD, KEEP),
    (update_and_offload, KEEP, KEEP),
    (update_and_offload, REBUILD, WAIT),
    (update_by_waking, KEEP, KEEP),
    (update_by_waking, REBUILD, ABORT),
    (update_and_drop_all, KEEP, ABORT),
    (update_and_drop_all, REBUILD, KEEP),
)


def test_every_token_of_fifty_clients_is_that_of_its_version(tmp_path: Path) -> None:
    model = write_lively_model(tmp_path / "tiny", seed=0)
    versions = {"0.0": Version(model.weights)}
    options = ("--max-num-seqs", str(NUM_RUNNING))
    with ServedEngine(model, tmp_path, num_ranks=2, options=options, is_poisoned=True) as engine:
        engine.await_ready()
        clients = StreamingClients(engine.port, NUM_CLIENTS, PROMPTS, LENGTHS)
        version = "0.0"
        with Trainer("ipc", engine.channel) as trainer, clients.running():
            for step, (take_over, kv, mode) in zip(range(1, NUM_UPDATES + 1), cycle(ROUNDS), strict=False):
                clients.await_tokens(version, TOKENS_EACH)
                weights = lively_weights(model.directory, step)
                version = str(trainer.publish(weights, step=step).version)
                versions[version] = Version(weights, kv == KEEP)
                take_over(engine.control, kv, mode)
                assert engine.control.status().version == version
            clients.await_tokens(version, TOKENS_EACH)
    answers = clients.answers
    assert [problem for answer in answers for problem in disagreements(SETTINGS, versions, answer)] == []
    assert {span.version for answer in answers for span in answer.spans} == versions.keys()
    assert {answer.finish_reason for answer in answers} == {"length", "abort"}
    assert all(len(answer.tokens) in LENGTHS for answer in answers if answer.finish_reason == "length")
    kept = [span.version for answer in answers for span in answer.spans[1:]]
    assert {versions[version].keeps_kv for version in kept} == {True, False}
    assert all(reason.startswith("503") for reason in clients.refusals)
