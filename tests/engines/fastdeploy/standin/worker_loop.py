"""FastDeploy's worker process: the calls of its start and of its loop, in its order, around one GpuWorker.

    python -m tests.engines.fastdeploy.standin.worker_loop LINE        # an EngineLine as a JSON list

Tasks come over standard input, answers of control methods go to standard output. Left out: batches of several
requests, expert parallelism, disaggregation, multimodal models. Collectives of a group whose member died raise here,
where FastDeploy's hang until somebody kills them; naps are a hundredth of FastDeploy's."""

import json
import sys
import time
import traceback
from typing import Any

import numpy as np

from fastdeploy_rl._native import CollectiveGroup
from fastdeploy_rl.collectives.shm import ShmCollectives
from tests.engines.fastdeploy.standin import envs, modules
from tests.engines.fastdeploy.standin.config import EngineLine, FDConfig
from tests.engines.fastdeploy.standin.control import ControlRequest, ControlResponse
from tests.engines.fastdeploy.standin.dynamic_weight_manager import DynamicWeightManager
from tests.engines.fastdeploy.standin.ipc_signal import ExistTaskStatus, IPCSignal, ModelWeightsStatus
from tests.engines.fastdeploy.standin.process_group import ProcessGroup
from tests.engines.fastdeploy.standin.task_queue import EngineWorkerQueue

SLOT_BYTES = 1 << 12
_PATIENCE_S = 60.0
_NAP_S = 0.01


def required_bytes(num_ranks: int) -> int:
    """Of the segment of the group that the ranks meet in."""
    return CollectiveGroup.required_bytes(num_ranks, SLOT_BYTES)


class PaddleDisWorkerProc:
    def __init__(self, fd_config: Any, ranks: int = 1, local_rank: int = 0) -> None:
        from tests.engines.fastdeploy.standin.windowed_worker import WindowedWorker

        self.ranks = ranks
        self.local_rank = local_rank
        self.fd_config = fd_config
        self.parallel_config = fd_config.parallel_config
        self.worker = WindowedWorker(fd_config=fd_config, local_rank=local_rank, rank=ranks)

    # --- start ---------------------------------------------------------------------------------------

    def init_device(self) -> None:
        self.worker.init_device()

    def load_model(self) -> None:
        self.worker.load_model()
        self._barrier()

    def initialize_kv_cache(self) -> None:
        self.worker.initialize_cache(num_gpu_blocks=self.fd_config.cache_config.total_block_num)

    def graph_optimize_and_warm_up_model(self) -> None:
        self.worker.graph_optimize_and_warm_up_model()

    def init_health_status(self) -> None:
        self.worker_healthy_live_signal = self._attach("worker_healthy_live_signal", self.ranks)
        self.model_weights_status = self._attach("model_weights_status")
        self.kv_cache_status = self._attach("kv_cache_status")
        self.exist_task_signal = self._attach("exist_task_signal")

    def _attach(self, name: str, size: int = 1) -> IPCSignal:
        port = self.parallel_config.local_engine_worker_queue_port
        return IPCSignal(name=name, array=np.zeros(size, np.int32), dtype=np.int32, suffix=port, create=False)

    def start_task_queue_service(self):
        self.task_queue = EngineWorkerQueue(
            sys.stdin,
            client_id=self.local_rank,
            num_client=self.ranks,
            port=self.parallel_config.local_engine_worker_queue_port,
        )

    # --- collectives ---------------------------------------------------------------------------------

    def _barrier(self) -> None:
        """paddle.distributed.barrier() of everybody."""
        if self.ranks > 1:
            self.parallel_config.tp_group.barrier()

    def _tp_barrier_wait(self):
        if self.parallel_config.tensor_parallel_size > 1:
            self.parallel_config.tp_group.barrier()

    def _broadcast_model_weights_signal(self, src: int, group: Any) -> int:
        value: int = self.parallel_config.tp_group.broadcast(int(self.model_weights_signal[0]), src)
        return value

    # --- the loop ------------------------------------------------------------------------------------

    def event_loop_normal(self) -> None:
        """Until somebody ends the process, as FastDeploy's engine does."""
        self.model_weights_signal = np.zeros([1], dtype=np.int32)
        is_legacy = self.fd_config.load_config.dynamic_load_weight and not envs.FD_ENABLE_V1_UPDATE_WEIGHTS
        while True:
            if is_legacy:
                self.model_weights_signal[0] = int(self.model_weights_status.value[0])
                if self.ranks > 1:
                    self.model_weights_signal[0] = self._broadcast_model_weights_signal(src=0, group=None)
            self.worker_healthy_live_signal.value[self.local_rank] = int(time.time())
            if self.local_rank == 0 and self.task_queue.exist_tasks():
                self.exist_task_signal.value[0] = ExistTaskStatus.EXIST
            self._tp_barrier_wait()
            if is_legacy:
                self._barrier()
                if self.model_weights_signal[0] != ModelWeightsStatus.NORMAL:
                    self._follow_signal()
                    continue
            self._serve()

    def _follow_signal(self) -> None:
        """Every rank writes what rank 0 read: FastDeploy's weak spot that an update must live with."""
        self.model_weights_status.value[0] = self.model_weights_signal[0]
        self.kv_cache_status.value[0] = self.model_weights_signal[0]
        cache = self.fd_config.cache_config
        DynamicWeightManager.check_model_weights_status(
            self.model_weights_status,
            self.kv_cache_status if cache.num_cpu_blocks > 0 or cache.kvcache_storage_backend else None,
            self.worker.model_runner,
            self.parallel_config.local_engine_worker_queue_port,
            self.parallel_config.shutdown_comm_group_if_worker_idle,
        )
        self.task_queue.clear_data()
        if self.model_weights_signal[0] == ModelWeightsStatus.UPDATING:
            self.model_weights_signal[0] = ModelWeightsStatus.NORMAL
        elif not self.parallel_config.shutdown_comm_group_if_worker_idle:
            self._sleep_until_updating()

    def _sleep_until_updating(self) -> None:
        """With their process groups alive the ranks sleep here, together."""
        self._barrier()
        while self.model_weights_signal[0] != ModelWeightsStatus.UPDATING:
            self.model_weights_signal[0] = self.model_weights_status.value[0]
            if self.ranks > 1:
                self.model_weights_signal[0] = self._broadcast_model_weights_signal(src=0, group=None)
            time.sleep(_NAP_S)
        self.model_weights_status.value[0] = ModelWeightsStatus.UPDATING

    def _serve(self) -> None:
        requests: list[Any] = []
        if self.exist_task_signal.value[0] == ExistTaskStatus.EXIST:
            tasks, read_finish = self.task_queue.get_tasks()
            if read_finish:
                self.exist_task_signal.value[0] = ExistTaskStatus.EMPTY
            for batch, _ in tasks:
                if isinstance(batch[0], ControlRequest):
                    self.run_control_method(batch[0])
                    self._tp_barrier_wait()
                else:
                    requests.extend(batch)
            if requests:
                self.worker.preprocess_new_task(requests, len(requests))
        runner = self.worker.model_runner
        if hasattr(runner, "not_need_stop") and not runner.not_need_stop():
            self._tp_barrier_wait()
            time.sleep(0.001)
            return
        if self.fd_config.load_config.dynamic_load_weight and runner.is_sleeping:
            self._tp_barrier_wait()
            return
        self.worker.execute_model(requests, len(requests))
        if getattr(runner, "current_launch_token_num", 0) == 0:
            self._tp_barrier_wait()
            time.sleep(0.001)

    def run_control_method(self, control_request: ControlRequest) -> None:
        method = control_request.method
        handler = getattr(self.worker, method, None)
        if not callable(handler):
            message = f"rank {self.local_rank}: no method {method}"
            self._answer(ControlResponse(control_request.request_id, 400, message))
            return
        try:
            result = handler(**control_request.args)
        except Exception as error:
            traceback.print_exc()
            message = f"rank {self.local_rank}: {method} failed: {error}"
            self._answer(ControlResponse(control_request.request_id, 500, message))
            return
        self._answer(ControlResponse(control_request.request_id, 200, "Success", result))

    def _answer(self, response: ControlResponse) -> None:
        print(json.dumps(response.to_dict()), flush=True)


def _group(line: EngineLine) -> ProcessGroup:
    collectives = ShmCollectives(
        line.collectives,
        line.rank,
        line.num_ranks,
        create=False,
        slot_bytes=SLOT_BYTES,
        timeout_s=_PATIENCE_S,
    )
    return ProcessGroup(collectives, _PATIENCE_S)


def run_worker_proc() -> None:
    modules.install()
    line = EngineLine(*json.loads(sys.argv[1]))
    process = PaddleDisWorkerProc(FDConfig(line, _group(line)), line.num_ranks, line.rank)
    process.init_device()
    process.load_model()
    process.initialize_kv_cache()
    process.graph_optimize_and_warm_up_model()
    process.init_health_status()
    process.start_task_queue_service()
    print(json.dumps("ready"), flush=True)
    process.event_loop_normal()


if __name__ == "__main__":
    run_worker_proc()
