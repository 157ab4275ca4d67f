"""The complete version a rank holds: where its bytes are, what they sum to, and what keeps the memory alive.

Owns the release of that memory, also of a version that sleeps. Invariant: a LiveWeights is complete; there is none for
half a version.
"""

from dataclasses import dataclass

from fastdeploy_rl._native import Mapping, Place, Region, transfer
from fastdeploy_rl.checksum import Fletcher4
from fastdeploy_rl.errors import ChecksumMismatchError
from fastdeploy_rl.memory.arena import ArenaPair
from fastdeploy_rl.memory.host_copy import HostCopy
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.sources.base import StagedSource
from fastdeploy_rl.version import WeightVersion


@dataclass
class LiveWeights:
    """`views` are this rank's parameters; `read` and `live` the two halves of its receipt, `read` by manifest tensor,
    `live` by parameter; both are empty where checksums are off."""

    version: WeightVersion
    content_digest: str
    views: dict[str, TensorView]
    read: dict[str, Fletcher4]
    live: dict[str, Fletcher4]
    staged: StagedSource | None = None
    """Published memory that some views point into, and its lease; None where every parameter is a copy."""
    arena: Mapping | None = None
    """The engine's own memory that the other views point into."""
    is_read_back: bool = False
    """All of it was read where it is bound now, or is not to be; else `audit` is still to be called."""

    def lies_in(self, staged: StagedSource) -> bool:
        """A parameter points into that published memory. One without bytes does not: it needs none."""
        segments = {id(segment) for segment in staged.segments}
        return any(view.num_bytes and id(view.mapping) in segments for view in self.views.values())

    def release(self, arenas: ArenaPair) -> None:
        """Gives the memory back; the runner must be bound elsewhere by now. SegmentError while somebody still looks at
        published memory: that then stays, leased, and a later call releases it. After success it does nothing."""
        self.views = {}
        if self.arena is not None:
            arenas.release(self.arena)
            self.arena = None
        if self.staged is not None:
            self.staged.release()
            self.staged = None


@dataclass
class OffloadedWeights:
    """A complete version that no parameter is bound to: its bytes in host memory, and what they must sum up to when
    they come back. Fields as in LiveWeights."""

    version: WeightVersion
    content_digest: str
    read: dict[str, Fletcher4]
    live: dict[str, Fletcher4]
    copy: HostCopy

    def release(self) -> None:
        """Gives the memory back; the version is gone then. A second release does nothing."""
        self.copy.release()


def whole(view: TensorView) -> Region:
    """Reads a parameter's own bytes, for its live checksum."""
    return Region(
        source=view.mapping,
        source_offset=view.offset,
        source_stride=view.num_bytes,
        rows=1,
        row_bytes=view.num_bytes,
        live_place=Place(0, view.num_bytes, view.num_bytes),
    )


def live_checksums(views: dict[str, TensorView], num_threads: int) -> dict[str, Fletcher4]:
    """Reads every parameter's memory and sums it up; one read pass."""
    sums = transfer([whole(view) for view in views.values()], num_threads)
    return {name: Fletcher4(*live) for name, (_, live) in zip(views, sums, strict=True) if live is not None}


def check_sums(found: dict[str, Fletcher4], expected: LiveWeights, rank: int) -> None:
    """ChecksumMismatchError unless every parameter of `found` sums up to what the version has there."""
    wrong = [name for name, sums in found.items() if sums != expected.live[name]]
    if wrong:
        raise ChecksumMismatchError(
            f"rank {rank}, version {expected.version}: {len(wrong)} parameters do not hold the bytes that were staged, "
            f"first {wrong[0]}; the memory of this machine is at fault, or a process wrote into it"
        )


def audit(live: LiveWeights, rank: int, num_threads: int) -> None:
    """Reads all that is live, published memory included, in one pass; only reads, so the engine may decode meanwhile.

    ChecksumMismatchError names rank, version and the first parameter that is not what was committed. The caller keeps
    `live` from being released until it returns."""
    check_sums(live_checksums(live.views, num_threads), live, rank)
