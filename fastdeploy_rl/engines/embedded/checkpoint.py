"""Hugging Face checkpoints, in one file or in shards: read into engine layout, slice by slice, and written back.

Owns the translation between the two layouts (Hugging Face keeps linear weights as [out, in], the engine as [in, out])
and the check that a checkpoint holds exactly the model its config.json describes. Knows nothing of Paddle or of other
ranks. Invariant: an open `Checkpoint` has every tensor of the model in its right shape; every value handed out is
float32, exact for F32, BF16 and F16 sources.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from fastdeploy_rl import _native
from fastdeploy_rl.coverage import Coverage, ParameterSpec
from fastdeploy_rl.engines.embedded.model_config import (
    EMBEDDING,
    HEAD,
    ModelConfig,
    parameter_specs,
    read_config,
)
from fastdeploy_rl.errors import CheckpointError
from fastdeploy_rl.manifest import aligned
from fastdeploy_rl.memory.checkpoint_files import (
    INDEX_FILE,
    UNUSED_SUFFIX,
    WEIGHTS_FILE,
    CheckpointFiles,
    find_checkpoint_files,
)
from fastdeploy_rl.memory.file_map import FileMap, HeaderEntry, encode_header
from fastdeploy_rl.memory.tensor_view import TensorView

_log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]

SOURCE_DTYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class Checkpoint:
    """A directory of weights, mapped and checked. A context manager;
    views and arrays taken from it stay valid after `close`."""

    directory: Path
    config: ModelConfig
    specs: tuple[ParameterSpec, ...]
    files: Mapping[str, FileMap]

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """ConfigurationError: no such directory, or a model this
        engine cannot run. CheckpointError: names file and tensor."""
        config = read_config(directory)
        checkpoint = cls(directory, config, parameter_specs(config), _map_files(directory))
        checkpoint._check_tensors()
        return checkpoint

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def tensors(self) -> Iterator[tuple[str, Floats]]:
        """Every tensor whole, in engine layout, one fresh float32 array at a time; a tied head is left out."""
        self._check_tied_head(0, 1)
        for spec in self._stored_specs(1):
            yield spec.name, np.array(self._slice(spec, 0, 1), dtype=np.float32, order="C")

    def load(self, rank: int, num_ranks: int) -> dict[str, TensorView]:
        """This rank's slices in one fresh arena of private memory; reads only what lies in them. A tied head is left
        out; rows by which the vocabulary is padded are zero. ConfigurationError where the model does not split over
        `num_ranks`."""
        self.config.check_divides(num_ranks)
        self._check_tied_head(rank, num_ranks)
        specs = list(self._stored_specs(num_ranks))
        views = _place({spec.name: spec.local_shape(num_ranks) for spec in specs})
        for spec in specs:
            target, source = views[spec.name].numpy(), self._slice(spec, rank, num_ranks)
            target[: len(source)] = source
            target[len(source) :] = 0
        return views

    def _stored_specs(self, num_ranks: int) -> Iterator[ParameterSpec]:
        return (spec for spec in parameter_specs(self.config, num_ranks) if spec.coverage is Coverage.UPDATED)

    def _slice(self, spec: ParameterSpec, rank: int, num_ranks: int) -> npt.NDArray[np.generic]:
        """In engine layout, without padding; a strided view of the mapped file unless it had to be widened."""
        whole = self._stored(spec.name)
        whole = whole.T if _is_linear(spec) else whole
        if spec.shard_axis is None:
            return _widen(whole)
        size = spec.shape[spec.shard_axis] // num_ranks
        own = slice(rank * size, (rank + 1) * size)
        return _widen(whole[own] if spec.shard_axis == 0 else whole[:, own])

    def _stored(self, name: str) -> npt.NDArray[np.generic]:
        return self.files[name].view(name).numpy()

    def _check_tensors(self) -> None:
        expected = {spec.name: spec for spec in self.specs}
        missing = [spec.name for spec in self._stored_specs(1) if spec.name not in self.files]
        surplus = [name for name in self.files if name not in expected and not name.endswith(UNUSED_SUFFIX)]
        if missing or surplus:
            raise CheckpointError(
                f"{self.directory}: not the tensors of the model in config.json: "
                f"missing {_listed(missing)}; surplus {_listed(surplus)}"
            )
        for name in expected.keys() & self.files.keys():
            self._check_tensor(expected[name])

    def _check_tensor(self, spec: ParameterSpec) -> None:
        file = self.files[spec.name]
        stored = file.tensors[spec.name]
        shape = spec.shape[::-1] if _is_linear(spec) else spec.shape
        if stored.shape != shape:
            raise CheckpointError(
                f"{file.path}: tensor {spec.name}: expected shape {list(shape)}, got {list(stored.shape)}"
            )
        if stored.dtype not in SOURCE_DTYPES:
            raise CheckpointError(
                f"{file.path}: tensor {spec.name}: expected dtype {' or '.join(SOURCE_DTYPES)}, got {stored.dtype}"
            )

    def _check_tied_head(self, rank: int, num_ranks: int) -> None:
        """A head that is there although it is tied: this rank's rows must be the embedding's."""
        if HEAD not in self.files or not self.config.tie_word_embeddings:
            return
        embedding = next(iter(parameter_specs(self.config, num_ranks)))
        head = replace(embedding, name=HEAD)
        if not np.array_equal(self._slice(head, rank, num_ranks), self._slice(embedding, rank, num_ranks)):
            raise CheckpointError(
                f"{self.files[HEAD].path}: tensor {HEAD} differs from {EMBEDDING}, "
                f"but config.json ties them (tie_word_embeddings)"
            )


def save_checkpoint(directory: Path, config: Mapping[str, object], tensors: Mapping[str, Floats]) -> None:
    """Writes a Hugging Face directory: `config` as config.json,
    `tensors` (whole, engine layout, float32) as model.safetensors.

    Equal input gives equal bytes. The weights appear under their name only when complete; config.json last.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stored = {
        name: value.T if value.ndim == 2 and name not in (EMBEDDING, HEAD) else value
        for name, value in sorted(tensors.items())
    }
    entries = [HeaderEntry(name, "F32", value.shape, value.nbytes) for name, value in stored.items()]
    unfinished = directory / f".{WEIGHTS_FILE}.{os.getpid()}"
    with unfinished.open("wb") as file:
        file.write(encode_header(entries, {"format": "pt"}))
        for value in stored.values():
            file.write(np.ascontiguousarray(value, dtype="<f4").data)
    unfinished.rename(directory / WEIGHTS_FILE)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _is_linear(spec: ParameterSpec) -> bool:
    return len(spec.shape) == 2 and spec.name not in (EMBEDDING, HEAD)


def _widen(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """BF16 arrives as uint16 holding the upper half of a float32; numpy widens the others by itself."""
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values


def _place(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorView]:
    """Views without content one after another in a new private mapping."""
    sizes = [aligned(4 * prod(shape)) for shape in shapes.values()]
    arena = _native.Mapping.private(sum(sizes))
    offsets = accumulate(sizes, initial=0)
    return {
        name: TensorView(arena, offset, "F32", shape)
        for (name, shape), offset in zip(shapes.items(), offsets, strict=False)
    }


def _map_files(directory: Path) -> dict[str, FileMap]:
    """Tensor name -> the file that has it, by the index where there is one."""
    found = find_checkpoint_files(directory)
    if found is None:
        raise CheckpointError(f"{directory / WEIGHTS_FILE}: No such file, and no {INDEX_FILE}; get the checkpoint")
    if found.index:
        _tell_of_other_files(found)
    files = [found.open(name) for name in found.names]
    return {name: file for file in files for name in file.tensors}


def _tell_of_other_files(files: CheckpointFiles) -> None:
    """Weights beside those of the index are said and not read."""
    unused = sorted(path.name for path in files.directory.glob("*.safetensors") if path.name not in files.names)
    if unused:
        _log.warning("fault=unused_weights directory=%s files=%s", files.directory, _listed(unused))


def _listed(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(sorted(names)[:limit]) or "none") + more
