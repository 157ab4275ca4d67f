"""One fetch over tcp: streams that take buckets of ranges from one desk, each over connections of its own.

Owns the threads, their connections, and what is known of each server in this fetch. A connection that is lost goes on
where it stopped, here or at another server; one that lacks the version is asked no more, one that lacks some ranges not
for these. Refuses to know manifests and tensors. Invariant: nobody writes into the target after `TcpFetch.close`.
"""

import logging
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from fastdeploy_rl import _native
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import (
    DeadlineExceededError,
    FastDeployRLError,
    LifecycleError,
    NoPublicationError,
    OverloadedError,
    PeerLostError,
)
from fastdeploy_rl.transport.base import ByteRange, Offer
from fastdeploy_rl.transport.buckets import Bucket, buckets, spans
from fastdeploy_rl.transport.connection import Connection, Server

_log = logging.getLogger(__name__)

_STEP_BYTES = 8 << 20
"""That arrive between two looks at who wants to know of them, or has had enough."""
_FIRST_DELAY_S = 0.02
_MAX_DELAY_S = 2.0


def delay_s(num_failures: int) -> float:
    """Until a server that failed that many times in a row is asked again: twice as long each time, up to two seconds,
    and never quite as long as others wait who saw it fail at the same moment."""
    return random.uniform(0.5, 1.0) * min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(num_failures - 1, 16))


class _StoppedError(Exception):
    """The fetch is over: its stream ends."""


class Source:
    """A server in one fetch. Its desk's lock guards it."""

    def __init__(self, server: Server, *, is_peer: bool) -> None:
        """A peer may go at any time, and is not waited for."""
        self.server = server
        self.is_peer = is_peer
        self.error: FastDeployRLError | None = None
        self.is_out = False
        self.num_failures = 0
        self.retry_ns = 0


class Desk:
    """What streams share: the buckets that are left, the servers, what is complete, and why the fetch ended."""

    def __init__(
        self,
        offer: Offer,
        ranges: Sequence[ByteRange],
        bucket_bytes: int,
        peers: Sequence[Server],
        publisher: Server | None,
        deadline_ns: int,
    ) -> None:
        """Peers are asked before the publisher, those that come first before the others."""
        self.offer = offer
        self.deadline_ns = deadline_ns
        self.num_bytes = 0
        self._sources = [Source(server, is_peer=True) for server in peers]
        if publisher is not None:
            self._sources.append(Source(publisher, is_peer=False))
        self._buckets = buckets(ranges, bucket_bytes)
        self._left = [each.num_bytes for each in ranges]
        self._complete = [index for index, left in enumerate(self._left) if not left]
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_stopped = False
        self._begun = time.monotonic()

    # --- for streams -------------------------------------------------------------------------------

    def next_bucket(self) -> Bucket | None:
        """None: all are taken."""
        with self._changed:
            self._check_going()
            return next(self._buckets, None)

    def check_going(self) -> None:
        with self._changed:
            self._check_going()

    def _check_going(self) -> None:
        if self._is_stopped or self._error is not None:
            raise _StoppedError

    def best_source(self, without: Mapping[Source, NoPublicationError]) -> Source:
        """The first that can be asked now, waiting for one that failed before; not those of `without`, who said that
        they lack what is wanted. When none is left: what the last one said."""
        with self._changed:
            while True:
                self._check_going()
                left = [source for source in self._sources if not source.is_out and source not in without]
                if not left:
                    raise self._nobody_left(without)
                now = time.monotonic_ns()
                if now >= self.deadline_ns:
                    raise self._out_of_time()
                for source in left:
                    if source.retry_ns <= now:
                        return source
                until_ns = min(self.deadline_ns, *(source.retry_ns for source in left))
                self._changed.wait((until_ns - now) / 1e9)

    def put_off(self, source: Source, error: FastDeployRLError, seconds: float) -> None:
        """It failed after so long, and is asked again after a while that is longer than that; a peer is not."""
        if source.is_peer:
            self.leave_out(source, error)
            return
        with self._changed:
            source.error = error
            source.num_failures += 1
            source.retry_ns = time.monotonic_ns() + int((delay_s(source.num_failures) + seconds) * 1e9)

    def leave_out(self, source: Source, error: FastDeployRLError) -> None:
        """It is of no use to this fetch."""
        _log.info("version=%s server=%s event=left_out reason=%s", self.offer.version, source.server, error)
        with self._changed:
            source.error = error
            source.is_out = True

    def land(self, source: Source, bucket: Bucket, num_bytes: int) -> None:
        """More of the bucket lies in the target."""
        with self._changed:
            self.num_bytes += num_bytes
            source.num_failures = 0
            for index, wanted in bucket.land(num_bytes):
                self._left[index] -= wanted.num_bytes
                if not self._left[index]:
                    self._complete.append(index)
                    self._changed.notify_all()
            self._check_going()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _nobody_left(self, without: Mapping[Source, NoPublicationError]) -> FastDeployRLError:
        said = [source.error for source in self._sources if source.is_out and source.error is not None]
        return [*said, *without.values()][-1]

    def _out_of_time(self) -> DeadlineExceededError:
        wrong = "; ".join(str(source.error) for source in self._sources if source.error is not None)
        what = f"bytes of version {self.offer.version}"
        return DeadlineExceededError.waiting_for(what, since_s=self._begun, hint=wrong and f"last: {wrong}")

    # --- for the caller ----------------------------------------------------------------------------

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def arrivals(self) -> Iterator[Sequence[int]]:
        """As `Fetch.arrivals`."""
        num_left = len(self._left)
        while num_left:
            complete = self._next_complete()
            num_left -= len(complete)
            yield complete

    def _next_complete(self) -> Sequence[int]:
        with self._changed:
            while not self._complete:
                if self._error is not None:
                    raise self._error
                if self._is_stopped:
                    raise LifecycleError(f"the fetch of version {self.offer.version} was closed")
                left_ns = self.deadline_ns - time.monotonic_ns()
                if left_ns <= 0:
                    raise self._out_of_time()
                self._changed.wait(left_ns / 1e9)
            complete, self._complete = self._complete, []
            return complete


class Stream:
    """A thread that brings one bucket after another, over a connection to each server that it needs."""

    def __init__(self, desk: Desk, target: memoryview, secret: bytes | None, deadlines: Deadlines) -> None:
        self.thread = threading.Thread(target=self._run, name="fastdeploy_rl_fetch", daemon=True)
        self._desk = desk
        self._target = target
        self._secret = secret
        self._deadlines = deadlines
        self._connections: dict[Source, Connection] = {}

    def hold(self) -> None:
        """In the caller's thread, before the stream's own begins: until a server holds the version for it. Errors as
        `Desk.best_source`."""
        while not self._connections:
            self._try(Bucket(()), {})

    def cut(self) -> None:
        """From any thread, once the desk is stopped."""
        for connection in list(self._connections.values()):
            connection.cut()

    def close(self) -> None:
        """When the thread has ended."""
        for source in list(self._connections):
            self._hang_up(source)

    def _run(self) -> None:
        try:
            while (bucket := self._desk.next_bucket()) is not None:
                self._bring(bucket)
        except _StoppedError:
            pass
        except BaseException as error:
            self._desk.fail(error)

    def _bring(self, bucket: Bucket) -> None:
        without: dict[Source, NoPublicationError] = {}
        while not bucket.is_complete:
            try:
                self._try(bucket, without)
            except NoPublicationError:
                if not without or len(bucket.incomplete) == 1:
                    raise
                for piece in bucket.incomplete:  # nobody has all of it; each may have its part
                    self._bring(Bucket((piece,)))
                return

    def _try(self, bucket: Bucket, without: dict[Source, NoPublicationError]) -> None:
        """Once, with the best server. What goes wrong there is remembered; what is raised ends the fetch."""
        source = self._desk.best_source(without)
        begun = time.monotonic()
        try:
            self._receive(source, self._connection(source), bucket, without)
        except (OSError, OverloadedError) as error:
            lost = PeerLostError(f"{self._hang_up(source)}: {error}")
            self._desk.put_off(source, lost, time.monotonic() - begun)
        except FastDeployRLError as error:
            self._hang_up(source)
            self._desk.leave_out(source, error)

    def _connection(self, source: Source) -> Connection:
        """One that holds the version."""
        known = self._connections.get(source)
        if known is not None:
            return known
        connection = Connection(source.server, self._secret, self._deadlines)
        self._connections[source] = connection  # before anything that takes long, so that it can be cut
        self._desk.check_going()
        connection.open(self._desk.deadline_ns)
        connection.hold(self._desk.offer.file_digest, self._desk.deadline_ns)
        return connection

    def _receive(
        self, source: Source, connection: Connection, bucket: Bucket, without: dict[Source, NoPublicationError]
    ) -> None:
        missing = bucket.missing()
        if not missing:
            return
        try:
            connection.read([piece.wanted for piece in missing], self._desk.deadline_ns)
        except NoPublicationError as error:
            without[source] = error
            return
        for start, stop in spans(missing):
            while start < stop:
                with self._target[start : min(stop, start + _STEP_BYTES)] as window:
                    num_bytes = connection.receive_into(window, self._desk.deadline_ns)
                self._desk.land(source, bucket, num_bytes)
                start += num_bytes

    def _hang_up(self, source: Source) -> Connection:
        connection = self._connections.pop(source)
        connection.close()
        return connection


class TcpFetch:
    """See `transport.base.Fetch`."""

    def __init__(
        self, desk: Desk, target: _native.Mapping, num_streams: int, secret: bytes | None, deadlines: Deadlines
    ) -> None:
        self.is_closed = False
        self._desk = desk
        self._deadlines = deadlines
        self._target = memoryview(target)
        self._streams = [Stream(desk, self._target, secret, deadlines) for _ in range(num_streams)]

    def start(self) -> None:
        """NoPublicationError when nobody has the version; otherwise it stays until `close`, or until every connection
        to its holders was lost."""
        try:
            self._streams[0].hold()
            for stream in self._streams:
                stream.thread.start()
        except BaseException:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        return self._desk.num_bytes

    def arrivals(self) -> Iterator[Sequence[int]]:
        return self._desk.arrivals()

    def close(self) -> None:
        """DeadlineExceededError where a thread does not end for `let_go_s`: then a later call tries again."""
        if self.is_closed:
            return
        begun = time.monotonic()
        self._desk.stop()
        for stream in self._streams:
            stream.cut()
        for stream in self._streams:
            if stream.thread.ident is not None:
                stream.thread.join(max(0.0, begun + self._deadlines.let_go_s - time.monotonic()))
        if any(stream.thread.is_alive() for stream in self._streams):
            raise DeadlineExceededError.waiting_for("end of threads that fetch weights", since_s=begun)
        for stream in self._streams:
            stream.close()
        self._target.release()
        self.is_closed = True
