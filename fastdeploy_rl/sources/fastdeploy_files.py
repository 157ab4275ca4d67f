"""The snapshots that FastDeploy's trainers write, under FastDeploy's names: each rank's slices in files of its own.

In order of search, in the model directory and then where the channel is (`/shared_ipc_meta`, where that is named):

    model_state.tp{rank}.{gpu}.part{N}.pdparams
    model_state.tp{rank}.{gpu}.pdparams
    model_state.tp0{gpu}.pdparams

Owns these names, and which files together are one snapshot. Refuses to know models. Invariant: what was found is of
one kind and has every rank's files, whose parts are numbered without a gap.

FastDeploy itself (`_update_ipc_snapshot` in fastdeploy/rl/dynamic_weight_manager.py) loads whatever parts it finds, by
ascending number, from any number on; each rank looks alone, so that ranks may end up with different kinds. Nothing says
how many parts there are. Here the numbers must begin at 0 or 1 (both are in use), and no tensor may be in two parts; a
last part that is missing shows, since then a rank, or all of them, lack tensors of the model.

The `.pdparams` of a model directory are safetensors files, those of the shared directory pickles of `paddle.save`;
older releases had pickles in both. Which one a file is, its first bytes say; neither is executed.
"""

import logging
import os
import re
from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from fastdeploy_rl.errors import CheckpointError, ConfigurationError, NoPublicationError, TrainerError
from fastdeploy_rl.memory.file_map import FileMap, StoredTensor
from fastdeploy_rl.memory.regular_file import open_regular
from fastdeploy_rl.memory.saved_state import SIGNATURE_BYTES, SavedTensors, is_saved_state, read_saved_file
from fastdeploy_rl.publish.fastdeploy_files import said_step
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.describing import FileLayout, FoundFiles, identities_in
from fastdeploy_rl.sources.rank_gpus import listed_gpus
from fastdeploy_rl.sources.rank_slices import Slice, join_slices
from fastdeploy_rl.sources.version_file import version_written_ns

_log = logging.getLogger(__name__)

_GPU = r"[0-9A-Za-z-]{1,64}"
_RANK = r"0|[1-9][0-9]{0,3}"
_PART = r"[0-9]{1,6}"
_NAME = re.compile(rf"model_state\.tp(?P<rank>{_RANK})\.(?P<gpu>{_GPU})(\.part(?P<part>{_PART}))?\.pdparams", re.ASCII)
_LEGACY_NAME = re.compile(rf"model_state\.tp0(?P<gpu>{_GPU})\.pdparams", re.ASCII)
_MAX_ENTRIES = 10_000
_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)


class _Kind(IntEnum):
    """Of a snapshot; its place in the order of search."""

    PARTS = 0
    ONE_FILE = 1
    LEGACY = 2


class _Named(NamedTuple):
    """A file by what its name says. `rank` is None in the legacy names, `part` where the file is a rank's only one."""

    rank: int | None
    gpu: str
    part: int | None
    name: str

    @property
    def kind(self) -> _Kind:
        if self.rank is None:
            return _Kind.LEGACY
        return _Kind.ONE_FILE if self.part is None else _Kind.PARTS


def find_fastdeploy(directory: Path, config: SourceConfig) -> FoundFiles | None:
    """The snapshot in that directory for the ranks of this engine; None where no file has such a name.

    NoPublicationError where files of a rank, or parts in between, are missing (a trainer may still write them);
    ConfigurationError where several snapshots are there and CUDA_VISIBLE_DEVICES does not say which one is meant."""
    named = _list(directory)
    if not named:
        return None
    gpus = _visible_gpus(config)
    if gpus is not None:
        named = _on_gpus(directory, named, gpus)
    kind = min(each.kind for each in named)
    of_kind = [each for each in named if each.kind == kind]
    if kind is _Kind.LEGACY:
        ranks = _legacy(directory, of_kind, gpus, config.num_ranks)
    else:
        ranks = [_of_rank(directory, of_kind, rank, gpus) for rank in range(config.num_ranks)]
    names = tuple(name for files in ranks for name in files)
    how = msgspec.json.encode(["fastdeploy", ranks, config.parameters]).decode()
    if kind is _Kind.PARTS:
        _check_not_left_behind(directory, config, names, [each.name for each in named if each.kind is _Kind.ONE_FILE])
    layout, steps = partial(_read_layout, directory, ranks, config), partial(_read_steps, directory, names)
    return FoundFiles(directory, names, layout, how, read_steps=steps)


def _list(directory: Path) -> list[_Named]:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in islice(entries, _MAX_ENTRIES + 1)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be read: {error.strerror}") from error
    if len(names) > _MAX_ENTRIES:
        raise ConfigurationError(
            f"{directory} has more than {_MAX_ENTRIES} entries: which of them are weights is not looked for; give the "
            "weights a directory of their own"
        )
    parsed = [_parsed(name) for name in sorted(names)]
    return [each for each in parsed if each is not None]


def _parsed(name: str) -> _Named | None:
    if match := _NAME.fullmatch(name):
        part = match["part"]
        return _Named(int(match["rank"]), match["gpu"], None if part is None else int(part), name)
    if match := _LEGACY_NAME.fullmatch(name):
        return _Named(None, match["gpu"], None, name)
    if name.startswith("model_state.tp") and ".part" in name:
        _log.warning("event=ignored file=%r reason='not the name of a part of a snapshot'", name)
    return None


def _visible_gpus(config: SourceConfig) -> Sequence[str] | None:
    """The physical device of each rank; None where CUDA_VISIBLE_DEVICES does not list that many."""
    listed = listed_gpus(config.rank, config.num_ranks)
    return None if listed is None else [gpu.name for gpu in listed]


def _on_gpus(directory: Path, named: Sequence[_Named], gpus: Sequence[str]) -> list[_Named]:
    """Without the files of other engines."""
    own = [each for each in named if each.gpu in gpus]
    if not own:
        others = ", ".join(sorted({each.gpu for each in named}))
        raise NoPublicationError(
            f"{directory} has files of GPUs {others}, this engine is on {', '.join(gpus)} (CUDA_VISIBLE_DEVICES)"
        )
    return own


def _of_rank(directory: Path, named: Sequence[_Named], rank: int, gpus: Sequence[str] | None) -> list[str]:
    """A rank's files, in the order of their parts."""
    own = [each for each in named if each.rank == rank]
    gpu = gpus[rank] if gpus is not None else _single_gpu(directory, rank, own)
    files = sorted((each for each in own if each.gpu == gpu), key=lambda each: each.part or 0)
    if not files:
        others = ", ".join(sorted({each.name for each in named})[:8])
        raise NoPublicationError(
            f"{directory}: rank {rank}{'' if gpu is None else f' on GPU {gpu}'} has no file there (yet), but there is "
            f"{others}; each of the ranks needs its own"
        )
    _check_parts(directory, rank, [each.part for each in files if each.part is not None])
    return [each.name for each in files]


def _single_gpu(directory: Path, rank: int, own: Sequence[_Named]) -> str | None:
    found = sorted({each.gpu for each in own})
    if len(found) > 1:
        raise _ambiguous(directory, f"rank {rank} has files of GPUs", found)
    return found[0] if found else None


def _ambiguous(directory: Path, what: str, gpus: Sequence[str]) -> ConfigurationError:
    return ConfigurationError(
        f"{directory}: {what} {', '.join(gpus)}, and nothing says which is meant: set CUDA_VISIBLE_DEVICES to the "
        "devices of this engine's ranks, or remove the files that are not"
    )


def _check_parts(directory: Path, rank: int, parts: Sequence[int]) -> None:
    if not parts:
        return
    if len(set(parts)) != len(parts):
        raise TrainerError(f"{directory}: rank {rank} has a part twice: {', '.join(map(str, parts))}")
    first = min(parts[0], 1)
    missing = sorted(set(range(first, parts[-1] + 1)) - set(parts))
    if missing:
        raise NoPublicationError(
            f"{directory}: of the parts of rank {rank}, {', '.join(map(str, missing[:8]))} missing (yet): there are "
            f"{', '.join(map(str, parts[:8]))}"
        )


def _check_not_left_behind(directory: Path, config: SourceConfig, parts: Sequence[str], others: Sequence[str]) -> None:
    """Parts come first, as FastDeploy has it; a trainer that writes single files from now on has to remove them.
    NoPublicationError where all of them are older than all single files and than the version: they are not that."""
    if not others:
        return
    part = max(identities_in(directory, parts), key=lambda file: file.mtime_ns)
    written = sorted(identities_in(directory, others), key=lambda file: file.mtime_ns)
    said_ns = version_written_ns(directory) or version_written_ns(config.model_dir)
    if part.mtime_ns < min(written[0].mtime_ns, said_ns):
        raise NoPublicationError(
            f"{directory}: all parts, of which FastDeploy reads the weights where there are any ({part.name} is the "
            f"newest), are older than {written[0].name} and than the version: remove the parts, or the single files"
        )
    if part.mtime_ns < written[-1].mtime_ns and not config.rank:
        _log.warning(
            "event=parts_older_than_file parts=%s file=%s reason='the parts are read, as FastDeploy reads them; remove "
            "whichever are not meant'",
            *(directory / part.name, written[-1].name),
        )


def _legacy(directory: Path, named: Sequence[_Named], gpus: Sequence[str] | None, num_ranks: int) -> list[list[str]]:
    """These names tell devices alone: where nothing lists them, rank r has the r-th of exactly as many as ranks."""
    by_gpu = {each.gpu: each.name for each in named}
    if gpus is None:
        gpus = sorted(by_gpu, key=lambda gpu: (len(gpu), gpu))
        if len(gpus) > num_ranks:
            raise _ambiguous(directory, f"{num_ranks} ranks have files of GPUs", gpus)
    missing = [gpu for gpu in gpus if gpu not in by_gpu]
    if missing or len(gpus) < num_ranks:
        lacking = f"GPUs {', '.join(missing)}" if missing else f"{num_ranks - len(gpus)} of {num_ranks} ranks"
        raise NoPublicationError(
            f"{directory}: there is {', '.join(sorted(by_gpu.values())[:8])}, but no file of {lacking} (yet)"
        )
    return [[by_gpu[gpu]] for gpu in gpus]


# --- what lies in them ----------------------------------------------------------------------------


def _read_layout(directory: Path, ranks: Sequence[Sequence[str]], config: SourceConfig, deadline_ns: int) -> FileLayout:
    """Reads the headers alone; `ranks`: the files of each."""
    number = 0
    slices: list[dict[str, Slice]] = []
    aliases: list[dict[str, str]] = []
    for files in ranks:
        slices.append({})
        aliases.append({})
        for file in files:
            tensors, further = _contents(directory / file, deadline_ns)
            for name in sorted((tensors.keys() | further.keys()) & (slices[-1].keys() | aliases[-1].keys())):
                raise TrainerError(
                    f"{directory / file}: tensor {name:.600} is in another part too; remove files of other versions"
                )
            slices[-1].update({each.name: _slice(each, number) for each in tensors.values()})
            aliases[-1].update(further)
            number += 1
    if any(each != aliases[0] for each in aliases):
        raise TrainerError(f"{directory}: the ranks' files do not agree which names are the same tensor")
    return FileLayout(*join_slices(config.parameters, slices, aliases[0]))


def _slice(stored: StoredTensor, number: int) -> Slice:
    return Slice(stored.dtype, stored.shape, number, stored.offset)


def _read_steps(directory: Path, names: Sequence[str]) -> dict[str, int | None]:
    return {name: _step_in(directory / name) for name in names}


def _step_in(path: Path) -> int | None:
    """What a trainer, or our writer, put into the header. Pickles have no place for it."""
    if _is_pickle(path):
        return None
    with FileMap.open(path) as file:
        return said_step(file)


def _is_pickle(path: Path) -> bool:
    try:
        with open(open_regular(path), "rb") as file:
            return is_saved_state(file.read(SIGNATURE_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def _contents(path: Path, deadline_ns: int) -> SavedTensors:
    """A file's tensors, and further names of the same. CheckpointError for what is neither format."""
    if _is_pickle(path):
        return read_saved_file(path, deadline_ns)
    with FileMap.open(path) as file:
        return SavedTensors(file.tensors, {})
