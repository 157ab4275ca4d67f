"""The bytes of tensors in host memory that no process has mapped, for as long as nobody needs them.

On a machine without a GPU this stands for the pinned host memory that weights of a GPU would be offloaded to. Here both
are the same memory, so what is gained is no room on the machine, but that the rank lets go of its own (its resident
size really falls), of leases and of published memory. Owns a memfd, sealed against other sizes. Refuses to know whose
bytes they are. Invariant: between `save` and `load` nothing is mapped, and an error leaves nothing behind."""

import fcntl
import os
from collections.abc import Mapping as Dict
from dataclasses import dataclass
from typing import NamedTuple

from fastdeploy_rl._native import Mapping, Place, Region, transfer
from fastdeploy_rl.checksum import Fletcher4
from fastdeploy_rl.errors import NoSpaceError, SegmentError
from fastdeploy_rl.memory.free_memory import free_memory
from fastdeploy_rl.memory.tensor_view import TensorView

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _Tensor(NamedTuple):
    offset: int
    dtype: str
    shape: tuple[int, ...]


class Loaded(NamedTuple):
    """`views` of what was written, and what was written sums up to; by name."""

    views: dict[str, TensorView]
    sums: dict[str, Fletcher4]


@dataclass
class HostCopy:
    """Made by `save`; its maker releases it. `sums`: of what was saved, by name."""

    num_bytes: int
    """Memory that is held, mapped or not; until `release`."""
    sums: dict[str, Fletcher4]
    _tensors: dict[str, _Tensor]
    _descriptor: int

    @classmethod
    def save(cls, views: Dict[str, TensorView], offsets: Dict[str, int], num_threads: int) -> "HostCopy":
        """Copies the tensors in one pass, each to its offset (bytes; they must not overlap), and lets go of them again.
        NoSpaceError where the machine, or this process's bounds, have no room."""
        num_bytes = max((offsets[name] + view.num_bytes for name, view in views.items()), default=0) or 1
        tensors = {name: _Tensor(offsets[name], view.dtype, view.shape) for name, view in views.items()}
        copy = cls(num_bytes, {}, tensors, _reserved_memory(num_bytes))
        try:
            mapped = copy._map(writable=True, num_threads=num_threads)
            copy.sums = _move(views, copy._views(mapped), mapped, num_threads)
        except BaseException:
            copy.release()
            raise
        return copy

    def load(self, into: Mapping, num_threads: int) -> Loaded:
        """Copies all of it to the same offsets of `into` in one pass. The copy stays until `release`."""
        views = self._views(into)
        mapped = self._map(writable=False, num_threads=num_threads)
        return Loaded(views, _move(self._views(mapped), views, mapped, num_threads))

    def release(self) -> None:
        """Gives the memory back to the system. A second release does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _views(self, mapping: Mapping) -> dict[str, TensorView]:
        return {name: TensorView(mapping, *tensor) for name, tensor in self._tensors.items()}

    def _map(self, *, writable: bool, num_threads: int) -> Mapping:
        if self._descriptor < 0:
            raise SegmentError("the host copy was released already")
        mapping = Mapping.map_fd(self._descriptor, self.num_bytes, writable)
        mapping.prefault(num_threads)  # by all threads at once, and not one page fault at a time in the copy
        return mapping


def _move(
    sources: Dict[str, TensorView], targets: Dict[str, TensorView], mapped: Mapping, num_threads: int
) -> dict[str, Fletcher4]:
    """Copies each tensor to the one of its name and sums it up; unmaps `mapped`, in which one side lies, whatever
    happens."""
    regions: list[Region] = []
    try:
        regions += [_region(source, targets[name]) for name, source in sources.items()]
        results = transfer(regions, num_threads)
    finally:
        regions.clear()  # a failure's frames must not keep the memory mapped
        mapped.close()
    return {name: Fletcher4(*live) for name, (_, live) in zip(sources, results, strict=True) if live is not None}


def _region(source: TensorView, target: TensorView) -> Region:
    return Region(
        source=source.mapping,
        source_offset=source.offset,
        source_stride=source.num_bytes,
        rows=1,
        row_bytes=source.num_bytes,
        target=target.mapping,
        target_offset=target.offset,
        target_stride=source.num_bytes,
        live_place=Place(0, source.num_bytes, source.num_bytes),
    )


def _reserved_memory(num_bytes: int) -> int:
    """A memfd of which every page is there, so that no store meets memory that is not."""
    free = free_memory()
    if num_bytes > free:  # asked first: who reserves until it fails takes the memory of the whole machine on the way
        raise NoSpaceError(f"a copy in host memory needs {num_bytes} bytes, {free} are free")
    descriptor = -1
    try:
        descriptor = os.memfd_create("fastdeploy_rl_host_copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(descriptor, 0, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise NoSpaceError(f"a copy in host memory needs {num_bytes} bytes: {error.strerror}") from error
    return descriptor
