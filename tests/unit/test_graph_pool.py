"""Graphs are replayed under the addresses that they were captured with, or not at all.

One suite for both kinds of graphs: the CPU's stand-in, and CUDA graphs over a stand-in for Paddle's class, which keeps
raw addresses as a driver does.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.engines.embedded.address_ledger import Address, AddressLedger
from fastdeploy_rl.engines.embedded.cpu_graphs import CpuGraph
from fastdeploy_rl.engines.embedded.cuda_graphs import CudaGraph
from fastdeploy_rl.engines.embedded.graph_pool import MAX_SETS, GraphPool
from fastdeploy_rl.errors import EngineError, LifecycleError, StaleGraphError
from fastdeploy_rl.memory.tensor_view import TensorView

WIDTH = 8
SIZES = (1, 2, 4)


class DeviceArray:
    """What a graph of the device needs of a tensor."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def copy_(self, other: "DeviceArray", blocking: bool) -> None:
        assert not blocking
        self.values[...] = other.values


Kernel = Callable[[], None]


class FakeRecorder:
    """Paddle's CUDAGraph as far as a graph can tell: what is launched while it records is launched again, on the same
    raw addresses, by each replay. While it records nothing is computed."""

    recording: ClassVar["FakeRecorder | None"] = None
    made: ClassVar[list["FakeRecorder"]] = []

    def __init__(self) -> None:
        self.kernels: list[Kernel] | None = []
        FakeRecorder.made.append(self)

    def capture_begin(self) -> None:
        FakeRecorder.recording = self

    def capture_end(self) -> None:
        FakeRecorder.recording = None

    def replay(self) -> None:
        for kernel in self.kernels:
            kernel()

    def reset(self) -> None:
        self.kernels = None


def launch_multiply(inputs: DeviceArray, weight: np.ndarray, output: DeviceArray) -> None:
    """output = inputs * weight: at once, or as often as the graph is replayed that is being recorded."""
    address, size = weight.ctypes.data, weight.nbytes

    def kernel() -> None:
        raw = np.frombuffer((ctypes.c_char * size).from_address(address), np.float32)
        output.values[...] = inputs.values * raw

    if FakeRecorder.recording is None:
        kernel()
    else:
        FakeRecorder.recording.kernels.append(kernel)


@dataclass
class Engine:
    """The smallest thing with something bound: a decode step is a product with the bound weight."""

    weight: TensorView | None = None
    captures: list[int] = field(default_factory=list)
    fails_at: int = 0

    def bind(self, view: TensorView) -> AddressLedger:
        self.weight = view
        return AddressLedger.of({"weight": view})

    def note_capture(self, batch_size: int) -> None:
        if batch_size == self.fails_at:
            raise EngineError("out of device memory")
        self.captures.append(batch_size)


def capture_on_cpu(engine: Engine, batch_size: int) -> CpuGraph:
    engine.note_capture(batch_size)
    return CpuGraph(lambda: engine.weight.numpy(), lambda inputs, weight: inputs[0].values * weight)


def capture_on_device(engine: Engine, batch_size: int) -> CudaGraph:
    engine.note_capture(batch_size)
    output = DeviceArray(np.zeros((batch_size, WIDTH), np.float32))

    def compute(inputs: Sequence[DeviceArray]) -> np.ndarray:
        launch_multiply(inputs[0], engine.weight.numpy(), output)
        return output.values

    return CudaGraph([DeviceArray(np.zeros((batch_size, WIDTH), np.float32))], compute, FakeRecorder)


def inputs(batch_size: int, value: float = 1.0) -> list[DeviceArray]:
    return [DeviceArray(np.full((batch_size, WIDTH), value, np.float32))]


def arena(value: float) -> TensorView:
    view = TensorView(Mapping.private(4096), 512, "F32", (WIDTH,))
    view.numpy()[...] = value
    return view


class UnguardedPool(GraphPool[list[DeviceArray], np.ndarray]):
    """Replays stale graphs like any other."""

    def check_valid(self) -> None:
        pass


class Subject:
    """An engine and its pool, going live as the weight manager makes it."""

    def __init__(
        self, capture: Callable[[Engine, int], object], pool: type[GraphPool[list[DeviceArray], np.ndarray]] = GraphPool
    ) -> None:
        self.engine = Engine()
        self.pool = pool(lambda size: capture(self.engine, size), SIZES)

    def bind(self, view: TensorView) -> None:
        self.pool.note_bound(self.engine.bind(view))

    def go_live(self, view: TensorView) -> int:
        self.bind(view)
        return self.pool.recapture()

    def replay(self, batch_size: int = 1, value: float = 1.0) -> float:
        result = self.pool.replay(batch_size, inputs(batch_size, value))
        assert result.shape == (batch_size, WIDTH)
        assert (result == result[0, 0]).all()
        return float(result[0, 0])


@pytest.fixture(params=[capture_on_cpu, capture_on_device])
def capture(request: pytest.FixtureRequest) -> Callable[[Engine, int], object]:
    return request.param


@pytest.fixture
def subject(capture: Callable[[Engine, int], object]) -> Subject:
    return Subject(capture)


# --- both kinds of graphs --------------------------------------------------------------------------


def test_a_replay_computes_with_the_inputs_of_each_call(subject: Subject) -> None:
    assert subject.go_live(arena(3.0)) == len(SIZES)
    assert [subject.replay(2, value) for value in (1.0, 5.0, 1.0)] == [3.0, 15.0, 3.0]
    assert subject.replay(4, 2.0) == 6.0
    assert (subject.pool.num_captured, subject.pool.num_replays) == (len(SIZES), 4)


def test_bytes_written_in_place_count_at_once(subject: Subject) -> None:
    """Apply mode copy: nothing moves, nothing is captured."""
    view = arena(3.0)
    subject.go_live(view)
    view.numpy()[...] = 4.0
    assert subject.go_live(view) == 0
    assert subject.replay() == 4.0


def test_without_the_guard_a_rebind_without_recapture_computes_with_the_old_weights(
    capture: Callable[[Engine, int], object],
) -> None:
    """The hazard that the guard is for: no error, a plausible result, of weights that are not bound."""
    subject = Subject(capture, UnguardedPool)
    old = arena(3.0)
    subject.go_live(old)
    subject.bind(arena(7.0))
    assert subject.replay() == 3.0
    subject.pool.recapture()
    assert subject.replay() == 7.0


def test_a_stale_graph_is_refused_and_computes_nothing(subject: Subject) -> None:
    old, new = arena(3.0), arena(7.0)
    subject.go_live(old)
    subject.bind(new)
    assert subject.pool.has_graph(1)
    with pytest.raises(StaleGraphError, match=r"1 addresses differ, first \['weight'\]; recapture_graphs"):
        subject.replay()
    with pytest.raises(StaleGraphError):
        subject.pool.check_valid()
    assert subject.pool.num_replays == 0
    subject.bind(old)
    assert subject.replay() == 3.0


def test_alternating_arenas_are_captured_once_each(subject: Subject) -> None:
    arenas = [arena(float(value)) for value in (2, 3, 5)]
    counts = []
    for _ in range(3):
        for view in arenas:
            counts.append(subject.go_live(view))
            assert subject.replay() == view.numpy()[0]
    assert counts == [len(SIZES)] * 3 + [0] * 6
    assert subject.engine.captures == [*SIZES] * 3


def test_only_graphs_in_use_keep_memory(subject: Subject) -> None:
    old, new = arena(3.0), arena(7.0)
    subject.go_live(old)
    subject.go_live(new)
    assert old.mapping.num_exports == 0
    subject.pool.note_bound(None)
    assert new.mapping.num_exports == 0
    assert not subject.pool.has_graph(1)
    with pytest.raises(LifecycleError, match="no graph is in use for 1 requests"):
        subject.replay()
    assert subject.go_live(new) == 0
    assert subject.replay() == 7.0


def test_dropped_graphs_are_captured_again(subject: Subject) -> None:
    view = arena(3.0)
    subject.go_live(view)
    subject.pool.drop()
    subject.pool.drop()
    assert view.mapping.num_exports == 0
    assert not subject.pool.has_graph(1)
    assert subject.pool.recapture() == len(SIZES)
    assert subject.replay() == 3.0


def test_a_capture_that_fails_leaves_no_graph_in_use(subject: Subject) -> None:
    old, new = arena(3.0), arena(7.0)
    subject.go_live(old)
    subject.engine.fails_at = SIZES[-1]
    FakeRecorder.made.clear()
    with pytest.raises(EngineError, match="out of device memory"):
        subject.go_live(new)
    assert not subject.pool.has_graph(1)
    assert old.mapping.num_exports == new.mapping.num_exports == 0
    assert [recorder.kernels for recorder in FakeRecorder.made] in ([], [None] * (len(SIZES) - 1))  # closed
    assert subject.pool.num_captured == len(SIZES)
    assert subject.go_live(old) == 0
    assert subject.replay() == 3.0


# --- the pool --------------------------------------------------------------------------------------


def test_the_addresses_used_longest_ago_are_forgotten() -> None:
    subject = Subject(capture_on_device)
    FakeRecorder.made.clear()
    arenas = [arena(float(value)) for value in range(MAX_SETS + 1)]
    for view in arenas[:MAX_SETS]:
        subject.go_live(view)
    assert subject.go_live(arenas[0]) == 0
    assert subject.go_live(arenas[MAX_SETS]) == len(SIZES)
    assert subject.go_live(arenas[0]) == 0
    closed = [recorder for recorder in FakeRecorder.made if recorder.kernels is None]
    assert closed == FakeRecorder.made[len(SIZES) : 2 * len(SIZES)]
    assert subject.go_live(arenas[1]) == len(SIZES)


def test_nothing_is_captured_without_sizes_or_while_something_is_missing() -> None:
    pool = GraphPool(lambda size: pytest.fail("captured"), ())
    pool.note_bound(Engine().bind(arena(1.0)))
    assert (pool.recapture(), pool.has_graph(1)) == (0, False)
    missing = Subject(capture_on_cpu)
    missing.pool.note_bound(None)
    assert missing.pool.recapture() == 0


def test_a_size_without_a_graph_is_not_replayed() -> None:
    subject = Subject(capture_on_cpu)
    subject.go_live(arena(1.0))
    assert [size for size in range(6) if subject.pool.has_graph(size)] == list(SIZES)
    with pytest.raises(LifecycleError, match="for 3 requests"):
        subject.replay(3)


def test_seconds_are_those_of_the_last_capture_and_none_for_known_addresses() -> None:
    """Asked from another thread, as the staging thread does."""
    subject = Subject(capture_on_cpu)
    known, unknown = arena(1.0), arena(2.0)
    answers: list[float] = []

    def ask() -> None:
        for view in (known, unknown):
            answers.append(subject.pool.seconds_for(AddressLedger.of({"weight": view})))

    for prepare in (lambda: None, lambda: subject.go_live(known), subject.pool.drop):
        prepare()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(10)
    assert answers[:3] == [0.0, 0.0, 0.0]
    assert answers[3] > 0
    assert answers[4] == answers[5] == answers[3]


def test_a_recording_that_fails_is_ended() -> None:
    def compute(_: Sequence[DeviceArray]) -> np.ndarray:
        if FakeRecorder.recording is not None:
            raise EngineError("not while a graph is recorded")
        return np.zeros(1)

    with pytest.raises(EngineError, match="recorded"):
        CudaGraph(inputs(1), compute, FakeRecorder)
    assert FakeRecorder.recording is None


# --- the ledger ------------------------------------------------------------------------------------


def views_of(mapping: Mapping, *offsets: int) -> dict[str, TensorView]:
    return {f"p{index}": TensorView(mapping, offset, "F32", (4,)) for index, offset in enumerate(offsets)}


def test_ledgers_are_equal_where_everything_lies_in_the_same_place() -> None:
    mapping, cache = Mapping.private(4096), Address("KV cache", 1 << 20, 4096, "F32")
    views = views_of(mapping, 0, 64)
    ledger = AddressLedger.of(views, cache)
    again = AddressLedger.of(dict(reversed(views.items())), cache)
    assert ledger == again
    assert hash(ledger) == hash(again)
    assert ledger.names_elsewhere(again) == []
    assert mapping.num_exports == 0


def test_ledgers_differ_by_every_address() -> None:
    mapping, cache = Mapping.private(4096), Address("KV cache", 1 << 20, 4096, "F32")
    ledger = AddressLedger.of(views_of(mapping, 0, 64), cache)
    others = [
        (AddressLedger.of(views_of(mapping, 0, 128), cache), ["p1"]),
        (AddressLedger.of(views_of(mapping, 64, 0), cache), ["p0", "p1"]),
        (AddressLedger.of(views_of(mapping, 0, 64), cache._replace(pointer=1 << 21)), ["KV cache"]),
        (AddressLedger.of(views_of(mapping, 0, 64), cache._replace(num_bytes=8192)), ["KV cache"]),
        (AddressLedger.of(views_of(mapping, 0, 64)), ["KV cache"]),
        (AddressLedger.of(views_of(mapping, 0, 64, 128), cache), ["p2"]),
    ]
    for other, names in others:
        assert other != ledger
        assert ledger.names_elsewhere(other) == other.names_elsewhere(ledger) == names
    assert ledger != "an address ledger"
