"""A whole stand-in FastDeploy: words, workers, and what its HTTP server answers, in the test's process.

`get` and `post` take FastDeploy's routes and give its status codes; there is no socket, as nothing of ours is on it."""

import itertools
import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from fastdeploy_rl.memory.shared_segment import SharedSegment
from tests.engines.fastdeploy.standin.common_engine import EngineService
from tests.engines.fastdeploy.standin.config import EngineLine
from tests.engines.fastdeploy.standin.control import ControlRequest
from tests.engines.fastdeploy.standin.engine_client import EngineClient
from tests.engines.fastdeploy.standin.ipc_signal import IPCSignal, ModelWeightsStatus
from tests.engines.fastdeploy.standin.worker_loop import required_bytes
from tests.engines.fastdeploy.standin.worker_processes import WorkerProcesses
from tests.process.numpy_engine import free_port

_WORDS = ("model_weights_status", "kv_cache_status", "prefix_tree_status")
_START_S = 60.0
_NUM_BLOCKS = 1024  # a request may have thousands of tokens: it runs until somebody ends it
_PATIENCE_S = 60.0


class Answer(NamedTuple):
    status: int
    body: Any


class FrontEnd:
    """`options`: of the plugin, under its key of --rsync-config; `rsync_config`: the rest of it. `is_v1`: control over
    requests instead of words. `metadata`: folder with the metadata of an installed plugin, before all others."""

    def __init__(
        self,
        *,
        load_strategy: str,
        metadata: Path,
        num_ranks: int = 1,
        options: dict[str, Any] | None = None,
        rsync_config: dict[str, Any] | None = None,
        model_dir: Path | None = None,
        is_v1: bool = False,
        mtp: bool = False,
        graphs: bool = False,
        shuts_groups_down: bool = True,
        plugins: str | None = "fastdeploy_rl",
    ) -> None:
        self.port = free_port()
        self.num_ranks = num_ranks
        self.log_dir = metadata.parent / f"log.{self.port}"
        self._is_v1 = is_v1
        self._lines = [
            EngineLine(
                port=self.port,
                rank=rank,
                num_ranks=num_ranks,
                load_strategy=load_strategy,
                model_dir=str(model_dir or ""),
                rsync_config={**(rsync_config or {}), "fastdeploy_rl": options or {}},
                collectives=f"fastdeploy_rl_test.{self.port}",
                mtp=mtp,
                graphs=graphs,
                num_blocks=_NUM_BLOCKS,
                shutdown_comm_group_if_worker_idle=shuts_groups_down and not is_v1,
            )
            for rank in range(num_ranks)
        ]
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FD_")},
            "PYTHONPATH": os.pathsep.join([str(metadata), str(Path(__file__).parents[4])]),
            "FD_ENABLE_V1_UPDATE_WEIGHTS": str(int(is_v1)),
            "FD_LOG_DIR": str(self.log_dir),
            "CUDA_VISIBLE_DEVICES": "0,1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            **({"FD_PLUGINS": plugins} if plugins is not None else {}),
        }
        self._ids = itertools.count()

    def __enter__(self) -> "FrontEnd":
        with ExitStack() as stack:
            self.signals = {name: self._signal(stack, name) for name in (*_WORDS, "exist_task_signal")}
            for name in ("worker_healthy_live_signal", "standin_tasks_read"):
                self._signal(stack, name, self.num_ranks)
            group = stack.enter_context(
                SharedSegment.create(self._lines[0].collectives, required_bytes(self.num_ranks))
            )
            stack.callback(group.unlink)
            self.workers = WorkerProcesses(self._lines, self._environment)
            stack.callback(self.workers.end)
            self.workers.await_ready(_START_S)
            self.client = EngineClient(self.signals["model_weights_status"])
            self.engine = EngineService(self.workers, _PATIENCE_S)
            self._stack = stack.pop_all()
        return self

    def _signal(self, stack: ExitStack, name: str, size: int = 1) -> IPCSignal:
        signal = IPCSignal(name=name, array=np.zeros(size, np.int32), dtype=np.int32, suffix=self.port, create=True)
        stack.callback(signal.clear)
        return signal

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def word(self) -> ModelWeightsStatus:
        return ModelWeightsStatus(int(self.signals["model_weights_status"].value[0]))

    # --- routes --------------------------------------------------------------------------------------

    def get(self, path: str, timeout: float = _PATIENCE_S) -> Answer:
        if path == "/health":
            is_alive, message = self.client.is_workers_alive()
            return Answer(200, "") if is_alive else Answer(304, message)
        if path == "/v1/is_paused":
            return self._control("is_paused", {})
        if path == "/clear_load_weight":
            return self._control("sleep", {}) if self._is_v1 else Answer(*self.client.clear_load_weight(timeout))
        if path == "/update_model_weight":
            return self._control("wakeup", {}) if self._is_v1 else Answer(*self.client.update_model_weight(timeout))
        return Answer(404, "no such route")

    def post(self, path: str, body: dict[str, Any] | None = None) -> Answer:
        if path == "/v1/completions":
            return self._complete(body or {})
        if path == "/v1/update_weights":
            return self._update_weights(body or {})
        if path in ("/v1/pause", "/v1/resume", "/v1/sleep", "/v1/wakeup"):
            return self._control(path.removeprefix("/v1/"), body or {})
        return Answer(404, "no such route")

    def _complete(self, request: dict[str, Any]) -> Answer:
        """The request is with every worker; who wants its tokens asks for them."""
        is_alive, message = self.client.is_workers_alive()
        if not is_alive:
            return Answer(304, message)
        if self.engine.is_paused:
            return Answer(503, "paused: FastDeploy would keep the request and not answer yet")
        self.workers.put_tasks({"requests": [request]})
        return Answer(200, None)

    def _update_weights(self, body: dict[str, Any]) -> Answer:
        if not isinstance(body.get("version", ""), str):
            return Answer(400, "version must be a string")
        if not isinstance(body.get("verify_checksum", False), bool):
            return Answer(400, "verify_checksum must be a boolean")
        return self._control("update_weights", body)

    def _control(self, method: str, args: dict[str, Any]) -> Answer:
        response = self.engine.run_control_method(ControlRequest(f"control-{next(self._ids)}", method, dict(args)))
        return Answer(response.error_code, response.result if response.error_code == 200 else response.error_message)

    # --- what tests ask the workers, through the same queue --------------------------------------------

    def ask(self, method: str, **args: Any) -> list[Any]:
        """Of every rank: what its worker's `method` returns."""
        request = ControlRequest(f"test-{next(self._ids)}", method, args)
        self.workers.put_tasks(request.to_dict())
        answers = self.workers.responses(request.request_id, _PATIENCE_S)
        if any(answer.error_code != 200 for answer in answers):
            raise RuntimeError(str([answer.error_message for answer in answers]))
        return [answer.result for answer in answers]

    def dump(self) -> list[dict[str, bytes]]:
        """The raw bytes of every live parameter of each rank; those of a draft model as "mtp/NAME"."""
        return [{name: bytes.fromhex(text) for name, text in held.items()} for held in self.ask("dump")]
