"""A Hugging Face checkpoint directory as a version of the weights: `model.safetensors`, or an index and its shards.

Owns which files belong to it and what their tensors are to the engine: whole ones, linear weights [out, in], in the
dtype they are stored in. Refuses to know when such a directory counts and who reads the bytes. Invariant: a layout that
comes out names every tensor of the index, each in the shard that the index says.
"""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from fastdeploy_rl.errors import CheckpointError
from fastdeploy_rl.manifest import Part, Tensor
from fastdeploy_rl.memory.file_map import FileMap
from fastdeploy_rl.memory.regular_file import read_regular
from fastdeploy_rl.plan.conventions import hugging_face
from fastdeploy_rl.sources.described import FileLayout, FoundFiles
from fastdeploy_rl.sources.rank_slices import UNSUMMED

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20
_UNUSED_SUFFIX = ".rotary_emb.inv_freq"
"""Old checkpoints have these buffers; every engine computes them."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def find_hugging_face(directory: Path) -> FoundFiles | None:
    """The checkpoint in that directory; None where there is none. CheckpointError for an index that cannot be
    followed."""
    if not os.path.exists(directory / INDEX_FILE):
        if not os.path.exists(directory / WEIGHTS_FILE):
            return None
        return _found(directory, (WEIGHTS_FILE,), {})
    shards = _shards(directory / INDEX_FILE)
    names = tuple(sorted(set(shards.values())))
    if WEIGHTS_FILE not in names and os.path.exists(directory / WEIGHTS_FILE):
        raise CheckpointError(
            f"{directory}: {WEIGHTS_FILE} and {INDEX_FILE} are both here, and the index does not name the file; "
            "remove the one that is not meant"
        )
    return _found(directory, names, shards)


def _found(directory: Path, names: tuple[str, ...], shards: dict[str, str]) -> FoundFiles:
    return FoundFiles(directory, names, partial(_read_layout, directory, names, shards), "hugging_face")


def _shards(index: Path) -> dict[str, str]:
    """Tensor name -> the file that has it."""
    try:
        data = read_regular(index, _MAX_INDEX_BYTES)
    except OSError as error:
        raise CheckpointError(f"{index}: {error.strerror}") from error
    try:
        shards = msgspec.json.decode(data, type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{index}: no index of a checkpoint: {error!s:.500}") from error
    for name, shard in shards.items():
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: weight_map: {name:.600}: expected the name of a .safetensors file in this directory, "
                f"got {shard!r:.200}"
            )
    if not shards:
        raise CheckpointError(f"{index}: weight_map names no tensor")
    return shards


def _read_layout(directory: Path, names: Sequence[str], shards: dict[str, str]) -> FileLayout:
    """`shards`: the index; empty for a checkpoint of one file."""
    tensors: list[Tensor] = []
    for number, name in enumerate(names):
        with FileMap.open(directory / name) as file:
            if shards:
                _check_shard(file, {tensor for tensor, shard in shards.items() if shard == name}, shards)
            tensors += _tensors(file, number)
    return FileLayout("full", tensors)


def _check_shard(file: FileMap, expected: set[str], shards: dict[str, str]) -> None:
    """The tensors that the index places here and no other: which of two would count, nobody could say."""
    for name in sorted(expected - file.tensors.keys()):
        raise CheckpointError(f"{file.path}: tensor {name:.600} is missing, {INDEX_FILE} says that it is here")
    for name in sorted(file.tensors.keys() - expected):
        where = f"says that it is in {shards[name]}" if name in shards else "does not name it"
        raise CheckpointError(
            f"{file.path}: tensor {name:.600} is here, but {INDEX_FILE} {where}; files of two checkpoints are mixed"
        )


def _tensors(file: FileMap, number: int) -> Iterator[Tensor]:
    for stored in file.tensors.values():
        if not stored.name.endswith(_UNUSED_SUFFIX):
            is_transposed = hugging_face(stored.name, stored.shape).is_transposed
            part = Part(number, stored.offset, 0, 0)
            yield Tensor(stored.name, stored.dtype, stored.shape, None, (part,), UNSUMMED, is_transposed)
