"""Weights pulled by Mooncake's TransferEngine out of a publisher's memory.

Versions are agreed on, and held, over a connection of the tcp protocol; the publisher says there where its segments
lie, and the library reads them, in a thread of the fetch. Owns that thread, how ranges become calls, and the engine
that is kept between fetches. Refuses to know environment variables and return codes (mooncake_engine.py). Invariant:
nobody's memory is given back while the library may still write there: after a call that failed the engine is ended
first, and while a call has not returned `Fetch.close` is an error.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import DeadlineExceededError, LifecycleError, PeerLostError, SegmentError
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.transport.base import Offer, Transport
from fastdeploy_rl.transport.connection import Connection, Server
from fastdeploy_rl.transport.mooncake_engine import (
    MAX_SLICES,
    Library,
    MooncakeEngine,
    MooncakeSettings,
    Slice,
    load_library,
    patience_s,
)
from fastdeploy_rl.transport.tcp import DEFAULT_BUCKET_BYTES, TcpTransport
from fastdeploy_rl.transport.tcp_fetch import delay_s
from fastdeploy_rl.transport.wire import Places
from fastdeploy_rl.version import WeightVersion

_logger = logging.getLogger(__name__)

_SLICE_BYTES = 1 << 20
"""Longer rows are cut into slices of this size: the library brings as many at a time as it has connections."""
_CALL_BYTES = 64 << 20
"""However large a bucket is: after each call the publisher hears of us, and it forgets who is silent."""


class Row(NamedTuple):
    """Bytes without a gap. `number`: of the range that they belong to; `is_last`: that one is complete with it."""

    number: int
    segment: int
    offset: int
    target_offset: int
    num_bytes: int
    is_last: bool


def rows_of(ranges: Sequence[ByteRange], max_bytes: int) -> Iterator[Row]:
    """Every byte of every range once, in order, in rows of `max_bytes` at most; of a range without bytes a row
    without."""
    for number, each in enumerate(ranges):
        wanted = each.joined() if each.num_bytes else each._replace(rows=1, row_bytes=0)
        for row in range(wanted.rows):
            for start in range(0, wanted.row_bytes, max_bytes) or (0,):
                num_bytes = min(max_bytes, wanted.row_bytes - start)
                yield Row(
                    number,
                    wanted.segment,
                    wanted.offset + row * wanted.stride + start,
                    wanted.target_offset + row * wanted.row_bytes + start,
                    num_bytes,
                    is_last=row == wanted.rows - 1 and start + num_bytes == wanted.row_bytes,
                )


def calls_of(ranges: Sequence[ByteRange], bucket_bytes: int) -> Iterator[Sequence[Row]]:
    """The rows of the ranges in order, for each call of the library as many as it may have."""
    max_bytes = min(bucket_bytes, _CALL_BYTES)
    rows: list[Row] = []
    num_bytes = 0
    for row in rows_of(ranges, min(max_bytes, _SLICE_BYTES)):
        if rows and (num_bytes + row.num_bytes > max_bytes or len(rows) == MAX_SLICES):
            yield rows
            rows, num_bytes = [], 0
        rows.append(row)
        num_bytes += row.num_bytes
    if rows:
        yield rows


def _check_ranges(ranges: Sequence[ByteRange], manifest: Manifest, target: Mapping) -> int:
    """How far they reach into the target. The library checks neither end: it would write wherever it is told to."""
    end = 0
    for wanted in ranges:
        if min(wanted) < 0 or wanted.segment >= len(manifest.segments):
            raise ValueError(f"{wanted} is no range of {len(manifest.segments)} segments")
        if wanted.num_bytes and wanted.stop > manifest.segments[wanted.segment].num_bytes:
            raise ValueError(f"{wanted} leaves its segment")
        end = max(end, wanted.target_offset + wanted.num_bytes)
    if end > target.num_bytes:
        raise ValueError(f"ranges reach to byte {end} of a target of {target.num_bytes}")
    return end


class _Engines:
    """The engine that is kept between fetches, for the next that has about as much time."""

    def __init__(self, settings: MooncakeSettings, library: Library) -> None:
        self._settings = settings
        self._library = library
        self._lock = threading.Lock()
        self._idle: MooncakeEngine | None = None

    @property
    def registers_targets(self) -> bool:
        """An HCA writes only where it was told of. Over TCP our own process does: there, registered memory would be
        open to whoever connects, for nothing."""
        return self._settings.protocol == "rdma"

    def take(self, deadline_ns: int) -> MooncakeEngine:
        """One that gives up by itself about when the deadline is over."""
        left_s = (deadline_ns - time.monotonic_ns()) / 1e9
        patience = patience_s(left_s)
        engine = self._swap(None)
        if engine is not None and engine.patience_s != patience:
            engine.close()
            engine = None
        engine = engine or MooncakeEngine.open(self._settings, self._library, patience_s=patience)
        engine.limit_stalls(left_s)
        return engine

    def keep(self, engine: MooncakeEngine) -> None:
        other = self._swap(engine)
        if other is not None:
            other.close()

    def close(self) -> None:
        engine = self._swap(None)
        if engine is not None:
            engine.close()

    def _swap(self, engine: MooncakeEngine | None) -> MooncakeEngine | None:
        with self._lock:
            former, self._idle = self._idle, engine
            return former


class MooncakeTransport:
    """One rank as a client. Made by `open`; owns `control` and closes it."""

    def __init__(
        self,
        control: Transport,
        connect: Callable[[], Connection],
        engines: _Engines,
        *,
        bucket_bytes: int,
        let_go_s: float,
    ) -> None:
        self._control = control
        self._connect = connect
        self._engines = engines
        self._bucket_bytes = bucket_bytes
        self._let_go_s = let_go_s
        self._fetches: list[MooncakeFetch] = []

    @classmethod
    def open(
        cls,
        publisher: Server,
        settings: MooncakeSettings | None = None,
        *,
        secret: bytes | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        library: Library | None = None,
        deadlines: Deadlines | None = None,
    ) -> "MooncakeTransport":
        """`publisher`, `secret`: of the tcp protocol's server, which must export (transport/mooncake_exporter.py). A
        call of the library brings `bucket_bytes` at most. ConfigurationError, before anything is started, where the
        library is missing, or `rdma` is asked for and there is no HCA. Listens from the first fetch on."""
        settings, deadlines = settings or MooncakeSettings(), deadlines or Deadlines()
        settings.check()
        control = TcpTransport(publisher, secret=secret, bucket_bytes=bucket_bytes, deadlines=deadlines)
        return cls(
            control,
            partial(Connection, publisher, secret, deadlines),
            _Engines(settings, library or load_library()),
            bucket_bytes=bucket_bytes,
            let_go_s=deadlines.let_go_s,
        )

    def offer(self, version: WeightVersion | None, *, deadline_ns: int) -> Offer:
        return self._control.offer(version, deadline_ns=deadline_ns)

    def fetch(self, offer: Offer, ranges: Sequence[ByteRange], target: Mapping, *, deadline_ns: int) -> "MooncakeFetch":
        """Also ValueError, before a byte is written, for ranges that leave the target or their segment."""
        work = _Work(offer, target, _check_ranges(ranges, offer.manifest, target), deadline_ns)
        calls = calls_of(ranges, self._bucket_bytes)
        fetch = MooncakeFetch(work, calls, _Publisher(offer, self._connect), self._engines, self._let_go_s)
        self._forget_closed()
        self._fetches.append(fetch)
        fetch.start()
        return fetch

    def trim(self) -> None:
        """Ends the engine that is kept for the next fetch, and closes what `control` keeps."""
        self._forget_closed()
        self._engines.close()
        self._control.trim()

    def close(self) -> None:
        """SegmentError while a call of the library has not returned; all else is closed then, and a later call goes
        on."""
        with ExitStack() as closing:
            closing.callback(self._control.close)
            closing.callback(self._engines.close)
            for fetch in self._fetches:
                closing.callback(fetch.close)

    def _forget_closed(self) -> None:
        self._fetches = [fetch for fetch in self._fetches if not fetch.is_closed]


class _Work(NamedTuple):
    """`num_bytes`: of the target, from its beginning, that may be written."""

    offer: Offer
    target: Mapping
    num_bytes: int
    deadline_ns: int


class _Publisher:
    """Whom a version is held at, on one connection at a time. Used by the fetch's thread; any thread may `cut`."""

    def __init__(self, offer: Offer, connect: Callable[[], Connection]) -> None:
        self._offer = offer
        self._connect = connect
        self._claim: Connection | None = None
        self._is_cut = False

    def hold(self, deadline_ns: int) -> Places:
        """Anew, on a connection of its own: where the version lies. PeerLostError where nobody answers."""
        self.release()
        self._claim = claim = self._connect()
        if self._is_cut:  # by somebody who did not see this one
            claim.cut()
        try:
            claim.open(deadline_ns)
            claim.hold(self._offer.file_digest, deadline_ns)
            places = claim.places(deadline_ns)
        except OSError as error:
            raise PeerLostError(f"the publisher of version {self._offer.version} does not answer: {error}") from error
        num_segments = len(self._offer.manifest.segments)
        if len(places.addresses) != num_segments:
            raise PeerLostError(f"the publisher tells {len(places.addresses)} addresses of {num_segments} segments")
        return places

    def confirm(self, deadline_ns: int) -> None:
        """What was read until now was held all the while. The library does not know: it reads what lies at an address,
        and that may be another version by then. PeerLostError where the claim was lost."""
        if self._claim is None:
            raise PeerLostError(f"version {self._offer.version} is not held")
        try:
            self._claim.hold(self._offer.file_digest, deadline_ns)
        except OSError as error:
            raise PeerLostError(f"the publisher let go of version {self._offer.version}: {error}") from error

    def cut(self) -> None:
        """For good."""
        self._is_cut = True
        claim = self._claim
        if claim is not None:
            claim.cut()

    def release(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.close()


class MooncakeFetch:
    """Ranges on their way, in one thread. Made and started by the transport."""

    def __init__(
        self,
        work: _Work,
        calls: Iterator[Sequence[Row]],
        publisher: _Publisher,
        engines: _Engines,
        let_go_s: float,
    ) -> None:
        self._work = work
        self._calls = calls
        self._call: Sequence[Row] | None = next(calls, None)
        self._publisher = publisher
        self._engines = engines
        self._let_go_s = let_go_s
        self._begun_s = time.monotonic()
        self._places: Places | None = None
        self._trouble = ""
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._arrived: deque[list[int]] = deque()
        self._error: BaseException | None = None
        self._is_over = False
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mooncake-fetch", daemon=True)

    def start(self) -> None:
        """Holds the version before it returns, unless nobody answers: that is tried again. NoPublicationError when it
        is gone; then nothing was started."""
        try:
            self._hold()
        except BaseException:
            self._publisher.release()
            self._is_over = True
            raise
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def is_closed(self) -> bool:
        return self._is_over and (self._is_ending.is_set() or not self._thread.ident)

    def arrivals(self) -> Iterator[Sequence[int]]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._arrived or self._is_over, self._left_s())
                batch = self._arrived.popleft() if self._arrived else None
                is_over, error = self._is_over, self._error
            if batch is not None:
                yield batch
            elif error is not None:
                raise error
            elif is_over:
                return
            else:
                raise self._too_late()

    def close(self) -> None:
        """SegmentError where a call of the library does not return: it may still write into the target, which must
        stay; a later call goes on. It returns by itself, as a rule about when the deadline is over."""
        self._is_ending.set()
        self._publisher.cut()
        if self._thread.ident is not None:
            self._thread.join(self._let_go_s)
        if not self._is_over:
            target = self._work.target
            raise SegmentError(
                f"mooncake has not returned from a call that fetches version {self._work.offer.version} into memory at "
                f"{target.address:#x}, {target.num_bytes} bytes: they stay held; close again later"
            )

    def _left_s(self) -> float:
        return max(0.0, (self._work.deadline_ns - time.monotonic_ns()) / 1e9)

    def _too_late(self) -> DeadlineExceededError:
        hint = f"{self._num_bytes} bytes have come" + (f"; {self._trouble}" if self._trouble else "")
        what = f"version {self._work.offer.version} over mooncake"
        return DeadlineExceededError.waiting_for(what, since_s=self._begun_s, hint=hint)

    def _check_time(self) -> None:
        if time.monotonic_ns() >= self._work.deadline_ns:
            raise self._too_late()

    # --- in its thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        # A view keeps the mapping where it is, whatever its owner does, until nobody writes there any more.
        error: BaseException | None = None
        view = memoryview(self._work.target)
        try:
            self._bring()
            if self._call is not None:
                error = LifecycleError(f"the fetch of version {self._work.offer.version} was closed")
        except BaseException as raised:  # `arrivals` raises it
            error = raised
        finally:
            view.release()
            self._publisher.release()
            with self._changed:
                self._error, self._is_over = error, True
                self._changed.notify_all()

    def _bring(self) -> None:
        """Until all is here, or somebody ends it; tries again where the publisher is lost, from where it stopped."""
        num_failures = 0
        while self._call is not None and not self._is_ending.is_set():
            self._check_time()
            before = self._num_bytes
            places = self._places or self._hold()
            if places is not None and self._try_to_pull(places):
                return
            num_failures = 1 if self._num_bytes > before else num_failures + 1
            self._is_ending.wait(min(delay_s(num_failures), self._left_s()))

    def _hold(self) -> Places | None:
        try:
            self._places = self._publisher.hold(self._work.deadline_ns)
        except PeerLostError as error:
            self._lost(error)
        return self._places

    def _try_to_pull(self, places: Places) -> bool:
        try:
            self._pull(places)
        except PeerLostError as error:
            self._lost(error)
            return False
        return True

    def _lost(self, error: PeerLostError) -> None:
        self._places = None
        if str(error) == self._trouble or self._is_ending.is_set():
            return
        if self._left_s() or not self._trouble:  # who fails at the deadline fails for want of time
            self._trouble = str(error)
        _logger.warning("event=fetch_interrupted version=%s reason=%r", self._work.offer.version, str(error))

    def _pull(self, places: Places) -> None:
        engine = self._engines.take(self._work.deadline_ns)
        try:
            self._pull_with(engine, places)
        except BaseException:
            engine.close()
            raise
        self._engines.keep(engine)

    def _pull_with(self, engine: MooncakeEngine, places: Places) -> None:
        target, is_registered = self._work.target, self._engines.registers_targets
        if is_registered:
            engine.register(target.address, self._work.num_bytes)
        while self._call is not None and not self._is_ending.is_set():
            self._check_time()
            if slices := _slices(self._call, places, target.address):
                engine.read(places.session, slices)
                self._publisher.confirm(self._work.deadline_ns)
            self._advance(self._call)
        if is_registered:
            # At once, and not when the next fetch comes: these may be live weights in a moment, and nobody is to reach
            # them then.
            engine.unregister(target.address)

    def _advance(self, call: Sequence[Row]) -> None:
        complete = [row.number for row in call if row.is_last]
        self._call = next(self._calls, None)
        with self._changed:
            self._num_bytes += sum(row.num_bytes for row in call)
            if complete:
                self._arrived.append(complete)
                self._changed.notify_all()


def _slices(call: Sequence[Row], places: Places, target: int) -> list[Slice]:
    """Those of the rows that have bytes."""
    return [
        Slice(target + row.target_offset, places.addresses[row.segment] + row.offset, row.num_bytes)
        for row in call
        if row.num_bytes
    ]
