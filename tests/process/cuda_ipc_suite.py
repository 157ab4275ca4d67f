"""What CUDA memory between processes must do, on a fake driver and on a real one: inherit `CudaIpcSuite` and give it a
`machine`."""

import base64
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import pytest

from fastdeploy_rl.errors import ConfigurationError, PeerLostError, SegmentError, StaleMemoryError
from fastdeploy_rl.memory.cuda_ipc import CudaAllocation, CudaExporter, CudaImports, CudaRecord
from tests.process.cuda_peer import CudaPeer, held

BLOCK = 2 << 20
StartPeer = Callable[[], CudaPeer]


class Machine(Protocol):
    """`environ`: what processes need to use it, set in this one already. `check`: driver calls since the last `check`,
    and what lives now; does nothing where nobody counts."""

    environ: dict[str, str]
    device: str

    def check(self, **counters: int) -> None: ...


def fill(allocation: CudaAllocation, seed: int) -> bytes:
    data = np.random.default_rng(seed).bytes(allocation.num_bytes)
    allocation.write(data)
    return data


def cut(num_bytes: int, num_pieces: int, seed: int) -> list[tuple[int, int]]:
    """(offset, bytes) of pieces that tile, most of odd sizes."""
    inner = np.random.default_rng(seed).choice(np.arange(1, num_bytes), num_pieces - 1, replace=False)
    ends = [0, *sorted(map(int, inner)), num_bytes]
    return [(begin, end - begin) for begin, end in pairwise(ends)]


class CudaIpcSuite:
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return tmp_path / "cuda"

    @pytest.fixture
    def start(self, machine: Machine, directory: Path) -> Iterator[StartPeer]:
        with ExitStack() as stack:
            yield lambda: stack.enter_context(CudaPeer(directory, machine.device, machine.environ))

    @pytest.fixture
    def exporter(self, machine: Machine, directory: Path) -> Iterator[CudaExporter]:
        with CudaExporter(directory, machine.device) as exporter:
            yield exporter

    @pytest.fixture
    def peer(self, exporter: CudaExporter, start: StartPeer) -> CudaPeer:
        """Started after the exporter, so that it is gone before that closes."""
        return start()

    def test_300_tensors_in_3_allocations_are_exported_and_opened_3_times(
        self, machine: Machine, exporter: CudaExporter, peer: CudaPeer
    ) -> None:
        allocations = [exporter.allocate(BLOCK) for _ in range(3)]
        expected, records = [], []
        for seed, allocation in enumerate(allocations):
            data = fill(allocation, seed)
            for offset, num_bytes in cut(allocation.num_bytes, 100, seed):
                records.append(allocation.record(offset, num_bytes))
                expected.append(data[offset : offset + num_bytes])
        numbers = peer.ask("open_all", [record.to_json().decode() for record in records])
        found = [base64.b64decode(data) for data in peer.ask("read_all", numbers)]
        assert len(found) == 300
        assert found == expected
        assert peer.ask("num_open") == 3
        machine.check(exports=3, opens=3, closes=0, live_openings=3)
        peer.ask("release_all", numbers)
        assert peer.ask("num_open") == 0
        machine.check(exports=0, opens=0, closes=3, live_openings=0, live_allocations=3)

    def test_1000_rounds_hold_no_more_than_100(self, machine: Machine, exporter: CudaExporter, peer: CudaPeer) -> None:
        def rounds(count: int) -> None:
            for index in range(count):
                allocation = exporter.allocate(BLOCK)
                allocation.write(index.to_bytes(8, "little"), 7)
                data = base64.b64decode(peer.ask("visit", allocation.record(7, 8).to_json().decode()))
                assert int.from_bytes(data, "little") == index
                allocation.free()

        rounds(100)
        before = (held(), peer.ask("held"))
        rounds(900)
        for now, then in zip((held(), peer.ask("held")), before, strict=True):
            assert now["descriptors"] == then["descriptors"]
            assert now["mappings"] <= then["mappings"] + 8
            assert now["bytes"] <= then["bytes"] + BLOCK
        machine.check(exports=1000, opens=1000, closes=1000, frees_while_open=0, live_allocations=0, live_openings=0)

    def test_memory_that_importers_hold_is_not_freed_and_they_are_named(
        self, machine: Machine, exporter: CudaExporter, peer: CudaPeer, start: StartPeer
    ) -> None:
        other = start()
        allocation = exporter.allocate(BLOCK)
        data = fill(allocation, 1)
        numbers = {peer: peer.open(allocation.record()), other: other.open(allocation.record())}
        with pytest.raises(SegmentError, match="in use by 2 importers") as refused:
            allocation.free()
        assert f"pid {peer.pid}" in str(refused.value)
        assert f"pid {other.pid}" in str(refused.value)
        for process, number in numbers.items():
            process.ask("check", number)
            assert process.read(number) == data
        machine.check(frees=0, live_allocations=1, live_openings=2)
        for process, number in numbers.items():
            process.ask("release", number)
        allocation.free()
        machine.check(frees=1, frees_while_open=0, live_allocations=0)

    def test_an_exporter_cannot_close_under_its_importers(
        self, machine: Machine, exporter: CudaExporter, peer: CudaPeer
    ) -> None:
        held_one, free_one = exporter.allocate(BLOCK), exporter.allocate(BLOCK)
        data = fill(held_one, 2)
        number = peer.open(held_one.record())
        with pytest.raises(SegmentError, match="in use by 1 importers"):
            exporter.close()
        assert (held_one.is_freed, free_one.is_freed) == (False, True)
        assert peer.read(number) == data
        peer.ask("release", number)
        exporter.close()
        assert held_one.is_freed
        machine.check(frees=2, frees_while_open=0, live_allocations=0)

    def test_the_record_of_a_freed_allocation_opens_nothing_also_when_its_place_is_taken_again(
        self, machine: Machine, exporter: CudaExporter, peer: CudaPeer
    ) -> None:
        freed = exporter.allocate(BLOCK)
        old = freed.record()
        freed.free()
        with pytest.raises(StaleMemoryError, match="ask it for a new record"):
            peer.open(old)
        successor = exporter.allocate(BLOCK)
        data = fill(successor, 3)
        new = successor.record()
        assert new.row == old.row
        with pytest.raises(StaleMemoryError, match="ask it for a new record"):
            peer.open(old)
        assert peer.ask("num_open") == 0
        machine.check(opens=0, frees=1)
        assert peer.read(peer.open(new)) == data

    def test_an_exporter_and_importers_that_race_never_free_open_memory(
        self, machine: Machine, exporter: CudaExporter, peer: CudaPeer
    ) -> None:
        for _ in range(100):
            allocation = exporter.allocate(BLOCK)
            peer.send("visit_until_stale", allocation.record(0, 8).to_json().decode())
            free_in_the_end(allocation)
            peer.receive()
        machine.check(frees=100, frees_while_open=0, live_openings=0)
        assert peer.ask("num_open") == 0

    def test_a_killed_importer_blocks_nobody(
        self, machine: Machine, exporter: CudaExporter, peer: CudaPeer, directory: Path
    ) -> None:
        allocation = exporter.allocate(BLOCK)
        peer.open(allocation.record())
        with pytest.raises(SegmentError, match=f"pid {peer.pid}"):
            allocation.free()
        peer.kill()
        allocation.free()
        machine.check(frees=1, frees_while_open=0, live_allocations=0, live_openings=0)

    def test_importers_learn_that_their_exporter_was_killed(
        self, machine: Machine, start: StartPeer, directory: Path
    ) -> None:
        peer = start()
        with CudaImports(directory, machine.device) as imports:
            record = CudaRecord.from_json(peer.ask("allocate", "some bytes").encode())
            other = CudaRecord.from_json(peer.ask("allocate", "other bytes").encode())
            imported = imports.open(record)
            data = bytearray(record.num_bytes)
            imported.read(data)
            assert data == b"some bytes"
            imported.check()
            peer.kill()
            with pytest.raises(PeerLostError, match=f"pid {peer.pid}"):
                imported.check()
            for unreachable in (record, other):
                with pytest.raises(PeerLostError, match="is gone"):
                    imports.open(unreachable)
            assert imports.num_open == 1
            imported.release()
            assert imports.num_open == 0
            assert ".table" not in Path("/proc/self/maps").read_text()
        machine.check(opens=1, closes=1, live_allocations=0, live_openings=0)

    def test_what_the_dead_left_is_taken_away_by_the_next(
        self, machine: Machine, start: StartPeer, directory: Path
    ) -> None:
        peer = start()
        peer.ask("allocate", "bytes")
        peer.kill()
        assert os.listdir(directory) != []
        with CudaExporter(directory, machine.device):
            assert len(os.listdir(directory)) == 2
        assert os.listdir(directory) == []

    def test_memory_of_another_device_is_refused_by_its_name(
        self, machine: Machine, exporter: CudaExporter, peer: CudaPeer
    ) -> None:
        record = exporter.allocate(BLOCK).record()
        elsewhere = msgspec.structs.replace(record, device="GPU-00000000-0000-4000-8000-000000000000")
        with pytest.raises(ConfigurationError, match=r"GPU-00000000-0000-4000-8000-000000000000") as refused:
            peer.open(elsewhere)
        assert exporter.device.uuid in str(refused.value)
        assert peer.ask("num_open") == 0
        machine.check(opens=0)

    def test_the_exporting_process_gets_its_own_memory_and_cannot_free_it_meanwhile(
        self, machine: Machine, exporter: CudaExporter, directory: Path
    ) -> None:
        with CudaImports(directory, machine.device) as imports:
            allocation = exporter.allocate(BLOCK)
            imported = imports.open(allocation.record(100, 50))
            assert imported.address == allocation.address + 100
            with pytest.raises(SegmentError, match=f"pid {os.getpid()}"):
                allocation.free()
            imported.release()
            allocation.free()
        machine.check(opens=0, frees=1, live_allocations=0)

    def test_closing_the_imports_closes_all_but_what_tensors_lie_in(
        self, machine: Machine, start: StartPeer, directory: Path
    ) -> None:
        peer = start()
        records = [CudaRecord.from_json(peer.ask("allocate", text).encode()) for text in ("first", "second")]
        imports = CudaImports(directory, machine.device)
        imports.start()
        kept, closed = map(imports.open, records)
        tensor = kept.dlpack([1], "U8")
        with pytest.raises(SegmentError, match="1 tensors lie in it"):
            imports.close()
        assert imports.num_open == 1
        with pytest.raises(StaleMemoryError, match="was released"):
            _ = closed.address
        closed.release()
        machine.check(closes=1, live_openings=1)
        del tensor
        imports.close()
        kept.release()
        machine.check(closes=1, live_openings=0)

    def test_an_allocation_stays_open_while_a_tensor_lies_in_it(
        self, machine: Machine, exporter: CudaExporter, peer: CudaPeer
    ) -> None:
        allocation = exporter.allocate(BLOCK)
        number = peer.open(allocation.record(1024))
        assert peer.ask("make_tensor", number) == 512
        with pytest.raises(SegmentError, match="1 tensors lie in it"):
            peer.ask("release", number)
        assert peer.ask("num_open") == 1
        machine.check(closes=0, live_openings=1)
        peer.ask("drop_tensors")
        peer.ask("release", number)
        assert peer.ask("num_open") == 0
        machine.check(closes=1, live_openings=0)

    def test_a_tensor_of_a_framework_is_exported_where_it_lies(
        self, machine: Machine, exporter: CudaExporter, peer: CudaPeer
    ) -> None:
        allocation = exporter.allocate(BLOCK)
        data = fill(allocation, 4)
        first, second = Foreign(allocation, 4096), Foreign(allocation, 8192)
        records = [exporter.export_tensor(tensor, "weight") for tensor in (first, second)]
        assert [record.offset for record in records] == [4096, 8192]
        assert peer.read(peer.open(records[0])) == data[4096 : 4096 + 24]
        assert peer.read(peer.open(records[1])) == data[8192 : 8192 + 24]
        machine.check(exports=1, opens=1)

    def test_an_exported_tensor_is_kept_until_it_is_withdrawn(self, machine: Machine, exporter: CudaExporter) -> None:
        allocation = exporter.allocate(BLOCK)
        record = exporter.export_tensor(Foreign(allocation, 0))
        with pytest.raises(SegmentError, match="1 tensors lie in it"):
            allocation.free()
        exporter.withdraw(record)
        allocation.free()
        machine.check(frees=1)


class Foreign:
    """As a framework's tensor of shape [4, 3] in BF16."""

    def __init__(self, allocation: CudaAllocation, offset: int) -> None:
        self._allocation = allocation
        self._offset = offset

    def __dlpack__(self) -> Any:
        return self._allocation.dlpack([4, 3], "BF16", self._offset)


def free_in_the_end(allocation: CudaAllocation) -> None:
    """Each refusal is for an importer that is alive, and it comes and goes."""
    while not allocation.is_freed:
        with suppress(SegmentError):
            allocation.free()
