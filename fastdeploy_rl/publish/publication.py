"""One publication: its named steps, as data, and how each is undone while the version is not announced.

    a copy:          check place copy seal                   and then
    borrowed memory: check locate sum_up export              and then
    alone:           describe write_manifest write_latest tidy
    part 0 of many:  gather describe decide write_manifest write_latest tidy
    another part:    offer tidy

Owns the order, and the working state from left to right. Refuses to know how a channel is opened and closed. Invariant:
`LATEST` changes in one step and at once; before it the version that stands is untouched, after it nothing is undone.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from fastdeploy_rl.checksum import Fletcher4
from fastdeploy_rl.errors import LifecycleError, ManifestError
from fastdeploy_rl.manifest import Manifest, Segment
from fastdeploy_rl.publish.arena_shelf import ArenaInHand, ArenaShelf
from fastdeploy_rl.publish.arrangement import ArrangedTensor, Arrangement, Piece, in_arena
from fastdeploy_rl.publish.channel import Channel, Latest
from fastdeploy_rl.publish.contribution import Contribution, unite
from fastdeploy_rl.publish.copying import OnProgress, copy_out
from fastdeploy_rl.publish.leases import LeaseTable
from fastdeploy_rl.publish.meeting import Found, Meeting, Offer, Part
from fastdeploy_rl.publish.trainer_memory import LentMemory, Place
from fastdeploy_rl.version import WeightVersion


class Wish(NamedTuple):
    """What is to be published: how, until when, and whom to tell on the way."""

    arrangement: Arrangement
    step: int
    is_borrowed: bool
    deadline_ns: int
    on_progress: OnProgress | None


class Prepared(NamedTuple):
    """What stands when a publication begins. `kept`: rows of the latest version; `spared`: of the one before."""

    version: WeightVersion
    kept: Collection[int]
    spared: Collection[int]


class Surroundings(NamedTuple):
    """What a publication works with. `prepare` looks at what stands, or raises; `conclude` tidies up after it."""

    channel: Channel
    part: Part
    table: LeaseTable
    shelf: ArenaShelf
    memory: LentMemory
    meeting: Meeting
    prepare: Callable[[Wish], Prepared]
    conclude: Callable[[Found], None]


@dataclass
class Publication:
    """The working state of one publication: what the steps read and fill in."""

    around: Surroundings
    wish: Wish
    prepared: Prepared | None = None
    arena: ArenaInHand | None = None
    places: dict[str, Place] = field(default_factory=dict)
    rows: tuple[int, ...] = ()
    sums: list[list[Fletcher4]] = field(default_factory=list)
    contribution: Contribution | None = None
    offers: Sequence[Offer] = ()
    decision: ExitStack = field(default_factory=ExitStack)
    manifest: Manifest | None = None
    latest: Latest | None = None


@dataclass(frozen=True)
class PublishStep:
    """A named step. `undo` may find it half done, and is called only while the version is not announced."""

    name: str
    do: Callable[[Publication], None]
    undo: Callable[[Publication], None]


class PublishObserver(Protocol):
    """Is told the beginning and the end of each step; what it raises is that step's failure."""

    def begin(self, step: PublishStep) -> None: ...

    def end(self, step: PublishStep) -> None: ...


def run(publication: Publication, observer: PublishObserver | None) -> Found:
    """All steps, in order. What fails before the version is announced is undone, back to the first step; a step that
    cannot be undone keeps no other from it."""
    begun: list[PublishStep] = []
    try:
        for step in steps_of(publication.around.part, publication.wish.is_borrowed):
            begun.append(step)
            if observer is not None:
                observer.begin(step)
            step.do(publication)
            if observer is not None:
                observer.end(step)
    except BaseException:
        if not _is_announced(publication):
            with ExitStack() as undoing:
                for step in begun:
                    undoing.callback(step.undo, publication)
        raise
    finally:
        publication.decision.close()
    return _found(publication)


def steps_of(part: Part, is_borrowed: bool) -> tuple[PublishStep, ...]:
    """The steps that this process takes."""
    own = BORROWING_STEPS if is_borrowed else COPYING_STEPS
    if part.index:
        return own + FOLLOWING_STEPS
    return own + (LEADING_STEPS if part.count > 1 else ANNOUNCING_STEPS)


def _is_announced(publication: Publication) -> bool:
    """Engines may hold it: `LATEST` names what this process put into it."""
    own, channel = publication.contribution, publication.around.channel
    if own is None:
        return False
    try:
        latest = channel.read_latest()
        return latest is not None and set(own.segments) <= set(channel.read_manifest(latest).segments)
    except (FileNotFoundError, ManifestError):
        return False  # no reader can follow it


def _nothing(publication: Publication) -> None:
    return None


def _check(publication: Publication) -> None:
    publication.prepared = publication.around.prepare(publication.wish)


# --- a copy ----------------------------------------------------------------------------------------


def _place(publication: Publication) -> None:
    wish, prepared = publication.wish, _known(publication.prepared)
    publication.arena = publication.around.shelf.begin(
        wish.arrangement.num_bytes, prepared.kept, prepared.spared, wish.deadline_ns
    )


def _give_up_place(publication: Publication) -> None:
    arena, publication.arena = publication.arena, None
    if arena is not None and publication.around.table.is_written(arena.row):
        publication.around.shelf.end(arena.row)


def _copy(publication: Publication) -> None:
    arena, wish = _known(publication.arena), publication.wish
    publication.around.table.set_version(arena.row, str(_known(publication.prepared).version))
    publication.sums = copy_out(wish.arrangement, arena.mapping, wish.on_progress)


def _seal(publication: Publication) -> None:
    arena, part = _known(publication.arena), publication.around.part
    publication.around.shelf.end(arena.row)
    segment = _segment(publication, arena, is_borrowed=False)
    publication.contribution = publication.wish.arrangement.contribution(
        part.index, [segment], in_arena, publication.sums
    )


def _segment(publication: Publication, arena: ArenaInHand, is_borrowed: bool) -> Segment:
    """Of an arena whose write has ended."""
    return Segment(
        kind="shm",
        locator=arena.segment,
        num_bytes=arena.mapping.num_bytes,
        arena=arena.row,
        generation=publication.around.table.generation(arena.row),
        publisher=publication.around.part.index,
        is_borrowed=is_borrowed,
    )


# --- borrowed memory -------------------------------------------------------------------------------


def _locate(publication: Publication) -> None:
    """A tensor without bytes lies where another does: memory that is not published otherwise stays the trainer's."""
    places: dict[str, Place] = {}
    tensors = publication.wish.arrangement.tensors
    for tensor in sorted(tensors, key=lambda tensor: tensor.host.key.num_bytes, reverse=True):
        if places and not tensor.host.key.num_bytes:
            places[tensor.name] = next(iter(places.values()))
        else:
            places[tensor.name] = publication.around.memory.locate(tensor.trainer_name, tensor.host)
    rows = sorted({place.row for place in places.values()})
    publication.around.memory.check_owned(rows)
    publication.places, publication.rows = places, tuple(rows)


def _sum_up(publication: Publication) -> None:
    publication.sums = copy_out(publication.wish.arrangement, None, publication.wish.on_progress)


def _export(publication: Publication) -> None:
    memory, places, rows = publication.around.memory, publication.places, publication.rows
    memory.hand_out(rows, str(_known(publication.prepared).version))

    def place(tensor: ArrangedTensor, piece: Piece) -> tuple[int, int]:
        return rows.index(places[tensor.name].row), places[tensor.name].offset

    segments = [_segment(publication, memory.segment(row), is_borrowed=True) for row in rows]
    publication.contribution = publication.wish.arrangement.contribution(
        publication.around.part.index, segments, place, publication.sums
    )


def _take_in(publication: Publication) -> None:
    publication.around.memory.take_in(publication.rows)


# --- announced -------------------------------------------------------------------------------------


def _gather(publication: Publication) -> None:
    wish = publication.wish
    publication.offers = publication.around.meeting.gather(wish.step, wish.deadline_ns)


def _describe(publication: Publication) -> None:
    others = [offer.contribution for offer in publication.offers if offer.contribution]
    publication.manifest = unite(_known(publication.prepared).version, [_known(publication.contribution), *others])


def _decide(publication: Publication) -> None:
    """DECISION is held until `LATEST` is written."""
    deciding = publication.around.meeting.deciding_about(publication.offers, publication.wish.deadline_ns)
    publication.decision.enter_context(deciding)


def _write_manifest(publication: Publication) -> None:
    publication.latest = publication.around.channel.write_manifest(_known(publication.manifest))


def _remove_manifest(publication: Publication) -> None:
    if publication.latest is not None:
        publication.around.channel.remove_file(publication.latest.file)


def _write_latest(publication: Publication) -> None:
    publication.around.channel.write_latest(_known(publication.latest))
    publication.decision.close()


def _offer(publication: Publication) -> None:
    wish, own = publication.wish, _known(publication.contribution)
    found = publication.around.meeting.follow(wish.step, own, wish.deadline_ns)
    publication.manifest, publication.latest = found


def _tidy(publication: Publication) -> None:
    publication.around.conclude(_found(publication))


COPYING_STEPS = (
    PublishStep("check", _check, _nothing),
    PublishStep("place", _place, _give_up_place),
    PublishStep("copy", _copy, _nothing),
    PublishStep("seal", _seal, _nothing),
)
BORROWING_STEPS = (
    PublishStep("check", _check, _nothing),
    PublishStep("locate", _locate, _nothing),
    PublishStep("sum_up", _sum_up, _nothing),
    PublishStep("export", _export, _take_in),
)
ANNOUNCING_STEPS = (
    PublishStep("describe", _describe, _nothing),
    PublishStep("write_manifest", _write_manifest, _remove_manifest),
    PublishStep("write_latest", _write_latest, _nothing),
    PublishStep("tidy", _tidy, _nothing),
)
LEADING_STEPS = (
    PublishStep("gather", _gather, _nothing),
    ANNOUNCING_STEPS[0],
    PublishStep("decide", _decide, _nothing),
    *ANNOUNCING_STEPS[1:],
)
FOLLOWING_STEPS = (PublishStep("offer", _offer, _nothing), ANNOUNCING_STEPS[-1])


def _found(publication: Publication) -> Found:
    return Found(_known(publication.manifest), _known(publication.latest))


_Value = TypeVar("_Value")


def _known(value: _Value | None) -> _Value:
    """What an earlier step filled in."""
    if value is None:
        raise LifecycleError("a step of a publication ran before the one that prepares it")
    return value
