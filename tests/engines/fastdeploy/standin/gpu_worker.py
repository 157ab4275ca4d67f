"""FastDeploy's worker of one device: which runner it has is settled while this module is imported.

Whatever goes wrong with a plugin there, FastDeploy's own runner is taken, and a line at INFO is all that tells so."""

import logging
from typing import Any

from tests.engines.fastdeploy.standin.plugins import load_model_runner_plugins

_log = logging.getLogger(__name__)

try:
    ModelRunner = load_model_runner_plugins()
except Exception as error:
    _log.info("event=fallback reason=%r", error)
    from tests.engines.fastdeploy.standin.gpu_model_runner import GPUModelRunner as ModelRunner


class GpuWorker:
    def __init__(self, fd_config: Any, local_rank: int, rank: int) -> None:
        """`rank`: FastDeploy hands the number of ranks in here."""
        self.fd_config = fd_config
        self.local_rank = local_rank
        self.rank = rank

    def init_device(self):
        device_ids = self.fd_config.parallel_config.device_ids.split(",")
        self.model_runner = ModelRunner(
            fd_config=self.fd_config,
            device="cpu",
            device_id=int(device_ids[self.local_rank]),
            rank=self.rank,
            local_rank=self.local_rank,
        )

    def load_model(self) -> None:
        self.model_runner.load_model()

    def get_model(self) -> Any:
        return self.model_runner.get_model()

    def initialize_cache(self, num_gpu_blocks: int) -> None:
        self.model_runner.update_share_input_block_num(num_gpu_blocks=num_gpu_blocks)

    def graph_optimize_and_warm_up_model(self) -> None:
        self.model_runner.capture_model()

    def update_weights(self, version: str | None = None, verify_checksum: bool = False):
        return self.model_runner.update_weights(version, verify_checksum)

    def sleep(self, **kwargs) -> None:
        return self.model_runner.sleep(**kwargs)

    def wakeup(self, **kwargs) -> None:
        return self.model_runner.wakeup(**kwargs)

    def execute_model(self, model_forward_batch: list[Any] | None = None, num_running_request: int | None = None):
        return self.model_runner.execute_model(model_forward_batch, num_running_request)

    def preprocess_new_task(self, req_dicts: list[Any], num_running_requests: int) -> None:
        self.model_runner.insert_tasks_v1(req_dicts=req_dicts, num_running_requests=num_running_requests)
