"""Which published tensor feeds which parameter of the model, decided before a byte is touched.

Owns the five kinds of coverage and the check that a manifest and a model match exactly. Refuses to know how bytes move.
Invariant: a `CoverageReport` exists only where every updated and tied parameter has exactly one source and every
published name has a use.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from fastdeploy_rl.dtypes import cast_between
from fastdeploy_rl.errors import ConfigurationError, CoverageError
from fastdeploy_rl.manifest import Manifest, Tensor

MAX_LISTED_PROBLEMS = 20


class Coverage(Enum):
    """What an update does to a tensor of the model; each tensor is exactly one of these."""

    UPDATED = "updated"
    """takes its bytes from the publication"""
    TIED = "tied"
    """is another parameter under a second name"""
    DERIVED = "derived"
    """is recomputed from others, in place"""
    FROZEN = "frozen"
    """keeps the value it was loaded with"""
    TRANSIENT = "transient"
    """holds nothing that outlives a request"""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One tensor of the model. `shape` is global; `shard_axis` is the axis that is split evenly over the ranks (None:
    every rank holds all of it); `tied_to` names an UPDATED parameter, for TIED ones only."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard_axis: int | None
    coverage: Coverage = Coverage.UPDATED
    tied_to: str | None = None


@dataclass(frozen=True, slots=True)
class CoverageReport:
    """`sources`: every updated and tied parameter -> the tensor of the manifest that feeds it (aliases resolved).
    Parameters that are derived, frozen or transient take nothing and are left out."""

    sources: Mapping[str, str]


def check_coverage(manifest: Manifest, specs: Sequence[ParameterSpec]) -> CoverageReport:
    """Matches a publication with a model.

    A tied group may be published under any of its names; under several, only with
    equal checksums. Allowed casts: F32 <-> BF16. Raises CoverageError that lists every
    problem, one a line, and ConfigurationError where the specs contradict themselves.
    """
    groups = _tied_groups(specs)
    published = _Published(manifest)
    problems: list[str] = []
    sources: dict[str, str] = {}
    for group in groups:
        given = [spec for spec in group if spec.name in published.names]
        problems += _group_problems(group, given, published)
        if given:
            source = published.tensor(given[0].name).name
            sources.update((spec.name, source) for spec in group)
    problems += _surplus(published, specs)
    if problems:
        raise CoverageError(_describe(manifest.version, problems))
    return CoverageReport(sources)


class _Published:
    """The names of a manifest, aliases included."""

    def __init__(self, manifest: Manifest) -> None:
        self._tensors = {tensor.name: tensor for tensor in manifest.tensors}
        self._aliases = manifest.aliases
        self.names = self._tensors.keys() | self._aliases.keys()

    def tensor(self, name: str) -> Tensor:
        return self._tensors[self._aliases.get(name, name)]


def _tied_groups(specs: Sequence[ParameterSpec]) -> list[list[ParameterSpec]]:
    """Each updated parameter followed by those tied to it."""
    _refuse_repeated_names(specs)
    groups = {spec.name: [spec] for spec in specs if spec.coverage is Coverage.UPDATED}
    for spec in specs:
        if spec.coverage is Coverage.TIED:
            _find_group(groups, spec).append(spec)
    return list(groups.values())


def _refuse_repeated_names(specs: Sequence[ParameterSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ConfigurationError(f"a model names {spec.name} twice")
        seen.add(spec.name)


def _find_group(groups: dict[str, list[ParameterSpec]], tied: ParameterSpec) -> list[ParameterSpec]:
    group = groups.get(tied.tied_to or "")
    if group is None:
        raise ConfigurationError(f"{tied.name}: tied to {tied.tied_to!r}, which is no updated parameter of this model")
    if (tied.shape, tied.dtype, tied.shard_axis) != (group[0].shape, group[0].dtype, group[0].shard_axis):
        raise ConfigurationError(f"{tied.name}: tied to {tied.tied_to}, but of another shape, dtype or shard axis")
    return group


def _group_problems(
    group: Sequence[ParameterSpec], given: Sequence[ParameterSpec], published: _Published
) -> Iterator[str]:
    if not given:
        also = "".join(f" (or its tied name {spec.name})" for spec in group[1:])
        yield f"{group[0].name}: missing{also}"
        return
    for spec in given:
        yield from _tensor_problems(spec, published.tensor(spec.name))
    first = published.tensor(given[0].name)
    for spec in given[1:]:
        if published.tensor(spec.name).checksum != first.checksum:
            yield f"{spec.name}: tied to {given[0].name}, but published with other values"


def _tensor_problems(spec: ParameterSpec, tensor: Tensor) -> Iterator[str]:
    if tensor.shape != spec.shape:
        is_turned = len(spec.shape) == 2 and tensor.shape == spec.shape[::-1]
        hint = " (transposed? linear weights are [in, out] here)" if is_turned else ""
        yield f"{spec.name}: shape expected {list(spec.shape)} got {list(tensor.shape)}{hint}"
    if cast_between(tensor.dtype, spec.dtype) is None:
        yield f"{spec.name}: dtype expected {spec.dtype} got {tensor.dtype}"


def _surplus(published: _Published, specs: Sequence[ParameterSpec]) -> Iterator[str]:
    coverage = {spec.name: spec.coverage for spec in specs}
    for name in sorted(published.names):
        kind = coverage.get(name)
        if kind is None:
            yield f"{name}: not a tensor of this model"
        elif kind not in (Coverage.UPDATED, Coverage.TIED):
            yield f"{name}: {kind.value} in this engine, cannot be published"


def _describe(version: str, problems: Sequence[str]) -> str:
    listed = list(problems[:MAX_LISTED_PROBLEMS])
    if len(problems) > MAX_LISTED_PROBLEMS:
        listed.append(f"... and {len(problems) - MAX_LISTED_PROBLEMS} more")
    noun = "problem" if len(problems) == 1 else "problems"
    return "\n".join([f"version {version} does not fit this model, {len(problems)} {noun}:", *listed])
