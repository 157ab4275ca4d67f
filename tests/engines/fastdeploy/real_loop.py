"""Cases of `test_real_loop.py`, in FastDeploy's process: its worker loop and its control calls around a runner."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastdeploy.plugins import load_model_runner_plugins
from fastdeploy.plugins.model_runner import PLUGINS_GROUP
from fastdeploy.plugins.utils import load_plugins_by_group

from fastdeploy_rl import EngineController
from fastdeploy_rl.engines.fastdeploy import plugin
from fastdeploy_rl.errors import FastDeployRLError
from fastdeploy_rl.update.client import BoardClient
from tests.engines.fastdeploy.real_engine import Engine, patched, started, weights, write_snapshot

Facts = dict[str, Any]
_SOON_S = 10.0


def plugins_where(allowed: str | None) -> dict[str, str]:
    """What FastDeploy's loader gives, and the module that it is of; FD_PLUGINS as it is given here."""
    before = os.environ.pop("FD_PLUGINS", None)
    try:
        if allowed is not None:
            os.environ["FD_PLUGINS"] = allowed
        return {name: made.__module__ for name, made in load_plugins_by_group(PLUGINS_GROUP).items()}
    finally:
        if before is not None:
            os.environ["FD_PLUGINS"] = before


def active_runner() -> Facts:
    """The class that FastDeploy's GpuWorker has taken."""
    from fastdeploy.worker.gpu_model_runner import GPUModelRunner
    from fastdeploy.worker.gpu_worker import ModelRunner

    return {
        "is_fastdeploys": ModelRunner is GPUModelRunner,
        "is_one_of_them": issubclass(ModelRunner, GPUModelRunner),
        "error": getattr(ModelRunner, "recorded_error", None),
    }


def broken_plugin() -> str:
    """What FastDeploy gets, and what that says, where the plugin cannot make its class."""

    def fail() -> type:
        raise OSError("no space left")

    with patched(plugin, _model_runner=fail):
        made = load_model_runner_plugins()
    try:
        made(fd_config=None, device="cpu", device_id=0, rank=0, local_rank=0)
    except RuntimeError as error:
        return str(error)
    return "made"


def _look(engine: Engine) -> Facts:
    if None not in engine.first_values().values():
        engine.await_that(engine.has_decoded_live, _SOON_S)
    return {
        "word": engine.load(),
        "values": sorted(set(engine.first_values().values()), key=str),
        "caches": engine.has_caches,
        "loop": engine.last_line or "runs",
    }


def update_clear_update(kind: str, path: str, port: int, stays_in_check: bool) -> list[Facts]:
    seen = []
    with started(kind, path, port, stays_in_check=stays_in_check) as engine:
        for step, command in ((2, 1), (2, -1), (3, 1)):
            write_snapshot(Path(path), weights(step, step), step)
            engine.store(command)
            engine.await_word(0 if command == 1 else -2)
            seen.append(_look(engine))
        engine.await_that(lambda: engine.last_decoded() == (3.0, 3.0), _SOON_S)
        return [*seen, {"decoded": engine.last_decoded()}]


def refused_while_cleared(path: str, port: int, stays_in_check: bool) -> list[Facts]:
    seen = []
    with started("ours", path, port, stays_in_check=stays_in_check) as engine:
        engine.store(-1)
        engine.await_word(-2)
        sent = {name: array for name, array in weights(2, 2).items() if name != "a.bias"}
        for tensors, step in ((sent, 2), (weights(3, 3), 3)):
            write_snapshot(Path(path), tensors, step)
            with BoardClient(port) as client:
                _update_and_await(engine, client)
                seen.append(_look(engine) | {"outcome": client.last_report().outcome})
    return seen


def _update_and_await(engine: Engine, client: BoardClient) -> None:
    """By the board: over the word FastDeploy's loop may write what it has just read."""
    num_done = client.status().commands_done
    engine.store(1)
    engine.await_that(lambda: client.status().commands_done > num_done and engine.load() != 1, _SOON_S)


def commanded_over_the_board(path: str, port: int) -> Facts:
    """While FastDeploy's loop decodes."""
    with started("ours", path, port) as engine, EngineController(port) as controller:
        write_snapshot(Path(path), weights(2, 2), 2)
        report = controller.update(deadline_s=_SOON_S)
        engine.await_that(lambda: engine.last_decoded() == (2.0, 2.0), _SOON_S)
        found = _look(engine) | {"version": report.version, "outcome": report.outcome}
        write_snapshot(Path(path), {"a.weight": weights(3, 3)["a.weight"]}, 3)
        with suppress(FastDeployRLError):
            controller.update(deadline_s=_SOON_S)
        return found | {"after a refusal": _look(engine)}


def v1_commands(path: str, port: int) -> list[Facts]:
    seen = []
    with started("ours", path, port, is_v1=True) as engine:
        write_snapshot(Path(path), weights(2, 2), 2)
        commands: list[tuple[str, dict[str, Any]]] = [
            ("update_weights", {"version": "2", "verify_checksum": True}),
            ("sleep", {"tags": "weight"}),
            ("sleep", {"tags": "weight,kv_cache"}),
            ("wakeup", {"tags": "kv_cache"}),
            ("wakeup", {"tags": "weight"}),
            ("update_weights", {"version": "9", "verify_checksum": False}),
            ("no_such_method", {}),
        ]
        for method, arguments in commands:
            answer = engine.control(method, **arguments)
            seen.append(_look(engine) | {"code": answer["code"], "result": answer["result"], "text": answer["text"]})
    return seen
