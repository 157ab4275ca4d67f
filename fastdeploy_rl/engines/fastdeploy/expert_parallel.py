"""DeepEP's buffers and Paddle's process groups while weights are away, in FastDeploy's order.

Owns whether they are there. Refuses to know weights and when they go. Invariant: each call takes effect once, however
often it is made; no rank waits for another one without a deadline.

    weights go:    buffers cleared on every rank -> meet -> (weights freed) -> meet -> groups shut down
    weights come:  groups restarted -> buffers made -> meet -> (weights)

Not run on a GPU.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle

from fastdeploy_rl.errors import DeadlineExceededError

_log = logging.getLogger(__name__)

_WORLD = None
"""In the place of a group: all ranks, by Paddle's default."""


class ExpertParallel:
    """One rank's. `meet` returns when all ranks have come, or raises DeadlineExceededError naming those that have not:
    in the place of paddle.distributed.barrier, which waits for ever."""

    def __init__(self, parallel_config: Any, meet: Callable[[], None]) -> None:
        """`parallel_config`: FastDeploy's; its groups are looked up when they are needed."""
        self._config, self._meet = parallel_config, meet
        self._has_buffers = self.is_enabled = bool(parallel_config.enable_expert_parallel)
        self._down: list[Any] = []
        """Process groups, in the order in which they were shut down."""
        self.stands_still = False
        """At present, as in `standing_still`."""

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Inside, FastDeploy's loop will not turn before weights are there again, so that groups may go with them: its
        turns need them."""
        before, self.stands_still = self.stands_still, True
        try:
            yield
        finally:
            self.stands_still = before

    # --- weights go --------------------------------------------------------------------------------

    def clear_buffer(self) -> None:
        """Of DeepEP, and the ranks meet: none frees what another one still reaches into."""
        if self._has_buffers:
            _buffer_manager().clear_buffer()
            self._has_buffers = False
            self._meet_if_others_come()

    def weights_are_gone(self) -> None:
        """Groups go too, where FastDeploy was started so and its loop stands still. One that will not keeps nobody from
        giving the weights away."""
        if self.stands_still and getattr(self._config, "shutdown_comm_group_if_worker_idle", False):
            try:
                self.shut_down_groups()
            except (RuntimeError, OSError, ValueError, AttributeError, TypeError):  # what Paddle and its backends raise
                _log.exception("event=groups_stay")

    def shut_down_groups(self) -> None:
        left = [group for group in (*reversed(self._groups()), _WORLD) if group not in self._down]
        if not left:
            return
        self._meet_if_others_come()
        for group in left:
            paddle.distributed.shutdown_process_group(*([] if group is _WORLD else [group]))
            self._down.append(group)

    def _meet_if_others_come(self) -> None:
        """A rank that is missing does not stop this one from freeing: all have left decoding by then."""
        try:
            self._meet()
        except DeadlineExceededError as late:
            _log.warning("event=freed_alone reason=%r", str(late))

    # --- weights come ------------------------------------------------------------------------------

    def restart_groups(self) -> None:
        """Those that are down, the last one first; one that will not leaves those after it down."""
        while self._down:
            group = self._down[-1]
            paddle.distributed.restart_process_group(*([] if group is _WORLD else [group]))
            self._down.pop()

    def recreate_buffer(self) -> None:
        """Of DeepEP, on every rank before any goes on. DeadlineExceededError names the missing."""
        if self.is_enabled and not self._has_buffers:
            _buffer_manager().recreate_buffer()
            self._meet()
            self._has_buffers = True  # of all ranks: where one has none, all make theirs anew

    def _groups(self) -> list[Any]:
        config = self._config
        groups = [config.tp_group] if config.tensor_parallel_size > 1 else []
        return [*groups, config.ep_group] if self.is_enabled else groups


def _buffer_manager() -> Any:
    # Its module needs DeepEP, which is there only where experts are parallel.
    from fastdeploy.model_executor.layers.moe.ep import DeepEPBufferManager

    return DeepEPBufferManager
