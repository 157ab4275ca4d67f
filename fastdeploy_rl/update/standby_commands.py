"""Pausing, sleeping and waking on one rank: requests come to rest, memory is given away by tag, and is brought back.

Owns the order of these acts on one rank and their undoing. Refuses to know how the ranks decide, and which tags are
asleep: its caller names what is to go, or to be brought. Invariant: until `commit` begins, `undo` leaves what was: of a
pause or a sleep all that serves, of a wake all that sleeps."""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import structs

from fastdeploy_rl._native import Mapping as Memory
from fastdeploy_rl.command_options import CommandOptions
from fastdeploy_rl.config import DROP_LEVEL, KEEP
from fastdeploy_rl.errors import ChecksumMismatchError, NoSpaceError, NotServingError
from fastdeploy_rl.lifecycle import Tag
from fastdeploy_rl.memory.host_copy import HostCopy
from fastdeploy_rl.receipt import RankReceipt
from fastdeploy_rl.report import CommandKind, RankReport
from fastdeploy_rl.runner import ModelRunner
from fastdeploy_rl.update.engine_state import gone_with
from fastdeploy_rl.update.live_weights import LiveWeights, OffloadedWeights, check_sums
from fastdeploy_rl.update.packing import packed
from fastdeploy_rl.update.steps import check_bound
from fastdeploy_rl.update.transaction import PlainCommand, RankCommand, RankState, rank_receipt


class _QuietingCommand(PlainCommand):
    """A command before which requests in flight come to rest, as its options say."""

    def __init__(self, state: RankState, options: CommandOptions, deadline_ns: int) -> None:
        super().__init__(state)
        self._options = options
        self._deadline_ns = deadline_ns

    def stall(self) -> None:
        """Requests that were to end first have, or are to be aborted: else nobody would have come to this boundary."""
        started = time.monotonic()
        self._state.runner.drain(self._deadline_ns)
        self._note("drain", started)

    def _abort_requests(self, reason: str) -> None:
        """With `wait` those that are late."""
        if self._options.in_flight != KEEP:
            self._state.runner.abort_requests(reason, is_fault=False)


class PauseCommand(_QuietingCommand):
    """PAUSE: requests in flight end, or stop between two tokens; all memory stays."""

    def commit(self) -> None:
        started = time.monotonic()
        self._abort_requests("the engine was paused")
        self._note("pause", started)


class SleepCommand(_QuietingCommand):
    """SLEEP: gives the memory of `options.tags` away; what is away already stays away.

    At `options.level` 1 the bytes of the weights go to host memory while the engine serves: nobody writes into them
    then. At level 2 they are gone, also those that sleep in host memory."""

    def __init__(self, state: RankState, options: CommandOptions, deadline_ns: int) -> None:
        super().__init__(state, options, deadline_ns)
        self._copy: HostCopy | None = None
        self._dropped: LiveWeights | None = None
        self._spent: OffloadedWeights | None = None
        self._num_bytes = 0

    @property
    def _keeps_weights(self) -> bool:
        return self._options.level != DROP_LEVEL

    def stage(self) -> None:
        """NoSpaceError where there is no room for the copy, ChecksumMismatchError where live memory is not what was
        committed."""
        live = self._state.live
        if live is None or Tag.WEIGHT not in self._options.tags or not self._keeps_weights:
            return
        started = time.monotonic()
        self._copy = _saved(live, self._state.num_threads)
        if live.live:
            self._check(self._copy, live)
        self._note("offload", started, self._copy.num_bytes)

    def _check(self, copy: HostCopy, live: LiveWeights) -> None:
        try:
            check_sums(copy.sums, live, self._state.runner.rank)
        except ChecksumMismatchError:
            live.is_read_back = False  # whoever looks after memory is to see for itself, and to say so to all
            raise

    def commit(self) -> None:
        """May be called again: what went the first time is not there any more."""
        started = time.monotonic()
        self._abort_requests("the engine was put to sleep")
        runner, tags = self._state.runner, gone_with(self._options.tags)
        if Tag.GRAPH in tags:
            runner.drop_graphs()
        if Tag.KV_CACHE in tags:
            runner.drop_kv_cache()
        if Tag.WEIGHT in tags:
            self._give_weights_away(runner)
        self._note("sleep", started, self._num_bytes)

    def _give_weights_away(self, runner: ModelRunner) -> None:
        state, live = self._state, self._state.live
        if live is not None:
            runner.unbind()
            self._num_bytes = sum(view.num_bytes for view in live.views.values())
            state.live, self._dropped = None, live
            if self._copy is not None:
                state.offloaded, self._copy = _offloaded(live, self._copy), None
        if not self._keeps_weights and state.offloaded is not None:
            self._spent, state.offloaded = state.offloaded, None
        self._release_dropped()
        state.arenas.drop()
        state.source.trim()

    def retire(self) -> None:
        if self._spent is not None:
            self._spent.release()
            self._spent = None

    def undo(self) -> None:
        if self._copy is not None:
            self._copy.release()
            self._copy = None

    def abandon(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.retire)
            stack.callback(self.undo)
            stack.callback(self._release_dropped)

    def _release_dropped(self) -> None:
        if self._dropped is not None:
            self._dropped.release(self._state.arenas)
            self._dropped = None


class WakeCommand(PlainCommand):
    """WAKE: brings back the memory of `options.tags`, all of it or none. Weights come from host memory; those that do
    not sleep there take an update. Nothing is served meanwhile."""

    def __init__(self, state: RankState, options: CommandOptions, deadline_ns: int) -> None:
        super().__init__(state)
        self._tags = options.tags
        self._deadline_ns = deadline_ns
        self._arena: Memory | None = None
        self._new: LiveWeights | None = None
        self._is_bound = self._is_kv_rebuilt = self._is_recaptured = False
        self._graphs_captured = 0
        self._spent: OffloadedWeights | None = None
        self._receipt: RankReceipt | None = None

    def stage(self) -> None:
        """ChecksumMismatchError where the bytes that come back are not those that went, NotServingError where there are
        none: then an update brings them."""
        state = self._state
        if Tag.WEIGHT not in self._tags or state.live is not None:
            return
        offloaded = state.offloaded
        if offloaded is None:
            raise NotServingError("no weights are kept in host memory: an update brings them")
        started = time.monotonic()
        self._arena = state.arenas.acquire(offloaded.copy.num_bytes)
        views, sums = offloaded.copy.load(self._arena, state.num_threads)
        new = LiveWeights(offloaded.version, offloaded.content_digest, views, offloaded.read, offloaded.live)
        self._new = new
        if new.live:
            check_sums(sums, new, state.runner.rank)
        new.is_read_back = not new.live  # without checksums there is nothing to compare it with
        self._receipt = rank_receipt(state.runner.rank, new, new.live)
        self._note("load", started, offloaded.copy.num_bytes)

    def stall(self) -> None:
        runner = self._state.runner
        started = time.monotonic()
        runner.drain(self._deadline_ns)
        self._note("drain", started)
        if self._new is not None:
            self._is_bound = True
            runner.bind(self._new.views)
            check_bound(runner, self._new)
        if Tag.KV_CACHE in self._tags:
            self._rebuild_kv_cache(runner)
        if Tag.GRAPH in self._tags:
            self._recapture_graphs(runner)

    def _rebuild_kv_cache(self, runner: ModelRunner) -> None:
        started = time.monotonic()
        weights = self._new or self._state.live or self._state.offloaded
        self._is_kv_rebuilt = True
        runner.rebuild_kv_cache("" if weights is None else weights.content_digest)
        self._note("rebuild_kv_cache", started)

    def _recapture_graphs(self, runner: ModelRunner) -> None:
        started = time.monotonic()
        self._is_recaptured = True
        self._graphs_captured = runner.recapture_graphs()
        self._note("recapture_graphs", started)

    def commit(self) -> None:
        """Where it raises, nothing has changed hands, and it may be called again."""
        new, state = self._new, self._state
        if new is None:
            return
        state.runner.set_version(str(new.version))
        new.arena, self._arena = self._arena, None
        state.live, self._new = new, None
        self._spent, state.offloaded = state.offloaded, None

    def retire(self) -> None:
        if self._spent is not None:
            self._spent.release()
            self._spent = None

    def undo(self) -> None:
        """In reverse; what cannot be undone at first is undone by a second call."""
        runner = self._state.runner
        if self._is_recaptured:
            runner.drop_graphs()
            self._is_recaptured = False
        if self._is_kv_rebuilt:
            runner.drop_kv_cache()
            self._is_kv_rebuilt = False
        if self._is_bound:
            runner.unbind()
            self._is_bound = False
        self._release_loaded()

    def _release_loaded(self) -> None:
        if self._new is not None:
            self._new.views = {}
            self._new = None
        if self._arena is not None:
            self._state.arenas.release(self._arena)
            self._arena = None
            self._state.arenas.trim()

    def abandon(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.retire)
            stack.callback(self._release_loaded)

    def report(self, error: str = "") -> RankReport:
        return structs.replace(super().report(error), graphs_captured=self._graphs_captured)

    def receipt(self) -> RankReceipt | None:
        """Of the weights that came back; None where none had to."""
        return self._receipt


def _saved(live: LiveWeights, num_threads: int) -> HostCopy:
    offsets = dict(zip(live.views, packed([view.num_bytes for view in live.views.values()]), strict=True))
    try:
        return HostCopy.save(live.views, offsets, num_threads)
    except NoSpaceError as error:
        raise NoSpaceError(f"{error}; level 2 needs none") from error


def _offloaded(live: LiveWeights, copy: HostCopy) -> OffloadedWeights:
    return OffloadedWeights(live.version, live.content_digest, live.read, live.live, copy)


STANDBY_COMMANDS: Final[Mapping[int, Callable[[RankState, CommandOptions, int], RankCommand]]] = {
    CommandKind.PAUSE: PauseCommand,
    CommandKind.SLEEP: SleepCommand,
    CommandKind.WAKE: WakeCommand,
}
"""By what the board calls them; RESUME concerns rank 0 alone."""
