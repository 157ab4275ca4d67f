"""Rank 0's account of the whole engine: its lifecycle, shown on the board and in the legacy words.

Owns the StatusRecord and what the words read. Refuses to know why events come. Invariant: what is shown is a pure
function of (lifecycle, version, pending command); a value that a foreign process wrote into the word meanwhile is
never overwritten, it is the next command."""

import threading
import time
from collections import Counter
from collections.abc import Callable

from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.legacy import WEIGHTS_WORD, StatusWord
from fastdeploy_rl.command_options import CommandOptions, bits_of, tags_in
from fastdeploy_rl.config import DROP_LEVEL
from fastdeploy_rl.lifecycle import (
    STALLED_PHASES,
    Admission,
    AdmissionEvent,
    LegacyCommand,
    LegacyStatus,
    Lifecycle,
    Residency,
    ResidencyEvent,
    Tag,
    TagEvent,
    UpdateEvent,
    UpdatePhase,
    answer_at_admission,
    legacy_word,
)
from fastdeploy_rl.report import CommandKind
from fastdeploy_rl.update.committed import Committed

_LOADED_BY = {UpdateEvent.VERIFY: Tag.WEIGHT, UpdateEvent.RECAPTURE: Tag.KV_CACHE, UpdateEvent.COMMIT: Tag.GRAPH}
"""The step that finds a tag's memory in place; the step before it put it there."""
_AWAY = (Tag.GRAPH, Tag.KV_CACHE, Tag.WEIGHT)
"""The order in which memory goes: a graph does not outlive what it was captured on."""


def gone_with(tags: frozenset[Tag]) -> frozenset[Tag]:
    """What goes when these are put to sleep: a graph does not outlive what it was captured on."""
    return tags | {Tag.GRAPH} if tags else tags


class EngineState:
    """Thread-safe; `close` detaches from the words."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._lock = threading.RLock()
        self._weights_word = StatusWord(WEIGHTS_WORD, board.port)
        self._other_words = [StatusWord(word, board.port) for word in board.words if word != WEIGHTS_WORD]
        self._shown: LegacyStatus | None = LegacyStatus.NORMAL
        """What we left in the word; None where a foreign process has stored since, and what stands there is its."""
        self._pending: LegacyCommand | None = None
        self._reason = ""
        self.lifecycle = Lifecycle()
        self.last_version = ""
        """Live now or, while cleared, before: versions do not go back behind it."""
        self.content_digest = ""
        self.source = ""
        """Where the bytes of the committed version came from; empty where there is none."""
        self.commands_done = 0
        self.command = 0
        """The number of the last command on the board whose outcome is known here."""
        self.is_held = False
        """Somebody paused it, and nobody resumed it since."""
        self.is_draining = False
        """Admission is closed, and requests in flight still come to their end."""
        self.asleep: frozenset[Tag] = frozenset()
        """What somebody put to sleep; no update brings it back before somebody wakes it."""
        self.newest_version = ""
        """Published, as far as is known."""
        self._times_shown: Counter[LegacyStatus] = Counter()
        self._is_knocking = False
        """The word asks loops that wait for nothing else to come for a command of the board."""
        self._brought: frozenset[Tag] = frozenset(Tag)
        self._live_since_ns = 0
        self._apply_mode = ""
        self._has_receipt = False

    @property
    def weights_word(self) -> StatusWord:
        return self._weights_word

    @property
    def live_version(self) -> str:
        """Empty while none is live."""
        is_none = self.lifecycle.weight is Residency.DROPPED or self.lifecycle.admission is Admission.FENCED
        return "" if is_none else self.last_version

    @property
    def committed(self) -> Committed | None:
        """What every rank holds, or comes back to; None where there is nothing whole, or it sleeps."""
        is_held = bool(self.source) and self.lifecycle.weight is not Residency.OFFLOADED
        return Committed(self.last_version, self.content_digest, self.source) if is_held else None

    @property
    def is_serving(self) -> bool:
        return self.lifecycle.admission is Admission.SERVING

    @property
    def is_whole(self) -> bool:
        """It serves, or lets requests in flight end, and no rank has taken weights away, or is taking them back. What
        one rank has committed the others have, or will before they do anything else."""
        phase = self.lifecycle.update
        return self.is_decoding and (phase not in STALLED_PHASES or phase is UpdatePhase.COMMITTING)

    @property
    def is_decoding(self) -> bool:
        """Requests in flight make progress, but for a stall."""
        return self.is_serving or self.is_draining

    @property
    def is_fenced(self) -> bool:
        return self.lifecycle.admission is Admission.FENCED

    @property
    def is_empty(self) -> bool:
        """No rank holds anything."""
        return set(self.lifecycle.residencies) == {Residency.DROPPED}

    @property
    def is_live(self) -> bool:
        """Every rank holds the weights of one version where a forward pass would read them."""
        return not self.is_fenced and self.lifecycle.weight is Residency.RESIDENT

    def due(self, woken: frozenset[Tag] = frozenset()) -> frozenset[Tag]:
        """What is to be in place when nothing sleeps but what sleeps now, and is not `woken`: a graph goes with what it
        was captured on."""
        wanted = frozenset(Tag) - (self.asleep - woken)
        is_backed = wanted >= {Tag.WEIGHT, Tag.KV_CACHE}
        return wanted if is_backed else wanted - {Tag.GRAPH}

    # --- events ------------------------------------------------------------------------------------

    def start(self, live: Committed) -> None:
        """A complete version is live for the first time, or again, on every rank; but for what sleeps."""
        with self._lock:
            self._adopt(live)
            if not self._live_since_ns:
                self._note_live("")
            finished = [] if self.lifecycle.update is UpdatePhase.IDLE else [UpdateEvent.FINISH]
            due = self.due()
            gone = [TagEvent(tag, ResidencyEvent.DROP) for tag in _AWAY if tag not in due and self._is_there(tag)]
            come = [TagEvent(tag, ResidencyEvent.LOAD) for tag in Tag if tag in due and not self._is_there(tag)]
            self._apply(*finished, *gone, *come, is_settled=True)

    def _is_there(self, tag: Tag) -> bool:
        return self.lifecycle.residency(tag) is Residency.RESIDENT

    def take_over(
        self, record: layout.StatusRecord, committed: Committed | None, untold: layout.CommandRecord | None = None
    ) -> None:
        """In the place of a rank 0 that died, which wrote `record`. Numbers of commands and versions go on, and so does
        the legacy word: a command that was pending, or was written since, is taken again. What the other ranks may
        hold counts as there; it is not served. `untold`: what every rank committed and `record` does not say yet."""
        with self._lock:
            self.last_version, self.commands_done = record.last_version, record.commands_done
            self.command = record.command
            self.is_held = bool(record.is_held)
            self.asleep = tags_in(record.asleep)
            if untold is not None:
                self._note_untold(untold)
            self._shown = self._left_in_word(record)
            holds_nothing = {record.weight, record.kv_cache, record.graph} <= {"", Residency.DROPPED.value}
            if committed is not None:
                self._adopt(committed)
                self._live_since_ns, self._apply_mode = record.live_since_ns, record.apply_mode
                self._has_receipt = bool(record.has_receipt)
            elif holds_nothing and record.admission != Admission.FENCED.value:
                self.start_cleared()
                return
            self._reason = record.reason if committed is None else "rank 0 died and is back"
            self._apply(*(TagEvent(tag, ResidencyEvent.LOAD) for tag in Tag), AdmissionEvent.FENCE)

    def _note_untold(self, command: layout.CommandRecord) -> None:
        options = CommandOptions.decode(command.options)
        if command.kind == CommandKind.PAUSE:
            self.is_held = True
        elif command.kind == CommandKind.SLEEP:
            self.asleep |= options.tags
        elif command.kind in (CommandKind.UPDATE, CommandKind.WAKE):
            self._wake(options.woken, ends_pause=options.ends_pause)
        elif command.kind == CommandKind.CLEAR:
            self.asleep = frozenset()

    def _left_in_word(self, record: layout.StatusRecord) -> LegacyStatus | None:
        """As `_shown`. A rank 0 that died between its record and the word left the one or the other value there."""
        found = self._weights_word.load()
        is_ours = record.shown != layout.FOREIGN and found in (record.shown, record.legacy_status)
        is_command = found in {command.value for command in LegacyCommand}
        if found not in set(LegacyStatus) or (is_command and (record.pending or not is_ours)):
            return None
        return LegacyStatus(found)

    def start_cleared(self) -> None:
        """Every rank is there, without weights: the first update brings them."""
        self._apply(AdmissionEvent.PAUSE)

    def begin(self, event: UpdateEvent) -> None:
        """A step of an update begins on rank 0."""
        if event is UpdateEvent.COMMIT and self.lifecycle.update is UpdatePhase.COMMITTING:
            return  # tried again
        tag = _LOADED_BY.get(event)
        is_loaded = tag is not None and tag in self._brought and not self._is_there(tag)
        loaded = [TagEvent(tag, ResidencyEvent.LOAD)] if tag is not None and is_loaded else []
        self._apply(*loaded, event)

    def bring(self, tags: frozenset[Tag]) -> None:
        """What the next update finds in place, or brings."""
        self._brought = tags | {Tag.WEIGHT}

    def finish_update(self, live: Committed, command: int, apply_mode: str, options: CommandOptions) -> None:
        """Every rank committed: the engine serves that version, unless it is paused or part of it still sleeps.
        `options`: of that command."""
        with self._lock:
            self.command = command
            self._adopt(live)
            self._note_live(apply_mode)
            self._wake(options.woken, ends_pause=options.ends_pause)
            self._apply(UpdateEvent.FINISH, is_settled=True)

    def adopt(self, live: Committed, command: int, apply_mode: str, options: CommandOptions) -> None:
        """As `finish_update`, where a rank died since: it is to hold that version, before it is served."""
        with self._lock:
            self.command = command
            self._adopt(live)
            self._note_live(apply_mode)
            self._wake(options.woken, ends_pause=options.ends_pause)
            self.show()

    def _adopt(self, live: Committed) -> None:
        self.last_version, self.content_digest, self.source = live.version, live.content_digest, live.source

    def _note_live(self, apply_mode: str) -> None:
        self._live_since_ns, self._apply_mode = time.time_ns(), apply_mode

    def _wake(self, tags: frozenset[Tag], *, ends_pause: bool) -> None:
        """A wake after which nothing sleeps ends a pause as well, as FastDeploy's wakeup does."""
        self.asleep -= tags
        if ends_pause and not self.asleep:
            self.is_held = False

    def undo_update(self, before: Lifecycle) -> None:
        """Every living rank is back where it was: at `before`; or it has committed, and another one died since."""
        if self.lifecycle.update is UpdatePhase.IDLE:
            return
        if self.lifecycle.update is UpdatePhase.COMMITTING:
            self._apply(UpdateEvent.FINISH)
            return
        self._apply(UpdateEvent.UNDO, *self._back_to(before), UpdateEvent.UNDONE)

    def _back_to(self, before: Lifecycle) -> list[TagEvent]:
        events = {Residency.DROPPED: ResidencyEvent.DROP, Residency.OFFLOADED: ResidencyEvent.OFFLOAD}
        changed = [tag for tag in _AWAY if before.residency(tag) is not self.lifecycle.residency(tag)]
        return [TagEvent(tag, events[before.residency(tag)]) for tag in changed]

    def clear(self, command: int) -> None:
        """Every rank has freed everything."""
        with self._lock:
            self.command = command
            self._forget_version()
            pause = [AdmissionEvent.PAUSE] if self.is_serving else []
            held = [tag for tag in _AWAY if self.lifecycle.residency(tag) is not Residency.DROPPED]
            self._apply(*pause, *(TagEvent(tag, ResidencyEvent.DROP) for tag in held))

    def _forget_version(self) -> None:
        self.content_digest = self.source = ""
        self._live_since_ns, self._has_receipt = 0, False

    # --- pauses and sleep --------------------------------------------------------------------------

    def hold(self) -> None:
        """Every rank is quiet, until somebody resumes the engine."""
        with self._lock:
            self.is_held = True
            self.show()

    def let_go(self) -> None:
        """Ends a pause. What is away still keeps requests out."""
        with self._lock:
            self.is_held = False
            self._apply(is_settled=True)

    def drain(self, is_draining: bool) -> None:
        self.is_draining = is_draining

    def sleep(self, tags: frozenset[Tag], level: int, command: int) -> None:
        """Every rank has given the memory of these tags away, and what cannot be without it."""
        with self._lock:
            self.command = command
            self.asleep |= tags
            away = gone_with(tags)
            if Tag.WEIGHT in away and level == DROP_LEVEL:
                self._forget_version()
            self._apply(*(TagEvent(tag, event) for tag in _AWAY if tag in away and (event := self._going(tag, level))))

    def _going(self, tag: Tag, level: int) -> ResidencyEvent | None:
        """How its memory goes; None where it is as far gone already."""
        now = self.lifecycle.residency(tag)
        if tag is Tag.WEIGHT and level != DROP_LEVEL:
            return ResidencyEvent.OFFLOAD if now is Residency.RESIDENT else None
        return None if now is Residency.DROPPED else ResidencyEvent.DROP

    def wake(self, tags: frozenset[Tag], brought: frozenset[Tag], command: int) -> None:
        """Every rank has what is `brought` in place; `tags` sleep no more."""
        with self._lock:
            self.command = command
            self._wake(tags, ends_pause=True)
            come = [tag for tag in Tag if tag in brought and not self._is_there(tag)]
            self._apply(*(TagEvent(tag, ResidencyEvent.LOAD) for tag in come), is_settled=True)

    def forget_sleep(self) -> None:
        """All is given away: whoever brings weights back brings everything."""
        with self._lock:
            self.asleep = frozenset()
            self.show()

    def note_newest(self, version: str) -> None:
        with self._lock:
            if version != self.newest_version:
                self.newest_version = version
                self.show()

    def note_receipt(self, has_receipt: bool) -> None:
        """Whether there is a proof of what is live; shown with the next event."""
        self._has_receipt = has_receipt

    def pause(self) -> None:
        """Admission closes: what follows takes weights away."""
        if self.is_serving:
            self._apply(AdmissionEvent.PAUSE)

    def resume(self) -> None:
        """What closed admission came to nothing."""
        if self.lifecycle.admission is Admission.PAUSED:
            self._apply(AdmissionEvent.RESUME)

    def fence(self, reason: str, *, is_torn: bool = True) -> None:
        """No complete version is live any more. Not `is_torn`: a rank is missing, and may come back to the one that the
        others hold."""
        with self._lock:
            self._reason = reason
            if is_torn:
                self._forget_version()
            is_fenced = self.lifecycle.admission is Admission.FENCED
            # In one go: between an update's end and the fence nobody may see the engine serve.
            self._apply(*self._out_of_update(), *([] if is_fenced else [AdmissionEvent.FENCE]))

    def _out_of_update(self) -> list[UpdateEvent]:
        """The events that end what the update table is in."""
        phase = self.lifecycle.update
        if phase in (UpdatePhase.IDLE, UpdatePhase.COMMITTING):
            return [UpdateEvent.FINISH] if phase is UpdatePhase.COMMITTING else []
        return [UpdateEvent.UNDONE] if phase is UpdatePhase.UNDOING else [UpdateEvent.UNDO, UpdateEvent.UNDONE]

    def _apply(self, *events: AdmissionEvent | UpdateEvent | TagEvent, is_settled: bool = False) -> None:
        """All events, or none where one of them is illegal. `is_settled`: and then whether requests may come in follows
        from what is in place; in one go, so that nobody sees an engine that does not serve in between."""
        with self._lock:
            lifecycle = self.lifecycle
            for event in events:
                lifecycle = lifecycle.after(event)
            if is_settled and (opening := self._opening(lifecycle)) is not None:
                lifecycle = lifecycle.after(opening)
            self.lifecycle = lifecycle
            self.show()

    def _opening(self, lifecycle: Lifecycle) -> AdmissionEvent | None:
        """Opens or closes admission; None where it is right as it is."""
        may_serve = not self.is_held and set(lifecycle.residencies) == {Residency.RESIDENT}
        if may_serve and lifecycle.admission is not Admission.SERVING:
            return AdmissionEvent.RESUME if lifecycle.admission is Admission.PAUSED else AdmissionEvent.LOAD
        return AdmissionEvent.PAUSE if not may_serve and lifecycle.admission is not Admission.PAUSED else None

    # --- the legacy command ------------------------------------------------------------------------

    def take_legacy_command(self) -> LegacyCommand | None:
        """The command that a foreign process wrote into the word, now pending; None when it reads as we left it."""
        with self._lock:
            value = self._weights_word.load()
            if value == self._shown:
                return None
            if value not in {command.value for command in LegacyCommand}:
                self._exchange(value)  # no command: a foreign NORMAL or CLEARED, or noise; show the truth again
                self._write_record()
                return None
            self._pending, self._shown = LegacyCommand(value), LegacyStatus(value)
            self.show()
            return self._pending

    def end_legacy_command(self) -> None:
        """The outcome is there: the word goes to what is true now, unless a newer command stands in it."""
        with self._lock:
            self._pending = None
            self.show()

    # --- showing -----------------------------------------------------------------------------------

    def count_command(self, command: int) -> None:
        """One more is told; on the board `command` was the last."""
        with self._lock:
            self.command = command
            self.commands_done += 1
            self._is_knocking = False
            self.show()

    def times_shown(self, value: LegacyStatus) -> int:
        """How often the word came to read it, whatever a foreign process stored a moment later."""
        with self._lock:
            return self._times_shown[value]

    def knock(self) -> None:
        """Until the command that is carried out is told, the word reads UPDATING in the place of CLEARED."""
        with self._lock:
            self._is_knocking = True
            self.show()

    def _wanted(self) -> LegacyStatus:
        """What the word is to read."""
        word = legacy_word(self.lifecycle, self._pending)
        return LegacyStatus.UPDATING if self._is_knocking and word is LegacyStatus.CLEARED else word

    def has_told(self, command: int) -> bool:
        """Its outcome is known, and shown."""
        with self._lock:
            return self.command >= command and self.lifecycle.update is UpdatePhase.IDLE

    def show(self) -> None:
        """Writes the status record and then the words, so that whoever a word wakes reads a record that is not
        older."""
        with self._lock:
            if self._weights_word.load() != self._shown:
                self._shown = None
            noted = self._shown
            self._write_record()
            self._show_others()
            self._exchange(noted)
            if self._shown is not noted:
                self._write_record()  # for a rank 0 to come: whose the value in the word is

    def _write_record(self) -> None:
        answer = answer_at_admission(self.lifecycle)
        record = layout.StatusRecord(
            admission=self.lifecycle.admission.value,
            update=self.lifecycle.update.value,
            version=self.live_version,
            last_version=self.last_version,
            content_digest=self.content_digest,
            source=self.source,
            legacy_status=self._wanted(),
            pending=self._pending or 0,
            shown=layout.FOREIGN if self._shown is None else self._shown,
            is_serving=int(answer.is_served),
            commands_done=self.commands_done,
            command=self.command,
            reason=self._why_refused(answer.reason),
            weight=self.lifecycle.weight.value,
            kv_cache=self.lifecycle.kv_cache.value,
            graph=self.lifecycle.graph.value,
            asleep=bits_of(self.asleep),
            is_held=int(self.is_held),
            live_since_ns=self._live_since_ns,
            apply_mode=self._apply_mode,
            has_receipt=int(self._has_receipt),
            newest_version=self.newest_version,
        )
        self._board.write(record, layout.STATUS_OFFSET)

    def _why_refused(self, reason: str) -> str:
        """`reason` says no more than the lifecycle knows. Where a version is committed, a fence means that a rank is
        missing, and there is nothing that a client could do about that."""
        if self.is_fenced:
            return f"the engine is fenced: {self._reason}" if self.committed else f"{reason}: {self._reason}"
        if self.asleep and self.lifecycle.admission is Admission.PAUSED:
            tags = ", ".join(tag.value for tag in Tag if tag in self.asleep)
            return f"the engine is asleep: {tags} given away; wake it"
        return reason

    def _exchange(self, expected: int | None) -> None:
        """Puts what is true in the place of `expected`. What a foreign process stored instead is left to be taken, also
        if it has the looks of something of ours by then."""
        if expected is None:
            return
        wanted = self._wanted()
        found = self._weights_word.load() if wanted == expected else self._weights_word.exchange(expected, wanted)
        self._shown = wanted if found == expected else None
        if found == expected != wanted:
            self._times_shown[wanted] += 1

    def _show_others(self) -> None:
        is_dropped = self.lifecycle.kv_cache is Residency.DROPPED
        value = LegacyStatus.CLEARED if is_dropped else LegacyStatus.NORMAL
        for word in self._other_words:
            if word.load() != value:
                word.store(value)

    def follow_words(self, on_recreated: Callable[[], None]) -> None:
        """Restores vanished names; calls `on_recreated` when the weights word is another segment now."""
        with self._lock:
            for word in self._other_words:
                word.follow()
            if self._weights_word.follow():
                self._shown = LegacyStatus.NORMAL  # what a word is created with; anything else in it is a command
                on_recreated()
                self.show()

    def close(self) -> None:
        for word in (self._weights_word, *self._other_words):
            word.close()
