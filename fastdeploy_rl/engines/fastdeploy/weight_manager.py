"""DynamicWeightManager with the contract of FastDeploy's class of that name: for our runner, and for whoever constructs
FastDeploy's manager themselves.

Owns what each of FastDeploy's method names does here. Refuses to know the board and the steps of an update. Invariant:
all calls are made on every rank alike; where one raises, it raises the same on every rank.

Under a runner that is not ours only weights are this class's: KV cache and graphs stay that runner's, as with
FastDeploy's own manager.
"""

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import paddle

from fastdeploy_rl.config import DROP_LEVEL, KEEP, OFFLOAD_LEVEL
from fastdeploy_rl.engines.fastdeploy.cache_transfer import CacheTransfer
from fastdeploy_rl.engines.fastdeploy.engine_hooks import EngineHooks
from fastdeploy_rl.engines.fastdeploy.expert_parallel import ExpertParallel
from fastdeploy_rl.engines.fastdeploy.model_runner import FastDeployModelRunner
from fastdeploy_rl.engines.fastdeploy.model_weights import ModelWeights, check_patterns, shared_parameters
from fastdeploy_rl.engines.fastdeploy.seat import Seat
from fastdeploy_rl.engines.fastdeploy.settings import MTP, EngineSettings
from fastdeploy_rl.errors import (
    ConfigurationError,
    NoPublicationError,
    NotServingError,
    PeerLostError,
    VersionRegressError,
)
from fastdeploy_rl.lifecycle import LegacyStatus, Residency, Tag
from fastdeploy_rl.model_group import ModelGroup
from fastdeploy_rl.report import UpdateReport
from fastdeploy_rl.runner import ModelRunner
from fastdeploy_rl.update.client import BoardClient

_log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.01
_V1_S, _V1_WAKEUP_S = 55.0, 290.0
"""Below the 60 s that FastDeploy's engine waits for an update or a sleep, and the 300 s for a wakeup: what it gives up
must not go live later."""


class DynamicWeightManager:
    """One in each worker process. The constructor brings the first weights, and raises where they cannot be had: a
    contract of FastDeploy's. `seat` stays open until `close`.

    `rank` (of the tensor-parallel group), `local_rank`, `nranks`, `model_list` and `first_load` are named as FastDeploy
    names them; `settings.rank` is the rank on the board, another one under expert parallelism."""

    def __init__(self, fd_config: Any, models: Any, local_rank: int = 0, *, gpu_runner: Any = None) -> None:
        """`models`: one nn.Layer, or [main, mtp]. `gpu_runner`: FastDeploy's runner, whose KV cache and graphs follow
        the weights; None: they are the caller's."""
        self.fd_config = fd_config
        self.settings = EngineSettings.of(fd_config, local_rank)
        self.local_rank, self.rank, self.nranks = local_rank, self.settings.tp_rank, self.settings.num_ranks
        self.model_list = list(models) if isinstance(models, (list, tuple)) else [models]
        self.first_load = True
        self.seat = Seat(self.settings)
        try:
            self._expert_parallel = ExpertParallel(fd_config.parallel_config, self.seat.meet)
            self._hooks = None if gpu_runner is None else self._engine_hooks(gpu_runner)
            self.seat.take(self._model_runner())
        except BaseException:
            self.seat.close()
            raise
        self.first_load = False

    def _engine_hooks(self, gpu_runner: Any) -> EngineHooks:
        cache_transfer = CacheTransfer.of(self.fd_config, self.settings)
        return EngineHooks(gpu_runner, expert_parallel=self._expert_parallel, cache_transfer=cache_transfer)

    def _model_runner(self) -> ModelRunner:
        main, *others = self.model_list
        weights = self._weights_of(main)
        runner = FastDeployModelRunner(weights, self._hooks)
        if not others:
            check_patterns(self.settings.options.rank_local, weights)
            return runner
        draft = self._weights_of(others[0], shared_parameters(others[0], main))
        check_patterns(self.settings.options.rank_local, weights, draft)
        frozen = frozenset(self.settings.options.frozen)
        return ModelGroup(runner, frozen=frozen, **{MTP: FastDeployModelRunner(draft)})

    def _weights_of(self, model: Any, shares: Mapping[str, str] | None = None) -> ModelWeights:
        settings = self.settings
        rank_local = settings.options.rank_local
        return ModelWeights(model, settings.rank, settings.num_ranks, rank_local=rank_local, shares=shares)

    def close(self) -> None:
        """Lets go of weights, leases and, on rank 0, of the board."""
        self.seat.close()

    # --- as FastDeploy's legacy loop calls it ------------------------------------------------------

    def update_parameters(self, pid: int = 0, restart_process_group: bool = False) -> None:
        """Where the status word asks for it: until that reads NORMAL, as in `Seat.attend_word`. Else the newest version
        is taken over; the error of the tree with which it was refused."""
        if self.seat.is_asked_for(LegacyStatus.UPDATING):
            self.attend_word(LegacyStatus.NORMAL)
            return
        with self._expert_parallel.standing_still():
            self.seat.ask(lambda client: client.update(deadline_s=self.settings.deadlines.update_s))

    def attend_word(self, wanted: LegacyStatus) -> None:
        """As `Seat.attend_word`: FastDeploy's loop stands still meanwhile, and after a clear until weights are back."""
        with self._expert_parallel.standing_still():
            self.seat.attend_word(wanted)

    def finalize_update(self, pid: int = 0) -> None:
        """All that FastDeploy's does here was done before: NotServingError where no complete version is live."""
        if not self.seat.is_serving:
            rank = self.settings.rank
            raise NotServingError(f"rank {rank} holds no complete version of the weights: update them first")

    def clear_parameters(self, pid: int = 0, shutdown_process_group: bool = False) -> None:
        """Where the status word asks for it: until that reads CLEARED. Else likewise, without the word."""
        if self.seat.is_asked_for(LegacyStatus.CLEARING):
            self.attend_word(LegacyStatus.CLEARED)
            return
        with self._expert_parallel.standing_still():
            self.seat.ask(lambda client: client.clear(deadline_s=self.settings.deadlines.clear_s))

    @staticmethod
    def check_model_weights_status(
        model_weights_status: Any, kv_cache_status: Any, model_runner: Any, pid: int, block: bool
    ) -> None:
        """Until the word reads NORMAL, or CLEARED and not `block`: calls the runner for what it asks for."""
        word = model_weights_status.value
        while word[0] != LegacyStatus.NORMAL and (block or word[0] != LegacyStatus.CLEARED):
            asked = word[0]
            if asked in (LegacyStatus.UPDATING, LegacyStatus.CLEARING):
                if kv_cache_status is not None:
                    kv_cache_status.value[0] = asked
                model_runner.clear_requests()
                is_update = asked == LegacyStatus.UPDATING
                (model_runner.update_parameters if is_update else model_runner.clear_parameters)(pid)
            else:
                time.sleep(_LOOK_AGAIN_S)

    # --- as FastDeploy's V1 control calls it -------------------------------------------------------

    @property
    def is_weight_asleep(self) -> bool:
        """No complete version is there to compute with: it sleeps, is cleared, or was dropped by a fence."""
        return not self.seat.is_serving

    @property
    def is_kv_cache_asleep(self) -> bool:
        return self._hooks is not None and self._hooks.is_kv_asleep

    def note_computing(self) -> None:
        """As `EngineHooks.note_computing`."""
        if self._hooks is not None:
            self._hooks.note_computing()

    def update_weights_by_rdma(self, version: str | None = None, verify_checksum: bool = False) -> dict[str, Any]:
        """By whatever load strategy. `version`: text, a bare step means the present epoch; None or empty: the newest.
        Bytes are checked in any case, unless checksums are off: then to ask for it is a ConfigurationError."""
        if verify_checksum and not self.settings.options.checksums:
            raise ConfigurationError("verify_checksum needs checksums, and the plugin's are off (option checksums)")
        begun, stalled_s = time.monotonic(), self.seat.stalled_s
        deadline_s = min(self.settings.deadlines.update_s, _V1_S)
        with self._told_by_engine():
            self.seat.ask(lambda client: client.update(version or None, deadline_s=deadline_s))
        total_s, update_s = time.monotonic() - begun, self.seat.stalled_s - stalled_s
        return {
            "sync_cost": total_s - update_s,
            "update_cost": update_s,
            "total_cost": total_s,
            "version": self.seat.live_version,
            "rank": self.local_rank,
        }

    def sleep(self, tags: str, level: int | None = None) -> None:
        """Gives memory of these tags away on every rank. Weights stay in host memory unless `level` says otherwise."""
        names, kept = _names(tags), OFFLOAD_LEVEL if level is None else level
        deadline_s = min(self.settings.deadlines.clear_s, _V1_S)
        with self._told_by_engine():
            self.seat.ask(lambda client: client.sleep(names, level=kept, mode=KEEP, deadline_s=deadline_s))

    def wakeup(self, tags: str) -> None:
        """Brings it back; in the place of weights that slept what was published since, where something was."""
        names, deadline_s = _names(tags), min(self.settings.deadlines.update_s, _V1_WAKEUP_S)
        with self._told_by_engine():
            self.seat.ask(lambda client: _wake(client, names, deadline_s))

    def clear_model_weight(self) -> None:
        """As FastDeploy's: the weights' memory goes, and the next `reload_model_weights` brings the newest."""
        deadline_s = self.settings.deadlines.clear_s
        self.seat.ask(
            lambda client: client.sleep([Tag.WEIGHT.value], level=DROP_LEVEL, mode=KEEP, deadline_s=deadline_s)
        )

    def reload_model_weights(self) -> None:
        if not self.first_load:
            self.wakeup(Tag.WEIGHT.value)

    def _told_by_engine(self) -> contextlib.AbstractContextManager[None]:
        """FastDeploy's engine tells its cache-transfer process itself, in V1."""
        return contextlib.nullcontext() if self._hooks is None else self._hooks.told_by_engine()

    # --- process groups and expert parallelism -----------------------------------------------------

    def clear_deepep_buffer(self) -> None:
        self._expert_parallel.clear_buffer()

    def recreate_deepep_buffer(self) -> None:
        if not self.first_load:
            self._expert_parallel.recreate_buffer()

    def clear_communication_group(self) -> None:
        self._expert_parallel.shut_down_groups()

    def restart_communication_group(self) -> None:
        if not self.first_load:
            self._expert_parallel.restart_groups()

    def _log_memory(self, context: str) -> None:
        """FastDeploy's runner calls it by this name."""
        if paddle.is_compiled_with_cuda():
            allocated, reserved = paddle.device.cuda.memory_allocated(), paddle.device.cuda.memory_reserved()
            _log.info("event=memory after=%r allocated_bytes=%d reserved_bytes=%d", context, allocated, reserved)


def _names(tags: str) -> list[str]:
    """ConfigurationError for what is no tag, or none at all."""
    if not isinstance(tags, str):
        raise ConfigurationError(f"tags are words between commas, got {tags!r:.80}")
    names = [name.strip() for name in tags.split(",")]
    allowed = [tag.value for tag in Tag]
    for name in names:
        if name not in allowed:
            raise ConfigurationError(f"unsupported tag {name!r:.40}, expected some of {', '.join(allowed)}")
    return names


def _wake(client: BoardClient, names: list[str], deadline_s: float) -> UpdateReport:
    begun = time.monotonic()
    is_kept = client.status().residency.get(Tag.WEIGHT.value) == Residency.OFFLOADED.value
    if Tag.WEIGHT.value in names and is_kept:
        # FastDeploy reloads from its source. Where nothing newer is to be had, it is what slept.
        with contextlib.suppress(NoPublicationError, VersionRegressError, PeerLostError):
            client.update(deadline_s=deadline_s)
    return client.wake(names, deadline_s=max(deadline_s - (time.monotonic() - begun), 1.0))
