"""The part of FastDeploy's HTTP server that speaks through the words: its legacy routes and its health.

Without prefix caching and cache transfer, whose words come into it otherwise."""

import time
from typing import Any

from tests.engines.fastdeploy.standin.ipc_signal import IPCSignal, ModelWeightsStatus

_NAP_S = 0.005


class EngineClient:
    def __init__(self, model_weights_status_signal: IPCSignal) -> None:
        self.model_weights_status_signal = model_weights_status_signal
        self.data_parallel_info = {"dp_rank": 0, "local_dp_rank": 0}

    def is_workers_alive(self):
        is_normal = self.model_weights_status_signal.value[0] == ModelWeightsStatus.NORMAL
        return (True, "") if is_normal else (False, "No model weight enabled")

    def update_model_weight(self, timeout=300):
        """Status code and body. Any word but the three below, and so an unknown one too, starts an update."""
        return self._change(
            {
                ModelWeightsStatus.NORMAL: (200, "model weight is updated"),
                ModelWeightsStatus.UPDATING: (400, "worker is updating model weight already"),
                ModelWeightsStatus.CLEARING: (403, "worker is clearing model weight, cannot update now"),
            },
            ModelWeightsStatus.UPDATING,
            ModelWeightsStatus.NORMAL,
            "update",
            timeout,
        )

    def clear_load_weight(self, timeout=300):
        return self._change(
            {
                ModelWeightsStatus.CLEARED: (200, "model weight is cleared"),
                ModelWeightsStatus.CLEARING: (400, "worker is clearing model weight already"),
                ModelWeightsStatus.UPDATING: (403, "worker is updating model weight, cannot clear now"),
            },
            ModelWeightsStatus.CLEARING,
            ModelWeightsStatus.CLEARED,
            "clear",
            timeout,
        )

    def _change(self, answers: dict[int, tuple[int, str]], command: int, wanted: int, what: str, timeout: float) -> Any:
        """A plain store and a poll; on a timeout the word stays as it is."""
        word = self.model_weights_status_signal.value
        if int(word[0]) in answers:
            code, message = answers[int(word[0])]
            return code, {**self.data_parallel_info, "msg": message}
        word[0] = command
        deadline = time.monotonic() + timeout
        while word[0] != wanted:
            if time.monotonic() > deadline:
                return 404, {**self.data_parallel_info, "msg": f"{what} model weight timeout"}
            time.sleep(_NAP_S)
        return 200, {**self.data_parallel_info, "msg": f"{what} model weight successfully"}
