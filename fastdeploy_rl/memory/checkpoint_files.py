"""The files of a Hugging Face checkpoint directory that hold its weights: `model.safetensors`, or an index and its
shards.

Owns which files belong to it, and the check that index and shards agree. Refuses to know models. Invariant: a file that
was opened here has the tensors that the index places there and no other, so that every tensor is in one file.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fastdeploy_rl.errors import CheckpointError
from fastdeploy_rl.memory.file_map import FileMap
from fastdeploy_rl.memory.regular_file import read_regular

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
UNUSED_SUFFIX = ".rotary_emb.inv_freq"
"""Of buffers that old checkpoints have; every engine computes them."""
_MAX_INDEX_BYTES = 64 << 20


@dataclass(frozen=True)
class CheckpointFiles:
    """`names`: in `directory`, sorted. `index`: tensor name -> the file that has it; empty where there is none."""

    directory: Path
    names: tuple[str, ...]
    index: Mapping[str, str]

    def open(self, name: str) -> FileMap:
        """One of `names`. CheckpointError where it is missing, or has other tensors than the index says: which of two
        would count, nobody could say."""
        path = self.directory / name
        if self.index and not path.exists():
            raise CheckpointError(
                f"{path}: No such file, but {INDEX_FILE} names it; the checkpoint is incomplete, get it again"
            )
        file = FileMap.open(path)
        if self.index:
            self._check(file)
        return file

    def _check(self, file: FileMap) -> None:
        expected = {tensor for tensor, shard in self.index.items() if shard == file.path.name}
        for name in sorted(expected - file.tensors.keys()):
            raise CheckpointError(f"{file.path}: tensor {name:.600} is missing, {INDEX_FILE} says that it is here")
        for name in sorted(file.tensors.keys() - expected):
            where = f"says that it is in {self.index[name]}" if name in self.index else "does not name it"
            raise CheckpointError(
                f"{file.path}: tensor {name:.600} is here, but {INDEX_FILE} {where}; files of two checkpoints are mixed"
            )


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def find_checkpoint_files(directory: Path) -> CheckpointFiles | None:
    """Those of the directory; None where there are none. CheckpointError for an index that cannot be followed, or that
    is not all there is."""
    has_weights = os.path.lexists(directory / WEIGHTS_FILE)
    if not os.path.lexists(directory / INDEX_FILE):  # a link that leads nowhere is one that cannot be followed
        return CheckpointFiles(directory, (WEIGHTS_FILE,), {}) if has_weights else None
    index = _read_index(directory / INDEX_FILE)
    names = tuple(sorted(set(index.values())))
    if has_weights and WEIGHTS_FILE not in names:
        raise CheckpointError(
            f"{directory}: {WEIGHTS_FILE} and {INDEX_FILE} are both here, and the index does not name the file; "
            "remove the one that is not meant"
        )
    return CheckpointFiles(directory, names, index)


def _read_index(path: Path) -> dict[str, str]:
    try:
        data = read_regular(path, _MAX_INDEX_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    try:
        index = msgspec.json.decode(data, type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: no index of a checkpoint: {error!s:.500}") from error
    for name, shard in index.items():
        if Path(shard).name != shard or "\0" in shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: weight_map: {name:.600}: expected the name of a .safetensors file in this directory, "
                f"got {shard!r:.200}"
            )
    if not index:
        raise CheckpointError(f"{path}: weight_map names no tensor")
    return index
