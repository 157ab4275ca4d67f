"""The one function of FastDeploy's own manager that its worker calls by name, whatever the runner."""

import time
from typing import Any

from tests.engines.fastdeploy.standin.ipc_signal import IPCSignal, KVCacheStatus, ModelWeightsStatus

_NAP_S = 0.001


class DynamicWeightManager:
    @staticmethod
    def check_model_weights_status(
        model_weights_status: IPCSignal, kv_cache_status: IPCSignal | None, model_runner: Any, pid: int, block: bool
    ):
        """Until the word reads NORMAL, or CLEARED where that may end it; without a deadline."""
        word = model_weights_status.value
        while word[0] != ModelWeightsStatus.NORMAL and (block or word[0] != ModelWeightsStatus.CLEARED):
            if word[0] == ModelWeightsStatus.UPDATING:
                if kv_cache_status is not None:
                    kv_cache_status.value[0] = KVCacheStatus.UPDATING
                model_runner.clear_requests()
                model_runner.update_parameters(pid)
                while word[0] != ModelWeightsStatus.NORMAL:
                    time.sleep(_NAP_S)
            elif word[0] == ModelWeightsStatus.CLEARING:
                if kv_cache_status is not None:
                    kv_cache_status.value[0] = KVCacheStatus.CLEARING
                model_runner.clear_requests()
                model_runner.clear_parameters(pid)
                while word[0] != ModelWeightsStatus.CLEARED:
                    time.sleep(_NAP_S)
            else:
                time.sleep(_NAP_S)
