"""Which version an engine committed last, read from its board: what a rank that died comes back to.

Owns the reading of the commit word for that purpose. Invariant: a version is committed from the moment in which its
commit word reads YES, whoever lived to tell it."""

from typing import NamedTuple

from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import CommandRecord, Decision, StatusRecord
from fastdeploy_rl.command_options import CommandOptions
from fastdeploy_rl.lifecycle import Residency, Tag
from fastdeploy_rl.report import CommandKind
from fastdeploy_rl.version import WeightVersion

_OF_TAGS = (CommandKind.SLEEP, CommandKind.WAKE)
CHECKPOINT = "checkpoint"
"""The source of a version that no trainer published: it came with the model."""


class Committed(NamedTuple):
    """Texts of version and content digest, and where its bytes came from: CHECKPOINT or a load strategy."""

    version: str
    content_digest: str
    source: str

    @property
    def is_cold(self) -> bool:
        return self.source == CHECKPOINT


def was_committed(board: Board, command: CommandRecord) -> bool:
    """The present command's commit word reads YES."""
    return board.load(layout.COMMIT_DECISION_OFFSET) == layout.decision_word(command.number, Decision.YES)


def untold_command(board: Board) -> CommandRecord | None:
    """The last command, where it was committed and rank 0 died before it told so."""
    status = board.read(StatusRecord, layout.STATUS_OFFSET)
    command = board.read(CommandRecord, layout.COMMAND_OFFSET)
    return command if command.number > status.command and was_committed(board, command) else None


def committed_version(board: Board, load_strategy: str) -> Committed | None:
    """None where no version is whole: before the first start, while cleared or asleep, after a fence.

    Rank 0 tells the outcome of a command some time after the commit word said it; in between it may die. Where weights
    went to sleep, or came from there, what one of the others has of them is then of no use: all is dropped, and comes
    back anew."""
    status = board.read(StatusRecord, layout.STATUS_OFFSET)
    if (command := untold_command(board)) is not None:
        moves_weights = Tag.WEIGHT in CommandOptions.decode(command.options).tags
        if command.kind == CommandKind.CLEAR or (command.kind in _OF_TAGS and moves_weights):
            return None
        if command.kind == CommandKind.UPDATE:
            version = str(WeightVersion(command.epoch, command.step))
            return Committed(version, command.content_digest, load_strategy)
    is_held = bool(status.source) and status.weight != Residency.OFFLOADED.value
    return Committed(status.last_version, status.content_digest, status.source) if is_held else None
