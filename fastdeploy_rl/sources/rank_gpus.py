"""Which physical device each rank of an engine works on: by what name a trainer's files are looked for.

Owns how CUDA_VISIBLE_DEVICES (indices, `GPU-` or `MIG-` identifiers) and Paddle's FLAGS_selected_gpus are read
together. Refuses to know the driver: a name is text. Invariant: a rank's device is the one that Paddle's launcher gave
it, where it gave one; ranks follow each other in the list.
"""

from typing import NamedTuple

from fastdeploy_rl.config import cuda_visible_devices, selected_gpu
from fastdeploy_rl.errors import ConfigurationError


class RankGpu(NamedTuple):
    """`ordinal`: the driver's, in a process with this process's environment. `name`: what FastDeploy's files call the
    device."""

    ordinal: int
    name: str

    @property
    def selector(self) -> str:
        """What `memory.cuda_devices.find_device` takes: an index counts among the visible ones there."""
        return str(self.ordinal) if self.name.isdigit() else self.name


def listed_gpus(rank: int, num_ranks: int) -> tuple[RankGpu, ...] | None:
    """Of each rank, as CUDA_VISIBLE_DEVICES lists them; None where it does not list them all, or is not set."""
    entries = [entry.strip() for entry in (cuda_visible_devices() or "").split(",") if entry.strip()]
    first = _first(rank)
    if first < 0 or len(entries) < first + num_ranks:
        return None
    return tuple(RankGpu(ordinal, entries[ordinal]) for ordinal in range(first, first + num_ranks))


def rank_gpus(rank: int, num_ranks: int) -> tuple[RankGpu, ...]:
    """As `listed_gpus`; where CUDA_VISIBLE_DEVICES is not set, devices are called by their index. ConfigurationError
    where not every rank's device is visible."""
    first = _first(rank)
    if cuda_visible_devices() is None and first >= 0:
        return tuple(RankGpu(ordinal, str(ordinal)) for ordinal in range(first, first + num_ranks))
    listed = listed_gpus(rank, num_ranks)
    if listed is None:
        raise ConfigurationError(
            f"CUDA_VISIBLE_DEVICES={cuda_visible_devices()!r:.200} does not list the devices of all {num_ranks} ranks, "
            f"of which rank {rank} has number {first + rank} (FLAGS_selected_gpus): let every rank see all of them, in "
            "the order of the ranks"
        )
    return listed


def _first(rank: int) -> int:
    """The place of rank 0's device; negative where a rank's own says that there is none."""
    selected = selected_gpu()
    return 0 if selected is None else selected - rank
