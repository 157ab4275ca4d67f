"""FastDeploy's closed package `checkpoint_transfer`, both of its interfaces: what one rank is sent, tensor by tensor.

    older: core.RDMAWeightsDownloader(config), .initialize(), .get_weights(step, rank) -> bytes of a saved state dict
    newer: CheckpointTransfer(**config, local_rank=, group_size=), .initialize(),
           .receive_stream(step_id=, verify_checksum=) -> (name, tensor) pairs

Owns the calls, and the thread in which they run: nothing can interrupt them. Refuses to know manifests and plans.
Invariant: what `Reception.take` was given is not looked at after it returned, since the package may use its memory for
the next tensor; and after `Reception.close` nothing is taken any more.
"""

import contextlib
import importlib
import importlib.util
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from fastdeploy_rl.errors import (
    ConfigurationError,
    DeadlineExceededError,
    FastDeployRLError,
    NoPublicationError,
    PeerLostError,
)
from fastdeploy_rl.memory.host_tensor import borrow
from fastdeploy_rl.memory.saved_state import read_saved_state

if TYPE_CHECKING:
    from typing_extensions import Buffer

PACKAGE = "checkpoint_transfer"
_log = logging.getLogger(__name__)
_DLPACK_CPU = 1

Item = TypeVar("Item")
Result = TypeVar("Result")


class ReceivedTensor(NamedTuple):
    """C-contiguous, from byte `offset` of `data` on. `is_lasting`: its bytes are its own, and stay."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: "Buffer"
    offset: int
    is_lasting: bool


class PartClient:
    """The package's client for what rank `part` of `num_parts` is sent. Nothing is imported or opened before the first
    `receive`. Used by one thread at a time, and thrown away once a call of it failed or was given up."""

    def __init__(
        self, api: Literal["auto", "downloader", "stream"], config: dict[str, Any], part: int, num_parts: int
    ) -> None:
        self._api = api
        self._config = config
        self._part = part
        self._num_parts = num_parts
        self._stream: Any = None

    def receive(self, step: int, *, is_verified: bool) -> Iterator[ReceivedTensor]:
        """Each tensor, to be read before the next is asked for. `is_verified`: the package checks its own checksums,
        where it has any. Blocks for as long as the package does. NoPublicationError where it has no such step,
        CheckpointError for bytes that are no state dict, ConfigurationError where the interface is not there; whatever
        the package raises."""
        make = None if self._api == "downloader" else _found("CheckpointTransfer")
        if make is not None:
            yield from self._streamed(make, step, is_verified)
            return
        make = None if self._api == "stream" else _found("RDMAWeightsDownloader")
        if make is None:
            raise ConfigurationError(f"the package {PACKAGE} that is installed has no interface {self._api!r}")
        yield from self._downloaded(make, step)

    def _streamed(self, make: Callable[..., Any], step: int, is_verified: bool) -> Iterator[ReceivedTensor]:
        if self._stream is None:
            self._stream = make(**self._config, local_rank=self._part, group_size=self._num_parts)
            self._stream.initialize()
        for name, tensor in self._stream.receive_stream(step_id=step, verify_checksum=is_verified):
            host = borrow(_on_host(tensor), str(name))
            yield ReceivedTensor(str(name), host.dtype, host.shape, host.buffer, 0, is_lasting=False)

    def _downloaded(self, make: Callable[..., Any], step: int) -> Iterator[ReceivedTensor]:
        """A client of its own for each step, as FastDeploy has it."""
        client = make(self._config)
        client.initialize()
        data = client.get_weights(step, self._part)
        if data is None:
            raise NoPublicationError(f"{PACKAGE} has no weights of step {step} for rank {self._part}")
        saved = read_saved_state(data, f"{PACKAGE}: step {step}, rank {self._part}")
        for name, target in [*((name, name) for name in saved.tensors), *saved.aliases.items()]:
            stored = saved.tensors[target]
            yield ReceivedTensor(name, stored.dtype, stored.shape, data, stored.offset, is_lasting=True)


def check_installed() -> None:
    """ConfigurationError where there is no package of that name. Imports nothing."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigurationError(
            f"transport {PACKAGE} needs the package of that name, which comes with FastDeploy's trainers and is not "
            "installed here; use transport tcp"
        )


def _found(name: str) -> Callable[..., Any] | None:
    """A class of the package, wherever in it. None: it has none of that name."""
    for module in (PACKAGE, f"{PACKAGE}.core"):
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            continue
        if found is not None:
            return found  # type: ignore[no-any-return]
    return None


def _on_host(tensor: Any) -> Any:
    device = getattr(tensor, "__dlpack_device__", None)
    return tensor if device is None or int(device()[0]) == _DLPACK_CPU else tensor.cpu()


class _Ended(NamedTuple):
    """The last thing that a reception says. `error` None: all was received."""

    error: BaseException | None


class Reception(Generic[Item, Result]):
    """Receives in a thread of its own, and gives what `take` makes of each item, there, to whoever waits here. `what`
    is received, for messages."""

    def __init__(self, what: str, received: Callable[[], Iterator[Item]], take: Callable[[Item], Result]) -> None:
        self._what = what
        self._received = received
        self._take = take
        self._results: queue.SimpleQueue[Result | _Ended] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"receive {what}", daemon=True)
        self._thread.start()

    def results(self, deadline_ns: int) -> Iterator[Result]:
        """One for each item, in the order of the package. DeadlineExceededError at the deadline: the package goes on
        with what it does, in its thread, and its client must not be used again. PeerLostError for what it raises."""
        begun = time.monotonic()
        while not isinstance(result := self._next(begun, deadline_ns), _Ended):
            yield result
        self._thread.join()
        self._raise(result.error)

    def _next(self, begun: float, deadline_ns: int) -> "Result | _Ended":
        """What comes after the deadline is not looked at, though it be there."""
        left_s = (deadline_ns - time.monotonic_ns()) / 1e9
        if left_s > 0:
            with contextlib.suppress(queue.Empty):
                return self._results.get(timeout=left_s)
        hint = f"{PACKAGE} does not answer, and cannot be interrupted"
        raise DeadlineExceededError.waiting_for(self._what, since_s=begun, hint=hint)

    def close(self) -> None:
        """Nothing is taken any more when this returns; the thread ends with the package's next word."""
        with self._lock:
            self._is_closed = True

    def _raise(self, error: BaseException | None) -> None:
        if isinstance(error, FastDeployRLError):
            raise error
        if error is not None:
            raise PeerLostError(f"{self._what}: {PACKAGE} failed: {type(error).__name__}: {error!s:.500}") from error

    def _run(self) -> None:
        try:
            for received in self._received():
                with self._lock:
                    if self._is_closed:
                        _log.info("event=reception_given_up what=%r", self._what)
                        return
                    self._results.put(self._take(received))
        except BaseException as error:  # handed to whoever waits: a thread has nobody else to tell
            self._results.put(_Ended(error))
        else:
            self._results.put(_Ended(None))
