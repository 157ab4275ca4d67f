"""FastDeploy's model runner with weights that this package keeps: a subclass of whatever GPUModelRunner it is given.

Owns which of FastDeploy's calls lead where. Refuses to know how weights are taken over. Nothing of FastDeploy is
changed; without `--dynamic-load-weight` the class is its base. Invariant: no call for weights raises into FastDeploy's
legacy loop (which would end the worker) because a version was refused: the word and the board tell.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from fastdeploy_rl.engines.fastdeploy.activity import tell_active, tell_command
from fastdeploy_rl.engines.fastdeploy.weight_manager import DynamicWeightManager
from fastdeploy_rl.errors import FastDeployRLError
from fastdeploy_rl.lifecycle import LegacyStatus

_log = logging.getLogger(__name__)


@cache
def runner_class(base: type, get_model_loader: Callable[..., Any]) -> type:
    """`base`: FastDeploy's GPUModelRunner, or what behaves like it; `get_model_loader(load_config=...)`: FastDeploy's.
    The same class for the same arguments."""

    class WeightKeepingModelRunner(base):  # type: ignore[misc]
        recorded_error = ""
        dynamic_weight_manager: DynamicWeightManager | None = None

        def load_model(self) -> None:
            """As the base does; then the weights that FastDeploy begins with are brought, on all ranks or on none."""
            if not self.fd_config.load_config.dynamic_load_weight:
                _log.warning("event=inactive reason='FastDeploy was started without --dynamic-load-weight'")
                super().load_model()
                return
            loader = get_model_loader(load_config=self.fd_config.load_config)
            self.model = loader.load_model(fd_config=self.fd_config)
            self._init_speculative_proposer()
            draft = getattr(getattr(self, "proposer", None), "model", None)
            models = [self.model] if draft is None else [self.model, draft]
            self.dynamic_weight_manager = DynamicWeightManager(self.fd_config, models, self.local_rank, gpu_runner=self)
            seat = self.dynamic_weight_manager.seat
            settings = seat.settings
            tell_active(settings.rank, settings.own_port, settings.load_strategy, seat.live_version)

        # --- the legacy loop -----------------------------------------------------------------------

        def update_parameters(self, pid: int) -> None:
            """Returns when the status word reads NORMAL: with the new weights, or with the old ones where the new ones
            were refused. Where nothing is live it waits for the next signal, as FastDeploy's loop would."""
            if self.dynamic_weight_manager is None:
                super().update_parameters(pid)
                return
            self.dynamic_weight_manager.attend_word(LegacyStatus.NORMAL)
            self._note_sleep()

        def clear_parameters(self, pid: int) -> None:
            """Returns when the status word reads CLEARED: weights, KV cache and graphs are freed on every rank."""
            if self.dynamic_weight_manager is None:
                super().clear_parameters(pid)
                return
            self.dynamic_weight_manager.attend_word(LegacyStatus.CLEARED)
            self._note_sleep()

        # --- V1 ------------------------------------------------------------------------------------

        def update_weights(self, version: str | None = None, verify_checksum: bool = False) -> dict[str, Any]:
            """Another version, by whatever load strategy; FastDeploy calls it while it is paused. Its result, seconds.
            The error of the tree with which it was refused: then the old weights are live, or none are."""
            if self.dynamic_weight_manager is None:
                result: dict[str, Any] = super().update_weights(version, verify_checksum)
                return result
            with _told(self.dynamic_weight_manager, "update_weights"):
                costs = self.dynamic_weight_manager.update_weights_by_rdma(version, verify_checksum)
            self._note_sleep()
            return costs

        def sleep(self, tags: str, level: int | None = None) -> None:
            """`tags`: weight and kv_cache, separated by commas. `level` as in config.SLEEP_LEVELS."""
            if self.dynamic_weight_manager is None:
                super().sleep(tags)
                return
            with _told(self.dynamic_weight_manager, "sleep"):
                self.dynamic_weight_manager.sleep(tags, level)
            self._note_sleep()

        def wakeup(self, tags: str) -> None:
            if self.dynamic_weight_manager is None:
                super().wakeup(tags)
                return
            with _told(self.dynamic_weight_manager, "wakeup"):
                self.dynamic_weight_manager.wakeup(tags)
            self._note_sleep()

        # --- each turn of the loop -----------------------------------------------------------------

        def not_need_stop(self) -> bool:
            """Asked at each turn where ranks meet; FastDeploy's runner has no say in it."""
            if self.dynamic_weight_manager is not None:
                self.dynamic_weight_manager.seat.look_for_command()
            return bool(super().not_need_stop()) if hasattr(super(), "not_need_stop") else True

        def execute_model(self, *arguments: Any, **named: Any) -> Any:
            manager = self.dynamic_weight_manager
            if manager is not None:
                if manager.seat.settings.is_expert_parallel:
                    manager.seat.look_for_command()  # FastDeploy asks for nothing else at each turn there
                manager.note_computing()
            return super().execute_model(*arguments, **named)

        @property
        def is_sleeping(self) -> bool:
            """Nothing is computed then: also after a fence, and whoever put it to sleep. Changes on all ranks alike."""
            manager = self.dynamic_weight_manager
            if manager is None:
                return bool(getattr(super(), "is_sleeping", False))
            return manager.is_weight_asleep or manager.is_kv_cache_asleep

        def _note_sleep(self) -> None:
            """FastDeploy's two marks, which its own methods set."""
            if self.dynamic_weight_manager is not None:
                self.is_weight_sleeping = self.dynamic_weight_manager.is_weight_asleep
                self.is_kvcache_sleeping = self.dynamic_weight_manager.is_kv_cache_asleep

    return WeightKeepingModelRunner


@contextmanager
def _told(manager: DynamicWeightManager, command: str) -> Iterator[None]:
    """Counts and logs how a call of FastDeploy's ended."""
    rank, begun, outcome, reason = manager.settings.rank, time.monotonic(), "refused", ""
    try:
        yield
        outcome = "done"
    except FastDeployRLError as error:
        reason = f" reason={str(error)!r}"
        raise
    finally:
        seconds = time.monotonic() - begun
        _log.info("event=%s rank=%d outcome=%s seconds=%.3f%s", command, rank, outcome, seconds, reason)
        tell_command(rank, command, outcome)
