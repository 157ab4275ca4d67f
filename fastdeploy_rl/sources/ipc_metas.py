"""Load strategy `ipc` with a trainer that knows FastDeploy only: `ipc_metas_{gpu}` says where its CUDA tensors lie.

Owns which of these files belong to the ranks of an engine, and how their rows stand to whole tensors. Refuses to know
CUDA calls (transport/device_memory.py). Invariant: bytes are copied while an update is staged, and summed up against
what rank 0 read before, so that whatever the trainer writes afterwards shows nowhere.

The trainer changes its tensors where they lie and leaves the file as it is, so that the file's identity tells nothing
of the bytes: whoever asks for the newest version has all of them read by rank 0, which needs every rank's device for
that, and for as long as it takes. A version is what `version.yaml` says, beside the files or in the model directory;
without one, other bytes have the next number. Tested on testing.fake_cuda; not run on a GPU.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from fastdeploy_rl.errors import ConfigurationError, CudaUnavailableError, NoPublicationError, TrainerError
from fastdeploy_rl.manifest import Segment, aligned
from fastdeploy_rl.memory.cuda_devices import visible_devices
from fastdeploy_rl.memory.ipc_metas import IpcMeta, read_ipc_metas, read_ipc_metas_bytes
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.described import DescribedSource
from fastdeploy_rl.sources.describing import FileLayout, FoundFiles, FoundMemory, identities_in
from fastdeploy_rl.sources.rank_gpus import RankGpu, rank_gpus
from fastdeploy_rl.sources.rank_slices import Slice, join_slices
from fastdeploy_rl.sources.version_file import UNCOUNTED_EPOCH
from fastdeploy_rl.transport.device_memory import DeviceBlock, DeviceReader, DeviceSegment
from fastdeploy_rl.transport.files import FileIdentity
from fastdeploy_rl.version import WeightVersion

_PREFIX = "ipc_metas_"


def metas_name(gpu: str | int) -> str:
    """Of the file for the tensors on one device."""
    return f"{_PREFIX}{gpu}"


class IpcMetasSource(DescribedSource):
    """One engine rank as a reader of those files in `metas_dir` of the config. Opens nothing before it is used."""

    def __init__(self, config: SourceConfig, metas_dir: Path) -> None:
        super().__init__(config, partial(find_ipc_metas, metas_dir, config), f"{metas_dir} (no {metas_name('GPU')})")

    def current_epoch(self, *, deadline_ns: int) -> int:
        """Nobody counts epochs. NoPublicationError where there are no files."""
        self._files.stated_version()
        return UNCOUNTED_EPOCH

    def newest_version(self, *, deadline_ns: int) -> WeightVersion | None:
        """What `version.yaml` says; without one it cannot be said without reading all bytes."""
        return self._files.stated_version()


def find_ipc_metas(directory: Path, config: SourceConfig) -> FoundFiles | None:
    """The files of the engine's ranks; None where there is none at all. NoPublicationError where some ranks' are
    missing; CheckpointError for a file that is no such table; ConfigurationError where CUDA_VISIBLE_DEVICES does not
    list every rank's device."""
    there = _listed(directory)
    if not there:
        return None
    gpus = rank_gpus(config.rank, config.num_ranks)
    names = tuple(_name_of(directory, gpu, there) for gpu in gpus)
    data = [read_ipc_metas_bytes(directory / name) for name in names]
    tables = [
        _RankTable.of(read_ipc_metas(each, str(directory / name))) for each, name in zip(data, names, strict=True)
    ]
    how = ["ipc_metas", [hashlib.sha256(each).hexdigest() for each in data], config.parameters]
    device_segments = [_device_segment(gpu, name, table) for gpu, name, table in zip(gpus, names, tables, strict=True)]
    return FoundFiles(
        directory,
        names,
        partial(_layout, directory, tables, config),
        msgspec.json.encode(how).decode(),
        FoundMemory(tuple(map(_segment, names, tables)), partial(_reader, directory, device_segments)),
    )


def _listed(directory: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if name.startswith(_PREFIX) and name != _PREFIX)
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
        devices = visible_devices()
    except CudaUnavailableError:
        return None  # a rank that has a file gets to hear of it when that is opened
    return devices[gpu.ordinal].uuid if gpu.ordinal < len(devices) else None


# --- what lies where --------------------------------------------------------------------------------


class _RankTable(NamedTuple):
    """A rank's tensors. `blocks`: its allocations as one run of bytes; `aliases`: further names of the same bytes."""

    metas: dict[str, IpcMeta]
    blocks: tuple[DeviceBlock, ...]
    aliases: dict[str, str]

    @classmethod
    def of(cls, metas: dict[str, IpcMeta]) -> "_RankTable":
        first: dict[object, str] = {}
        aliases = {}
        for name, meta in metas.items():
            seen_as = meta.handle, meta.offset, meta.num_bytes, meta.dtype, meta.shape
            if (original := first.setdefault(seen_as, name)) != name and meta.num_bytes:
                aliases[name] = original
        return cls(metas, tuple(_blocks(metas)), aliases)

    @property
    def num_bytes(self) -> int:
        return self.blocks[-1].start + self.blocks[-1].num_bytes if self.blocks else 0

    def slices(self, number: int) -> dict[str, Slice]:
        """In segment `number`."""
        starts = {block.handle: block.start for block in self.blocks}
        return {
            name: Slice(meta.dtype, meta.shape, number, starts[meta.handle] + meta.offset)
            for name, meta in self.metas.items()
            if name not in self.aliases
        }


def _blocks(metas: Mapping[str, IpcMeta]) -> Iterator[DeviceBlock]:
    """With a gap after each, so that no range of bytes reaches from one into the next."""
    extents: dict[bytes, int] = {}
    for meta in metas.values():
        extents[meta.handle] = max(extents.get(meta.handle, 1), meta.offset + meta.num_bytes)
    start = 0
    for handle, num_bytes in extents.items():
        yield DeviceBlock(handle, start, num_bytes)
        start = aligned(start + num_bytes + 1)


def _layout(directory: Path, tables: Sequence[_RankTable], config: SourceConfig) -> FileLayout:
    if any(table.aliases != tables[0].aliases for table in tables):
        raise TrainerError(f"{directory}: the ranks' tables do not agree which names are the same tensor")
    slices = [table.slices(number) for number, table in enumerate(tables)]
    return FileLayout(*join_slices(config.parameters, slices, tables[0].aliases))


def _segment(name: str, table: _RankTable) -> Segment:
    """Its bytes lie in memory, at places that the file names."""
    return Segment(kind="file", locator=name, num_bytes=table.num_bytes, arena=0, generation=0)


def _device_segment(gpu: RankGpu, name: str, table: _RankTable) -> DeviceSegment:
    return DeviceSegment(str(gpu.ordinal), f"{name} (GPU {gpu.name})", table.blocks)


def _reader(directory: Path, segments: Sequence[DeviceSegment], files: Sequence[FileIdentity]) -> DeviceReader:
    def check() -> None:
        if identities_in(directory, [file.name for file in files]) != tuple(files):
            raise NoPublicationError(f"files in {directory} changed since they were looked at; update again")

    return DeviceReader(segments, check)
