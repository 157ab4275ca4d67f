"""A worker of FastDeploy's own code on a CPU: its GPUModelRunner, GpuWorker and PaddleDisWorkerProc.event_loop_normal
over its IPCSignals, around a model of two layers. Imported in FastDeploy's process alone.

What stands in for CUDA and for compiled operators is said at each place; the rest of what runs is FastDeploy's, or the
runner that the plugin gives. `kind`: "stock" or "ours"; for ours the process has FD_PLUGINS=fastdeploy_rl."""

import itertools
import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastdeploy.model_executor.model_loader as loader_module
import fastdeploy.worker.gpu_model_runner as runner_module
import fastdeploy.worker.worker_process as worker_process
import numpy as np
import paddle
from fastdeploy.config import CacheConfig, LoadConfig, ParallelConfig
from fastdeploy.engine.request import ControlRequest
from fastdeploy.inter_communicator import IPCSignal
from fastdeploy.plugins import load_model_runner_plugins
from fastdeploy.rl.dynamic_weight_manager import DynamicWeightManager
from fastdeploy.scheduler import SchedulerConfig
from fastdeploy.worker.gpu_model_runner import GPUModelRunner
from fastdeploy.worker.model_runner_base import ModelRunnerBase
from fastdeploy.worker.worker_process import PaddleDisWorkerProc
from safetensors.numpy import save_file

_WORDS = ("model_weights_status", "kv_cache_status", "prefix_tree_status")
SOON_S = 20.0


class TinyModel(paddle.nn.Layer):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.a = paddle.nn.Linear(4, width)
        self.b = paddle.nn.Linear(width, 2)
        self.graphs_cleared = 0

    def clear_graph_opt_backend(self) -> None:
        self.graphs_cleared += 1


class _ShareInputs(dict[str, Any]):
    """FastDeploy's InputBatch pins memory, which needs CUDA."""

    num_resets = 0

    def reset_share_inputs(self) -> None:
        self.num_resets += 1

    reset_model_inputs = reset_share_inputs


class _AttentionBackend:
    def get_kv_cache_shape(self, max_num_blocks: int, kv_cache_quant_type: str | None) -> tuple[list[int], list[int]]:
        return [max_num_blocks, 1, 4, 2], [max_num_blocks, 1, 4, 2]


class _Proposer:
    """Of an MTP model, as far as a runner touches it when weights change."""

    def __init__(self) -> None:
        self.model = TinyModel()
        self.model_inputs = _ShareInputs()
        self.forward_meta = None
        self.cache_kvs_map: dict[str, Any] = {}
        self.initialize_kv_cache(8)

    def clear_mtp_cache(self, profile: bool = False) -> None:
        self.cache_kvs_map.clear()

    def initialize_kv_cache(self, main_model_num_blocks: int, profile: bool = False) -> None:
        self.cache_kvs_map["key_caches_mtp"] = paddle.zeros([main_model_num_blocks, 1, 4, 2])


class CpuModelRunner(GPUModelRunner):
    """FastDeploy's runner without its constructor, which allocates on a device; its methods for weights, KV cache and
    sleep are FastDeploy's. A forward pass notes what it would have computed with."""

    def __init__(self, fd_config: Any, device: str, device_id: int, rank: int, local_rank: int) -> None:
        ModelRunnerBase.__init__(self, fd_config=fd_config, device=device)
        self.rank, self.local_rank, self.device_id = rank, local_rank, device_id
        self.enable_mm = self.speculative_decoding = False
        self.spec_method = fd_config.speculative_config.method
        self.prompt_logprobs_reqs: dict[str, Any] = {}
        self.in_progress_prompt_logprobs: dict[str, Any] = {}
        self.forward_batch_reqs_list = [None]
        self.cache_kvs_map: dict[str, Any] = {}
        self.is_kvcache_sleeping = self.is_weight_sleeping = False
        self.use_cudagraph = fd_config.graph_opt_config.use_cudagraph
        self.cudagraph_capture_sizes = [1]
        self.share_inputs = _ShareInputs(stop_flags=paddle.ones([2, 1], "bool"))
        self.attn_backends = [_AttentionBackend()]
        self.forward_meta = None
        self.routing_replay_manager = None
        self.cache_ready_signal = SimpleNamespace(value=np.zeros(8, np.int32))
        self.enable_overlap_schedule = False
        self.current_launch_token_num = 1
        self.num_gpu_blocks = 8
        self.captured: list[dict[str, int]] = []
        self.decoded: list[tuple[float, float]] = []
        self.events: list[tuple[str, int]] = []
        self.word = fd_config.word

    def _init_speculative_proposer(self) -> None:
        self.proposer = _Proposer() if self.spec_method is not None else None

    def capture_model(self) -> None:
        self.captured.append({name: tensor.data_ptr() for name, tensor in self.model.state_dict().items()})

    def clear_cache(self, profile: bool = False) -> None:
        self.events.append(("cache_freed", int(self.word.value[0])))
        super().clear_cache(profile)

    def execute_model_normal(self, model_forward_batch: Any = None, num_running_requests: Any = None) -> None:
        model = self.model
        if model.a.weight._is_initialized() and model.b.weight._is_initialized():
            self.decoded.append((float(model.a.weight[0, 0]), float(model.b.weight[0, 0])))
        del self.decoded[:-64]
        time.sleep(0.0005)


class _TaskQueue:
    """Only commands come, the same to each rank. The engine's loop has no end of its own: it is left through here."""

    def __init__(self, num_ranks: int) -> None:
        self._commands: list[deque[ControlRequest]] = [deque() for _ in range(num_ranks)]
        self.is_stopping = threading.Event()
        self.at_each_turn: Callable[[], None] = lambda: None
        """Runs between FastDeploy's read of the word and its write."""
        self.num_turns = 0

    def put(self, command: ControlRequest) -> None:
        for commands in reversed(self._commands):
            commands.append(command)

    def of(self, rank: int) -> Any:
        """As FastDeploy's client at that rank sees it."""
        return SimpleNamespace(
            exist_tasks=self._exist_tasks,
            get_tasks=lambda: self._get_tasks(rank),
            num_tasks=lambda: 0,
            clear_data=lambda: None,
            read_finish_flag=SimpleNamespace(get=lambda: 0),
        )

    def _exist_tasks(self) -> bool:
        if self.is_stopping.is_set():
            raise _Stopped
        self.num_turns += 1
        self.at_each_turn()
        return bool(self._commands[0])

    def _get_tasks(self, rank: int) -> tuple[list[tuple[list[ControlRequest], int]], bool]:
        command = self._commands[rank].popleft()
        return [([command], 1)], not any(self._commands)


class _ThreadGroup:
    """Ranks that are threads meet here, where FastDeploy's meet through NCCL: likewise without a limit."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier, self._place = threading.Barrier(num_ranks), threading.local()
        self._told: Any = None

    def enter(self, rank: int) -> None:
        self._place.rank = rank

    def barrier(self, group: Any = None) -> None:
        self._barrier.wait()

    def broadcast(self, tensor: Any, src: int, group: Any = None) -> None:
        if self.rank() == src:
            self._told = tensor.numpy()
        self._barrier.wait()
        tensor.set_value(self._told)
        self._barrier.wait()

    def rank(self) -> int:
        return int(self._place.rank)

    def break_up(self) -> None:
        self._barrier.abort()


class _Stopped(BaseException):
    pass


class _Answers:
    """FastDeploy's queue to the engine, kept here."""

    def __init__(self) -> None:
        self.responses: queue.Queue[Any] = queue.Queue()

    async def put(self, response: Any, shm_threshold: int = 0) -> None:
        self.responses.put(response)


def shapes(width: int = 3) -> dict[str, tuple[int, ...]]:
    return {"a.weight": (4, width), "a.bias": (width,), "b.weight": (width, 2), "b.bias": (2,)}


def weights(a: float, b: float) -> dict[str, np.ndarray]:
    """Layer a's tensors are all `a`, those of b all `b`."""
    return {name: np.full(shape, a if name[0] == "a" else b, np.float32) for name, shape in shapes().items()}


def write_snapshot(directory: Path, tensors: dict[str, np.ndarray], step: int | None, rank: int = 0) -> None:
    """As stock trainers do."""
    save_file(tensors, str(directory / f"model_state.tp{rank}.0.pdparams"))
    if step is not None:
        (directory / "version.yaml").write_text(f"step: {step}\nversion: {step}\n")


def config_of(directory: Path, port: int, word: IPCSignal, **chosen: Any) -> Any:
    """FastDeploy's own configuration classes where they can be made; the rest by name."""
    strategy = chosen.get("load_strategy", "ipc_snapshot")
    rsync_config = dict(chosen.get("rsync_config") or {})
    if chosen["kind"] == "ours":
        rsync_config["fastdeploy_rl"] = {
            "channel": str(directory / "channel"),
            "metas_dir": str(directory / "metas"),
            "update_s": 10.0,
            "clear_s": 10.0,
            "copy_threads": 1,
        } | chosen.get("options", {})
    load = {"dynamic_load_weight": True, "load_strategy": strategy, "rsync_config": rsync_config}
    given = {"tensor_parallel_size": chosen.get("num_ranks", 1), "engine_worker_queue_port": str(port)}
    given["tensor_parallel_rank"] = chosen.get("rank", 0)
    parallel = ParallelConfig(given | {"shutdown_comm_group_if_worker_idle": chosen.get("stays_in_check", False)})
    parallel.local_engine_worker_queue_port = port
    parallel.tp_group = parallel.ep_group = None
    graphs = SimpleNamespace(
        use_cudagraph=chosen.get("use_cudagraph", False),
        cudagraph_capture_sizes=[1],
        graph_opt_level=0,
        full_cuda_graph=True,
    )
    model = SimpleNamespace(
        model=str(directory), architectures=["Tiny"], dtype="float32", num_hidden_layers=2, version=""
    )
    return SimpleNamespace(
        load_config=LoadConfig(load),
        parallel_config=parallel,
        model_config=model,
        cache_config=CacheConfig({}),
        scheduler_config=SchedulerConfig({"max_num_seqs": 2}),
        speculative_config=SimpleNamespace(method=chosen.get("spec_method")),
        graph_opt_config=graphs,
        eplb_config=SimpleNamespace(enable_eplb=False),
        device_config=None,
        quant_config=None,
        enable_mm_runtime=False,
        nnode=1,
        word=word,
    )


def runner_class(kind: str) -> type:
    """Stock's, or what FastDeploy's own plugin loader gives."""
    if kind == "stock":
        return CpuModelRunner
    runner_module.GPUModelRunner = CpuModelRunner
    return load_model_runner_plugins()


class Rank:
    """One worker: its loop runs in a thread, as in FastDeploy's process in the only one."""

    def __init__(self, engine: "Engine", rank: int) -> None:
        self.rank, self._engine = rank, engine
        self.ended: str | None = None
        """What came out of the loop, and would have ended the process."""
        self.is_ready = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._engine.group.enter(self.rank)
            self._load()
            self.is_ready.set()
            self.process.event_loop_normal()
        except _Stopped:
            self._engine.group.break_up()
        except threading.BrokenBarrierError:
            if not self._engine.tasks.is_stopping.is_set():
                self.ended = traceback.format_exc()
        except BaseException:
            self.ended = traceback.format_exc()
        finally:
            self.is_ready.set()

    def _load(self) -> None:
        engine = self._engine
        self.config = config_of(
            engine.directory, engine.port, engine.word, kind=engine.kind, rank=self.rank, **engine.chosen
        )
        made = runner_class(engine.kind)
        self.runner = made(
            fd_config=self.config, device="cpu", device_id=0, rank=engine.num_ranks, local_rank=self.rank
        )
        self.runner.load_model()
        self.runner.initialize_kv_cache()
        self.process = self._process()

    def _process(self) -> Any:
        """FastDeploy's process object, without its constructor, which picks a worker by platform."""
        engine = self._engine
        process = PaddleDisWorkerProc.__new__(PaddleDisWorkerProc)
        process.ranks, process.local_rank, process.max_chips_per_node = engine.num_ranks, self.rank, 8
        for part in ("parallel_config", "cache_config", "scheduler_config", "eplb_config"):
            setattr(process, part, getattr(self.config, part))
        process.fd_config, process.task_queue = self.config, engine.tasks.of(self.rank)
        process.worker = _worker(self.config, self.runner)
        process.enable_overlap_schedule, process.cached_control_reqs = False, []
        for name, signal in engine.own_signals.items():
            setattr(process, f"{name}_signal", signal)
        process.model_weights_status, process.kv_cache_status = engine.word, engine.signals["kv_cache_status"]
        process._ctrl_output = _Answers()
        return process

    def answer(self) -> dict[str, Any]:
        response = self.process._ctrl_output.responses.get(timeout=SOON_S)
        return {"code": response.error_code, "text": response.error_message, "result": response.result}

    @property
    def last_line(self) -> str | None:
        """Of what ended the loop."""
        return self.ended.strip().splitlines()[-1] if self.ended else None

    def close(self) -> None:
        manager = getattr(getattr(self, "runner", None), "dynamic_weight_manager", None)
        if self._engine.kind == "ours" and manager is not None:
            manager.close()


class Engine:
    """Workers of one engine; lives in a `with`. `is_v1`: the loop takes commands of FastDeploy's V1 routes instead of
    the status word. What is asked of one worker is asked of rank 0."""

    def __init__(self, kind: str, directory: Path, port: int, *, is_v1: bool = False, **chosen: Any) -> None:
        self.kind, self.port, self.directory, self.chosen = kind, port, directory, chosen
        self.num_ranks = chosen.get("num_ranks", 1)
        self.group = _ThreadGroup(self.num_ranks)
        self.tasks = _TaskQueue(self.num_ranks)
        self.ranks = [Rank(self, rank) for rank in range(self.num_ranks)]
        self._is_v1 = is_v1
        self._stack = ExitStack()

    def __enter__(self) -> "Engine":
        zero = np.zeros([1], np.int32)
        self.signals = {
            name: IPCSignal(name=name, array=zero, dtype=np.int32, suffix=self.port, create=True) for name in _WORDS
        }
        self.word = self.signals["model_weights_status"]
        others = ("worker_healthy_live", "exist_task", "engine_forward", "exist_prefill_task")
        self.own_signals = {name: SimpleNamespace(value=np.zeros(self.num_ranks, np.int64)) for name in others}
        os.environ["FD_ENABLE_V1_UPDATE_WEIGHTS"] = str(int(self._is_v1))
        self._fake()
        for rank in self.ranks:
            rank.thread.start()
        for rank in self.ranks:
            if not rank.is_ready.wait(SOON_S):
                raise TimeoutError(f"rank {rank.rank} did not come up")
        return self

    def _fake(self) -> None:
        """What this machine lacks, and the one second that FastDeploy's loop sleeps."""
        model = SimpleNamespace(load_model=lambda fd_config: TinyModel(self.chosen.get("width", 3)))
        time_module = SimpleNamespace(time=time.time, sleep=lambda seconds: time.sleep(min(seconds, 0.01)))
        operators = dict.fromkeys(("set_data_ipc", "unset_data_ipc", "print_gpu_memory_use"), lambda *arguments: None)
        for owner, values in (
            (loader_module, {"get_model_loader": lambda load_config: model}),
            (runner_module, {"get_model_loader": lambda load_config: model, **operators}),
            (worker_process, {"time": time_module}),
            (DynamicWeightManager, {"_log_memory": lambda manager, context: None}),
        ):
            self._stack.enter_context(patched(owner, **values))
        if self.num_ranks > 1:
            group = {"barrier": self.group.barrier, "broadcast": self.group.broadcast, "get_rank": self.group.rank}
            self._stack.enter_context(patched(paddle.distributed, **group))

    def control(self, method: str, **arguments: Any) -> dict[str, Any]:
        """A V1 command, through FastDeploy's loop and its run_control_method."""
        self.tasks.put(ControlRequest("1", method, arguments))
        answers = [rank.answer() for rank in self.ranks]
        return answers[0]

    # --- what a trainer sees, and what lies in memory ----------------------------------------------

    @property
    def runner(self) -> Any:
        return self.ranks[0].runner

    @property
    def process(self) -> Any:
        return self.ranks[0].process

    @property
    def last_line(self) -> str | None:
        return self.ranks[0].last_line

    def raise_ended(self) -> None:
        for rank in self.ranks:
            if rank.ended:
                raise RuntimeError(rank.ended)

    def store(self, value: int) -> None:
        self.word.value[0] = value

    def load(self) -> int:
        return int(self.word.value[0])

    def await_word(self, *values: int, within_s: float = SOON_S) -> int:
        """The word when it reads one of these, or the loop has ended, or the time is over."""
        self.await_that(lambda: self.load() in values or self.last_line is not None, within_s)
        return self.load()

    def await_that(self, condition: Callable[[], bool], within_s: float = SOON_S) -> bool:
        deadline = time.monotonic() + within_s
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.001)
        return condition()

    def first_values(self, rank: int = 0) -> dict[str, float | None]:
        """The first element of each parameter; None for one without memory."""
        tensors = self.ranks[rank].runner.model.state_dict()
        return {
            name: float(tensor.numpy().ravel()[0]) if tensor._is_initialized() else None
            for name, tensor in tensors.items()
        }

    def last_decoded(self) -> tuple[float, float] | None:
        """What the last forward pass found in the first element of each layer's weight."""
        decoded = list(self.runner.decoded)
        return decoded[-1] if decoded else None

    def has_decoded_live(self) -> bool:
        """Something was computed with what lies in the parameters now."""
        values = self.first_values()
        return self.last_decoded() == (values["a.weight"], values["b.weight"])

    @property
    def has_caches(self) -> bool:
        return bool(self.runner.cache_kvs_map)

    def __exit__(self, *raised: object) -> None:
        self.tasks.is_stopping.set()
        if any(rank.ended for rank in self.ranks):
            self.group.break_up()
        # FastDeploy's loop may wait, for ever, for the word to read any of these; then it comes to its task queue.
        values = itertools.cycle((1, -2, 0))
        deadline = time.monotonic() + SOON_S
        while not self.await_that(lambda: not any(rank.thread.is_alive() for rank in self.ranks), 0.05):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the loop does not end; the word reads {self.load()}\n{self._places()}")
            self.store(next(values))
        for rank in reversed(self.ranks):
            rank.close()
        self._stack.close()
        for signal in self.signals.values():
            with suppress(FileNotFoundError):
                signal.clear()

    def _places(self) -> str:
        """Where the loops are."""
        frames = sys._current_frames()
        living = [rank.thread.ident for rank in self.ranks if rank.thread.is_alive()]
        return "\n".join("".join(traceback.format_stack(frames[ident])[-6:]) for ident in living)


@contextmanager
def started(kind: str, path: str, port: int, **chosen: Any) -> Iterator[Engine]:
    """On a snapshot that is all ones."""
    directory = scene_directory(path)
    for rank in range(chosen.get("num_ranks", 1)):
        write_snapshot(directory, weights(1, 1), 1, rank)
    with Engine(kind, directory, port, **chosen) as engine:
        engine.raise_ended()
        yield engine


def scene_directory(path: str) -> Path:
    directory = Path(path)
    for name in ("channel", "metas"):
        (directory / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def _worker(config: Any, runner: Any) -> Any:
    """FastDeploy's GpuWorker, whose module looks for plugins when it is imported, and whose device is none here."""
    from fastdeploy.worker.gpu_worker import GpuWorker

    worker = GpuWorker(fd_config=config, local_rank=config.parallel_config.tensor_parallel_rank, rank=1)
    worker.model_runner = runner
    return worker


@contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
