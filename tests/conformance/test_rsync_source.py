"""The `rsync` source: the common suite, and what only fetching has, over a transport that delivers at its worst."""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from memory_transport import Delivery, MemoryTransport
from source_suite import SourceSuite, arrived, assert_staged, plan_of, soon, weights

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceededError,
    NoPublicationError,
    PeerLostError,
    SegmentError,
    VersionFormatError,
)
from fastdeploy_rl.manifest import Manifest, encode, file_digest
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.plan.plan import Plan
from fastdeploy_rl.plan.planner import make_plan
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.publish.weight_server import WeightServer
from fastdeploy_rl.sources import registry
from fastdeploy_rl.sources.base import ResolvedPublication, SourceConfig, StagedSource, WeightSource
from fastdeploy_rl.sources.fetching import FetchingSource
from fastdeploy_rl.transport.base import Offer
from fastdeploy_rl.update.planned_transfer import Sums, transfer_arriving, transfer_planned
from fastdeploy_rl.version import WeightVersion

DELIVERIES = {
    "in order": Delivery(),
    "a byte at a time, out of order": Delivery(bucket_bytes=1, shuffle=1),
    "in pieces, several ranges at once": Delivery(bucket_bytes=48, shuffle=2, batch=3),
    "all at once": Delivery(batch=1 << 20),
}


@pytest.fixture
def transport(channel: Path) -> MemoryTransport:
    return MemoryTransport(channel)


@pytest.fixture
def source(transport: MemoryTransport, channel: Path) -> Iterator[FetchingSource]:
    source = FetchingSource(transport, SourceConfig(channel))
    yield source
    source.close()


class TestFetchingSource(SourceSuite):
    OWNS_MEMORY = True

    @pytest.fixture(params=list(DELIVERIES.values())[:2], ids=list(DELIVERIES)[:2])
    def transport(self, request: pytest.FixtureRequest, channel: Path) -> MemoryTransport:
        return MemoryTransport(channel, request.param)


class TestRsyncSource(SourceSuite):
    """Over sockets, from the server that the channel names."""

    OWNS_MEMORY = True

    @pytest.fixture(params=[{}, {"num_streams": 5, "bucket_bytes": 7}], ids=["as usual", "tiny buckets"])
    def source(
        self, request: pytest.FixtureRequest, channel: Path, publisher: WeightPublisher
    ) -> Iterator[WeightSource]:
        with WeightServer(channel):
            source = registry.create("rsync", SourceConfig(channel, rsync_config=json.dumps(request.param)))
            yield source
            source.close()


# --- what comes, and when


def specs_of(manifest: Manifest) -> list[ParameterSpec]:
    """A model that splits, casts and turns what the suite's weights publish."""
    dtypes = {"F32": "BF16"}
    specs = []
    for tensor in manifest.tensors:
        axis = len(tensor.shape) - 1 if len(tensor.shape) == 2 and tensor.shape[-1] % 2 == 0 else None
        dtype = dtypes.get(tensor.dtype, tensor.dtype) if tensor.name.endswith("q_proj.weight") else tensor.dtype
        specs.append(ParameterSpec(tensor.name, dtype, tensor.shape, axis))
    return specs


def stage(source: FetchingSource, plan: Plan | None = None) -> tuple[ResolvedPublication, StagedSource]:
    resolved = source.resolve(None, deadline_ns=soon())
    return resolved, source.stage(resolved, plan or plan_of(resolved.manifest), deadline_ns=soon())


def taken_in(resolved: ResolvedPublication, staged: StagedSource) -> tuple[Sums, dict[str, bytes]]:
    """As an engine takes it in: every parameter copied, or where it lies where that is possible."""
    views = {}
    for parameter in staged.plan.parameters:
        if parameter.alias is None:
            home = Mapping.private(max(parameter.num_bytes, 1))
            views[parameter.name] = TensorView(home, 0, parameter.dtype, parameter.local_shape)
        else:
            arena = staged.segments[parameter.alias.segment]
            views[parameter.name] = TensorView(arena, parameter.alias.offset, parameter.dtype, parameter.local_shape)
    homes = {p.name: views[p.name] for p in staged.plan.parameters if p.alias is None}
    sums = transfer_arriving(staged.arrivals(deadline_ns=soon()), resolved.manifest, staged.segments, homes, 1)
    return sums, {name: view.numpy().tobytes() for name, view in views.items()}


@pytest.mark.parametrize("layout", ["full", "tp:2"])
@pytest.mark.parametrize("rank", [0, 1])
def test_no_result_depends_on_buckets_or_their_order(channel: Path, layout: str, rank: int) -> None:
    """One row a bucket, a tensor larger than a bucket, one huge bucket: bytes and sums are those of shared memory."""
    with WeightPublisher(channel) as publisher:
        publisher.publish(weights(1), step=1, layout=layout)
        found = []
        for delivery in [*DELIVERIES.values(), *(Delivery(size, shuffle=size) for size in (3, 64, 511, 512, 1 << 20))]:
            source = FetchingSource(MemoryTransport(channel, delivery), SourceConfig(channel))
            resolved = source.resolve(None, deadline_ns=soon())
            plan = make_plan(resolved.manifest, specs_of(resolved.manifest), rank, 2)
            found.append(taken_in(*stage(source, plan)))
            source.close()
        assert all(each == found[0] for each in found)


def test_a_parameter_is_given_as_soon_as_its_own_bytes_are_there(
    source: FetchingSource, transport: MemoryTransport, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    _, staged = stage(source)
    arrivals, given = staged.arrivals(deadline_ns=soon()), []
    for batch in arrivals:
        given += batch
        # In order, and a tensor at a time: nothing has come that is not given.
        assert transport.fetches[0].num_bytes == sum(parameter.num_bytes for parameter in given)
    assert [parameter.name for parameter in given if parameter.num_bytes] == [
        parameter.name for parameter in staged.plan.parameters if parameter.num_bytes
    ]
    staged.release()


@pytest.mark.parametrize("delivery", DELIVERIES.values(), ids=DELIVERIES)
def test_everything_is_given_once_and_complete(channel: Path, publisher: WeightPublisher, delivery: Delivery) -> None:
    published = publisher.publish(weights(1), step=1, layout="tp:2")
    source = FetchingSource(MemoryTransport(channel, delivery), SourceConfig(channel))
    resolved, staged = stage(source)
    (arena,) = staged.segments
    memoryview(arena)[:] = b"\xa5" * arena.num_bytes  # what is read too early is not right by chance
    homes = {
        p.name: TensorView(Mapping.private(max(p.num_bytes, 1)), 0, p.dtype, p.local_shape)
        for p in staged.plan.parameters
    }
    names = []
    for batch in staged.arrivals(deadline_ns=soon()):
        transfer_planned(batch, resolved.manifest, staged.segments, homes, 1)
        assert all(parameter in staged.plan.parameters for parameter in batch)
        assert all(homes[p.name].numpy().tobytes() == weights(1)[p.name].tobytes() for p in batch)
        names += [parameter.name for parameter in batch]
    assert sorted(names) == sorted(tensor.name for tensor in published.manifest.tensors)
    staged.release()
    source.close()


def test_another_layout_is_another_plan(source: FetchingSource, publisher: WeightPublisher) -> None:
    for step, layout in ((1, "full"), (2, "tp:2"), (3, "full")):
        publisher.publish(weights(step), step=step, layout=layout)
        resolved, staged = stage(source)
        assert_staged(resolved.manifest, arrived(staged), weights(step))
        staged.release()


def test_a_model_without_parameters_fetches_nothing(source: FetchingSource, publisher: WeightPublisher) -> None:
    publisher.publish({"empty": np.zeros((0, 3), np.float32)}, step=1)
    _, staged = stage(source)
    assert [[p.name for p in batch] for batch in staged.arrivals(deadline_ns=soon())] == [["empty"]]
    staged.release()


def test_two_ranks_move_half_each(channel: Path, publisher: WeightPublisher) -> None:
    publisher.publish({"w": np.arange(4096, dtype=np.float32).reshape(64, 64), "norm": np.ones(64, np.float32)}, step=1)
    for rank in (0, 1):
        transport = MemoryTransport(channel)
        source = FetchingSource(transport, SourceConfig(channel, rank=rank, num_ranks=2))
        resolved = source.resolve(None, deadline_ns=soon())
        specs = [ParameterSpec("w", "F32", (64, 64), 1), ParameterSpec("norm", "F32", (64,), None)]
        _, staged = stage(source, make_plan(resolved.manifest, specs, rank, 2))
        for _ in staged.arrivals(deadline_ns=soon()):
            pass
        assert transport.fetches[0].num_bytes == 64 * 64 * 4 // 2 + 64 * 4
        staged.release()
        source.close()


def test_what_was_fetched_holds_nobody_up(
    source: FetchingSource, transport: MemoryTransport, publisher: WeightPublisher
) -> None:
    """The claim on the version ends with its last byte, not when it is released: the trainer needs its memory."""
    publisher.publish(weights(1), step=1)
    resolved, staged = stage(source)
    expected = taken_in(resolved, staged)[1]
    assert transport.fetches[0].is_closed
    for step in range(2, 6):
        publisher.publish(weights(step), step=step, deadline_s=0.05)
    assert expected["scale"] == weights(1)["scale"].tobytes()
    staged.release()


def test_a_fetch_is_one_line_of_the_log(
    source: FetchingSource, publisher: WeightPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    publisher.publish(weights(1), step=1)
    resolved, staged = stage(source)
    with caplog.at_level(logging.INFO, "fastdeploy_rl.sources.fetching"):
        taken_in(resolved, staged)
    size = sum(value.nbytes for value in weights(1).values())
    (line,) = caplog.messages
    assert line.startswith(f"event=fetched version={resolved.version} bytes={size} received={size} seconds=")
    staged.release()


# --- when it does not come


def test_a_fetch_that_fails_says_why_and_leaves_the_source_as_it_was(
    source: FetchingSource, transport: MemoryTransport, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    transport.delivery = Delivery(bucket_bytes=16, failing_after=64, failure=PeerLostError("the server is gone"))
    for _ in range(3):  # as often as one likes: nothing is held
        _, staged = stage(source)
        with pytest.raises(PeerLostError, match="the server is gone"):
            list(staged.arrivals(deadline_ns=soon()))
        staged.release()
    assert all(fetch.is_closed for fetch in transport.fetches)
    transport.delivery = Delivery()
    resolved, staged = stage(source)
    assert taken_in(resolved, staged)[1] == {name: value.tobytes() for name, value in weights(1).items()}
    staged.release()
    for step in (2, 3, 4):
        publisher.publish(weights(step), step=step, deadline_s=0.05)


def test_what_stops_halfway_at_the_deadline_says_how_much_is_missing(
    source: FetchingSource, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    resolved, staged = stage(source)
    arrivals = staged.arrivals(deadline_ns=time.monotonic_ns())
    with pytest.raises(DeadlineExceededError, match=rf"no version {resolved.version} .* of 5 byte ranges are missing"):
        list(arrivals)
    staged.release()


def test_what_is_all_there_is_no_error_though_the_deadline_has_passed(
    source: FetchingSource, transport: MemoryTransport, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    transport.delivery = Delivery(batch=1 << 20)
    _, staged = stage(source)
    given = [p.name for batch in staged.arrivals(deadline_ns=time.monotonic_ns()) for p in batch]
    assert sorted(given) == sorted(weights(1))
    staged.release()


def test_what_is_released_while_it_comes_is_not_written_any_more(
    source: FetchingSource, transport: MemoryTransport, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    _, staged = stage(source)
    arrivals = staged.arrivals(deadline_ns=soon())
    next(arrivals)
    staged.release()
    assert transport.fetches[0].is_closed
    assert staged.segments == ()
    arrivals.close()  # type: ignore[attr-defined]


def test_a_stage_that_is_refused_takes_no_arena(
    source: FetchingSource, transport: MemoryTransport, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    old = source.resolve(None, deadline_ns=soon())
    for step in (2, 3, 4):
        publisher.publish(weights(step), step=step)
    for _ in range(3):
        with pytest.raises(NoPublicationError):
            source.stage(old, plan_of(old.manifest), deadline_ns=soon())
    first, second = stage(source)[1], stage(source)[1]
    first.release()
    second.release()


# --- arenas


def test_a_third_version_finds_no_room_and_harms_neither_of_the_two(
    source: FetchingSource, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    plan = plan_of(source.resolve(None, deadline_ns=soon()).manifest)
    both = [stage(source, plan), stage(source, plan)]
    assert both[0][1].plan is both[1][1].plan
    found = [taken_in(*each) for each in both]
    with pytest.raises(SegmentError, match="both arenas are in use"):
        stage(source)
    for resolved, staged in both:
        assert [view_bytes(staged, p.name) for p in staged.plan.parameters] == list(found[0][1].values())
        assert resolved.version.step == 1
        staged.release()
    stage(source)[1].release()


def view_bytes(staged: StagedSource, name: str) -> bytes:
    parameter = next(p for p in staged.plan.parameters if p.name == name)
    assert parameter.alias is not None
    arena = staged.segments[0]
    return TensorView(arena, parameter.alias.offset, parameter.dtype, parameter.local_shape).numpy().tobytes()


def test_versions_take_turns_in_two_arenas(source: FetchingSource, publisher: WeightPublisher) -> None:
    arenas, live = [], None
    for step in range(1, 7):
        publisher.publish(weights(step), step=step)
        resolved, staged = stage(source)
        taken_in(resolved, staged)
        if live is not None:
            assert view_bytes(live, "scale") == weights(step - 1)["scale"].tobytes()
            live.release()
        arenas.append(staged.segments[0].address)
        live = staged
    assert arenas == arenas[:2] * 3
    assert live is not None
    live.release()


def test_an_arena_that_is_looked_at_is_not_handed_out_again(source: FetchingSource, publisher: WeightPublisher) -> None:
    publisher.publish(weights(1), step=1)
    _, staged = stage(source)
    arena = staged.segments[0]
    staged.release()
    view = memoryview(arena)  # by somebody who should not have kept the mapping
    with pytest.raises(SegmentError, match="still in use"):
        stage(source)
    view.release()
    _, staged = stage(source)
    assert staged.segments[0] is arena
    staged.release()


def test_trimming_gives_back_what_no_version_lies_in(
    source: FetchingSource, transport: MemoryTransport, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    resolved, kept = stage(source)
    expected = taken_in(resolved, kept)[1]
    _, other = stage(source)
    free = other.segments[0]
    other.release()
    assert not free.is_closed
    source.trim()
    assert free.is_closed
    assert transport.num_trims == 1
    assert view_bytes(kept, "scale") == expected["scale"]
    kept.release()


def test_closing_while_a_parameter_lies_in_an_arena_fails_and_then_works(
    source: FetchingSource, transport: MemoryTransport, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    resolved, staged = stage(source)
    taken_in(resolved, staged)
    (arena,) = staged.segments
    tensor = np.from_dlpack(_Exported(arena))
    expected = tensor.tobytes()
    with pytest.raises(SegmentError, match="in use"):
        source.close()
    assert transport.is_closed
    assert tensor.tobytes() == expected
    del tensor
    source.close()
    assert arena.is_closed


class _Exported:
    """What numpy asks for a DLPack capsule."""

    def __init__(self, arena: Mapping) -> None:
        self._arena = arena

    def __dlpack__(self, **_: object) -> object:
        return self._arena.dlpack(0, [8], "U8")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


# --- which version


def test_equal_manifests_are_one_object_and_named_by_the_digest_of_their_bytes(
    source: FetchingSource, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch, transport: MemoryTransport
) -> None:
    published = publisher.publish(weights(1), step=1)
    first, second = (source.resolve(None, deadline_ns=soon()) for _ in range(2))
    assert first.manifest is second.manifest
    asked = []
    fetch = transport.fetch

    def seen(offer: Offer, *rest: object, **more: object) -> object:
        asked.append(offer.file_digest)
        return fetch(offer, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(transport, "fetch", seen)
    # One that this source did not resolve, or forgot, is asked for all the same.
    foreign = ResolvedPublication(published.version, published.manifest)
    for resolved in (first, foreign):
        source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon()).release()
    assert asked == [file_digest(encode(published.manifest))] * 2


def test_a_version_whose_bytes_were_spoilt_on_the_way_is_fetched_again(
    source: FetchingSource, publisher: WeightPublisher
) -> None:
    published = publisher.publish(weights(1), step=1)
    source.discredit(source.resolve(None, deadline_ns=soon()))
    resolved = source.resolve(None, deadline_ns=soon())
    assert resolved.version == published.version
    staged = arrived(source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon()))
    assert_staged(resolved.manifest, staged, weights(1))
    staged.release()


@pytest.mark.parametrize(("text", "step"), [("step: 1", 1), ("version: 1.1", 1), ("step: 2", 2), ("other: 1", None)])
def test_the_version_file_of_the_model_says_which_version_is_meant(
    channel: Path, transport: MemoryTransport, publisher: WeightPublisher, tmp_path: Path, text: str, step: int | None
) -> None:
    for each in (1, 2):
        publisher.publish(weights(each), step=each)
    # A former version is there only where a third arena is: an engine that holds it would have one.
    (tmp_path / "version.yaml").write_text(text)
    source = FetchingSource(transport, SourceConfig(channel, model_dir=tmp_path))
    if step is None:
        with pytest.raises(VersionFormatError, match=r"version\.yaml"):
            source.resolve(None, deadline_ns=soon())
    else:
        assert source.resolve(None, deadline_ns=soon()).version == WeightVersion(1, step)
    named = source.resolve(WeightVersion(1, 2), deadline_ns=soon())
    assert named.version.step == 2
    source.close()


def test_a_version_that_the_file_asks_for_in_vain_is_named_with_the_file(
    channel: Path, transport: MemoryTransport, publisher: WeightPublisher, tmp_path: Path
) -> None:
    publisher.publish(weights(1), step=1)
    (tmp_path / "version.txt").write_text("7")
    source = FetchingSource(transport, SourceConfig(channel, model_dir=tmp_path))
    with pytest.raises(NoPublicationError, match=r"version 1\.7 .* has 1\.1 \(.*version\.txt asks for 7\)"):
        source.resolve(None, deadline_ns=soon())
    source.close()


# --- giving it to others


class Holder:
    """Notes what a source says, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.held: dict[int, bytes] = {}
        self.views: list[memoryview] = []

    def hold(self, offer: Offer, ranges: Sequence[ByteRange], mapping: Mapping) -> None:
        self.events.append(f"hold {offer.version}")
        self.held = {each.target_offset: bytes(memoryview(mapping)[each.target_offset :][:1]) for each in ranges}
        self.views.append(memoryview(mapping))

    def withdraw(self, mapping: Mapping) -> None:
        self.events.append("withdraw")
        while self.views:
            self.views.pop().release()

    def close(self) -> None:
        self.events.append("close")


def test_what_is_complete_is_given_to_others_until_it_is_released(
    channel: Path, transport: MemoryTransport, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    holder = Holder()
    source = FetchingSource(transport, SourceConfig(channel), holder)
    resolved, staged = stage(source)
    arrivals = staged.arrivals(deadline_ns=soon())
    next(arrivals)
    assert holder.events == []
    assert list(arrivals)
    assert holder.events == ["hold 1.1"]
    assert set(holder.held) == {each.target_offset for each in transport.fetches[0].ranges}
    staged.release()  # with a view of the holder's alive until `withdraw`
    staged.release()
    assert holder.events == ["hold 1.1", "withdraw"]
    resolved, staged = stage(source)
    taken_in(resolved, staged)
    source.close()
    assert holder.events == ["hold 1.1", "withdraw", "hold 1.1", "withdraw", "close"]


def test_what_did_not_come_is_given_to_nobody(
    channel: Path, transport: MemoryTransport, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    holder = Holder()
    source = FetchingSource(transport, SourceConfig(channel), holder)
    transport.delivery = Delivery(failure=PeerLostError("gone"))
    _, staged = stage(source)
    with pytest.raises(PeerLostError):
        list(staged.arrivals(deadline_ns=soon()))
    source.close()
    assert [event for event in holder.events if event.startswith("hold")] == []


# --- by its name


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"adress": "a:1"}', "unknown field `adress`"),
        ("{", "--rsync-config"),
        ('{"secret_file": "/nowhere/secret"}', "secret file /nowhere/secret: No such file"),
        ('{"transport": "checkpoint_transfer"}', "checkpoint_transfer"),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_anything_is_opened(channel: Path, config: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        registry.create("rsync", SourceConfig(channel, rsync_config=config))
    assert not channel.exists()


def test_an_engine_may_look_before_there_is_a_server_and_finds_it_again_at_another_port(channel: Path) -> None:
    source = registry.create("rsync", SourceConfig(channel))
    with pytest.raises(PeerLostError, match="weight server: no channel at"):
        source.resolve(None, deadline_ns=soon())
    assert not channel.exists()
    with WeightPublisher(channel) as publisher:
        publisher.publish(weights(1), step=1)
        addresses = set()
        for _ in range(2):
            with WeightServer(channel) as server:
                addresses.add(server.address)
                resolved = source.resolve(None, deadline_ns=soon())
                staged = arrived(source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon()))
                assert_staged(resolved.manifest, staged, weights(1))
                staged.release()
        assert len(addresses) == 2
    source.close()


def test_a_server_is_reached_by_address_and_secret(channel: Path, publisher: WeightPublisher, tmp_path: Path) -> None:
    publisher.publish(weights(1), step=1)
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef\n")
    secret.chmod(0o600)
    with WeightServer(channel, secret=b"0123456789abcdef") as server:
        elsewhere = SourceConfig(
            tmp_path / "elsewhere", rsync_config=json.dumps({"address": server.address, "secret_file": str(secret)})
        )
        source = registry.create("rsync", elsewhere)
        resolved = source.resolve(None, deadline_ns=soon())
        staged = arrived(source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon()))
        assert_staged(resolved.manifest, staged, weights(1))
        source.close()
        without = registry.create("rsync", SourceConfig(channel))
        with pytest.raises(AuthenticationError):
            without.resolve(None, deadline_ns=soon())
        without.close()
