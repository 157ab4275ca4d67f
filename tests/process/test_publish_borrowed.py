"""The trainer's own memory, published without a copy: it never changes while an engine holds it."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from publication_peer import weights

from fastdeploy_rl import checksum
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel
from fastdeploy_rl.errors import (
    ConfigurationError,
    DeadlineExceededError,
    LifecycleError,
    NoPublicationError,
    NoSpaceError,
    SegmentError,
    TrainerError,
)
from fastdeploy_rl.memory import shared_segment
from fastdeploy_rl.publish import publication
from fastdeploy_rl.publish.channel import Channel, Latest
from fastdeploy_rl.publish.leases import LeaseTable
from fastdeploy_rl.publish.publisher import WeightPublisher, retire
from fastdeploy_rl.publish.trainer_memory import TrainerMemory
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine

Start = Callable[[str], "subprocess.Popen[str]"]
WANTED = {name: ("F32", array.shape) for name, array in weights(0).items()}


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    return tmp_path / "channel"


@pytest.fixture
def publisher(channel: Path) -> Iterator[WeightPublisher]:
    with WeightPublisher(channel, max_arenas=2) as publisher:
        yield publisher


@pytest.fixture
def memory(publisher: WeightPublisher) -> TrainerMemory:
    return publisher.allocate(WANTED)


def _line(peer: "subprocess.Popen[str]") -> str:
    assert peer.stdout is not None
    return peer.stdout.readline().strip()


def _train(memory: TrainerMemory, step: int) -> None:
    for name, array in weights(step).items():
        memory[name][:] = array


def _latest(channel: Path) -> str:
    return (channel / "LATEST").read_text()


# --- never torn ------------------------------------------------------------------------------------


def test_an_engine_that_reads_all_the_time_never_sees_the_trainer_write(
    publisher: WeightPublisher, memory: TrainerMemory, start: Start
) -> None:
    _train(memory, 0)
    published = publisher.publish(memory, step=0, borrow=True)
    readers = [start("read"), start("read")]
    assert [_line(reader) for reader in readers] == ["ready", "ready"]
    for step in range(1, 60):
        published.wait_released(60)
        _train(memory, step)
        published = publisher.publish(memory, step=step, borrow=True)
    for reader in readers:
        output, _ = reader.communicate(timeout=60)
        assert reader.returncode == 0
        assert json.loads(output).get("new", 0) >= 1


def test_without_the_wait_the_same_engine_sees_its_bytes_change(
    publisher: WeightPublisher, memory: TrainerMemory, start: Start
) -> None:
    """That the test above can fail: nothing but the lease keeps the trainer out."""
    _train(memory, 1)
    publisher.publish(memory, step=1, borrow=True)
    holder = start("hold")
    _line(holder)
    _train(memory, 2)
    holder.communicate("\n", timeout=60)
    assert holder.returncode != 0


def test_waiting_names_the_engine_that_still_holds_the_memory_and_changes_nothing(
    publisher: WeightPublisher, memory: TrainerMemory, start: Start, channel: Path
) -> None:
    _train(memory, 1)
    published = publisher.publish(memory, step=1, borrow=True)
    holder = start("hold")
    assert _line(holder) == "held 1.1"
    before = _latest(channel)
    with pytest.raises(DeadlineExceededError, match=rf"pid {holder.pid} \(since .*\) on version 1\.1"):
        published.wait_released(0.2)
    assert _latest(channel) == before
    other = start("hold")
    assert _line(other) == "held 1.1"
    for peer in (holder, other):
        peer.communicate("\n", timeout=60)
        assert peer.returncode == 0
    published.wait_released(60)
    late = start("hold")
    late.communicate(timeout=60)
    assert late.returncode != 0
    _train(memory, 2)
    publisher.publish(memory, step=2, borrow=True)
    latest = start("hold")
    assert _line(latest) == "held 1.2"
    latest.communicate("\n", timeout=60)
    assert latest.returncode == 0


def test_the_lease_of_a_killed_engine_does_not_keep_the_trainer_waiting(
    publisher: WeightPublisher, memory: TrainerMemory, start: Start
) -> None:
    published = publisher.publish(memory, step=0, borrow=True)
    _train(memory, 0)
    holder = start("hold")
    _line(holder)
    holder.send_signal(signal.SIGKILL)
    published.wait_released(60)
    assert holder.wait(10) == -signal.SIGKILL


def test_publishing_again_without_taking_the_memory_back_is_refused_and_names_the_holder(
    publisher: WeightPublisher, memory: TrainerMemory, start: Start, channel: Path
) -> None:
    _train(memory, 1)
    published = publisher.publish(memory, step=1, borrow=True)
    before = _latest(channel)
    with pytest.raises(LifecycleError, match=r"version 1\.1, leased by nobody now: call wait_released"):
        publisher.publish(memory, step=2, borrow=True)
    holder = start("hold")
    _line(holder)
    with pytest.raises(LifecycleError, match=rf"version 1\.1, leased by pid {holder.pid}"):
        publisher.publish(memory, step=2, borrow=True)
    assert _latest(channel) == before
    holder.communicate("\n", timeout=60)
    assert holder.returncode == 0
    published.wait_released(60)
    publisher.publish(memory, step=2, borrow=True)


def test_a_copy_of_borrowed_memory_may_be_published_at_any_time(
    publisher: WeightPublisher, memory: TrainerMemory, start: Start
) -> None:
    _train(memory, 1)
    borrowed = publisher.publish(memory, step=1, borrow=True)
    copied = publisher.publish(memory, step=2)
    copied.wait_released(0.1)
    assert [segment.is_borrowed for segment in copied.manifest.segments] == [False]
    assert borrowed.manifest.tensors[0].checksum == copied.manifest.tensors[0].checksum
    borrowed.wait_released(0.1)
    borrowed.wait_released(0.1)


def test_an_earlier_publication_of_the_same_memory_takes_nothing_back_from_a_later_one(
    publisher: WeightPublisher, memory: TrainerMemory, start: Start
) -> None:
    earlier = publisher.publish(memory, step=1, borrow=True)
    earlier.wait_released(60)
    _train(memory, 2)
    publisher.publish(memory, step=2, borrow=True)
    earlier.wait_released(60)
    holder = start("hold")
    assert _line(holder) == "held 1.2"
    holder.communicate("\n", timeout=60)
    assert holder.returncode == 0


def test_memory_is_taken_back_before_the_publisher_closes(channel: Path) -> None:
    with WeightPublisher(channel) as publisher:
        memory = publisher.allocate({"w": ("F32", (4,))})
        copied = publisher.publish(memory, step=1)
        borrowed = publisher.publish(memory, step=2, borrow=True)
    with pytest.raises(LifecycleError, match=r"is closed.*call wait_released before close"):
        borrowed.wait_released(0.1)
    copied.wait_released(0.1)


def test_an_engine_that_serves_from_the_trainers_memory_lets_go_of_it_when_cleared(
    publisher: WeightPublisher, channel: Path
) -> None:
    """FastDeploy's cycle on one machine: update, clear, train, update."""
    model = NumpyModel((ParameterSpec("w", "F32", (8, 6), 0), ParameterSpec("norm", "F32", (6,), None)))
    memory = publisher.allocate({"w": ("F32", (8, 6)), "norm": ("F32", (6,))})
    with NumpyEngine(model, channel=channel, num_ranks=2) as engine, BoardClient(engine.port) as client:
        for step in (1, 2, 3):
            memory["w"][:] = step
            memory["norm"][:] = -step
            published = publisher.publish(memory, step=step, borrow=True)
            report = client.update(published.version)
            assert report.receipt.content_digest == published.manifest.content_digest
            assert engine.holds(dict(memory))
            with pytest.raises(DeadlineExceededError, match=rf"on version {published.version}"):
                published.wait_released(0.1)
            assert client.receipt(recompute=True) == report.receipt
            client.clear()
            published.wait_released(60)


def test_each_part_takes_back_its_own_memory(channel: Path) -> None:
    with WeightPublisher(channel, part=(0, 2)) as first, WeightPublisher(channel, part=(1, 2)) as second:
        memories = [first.allocate({"a": ("F32", (4,))}), second.allocate({"b": ("F32", (4,))})]
        for step in (1, 2):
            with ThreadPoolExecutor(1) as other:
                pending = other.submit(second.publish, memories[1], step=step, borrow=True)
                published = first.publish(memories[0], step=step, borrow=True)
            assert pending.result().manifest == published.manifest
            assert [(s.publisher, s.is_borrowed) for s in published.manifest.segments] == [(0, True), (1, True)]
            with pytest.raises(LifecycleError, match="wait_released"):
                second.publish(memories[1], step=9, borrow=True, deadline_s=0.1)  # of a step that nobody else tries
            for own in (published, pending.result()):
                own.wait_released(1)


# --- what is published -----------------------------------------------------------------------------


def test_tensors_lie_where_they_were_allocated_and_add_up(publisher: WeightPublisher, channel: Path) -> None:
    first = publisher.allocate({"a": ("F32", (3, 5)), "empty": ("I8", (0, 4)), "scale": ("F64", ())})
    second = publisher.allocate({"b": ("BF16", (7,))})
    first["a"][:] = np.arange(15).reshape(3, 5)
    first["scale"][()] = 2.5
    second["b"][:] = range(7)
    state = {**first, **second, "tied": first["a"]}
    manifest = publisher.publish(state, step=1, borrow=True).manifest
    assert [segment.is_borrowed for segment in manifest.segments] == [True, True]
    assert manifest.aliases == {"tied": "a"}
    for tensor in manifest.tensors:
        assert tensor.checksum == checksum.of_bytes(state[tensor.name].tobytes()).hex()
        part = tensor.parts[0]
        with shared_segment.SharedSegment.attach(manifest.segments[part.segment].locator) as segment:
            data = bytes(memoryview(segment.mapping)[part.offset : part.offset + tensor.num_bytes])
        assert data == state[tensor.name].tobytes()


def test_a_tensor_without_bytes_publishes_no_other_memory_with_it(publisher: WeightPublisher) -> None:
    published, spare, own = (publisher.allocate({name: ("F32", (4,))}) for name in ("published", "spare", "own"))
    publisher.publish(published, step=1, borrow=True)
    manifest = publisher.publish({"empty": np.zeros((0, 4), "f4"), **own}, step=2, borrow=True).manifest
    assert len(manifest.segments) == 1
    assert [tensor.name for tensor in manifest.tensors] == ["empty", "own"]
    publisher.publish(spare, step=3, borrow=True)


def test_paddle_computes_in_allocated_memory(publisher: WeightPublisher) -> None:
    paddle = pytest.importorskip("paddle", reason="paddle is not installed")
    memory = publisher.allocate({"w": ("F32", (4, 4)), "half": ("BF16", (3,))})
    weight = paddle.utils.dlpack.from_dlpack(memory.export("w"))
    weight.add_(paddle.to_tensor(1.5))
    half = paddle.utils.dlpack.from_dlpack(memory.export("half"))
    assert half.dtype == paddle.bfloat16
    published = publisher.publish({"w": weight, "half": half}, step=1, borrow=True)
    assert memory["w"].tolist() == [[1.5] * 4] * 4
    assert published.manifest.segments[0].is_borrowed
    assert published.num_bytes == 70


def test_torch_computes_in_allocated_memory(publisher: WeightPublisher) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed here")
    memory = publisher.allocate({"w": ("F32", (4, 4)), "half": ("BF16", (3,))})
    weight = torch.from_numpy(memory["w"]).requires_grad_()
    with torch.no_grad():
        weight += 1.5
    half = torch.from_dlpack(memory.export("half"))
    assert half.dtype == torch.bfloat16
    publisher.publish({"w": weight, "half": half}, step=1, borrow=True)
    assert memory["w"].tolist() == [[1.5] * 4] * 4


def test_arrays_outlive_the_publisher(channel: Path) -> None:
    with WeightPublisher(channel) as publisher:
        memory = publisher.allocate({"w": ("F32", (4,))})
        published = publisher.publish(memory, step=1, borrow=True)
    memory["w"][:] = 3
    assert memory["w"].tolist() == [3.0] * 4
    assert published.version.step == 1


def test_a_kept_borrowed_publication_serves_later_engines_and_then_the_next_trainer(
    channel: Path, start: Start
) -> None:
    publisher = WeightPublisher(channel)
    publisher.start()
    memory = publisher.allocate(WANTED)
    _train(memory, 3)
    publisher.publish(memory, step=3, borrow=True)
    publisher.close(keep=True)
    del memory
    holder = start("hold")
    assert _line(holder) == "held 1.3"
    with WeightPublisher(channel) as publisher:
        publisher.publish(weights(1), step=1)
        publisher.publish(weights(2), step=2, deadline_s=0.2)
        holder.communicate("\n", timeout=60)
        assert holder.returncode == 0
    assert [path.name for path in channel.glob("manifest-*")] == []


# --- what is refused, and that nothing changed -----------------------------------------------------


def _of(memory: TrainerMemory, **changes: Any) -> dict[str, Any]:
    return {**memory, **changes}


@pytest.mark.parametrize(
    ("changes", "more", "error", "text"),
    [
        ({"mine": np.zeros(4, "f4")}, {}, TrainerError, "'mine' cannot be borrowed.*allocate"),
        ({}, {"layout": "tp:2"}, ConfigurationError, "layout 'full', got 'tp:2'"),
        ({}, {"step": 1}, TrainerError, "steps must go up"),
    ],
)
def test_what_cannot_be_borrowed_leaves_the_memory_to_the_trainer(
    publisher: WeightPublisher,
    memory: TrainerMemory,
    channel: Path,
    changes: dict[str, Any],
    more: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    publisher.publish({"w": np.zeros(4, "f4")}, step=1)
    before = _latest(channel)
    with pytest.raises(error, match=text):
        publisher.publish(_of(memory, **changes), **{"step": 2, "borrow": True, **more})
    assert _latest(channel) == before
    publisher.publish(memory, step=2, borrow=True)


def test_a_slice_of_an_allocated_tensor_is_refused_by_name(publisher: WeightPublisher, memory: TrainerMemory) -> None:
    with pytest.raises(TrainerError, match=r"'t0' cannot be borrowed: it begins inside"):
        publisher.publish({"t0": memory["t0"].reshape(-1)[3:]}, step=1, borrow=True)


@pytest.mark.parametrize("place", ["copy_out", "write_manifest"])
def test_a_borrowed_publication_that_breaks_off_gives_the_memory_back(
    publisher: WeightPublisher,
    memory: TrainerMemory,
    channel: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: Start,
    place: str,
) -> None:
    publisher.publish(weights(1), step=1)
    before = _latest(channel)

    def break_off(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(publication if place == "copy_out" else Channel, place, break_off)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(memory, step=2, borrow=True)
    assert _latest(channel) == before
    _train(memory, 2)
    publisher.publish(memory, step=2, borrow=True)
    holder = start("hold")
    assert _line(holder) == "held 1.2"
    holder.communicate("\n", timeout=60)
    assert holder.returncode == 0


def test_a_manifest_that_cannot_be_removed_keeps_no_memory_from_the_trainer(
    channel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LATEST cannot be written, and then the manifest cannot be taken away: the memory is the trainer's all the same,
    and the next version is published from it."""
    with WeightPublisher(channel) as publisher:
        memory = publisher.allocate(WANTED)
        _train(memory, 1)

        def break_off(place: Channel, latest: Latest) -> None:
            (place.path / latest.file).unlink()
            (place.path / latest.file).mkdir()
            raise OSError("broke off")

        with monkeypatch.context() as patch:
            patch.setattr(Channel, "write_latest", break_off)
            with pytest.raises(SegmentError, match="cannot be removed"):
                publisher.publish(memory, step=1, borrow=True)
        assert not (channel / "LATEST").exists()
        [directory] = channel.glob("manifest-*")
        directory.rmdir()
        published = publisher.publish(memory, step=1, borrow=True)
        assert json.loads(_latest(channel))["version"] == str(published.version)


@pytest.mark.parametrize(
    ("wanted", "error", "text"),
    [
        ({"w": ("F33", (4,))}, ConfigurationError, "unknown dtype 'F33'"),
        ({"w": ("F32", (-1,))}, ConfigurationError, "'w' cannot have shape"),
        ({"w": ("F32", (2.0,))}, ConfigurationError, "'w' cannot have shape"),
        ({"w": ("F64", (2**50,))}, NoSpaceError, "free"),
    ],
)
def test_memory_that_cannot_be_had_is_refused_and_nothing_is_held(
    publisher: WeightPublisher, channel: Path, wanted: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        publisher.allocate(wanted)
    table = LeaseTable(channel / "LEASES", channel / "holders")
    table.open()
    assert [table.segment(row) for row in range(16) if table.segment(row)] == []
    assert not any(table.is_written(row) for row in range(16))
    table.close()


def test_arenas_and_allocated_memory_share_sixteen_rows(publisher: WeightPublisher) -> None:
    publisher.publish(weights(1), step=1)
    for _ in range(15):
        publisher.allocate({"w": ("F32", (4,))})
    with pytest.raises(NoSpaceError, match="all 16 rows"):
        publisher.allocate({"w": ("F32", (4,))})
    with pytest.raises(NoPublicationError):
        retire(Path("/nonexistent"))


def test_a_version_that_lies_in_more_rows_than_a_publisher_has_arenas_is_followed_by_the_next(channel: Path) -> None:
    publisher = WeightPublisher(channel)
    publisher.start()
    state = {}
    for name in "abcd":
        state.update(publisher.allocate({name: ("F32", (4,))}))
    publisher.publish(state, step=1, borrow=True)
    publisher.close(keep=True)
    del state
    with WeightPublisher(channel, max_arenas=2) as publisher:
        publisher.publish(weights(1), step=1, deadline_s=0.2)
        publisher.publish(weights(2), step=2, deadline_s=0.2)


def test_a_copy_has_no_room_beside_sixteen_pieces_of_allocated_memory(
    publisher: WeightPublisher, channel: Path
) -> None:
    for _ in range(16):
        publisher.allocate({"w": ("F32", (4,))})
    with pytest.raises(NoSpaceError, match=r"all 16 rows .* are taken: allocate fewer"):
        publisher.publish(weights(1), step=1)
    assert not (channel / "LATEST").exists()


def test_memory_of_a_killed_trainer_is_taken_over_by_the_next(channel: Path, start: Start) -> None:
    dead = start("borrow")
    assert _line(dead) == "published 1.1"
    dead.kill()
    dead.wait(10)
    holder = start("hold")
    assert _line(holder) == "held 1.1"
    holder.communicate("\n", timeout=60)
    assert holder.returncode == 0
    with WeightPublisher(channel) as publisher:
        publisher.publish(weights(1), step=1)
    retire(channel)
