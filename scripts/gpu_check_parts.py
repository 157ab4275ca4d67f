"""The parts of scripts/gpu_check: what must hold on a device, check by check. Not run on a GPU so far.

Owns what is checked and what counts as passed: bytes compared with bytes, errors by their class. `python
gpu_check_parts.py PART FOLDER DEVICE NUM_BYTES ARRAYS` runs one part; `gpu_check_process` starts that and reads it."""

import base64
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other process is that of the tests

import numpy as np
from gpu_check_arrays import Arrays, arrays_called
from gpu_check_driver import PlainDriver
from gpu_check_process import PartSettings, Recorder, SkippedError, expect

from fastdeploy_rl import config
from fastdeploy_rl._native import CudaMemory, Place, Region, transfer
from fastdeploy_rl.checksum import ROW_WORDS, Fletcher4
from fastdeploy_rl.errors import CudaUnavailableError, FastDeployRLError, PeerLostError, SegmentError, StaleMemoryError
from fastdeploy_rl.memory.cuda_devices import open_driver, visible_devices
from fastdeploy_rl.memory.cuda_ipc import CudaAllocation, CudaExporter, CudaImports, CudaRecord
from fastdeploy_rl.memory.cuda_record import open_device
from fastdeploy_rl.memory.device_checksum import DeviceChecksum
from tests.process.cuda_peer import CudaPeer

BLOCK = 2 << 20
NUM_TENSORS = 100
ODD_SIZES = (1, 2, 3, 4, 5, 4 * ROW_WORDS - 1, 4 * ROW_WORDS, 4 * ROW_WORDS + 1, 4 * 3 * ROW_WORDS + 6)
NUM_FILLS = 20
ROUNDS = 5


class Scene:
    """What the checks of a part share: one exporter, other processes, random bytes."""

    def __init__(self, settings: PartSettings) -> None:
        self.settings = settings
        self.directory = Path(settings.folder) / settings.part
        self.exporter = CudaExporter(self.directory, settings.device)
        self._random = np.random.default_rng(7)

    @contextmanager
    def peer(self) -> Iterator[CudaPeer]:
        with CudaPeer(self.directory, self.settings.device, {}) as peer:
            yield peer

    def bytes(self, num_bytes: int) -> np.ndarray:
        words = self._random.integers(0, 2**64, -(-num_bytes // 8), np.uint64)
        return words.view(np.uint8)[:num_bytes]

    def filled(self, num_bytes: int) -> tuple[CudaAllocation, np.ndarray]:
        allocation, data = self.exporter.allocate(num_bytes), self.bytes(num_bytes)
        allocation.write(data)
        return allocation, data

    def __enter__(self) -> "Scene":
        self.exporter.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.exporter.close()


# --- device


def device(settings: PartSettings, recorder: Recorder) -> None:
    with recorder.check("driver") as figures:
        try:
            figures["num_devices"] = len(visible_devices())
        except CudaUnavailableError as error:
            raise SkippedError(f"there is no device: {error}") from error
        found, _ = open_device(settings.device)
        figures |= {"cuda": open_driver().version, "uuid": found.uuid, "name": found.name.replace(" ", "_")}
        figures["library"] = config.libcuda_path()


# --- ipc


def ipc(settings: PartSettings, recorder: Recorder) -> None:
    with Scene(settings) as scene:
        for check in (_bytes_and_opens, _shared_not_copied, _refused_while_held, _stale_record, _deaths, _frameworks):
            check(scene, recorder)


def _bytes_and_opens(scene: Scene, recorder: Recorder) -> None:
    """Many tensors of few allocations."""
    with recorder.check("bytes_equal_and_one_open_per_allocation") as figures, scene.peer() as peer:
        length = BLOCK // NUM_TENSORS  # odd
        allocations = [scene.filled(BLOCK) for _ in range(3)]
        places = [(memory, data, index * length) for memory, data in allocations for index in range(NUM_TENSORS)]
        records = [memory.record(offset, length).to_json().decode() for memory, _, offset in places]
        numbers = peer.ask("open_all", records)
        found = [base64.b64decode(text) for text in peer.ask("read_all", numbers)]
        expect(found == [data[at : at + length].tobytes() for _, data, at in places], "the other process has the bytes")
        figures |= {"tensors": len(found), "opens": peer.ask("num_open")}
        expect(figures["opens"] == len(allocations), "one open for each allocation")
        peer.ask("release_all", numbers)
        expect(peer.ask("num_open") == 0, "nothing is open after the last release")
        for memory, _ in allocations:
            memory.free()


def _shared_not_copied(scene: Scene, recorder: Recorder) -> None:
    with recorder.check("later_writes_are_seen") as figures, scene.peer() as peer:
        memory, data = scene.filled(BLOCK)
        record = memory.record().to_json().decode()
        number = peer.ask("open", record)
        expect(peer.read(number) == data.tobytes(), "the first bytes")
        data = scene.bytes(BLOCK)
        memory.write(data)
        expect(peer.read(number) == data.tobytes(), "the second bytes, through the same opening")
        figures["driver_gives_one_address_twice"] = peer.ask("open_twice_in_driver", record)


def _refused_while_held(scene: Scene, recorder: Recorder) -> None:
    with recorder.check("held_memory_is_not_freed_and_a_release_is_noticed"), scene.peer() as peer:
        memory, data = scene.filled(BLOCK)
        number = peer.open(memory.record())
        _expect_error(SegmentError, memory.free, f"pid {peer.pid}")
        expect(peer.read(number) == data.tobytes(), "the bytes are there after the refusal")
        peer.ask("release", number)
        memory.free()


def _stale_record(scene: Scene, recorder: Recorder) -> None:
    with recorder.check("the_record_of_freed_memory_opens_nothing"), scene.peer() as peer:
        memory, _ = scene.filled(BLOCK)
        record = memory.record()
        memory.free()
        _expect_error(StaleMemoryError, lambda: peer.open(record), "new record")


def _deaths(scene: Scene, recorder: Recorder) -> None:
    with recorder.check("a_dead_importer_blocks_nobody"), scene.peer() as peer:
        memory, _ = scene.filled(BLOCK)
        peer.open(memory.record())
        _expect_error(SegmentError, memory.free, f"pid {peer.pid}")
        peer.kill()
        memory.free()
    with recorder.check("the_death_of_an_exporter_is_noticed"), _imports(scene) as imports, scene.peer() as peer:
        record = CudaRecord.from_json(peer.ask("allocate", "some bytes").encode())
        imported, data = imports.open(record), bytearray(record.num_bytes)
        imported.read(data)
        expect(data == b"some bytes", "its bytes were there")
        imported.check()
        peer.kill()
        _expect_error(PeerLostError, imported.check, f"pid {peer.pid}")
        imported.release()
        expect(imports.num_open == 0, "nothing of it is open any more")


def _frameworks(scene: Scene, recorder: Recorder) -> None:
    with recorder.check("a_tensor_of_torch_is_read_by_another_process"), scene.peer() as peer:
        torch = arrays_called("torch", scene.exporter.device.index).library
        tensor = torch.arange(BLOCK // 4, dtype=torch.float32, device="cuda")
        record = scene.exporter.export_tensor(tensor)
        scene.exporter.synchronize()
        number = peer.open(record)
        expect(peer.read(number) == tensor.cpu().numpy().tobytes(), "the bytes of the tensor")
        peer.ask("release", number)
        scene.exporter.withdraw(record)


@contextmanager
def _imports(scene: Scene) -> Iterator[CudaImports]:
    with CudaImports(scene.directory, scene.settings.device) as imports:
        yield imports


def _expect_error(kind: type[FastDeployRLError], action: Callable[[], object], text: str) -> None:
    try:
        action()
    except kind as error:
        expect(text in str(error), f"{text!r} is said by: {error}")
    else:
        expect(False, f"it is refused with {kind.__name__}")


# --- copies


def copies(settings: PartSettings, recorder: Recorder) -> None:
    """Each way to copy beside the plain one, in turns, so that both meet the same clocks."""
    num_bytes = settings.num_bytes
    with Scene(settings) as scene, PlainDriver(scene.exporter.device.index) as plain:
        first, data = scene.filled(num_bytes)
        second = scene.exporter.allocate(num_bytes)
        ours = [_borrowed(settings, memory) for memory in (first, second)]
        bench = CopyBench(scene, recorder, plain, (first, second), data)
        bench.measure("device_to_device", lambda: ours[1].copy_from(0, ours[0], 0, num_bytes), second, 10)
        bench.measure("host_to_device", lambda: second.write(data), second, 2)
        host = np.zeros(num_bytes, np.uint8)
        bench.measure("device_to_host", lambda: first.read(host), host, 2)
        bench.measure_pinned()
        bench.measure_from_another_process()


class CopyBench:
    """`memories`: source and target on the device; `data`: what the source holds."""

    def __init__(
        self,
        scene: Scene,
        recorder: Recorder,
        plain: PlainDriver,
        memories: tuple[CudaAllocation, CudaAllocation],
        data: np.ndarray,
    ) -> None:
        self._scene = scene
        self._recorder = recorder
        self._plain = plain
        self._source, self._target = memories
        self._data = data

    def measure(self, name: str, copy: Callable[[], object], target: CudaAllocation | np.ndarray, repeats: int) -> None:
        """Passes where the target has the bytes afterwards; the figures are medians of five rounds."""
        with self._recorder.check(name) as figures:
            self.fill_in(figures, copy, target, repeats)

    def fill_in(self, figures: dict[str, Any], copy: Callable[[], object], target: Any, repeats: int) -> None:
        _clear(target, self._data.size)
        copy()
        self._plain.synchronize()
        expect(np.array_equal(_read(target, self._data.size), self._data), "the target has the bytes of the source")
        plain = partial(self._plain.copy, self._target.address, self._source.address, self._data.size)
        rounds = [(self._seconds(plain, 10), self._seconds(copy, repeats)) for _ in range(ROUNDS)]
        own, found = (statistics.median(column) for column in zip(*rounds, strict=True))
        gigabytes = self._data.size / 1e9
        figures |= {"gb_per_s": gigabytes / found, "own_gb_per_s": gigabytes / own, "ratio_to_own": own / found}

    def measure_pinned(self) -> None:
        for name in ("host_to_device_pinned", "device_to_host_pinned"):
            with self._recorder.check(name) as figures, self._plain.pinned(self._data.size) as buffer:
                pinned = np.ctypeslib.as_array(buffer)
                if name.startswith("host"):
                    pinned[:] = self._data
                    self.fill_in(figures, partial(self._target.write, pinned), self._target, 5)
                else:
                    self.fill_in(figures, partial(self._source.read, pinned), pinned, 5)

    def measure_from_another_process(self) -> None:
        """As an engine copies from a trainer's memory."""
        num_bytes, settings = self._data.size, self._scene.settings
        with self._recorder.check("imported_to_device") as figures, self._scene.peer() as peer:
            record = CudaRecord.from_json(peer.ask("allocate_filled", num_bytes, 7).encode())
            with _imports(self._scene) as imports, imports.open(record) as imported:
                _, context = open_device(settings.device)
                theirs = context.borrow(imported.address, num_bytes)
                mine = context.borrow(self._target.address, num_bytes)
                self._data = np.full(num_bytes, 7, np.uint8)
                self.fill_in(figures, lambda: mine.copy_from(0, theirs, 0, num_bytes), self._target, 10)

    def _seconds(self, copy: Callable[[], object], repeats: int) -> float:
        """Of one copy, the device idle before and after."""
        self._plain.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            copy()
        self._plain.synchronize()
        return (time.perf_counter() - began) / repeats


def _borrowed(settings: PartSettings, memory: CudaAllocation) -> CudaMemory:
    _, context = open_device(settings.device)
    return context.borrow(memory.address, memory.num_bytes)


def _clear(target: CudaAllocation | np.ndarray, num_bytes: int) -> None:
    if isinstance(target, CudaAllocation):
        target.write(np.zeros(num_bytes, np.uint8))
    else:
        target[:] = 0


def _read(target: CudaAllocation | np.ndarray, num_bytes: int) -> np.ndarray:
    if isinstance(target, CudaAllocation):
        found = np.empty(num_bytes, np.uint8)
        target.read(found)
        return found
    return target


# --- checksum


def checksum(settings: PartSettings, recorder: Recorder) -> None:
    names = ("torch", "cupy") if settings.arrays == "auto" else (settings.arrays,)
    with Scene(settings) as scene, PlainDriver(scene.exporter.device.index) as plain:
        for name in names:
            _odd_sizes(scene, recorder, name)
            _checksum_speed(scene, recorder, plain, name)


def _odd_sizes(scene: Scene, recorder: Recorder, name: str) -> None:
    with recorder.check(f"{name}_odd_sizes") as figures:
        arrays = arrays_called(name, scene.exporter.device.index)
        sums, memory = DeviceChecksum(arrays.library), scene.exporter.allocate(max(ODD_SIZES))
        for num_bytes in ODD_SIZES:
            for data in (scene.bytes(num_bytes), np.full(num_bytes, 0xFF, np.uint8)):
                memory.write(data)
                _expect_same(sums, arrays, memory, data)
        figures["sizes"] = len(ODD_SIZES)
        memory.free()


def _checksum_speed(scene: Scene, recorder: Recorder, plain: PlainDriver, name: str) -> None:
    with recorder.check(f"{name}_speed") as figures:
        arrays = arrays_called(name, scene.exporter.device.index)
        sums, num_bytes = DeviceChecksum(arrays.library), scene.settings.num_bytes
        memory, data = scene.filled(num_bytes)
        other = scene.exporter.allocate(num_bytes)
        _expect_same(sums, arrays, memory, data)
        copy = partial(plain.copy, other.address, memory.address, num_bytes)
        own = min(_seconds(lambda: (copy(), plain.synchronize())) for _ in range(ROUNDS))
        found = min(_seconds(partial(sums.of_bytes, arrays.view(memory, num_bytes))) for _ in range(ROUNDS))
        gigabytes = num_bytes / 1e9
        figures |= {"gb_per_s": gigabytes / found, "own_gb_per_s": gigabytes / own, "ratio_to_own": own / found}
        other.free()
        memory.free()


def _expect_same(sums: DeviceChecksum, arrays: Arrays, memory: CudaAllocation, data: np.ndarray) -> None:
    array = arrays.view(memory, data.size)
    expect(arrays.address(array) == memory.address, f"{arrays.name} sees the memory where it lies")
    expect(sums.of_bytes(array) == _native_checksum(data), f"{data.size} bytes have the checksum of the native core")


def _native_checksum(data: np.ndarray) -> Fletcher4:
    place, shape = Place(0, 0, data.size), {"rows": 1, "row_bytes": data.size}
    ((sums, _),) = transfer(
        [Region(source=data, source_offset=0, source_stride=data.size, read_place=place, **shape)], 4
    )
    return Fletcher4(*(sums or ()))


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


# --- addresses


def addresses(settings: PartSettings, recorder: Recorder) -> None:
    with Scene(settings) as scene:
        _fills(scene, recorder)
        _graphs(scene, recorder)
        _freed_memory(scene, recorder)


def _fills(scene: Scene, recorder: Recorder) -> None:
    """Two arenas filled in turns, from the host and from the device, as updates do it."""
    with recorder.check("arenas_stay_where_they_are") as figures, scene.peer() as peer, ExitStack() as stack:
        arenas = [scene.exporter.allocate(BLOCK) for _ in range(2)]
        source = scene.exporter.allocate(BLOCK)
        before = [_identity(scene, arena) for arena in arenas]
        numbers = [peer.open(arena.record()) for arena in arenas]
        stack.callback(peer.ask, "release_all", numbers)
        for fill in range(NUM_FILLS):
            arena, data = arenas[fill % 2], scene.bytes(BLOCK)
            _fill(scene, arena, source if fill % 4 < 2 else None, data)
            expect(peer.read(numbers[fill % 2]) == data.tobytes(), f"fill {fill} is seen where the arena was opened")
        expect([_identity(scene, arena) for arena in arenas] == before, "address, allocation and export are unchanged")
        figures |= {"fills": NUM_FILLS, "opens": peer.ask("num_open")}
        expect(figures["opens"] == 2, "each arena was opened once")


def _fill(scene: Scene, arena: CudaAllocation, source: CudaAllocation | None, data: np.ndarray) -> None:
    """From the host, or from `source` on the device."""
    if source is None:
        arena.write(data)
        return
    source.write(data)
    _borrowed(scene.settings, arena).copy_from(0, _borrowed(scene.settings, source), 0, data.size)
    scene.exporter.synchronize()


def _identity(scene: Scene, memory: CudaAllocation) -> tuple[Any, ...]:
    _, context = open_device(scene.settings.device)
    return memory.address, context.buffer_id(memory.address), memory.record()


def _graphs(scene: Scene, recorder: Recorder) -> None:
    """A captured graph knows addresses alone: filled memory gives new results, and nothing is captured again."""
    with recorder.check("a_captured_graph_sees_what_was_filled_in") as figures:
        arrays = arrays_called("torch", scene.exporter.device.index)
        memory, _ = scene.filled(BLOCK)
        weights = arrays.view(memory, BLOCK).view(arrays.library.int32)
        pointer = weights.data_ptr()
        replay, output = _capture(arrays.library, weights)
        for _ in range(NUM_FILLS):
            data = scene.bytes(BLOCK)
            memory.write(data)
            replay()
            arrays.library.cuda.synchronize()
            expect(
                np.array_equal(output.cpu().numpy(), data.view(np.int32) + np.int32(1)), "the replay saw the new bytes"
            )
        expect(weights.data_ptr() == pointer == memory.address, "the pointer that the graph sees is unchanged")
        figures["replays"] = NUM_FILLS
        del weights, replay, output
        memory.free()


def _freed_memory(scene: Scene, recorder: Recorder) -> None:
    """What sleep rests on. Others may use the device meanwhile, so that half of it must be seen."""
    with (
        recorder.check("freed_memory_returns_to_the_device") as figures,
        PlainDriver(scene.exporter.device.index) as plain,
    ):
        before, num_bytes = plain.num_free_bytes(), scene.settings.num_bytes
        memory = scene.exporter.allocate(num_bytes)
        held = plain.num_free_bytes()
        memory.free()
        after = plain.num_free_bytes()
        figures |= {"free_before": before, "free_while_held": held, "free_after": after, "allocated": num_bytes}
        expect(min(before, after) - held >= num_bytes // 2, "the free bytes of the device fall and rise by it")


def _capture(torch: Any, weights: Any) -> tuple[Callable[[], None], Any]:
    """As torch's documentation has it: once beside, on a stream of its own, and then captured."""
    output, graph, stream = torch.empty_like(weights), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.add(weights, 1, out=output)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        torch.add(weights, 1, out=output)
    return graph.replay, output


PARTS = {"device": device, "ipc": ipc, "copies": copies, "checksum": checksum, "addresses": addresses}


def main() -> None:
    part, folder, named, num_bytes, arrays = sys.argv[1:]
    recorder = Recorder(part)
    PARTS[part](PartSettings(part, folder, named, int(num_bytes), arrays), recorder)


if __name__ == "__main__":
    main()
