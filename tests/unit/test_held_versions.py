"""What a rank fetched, as others get it: the right bytes or an error, and memory that comes back when it is wanted."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_rl import manifest as manifests
from fastdeploy_rl._native import Mapping
from fastdeploy_rl.checksum import of_bytes
from fastdeploy_rl.errors import NoPublicationError, SegmentError
from fastdeploy_rl.manifest import Manifest, Part, Segment, Tensor
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.sources.held_versions import HeldVersions
from fastdeploy_rl.transport.base import Offer
from fastdeploy_rl.transport.held_bytes import HeldBytes, Piece, Place
from fastdeploy_rl.version import WeightVersion

SIZES = (4096, 1000, 0, 64)
SEGMENTS = tuple(Segment("shm", f"segment.{i}", size, 0, 0) for i, size in enumerate(SIZES))
PUBLISHED = [np.random.default_rng(i).integers(0, 256, size, np.uint8).tobytes() for i, size in enumerate(SIZES)]


def manifest_of(step: int) -> Manifest:
    tensor = Tensor("w", "U8", (64,), None, (Part(3, 0, 0, 0),), of_bytes(PUBLISHED[3]).hex())
    return manifests.build_manifest(WeightVersion(1, step), "full", SEGMENTS, [tensor], {})


def offer_of(step: int) -> Offer:
    manifest = manifest_of(step)
    return Offer(manifest.weight_version, manifest, manifests.file_digest(manifests.encode(manifest)))


def bytes_of(wanted: ByteRange) -> bytes:
    """As the publisher has them, row by row: written down without anything of the code under test."""
    data = PUBLISHED[wanted.segment]
    starts = [wanted.offset + row * wanted.stride for row in range(wanted.rows)]
    return b"".join(data[start : start + wanted.row_bytes] for start in starts)


def addresses(ranges: Sequence[ByteRange]) -> set[tuple[int, int]]:
    """Segment and offset of every byte."""
    rows = [(each, each.offset + row * each.stride) for each in ranges for row in range(each.rows)]
    return {(each.segment, start + i) for each, start in rows for i in range(each.row_bytes)}


def fetched(ranges: Sequence[ByteRange]) -> Mapping:
    """A mapping into which those ranges came."""
    arena = Mapping.private(1 << 16)
    for each in ranges:
        memoryview(arena)[each.target_offset : each.target_offset + each.num_bytes] = bytes_of(each)
    return arena


def packed(ranges: Sequence[ByteRange], gap: int = 0) -> list[ByteRange]:
    """The same with target offsets one behind the other."""
    placed, at = [], gap
    for each in ranges:
        placed.append(each._replace(target_offset=at))
        at += each.num_bytes + gap
    return placed


def found(places: Sequence[Place], arena: Mapping) -> bytes:
    return b"".join(
        bytes(memoryview(arena)[place.offset + row * place.stride :][: place.num_bytes])
        for place in places
        for row in range(place.rows)
    )


WHOLE = [ByteRange(0, 0, 0, 1, 4096, 0), ByteRange(1, 0, 0, 1, 1000, 4096)]


@st.composite
def byte_ranges(draw: st.DrawFn) -> ByteRange:
    segment = draw(st.sampled_from([0, 1, 3]))
    row_bytes = draw(st.integers(0, 24))
    stride = draw(st.integers(row_bytes, 64))
    offset = draw(
        st.integers(0, min(96, SIZES[segment] - row_bytes))
    )  # near each other: gaps and overlaps are the point
    limit = (SIZES[segment] - row_bytes - offset) // stride + 1 if stride else 3
    return ByteRange(segment, offset, stride, draw(st.integers(0, min(limit, 12))), row_bytes, 0)


@given(st.lists(byte_ranges(), max_size=8), st.lists(byte_ranges(), max_size=4), st.integers(0, 3))
def test_whatever_is_asked_for_comes_byte_by_byte_or_not_at_all(
    held: list[ByteRange], wanted: list[ByteRange], gap: int
) -> None:
    """Also where what is held overlaps, and where one row is spread over several runs."""
    held = packed(held, gap)
    arena, index = fetched(held), HeldBytes(held, SEGMENTS)
    if addresses(wanted) <= addresses(held):
        assert found(index.places(wanted), arena) == b"".join(map(bytes_of, wanted))
    else:
        with pytest.raises(NoPublicationError, match="not all held here"):
            index.places(wanted)


def test_rows_of_one_pattern_are_one_place() -> None:
    """Whatever comes before and behind them."""
    held = packed([ByteRange(0, 0, 32, 100, 16, 0)], 0)
    index, arena = HeldBytes(held, SEGMENTS), fetched(held)
    wanted = [ByteRange(0, 0, 16, 1, 8, 0), ByteRange(0, 8, 32, 100, 8, 0), ByteRange(0, 0, 16, 1, 8, 0)]
    assert index.places(wanted[1:2]) == [Place(8, 8, 16, 100)]
    assert len(index.places(wanted)) <= 5
    assert found(index.places(wanted), arena) == b"".join(map(bytes_of, wanted))
    assert index.places([]) == []


def landings(pieces: Sequence[Piece]) -> dict[tuple[int, int], tuple[int, int]]:
    """By range and place where a byte lands: segment and offset of the byte. A byte that lands twice is an error."""
    lands: dict[tuple[int, int], tuple[int, int]] = {}
    for number, each, target_stride in pieces:
        for row in range(each.rows):
            for i in range(each.row_bytes):
                place = number, each.target_offset + row * target_stride + i
                assert place not in lands
                lands[place] = each.segment, each.offset + row * each.stride + i
    return lands


@given(st.lists(byte_ranges(), max_size=8), st.lists(byte_ranges(), max_size=4), st.integers(0, 3))
def test_what_is_cut_is_held_or_missing_and_lands_where_it_would_have(
    held: list[ByteRange], wanted: list[ByteRange], gap: int
) -> None:
    """Each byte once, and none that was not asked for."""
    index = HeldBytes(packed(held, 5), SEGMENTS)
    pieces = [Piece.whole(*each) for each in enumerate(packed(wanted, gap))]
    cut = index.cut(pieces)
    assert set(landings(cut.held).values()) <= addresses(held)
    assert set(landings(cut.missing).values()).isdisjoint(addresses(held))
    assert landings([*cut.held, *cut.missing]) == landings(pieces)
    half = HeldBytes(packed(held[::2], 5), SEGMENTS).cut(pieces)
    assert landings([*half.held, *index.cut(half.missing).held, *cut.missing]) == landings(pieces)
    parts = [part for piece in cut.held for part in piece.by_rows(40)]
    assert landings(parts) == landings(cut.held)
    assert all(part.range.num_bytes <= 40 or part.range.rows == 1 for part in parts)


def test_a_range_that_is_held_or_missing_whole_stays_as_it_is() -> None:
    columns = ByteRange(0, 16, 64, 60, 32, 512)
    other = ByteRange(0, 48, 64, 60, 16, 4096)
    cut = HeldBytes([columns._replace(target_offset=0)], SEGMENTS).cut([Piece.whole(4, columns), Piece.whole(7, other)])
    assert cut.held == [Piece.whole(4, columns)]
    assert cut.missing == [Piece.whole(7, other)]


def test_half_of_each_row_is_one_piece_whether_rows_are_apart_or_not() -> None:
    """Thousands of rows come in one question."""
    left = HeldBytes([ByteRange(0, 0, 64, 60, 32, 0)], SEGMENTS)
    for wanted in (ByteRange(0, 0, 64, 60, 64, 512), ByteRange(0, 0, 3840, 1, 3840, 512)):
        cut = left.cut([Piece.whole(0, wanted)])
        assert cut.held == [Piece(0, ByteRange(0, 0, 64, 60, 32, 512), 64)]
        assert cut.missing == [Piece(0, ByteRange(0, 32, 64, 60, 32, 544), 64)]


def test_what_was_fetched_as_rows_comes_in_one_piece_where_it_can() -> None:
    """A column slice is packed in the arena: who asks for the same slice is sent one run."""
    columns = ByteRange(0, 16, 64, 60, 32, 512)
    index = HeldBytes([columns], SEGMENTS)
    assert index.places([columns]) == [Place(512, 60 * 32, 60 * 32, 1)]
    assert index.places([columns._replace(row_bytes=8, rows=2)]) == [Place(512, 8, 32, 2)]


def test_neighbours_of_another_segment_are_not_taken_for_its_own() -> None:
    """The last byte of one segment and the first of the next lie side by side in the arena."""
    index = HeldBytes(packed([ByteRange(0, 4095, 0, 1, 1, 0), ByteRange(1, 0, 0, 1, 1, 0)]), SEGMENTS)
    with pytest.raises(ValueError, match="leave their segment"):
        index.places([ByteRange(0, 4095, 0, 1, 2, 0)])


@pytest.mark.parametrize(
    "wrong",
    [
        ByteRange(4, 0, 0, 1, 1, 0),
        ByteRange(-1, 0, 0, 1, 1, 0),
        ByteRange(0, -1, 0, 1, 1, 0),
        ByteRange(0, 4096, 0, 1, 1, 0),
        ByteRange(2, 0, 0, 1, 1, 0),
        ByteRange(0, 0, 2048, 3, 1, 0),
        ByteRange(0, 0, 1, 2, 2, 0),
        ByteRange(0, 0, 0, 2**40, 1, 0),
        ByteRange(0, 0, 2**62, 4, 1, 0),
        ByteRange(0, 2**63 - 1, 2**63 - 1, 2**63 - 1, 2**63 - 1, 0),
        ByteRange(0, 2**64, 0, 1, 1, 0),
        ByteRange(0, 0, 0, 2**62, 0, 0)._replace(row_bytes=1),
    ],
)
def test_what_is_no_range_of_the_segments_is_refused(wrong: ByteRange) -> None:
    with pytest.raises(ValueError, match="ranges"):
        HeldBytes(WHOLE, SEGMENTS).places([WHOLE[0], wrong])


@pytest.fixture
def shelf() -> HeldVersions:
    return HeldVersions()


def never() -> None:
    raise AssertionError("nobody withdrew anything")


def test_the_newest_is_offered_and_an_older_one_by_name(shelf: HeldVersions) -> None:
    for step in (2, 3, 1):
        shelf.hold(offer_of(step), WHOLE, fetched(WHOLE))
    assert shelf.offer(None) == manifests.encode(manifest_of(3))
    assert shelf.offer(WeightVersion(1, 1)) == manifests.encode(manifest_of(1))
    with pytest.raises(NoPublicationError, match=r"1\.9 is not to be had.*1\.3"):
        shelf.offer(WeightVersion(1, 9))


def test_who_holds_nothing_says_so(shelf: HeldVersions) -> None:
    for wanted in (None, WeightVersion(1, 1)):
        with pytest.raises(NoPublicationError, match="nothing is published here"):
            shelf.offer(wanted)
    with pytest.raises(NoPublicationError, match="not held here"):
        shelf.open(offer_of(1).file_digest, never)
    shelf.withdraw(Mapping.private(4096))


def test_a_reader_gets_the_bytes_from_the_mapping_that_was_held(shelf: HeldVersions) -> None:
    arena = fetched(WHOLE)
    shelf.hold(offer_of(1), WHOLE, arena)
    reader = shelf.open(offer_of(1).file_digest, never)
    wanted = [ByteRange(1, 10, 0, 1, 20, 0), ByteRange(0, 5, 100, 3, 7, 0)]
    runs = reader.runs(wanted)
    assert all(run.mapping is arena for run in runs)
    assert found([Place(*run[1:]) for run in runs], arena) == b"".join(map(bytes_of, wanted))
    reader.close()
    reader.close()
    shelf.withdraw(arena)


def test_withdrawn_memory_is_nobodys_any_more(shelf: HeldVersions) -> None:
    """Its readers are told, each of those and nobody else, and nobody comes after them."""
    arenas = [fetched(WHOLE), fetched(WHOLE)]
    told: list[str] = []
    for step, arena in enumerate(arenas, 1):
        shelf.hold(offer_of(step), WHOLE, arena)
    readers = {}
    for name, step in (("a", 1), ("b", 1), ("c", 2)):

        def let_go(name: str = name) -> None:
            told.append(name)

        readers[name] = shelf.open(offer_of(step).file_digest, let_go)
    shelf.withdraw(arenas[0])
    assert told == ["a", "b"]
    with pytest.raises(NoPublicationError, match=r"1\.1 is not to be had"):
        shelf.offer(WeightVersion(1, 1))
    with pytest.raises(NoPublicationError, match="not held here"):
        shelf.open(offer_of(1).file_digest, never)
    assert readers["c"].runs([WHOLE[0]])[0].mapping is arenas[1]


def test_a_version_that_lies_here_twice_stays_while_one_of_them_does(shelf: HeldVersions) -> None:
    arenas = [fetched(WHOLE), fetched(WHOLE)]
    for arena in arenas:
        shelf.hold(offer_of(1), WHOLE, arena)
    shelf.withdraw(arenas[1])
    assert shelf.open(offer_of(1).file_digest, never).runs([WHOLE[0]])[0].mapping is arenas[0]


def test_a_reader_that_does_not_stop_keeps_the_memory_and_a_later_call_gets_it(shelf: HeldVersions) -> None:
    """Whoever wants the memory is told that it is in use; meanwhile nobody new comes to it."""
    arena = fetched(WHOLE)
    shelf.hold(offer_of(1), WHOLE, arena)
    tried: list[str] = []

    def go_on() -> None:
        tried.append("told")
        if len(tried) == 1:
            raise SegmentError("a client still reads")

    reader = shelf.open(offer_of(1).file_digest, go_on)
    with pytest.raises(SegmentError, match="a client still reads"):
        shelf.withdraw(arena)
    assert reader.runs([WHOLE[0]])[0].mapping is arena
    with pytest.raises(NoPublicationError):
        shelf.open(offer_of(1).file_digest, never)
    shelf.withdraw(arena)
    shelf.withdraw(arena)
    assert tried == ["told", "told"]
