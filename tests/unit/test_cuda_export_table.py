"""The table of exports: of an exporter and an importer who meet, at least one sees the other."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from fastdeploy_rl.errors import PeerLostError, SegmentError, StaleMemoryError
from fastdeploy_rl.memory.export_table import (
    NUM_ROWS,
    NUM_SLOTS,
    ExportTable,
    exporter_lock,
    importer_lock,
    new_token,
    remove_leftovers,
)
from fastdeploy_rl.memory.owner_lock import OwnerLock

NONCE = 77


class Ends(NamedTuple):
    """Both ends of one table, and a live importer's token."""

    exporter: ExportTable
    importer: ExportTable
    token: int
    exporter_lock: OwnerLock


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    exporter_token, token = new_token(), new_token()
    with exporter_lock(tmp_path, exporter_token) as lock, importer_lock(tmp_path, token):
        exporter, importer = ExportTable(tmp_path, exporter_token), ExportTable(tmp_path, exporter_token)
        exporter.create()
        importer.open()
        yield Ends(exporter, importer, token, lock)
        importer.close()
        exporter.close()
        exporter.unlink()


def test_a_claim_lasts_until_it_is_given_back(ends: Ends) -> None:
    row = ends.exporter.add(NONCE)
    slot = ends.importer.take(row, NONCE, ends.token)
    with pytest.raises(SegmentError, match="in use by 1 importers"):
        ends.exporter.withdraw(row, NONCE)
    ends.importer.check(row, NONCE)
    ends.importer.give_back(slot, ends.token)
    ends.exporter.withdraw(row, NONCE)
    with pytest.raises(StaleMemoryError, match="freed this memory"):
        ends.importer.check(row, NONCE)


def test_an_importer_that_comes_while_the_exporter_looks_gets_no_claim(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ends.exporter.add(NONCE)
    look, looks = ends.exporter.importers, []

    def look_then_let_one_in(looked_at: int) -> list[str]:
        found = look(looked_at)
        looks.append(found)
        if len(looks) == 2:  # the first look is before the export is taken away
            with pytest.raises(StaleMemoryError, match="freed this memory"):
                ends.importer.take(row, NONCE, ends.token)
        return found

    monkeypatch.setattr(ends.exporter, "importers", look_then_let_one_in)
    ends.exporter.withdraw(row, NONCE)
    assert looks == [[], []]
    assert look(row) == []


def test_an_importer_that_comes_just_before_the_exporter_takes_it_away_keeps_its_claim(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ends.exporter.add(NONCE)
    look, slots = ends.exporter.importers, []

    def let_one_in_after_the_first_look(looked_at: int) -> list[str]:
        found = look(looked_at)
        if not slots:
            slots.append(ends.importer.take(row, NONCE, ends.token))
        return found

    monkeypatch.setattr(ends.exporter, "importers", let_one_in_after_the_first_look)
    with pytest.raises(SegmentError, match="in use by 1 importers"):
        ends.exporter.withdraw(row, NONCE)
    ends.importer.check(row, NONCE)


def test_who_holds_a_claim_never_finds_the_export_gone(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ends.exporter.add(NONCE)
    ends.importer.take(row, NONCE, ends.token)
    look = ends.exporter.importers

    def look_while_the_importer_checks(looked_at: int) -> list[str]:
        ends.importer.check(row, NONCE)
        return look(looked_at)

    monkeypatch.setattr(ends.exporter, "importers", look_while_the_importer_checks)
    with pytest.raises(SegmentError, match="in use by 1 importers"):
        ends.exporter.withdraw(row, NONCE)


def test_an_exporter_that_frees_while_the_importer_looks_is_refused(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ends.exporter.add(NONCE)
    check = ends.importer.check

    def free_then_look(looked_at: int, nonce: int) -> None:
        with pytest.raises(SegmentError, match="in use by 1 importers"):
            ends.exporter.withdraw(row, NONCE)
        check(looked_at, nonce)

    monkeypatch.setattr(ends.importer, "check", free_then_look)
    ends.importer.take(row, NONCE, ends.token)
    assert len(ends.exporter.importers(row)) == 1


@pytest.mark.parametrize("row", [-1, NUM_ROWS])
def test_there_is_no_row_outside_the_table(ends: Ends, row: int) -> None:
    with pytest.raises(StaleMemoryError, match=f"no export {row}"):
        ends.importer.take(row, NONCE, ends.token)


def test_a_full_table_says_so_and_a_withdrawn_row_is_used_again(ends: Ends) -> None:
    rows = [ends.exporter.add(nonce) for nonce in range(1, NUM_ROWS + 1)]
    assert rows == list(range(NUM_ROWS))
    with pytest.raises(SegmentError, match=f"exports {NUM_ROWS} allocations already"):
        ends.exporter.add(NONCE)
    ends.exporter.withdraw(5, 6)
    assert ends.exporter.add(NONCE) == 5


def test_claims_of_the_dead_make_room(ends: Ends) -> None:
    row = ends.exporter.add(NONCE)
    for _ in range(NUM_SLOTS):
        ends.importer.take(row, NONCE, new_token())  # nobody holds the lock of such a token
    ends.importer.take(row, NONCE, ends.token)
    assert len(ends.exporter.importers(row)) == 1


def test_too_many_importers_are_refused(ends: Ends) -> None:
    row = ends.exporter.add(NONCE)
    for _ in range(NUM_SLOTS):
        ends.importer.take(row, NONCE, ends.token)
    with pytest.raises(SegmentError, match=f"{NUM_SLOTS} processes hold this memory already"):
        ends.importer.take(row, NONCE, ends.token)


def test_a_dead_exporter_is_noticed_and_nothing_is_claimed(ends: Ends) -> None:
    row = ends.exporter.add(NONCE)
    ends.exporter_lock.release()
    with pytest.raises(PeerLostError, match="is gone"):
        ends.importer.take(row, NONCE, ends.token)
    assert ends.exporter.importers(row) == []


@pytest.mark.parametrize("size", [0, 100, 1 << 20])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, size: int) -> None:
    token = new_token()
    exporter_lock(tmp_path, token).path.with_suffix(".table").write_bytes(bytes(size))
    with pytest.raises(SegmentError, match="is no table of exports"):
        ExportTable(tmp_path, token).open()


def test_a_table_that_is_gone_means_that_its_exporter_is(tmp_path: Path) -> None:
    with pytest.raises(PeerLostError, match="is missing"):
        ExportTable(tmp_path, new_token()).open()


def test_leftovers_go_and_what_lives_stays(ends: Ends, tmp_path: Path) -> None:
    living = set(os.listdir(tmp_path))
    assert len(living) == 3
    for name in ("exporter-0000000000000001.lock", "exporter-0000000000000001.table", "importer-0000000000000002.lock"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert set(os.listdir(tmp_path)) == living
