"""Memory that a trainer computes in and engines can map: what `borrow=True` publishes without a copy.

Owns which arrays lie in which row of the lease table, and to whom a row belongs now. Such memory is either *the
trainer's* (its row is being written: nobody can lease it) or *published* (engines may hold it; the trainer reads only).
Refuses to know versions and files. Invariant: `hand_out` makes the trainer's memory published, `take_back` is the only
way back from a version that engines know, and it takes everything or nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy.typing as npt

from fastdeploy_rl.dtypes import itemsize
from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError, LifecycleError, TrainerError
from fastdeploy_rl.manifest import ALIGNMENT, aligned
from fastdeploy_rl.memory.host_tensor import HostTensor
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.publish.arena_shelf import ArenaInHand, ArenaShelf
from fastdeploy_rl.publish.leases import LeaseTable

_DLPACK_CPU = 1

Wanted = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> (safetensors dtype, shape)."""


class ExportedTensor:
    """A tensor of trainer memory for `torch.from_dlpack` or `paddle.utils.dlpack.from_dlpack`, in its own dtype."""

    def __init__(self, view: TensorView) -> None:
        self._view = view

    def __dlpack__(self, **_: Any) -> object:
        return self._view.mapping.dlpack(self._view.offset, self._view.shape, self._view.dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CPU, 0


class TrainerMemory(Mapping[str, npt.NDArray[Any]]):
    """Name -> writable numpy array (BF16 as uint16), zeroed at first. Arrays, and tensors made of them, stay valid for
    as long as they live, also after the publisher closed."""

    def __init__(self, views: Mapping[str, TensorView]) -> None:
        self._views = views
        self._arrays = {name: view.numpy() for name, view in views.items()}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def export(self, name: str) -> ExportedTensor:
        """For torch and Paddle, over the same bytes: `torch.from_dlpack(memory.export(name))`. Paddle wants one tensor
        an address at a time."""
        return ExportedTensor(self._views[name])


class Place(NamedTuple):
    """Where a borrowed tensor lies: row of the lease table, and bytes from the beginning of its segment."""

    row: int
    offset: int


class LentMemory:
    """All memory that one publisher lent to its trainer. `on_change` is told each row that the trainer gets back."""

    def __init__(self, shelf: ArenaShelf, table: LeaseTable, on_change: Callable[[int], object]) -> None:
        self._shelf = shelf
        self._table = table
        self._on_change = on_change
        self._lent: dict[int, ArenaInHand] = {}

    def allocate(self, wanted: Wanted) -> TrainerMemory:
        """New memory, the trainer's until it is published. ConfigurationError for what no tensor has, NoSpaceError."""
        places: dict[str, tuple[int, str, tuple[int, ...]]] = {}
        end = 0
        for name, (dtype, shape) in wanted.items():
            if not all(type(size) is int and size >= 0 for size in shape):
                raise ConfigurationError(f"{name!r:.600} cannot have shape {shape!r:.80}")
            places[name] = end, dtype, tuple(shape)
            end += aligned(prod(shape) * itemsize(dtype))
        lent = self._shelf.lend(max(end, ALIGNMENT))
        self._lent[lent.row] = lent
        return TrainerMemory({name: TensorView(lent.mapping, *place) for name, place in places.items()})

    def segment(self, row: int) -> ArenaInHand:
        return self._lent[row]

    def locate(self, name: str, host: HostTensor) -> Place:
        """TrainerError for a tensor that engines cannot map where it lies."""
        address, num_bytes = host.key
        if not num_bytes and self._lent:
            return Place(next(iter(self._lent)), 0)
        for row, lent in self._lent.items():
            offset = address - lent.mapping.address
            if offset >= 0 and offset + num_bytes <= lent.mapping.num_bytes:
                return Place(row, _checked_offset(name, offset))
        raise TrainerError(
            f"{name!r} cannot be borrowed: other processes cannot map the memory it lies in; compute in memory from "
            "publisher.allocate(...), or publish a copy (borrow=False)"
        )

    def hand_out(self, rows: Iterable[int], version: str) -> None:
        """Makes the rows published: engines can lease them by the generation that is in the table from here on."""
        for row in rows:
            self._table.set_version(row, version)
            self._table.end_write(row)

    def take_in(self, rows: Iterable[int]) -> None:
        """Undoes `hand_out` of a version that engines were not told of: the rows are the trainer's again, unless an
        engine has leased them already."""
        for row in rows:
            if not self._table.is_written(row):
                self._table.begin_write(row)

    def check_owned(self, rows: Iterable[int]) -> None:
        """LifecycleError, naming the holders, unless all rows are the trainer's."""
        for row in rows:
            if not self._table.is_written(row):
                holders = "; ".join(map(str, self._table.holders(row))) or "nobody now"
                raise LifecycleError(
                    f"this memory is published as version {self._table.version(row)}, leased by {holders}: call "
                    "wait_released(deadline_s) on that publication before the tensors change and are published again"
                )

    def take_back(self, contents: Mapping[int, int], deadline_ns: int) -> None:
        """`contents`: row -> the generation it was published as; one that was taken back before is left as it is, also
        where it was published again since. Waits until no live process leases any of them; then they are the trainer's,
        and nobody gets a new lease. DeadlineExceededError names the holders; then nothing changed, and what is
        published can still be taken. LifecycleError when the publisher is closed."""
        if contents and not self._table.is_open:
            raise LifecycleError(
                f"the publisher of {self._table.path.parent} is closed, so nobody can say when engines let go of this "
                "memory: call wait_released before close"
            )
        taken: list[int] = []
        try:
            for row, generation in contents.items():
                if self._table.generation(row) == generation:
                    self._table.wait_free([row], deadline_ns)
                    taken.append(row)
            for row in taken:
                self._on_change(row)
        except BaseException as error:
            for row in taken:
                self._table.cancel_write(row)
            if isinstance(error, DeadlineExceededError):
                raise DeadlineExceededError(f"not released: {error}; then call wait_released again") from None
            raise


def _checked_offset(name: str, offset: int) -> int:
    if offset % ALIGNMENT:
        raise TrainerError(
            f"{name!r} cannot be borrowed: it begins inside an allocated tensor, at byte {offset} of its memory, which "
            f"is no multiple of {ALIGNMENT}; allocate it by itself"
        )
    return offset
