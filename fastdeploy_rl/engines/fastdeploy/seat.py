"""One rank's weight manager inside a FastDeploy worker: board, source and threads beside a loop that is FastDeploy's.

Owns when this rank's loop stands still for a command: where FastDeploy calls for one, and at each turn of its loop.
Refuses to know models, KV caches and FastDeploy's configuration. Invariant: all ranks of an engine enter and leave a
command together; what FastDeploy's caller is told is the same on every rank.
"""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import TracebackType

from fastdeploy_rl.board.board import Board, board_name
from fastdeploy_rl.board.legacy import WEIGHTS_WORD, StatusWord, link_name
from fastdeploy_rl.config import has_v1_updates
from fastdeploy_rl.engines.fastdeploy.after_death import removed_after_death
from fastdeploy_rl.engines.fastdeploy.attendance import Attendance, LoopWatch
from fastdeploy_rl.engines.fastdeploy.boundary import Boundary
from fastdeploy_rl.engines.fastdeploy.settings import EngineSettings
from fastdeploy_rl.errors import (
    DeadlineExceededError,
    EngineNotFoundError,
    FastDeployRLError,
    StepFailedError,
    from_wire,
)
from fastdeploy_rl.lifecycle import LegacyStatus
from fastdeploy_rl.manager import DynamicWeightManager
from fastdeploy_rl.report import CommandKind, UpdateReport
from fastdeploy_rl.runner import ModelRunner
from fastdeploy_rl.sources import registry
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.update.client import BoardClient

_log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.05
"""Between looks for a board that rank 0 has not made yet."""
_AGAIN_S = 1.0
"""After a clear that was refused, until it is asked for once more."""
_STILL_WAITING_S = 60.0
"""How often a rank that waits for its trainer says so."""

_REFUSED = {
    kind: f"FastDeploy's engine schedules requests, so it alone can {kind.name.lower()}: POST /v1/{kind.name.lower()}"
    for kind in (CommandKind.PAUSE, CommandKind.RESUME)
}
"""Of the board's commands: none of them reaches FastDeploy's scheduler."""

Command = Callable[[BoardClient], UpdateReport]


class Seat:
    """`take`, then what FastDeploy calls for, then `close`: on every rank alike, from its main thread."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self._stack = ExitStack()
        self._round = 0
        self._called_round = self._called_number = 0
        self._last_number = 0
        self.stalled_s = 0.0
        """Of the commands run so far, in all."""
        self._board, self._boundary = self._meet_at_board()
        self._attendance = Attendance(self._board, settings.rank)

    def _meet_at_board(self) -> tuple[Board, Boundary]:
        settings = self.settings
        board = self._create() if settings.rank == 0 else self._attach()
        if settings.rank == 0:
            names = [board_name(settings.port), link_name(WEIGHTS_WORD, settings.port)]
            self._stack.enter_context(removed_after_death(names))
        self._stack.callback(board.close)
        return board, Boundary(board, settings.rank)

    def _create(self) -> Board:
        settings = self.settings
        return Board.create(settings.port, num_ranks=settings.num_ranks, history=settings.history, adopts_words=True)

    def _attach(self) -> Board:
        begun, settings = time.monotonic(), self.settings
        while True:
            try:
                return Board.attach(settings.port)
            except EngineNotFoundError:
                if time.monotonic() - begun > settings.deadlines.attach_s:
                    raise DeadlineExceededError.waiting_for(
                        f"board of the engine at port {settings.port}", since_s=begun, missing=[0]
                    ) from None
            time.sleep(_LOOK_AGAIN_S)

    # --- life --------------------------------------------------------------------------------------

    def take(self, runner: ModelRunner) -> None:
        """Starts this rank's manager, and brings the weights that FastDeploy begins with: on every rank, or an error of
        the tree on every rank."""
        settings = self.settings
        source = registry.create(settings.load_strategy, self._source_config(runner))
        looks_at_word = not has_v1_updates()
        self._manager = DynamicWeightManager(
            runner=runner,
            board=self._board,
            rank=settings.rank,
            source=source,
            config=settings.manager_config,
            await_loops=self._await_loops if looks_at_word and settings.num_ranks > 1 else None,
            refused=_REFUSED,
        )
        self._stack.callback(self._manager.close)
        self._word = StatusWord(WEIGHTS_WORD, settings.own_port)
        self._stack.callback(self._word.close)
        if looks_at_word and settings.rank == 0:
            self._stack.enter_context(LoopWatch(self._attendance, self._word, self._manager.knock))
        self._manager.start(None)
        self.ask(lambda client: client.update(deadline_s=settings.deadlines.update_s))

    def _source_config(self, runner: ModelRunner) -> SourceConfig:
        settings = self.settings
        return SourceConfig(
            channel=settings.channel,
            model_dir=settings.model_dir,
            rank=settings.rank,
            num_ranks=settings.num_ranks,
            parameters=tuple(runner.parameters()),
            num_threads=settings.options.copy_threads,
            rsync_config=settings.rsync_config,
            metas_dir=settings.metas_dir,
        )

    def __enter__(self) -> "Seat":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads and lets go of weights, leases and, on rank 0, the board."""
        self._stack.close()

    @property
    def is_serving(self) -> bool:
        """A complete version is live on this rank."""
        return self._manager.is_serving

    @property
    def live_version(self) -> str:
        """What this rank's parameters are bound to, as text; empty for none."""
        return self._manager.bound_version

    def meet(self) -> None:
        """As `Boundary.meet`, within a command: in half the time that rank 0 gives the others to finish it."""
        self._boundary.meet(self.settings.deadlines.finish_s / 2)

    # --- where FastDeploy calls for a command ------------------------------------------------------

    def is_asked_for(self, value: LegacyStatus) -> bool:
        """A trainer's signal stands in the status word."""
        return self._word.load() == value

    def attend_word(self, wanted: LegacyStatus) -> None:
        """Stands still until the status word reads `wanted`, which is how FastDeploy's own loop goes on; runs what
        comes meanwhile. A trainer whose update was refused while nothing is live may write the word again: the
        engine waits for that as long as it lives, as FastDeploy's loop does."""
        with self._attendance.here(wanted):
            if self.settings.rank == 0:
                self._lead_for_word(wanted)
            else:
                self._follow()
        if self.settings.own_port != self.settings.port and self.settings.tp_rank == 0:
            self._word.store(wanted)  # of an engine beside the first one, under expert parallelism

    def _lead_for_word(self, wanted: LegacyStatus) -> None:
        before = self._manager.times_shown(wanted)
        asked_s = time.monotonic()

        def is_over() -> bool:
            nonlocal asked_s
            word = self._word.load()
            if word == wanted or self._manager.times_shown(wanted) > before:
                return True
            if (word, wanted) == (LegacyStatus.NORMAL, LegacyStatus.CLEARED) and time.monotonic() - asked_s > _AGAIN_S:
                # A clear was refused, and FastDeploy's loop waits for CLEARED and nothing else.
                asked_s = time.monotonic()
                self._word.exchange(word, LegacyStatus.CLEARING)
            return False

        with self._leading():
            self._lead(is_over, f"the status word to read {wanted.name}")

    def ask(self, command: Command) -> UpdateReport | None:
        """The same command on every rank: rank 0 asks its own board for it, and gets the report; all run it. The error
        of the tree with which it was refused, on every rank."""
        if self.settings.rank != 0:
            self._follow()
            return None
        with self._leading(), ThreadPoolExecutor(1, "fastdeploy_rl-asker") as pool:
            asked = pool.submit(self._carry_out, command)
            asked.add_done_callback(lambda _: self._board.ring())
            self._lead(asked.done, "the outcome of a command")
            return asked.result()

    def _carry_out(self, command: Command) -> UpdateReport:
        with BoardClient(self.settings.port) as client:
            return command(client)

    # --- at each turn of FastDeploy's loop ---------------------------------------------------------

    def look_for_command(self) -> None:
        """At the same place of every turn, on every rank. What came over the board is staged while FastDeploy decodes;
        here its stalled part is run, one turn after rank 0 has seen that it is due: by then all ranks have been told,
        since they meet in each turn."""
        self._round += 1
        self._attendance.note_turn()
        if self.settings.rank != 0:
            number = self._boundary.number_at(self._round)
            if number:
                self._run(number)
                self._follow()
        elif self._called_round == self._round:
            self._lead_through(self._called_number)
        elif number := self._manager.poll():
            self._called_round, self._called_number = self._round + 1, number
            self._boundary.call(number, self._called_round)

    def _lead_through(self, number: int) -> None:
        """Also where it is not due any more: the others do not know that."""
        with self._leading():
            self._run(number)
            self._lead(lambda: self._manager.has_told(number), f"the end of command {number}")

    # --- leading and following ---------------------------------------------------------------------

    def _lead(self, is_over: Callable[[], bool], what: str) -> None:
        """Rank 0: calls all ranks to what is due, until it `is_over`."""
        due = 0

        def is_due_or_over() -> bool:
            nonlocal due
            due = self._manager.poll()
            return bool(due) or is_over()

        begun = time.monotonic()
        while True:
            limit = time.monotonic_ns() + int(_STILL_WAITING_S * 1e9)
            if not self._board.wait_until(is_due_or_over, limit):
                _log.info("event=still_waiting for=%r seconds=%.0f", what, time.monotonic() - begun)
            elif due:
                self._boundary.call(due)
                self._run(due)
            else:
                return

    def _follow(self) -> None:
        """Another rank: runs what rank 0 calls to, until that releases it; raises what it raised. For as long as rank 0
        lives, which has the deadlines: PeerLostError where that died."""
        self._boundary.skip_stale()
        while True:
            record = self._boundary.listen(None)
            if not self._boundary.is_release(record):
                self._run(record.number)
                continue
            if record.number > self._last_number:
                self._run(record.number)  # too late: it says so, and leaves nothing half done
            self._attendance.leave()
            self._meet_at_release()
            if record.error:
                raise from_wire(record.error, record.reason)
            return

    def _run(self, number: int) -> None:
        self._last_number = number
        begun = time.monotonic()
        self._manager.run(number)
        self.stalled_s += time.monotonic() - begun

    @contextmanager
    def _leading(self) -> Iterator[None]:
        """Rank 0: whatever happens inside, the others go on, and raise what is raised here."""
        self._called_round = 0  # FastDeploy may call first: what was to be run at a turn is run here
        try:
            yield
        except FastDeployRLError as failure:
            self._release(failure)
            raise
        except BaseException as error:
            self._release(StepFailedError(f"rank 0: {type(error).__name__}: {error}"))
            raise
        self._release(None)

    def _await_loops(self) -> None:
        """On the coordinator's thread, before the word tells an outcome. One that no loop looks at, as when it was made
        anew, may not be waited for for long."""
        try:
            self._attendance.await_all(self.settings.deadlines.finish_s)
        except DeadlineExceededError as late:
            _log.warning("event=word_told_early reason=%r", str(late))

    def _release(self, failure: FastDeployRLError | None) -> None:
        self._attendance.leave()
        self._boundary.release(self._last_number, failure)
        self._meet_at_release()
        self._boundary.leave()

    def _meet_at_release(self) -> None:
        """Nobody goes back to the loop while another one may still take the next call for the last one."""
        try:
            self._boundary.meet(self.settings.deadlines.finish_s)
        except DeadlineExceededError as late:
            _log.error("rank=%d event=late_release reason=%r", self.settings.rank, str(late))
