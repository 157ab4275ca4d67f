"""A Hugging Face checkpoint directory as a version of the weights.

Owns what its tensors are to the engine: whole ones, linear weights [out, in], in the dtype they are stored in. Refuses
to know which files belong to it (memory/checkpoint_files.py), when such a directory counts, and who reads the bytes.
"""

from collections.abc import Iterator
from pathlib import Path

from fastdeploy_rl.manifest import Part, Tensor
from fastdeploy_rl.memory.checkpoint_files import UNUSED_SUFFIX, CheckpointFiles, find_checkpoint_files
from fastdeploy_rl.memory.file_map import FileMap
from fastdeploy_rl.plan.conventions import hugging_face
from fastdeploy_rl.sources.describing import FileLayout, FoundFiles
from fastdeploy_rl.sources.rank_slices import UNSUMMED


def find_hugging_face(directory: Path) -> FoundFiles | None:
    """The checkpoint in that directory; None where there is none. CheckpointError for an index that cannot be
    followed."""
    files = find_checkpoint_files(directory)
    if files is None:
        return None
    return FoundFiles(directory, files.names, lambda _: _read_layout(files), "hugging_face")


def _read_layout(files: CheckpointFiles) -> FileLayout:
    tensors: list[Tensor] = []
    for number, name in enumerate(files.names):
        with files.open(name) as file:
            tensors += _tensors(file, number)
    return FileLayout("full", tensors)


def _tensors(file: FileMap, number: int) -> Iterator[Tensor]:
    for stored in file.tensors.values():
        if not stored.name.endswith(UNUSED_SUFFIX):
            is_transposed = hugging_face(stored.name, stored.shape).is_transposed
            part = Part(number, stored.offset, 0, 0)
            yield Tensor(stored.name, stored.dtype, stored.shape, None, (part,), UNSUMMED, is_transposed)
