"""One fetch over tcp: streams that take buckets of ranges from one desk, each over a connection of its own.

Owns the threads and their connections. A connection that is lost goes on where it stopped. Refuses to know manifests
and tensors. Invariant: nobody writes into the target after `TcpFetch.close`.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import DeadlineExceededError, LifecycleError, OverloadedError, PeerLostError
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.transport.base import Offer
from fastdeploy_rl.transport.buckets import Bucket, buckets, spans
from fastdeploy_rl.transport.connection import Connection

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


class Desk:
    """What streams share: the buckets that are left, when the server is asked again, what is complete, and why the
    fetch ended."""

    def __init__(
        self, offer: Offer, ranges: Sequence[ByteRange], bucket_bytes: int, deadline_ns: int, *, is_patient: bool
    ) -> None:
        """`is_patient`: a server that was lost is asked again until the deadline."""
        self.offer = offer
        self.deadline_ns = deadline_ns
        self.num_bytes = 0
        self._is_patient = is_patient
        self._buckets = buckets(ranges, bucket_bytes)
        self._left = [each.num_bytes for each in ranges]
        self._complete = [index for index, left in enumerate(self._left) if not left]
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_stopped = False
        self._begun = time.monotonic()
        self._wrong = ""
        self._num_failures = 0
        self._retry_ns = 0

    # --- for streams -------------------------------------------------------------------------------

    def next_bucket(self) -> Bucket | None:
        """None: all are taken."""
        with self._changed:
            self.check_going()
            return next(self._buckets, None)

    def check_going(self) -> None:
        if self._is_stopped or self._error is not None:
            raise _StoppedError

    def await_turn(self) -> None:
        """Returns when the server may be asked; DeadlineExceededError when that is too late."""
        with self._changed:
            while True:
                self.check_going()
                now = time.monotonic_ns()
                if now >= self.deadline_ns:
                    raise self._out_of_time()
                if now >= self._retry_ns:
                    return
                self._changed.wait((min(self.deadline_ns, self._retry_ns) - now) / 1e9)

    def put_off(self, lost: PeerLostError, seconds: float) -> None:
        """The server failed after so long, and is asked again after about as long, but never more than four seconds:
        a stall, or a large bucket that was lost near its end, is not paid for twice."""
        with self._changed:
            self.check_going()
            if not self._is_patient:
                raise lost
            now = time.monotonic_ns()
            if now < self.deadline_ns or not self._wrong:  # who fails at the deadline fails for want of time
                self._wrong = str(lost)
            self._num_failures += 1
            self._retry_ns = now + int((delay_s(self._num_failures) + min(seconds, _MAX_DELAY_S)) * 1e9)

    def land(self, bucket: Bucket, num_bytes: int) -> None:
        """More of the bucket lies in the target."""
        with self._changed:
            self.num_bytes += num_bytes
            self._num_failures = 0
            for index, wanted in bucket.land(num_bytes):
                self._left[index] -= wanted.num_bytes
                if not self._left[index]:
                    self._complete.append(index)
                    self._changed.notify_all()
            self.check_going()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _out_of_time(self) -> DeadlineExceededError:
        what = f"bytes of version {self.offer.version}"
        return DeadlineExceededError.waiting_for(what, since_s=self._begun, hint=self._wrong and f"last: {self._wrong}")

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
    """A thread that brings one bucket after another, over one connection at a time."""

    def __init__(self, desk: Desk, target: memoryview, connect: Callable[[], Connection]) -> None:
        self.thread = threading.Thread(target=self._run, name="fastdeploy_rl_fetch", daemon=True)
        self._desk = desk
        self._target = target
        self._connect = connect
        self._connection: Connection | None = None

    def hold(self) -> None:
        """In the caller's thread, before the stream's own begins: until the server holds the version for it."""
        while self._connection is None:
            self._try(Bucket(()))

    def cut(self) -> None:
        """From any thread, once the desk is stopped."""
        connection = self._connection
        if connection is not None:
            connection.cut()

    def close(self) -> None:
        """When the thread has ended."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _run(self) -> None:
        try:
            while (bucket := self._desk.next_bucket()) is not None:
                while not bucket.is_complete:
                    self._try(bucket)
        except _StoppedError:
            pass
        except BaseException as error:
            self._desk.fail(error)

    def _try(self, bucket: Bucket) -> None:
        """Once. A connection that is lost is remembered; what is raised ends the fetch."""
        self._desk.await_turn()
        begun = time.monotonic()
        connection = self._connection
        try:
            connection = connection or self._connected()
            self._receive(connection, bucket)
        except (OSError, OverloadedError) as error:
            lost = PeerLostError(f"{self._connection}: {error}")
            self.close()
            self._desk.put_off(lost, time.monotonic() - begun)

    def _connected(self) -> Connection:
        """That holds the version."""
        connection = self._connection = self._connect()
        self._desk.check_going()  # whoever stops the fetch now sees the connection, and cuts it
        connection.open(self._desk.deadline_ns)
        connection.hold(self._desk.offer.file_digest, self._desk.deadline_ns)
        return connection

    def _receive(self, connection: Connection, bucket: Bucket) -> None:
        missing = bucket.missing()
        if not missing:
            return
        connection.read([piece.wanted for piece in missing], self._desk.deadline_ns)
        for start, stop in spans(missing):
            while start < stop:
                with self._target[start : min(stop, start + _STEP_BYTES)] as window:
                    num_bytes = connection.receive_into(window, self._desk.deadline_ns)
                self._desk.land(bucket, num_bytes)
                start += num_bytes


class TcpFetch:
    """See `transport.base.Fetch`."""

    def __init__(
        self,
        desk: Desk,
        target: Mapping,
        connect: Callable[[], Connection],
        num_streams: int,
        let_go_s: float,
    ) -> None:
        self.is_closed = False
        self._desk = desk
        self._let_go_s = let_go_s
        self._target = memoryview(target)
        self._streams = [Stream(desk, self._target, connect) for _ in range(num_streams)]

    def start(self) -> None:
        """NoPublicationError when the server has not the version; otherwise that stays until `close`, or until every
        connection was lost."""
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
                stream.thread.join(max(0.0, begun + self._let_go_s - time.monotonic()))
        if any(stream.thread.is_alive() for stream in self._streams):
            raise DeadlineExceededError.waiting_for("end of threads that fetch weights", since_s=begun)
        for stream in self._streams:
            stream.close()
        self._target.release()
        self.is_closed = True
