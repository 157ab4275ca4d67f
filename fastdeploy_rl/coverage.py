"""Which published tensor feeds which parameter of the model, decided before a byte is touched.

Owns the five kinds of coverage and the check that a manifest and a model match exactly, tensor by *logical* tensor:
whoever fuses, turns or pads them, trainer or engine, each is supplied exactly once. Refuses to know how bytes move.
Invariant: a `CoverageReport` exists only where every updated and tied tensor has exactly one source and every published
name has a use.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from fastdeploy_rl.dtypes import cast_between
from fastdeploy_rl.errors import ConfigurationError, CoverageError
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.plan.logical import LogicalTensor, logical_tensors, turned

MAX_LISTED_PROBLEMS = 20
TURNED_HINT = " (transposed?)"


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
class FusedPart:
    """One of the logical tensors that an engine's parameter consists of: `size` indices, over all ranks, of the axis
    along which they are fused."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One tensor of the model. `shape` is global, as the engine holds it; `shard_axis` is the axis that is split evenly
    over the ranks (None: every rank holds all of it); `tied_to` names an UPDATED parameter, for TIED ones only.

    `is_transposed`: the engine holds it as [out, in]: its last two axes are swapped against the logical tensor.
    `fused`: the parameter is the concatenation of these logical tensors along `fused_axis`, on each rank: rank r holds
    [q_r | k_r | v_r]. `vocab_rows`: axis 0 of the logical tensor is a vocabulary, padded in the engine; only so many
    rows carry tokens. A publication may have more (they are read, and not used); the engine's further rows are zero.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard_axis: int | None
    coverage: Coverage = Coverage.UPDATED
    tied_to: str | None = None
    is_transposed: bool = False
    fused: tuple[FusedPart, ...] = ()
    fused_axis: int = 0
    vocab_rows: int | None = None

    def local_shape(self, num_ranks: int) -> tuple[int, ...]:
        """Of what each rank has of it."""
        return tuple(n // num_ranks if axis == self.shard_axis else n for axis, n in enumerate(self.shape))

    @property
    def logical(self) -> "tuple[NeededTensor, ...]":
        """The logical tensors it consists of: itself, or those it fuses, in order."""
        if not self.fused:
            return (NeededTensor(self.name, turned(self.shape) if self.is_transposed else self.shape),)
        before, after = self.shape[: self.fused_axis], self.shape[self.fused_axis + 1 :]
        shapes = ((*before, part.size, *after) for part in self.fused)
        return tuple(
            NeededTensor(part.name, turned(shape) if self.is_transposed else shape)
            for part, shape in zip(self.fused, shapes, strict=True)
        )


class NeededTensor(NamedTuple):
    """A logical tensor of the model: linear weights are [in, out]; of a padded vocabulary, with its padding."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CoverageReport:
    """`sources`: every logical tensor of the updated and tied parameters -> the published
    one that feeds it (its first name among those tied, aliases resolved).
    Parameters that are derived, frozen or transient take nothing and are left out.
    `unused`: published ones that feed nothing, since their values come under a tied name too."""

    sources: Mapping[str, LogicalTensor]
    unused: tuple[LogicalTensor, ...]


def check_coverage(manifest: Manifest, specs: Sequence[ParameterSpec]) -> CoverageReport:
    """Matches a publication with a model.

    A tied group may be published under any of its names; under several, only with equal checksums. Allowed casts are
    those of `dtypes.cast_between`. Raises CoverageError that lists every problem, one a line, and ConfigurationError
    where the specs contradict themselves.
    """
    groups = _tied_groups(specs)
    published = logical_tensors(manifest)
    problems: list[str] = []
    sources: dict[str, LogicalTensor] = {}
    for group in groups:
        given = [member for member in group if member.name in published]
        problems += _group_problems(group, given, published)
        if given:
            source = published[given[0].name]
            sources.update((member.name, source) for member in group)
    problems += _surplus(published, specs)
    if problems:
        raise CoverageError(_describe(manifest.version, problems))
    used = {logical.name for logical in sources.values()}
    unused = tuple(logical for name, logical in published.items() if name == logical.name and name not in used)
    return CoverageReport(sources, unused)


class _Member(NamedTuple):
    """A logical tensor of the model and the parameter it belongs to."""

    name: str
    shape: tuple[int, ...]
    spec: ParameterSpec


def _tied_groups(specs: Sequence[ParameterSpec]) -> list[list[_Member]]:
    """Each logical tensor of an updated parameter, followed by those tied to it."""
    for spec in specs:
        _check_spec(spec)
    _refuse_repeated_names(spec.name for spec in specs)
    groups = {spec.name: [[member] for member in _members(spec)] for spec in specs if spec.coverage is Coverage.UPDATED}
    for spec in specs:
        if spec.coverage is Coverage.TIED:
            for group, member in zip(_find_groups(groups, spec), _members(spec), strict=True):
                group.append(member)
    listed = [group for of_spec in groups.values() for group in of_spec]
    _refuse_repeated_names(member.name for group in listed for member in group)
    return listed


def _members(spec: ParameterSpec) -> list[_Member]:
    return [_Member(needed.name, needed.shape, spec) for needed in spec.logical]


def _check_spec(spec: ParameterSpec) -> None:
    """ConfigurationError where a spec contradicts itself."""
    num_axes = len(spec.shape)
    if spec.is_transposed and num_axes < 2:
        raise ConfigurationError(f"{spec.name}: transposed, but its shape {list(spec.shape)} has no two axes")
    if spec.fused and not 0 <= spec.fused_axis < num_axes:
        raise ConfigurationError(f"{spec.name}: fused axis {spec.fused_axis} is no axis of {list(spec.shape)}")
    if spec.fused and sum(part.size for part in spec.fused) != spec.shape[spec.fused_axis]:
        raise ConfigurationError(
            f"{spec.name}: its parts {[part.size for part in spec.fused]} do not add up to axis {spec.fused_axis} of "
            f"{list(spec.shape)}"
        )
    if spec.vocab_rows is None:
        return
    if spec.fused or not num_axes or not 0 <= spec.vocab_rows <= spec.logical[0].shape[0]:
        raise ConfigurationError(f"{spec.name}: a vocabulary of {spec.vocab_rows} rows does not fit {list(spec.shape)}")


def _refuse_repeated_names(names: Iterator[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigurationError(f"a model names {name} twice")
        seen.add(name)


def _find_groups(groups: dict[str, list[list[_Member]]], tied: ParameterSpec) -> list[list[_Member]]:
    found = groups.get(tied.tied_to or "")
    if found is None:
        raise ConfigurationError(f"{tied.name}: tied to {tied.tied_to!r}, which is no updated parameter of this model")
    if _held_alike(tied) != _held_alike(found[0][0].spec):
        raise ConfigurationError(f"{tied.name}: tied to {tied.tied_to}, but of another shape, dtype or shard axis")
    return found


def _held_alike(spec: ParameterSpec) -> object:
    """What two parameters that share their memory have in common."""
    sizes = [part.size for part in spec.fused]
    return spec.shape, spec.dtype, spec.shard_axis, spec.is_transposed, sizes, spec.fused_axis, spec.vocab_rows


def _group_problems(
    group: Sequence[_Member], given: Sequence[_Member], published: Mapping[str, LogicalTensor]
) -> Iterator[str]:
    if not given:
        also = "".join(f" (or its tied name {member.name})" for member in group[1:])
        part = f" (part of {group[0].spec.name})" if group[0].spec.fused else ""
        yield f"{group[0].name}: missing{part}{also}"
        return
    problems = [problem for member in given for problem in _tensor_problems(member, published[member.name])]
    if problems:
        yield from problems
        return
    first = published[given[0].name]
    for member in given[1:]:
        yield from _tie_problems(given[0].name, first, member.name, published[member.name])


def _tie_problems(first: str, one: LogicalTensor, second: str, other: LogicalTensor) -> Iterator[str]:
    """Two names of one tensor have equal values; where they are stored differently, checksums cannot tell."""
    if one.pieces == other.pieces:
        return
    if _stored_alike(one) != _stored_alike(other) or one.is_fused or other.is_fused:
        yield f"{second}: tied to {first}, but published in another layout, so that nothing shows they are equal"
    elif one.pieces[0].tensor.checksum != other.pieces[0].tensor.checksum:
        yield f"{second}: tied to {first}, but published with other values"


def _stored_alike(logical: LogicalTensor) -> object:
    tensor = logical.pieces[0].tensor
    return tensor.dtype, tensor.shape, tensor.is_transposed


def _tensor_problems(member: _Member, logical: LogicalTensor) -> Iterator[str]:
    where = f" (run of {logical.pieces[0].tensor.name})" if logical.is_fused else ""
    rows = member.spec.vocab_rows
    if rows is not None and logical.shape[1:] == member.shape[1:] and len(logical.shape) == len(member.shape):
        if logical.shape[0] < rows:
            yield f"{member.name}: vocabulary of at least {rows} rows expected, got {logical.shape[0]}{where}"
    elif logical.shape != member.shape:
        expected, got = list(member.shape), list(logical.shape)
        yield f"{member.name}: shape expected {expected} got {got}{where}{_hint(member, logical)}"
    if cast_between(logical.dtype, member.spec.dtype) is None:
        yield f"{member.name}: dtype expected {member.spec.dtype} got {logical.dtype}{where}"


def _hint(member: _Member, logical: LogicalTensor) -> str:
    if len(member.shape) != 2 or logical.shape != member.shape[::-1]:
        return ""
    if logical.pieces[0].tensor.is_transposed:
        return " (published as transposed: is it? linear weights are [in, out] here)"
    return TURNED_HINT


def _surplus(published: Mapping[str, LogicalTensor], specs: Sequence[ParameterSpec]) -> Iterator[str]:
    used = {needed.name for spec in specs if spec.coverage in _FED for needed in spec.logical}
    by_name = {spec.name: spec for spec in specs}
    for name in sorted(published.keys() - used):
        spec = by_name.get(name)
        if spec is None:
            where = f" (run of {published[name].pieces[0].tensor.name})" if published[name].is_fused else ""
            yield f"{name}: not a tensor of this model{where}"
        elif spec.coverage in _FED:
            parts = ", ".join(part.name for part in spec.fused)
            yield f"{name}: this engine fuses it from {parts}; publish those, or say how it is fused (a convention)"
        else:
            yield f"{name}: {spec.coverage.value} in this engine, cannot be published"


_FED = (Coverage.UPDATED, Coverage.TIED)


def _describe(version: str, problems: Sequence[str]) -> str:
    listed = list(problems[:MAX_LISTED_PROBLEMS])
    if len(problems) > MAX_LISTED_PROBLEMS:
        listed.append(f"... and {len(problems) - MAX_LISTED_PROBLEMS} more")
    noun = "problem" if len(problems) == 1 else "problems"
    # Said once and first: what crosses the board is cut at its end.
    hint = (
        " (linear weights are [in, out] here; torch state dicts: publish with convention=hugging_face)"
        if any(problem.endswith(TURNED_HINT) for problem in problems)
        else ""
    )
    return "\n".join([f"version {version} does not fit this model, {len(problems)} {noun}{hint}:", *listed])
