"""Load strategy `ipc` with a trainer that knows FastDeploy only: `ipc_metas_{gpu}` says where its CUDA tensors lie.

Owns which of these files belong to the ranks of an engine, and how their rows stand to whole tensors. Refuses to know
CUDA calls (transport/device_memory.py). Invariant: bytes are copied while an update is staged, and summed up against
what rank 0 read before, so that whatever the trainer writes afterwards shows nowhere.

The trainer changes its tensors where they lie and leaves the file as it is, so that the file's identity tells nothing
of the bytes: whoever asks for the newest version has all of them read by rank 0, which needs every rank's device for
that, and for as long as it takes. A version is what `version.yaml` says, beside the files or in the model directory;
without one, other bytes have the next number. Tested on testing.fake_cuda; not run on a GPU.
"""

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from fastdeploy_rl.errors import ConfigurationError, CudaUnavailableError, NoPublicationError, TrainerError
from fastdeploy_rl.manifest import Segment, aligned
from fastdeploy_rl.memory.cuda_devices import find_device, visible_devices
from fastdeploy_rl.memory.ipc_metas import METAS_PREFIX, IpcMeta, metas_name, read_ipc_metas, read_ipc_metas_bytes
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.described import DescribedSource
from fastdeploy_rl.sources.describing import FileLayout, FoundFiles, FoundMemory, identities_in
from fastdeploy_rl.sources.rank_gpus import RankGpu, rank_gpus
from fastdeploy_rl.sources.rank_slices import Slice, join_slices
from fastdeploy_rl.sources.version_file import uncounted_epoch, wanted_version
from fastdeploy_rl.transport.device_memory import DeviceAllocation, DeviceReader, DeviceRun, DeviceSegment
from fastdeploy_rl.transport.files import FileIdentity
from fastdeploy_rl.version import WeightVersion


class IpcMetasSource(DescribedSource):
    """One engine rank as a reader of those files in `metas_dir` of the config. Opens nothing before it is used."""

    def __init__(self, config: SourceConfig, metas_dir: Path) -> None:
        super().__init__(config, partial(find_ipc_metas, metas_dir, config), f"{metas_dir} (no {metas_name('GPU')})")
        self._places = metas_dir, config.model_dir
        self._channel = config.channel

    def current_epoch(self, *, deadline_ns: int) -> int:
        """The channel's, since nobody counts them here. NoPublicationError where there are no files."""
        self._check_there()
        return uncounted_epoch(self._channel)

    def newest_version(self, *, deadline_ns: int) -> WeightVersion | None:
        """What `version.yaml` says; without one it cannot be said without reading all bytes."""
        self._check_there()
        wanted = next(filter(None, map(wanted_version, self._places)), None)
        return wanted.in_epoch(uncounted_epoch(self._channel)) if wanted is not None else None

    def _check_there(self) -> None:
        if not has_ipc_metas(self._places[0]):
            raise NoPublicationError(f"nothing is published in {self._places[0]}")


def has_ipc_metas(directory: Path) -> bool:
    """Whether there are such files, for whichever devices; none is read."""
    return bool(_listed(directory))


def newest_metas_ns(directory: Path) -> int:
    """When the newest of them was written, by the clock of its file system; 0 where there is none."""
    written = [0]
    for name in _listed(directory):
        with contextlib.suppress(OSError):  # it may go at any time
            written.append(os.stat(directory / name).st_mtime_ns)
    return max(written)


def find_ipc_metas(directory: Path, config: SourceConfig, deadline_ns: int) -> FoundFiles | None:
    """The files of the engine's ranks; None where there is none at all. NoPublicationError where some ranks' are
    missing; CheckpointError for a file that is no such table; ConfigurationError where CUDA_VISIBLE_DEVICES does not
    list every rank's device; DeadlineExceededError."""
    there = _listed(directory)
    if not there:
        return None
    gpus = rank_gpus(config.rank, config.num_ranks)
    names = tuple(_name_of(directory, gpu, there) for gpu in gpus)
    seen = identities_in(directory, names)
    data = [read_ipc_metas_bytes(directory / name) for name in names]
    tables = [
        _RankTable.of(read_ipc_metas(each, str(directory / name), deadline_ns), gpu, name)
        for each, gpu, name in zip(data, gpus, names, strict=True)
    ]
    how = ["ipc_metas", [hashlib.sha256(each).hexdigest() for each in data], config.parameters]
    return FoundFiles(
        directory,
        names,
        lambda _: _layout(directory, tables, config),
        msgspec.json.encode(how).decode(),
        FoundMemory(tuple(map(_segment, names, tables)), partial(_reader, seen, directory, tables, config)),
    )


def _listed(directory: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if name.startswith(METAS_PREFIX) and name != METAS_PREFIX)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be read: {error.strerror}") from error


def _name_of(directory: Path, gpu: RankGpu, there: Sequence[str]) -> str:
    """As CUDA_VISIBLE_DEVICES calls the device, else by the identifier that the driver gives it."""
    names = {name.casefold(): name for name in there}
    found = names.get(metas_name(gpu.name).casefold())
    if found is None and (uuid := _uuid(gpu)):
        found = names.get(metas_name(uuid).casefold())
    if found is None:
        raise NoPublicationError(
            f"{directory} has {', '.join(there[:8])}, but none for GPU {gpu.name} (yet): trainer and engine must call "
            "the device by one name in CUDA_VISIBLE_DEVICES; fastdeploy-rl doctor --ipc shows both"
        )
    return found


def _uuid(gpu: RankGpu) -> str | None:
    try:
        return find_device(gpu.selector, visible_devices()).uuid
    except (CudaUnavailableError, ConfigurationError):
        return None  # that no file is called so is what counts; doctor --ipc tells the rest


# --- what lies where --------------------------------------------------------------------------------


class _RankTable(NamedTuple):
    """A rank's tensors. `runs`: its allocations as one segment, with a gap after each, so that no tensor that is wrong
    reaches into the next; `aliases`: further names of the same bytes."""

    metas: dict[str, IpcMeta]
    runs: dict[bytes, DeviceRun]
    aliases: dict[str, str]

    @classmethod
    def of(cls, metas: dict[str, IpcMeta], gpu: RankGpu, name: str) -> "_RankTable":
        first: dict[object, str] = {}
        aliases = {}
        for tensor, meta in metas.items():
            seen_as = meta.handle, meta.offset, meta.num_bytes, meta.dtype, meta.shape
            if (original := first.setdefault(seen_as, tensor)) != tensor and meta.num_bytes:
                aliases[tensor] = original
        return cls(metas, _runs(metas, gpu.selector, f"{name} (GPU {gpu.name})"), aliases)

    @property
    def num_bytes(self) -> int:
        return max((run.stop for run in self.runs.values()), default=0)

    def place(self, name: str) -> int:
        """Where a tensor begins in the segment."""
        return self.runs[self.metas[name].handle].start + self.metas[name].offset

    def slices(self, number: int) -> dict[str, Slice]:
        """In segment `number`."""
        return {
            name: Slice(meta.dtype, meta.shape, number, self.place(name))
            for name, meta in self.metas.items()
            if name not in self.aliases
        }


def _runs(metas: Mapping[str, IpcMeta], device: str, holder: str) -> dict[bytes, DeviceRun]:
    extents: dict[bytes, int] = {}
    for meta in metas.values():
        extents[meta.handle] = max(extents.get(meta.handle, 1), meta.offset + meta.num_bytes)
    runs, start = {}, 0
    for handle, num_bytes in extents.items():
        runs[handle] = DeviceRun(start, num_bytes, DeviceAllocation(device, holder, handle, num_bytes))
        start = aligned(start + num_bytes + 1)
    return runs


def _layout(directory: Path, tables: Sequence[_RankTable], config: SourceConfig) -> FileLayout:
    if any(table.aliases != tables[0].aliases for table in tables):
        raise TrainerError(f"{directory}: the ranks' tables do not agree which names are the same tensor")
    slices = [table.slices(number) for number, table in enumerate(tables)]
    return FileLayout(*join_slices(config.parameters, slices, tables[0].aliases))


def _segment(name: str, table: _RankTable) -> Segment:
    """Its bytes lie in memory, at places that the file names."""
    return Segment(kind="file", locator=name, num_bytes=table.num_bytes, arena=0, generation=0)


def _reader(
    seen: tuple[FileIdentity, ...],
    directory: Path,
    tables: Sequence[_RankTable],
    config: SourceConfig,
    files: Sequence[FileIdentity],
) -> DeviceReader:
    """`seen`: the files before the tables were read from them."""

    def check() -> None:
        if not identities_in(directory, [file.name for file in files]) == tuple(files) == seen:
            raise NoPublicationError(f"files in {directory} changed since they were looked at; update again")

    segments = [DeviceSegment(tuple(table.runs.values())) for table in tables]
    if config.rank:
        layout = _layout(directory, tables, config)
        segments[0] = segments[0]._replace(nearer=_twins(layout, config.rank, segments[config.rank]))
    return DeviceReader(segments, check)


def _twins(layout: FileLayout, rank: int, own: DeviceSegment) -> tuple[DeviceRun, ...]:
    """What is not cut is published from rank 0's memory. Rank 0 has seen that the others have the same bytes, so that a
    rank needs no device but its own."""
    tensors = {tensor.name: tensor for tensor in layout.tensors}
    found = []
    for name, part in layout.twins:
        run, tensor = own.run_at(part.offset), tensors[name]
        if part.segment == rank and run is not None:
            place = run.offset + part.offset - run.start
            found.append(DeviceRun(tensor.parts[0].offset, tensor.num_bytes, run.allocation, place))
    return tuple(sorted(found, key=lambda run: run.start))
