"""A publication as stock FastDeploy reads it, beside our own: `publish(..., compat="fastdeploy", fastdeploy=...)`.

Owns which files a publication has there, and that they appear together with it: they are written before it is
announced, put in place after it, and `version.yaml` when all are there. Refuses to know formats
(`fastdeploy_files`, `memory.ipc_metas`). Invariant: where a version is not announced, the files are those of the one
before; nothing unfinished is left; device tensors that a file names stay alive until the next publication or the
publisher's end.

One process has whole tensors in CPU memory and writes the slices of every rank; or, with `part=(rank, count)`, each
process has what its rank has, in CPU or in CUDA memory, and writes its own file. Part 0 waits for the files of the
others before it says the version; where they do not come, the version files are as they were.
"""

import logging
import os
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastdeploy_rl.config import cuda_visible_devices
from fastdeploy_rl.dtypes import numpy_dtype
from fastdeploy_rl.errors import CheckpointError, ConfigurationError, DeadlineExceededError, TrainerError
from fastdeploy_rl.manifest import layout_ranks
from fastdeploy_rl.memory.cuda_handles import CudaHandles
from fastdeploy_rl.memory.file_map import FileMap
from fastdeploy_rl.memory.host_tensor import HostTensor, borrow
from fastdeploy_rl.memory.ipc_metas import metas_name, read_ipc_metas, write_ipc_metas
from fastdeploy_rl.plan import namespaces
from fastdeploy_rl.publish.arrangement import ArrangedTensor, Arrangement
from fastdeploy_rl.publish.durable_files import PendingFile, storing, write_pending
from fastdeploy_rl.publish.fastdeploy_files import (
    PendingModelState,
    check_names,
    model_state_paths,
    prepare_model_state,
    said_step,
    write_version,
)
from fastdeploy_rl.publish.meeting import Part

_log = logging.getLogger(__name__)

FASTDEPLOY = "fastdeploy"
"""What `compat` may be."""
SHARED_DIR = Path("/shared_ipc_meta")
_DLPACK_CUDA = 2
_ADVICE = "make room there"
_MAX_NAMED = 5
_LOOK_S = 0.02
"""Between looks for the other parts' files."""


@dataclass(frozen=True)
class FastDeployFiles:
    """Where stock FastDeploy looks, and what it calls the devices of its ranks.

    `model_dir`: its `--model`, for `model_state.tp{rank}.{gpu}.pdparams`, `version.yaml` and `version.txt`. `gpus`: the
    physical device of each tensor-parallel rank, as the engine's CUDA_VISIBLE_DEVICES lists it (stock FastDeploy knows
    indices only); empty: as this process's does, else 0, 1, ... `num_parts`: files of a rank, which FastDeploy loads
    one at a time. `metas_dir`: for `ipc_metas_{gpu}`, of tensors in CUDA memory; it has to exist."""

    model_dir: str | Path
    gpus: Sequence[str | int] = ()
    num_parts: int = 1
    metas_dir: str | Path = SHARED_DIR

    def rank_gpus(self, num_ranks: int) -> tuple[str, ...]:
        """One for each rank. ConfigurationError for another number than that, or what no file can be called."""
        given = [str(gpu).strip() for gpu in self.gpus]
        if not given:
            listed = [entry.strip() for entry in (cuda_visible_devices() or "").split(",") if entry.strip()]
            given = listed[:num_ranks] if len(listed) >= num_ranks else list(map(str, range(num_ranks)))
        if len(given) != num_ranks or len(set(given)) != num_ranks:
            raise ConfigurationError(f"{num_ranks} ranks need a device each, got gpus={self.gpus!r:.200}")
        for gpu in given:
            if not gpu or not gpu.replace("-", "").isalnum() or not gpu.isascii():
                raise ConfigurationError(f"gpus: no device is called {gpu!r:.80}")
        return tuple(given)


def check_compat(compat: str | None, files: FastDeployFiles | None) -> None:
    """ConfigurationError unless both are given, or neither."""
    if compat not in (None, FASTDEPLOY):
        raise ConfigurationError(f"compat must be None or {FASTDEPLOY!r}, got {compat!r:.80}")
    if (compat is None) != (files is None):
        raise ConfigurationError(f"compat={FASTDEPLOY!r} and fastdeploy=FastDeployFiles(...) go together")


def is_on_cuda(tensor: Any) -> bool:
    """Asked without an export, which would make the device wait."""
    if isinstance(tensor, np.ndarray) or not hasattr(tensor, "__dlpack_device__"):
        return False
    with suppress(ValueError, BufferError, RuntimeError):
        kind, _ = tensor.__dlpack_device__()
        return int(kind) == _DLPACK_CUDA
    return False


class CompatState(NamedTuple):
    """A state dict for both readers: `hosts` is what our own publication is made of, `handles` has what of it lies in
    CUDA memory (None: nothing)."""

    hosts: dict[str, HostTensor]
    handles: CudaHandles | None

    @classmethod
    def of(cls, state_dict: Mapping[str, Any]) -> "CompatState":
        """CUDA tensors are copied to host memory. TrainerError where only some of them are CUDA tensors: FastDeploy
        reads a rank's tensors from one place."""
        on_cuda = {name: tensor for name, tensor in state_dict.items() if is_on_cuda(tensor)}
        if not on_cuda:
            return cls({name: borrow(tensor, name) for name, tensor in state_dict.items()}, None)
        for name in state_dict:
            if name not in on_cuda:
                raise TrainerError(
                    f"{name!r:.600} is not in CUDA memory, others are: FastDeploy reads a rank's tensors from one place"
                )
        handles = CudaHandles(on_cuda)
        return cls({name: _copied(handles, name) for name in on_cuda}, handles)


def _copied(handles: CudaHandles, name: str) -> HostTensor:
    tensor = handles.tensor(name)
    copy = np.frombuffer(handles.read(name), numpy_dtype(tensor.dtype)).reshape(tensor.shape)
    return replace(borrow(copy, name), dtype=tensor.dtype)  # numpy has one dtype for several


class PendingCompat(NamedTuple):
    """The files of a publication that is not announced yet. `others`: for part 0, what the other parts have to put in
    place, by part."""

    files: FastDeployFiles
    states: tuple[PendingModelState, ...]
    metas: PendingFile | None
    handles: CudaHandles | None
    others: "dict[int, _Awaited]"

    def discard(self) -> None:
        """Removes what is not in place yet."""
        for state in self.states:
            state.discard()
        if self.metas is not None:
            self.metas.discard()


class _Awaited(NamedTuple):
    """Another part's files. `identities`: of those that say no step, before; None: they say theirs."""

    paths: tuple[Path, ...]
    identities: tuple[tuple[int, int], ...] | None

    def are_there(self, step: int) -> bool:
        if self.identities is not None:
            return all(now != before for now, before in zip(map(_identity, self.paths), self.identities, strict=True))
        return all(_step_of(path) == step for path in self.paths)


def _step_of(path: Path) -> int | None:
    """None also where there is no file, or one that FastDeploy wrote otherwise."""
    with suppress(CheckpointError), FileMap.open(path) as file:
        return said_step(file)
    return None


def _identity(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns


class CompatPublisher:
    """What one publisher keeps for stock readers between publications."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._handles: CudaHandles | None = None
        self._metas: tuple[Path, int] | None = None

    def prepare(
        self,
        arrangement: Arrangement,
        state: CompatState,
        files: FastDeployFiles,
        step: int,
        *,
        is_cut_as_told: bool = True,
    ) -> PendingCompat:
        """Writes the files beside their places. `is_cut_as_told`: the trainer said how its tensors are cut; else what
        is not known by its name is not taken for whole. ConfigurationError where a layout, a convention or the parts do
        not fit to what FastDeploy reads; NoSpaceError, SegmentError, CudaError. Then nothing is left."""
        _check_as_engine_has_them(arrangement)
        check_names(_flat_names(arrangement))
        ranks = self._ranks(arrangement, state)
        if len(ranks) > 1 and not is_cut_as_told:
            _check_known(arrangement)
        gpus = files.rank_gpus(self._part.count if self._part.count > 1 else len(ranks))
        if state.handles is not None:
            return self._prepare_metas(arrangement, state.handles, files, gpus)
        return self._prepare_files(arrangement, ranks, files, gpus, step)

    def _ranks(self, arrangement: Arrangement, state: CompatState) -> list[int | None]:
        """Which ranks' slices this process writes; None: everything it has."""
        num_cut = layout_ranks(arrangement.layout)
        if self._part.count > 1 or num_cut <= 1:
            return [None]
        if state.handles is not None:
            raise ConfigurationError(
                f"layout {arrangement.layout}: CUDA tensors are published by one process for each rank, "
                "WeightPublisher(part=(rank, count)), on that rank's device"
            )
        return list(range(num_cut))

    def _prepare_files(
        self,
        arrangement: Arrangement,
        ranks: Sequence[int | None],
        files: FastDeployFiles,
        gpus: Sequence[str],
        step: int,
    ) -> PendingCompat:
        names, states = _flat_names(arrangement), []
        with ExitStack() as undo:
            for rank in ranks:
                number = self._part.index if rank is None else rank
                tensors = _flat(arrangement, names, rank)
                state = prepare_model_state(
                    files.model_dir, tensors, rank=number, gpu=gpus[number], num_parts=files.num_parts, step=step
                )
                undo.callback(state.discard)
                states.append(state)
            undo.pop_all()
        return PendingCompat(files, tuple(states), None, None, self._others(files, gpus, is_on_device=False))

    def _others(self, files: FastDeployFiles, gpus: Sequence[str], *, is_on_device: bool) -> dict[int, _Awaited]:
        others = range(1, self._part.count) if self._part.index == 0 else ()
        if not is_on_device:
            return {
                part: _Awaited(model_state_paths(files.model_dir, part, gpus[part], files.num_parts), None)
                for part in others
            }
        paths = {part: (Path(files.metas_dir) / metas_name(gpus[part]),) for part in others}
        return {part: _Awaited(path, tuple(map(_identity, path))) for part, path in paths.items()}

    def _prepare_metas(
        self, arrangement: Arrangement, handles: CudaHandles, files: FastDeployFiles, gpus: Sequence[str]
    ) -> PendingCompat:
        metas = handles.metas()
        names = _flat_names(arrangement)
        path = Path(files.metas_dir) / metas_name(gpus[self._part.index])
        with storing(path, _ADVICE):
            group = _group_of(path.parent)
            rows = {flat: metas[trainer_name] for flat, trainer_name in names.items()}
            table = b"".join(write_ipc_metas(rows))
            read_ipc_metas(table, f"what would be {path}")  # within every bound of ours
            pending = write_pending(path, [table], 0o600, group)
        return PendingCompat(files, (), pending, handles, self._others(files, gpus, is_on_device=True))

    def finish(self, pending: PendingCompat, step: int, deadline_ns: int) -> None:
        """Puts the files in place, and says the version last. NoSpaceError, SegmentError: some are in place and the
        version is not said; the publication itself stands. So with DeadlineExceededError, which names the parts whose
        files did not come."""
        try:
            for state in pending.states:
                state.finish()
            if pending.metas is not None:
                self._put_metas(pending.metas, pending.handles)
        except BaseException:
            pending.discard()
            raise
        if self._part.index == 0:
            _await(pending.others, step, deadline_ns)
            write_version(pending.files.model_dir, step)

    def _put_metas(self, metas: PendingFile, handles: CudaHandles | None) -> None:
        """Once nothing names them any more, the tensors of the publication before are let go."""
        former, self._handles = self._handles, handles  # before any name of the new ones can be read
        with storing(metas.path, _ADVICE):
            metas.finish()
            self._take_away(unless=metas.path)
            self._metas = metas.path, os.stat(metas.path).st_ino
        if former is not None:
            former.release()

    def _take_away(self, unless: Path | None = None) -> None:
        """The file that names the tensors of the publication before, if it is still that one."""
        if self._metas is None or self._metas[0] == unless:
            return
        path, inode = self._metas
        try:
            if os.stat(path).st_ino == inode:
                path.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            _log.warning("event=metas_stay file=%s reason=%s", path, error.strerror)

    def close(self) -> None:
        """Lets device tensors go, and takes away the file that names them: nobody else keeps that memory."""
        self._take_away()
        self._metas = None
        handles, self._handles = self._handles, None
        if handles is not None:
            handles.release()


def _await(others: Mapping[int, _Awaited], step: int, deadline_ns: int) -> None:
    begun = time.monotonic()
    while missing := [part for part, awaited in others.items() if not awaited.are_there(step)]:
        if time.monotonic_ns() >= deadline_ns:
            raise DeadlineExceededError.waiting_for(
                f"file for FastDeploy of parts {missing}, of step {step}",
                since_s=begun,
                hint="it is published, and the version files are as they were: publish the next step on all parts, "
                "with the same compat, gpus and num_parts",
            )
        time.sleep(_LOOK_S)


def _check_as_engine_has_them(arrangement: Arrangement) -> None:
    for tensor in arrangement.tensors:
        if tensor.rule.is_transposed or tensor.rule.fused is not None:
            raise ConfigurationError(
                f"{tensor.trainer_name!r:.600} is turned or divided on its way to the engine, which stock FastDeploy "
                "does not do: compat publishes tensors as the engine has them"
            )


def _check_known(arrangement: Arrangement) -> None:
    """FastDeploy's ranks would each get all of a matrix that they hold a share of."""
    whole = [tensor.trainer_name for tensor in arrangement.tensors if _is_whole_matrix(tensor)]
    if whole:
        named = ", ".join(map(repr, whole[:_MAX_NAMED]))
        more = f" and {len(whole) - _MAX_NAMED} more" if len(whole) > _MAX_NAMED else ""
        raise ConfigurationError(
            f"{named:.2000}{more}: not known by name how FastDeploy's ranks share them; say it (convention=), or "
            "publish from one process for each rank, each with what its rank has (WeightPublisher(part=), shards=)"
        )


def _is_whole_matrix(tensor: ArrangedTensor) -> bool:
    return tensor.shard_axis is None and len(tensor.host.shape) > 1


def _group_of(directory: Path) -> int | None:
    """The directory's, where it is open to it, and ours too. OSError where there is no such directory."""
    status = os.stat(directory)
    ours = {os.getegid(), *os.getgroups()}
    return status.st_gid if status.st_mode & stat.S_IXGRP and status.st_gid in ours else None


def _flat_names(arrangement: Arrangement) -> dict[str, str]:
    """FastDeploy's name -> the trainer's. It has one dictionary for all models: of a name that the main model has too,
    the main model's tensor counts."""
    given = {tensor.name: tensor.trainer_name for tensor in arrangement.tensors}
    given |= {alias: given[original] for alias, original in arrangement.aliases.items()}
    flat: dict[str, str] = {}
    for name in sorted(given, key=lambda name: namespaces.split(name).namespace != namespaces.MAIN):
        bare = namespaces.split(name).name
        if bare in flat:
            _log.warning("event=left_out tensor=%r reason='FastDeploy has one name for it and for another'", name)
            continue
        flat[bare] = given[name]
    return flat


def _flat(arrangement: Arrangement, names: Mapping[str, str], rank: int | None) -> dict[str, HostTensor]:
    """A rank's tensors; None: all that this process has, as it has it."""
    tensors = {tensor.trainer_name: tensor for tensor in arrangement.tensors}
    return {flat: _slice(tensors[name], rank) for flat, name in names.items()}


def _slice(tensor: ArrangedTensor, rank: int | None) -> HostTensor:
    axis, host = tensor.shard_axis, tensor.host
    if rank is None or axis is None:
        return host
    piece = tensor.pieces[rank]
    whole = np.frombuffer(memoryview(host.buffer), numpy_dtype(host.dtype)).reshape(host.shape)
    index = (*[slice(None)] * axis, slice(piece.start, piece.stop))
    return replace(borrow(np.ascontiguousarray(whole[index]), tensor.name), dtype=host.dtype)
