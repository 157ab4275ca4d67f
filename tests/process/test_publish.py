"""WeightPublisher with real processes at the other end of the channel."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from publication_peer import weights

from fastdeploy_rl import _native, checksum
from fastdeploy_rl.errors import (
    ChannelBusyError,
    ConfigurationError,
    DeadlineExceededError,
    LifecycleError,
    ManifestError,
    NoPublicationError,
    NoSpaceError,
    SegmentError,
    TrainerError,
    VersionFormatError,
    VersionRegressError,
)
from fastdeploy_rl.memory import shared_segment
from fastdeploy_rl.plan.conventions import Convention, TensorRule, hugging_face
from fastdeploy_rl.publish import copying, publication
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.publish.publisher import WeightPublisher, retire
from fastdeploy_rl.publish.weight_server import read_server_address

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    return tmp_path / "channel"


@pytest.fixture
def publisher(channel: Path) -> Iterator[WeightPublisher]:
    with WeightPublisher(channel, max_arenas=2) as publisher:
        yield publisher


def _line(peer: "subprocess.Popen[str]") -> str:
    assert peer.stdout is not None
    return peer.stdout.readline().strip()


def _finish(peer: "subprocess.Popen[str]") -> str:
    output, _ = peer.communicate(timeout=60)
    assert peer.returncode == 0
    return output.strip()


def _segments(channel: Path) -> list[str]:
    key = Channel(channel).key
    return sorted(name for name in os.listdir("/dev/shm") if key in name)


def _read(manifest: Any) -> dict[str, bytes]:
    with shared_segment.SharedSegment.attach(manifest.segments[0].locator) as segment:
        view = memoryview(segment.mapping)
        found = {}
        for tensor in manifest.tensors:
            assert tensor.shard_axis is None
            offset = tensor.parts[0].offset
            found[tensor.name] = bytes(view[offset : offset + tensor.num_bytes])
        view.release()
    return found


def _latest(channel: Path) -> str:
    return (channel / "LATEST").read_text()


# --- atomicity and leases --------------------------------------------------------------------------


def test_readers_never_see_half_and_leased_bytes_never_change(publisher: WeightPublisher, start: Start) -> None:
    publisher.publish(weights(0), step=0)
    readers = [start("read"), start("read")]
    assert [_line(reader) for reader in readers] == ["ready", "ready"]
    for step in range(1, 200):
        publisher.publish(weights(step), step=step, deadline_s=60)
    outcomes = [json.loads(_finish(reader)) for reader in readers]
    assert all(outcome.get("new", 0) >= 2 for outcome in outcomes)


def test_the_publisher_waits_for_a_slow_engine_and_goes_on_when_it_lets_go(
    publisher: WeightPublisher, start: Start, channel: Path
) -> None:
    holders = []
    for step in (1, 2):
        publisher.publish(weights(step), step=step)
        holders.append(start("hold"))
        assert _line(holders[-1]) == f"held {publisher.epoch}.{step}"
    before = _latest(channel)
    with pytest.raises(DeadlineExceededError) as caught:
        publisher.publish(weights(3), step=3, deadline_s=0.2)
    assert f"pid {holders[0].pid} " in str(caught.value)
    assert f"version {publisher.epoch}.1" in str(caught.value)
    assert _latest(channel) == before
    assert holders[0].stdin is not None
    holders[0].stdin.write("\n")
    holders[0].stdin.flush()
    publisher.publish(weights(3), step=3, deadline_s=60)
    assert [_finish(holder) for holder in holders] == ["", ""]


def test_the_lease_of_a_killed_engine_is_void(publisher: WeightPublisher, start: Start, channel: Path) -> None:
    publisher.publish(weights(1), step=1)
    holder = start("hold")
    _line(holder)
    publisher.publish(weights(2), step=2)
    holder.kill()
    publisher.publish(weights(3), step=3, deadline_s=60)
    assert holder.wait(10) == -9
    assert list((channel / "holders").iterdir()) == []


def test_an_engine_that_keeps_the_version_before_does_not_stop_the_next_one(start: Start, channel: Path) -> None:
    """As after a rejected update: the engine holds version 1, LATEST is version 2, the mended one is version 3."""
    with WeightPublisher(channel) as publisher:
        publisher.publish(weights(1), step=1)
        holder = _holding(start, "held 1.1")
        for step in (2, 3, 4):
            publisher.publish(weights(step), step=step, deadline_s=0.2)
        assert _finish(holder) == ""


def test_more_arenas_let_the_publisher_run_ahead_of_slow_engines(channel: Path, start: Start) -> None:
    with WeightPublisher(channel, max_arenas=4) as publisher:
        holders = []
        for step in (1, 2, 3):
            publisher.publish(weights(step), step=step)
            holders.append(start("hold"))
            _line(holders[-1])
        publisher.publish(weights(4), step=4, deadline_s=0.2)
        assert [_finish(holder) for holder in holders] == ["", "", ""]


# --- who may publish -------------------------------------------------------------------------------


def test_a_second_live_publisher_is_refused_by_pid_and_the_first_is_undisturbed(start: Start, channel: Path) -> None:
    first = start("publish")
    assert _line(first) == "published 1.1"
    before = _latest(channel)
    with pytest.raises(ChannelBusyError, match=f"pid {first.pid}"):
        WeightPublisher(channel).start()
    with pytest.raises(ChannelBusyError, match=f"pid {first.pid}"):
        retire(channel)
    assert _latest(channel) == before
    assert (channel / "EPOCH").read_text() == "1\n"
    assert _finish(first) == ""


def test_the_publication_of_a_killed_trainer_stands_until_the_next_one(start: Start, channel: Path) -> None:
    dead = start("publish")
    _line(dead)
    dead.kill()
    dead.wait(10)
    reader = start("hold")
    assert _line(reader) == "held 1.1"
    with WeightPublisher(channel, max_arenas=2) as publisher:
        assert publisher.epoch == 2
        publisher.publish(weights(0), step=0)
        assert _finish(reader) == ""
        publisher.publish(weights(1), step=1, deadline_s=0.2)
        assert len(_segments(channel)) == 2
    assert _segments(channel) == []


def test_a_trainer_killed_while_it_writes_leaves_the_last_version_whole(start: Start, channel: Path) -> None:
    dead = start("write")
    assert [_line(dead), _line(dead)] == ["published 1.1", "writing"]
    dead.kill()
    dead.wait(10)
    reader = start("hold")
    assert _line(reader) == "held 1.1"
    with WeightPublisher(channel) as publisher:
        publisher.publish(weights(5), step=5, deadline_s=0.2)
        assert _finish(reader) == ""
        assert _finish(_holding(start, "held 2.5")) == ""
    assert _segments(channel) == []


def _holding(start: Start, expected: str) -> "subprocess.Popen[str]":
    peer = start("hold")
    assert _line(peer) == expected
    return peer


def test_a_trainer_killed_at_any_moment_leaves_something_that_works(start: Start, channel: Path) -> None:
    for epoch in range(1, 6):
        dead = start("trainer")
        assert _line(dead) == "published 2"
        dead.kill()
        dead.wait(10)
        reader = _holding(start, f"held {json.loads(_latest(channel))['version']}")
        assert _latest(channel).startswith(f'{{"version":"{epoch}.')
        assert _finish(reader) == ""
    assert retire(channel).num_bytes > 0
    assert _segments(channel) == []


def test_ctrl_c_in_a_trainer_leaves_no_segment_and_no_publication(start: Start, channel: Path) -> None:
    for _ in range(4):
        trainer = start("trainer")
        assert _line(trainer) == "published 2"
        trainer.send_signal(signal.SIGINT)
        trainer.communicate(timeout=60)
        assert trainer.returncode == -signal.SIGINT
        assert _segments(channel) == []
        assert not (channel / "LATEST").exists()
    with WeightPublisher(channel) as publisher:
        assert publisher.epoch == 5


def test_retire_removes_what_a_dead_trainer_left_and_nothing_twice(start: Start, channel: Path) -> None:
    dead = start("publish")
    _line(dead)
    dead.kill()
    dead.wait(10)
    retired = retire(channel)
    assert retired.version == "1.1"
    assert retired.num_bytes > 0
    assert _segments(channel) == []
    assert not list(channel.glob("manifest-*"))
    assert retire(channel) == ("", 0)


@pytest.mark.parametrize("broken", ["LATEST", "version", "manifest"])
def test_a_publication_that_nobody_can_read_can_be_retired(channel: Path, broken: str) -> None:
    publisher = WeightPublisher(channel)
    publisher.start()
    publisher.publish(weights(1), step=1)
    publisher.close(keep=True)
    latest = (channel / "LATEST").read_text()
    if broken == "manifest":
        next(channel.glob("manifest-*")).write_text("{}")
    else:
        (channel / "LATEST").write_text("{" if broken == "LATEST" else latest.replace('"1.1"', '"one"'))
    with pytest.raises((ManifestError, VersionFormatError)):
        WeightPublisher(channel).start()
    assert retire(channel).num_bytes > 0
    assert _segments(channel) == []
    assert not (channel / "LATEST").exists()
    with WeightPublisher(channel) as publisher:
        publisher.publish(weights(1), step=1)


def test_a_publication_that_nobody_can_read_stays_while_its_publisher_lives(channel: Path) -> None:
    with WeightPublisher(channel) as publisher:
        publisher.publish(weights(1), step=1)
        latest = (channel / "LATEST").read_text()
        (channel / "LATEST").write_text("{")
        with pytest.raises(ChannelBusyError):
            retire(channel)
        assert (channel / "LATEST").read_text() == "{"
        (channel / "LATEST").write_text(latest)


def test_retiring_where_there_is_no_channel_says_so(channel: Path) -> None:
    with pytest.raises(NoPublicationError, match="no channel"):
        retire(channel)
    assert not channel.exists()


def test_a_kept_publication_serves_later_engines(start: Start, channel: Path) -> None:
    publisher = WeightPublisher(channel)
    publisher.start()
    for step in (1, 2):
        publisher.publish(weights(step), step=step)
    publisher.close(keep=True)
    assert len(_segments(channel)) == 1
    assert _finish(_holding(start, "held 1.2")) == ""
    retire(channel)


def test_closing_removes_publication_and_memory_and_lets_the_next_in(channel: Path) -> None:
    for epoch in (1, 2):
        with WeightPublisher(channel) as publisher:
            assert str(publisher.publish(weights(1), step=1).version) == f"{epoch}.1"
        publisher.close()
        assert _segments(channel) == []
        assert {entry.name for entry in channel.iterdir()} == {"EPOCH", "LEASES", "holders"}


def test_a_forked_child_that_ends_takes_nothing_of_its_parents_away(channel: Path) -> None:
    """It unwinds the parent's `with`, as one does that raises."""
    code = (
        "import os, sys, numpy; from fastdeploy_rl import WeightPublisher, WeightServer\n"
        "with WeightPublisher(sys.argv[1]) as publisher, WeightServer(sys.argv[1]):\n"
        "    publisher.publish({'w': numpy.ones(9, 'f4')}, step=1)\n"
        "    os.fork() or sys.exit()\n"
        "    assert os.wait()[1] == 0\n"
        "    os.write(1, b'child ended\\n')\n"
        "    sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", code, str(channel)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert _line(parent) == "child ended"
        assert json.loads(_latest(channel))["version"] == "1.1"
        assert read_server_address(channel).startswith("127.0.0.1:")
        assert len(_segments(channel)) == 1
        parent.stdin.close()
        assert parent.wait(30) == 0
    assert _segments(channel) == []


def test_a_publisher_whose_channel_was_removed_says_so_and_leaves_no_memory(channel: Path) -> None:
    with WeightPublisher(channel) as publisher:
        publisher.publish(weights(1), step=1)
        shutil.rmtree(channel)
        with pytest.raises(SegmentError, match="was removed, or made anew, under its publisher"):
            publisher.publish(weights(2), step=2)
        assert not channel.exists()
    assert _segments(channel) == []


def test_a_publisher_whose_channel_was_made_anew_touches_nothing_of_the_new_one(channel: Path) -> None:
    with WeightPublisher(channel) as former:
        former.publish(weights(1), step=1)
        shutil.rmtree(channel)
        with WeightPublisher(channel) as publisher:
            publisher.publish(weights(2), step=1)
            before = _latest(channel), sorted(os.listdir(channel))
            with pytest.raises(SegmentError, match="start another"):
                former.publish(weights(3), step=9)
            former.close()
            assert (_latest(channel), sorted(os.listdir(channel))) == before
            with pytest.raises(ChannelBusyError, match=f"pid {os.getpid()}"):
                WeightPublisher(channel).start()
            assert str(publisher.publish(weights(3), step=2).version) == "1.2"
    assert _segments(channel) == []


# --- what is published -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_shards_of_a_rank_lie_together_and_checksums_are_those_of_whole_tensors(
    publisher: WeightPublisher, num_ranks: int
) -> None:
    rng = np.random.default_rng(num_ranks)
    state = {
        "model.layers.0.mlp.up_proj.weight": rng.integers(0, 2**16, (10, 18), np.uint16),
        "model.layers.0.mlp.down_proj.weight": rng.standard_normal((18, 5)).astype(np.float32),
        "model.norm.weight": rng.integers(0, 255, 13).astype(np.uint8),
    }
    manifest = publisher.publish(state, step=1, layout=f"tp:{num_ranks}").manifest
    starts: dict[int, list[int]] = {}
    with shared_segment.SharedSegment.attach(manifest.segments[0].locator) as segment:
        for tensor in manifest.tensors:
            array = state[tensor.name]
            assert tensor.checksum == checksum.of_bytes(array.tobytes()).hex()
            shards = [array] if tensor.shard_axis is None else np.split(array, num_ranks, tensor.shard_axis)
            for rank, (part, shard) in enumerate(zip(tensor.parts, shards, strict=True)):
                data = bytes(memoryview(segment.mapping)[part.offset : part.offset + shard.nbytes])
                assert data == np.ascontiguousarray(shard).tobytes()
                starts.setdefault(-1 if tensor.shard_axis is None else rank, []).append(part.offset)
    order = [offset for rank in sorted(starts) for offset in sorted(starts[rank])]
    assert order == sorted(order)


def test_scalars_empty_tensors_and_tied_names_are_published(publisher: WeightPublisher) -> None:
    embedding = np.arange(12, dtype=np.float32).reshape(4, 3)
    state = {"embed": embedding, "scale": np.array(2.5), "empty": np.zeros((0, 7), np.int8), "head": embedding}
    published = publisher.publish(state, step=1)
    assert published.manifest.aliases == {"head": "embed"}
    assert published.num_bytes == embedding.nbytes + 8
    assert _read(published.manifest) == {name: state[name].tobytes() for name in ("embed", "scale", "empty")}


def test_only_empty_tensors_can_be_published(publisher: WeightPublisher) -> None:
    published = publisher.publish({"empty": np.zeros((0, 7), np.int8)}, step=1)
    assert _read(published.manifest) == {"empty": b""}


def test_a_paddle_model_is_published_as_it_is(publisher: WeightPublisher) -> None:
    paddle = pytest.importorskip("paddle", reason="paddle is not installed")
    state = {"a": paddle.rand([4, 6]).astype("bfloat16"), "b": paddle.create_parameter([3], "float32")}
    manifest = publisher.publish(
        state, step=1, layout="tp:2", convention=lambda name, shape: TensorRule(name, 1 if name == "a" else None)
    ).manifest
    assert [(tensor.dtype, tensor.shape) for tensor in manifest.tensors] == [("BF16", (4, 6)), ("F32", (3,))]
    for tensor in manifest.tensors:
        assert tensor.checksum == checksum.of_bytes(state[tensor.name].numpy().tobytes()).hex()


def test_a_torch_model_is_published_as_it_is(publisher: WeightPublisher) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed here")
    model = torch.nn.Linear(4, 3)
    published = publisher.publish(model.state_dict(), step=1)
    assert _read(published.manifest)["weight"] == model.weight.detach().numpy().tobytes()


def test_the_trainer_may_change_its_tensors_as_soon_as_publish_returns(publisher: WeightPublisher) -> None:
    array = np.ones(1000, np.float32)
    published = publisher.publish({"w": array}, step=1)
    array[:] = 7
    assert _read(published.manifest)["w"] == np.ones(1000, np.float32).tobytes()


def test_a_model_that_no_engine_would_take_can_be_published(publisher: WeightPublisher) -> None:
    published = publisher.publish({"model.norm.weight": np.zeros((3, 5, 7), np.int16)}, step=1)
    assert published.manifest.tensors[0].shape == (3, 5, 7)


def test_arenas_are_reused_and_grow_only_when_they_must(publisher: WeightPublisher, channel: Path) -> None:
    names = [publisher.publish(weights(step), step=step).manifest.segments[0].locator for step in range(6)]
    assert names == names[:2] * 3
    larger = publisher.publish({"w": np.zeros(1 << 20, np.uint8)}, step=6).manifest.segments[0]
    assert larger.locator not in names
    assert larger.num_bytes >= 1 << 20
    assert len(_segments(channel)) == 2
    smaller = [publisher.publish({"w": np.zeros(8, np.uint8)}, step=step).manifest.segments[0] for step in (7, 8)]
    assert larger.locator in [segment.locator for segment in smaller]


def test_only_manifests_whose_memory_is_intact_are_kept(publisher: WeightPublisher, channel: Path) -> None:
    for step in range(4):
        publisher.publish(weights(step), step=step)
    assert sorted(path.name.split("-")[1] for path in channel.glob("manifest-*")) == ["1.2", "1.3"]


# --- what is refused, and that nothing changed -----------------------------------------------------


def _along(axis: int) -> Convention:
    return lambda name, shape: TensorRule(name, axis)


def _broken(**changes: Any) -> dict[str, Any]:
    return {"state_dict": weights(2), "step": 2, **changes}


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (_broken(step=1), VersionRegressError, r"1\.1.* at 1\.1"),
        (_broken(step=0), VersionRegressError, r"1\.0.* at 1\.1"),
        (_broken(step=-1), VersionFormatError, "step"),
        (_broken(step=2**63), VersionFormatError, "step"),
        (_broken(step="2"), VersionFormatError, "step"),
        (_broken(state_dict={}), TrainerError, "empty"),
        (_broken(state_dict=object()), TrainerError, r"model\.state_dict\(\); got object"),
        (_broken(state_dict={"w": [1.0]}), TrainerError, "'w' is no tensor"),
        (_broken(state_dict={"w": np.zeros((4, 4), "f4").T}), TrainerError, "'w' is not contiguous"),
        (_broken(state_dict={"w": np.zeros(4, "c8")}), TrainerError, "'w' has dtype complex64"),
        (_broken(state_dict={7: np.zeros(4, "f4")}), TrainerError, "got 7"),
        (_broken(state_dict={"": np.zeros(4, "f4")}), ManifestError, "name"),
        (_broken(state_dict={"n" * 600: np.zeros(4, "f4")}), ManifestError, "600 bytes"),
        (_broken(layout="tp:0"), ConfigurationError, "layout"),
        (
            _broken(layout="tp:3", convention=_along(0)),
            ConfigurationError,
            "'t0'.*tp:3.*axis 0",
        ),
        (
            _broken(layout="tp:2", convention=_along(5)),
            ConfigurationError,
            "'t0'.*axis 5",
        ),
        (_broken(deadline_s=0), ConfigurationError, "deadline_s"),
    ],
)
def test_what_cannot_be_published_changes_nothing(
    publisher: WeightPublisher, channel: Path, call: dict[str, Any], error: type[Exception], text: str
) -> None:
    published = publisher.publish(weights(1), step=1)
    before = _latest(channel), _segments(channel), sorted(os.listdir(channel))
    with pytest.raises(error, match=text):
        publisher.publish(call.pop("state_dict"), **call)
    assert (_latest(channel), _segments(channel), sorted(os.listdir(channel))) == before
    assert _read(published.manifest)["t3"] == weights(1)["t3"].tobytes()
    publisher.publish(weights(2), step=2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
@pytest.mark.parametrize("place", ["transfer", "before", "write_manifest", "remove_superseded"])
def test_a_publication_that_breaks_off_leaves_the_last_one_and_a_free_arena(
    publisher: WeightPublisher, channel: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], place: str
) -> None:
    published = publisher.publish(weights(1), step=1)
    before = _latest(channel)

    def break_off(*_: Any) -> Any:
        raise error("broke off")

    with monkeypatch.context() as patch:
        if place == "transfer":
            patch.setattr(_native, "transfer", break_off)
        elif place == "before":
            patch.setattr(publication, "copy_out", break_off)
        else:
            patch.setattr(Channel, place, break_off)
        with pytest.raises(error, match="broke off"):
            publisher.publish(weights(2), step=2)
    if place == "remove_superseded":
        assert '"1.2"' in _latest(channel)
    else:
        assert _latest(channel) == before
        assert _read(published.manifest)["t0"] == weights(1)["t0"].tobytes()
    again = publisher.publish(weights(3), step=3, deadline_s=0.1)
    assert _read(again.manifest)["t5"] == weights(3)["t5"].tobytes()
    assert len(_segments(channel)) == 2


def test_no_room_in_shared_memory_says_what_is_needed_and_free(
    publisher: WeightPublisher, channel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(weights(1), step=1)
    before = _latest(channel), _segments(channel)
    with monkeypatch.context() as patch:
        patch.setattr(shared_segment, "free_bytes", lambda: 5000)
        with pytest.raises(NoSpaceError, match=r"needs \d+ bytes of /dev/shm, 5000 are free"):
            publisher.publish(weights(2), step=2)
    assert (_latest(channel), _segments(channel)) == before
    publisher.publish(weights(2), step=2)


def test_no_room_for_the_manifest_is_no_room_in_words(
    publisher: WeightPublisher, channel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(weights(1), step=1)
    before = _latest(channel), sorted(os.listdir(channel))

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(NoSpaceError, match=r"manifest-1\.2-\w+\.json cannot be written: No space left on device"):
            publisher.publish(weights(2), step=2)
    assert (_latest(channel), sorted(os.listdir(channel))) == before
    publisher.publish(weights(2), step=2)


def test_a_publisher_that_was_not_started_publishes_nothing(channel: Path) -> None:
    with pytest.raises(LifecycleError, match="not started"):
        WeightPublisher(channel).publish(weights(1), step=1)
    assert not channel.exists()


def test_starting_twice_is_refused_and_the_publisher_goes_on(publisher: WeightPublisher) -> None:
    with pytest.raises(LifecycleError, match="already started"):
        publisher.start()
    publisher.publish(weights(1), step=1)


@pytest.mark.parametrize("max_arenas", [-1, 0, 1, 17])
def test_fewer_than_two_arenas_cannot_keep_the_last_version(channel: Path, max_arenas: int) -> None:
    with pytest.raises(ConfigurationError, match="max_arenas must be 2 to 16"):
        WeightPublisher(channel, max_arenas=max_arenas)


def test_a_start_that_fails_gives_the_channel_back(channel: Path) -> None:
    Channel(channel).open()
    (channel / "EPOCH").write_text("many")
    with pytest.raises(Exception, match="not a number"):
        WeightPublisher(channel).start()
    (channel / "EPOCH").unlink()
    with WeightPublisher(channel) as publisher:
        publisher.publish(weights(1), step=1)


def test_a_traceback_that_is_kept_does_not_hold_the_arena(channel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(*_: Any) -> Any:
        raise RuntimeError("broke off")

    monkeypatch.setattr(_native, "transfer", break_off)
    publisher = WeightPublisher(channel)
    publisher.start()
    with pytest.raises(RuntimeError) as kept:
        publisher.publish(weights(1), step=1)
    publisher.close()
    assert kept.value.__traceback__ is not None
    assert _segments(channel) == []


def test_progress_counts_every_byte_once(publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_BATCH_BYTES", 100_000)
    seen: list[tuple[int, int]] = []
    state = weights(1) | {"empty": np.zeros(0, np.float32)}
    published = publisher.publish(state, step=1, on_progress=lambda done, total: seen.append((done, total)))
    total = published.num_bytes
    assert seen == [(131072, total), (262144, total), (393216, total), (393216, total)]
    assert _read(published.manifest)["t5"] == weights(1)["t5"].tobytes()


def test_progress_that_raises_ends_the_publication_and_changes_nothing(
    publisher: WeightPublisher, channel: Path
) -> None:
    publisher.publish(weights(1), step=1)
    before = _latest(channel)

    def stop(done: int, total: int) -> None:
        raise InterruptedError(f"stopped at {done} of {total}")

    with pytest.raises(InterruptedError, match="stopped at"):
        publisher.publish(weights(2), step=2, on_progress=stop)
    assert _latest(channel) == before
    publisher.publish(weights(2), step=2, deadline_s=0.1)


def test_two_names_that_become_one_are_refused_and_nothing_changes(publisher: WeightPublisher, channel: Path) -> None:
    publisher.publish(weights(1), step=1)
    before = _latest(channel)

    def without_prefix(name: str, shape: tuple[int, ...]) -> TensorRule:
        return TensorRule(name.removeprefix("module."))

    with pytest.raises(TrainerError, match=r"'module\.w' and 'w' are both 'w' to the engine: publish one of them"):
        publisher.publish({"module.w": np.zeros(2), "w": np.ones(2)}, step=2, convention=without_prefix)
    assert _latest(channel) == before
    manifest = publisher.publish({"module.w": np.zeros(2)}, step=2, convention=without_prefix).manifest
    assert [tensor.name for tensor in manifest.tensors] == ["w"]


def test_a_trainer_that_holds_linear_weights_the_other_way_round_says_so(publisher: WeightPublisher) -> None:
    state = {
        "model.layers.0.mlp.up_proj.weight": np.arange(24, dtype=np.float32).reshape(4, 6),
        "model.embed_tokens.weight": np.zeros((8, 6), np.float32),
    }
    manifest = publisher.publish(state, step=1, layout="tp:2", convention=hugging_face).manifest
    up, embed = manifest.tensors
    assert (up.is_transposed, up.shard_axis, [(part.start, part.stop) for part in up.parts]) == (
        True,
        0,
        [(0, 2), (2, 4)],
    )
    assert (embed.is_transposed, embed.shard_axis) == (False, 0)
    assert up.checksum == checksum.of_bytes(state[up.name].tobytes()).hex()


def test_publishing_is_timed_and_counted(publisher: WeightPublisher) -> None:
    began = time.monotonic()
    published = publisher.publish(weights(1), step=1)
    assert 0 < published.seconds <= time.monotonic() - began
    assert published.num_bytes == sum(array.nbytes for array in weights(1).values())
