"""Every error of the package, in one tree, split by who must act.

    FastDeployRLError
     |- CallerError                 the code or command line that called us
     |   |- ConfigurationError      a flag, path, port or model that cannot work
     |   |- AuthenticationError     an API key that is missing or unknown
     |   |- VersionFormatError      text that is no weight version
     |   |- LifecycleError          an event that is illegal in this state
     |   `- RequestError            a generation request that cannot be served as written
     |      `- UnknownModelError    a model that is not served here
     |- TrainerError                the weights that were published
     |   |- ManifestError           malformed, oversized or inconsistent manifest
     |   |- CoverageError           missing, surplus, wrongly shaped or typed tensors
     |   |- ChecksumMismatchError   bytes that are not what the manifest promised
     |   |- VersionRegressError     a version that goes back
     |   |- NotAliasableError       apply mode alias-strict, and tensors that would have to be copied
     |   `- NoPublicationError      nothing published where the engine looks, or it was superseded
     |- EngineError                 the engine or one of its ranks
     |   |- CheckpointError         a checkpoint that cannot be read
     |   |- UpdateRejectedError     a command ended without taking effect; nothing changed
     |   |- NotServingError         paused, cleared or fenced: come back later
     |   |- OverloadedError         as many requests as the engine takes are there already: come back later
     |   |- FencedError             a command ended where no complete version is known to be live; update again
     |   |- StaleGraphError         a captured graph for addresses other than those that are bound
     |   `- StepFailedError         a step of an update failed for a reason of its own
     `- WorldError                  the machine and the peers
         |- DeadlineExceededError   a wait ran out of time; names what and whom it waited for
         |- PeerLostError           a process that was needed is dead
         |- NoSpaceError            no room in shared memory
         |- SegmentError            a shared-memory segment that is missing, foreign or in use
         |   `- StaleMemoryError    memory that its owner has freed since, or reused
         |- CudaError               a call of the CUDA driver that failed
         |   `- CudaUnavailableError  no CUDA driver here, or no device that this process may use
         |- ChannelBusyError        another live publisher owns the channel
         `- EngineNotFoundError     no engine at that address

A message says what, which rank / version / step, the state now, and what to do next. Each class has a wire name (its
own name), so that an error raised in one process arrives in another as the same class."""

import time
from collections.abc import Collection
from typing import ClassVar


class FastDeployRLError(Exception):
    """Root of the tree. `http_status` is what the control plane
    answers; `exit_code` is what the command line returns."""

    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1


class CallerError(FastDeployRLError):
    http_status = 400
    exit_code = 2


class ConfigurationError(CallerError):
    pass


class AuthenticationError(CallerError):
    http_status = 401


class VersionFormatError(CallerError):
    pass


class LifecycleError(CallerError):
    http_status = 409


class RequestError(CallerError):
    """`param` is the field that is wrong, `code` a word for the kind of fault: both as in OpenAI's error form."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnknownModelError(RequestError):
    http_status = 404


class TrainerError(FastDeployRLError):
    http_status = 409
    exit_code = 2


class ManifestError(TrainerError):
    pass


class CoverageError(TrainerError):
    pass


class ChecksumMismatchError(TrainerError):
    pass


class VersionRegressError(TrainerError):
    pass


class NotAliasableError(TrainerError):
    pass


class NoPublicationError(TrainerError):
    pass


class EngineError(FastDeployRLError):
    pass


class CheckpointError(EngineError):
    exit_code = 2


class UpdateRejectedError(EngineError):
    http_status = 409
    exit_code = 2


class NotServingError(EngineError):
    http_status = 503


class OverloadedError(EngineError):
    http_status = 429


class FencedError(EngineError):
    http_status = 503


class StaleGraphError(EngineError):
    pass


class StepFailedError(EngineError):
    pass


class WorldError(FastDeployRLError):
    http_status = 503


class DeadlineExceededError(WorldError):
    """`missing`: ranks that did not come to a collective. Only collectives set it; whoever else waited for ranks names
    them in the text alone."""

    http_status = 504
    missing: frozenset[int] = frozenset()

    @classmethod
    def waiting_for(
        cls, what: str, *, since_s: float, missing: Collection[int] = (), hint: str = ""
    ) -> "DeadlineExceededError":
        """`what` (a noun without article) did not come in time. `since_s` is time.monotonic() when the wait began,
        `missing` are the ranks that it needed and that were not there, `hint` is what more is known, or what to do."""
        waited_s = time.monotonic() - since_s
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s))
        absent = f"; ranks {sorted(missing)} missing" if missing else ""
        return cls(f"no {what} after {waited_s:.1f} s (since {since}){absent}" + (f"; {hint}" if hint else ""))


class PeerLostError(WorldError):
    pass


class NoSpaceError(WorldError):
    exit_code = 2


class SegmentError(WorldError):
    exit_code = 2


class StaleMemoryError(SegmentError):
    pass


class CudaError(WorldError):
    pass


class CudaUnavailableError(CudaError):
    exit_code = 2


class ChannelBusyError(WorldError):
    exit_code = 2


class EngineNotFoundError(WorldError):
    exit_code = 2


def _tree(root: type[FastDeployRLError]) -> dict[str, type[FastDeployRLError]]:
    return {root.__name__: root} | {name: cls for child in root.__subclasses__() for name, cls in _tree(child).items()}


def wire_text(error: BaseException) -> str:
    """Its text as board, files and HTTP carry it: a path's bytes that are no UTF-8 become question marks."""
    return str(error).encode("utf-8", "replace").decode("utf-8")


def from_wire(name: str, text: str) -> FastDeployRLError:
    """The error whose class is called `name`, or a plain EngineError where this version does not know the name."""
    return _tree(FastDeployRLError).get(name, EngineError)(text)
