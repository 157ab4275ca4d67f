"""The lease table: readers and the writer never both believe they are alone."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_rl import _native
from fastdeploy_rl.errors import DeadlineExceededError, NoPublicationError, SegmentError
from fastdeploy_rl.publish.leases import NUM_ARENAS, NUM_SLOTS, Holder, LeaseTable


@pytest.fixture
def holders_dir(tmp_path: Path) -> Path:
    (tmp_path / "holders").mkdir(mode=0o700)
    return tmp_path / "holders"


@pytest.fixture
def table(tmp_path: Path, holders_dir: Path) -> Iterator[LeaseTable]:
    table = LeaseTable(tmp_path / "LEASES", holders_dir)
    table.create()
    yield table
    table.close()


@pytest.fixture
def holder(holders_dir: Path) -> Iterator[Holder]:
    with Holder(holders_dir) as holder:
        yield holder


def _written(table: LeaseTable, arena: int) -> int:
    assert table.begin_write(arena) == ()
    return table.end_write(arena)


def _soon() -> int:
    return time.monotonic_ns() + 20_000_000


def test_a_lease_is_seen_until_it_is_released(table: LeaseTable, holder: Holder) -> None:
    generation = _written(table, 3)
    lease = table.take(3, generation, holder.token)
    assert [info.arena for info in table.holders(3)] == [3]
    lease.release()
    lease.release()
    assert table.holders(3) == ()


def test_a_superseded_generation_gives_no_lease_and_leaves_no_claim(table: LeaseTable, holder: Holder) -> None:
    old = _written(table, 0)
    _written(table, 0)
    with pytest.raises(NoPublicationError, match="superseded"):
        table.take(0, old, holder.token)
    assert table.holders(0) == ()


def test_no_lease_is_given_while_an_arena_is_being_written(table: LeaseTable, holder: Holder) -> None:
    generation = _written(table, 0)
    table.begin_write(0)
    with pytest.raises(NoPublicationError, match="superseded"):
        table.take(0, generation, holder.token)
    assert table.end_write(0) == generation + 2


def test_a_live_lease_forbids_the_write_and_changes_nothing(table: LeaseTable, holder: Holder) -> None:
    generation = _written(table, 1)
    table.set_version(1, "3.7")
    lease = table.take(1, generation, holder.token)
    (info,) = table.begin_write(1)
    assert (info.version, info.owner is not None) == ("3.7", True)
    assert table.generation(1) == generation
    table.take(1, generation, holder.token).release()
    lease.release()
    assert table.begin_write(1) == ()
    table.end_write(1)


def test_the_lease_of_a_dead_holder_is_void_and_swept_out(table: LeaseTable, holders_dir: Path) -> None:
    generation = _written(table, 0)
    holder = Holder(holders_dir)
    holder.start()
    table.take(0, generation, holder.token)
    holder.close()
    assert table.begin_write(0) == ()
    table.end_write(0)
    assert list(holders_dir.iterdir()) == []


def test_waiting_ends_when_the_lease_is_released(table: LeaseTable, holder: Holder) -> None:
    leases = [table.take(arena, _written(table, arena), holder.token) for arena in (0, 1)]
    leases[1].release()
    assert table.wait_free([0, 1], _soon()) == 1
    table.end_write(1)
    leases[0].release()


def test_waiting_in_vain_names_the_holders_and_changes_nothing(table: LeaseTable, holder: Holder) -> None:
    generations = [_written(table, arena) for arena in (0, 1)]
    table.set_version(0, "1.5")
    leases = [table.take(arena, generations[arena], holder.token) for arena in (0, 1)]
    with pytest.raises(DeadlineExceededError, match=r"pid \d+ \(since .*\) on version 1\.5"):
        table.wait_free([0, 1], _soon())
    assert [table.generation(arena) for arena in (0, 1)] == generations
    for lease in leases:
        lease.release()


def test_every_slot_can_be_held_and_one_more_is_refused(table: LeaseTable, holder: Holder) -> None:
    generation = _written(table, 0)
    leases = [table.take(0, generation, holder.token) for _ in range(NUM_SLOTS)]
    with pytest.raises(SegmentError, match=f"already carries {NUM_SLOTS} leases"):
        table.take(0, generation, holder.token)
    for lease in leases:
        lease.release()
    assert table.holders(0) == ()


def test_slots_of_the_dead_make_room_for_the_living(table: LeaseTable, holder: Holder, holders_dir: Path) -> None:
    generation = _written(table, 0)
    dead = Holder(holders_dir)
    dead.start()
    for _ in range(NUM_SLOTS):
        table.take(0, generation, dead.token)
    dead.close()
    table.take(0, generation, holder.token).release()


def test_repair_ends_what_a_dead_publisher_was_writing(table: LeaseTable, holder: Holder) -> None:
    generation = _written(table, 2)
    table.begin_write(2)
    assert table.repair() == (2,)
    assert table.generation(2) == generation + 2
    with pytest.raises(NoPublicationError):
        table.take(2, generation, holder.token)


def test_withdrawn_contents_give_no_new_lease_but_old_ones_stand(table: LeaseTable, holder: Holder) -> None:
    generation = _written(table, 0)
    table.set_segment(0, "some.segment")
    lease = table.take(0, generation, holder.token)
    table.withdraw(0)
    assert table.segment(0) == ""
    with pytest.raises(NoPublicationError):
        table.take(0, generation, holder.token)
    assert len(table.begin_write(0)) == 1
    lease.release()


def test_two_writers_of_one_arena_are_a_fault_that_is_named(table: LeaseTable) -> None:
    table.begin_write(0)
    with pytest.raises(SegmentError, match="already being written"):
        table.begin_write(0)
    table.end_write(0)


def test_a_row_keeps_its_texts_and_refuses_longer_ones(table: LeaseTable) -> None:
    table.set_segment(NUM_ARENAS - 1, "n" * 127)
    assert table.segment(NUM_ARENAS - 1) == "n" * 127
    with pytest.raises(SegmentError, match="has room for 127"):
        table.set_segment(0, "n" * 128)
    assert table.segment(0) == ""


def test_a_table_is_shared_by_all_who_open_it(table: LeaseTable, holder: Holder, holders_dir: Path) -> None:
    reader = LeaseTable(table.path, holders_dir)
    reader.open()
    lease = reader.take(0, _written(table, 0), holder.token)
    assert len(table.begin_write(0)) == 1
    lease.release()
    reader.close()


def test_creating_again_keeps_the_table_that_others_have_mapped(table: LeaseTable, holders_dir: Path) -> None:
    generation = _written(table, 0)
    again = LeaseTable(table.path, holders_dir)
    again.create()
    assert again.generation(0) == generation
    again.close()


@pytest.mark.parametrize("contents", [b"", b"\0" * 100, b"\0" * (1 << 16)])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "LEASES").write_bytes(contents)
    with pytest.raises(SegmentError, match="no lease table"):
        LeaseTable(tmp_path / "LEASES", tmp_path).open()


def test_a_missing_table_says_that_nothing_was_published(tmp_path: Path) -> None:
    with pytest.raises(NoPublicationError, match="nothing was ever published"):
        LeaseTable(tmp_path / "LEASES", tmp_path).open()


class _ReaderAtTheWorstMoment:
    """After the writer's generation went odd, and before it looks at the slots, a reader tries to take the old one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, table: LeaseTable, token: int, generation: int) -> None:
        self.outcome = ""
        original = _native.add_u64

        def add_u64(mapping: _native.Mapping, offset: int, delta: int) -> int:
            value = original(mapping, offset, delta)
            if value % 2 and not self.outcome:
                try:
                    table.take(0, generation, token)
                    self.outcome = "leased"
                except NoPublicationError:
                    self.outcome = "refused"
            return value

        monkeypatch.setattr(_native, "add_u64", add_u64)


def test_a_reader_between_the_writers_two_steps_is_refused(
    table: LeaseTable, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = _ReaderAtTheWorstMoment(monkeypatch, table, holder.token, _written(table, 0))
    assert table.begin_write(0) == ()
    assert reader.outcome == "refused"
    table.end_write(0)


def test_a_writer_between_a_readers_two_steps_sees_the_claim(
    table: LeaseTable, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = _written(table, 0)
    seen: list[int] = []
    original = table.generation

    def write_first(arena: int) -> int:
        if not seen:
            seen.append(0)
            seen[0] = len(table.begin_write(arena))
        return original(arena)

    monkeypatch.setattr(table, "generation", write_first)
    lease = table.take(0, generation, holder.token)
    assert seen == [1]
    lease.release()


def test_messages_say_how_long_a_lease_is_held(table: LeaseTable, holder: Holder) -> None:
    lease = table.take(0, _written(table, 0), holder.token)
    (info,) = table.holders(0)
    assert re.fullmatch(r"pid \d+ \(since \d\d:\d\d:\d\d, \d+\.\d s ago\) on version \?", str(info))
    lease.release()
