"""The scenes of `test_real_faults.py`, in FastDeploy's process: each is played the same way on a stock worker and on
one with the plugin, and says what there was to see. Nothing is judged here."""

import asyncio
import itertools
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import paddle
from fastdeploy.engine.common_engine import EngineService
from fastdeploy.entrypoints.engine_client import EngineClient
from fastdeploy.inter_communicator import IPCSignal
from fastdeploy.spec_decode import SpecMethod

from fastdeploy_rl import EngineController
from fastdeploy_rl.errors import FastDeployRLError
from fastdeploy_rl.sources.described import DescribedSource
from fastdeploy_rl.update.client import BoardClient
from tests.engines.fastdeploy.real_engine import (
    Engine,
    patched,
    scene_directory,
    shapes,
    started,
    weights,
    write_snapshot,
)
from tests.engines.fastdeploy.real_trainer import RealTrainer
from tests.process.fastdeploy_trainer import FastDeployTrainer

Facts = dict[str, Any]
_MOMENT_S = 1.0
"""So long it is watched whether something that must not happen, or never ends, does."""


def _facts(engine: Engine) -> Facts:
    facts: Facts = {
        "word": engine.load(),
        "loop": engine.last_line or "runs",
        "values": engine.first_values(),
        "reason": "",
    }
    if engine.kind == "ours":
        facts["reason"] = _reason(engine.port)
    return facts


def _reason(port: int) -> str:
    """Of the last command, as the board tells it."""
    with BoardClient(port) as client:
        return client.last_report().reason


def _update(engine: Engine, within_s: float = 10.0) -> Facts:
    """As a legacy trainer does; until the word has an end, or the loop has."""
    engine.store(1)
    engine.await_word(0, -2, within_s=within_s)
    return _facts(engine)


# 1 ----------------------------------------------------------------------------------------------------


def second_tensor_has_another_shape(kind: str, path: str, port: int) -> Facts:
    with started(kind, path, port) as engine:
        bad = weights(2, 2) | {"b.weight": np.full((2, 2), 2, np.float32)}
        write_snapshot(Path(path), bad, 2)
        return _update(engine)


# 2 ----------------------------------------------------------------------------------------------------


def names_are_missing_or_unknown(kind: str, path: str, port: int) -> Facts:
    with started(kind, path, port) as engine:
        sent = {name: array for name, array in weights(2, 2).items() if name != "b.weight"}
        write_snapshot(Path(path), sent | {"c.weight": np.ones((2, 2), np.float32)}, 2)
        return _update(engine)


# 3 ----------------------------------------------------------------------------------------------------


def nothing_is_there_to_load(kind: str, path: str, port: int) -> Facts:
    with started(kind, path, port) as engine:
        (Path(path) / "model_state.tp0.0.pdparams").unlink()
        (Path(path) / "version.yaml").write_text("step: 2\nversion: 2\n")
        facts = _update(engine)
        turns = engine.tasks.num_turns
        facts["decodes"] = engine.await_that(lambda: engine.tasks.num_turns > turns + 10, _MOMENT_S)
        return facts


def one_of_two_ranks_has_nothing_to_load(kind: str, path: str, port: int) -> Facts:
    with started(kind, path, port, num_ranks=2) as engine:
        write_snapshot(Path(path), weights(2, 2), 2)
        (Path(path) / "model_state.tp1.0.pdparams").unlink()
        facts = _update(engine, within_s=_MOMENT_S)
        turns = engine.tasks.num_turns
        facts["decodes"] = engine.await_that(lambda: engine.tasks.num_turns > turns + 10, _MOMENT_S)
        facts["rank 1"] = engine.ranks[1].last_line or "runs"
        return facts | {"rank 0 values": engine.first_values(0), "rank 1 values": engine.first_values(1)}


# 4 ----------------------------------------------------------------------------------------------------


def trainer_writes_between_read_and_write_back(kind: str, path: str, port: int) -> Facts:
    """The worker has read CLEARING; before it goes on, its trainer thinks better of it and asks for an update."""
    with started(kind, path, port) as engine:
        write_snapshot(Path(path), weights(2, 2), 2)
        seen = []

        def change_of_mind() -> None:
            if engine.process.model_weights_signal[0] == -1 and not seen:
                seen.append(engine.load())
                engine.store(1)

        engine.tasks.at_each_turn = change_of_mind
        engine.store(-1)
        engine.await_that(lambda: bool(seen))
        engine.await_word(0, -2)
        engine.await_that(lambda: engine.load() == 0, _MOMENT_S)
        return _facts(engine) | {
            "stores": [-1, 1],
            "freed": any(event == "cache_freed" for event, _ in engine.runner.events),
        }


def controller_asks_meanwhile(path: str, port: int) -> Facts:
    """The same, but what comes in between is asked for over the board. There is no such thing for stock."""
    with started("ours", path, port) as engine, EngineController(port) as controller, ThreadPoolExecutor(1) as pool:
        write_snapshot(Path(path), weights(2, 2), 2)
        asked: list[Future[Any]] = []

        def ask() -> None:
            if engine.process.model_weights_signal[0] == -1 and not asked:
                asked.append(pool.submit(controller.update, deadline_s=3.0))

        engine.tasks.at_each_turn = ask
        engine.store(-1)
        engine.await_that(lambda: bool(asked))
        try:
            return {"outcome": asked[0].result(20).outcome}
        except FastDeployRLError as error:
            return {"outcome": f"refused: {error}"}


# 5 ----------------------------------------------------------------------------------------------------


def engine_is_cleared(kind: str, path: str, port: int) -> Facts:
    with started(kind, path, port) as engine:
        engine.store(-1)
        engine.await_word(-2)
        has_caches = engine.has_caches
        engine.await_that(lambda: bool(engine.runner.events), _MOMENT_S)
        words = [word for event, word in engine.runner.events if event == "cache_freed"]
        return _facts(engine) | {"word when the cache was freed": words[0], "caches after": has_caches}


# 6 ----------------------------------------------------------------------------------------------------


class _Trap:
    def __init__(self, marker: str) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self._marker,)


def shared_directory_has_code(kind: str, path: str, port: int) -> Facts:
    """A pickle in the place of the trainer's metadata."""
    directory = scene_directory(path)
    marker = directory / "executed"
    with _ipc_engine(kind, path, port) as (engine, _):
        (directory / "metas" / "ipc_metas_0").write_bytes(pickle.dumps({"a.weight": _Trap(str(marker))}, 2))
        (directory / "version.yaml").write_text("step: 2\nversion: 2\n")
        return _update(engine) | {"executed": marker.exists()}


Overwrite = Callable[[dict[str, np.ndarray]], None]
"""The trainer writes into the memory that it lent."""


@contextmanager
def _ipc_engine(kind: str, path: str, port: int) -> Iterator[tuple[Engine, Overwrite]]:
    """Load strategy `ipc`, on metadata that a trainer wrote. For ours it is a process with a CUDA driver that needs no
    GPU; for stock, which calls Paddle for CUDA, it is this one, and a handle is a name of its tensor."""
    directory = scene_directory(path)
    (directory / "version.yaml").write_text("step: 1\nversion: 1\n")
    lend = _lent_by_a_process if kind == "ours" else _lent_by_this_process
    with lend(directory / "metas") as overwrite, Engine(kind, directory, port, load_strategy="ipc") as engine:
        engine.raise_ended()
        yield engine, overwrite


@contextmanager
def _lent_by_a_process(metas: Path) -> Iterator[Overwrite]:
    with FastDeployTrainer({}) as trainer:
        trainer.write(metas / "ipc_metas_0", weights(1, 1))
        yield lambda tensors: trainer.overwrite(metas / "ipc_metas_0", tensors)


@contextmanager
def _lent_by_this_process(metas: Path) -> Iterator[Overwrite]:
    memory = {name: paddle.to_tensor(array) for name, array in weights(1, 1).items()}
    rows = {
        name: [name, 0, 4 * math.prod(tensor.shape), 10, list(tensor.shape), [], 0] for name, tensor in memory.items()
    }
    (metas / "ipc_metas_0").write_bytes(pickle.dumps(rows, 2))
    load = paddle.load

    def load_elsewhere(file: str, **more: Any) -> Any:
        return load(str(file).replace("/shared_ipc_meta", str(metas)), **more)

    def overwrite(tensors: dict[str, np.ndarray]) -> None:
        for name, array in tensors.items():
            memory[name][...] = paddle.to_tensor(array)

    opened = SimpleNamespace(_new_shared_cuda=lambda row: memory[row[0].decode("latin-1")].value().get_tensor())
    with patched(paddle.base.core, LoDTensor=opened), patched(paddle, load=load_elsewhere):
        yield overwrite


# 7 ----------------------------------------------------------------------------------------------------


def files_of_an_older_step(kind: str, path: str, port: int) -> Facts:
    """As another trainer, or one that started again from a checkpoint, leaves them."""
    with started(kind, path, port) as engine:
        for step in (5, 3):
            write_snapshot(Path(path), weights(2 if step == 5 else 3, 2 if step == 5 else 3), step)
            facts = _update(engine)
        return facts


def a_byte_of_a_snapshot_flips(kind: str, path: str, port: int) -> Facts:
    """For stock its own files, which have no checksums. Ours: a snapshot that a trainer with this package writes."""
    with started(kind, path, port) as engine:
        file = _publish(Path(path), 2.0) if kind == "ours" else _stock_file(Path(path), 2.0)
        data = bytearray(file.read_bytes())
        data[-1] ^= 0x01  # of the exponent of the last tensor's last element
        file.write_bytes(data)
        facts = _update(engine)
        live = {name: tensor.numpy() for name, tensor in engine.runner.model.state_dict().items()}
        is_served = any((array != array.ravel()[0]).any() for array in live.values())
        return facts | {"flipped": "served" if is_served else "not served"}


def _stock_file(directory: Path, value: float) -> Path:
    write_snapshot(directory, weights(value, value), 2)
    return directory / "model_state.tp0.0.pdparams"


def _publish(directory: Path, value: float) -> Path:
    from fastdeploy_rl import WeightPublisher
    from fastdeploy_rl.publish.snapshot_writer import SnapshotWriter

    for file in ("model_state.tp0.0.pdparams", "version.yaml"):
        (directory / file).unlink()
    channel = directory / "channel"
    with WeightPublisher(channel) as publisher, SnapshotWriter(channel) as snapshots:
        published = publisher.publish(weights(value, value), step=2)
        snapshots.write(published)
        snapshots.wait(20.0)
    return next(file for file in sorted((channel / "snapshots").rglob("*")) if file.suffix == ".safetensors")


def trainer_goes_on_writing(kind: str, path: str, port: int) -> Facts:
    """After the update, into the memory that it lent."""
    with _ipc_engine(kind, path, port) as (engine, overwrite):
        engine.await_that(engine.has_decoded_live)
        overwrite({"a.weight": np.full_like(weights(1, 1)["a.weight"], 7.0)})
        engine.await_that(lambda: engine.last_decoded() == (7.0, 1.0), _MOMENT_S)
        return _facts(engine) | {"decoded with": engine.last_decoded()[0]}


# 8 ----------------------------------------------------------------------------------------------------


def weights_sleep_and_wake_over_rsync(kind: str, path: str, port: int) -> Facts:
    with _rsync_engine(kind, path, port) as engine:
        asleep = engine.control("sleep", tags="weight")
        awake = engine.control("wakeup", tags="weight")
        return _facts(engine) | {"sleep": asleep, "wakeup": awake}


def a_second_tag_sleeps_after_the_first(kind: str, path: str, port: int) -> Facts:
    with started(kind, path, port, is_v1=True) as engine:
        first = engine.control("sleep", tags="weight")
        both = engine.control("sleep", tags="weight,kv_cache")
        return _facts(engine) | {"first": first["code"], "both": both["code"], "caches": engine.has_caches}


def kv_cache_alone_sleeps_and_wakes(kind: str, path: str, port: int) -> Facts:
    with started(kind, path, port, is_v1=True, use_cudagraph=True) as engine:
        engine.runner.captured.clear()
        engine.runner.model.graphs_cleared = 0
        sleep = engine.control("sleep", tags="kv_cache")
        wakeup = engine.control("wakeup", tags="kv_cache")
        graphs = {"cleared": engine.runner.model.graphs_cleared, "captured": len(engine.runner.captured)}
        return _facts(engine) | {"sleep": sleep["code"], "wakeup": wakeup["code"], "graphs": graphs}


# 9 ----------------------------------------------------------------------------------------------------


def engine_gives_up_and_resumes() -> Facts:
    """FastDeploy's engine side, as far as it decides: a worker that does not answer in time, then a resume."""
    engine = EngineService.__new__(EngineService)
    engine._pause_cond, engine.is_paused = threading.Condition(), True
    engine.llm_logger = SimpleNamespace(info=print, error=print, warning=print)
    engine.cfg = SimpleNamespace(cache_config=SimpleNamespace(num_cpu_blocks=0, kvcache_storage_backend=None))
    never = SimpleNamespace(get=_never)
    engine._ctrl_output_queues, engine._ctrl_response_mailboxes = {"ctrl_w2e_rank0_1": never}, {"ctrl_w2e_rank0_1": {}}
    try:
        asyncio.run(engine._wait_for_control_responses("1", timeout=0.2, executors=["worker"]))
        outcome = "answered"
    except Exception as error:
        outcome = f"raised {error}"
    engine._control_resume(SimpleNamespace(request_id="2"))
    return {"update": outcome, "is_paused": engine.is_paused}


async def _never() -> None:
    await asyncio.Event().wait()


def front_end_gives_up(kind: str, path: str, port: int) -> Facts:
    """The legacy route with a limit of a second, while what loads takes longer: then what comes of the update. Ours has
    a deadline of its own, which is as short here as that route's five minutes are long."""
    with started(kind, path, port, options={"update_s": 1.5}) as engine:
        client = _client(engine)
        engine.store(-1)
        engine.await_word(-2)
        write_snapshot(Path(path), weights(2, 2), 2)
        with _slow_loads(2.0):
            code, body = client.update_model_weight(timeout=0)
            gave_up = {"code": code, "msg": body["msg"], "word": engine.load()}
            engine.await_that(lambda: engine.load() != 1, 10.0)
            time.sleep(_MOMENT_S)  # long enough for what was loaded to be taken over after all
        return _facts(engine) | {"gave up": gave_up, "caches": engine.has_caches}


@contextmanager
def _slow_loads(seconds: float) -> Iterator[None]:
    """Stock loads by `paddle.load`, ours by its source."""
    load, stage = paddle.load, DescribedSource.stage

    def slowly(function: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            time.sleep(seconds)
            return function(*arguments, **more)

        return call

    with patched(paddle, load=slowly(load)), patched(DescribedSource, stage=slowly(stage)):
        yield


def second_tensor_cannot_be_taken(kind: str, path: str, port: int) -> Facts:
    """V1, in the middle of what changes the model: the second tensor fails, as where memory has run out. FastDeploy is
    paused and resumed by its engine, which does not look; the loop here decodes all the time."""
    with _rsync_engine(kind, path, port) as engine:
        engine.await_that(engine.has_decoded_live)
        with _failing_at(2):
            answer = engine.control("update_weights", version="2", verify_checksum=True)
        engine.await_that(lambda: engine.last_decoded() != (1.0, 1.0), _MOMENT_S)
        return _facts(engine) | {"answer": answer, "decoded with": engine.last_decoded()}


@contextmanager
def _failing_at(call: int) -> Iterator[None]:
    """Both ways in which a parameter takes new bytes on a CPU."""
    calls = itertools.count(1)

    def failing(function: Any) -> Any:
        def take(*arguments: Any) -> Any:
            if next(calls) == call:
                raise MemoryError("out of memory")
            return function(*arguments)

        return take

    ways = {name: failing(getattr(paddle.Tensor, name)) for name in ("set_value", "_share_buffer_to")}
    with patched(paddle.Tensor, **ways):
        yield


def _client(engine: Engine) -> Any:
    """FastDeploy's EngineClient without its sockets."""
    client = EngineClient.__new__(EngineClient)
    client.clear_update_lock = threading.Lock()
    client.model_weights_status_signal = engine.word
    client.kv_cache_status_signal = engine.signals["kv_cache_status"]
    client.prefix_tree_status_signal = engine.signals["prefix_tree_status"]
    client.enable_cache_transfer = client.enable_prefix_caching = False
    client.data_parallel_info = {}
    return client


# 10 ---------------------------------------------------------------------------------------------------


class _Stream:
    """The closed package `checkpoint_transfer`, as far as FastDeploy calls it."""

    width = 3

    def __init__(self, directory: str, local_rank: int, group_size: int) -> None:
        pass

    def initialize(self) -> None:
        pass

    def receive_stream(self, step_id: str, verify_checksum: bool) -> Iterator[tuple[str, Any]]:
        for name, shape in shapes(_Stream.width).items():
            yield name, paddle.full(shape, float(step_id))


@contextmanager
def _rsync_engine(kind: str, path: str, port: int, width: int = 3) -> Iterator[Engine]:
    package = ModuleType("checkpoint_transfer")
    package.__spec__, package.__path__ = ModuleSpec("checkpoint_transfer", None), []
    package.CheckpointTransfer = _Stream
    directory = scene_directory(path)
    (directory / "version.yaml").write_text("step: 1\nversion: 1\n")
    chosen = {"load_strategy": "rsync", "rsync_config": {"directory": str(directory)}, "width": width}
    sys.modules["checkpoint_transfer"], _Stream.width = package, width
    try:
        with Engine(kind, directory, port, is_v1=True, **chosen) as engine:
            engine.raise_ended()
            yield engine
    finally:
        del sys.modules["checkpoint_transfer"]


_WIDE = 1 << 21
"""Columns of a model of 56 MiB."""


def state_dict_streams_in(kind: str, path: str, port: int) -> Facts:
    """The most memory that the process has while it takes over a version, beyond what it has before: the second time,
    so that what is kept from one update to the next is there."""
    with _rsync_engine(kind, path, port, width=_WIDE) as engine:
        return _measured(engine, lambda step: engine.control("update_weights", version=str(step))["code"])


def state_dict_comes_over_tcp(path: str, port: int) -> Facts:
    """As above, from a server of ours that another process runs."""
    directory = scene_directory(path)
    chosen = {"load_strategy": "rsync", "rsync_config": {"transport": "tcp"}, "width": _WIDE}
    with RealTrainer(directory / "channel", _WIDE) as trainer:
        trainer.publish(1)
        with Engine("ours", directory, port, is_v1=True, **chosen) as engine:
            engine.raise_ended()

            def update(step: int) -> int:
                trainer.publish(step)
                return int(engine.control("update_weights")["code"])

            return _measured(engine, update)


def _measured(engine: Engine, update: Callable[[int], int]) -> Facts:
    update(2)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    code = update(3)
    model = sum(4 * math.prod(shape) for shape in shapes(_WIDE).values())
    return _facts(engine) | {"code": code, "beyond": _memory("VmHWM") - before, "model": model}


def _memory(field: str) -> int:
    """Bytes."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


# 11 ---------------------------------------------------------------------------------------------------


def main_and_mtp_have_a_name_in_common(kind: str, path: str, port: int) -> Facts:
    with started(kind, path, port, spec_method=SpecMethod.MTP) as engine:
        main_was = engine.first_values()["a.weight"]
        write_snapshot(Path(path), weights(2, 2), 2)
        facts = _update(engine)
        mtp = engine.runner.proposer.model.state_dict()["a.weight"]
        return facts | {"main": facts["values"]["a.weight"], "main was": main_was, "mtp": float(mtp[0, 0])}


# 12 ---------------------------------------------------------------------------------------------------


def gpu_is_named_by_its_uuid(kind: str, path: str, port: int) -> Facts:
    directory, uuid = scene_directory(path), "GPU-11111111-aaaa-4aaa-8aaa-000000000001"
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    try:
        write_snapshot(directory, weights(1, 1), 1)
        (directory / "model_state.tp0.0.pdparams").rename(directory / f"model_state.tp0.{uuid}.pdparams")
        with Engine(kind, directory, port) as engine:
            return {"loop": engine.last_line or "runs", "values": None if engine.last_line else engine.first_values()}
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]


def signal_is_made_anew(kind: str, path: str, port: int) -> Facts:
    """As FastDeploy's engine does when it starts again: then a trainer attaches, and asks for an update."""
    with started(kind, path, port) as engine:
        write_snapshot(Path(path), weights(2, 2), 2)
        anew = IPCSignal(
            name="model_weights_status", array=np.zeros([1], np.int32), dtype=np.int32, suffix=port, create=True
        )
        anew.value[0] = 1
        turns = engine.tasks.num_turns
        engine.await_that(lambda: int(anew.value[0]) == 0, 2 * _MOMENT_S)
        engine.await_that(lambda: engine.tasks.num_turns > turns + 2, _MOMENT_S)
        facts = _facts(engine) | {"new word": int(anew.value[0])}
        anew.value[0] = 0
        return facts
