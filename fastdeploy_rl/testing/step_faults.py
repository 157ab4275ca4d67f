"""A StepObserver with which one thing goes wrong at one end of one step: the process dies or stops, the step fails, or
a byte changes where nobody meant it to.

    faults = StepFaults()
    DynamicWeightManager(..., observer=faults)
    faults.arm(StepFault(Act.KILL, "install", "end"))       # at the end of the next install of this rank

Owns what each act does. Refuses to judge what comes of it. Invariant: an armed fault happens once, if it is not a
lasting one; a process that was started anew has none."""

import enum
import errno
import os
import signal
import threading
from typing import Literal

import msgspec

from fastdeploy_rl.board import layout
from fastdeploy_rl.board.layout import RankRecord
from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.update.steps import RankUpdate, UpdateStep

When = Literal["begin", "end"]
BALLOT_OFFSET = 24
"""Of the ballot in the bytes of a RankRecord."""


class Act(enum.Enum):
    """What goes wrong. `target` and `offset` of a StepFault mean what is said here; the others need none."""

    KILL = "kill"
    STOP = "stop"
    """SIGSTOP: until somebody sends SIGCONT."""
    RAISE = "raise"
    OUT_OF_MEMORY = "out_of_memory"
    OUT_OF_DISK = "out_of_disk"
    FLIP_FILE = "flip_file"
    """A bit of the byte at `offset` of the file `target`."""
    FLIP_PARAMETER = "flip_parameter"
    """A bit of the byte at `offset` of the bound parameter `target`, which must lie in this process's own memory."""
    FLIP_STAGED = "flip_staged"
    """As FLIP_PARAMETER, of the version that was staged and is not bound yet."""
    FLIP_RECORD = "flip_record"
    """A bit of this rank's ballot, in the copy that holds, of the board whose file is `target`."""
    FLIP_COUNTER = "flip_counter"
    """The lowest bit of the counter of this rank's record there, so that the former copy seems to hold."""


class StepFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`act` at the `when` end of the step named `step`: the next time, or as often as that comes (`is_lasting`)."""

    act: Act
    step: str
    when: When
    target: str = ""
    offset: int = 0
    is_lasting: bool = False


class StepFaults:
    """One rank's. `arm` and `disarm` may be called by any thread between updates."""

    def __init__(self) -> None:
        self._armed: StepFault | None = None
        self._is_pending = False

    def arm(self, fault: StepFault) -> None:
        self._armed, self._is_pending = fault, True

    def disarm(self) -> bool:
        """True where a fault did not happen yet; then it will not."""
        was_pending, self._armed, self._is_pending = self._is_pending, None, False
        return was_pending

    def begin(self, step: UpdateStep, update: RankUpdate) -> None:
        self._meet(step, "begin", update)

    def end(self, step: UpdateStep, update: RankUpdate) -> None:
        self._meet(step, "end", update)

    def _meet(self, step: UpdateStep, when: When, update: RankUpdate) -> None:
        fault = self._armed
        if fault is not None and (fault.step, fault.when) == (step.name, when):
            self._armed = fault if fault.is_lasting else None
            self._is_pending = False
            happen(fault, update)


def happen(fault: StepFault, update: RankUpdate) -> None:
    """Lets it happen to this rank now. RuntimeError, MemoryError or OSError where that is what happens."""
    rank = update.runner.rank
    if fault.act is Act.KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.act is Act.STOP:
        # To this very thread: another one would have to be scheduled first, and this one would go on meanwhile.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif fault.act is Act.RAISE:
        raise RuntimeError("told to fail")
    elif fault.act is Act.OUT_OF_MEMORY:
        raise MemoryError("told to find no memory")
    elif fault.act is Act.OUT_OF_DISK:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif fault.act is Act.FLIP_FILE:
        flip(fault.target, fault.offset)
    elif fault.act is Act.FLIP_PARAMETER:
        _flip_tensor(update.runner.bound()[fault.target], fault.offset)
    elif fault.act is Act.FLIP_STAGED and update.new is not None:
        _flip_tensor(update.new.views[fault.target], fault.offset)
    elif fault.act is Act.FLIP_RECORD:
        flip(fault.target, _ballot_offset(fault.target, rank))
    elif fault.act is Act.FLIP_COUNTER:
        flip(fault.target, layout.rank_offset(rank))
    else:
        raise ConfigurationError(f"{fault.act.value} is not possible at the {fault.when} of {fault.step}")


def flip(path: str, offset: int) -> None:
    """Turns the lowest bit of one byte of a file around; a second call turns it back."""
    with open(path, "r+b", buffering=0) as file:
        value = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([value ^ 1]), offset)


def _flip_tensor(tensor: TensorView, offset: int) -> None:
    with memoryview(tensor.mapping) as view:
        view[tensor.offset + offset] ^= 1


def _ballot_offset(board: str, rank: int) -> int:
    start = layout.rank_offset(rank)
    with open(board, "rb", buffering=0) as file:
        counter = int.from_bytes(os.pread(file.fileno(), layout.COUNTER_BYTES, start), "little")
    return start + layout.copy_offset(RankRecord, counter) + layout.CHECKSUM_BYTES + BALLOT_OFFSET
