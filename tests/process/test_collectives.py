"""Collectives between real processes: results, agreement, missing ranks, generations."""

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from uuid import uuid4

import numpy as np
import pytest

from fastdeploy_rl import _native
from fastdeploy_rl._native import CollectiveGroup, Mapping, MissingRanksError
from fastdeploy_rl.collectives.shm import MAX_PAYLOAD_BYTES, ShmCollectives
from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError, SegmentError
from fastdeploy_rl.memory.shared_segment import SharedSegment

SLOT_BYTES = 4096
LONG_S = 60.0

PRELUDE = """
import json, sys, time
import numpy as np
from fastdeploy_rl import _native
from fastdeploy_rl.collectives.shm import ShmCollectives
from fastdeploy_rl.errors import DeadlineExceededError, PeerLostError
name, rank, num_ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def join(timeout_s=60.0, generation=1):
    return ShmCollectives(
        name, rank, num_ranks, create=False, slot_bytes=4096, timeout_s=timeout_s, generation=generation
    )
def values(rank, count, seed):
    return np.random.default_rng([seed, rank]).standard_normal(count).astype(np.float32)
"""


def values(rank: int, count: int, seed: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    return np.random.default_rng([seed, rank]).standard_normal(count).astype(np.float32)


@contextmanager
def segment_for(num_ranks: int) -> Iterator[str]:
    name = f"fastdeploy_rl_test_collectives.{uuid4().hex[:12]}"
    segment = SharedSegment.create(name, CollectiveGroup.required_bytes(num_ranks, SLOT_BYTES))
    segment.close()
    try:
        yield name
    finally:
        segment.unlink()


@contextmanager
def rank_process(name: str, rank: int, num_ranks: int, script: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", PRELUDE + script, name, str(rank), str(num_ranks)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        with child:
            yield child
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def result_of(child: "subprocess.Popen[str]") -> object:
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def run_ranks(num_ranks: int, script: str) -> list[object]:
    """The last line of JSON that each rank prints."""
    with segment_for(num_ranks) as name, ExitStack() as stack:
        children = [stack.enter_context(rank_process(name, rank, num_ranks, script)) for rank in range(num_ranks)]
        return [result_of(child) for child in children]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_sums_are_exact_and_bitwise_equal_on_every_rank(num_ranks: int) -> None:
    """Empty, tiny, one slot, and many slots; more ranks than cores too."""
    script = """
import hashlib
with join() as group:
    digests = []
    for seed, count in enumerate([0, 1, 7, 1024, 1025, 10_000]):
        own = values(rank, count, seed)
        group.all_reduce(own)
        digests.append(hashlib.sha256(own.tobytes()).hexdigest())
    group.barrier()
print(json.dumps(digests))
"""
    expected = []
    for seed, count in enumerate([0, 1, 7, 1024, 1025, 10_000]):
        total = values(0, count, seed)
        for rank in range(1, num_ranks):
            total = total + values(rank, count, seed)
        expected.append(hashlib.sha256(total.tobytes()).hexdigest())
    assert run_ranks(num_ranks, script) == [expected] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_many_small_steps_never_mix(num_ranks: int) -> None:
    script = """
with join() as group:
    wrong = 0
    for step in range(400):
        own = np.full(64, step * 10 + rank, np.float32)
        group.all_reduce(own)
        wrong += int((own != sum(step * 10 + other for other in range(num_ranks))).any())
print(wrong)
"""
    assert run_ranks(num_ranks, script) == [0] * num_ranks


def test_gather_keeps_rank_order_shapes_and_types() -> None:
    script = """
with join() as group:
    small = group.all_gather(np.array([[rank, -rank]], np.int64))
    large = group.all_gather(np.full(5000, rank, np.int16))
    empty = group.all_gather(np.empty((0, 2), np.float32))
print(json.dumps([small.tolist(), large.shape, [int(row.min() == row.max() == i) for i, row in enumerate(large)],
                  empty.shape]))
"""
    gathered = [[[[0, 0]], [[1, -1]], [[2, -2]]], [3, 5000], [1, 1, 1], [3, 0, 2]]
    assert run_ranks(3, script) == [gathered] * 3


def test_broadcast_carries_payloads_of_every_size_from_every_root() -> None:
    script = """
import hashlib
sizes = [0, 1, 4088, 4089, 100_000]
with join() as group:
    got = []
    for root in range(num_ranks):
        for size in sizes:
            payload = bytes([root + 1]) * size
            received = group.broadcast_bytes(payload if rank == root else None, root, timeout_s=60.0)
            got.append(received == payload)
print(json.dumps(got))
"""
    assert run_ranks(3, script) == [[True] * 15] * 3


def test_ranks_that_call_different_things_are_told_and_the_group_goes_on() -> None:
    script = """
with join() as group:
    try:
        group.all_reduce(np.zeros(8 + 8 * (rank == 1), np.float32))
        told = ""
    except ValueError as error:
        told = str(error)
    own = np.ones(4, np.float32)
    group.all_reduce(own)
print(json.dumps(["all_reduce of 64 bytes" in told and "all_reduce of 32 bytes" in told, own.tolist()]))
"""
    assert run_ranks(3, script) == [[True, [3.0] * 4]] * 3


def test_missing_rank_is_named_on_every_rank_and_the_group_is_broken() -> None:
    """Rank 2 joins and comes too late: it is told so itself, and does not get a result."""
    waits = """
with join(timeout_s=0.3) as group:
    told = []
    for _ in range(2):
        own = np.full(4, 5, np.float32)
        try:
            group.all_reduce(own)
        except DeadlineExceededError as error:
            told.append([str(error), own.tolist()])
print(json.dumps(told), flush=True)
"""
    late = "group = join()\nprint('joined', flush=True)\nsys.stdin.readline()" + waits.replace(
        "with join(timeout_s=0.3) as group:", "if True:"
    )
    with segment_for(3) as name, rank_process(name, 2, 3, late) as straggler:
        assert straggler.stdout is not None
        assert straggler.stdout.readline() == "joined\n"
        with rank_process(name, 0, 3, waits) as first, rank_process(name, 1, 3, waits) as second:
            # Whichever of the two starts late may itself be missing for the other, never the reverse of the truth.
            results = [result_of(first), result_of(second)]
        straggler.stdin.write("\n")  # type: ignore[union-attr]
        straggler.stdin.flush()  # type: ignore[union-attr]
        results.append(result_of(straggler))
    for told in results:
        assert isinstance(told, list)
        assert len(told) == 2
        assert all("ranks [2] missing" in text and untouched == [5.0] * 4 for text, untouched in told)


def test_killed_rank_is_named_at_the_deadline() -> None:
    survivor = """
with join(timeout_s=60.0) as group:
    group.barrier()
    group._timeout_s = 0.2
    try:
        group.barrier()
        print(json.dumps(""))
    except DeadlineExceededError as error:
        print(json.dumps(str(error)))
"""
    victim = "group = join()\ngroup.barrier()\nprint('met', flush=True)\nsys.stdin.readline()"
    with (
        segment_for(2) as name,
        rank_process(name, 1, 2, victim) as doomed,
        rank_process(name, 0, 2, survivor) as child,
    ):
        assert doomed.stdout is not None
        assert doomed.stdout.readline() == "met\n"
        doomed.kill()
        told = result_of(child)
    assert isinstance(told, str)
    assert "(generation 1)" in told
    assert "ranks [1] missing" in told


def test_interrupted_rank_breaks_the_group_at_once_instead_of_at_the_deadline() -> None:
    leaves = """
try:
    group = join(timeout_s=600.0)
    print("joined", flush=True)
    group.barrier()
except KeyboardInterrupt:
    print(json.dumps("interrupted"))
"""
    stays = """
try:
    join(timeout_s=600.0).barrier()
except DeadlineExceededError as error:
    print(json.dumps(str(error)))
"""
    with segment_for(3) as name, rank_process(name, 0, 3, leaves) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "joined\n"
        with rank_process(name, 1, 3, stays) as second:
            first.send_signal(signal.SIGINT)
            assert result_of(first) == "interrupted"
            told = result_of(second)
    assert isinstance(told, str)
    assert "ranks [0" in told


def test_higher_generation_works_after_a_break_and_the_older_one_stays_out() -> None:
    """A rank of the broken generation comes back while the new one is at work, and disturbs nothing."""
    ghost = """
group = join(generation=1)
print("joined", flush=True)
sys.stdin.readline()
own = np.full(1024, 1e9, np.float32)
try:
    group.all_reduce(own)
    print(json.dumps("summed"))
except PeerLostError as error:
    print(json.dumps(str(error)))
"""
    member = """
with join(generation=2) as group:
    group.barrier()
    print("met", flush=True)
    wrong = 0
    for step in range(300):
        own = np.full(1024, rank + step, np.float32)
        group.all_reduce(own)
        wrong += int((own != 1 + 2 * step).any())
print(json.dumps(wrong))
"""
    with segment_for(2) as name, rank_process(name, 1, 2, ghost) as old:
        assert old.stdout is not None
        assert old.stdout.readline() == "joined\n"
        with rank_process(name, 0, 2, member) as first, rank_process(name, 1, 2, member) as second:
            assert first.stdout is not None
            assert first.stdout.readline() == "met\n"
            old.stdin.write("\n")  # type: ignore[union-attr]
            old.stdin.flush()  # type: ignore[union-attr]
            told = result_of(old)
            assert [result_of(first), result_of(second)] == [0, 0]
    assert isinstance(told, str)
    assert "rejoin in the present generation" in told
    assert "generation 2" in told


def test_advancing_from_outside_wakes_who_waits_and_the_ranks_meet_again() -> None:
    """As the supervisor does when a rank died: the survivor waits for it no longer, and meets the one in its place."""
    survivor = """
group = join(timeout_s=600.0)
print("joined", flush=True)
try:
    group.barrier()
except PeerLostError as error:
    group.rejoin(2)
own = np.full(8, 1, np.float32)
group.all_reduce(own)
print(json.dumps(own.tolist()))
"""
    fresh = """
with join(generation=2) as group:
    own = np.full(8, 2, np.float32)
    group.all_reduce(own)
print(json.dumps(own.tolist()))
"""
    with segment_for(2) as name, rank_process(name, 0, 2, survivor) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "joined\n"
        ShmCollectives.advance(name, 2, SLOT_BYTES, 2)
        ShmCollectives.advance(name, 2, SLOT_BYTES, 2)
        with rank_process(name, 1, 2, fresh) as second:
            assert [result_of(first), result_of(second)] == [[3.0] * 8] * 2


def group_on(mapping: Mapping, rank: int, num_ranks: int, generation: int = 1) -> CollectiveGroup:
    return CollectiveGroup(mapping, rank, num_ranks, SLOT_BYTES, generation)


def room_for(num_ranks: int) -> Mapping:
    return Mapping.private(CollectiveGroup.required_bytes(num_ranks, SLOT_BYTES))


def test_error_carries_what_whom_and_generation() -> None:
    group = group_on(room_for(3), 1, 3, generation=7)
    for _ in range(2):
        with pytest.raises(MissingRanksError) as caught:
            group.barrier(time.monotonic_ns())
        what, missing, generation = caught.value.args
        assert (what.split()[0], generation) == ("barrier", 7)
        assert missing == (0, 2)


def test_generation_that_is_not_new_is_refused() -> None:
    mapping = room_for(2)
    group_on(mapping, 0, 2, generation=2)
    for rank, generation in ((0, 2), (1, 0), (1, 1 << 16)):
        with pytest.raises(ValueError, match="generation"):
            group_on(mapping, rank, 2, generation)
    for rank in (0, 1):
        with pytest.raises(MissingRanksError, match="generation 2"):
            group_on(mapping, rank, 2, generation=1)
    group_on(mapping, 1, 2, generation=2)


def test_group_that_does_not_fit_the_mapping_is_refused() -> None:
    mapping = room_for(2)
    group_on(mapping, 0, 2)
    for rank, num_ranks, slot_bytes in (
        (1, 1, SLOT_BYTES),
        (1, 2, SLOT_BYTES // 2),
        (2, 2, SLOT_BYTES),
        (-1, 2, SLOT_BYTES),
    ):
        with pytest.raises(ValueError, match="rank"):
            CollectiveGroup(mapping, rank, num_ranks, slot_bytes, 1)
    with pytest.raises(ValueError, match="not inside"):
        CollectiveGroup(Mapping.private(4096), 0, 2, SLOT_BYTES, 1)
    for num_ranks, slot_bytes in ((0, SLOT_BYTES), (17, SLOT_BYTES), (2, 0), (2, 2**40)):
        with pytest.raises(ValueError, match="must be in"):
            CollectiveGroup.required_bytes(num_ranks, slot_bytes)


def test_buffers_of_the_wrong_size_or_kind_are_refused_before_anybody_is_met() -> None:
    group = group_on(room_for(1), 0, 1)
    deadline = time.monotonic_ns()
    with pytest.raises(ValueError, match="float32"):
        group.all_reduce_f32(np.zeros(6, np.uint8), deadline)
    with pytest.raises(ValueError, match="gathered"):
        group.all_gather(np.zeros(6, np.uint8), np.zeros(7, np.uint8), deadline)
    with pytest.raises(ValueError, match="root"):
        group.broadcast(np.zeros(6, np.uint8), 1, deadline)
    group.barrier(deadline)


def test_group_holds_its_mapping() -> None:
    mapping = room_for(1)
    group = group_on(mapping, 0, 1)
    with pytest.raises(BufferError):
        mapping.close()
    del group
    mapping.close()


def test_creator_makes_the_segment_and_unlinks_it() -> None:
    name = f"fastdeploy_rl_test_collectives.{uuid4().hex[:12]}"
    with ShmCollectives(name, 0, 1, create=True, timeout_s=LONG_S) as group:
        own = np.arange(3, dtype=np.float32)
        group.all_reduce(own)
        assert own.tolist() == [0, 1, 2]
        assert group.broadcast_bytes(b"text", 0, timeout_s=LONG_S) == b"text"
    with pytest.raises(ConfigurationError, match="closed"):
        group.barrier()
    group.close()
    with pytest.raises(SegmentError):
        ShmCollectives(name, 0, 1, create=False, timeout_s=LONG_S)


def test_a_rank_that_has_only_attached_is_told_to_join() -> None:
    with (
        segment_for(1) as name,
        ShmCollectives(name, 0, 1, create=False, slot_bytes=SLOT_BYTES, timeout_s=LONG_S, generation=0) as collectives,
    ):
        with pytest.raises(ConfigurationError, match="no group: rejoin"):
            collectives.barrier()
        collectives.rejoin(1)
        collectives.barrier()


def test_refused_construction_leaves_no_segment() -> None:
    name = f"fastdeploy_rl_test_collectives.{uuid4().hex[:12]}"
    with pytest.raises(ValueError, match="generation"):
        ShmCollectives(name, 0, 1, create=True, timeout_s=LONG_S, generation=-1)
    with pytest.raises(SegmentError):
        SharedSegment.attach(name)


def test_payloads_that_cannot_be_carried_are_refused() -> None:
    name = f"fastdeploy_rl_test_collectives.{uuid4().hex[:12]}"
    with ShmCollectives(name, 0, 1, create=True, timeout_s=LONG_S) as group:
        with pytest.raises(ConfigurationError, match="payload"):
            group.broadcast_bytes(None, 0, timeout_s=LONG_S)
        with pytest.raises(ConfigurationError, match="at most"):
            group.broadcast_bytes(bytes(MAX_PAYLOAD_BYTES + 1), 0, timeout_s=LONG_S)
        with pytest.raises(ConfigurationError, match="float32"):
            group.all_reduce(np.zeros(3, np.float64))  # type: ignore[arg-type]
        group.barrier()


def test_missed_deadline_is_reported_in_the_tree_of_errors() -> None:
    name = f"fastdeploy_rl_test_collectives.{uuid4().hex[:12]}"
    with (
        ShmCollectives(name, 0, 2, create=True, slot_bytes=SLOT_BYTES, timeout_s=0.0) as group,
        pytest.raises(DeadlineExceededError, match=r"ranks \[1\] missing"),
    ):
        group.barrier()
    assert issubclass(_native.MissingRanksError, Exception)
