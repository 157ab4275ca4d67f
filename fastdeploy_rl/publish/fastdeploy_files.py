"""The files that FastDeploy's `ipc_snapshot` reads, written for trainers and tools.

Owns their names, and that each appears whole or not at all. Refuses to know models: a rank's tensors are written as
they come. Invariant: `version.yaml` and `version.txt` never name a step whose files this process is still writing, if
`write_version` is called last.

Names and formats are those of `_update_ipc_snapshot` in FastDeploy's fastdeploy/rl/dynamic_weight_manager.py: in the
model directory `.pdparams` are safetensors files in spite of their name; only in the shared directory are they what
`paddle.save` writes.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastdeploy_rl.errors import ConfigurationError, TrainerError
from fastdeploy_rl.memory.file_map import FileMap, HeaderEntry, encode_header
from fastdeploy_rl.memory.host_tensor import HostTensor, borrow
from fastdeploy_rl.memory.saved_state import NAME_TABLE, SavedArray, write_saved_state
from fastdeploy_rl.publish.durable_files import PendingFile, storing, write_pending

if TYPE_CHECKING:
    from typing_extensions import Buffer


_ADVICE = "make room there"
STEP_KEY = "step"
"""The key in the metadata of a safetensors header."""
_STEP = re.compile(r"[0-9]{1,19}", re.ASCII)
_RESERVED = frozenset({"__metadata__", NAME_TABLE, "UnpackBigParamInfor@@"})
"""Names that mean something else to who reads the files: safetensors and `paddle.load`."""


def part_name(rank: int, gpu: str | int, part: int) -> str:
    return f"model_state.tp{rank}.{gpu}.part{part}.pdparams"


def file_name(rank: int, gpu: str | int) -> str:
    return f"model_state.tp{rank}.{gpu}.pdparams"


def write_model_state(
    directory: str | Path,
    tensors: Mapping[str, Any],
    *,
    rank: int,
    gpu: str | int,
    num_parts: int = 1,
    step: int | None = None,
) -> list[Path]:
    """Writes a rank's slices (contiguous CPU tensors of Paddle, torch or numpy, BF16 there as uint16) into the model
    directory: one file, or `num_parts` of about the same size, counted from 0. Parts of an earlier, finer split are
    removed, since FastDeploy would read them too. `step`: is written into the files' metadata, which FastDeploy
    does not read; an engine here refuses ranks of two steps by it, and a `version.yaml` that says another.

    Returns the files. TrainerError for a tensor that cannot be taken as it is, NoSpaceError or SegmentError where a
    file cannot be written: then the files before it are new and the others are as they were."""
    state = prepare_model_state(directory, _borrowed(tensors), rank=rank, gpu=gpu, num_parts=num_parts, step=step)
    try:
        return state.finish()
    except BaseException:
        state.discard()
        raise


def model_state_paths(directory: str | Path, rank: int, gpu: str | int, num_parts: int) -> tuple[Path, ...]:
    """The files of a rank that is written in so many parts."""
    names = [part_name(rank, gpu, part) for part in range(num_parts)] if num_parts > 1 else [file_name(rank, gpu)]
    return tuple(Path(directory) / name for name in names)


def said_step(file: FileMap) -> int | None:
    """The step that a file says it is of; None where it says none."""
    said = file.metadata.get(STEP_KEY, "")
    return int(said) if _STEP.fullmatch(said) else None


class PendingModelState(NamedTuple):
    """A rank's files, written beside the places where they go. `pattern`: of the parts that a rank may have there."""

    directory: Path
    files: tuple[PendingFile, ...]
    pattern: str

    def finish(self) -> list[Path]:
        """Puts them in place, and takes away parts of an earlier, finer split."""
        paths = [file.path for file in self.files]
        for file in self.files:
            with storing(file.path, _ADVICE):
                file.finish()
        for surplus in self.directory.glob(self.pattern):
            if surplus not in paths:
                with storing(surplus, _ADVICE):
                    surplus.unlink()
        return paths

    def discard(self) -> None:
        for file in self.files:
            file.discard()


def prepare_model_state(
    directory: str | Path,
    tensors: Mapping[str, HostTensor],
    *,
    rank: int,
    gpu: str | int,
    num_parts: int = 1,
    step: int | None = None,
) -> PendingModelState:
    """As `write_model_state`, up to the moment where the files appear."""
    if not 1 <= num_parts <= max(1, len(tensors)):
        raise ConfigurationError(f"{len(tensors)} tensors cannot be split over {num_parts} files")
    names = [file_name(rank, gpu)] if num_parts == 1 else [part_name(rank, gpu, part) for part in range(num_parts)]
    written: list[PendingFile] = []
    try:
        for name, share in zip(names, _shares(tensors, num_parts), strict=True):
            written.append(_pending(Path(directory) / name, _safetensors(share, step)))
    except BaseException:
        for file in written:
            file.discard()
        raise
    return PendingModelState(Path(directory), tuple(written), part_name(rank, gpu, 0).replace("part0", "part*"))


def write_saved_model_state(directory: str | Path, tensors: Mapping[str, Any], *, rank: int, gpu: str | int) -> Path:
    """As `write_model_state`, what FastDeploy looks for in `/shared_ipc_meta`: the bytes of `paddle.save`."""
    saved = {name: SavedArray(tensor.dtype, tensor.shape, tensor.buffer) for name, tensor in _borrowed(tensors).items()}
    return _write(Path(directory) / file_name(rank, gpu), write_saved_state(saved))


def write_version(directory: str | Path, step: int) -> None:
    """Says which step the files beside are: `step` for FastDeploy's weight manager and `version` for its router in
    `version.yaml`, and the older `version.txt`. Call it last, when the files of all ranks are there."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**63:
        raise ConfigurationError(f"a step is an integer from 0 on, got {step!r:.80}")
    _write(Path(directory) / "version.txt", [f"{step}\n".encode()])
    _write(Path(directory) / "version.yaml", [f"step: {step}\nversion: {step}\n".encode()])


def _shares(tensors: Mapping[str, HostTensor], num_parts: int) -> Iterator[dict[str, HostTensor]]:
    """In order, cut where a part has its share of the bytes; none is empty."""
    names = list(tensors)
    if num_parts == 1:
        yield dict(tensors)
        return
    ends = list(accumulate(tensor.key.num_bytes for tensor in tensors.values()))
    start = 0
    for part in range(num_parts):
        last = len(names) - (num_parts - part - 1)
        stop = start + 1
        while stop < last and (part == num_parts - 1 or ends[stop] * num_parts <= (part + 1) * ends[-1]):
            stop += 1
        yield {name: tensors[name] for name in names[start:stop]}
        start = stop


def _safetensors(tensors: Mapping[str, HostTensor], step: int | None) -> "Iterator[Buffer]":
    entries = [HeaderEntry(name, each.dtype, each.shape, each.key.num_bytes) for name, each in tensors.items()]
    yield encode_header(entries, {} if step is None else {STEP_KEY: str(step)})
    yield from (tensor.buffer for tensor in tensors.values())


def check_names(names: Iterable[str]) -> None:
    """TrainerError for one that no tensor in FastDeploy's files may have."""
    for name in sorted(_RESERVED.intersection(names)):
        raise TrainerError(f"{name!r}: the files' format has another use for that name")


def _borrowed(tensors: Mapping[str, Any]) -> dict[str, HostTensor]:
    check_names(tensors)
    return {name: borrow(tensor, name) for name, tensor in tensors.items()}


def _pending(path: Path, pieces: "Iterable[Buffer]") -> PendingFile:
    """Readable by everybody: FastDeploy need not run as its trainer does."""
    with storing(path, _ADVICE):
        return write_pending(path, pieces, 0o644)


def _write(path: Path, pieces: "Iterable[Buffer]") -> Path:
    pending = _pending(path, pieces)
    try:
        with storing(path, _ADVICE):
            pending.finish()
    except BaseException:
        pending.discard()
        raise
    return path
