"""FastDeploy's status words: arrays in shared memory that any process may read and write.

Owns the life of a segment's name as FastDeploy has it: whoever creates a name that is there takes it away first, and
who held it keeps an orphan. multiprocessing's resource tracker is in it, as it is there."""

from enum import IntEnum
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import numpy.typing as npt


class ModelWeightsStatus(IntEnum):
    NORMAL = 0
    UPDATING = 1
    CLEARING = -1
    CLEARED = -2


class KVCacheStatus(IntEnum):
    NORMAL = 0
    UPDATING = 1
    CLEARING = -1
    CLEARED = -2


class PrefixTreeStatus(IntEnum):
    NORMAL = 0
    UPDATING = 1
    CLEARING = -1
    CLEARED = -2


class ExistTaskStatus(IntEnum):
    EMPTY = 0
    EXIST = 1
    REFUSE = 2


def shared_memory_exists(name: str) -> bool:
    try:
        SharedMemory(name=name, create=False).close()
    except FileNotFoundError:
        return False
    return True


class IPCSignal:
    """`value`: the array in segment `{name}.{suffix}`; None for a segment of `shm_size` bytes that has no dtype."""

    def __init__(
        self,
        name: str,
        array: npt.NDArray[np.int32] | None = None,
        dtype: type | None = None,
        suffix: int | None = None,
        create: bool = True,
        shm_size: int | None = None,
    ) -> None:
        name = name if suffix is None else f"{name}.{suffix}"
        num_bytes = shm_size if array is None else array.nbytes
        if num_bytes is None or (array is not None and array.dtype != dtype):
            raise AssertionError("a signal has an array with its dtype, or a size in bytes")
        if create and shared_memory_exists(name):
            SharedMemory(name=name, create=False).unlink()
        self.shm = SharedMemory(name=name, create=create, size=num_bytes if create else 0)
        self.value: npt.NDArray[np.int32] | None = None
        if array is not None:
            self.value = np.ndarray(array.shape, array.dtype, buffer=self.shm.buf)
            if create:
                self.value[:] = array

    def clear(self) -> None:
        """Takes the name away."""
        self.value = None
        self.shm.close()
        try:
            self.shm.unlink()
        except FileNotFoundError:  # somebody's tracker took it away; ours need not look for it
            resource_tracker.unregister(f"/{self.shm.name}", "shared_memory")
