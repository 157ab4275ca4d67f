"""The drop-in class as those use it who construct FastDeploy's weight manager themselves: one rank, main and draft
model, no runner of FastDeploy's behind it."""

import inspect
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastdeploy_rl import WeightPublisher
from fastdeploy_rl.board.legacy import WEIGHTS_WORD, StatusWord, create_words, unlink_words
from fastdeploy_rl.engines.fastdeploy.weight_manager import DynamicWeightManager
from fastdeploy_rl.errors import ConfigurationError, CoverageError, NoPublicationError, NotServingError
from fastdeploy_rl.lifecycle import LegacyStatus
from fastdeploy_rl.memory.shared_segment import SHM_DIR
from tests.engines.fastdeploy.standin.config import EngineLine, FDConfig
from tests.engines.fastdeploy.standin.model_loader import DRAFT, MODEL, StandinModel
from tests.engines.fastdeploy.standin.trainer import Weights, as_the_engine, random_weights
from tests.process.numpy_engine import free_port

CONTRACT = {
    "update_parameters": ["pid", "restart_process_group"],
    "clear_parameters": ["pid", "shutdown_process_group"],
    "finalize_update": ["pid"],
    "update_weights_by_rdma": ["version", "verify_checksum"],
    "reload_model_weights": [],
    "clear_model_weight": [],
    "restart_communication_group": [],
    "clear_communication_group": [],
    "recreate_deepep_buffer": [],
    "clear_deepep_buffer": [],
}
"""FastDeploy's names and arguments; each argument of a call has a default."""


class Engine:
    """`models`: without memory, as FastDeploy makes them under LazyGuard."""

    def __init__(self, channel: Path, publisher: WeightPublisher) -> None:
        self.port, self._publisher = free_port(), publisher
        self.models = [StandinModel(MODEL, 1), StandinModel(DRAFT, 1)]
        options = {"fastdeploy_rl": {"channel": str(channel), "metas_dir": "", "update_s": 10, "clear_s": 10}}
        self.config = FDConfig(EngineLine(self.port, 0, 1, "ipc", str(channel), options, "", mtp=True))
        self.step = 0

    def publish(self, *, without: str | None = None) -> Weights:
        self.step += 1
        weights = random_weights(self.step, mtp=True)
        given = {name: value for name, value in weights.items() if name != without}
        self._publisher.publish(given, step=self.step, convention=as_the_engine)
        return weights

    def store(self, status: LegacyStatus) -> None:
        with closing(StatusWord(WEIGHTS_WORD, self.port)) as word:
            word.store(status)

    def word(self) -> int:
        with closing(StatusWord(WEIGHTS_WORD, self.port)) as word:
            return word.load()

    def holds(self, weights: Weights) -> bool:
        held = {**self.models[0].state_dict(), **{f"mtp/{k}": v for k, v in self.models[1].state_dict().items()}}
        return held.keys() == weights.keys() and all(
            tensor._is_initialized() and np.array_equal(tensor.numpy(), weights[name]) for name, tensor in held.items()
        )

    def is_empty(self) -> bool:
        return not any(tensor._is_initialized() for model in self.models for tensor in model.state_dict().values())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with WeightPublisher(tmp_path / "channel") as publisher:
        engine = Engine(tmp_path / "channel", publisher)
        create_words(engine.port)
        try:
            yield engine
        finally:
            unlink_words(engine.port)


@pytest.fixture
def manager(engine: Engine) -> Iterator[DynamicWeightManager]:
    """On version 1.1."""
    engine.publish()
    with closing(DynamicWeightManager(engine.config, engine.models, 0)) as manager:
        yield manager


def test_it_has_fastdeploys_names_and_arguments() -> None:
    for name, arguments in CONTRACT.items():
        _, *parameters = inspect.signature(getattr(DynamicWeightManager, name)).parameters.values()
        assert [parameter.name for parameter in parameters] == arguments
        assert all(parameter.default is not inspect.Parameter.empty for parameter in parameters)
    signature = inspect.signature(DynamicWeightManager)
    assert list(signature.parameters)[:3] == ["fd_config", "models", "local_rank"]
    assert list(inspect.signature(DynamicWeightManager.check_model_weights_status).parameters) == [
        *("model_weights_status", "kv_cache_status", "model_runner", "pid", "block")
    ]


def test_it_brings_the_first_weights_by_itself(engine: Engine) -> None:
    weights = engine.publish()
    with closing(DynamicWeightManager(engine.config, engine.models)) as manager:
        manager.finalize_update(engine.port)
        assert engine.holds(weights)
        assert (manager.rank, manager.nranks, manager.first_load) == (0, 1, False)


def test_without_weights_it_cannot_be_made_and_leaves_nothing(engine: Engine) -> None:
    with pytest.raises(NoPublicationError):
        DynamicWeightManager(engine.config, engine.models, 0)
    assert engine.is_empty()
    assert not Path(SHM_DIR, f"fastdeploy_rl_board.{engine.port}").exists()


def test_the_words_commands_are_followed(engine: Engine, manager: DynamicWeightManager) -> None:
    engine.store(LegacyStatus.CLEARING)
    manager.clear_parameters(engine.port)
    assert (engine.word(), engine.is_empty()) == (LegacyStatus.CLEARED, True)
    with pytest.raises(NotServingError):
        manager.finalize_update(engine.port)
    weights = engine.publish()
    engine.store(LegacyStatus.UPDATING)
    manager.update_parameters(engine.port)
    manager.finalize_update(engine.port)
    assert engine.holds(weights)
    assert engine.word() == LegacyStatus.NORMAL


def test_without_a_word_each_call_is_a_command(engine: Engine, manager: DynamicWeightManager) -> None:
    weights = engine.publish()
    manager.update_parameters()
    assert engine.holds(weights)
    manager.clear_parameters()
    assert engine.is_empty()
    manager.update_parameters()
    assert engine.holds(weights)


def test_what_is_refused_is_raised_and_the_old_weights_stay(engine: Engine, manager: DynamicWeightManager) -> None:
    weights = random_weights(1, mtp=True)
    engine.publish(without="mtp/eh_proj.weight")
    for call in (manager.update_parameters, manager.update_weights_by_rdma):
        with pytest.raises(CoverageError, match=r"mtp/eh_proj\.weight: missing"):
            call()
        assert engine.holds(weights)


def test_an_update_by_version_returns_what_fastdeploys_does(engine: Engine, manager: DynamicWeightManager) -> None:
    weights = engine.publish()
    found = manager.update_weights_by_rdma("2", verify_checksum=True)
    assert engine.holds(weights)
    assert list(found) == ["sync_cost", "update_cost", "total_cost", "version", "rank"]
    assert (found["version"], found["rank"]) == ("1.2", 0)
    assert found["total_cost"] == pytest.approx(found["sync_cost"] + found["update_cost"])


def test_weights_go_and_the_newest_come(engine: Engine, manager: DynamicWeightManager) -> None:
    manager.clear_model_weight()
    assert engine.is_empty()
    weights = engine.publish()
    manager.reload_model_weights()
    assert engine.holds(weights)


def test_weights_that_slept_come_back_without_their_trainer(engine: Engine, manager: DynamicWeightManager) -> None:
    manager.sleep("weight")
    assert engine.is_empty()
    assert manager.is_weight_asleep
    manager.wakeup("weight")
    assert engine.holds(random_weights(1, mtp=True))


@pytest.mark.parametrize("tags", ["weights", "", "weight,", None])
def test_what_is_no_tag_is_refused(engine: Engine, manager: DynamicWeightManager, tags: Any) -> None:
    with pytest.raises(ConfigurationError):
        manager.sleep(tags)
    assert engine.holds(random_weights(1, mtp=True))


def test_the_loop_of_the_contract_calls_its_runner_until_the_word_is_normal() -> None:
    calls, word, kv_word = [], np.array([-1], np.int32), np.array([0], np.int32)

    def clear(pid: int) -> None:
        calls.append(("clear", pid, int(kv_word[0])))
        word[0] = 1

    def update(pid: int) -> None:
        calls.append(("update", pid, int(kv_word[0])))
        word[0] = 0

    runner = SimpleNamespace(
        clear_requests=lambda: calls.append("requests"), clear_parameters=clear, update_parameters=update
    )
    signals = SimpleNamespace(value=word), SimpleNamespace(value=kv_word)
    DynamicWeightManager.check_model_weights_status(*signals, runner, 7, True)
    assert calls == ["requests", ("clear", 7, -1), "requests", ("update", 7, 1)]
