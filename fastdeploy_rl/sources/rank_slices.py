"""A manifest's tensors from what each rank of an engine has of them: for weights that come cut for one engine, in its
own layout, without a word about how they were cut.

Owns how a rank's slice stands to the whole tensor, as `ParameterSpec` says it. Pure: refuses to know files, memory and
values. Invariant: every slice lies in exactly one part or twin of the tensors that come out, whose shapes are those of
the model; rank r needs nothing but its own slices.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from fastdeploy_rl.checksum import ZERO
from fastdeploy_rl.coverage import MAX_LISTED_PROBLEMS, Coverage, ParameterSpec
from fastdeploy_rl.errors import ConfigurationError, CoverageError
from fastdeploy_rl.manifest import Fused, Part, Run, Tensor
from fastdeploy_rl.plan import namespaces
from fastdeploy_rl.plan.planner import check_divisible

UNSUMMED = ZERO.hex()
"""The checksum of a tensor that nobody has read yet."""


NO_ALIASES: Mapping[str, str] = MappingProxyType({})


class Slice(NamedTuple):
    """What a rank has of a tensor: C-contiguous, of the rank's own shape, from `offset` of segment `segment` on."""

    dtype: str
    shape: tuple[int, ...]
    segment: int
    offset: int


class JoinedTensors(NamedTuple):
    """`layout` and `aliases` as in a manifest; `tensors` are UNSUMMED. `twins`: where the other ranks have those that
    are not cut, and should have the same bytes."""

    layout: str
    tensors: tuple[Tensor, ...]
    twins: tuple[tuple[str, Part], ...]
    aliases: dict[str, str]


class FlatNames(NamedTuple):
    """What names without a namespace mean to an engine of several models. `renamed`: a name -> the only parameter it
    can be; `shared`: a parameter of another model -> the main model's of the same name, which feeds both."""

    renamed: dict[str, str]
    shared: dict[str, str]


def flat_names(specs: Sequence[ParameterSpec], names: Iterable[str]) -> FlatNames:
    """FastDeploy has one dictionary for the main model and those beside it, so that its files say `NAME` for "mtp/NAME"
    too. A name that one of the other models alone has is that one's; one that the main model has is the main model's,
    and feeds the others' of that name, unless the files say those by their full names. ConfigurationError where two
    models beside the main one have a name that the main one lacks."""
    given = set(names)
    parameters = {spec.name for spec in specs}
    renamed: dict[str, str] = {}
    shared: dict[str, str] = {}
    for spec in specs:
        namespace, name = namespaces.split(spec.name)
        if namespace == namespaces.MAIN or name not in given or spec.name in given:
            continue
        if name in parameters:
            if spec.coverage in (Coverage.UPDATED, Coverage.TIED):
                shared[spec.name] = name
        elif (other := renamed.setdefault(name, spec.name)) != spec.name:
            raise ConfigurationError(f"{name} may be {other} or {spec.name}: name it with its model, as {spec.name}")
    return FlatNames(renamed, shared)


def join_slices(
    specs: Sequence[ParameterSpec], ranks: Sequence[Mapping[str, Slice]], aliases: Mapping[str, str] = NO_ALIASES
) -> JoinedTensors:
    """The whole tensors, `ranks[r]` being what rank r has, by the engine's names or by FastDeploy's flat ones
    (`flat_names`). `aliases`: further names of what they have -> its name. CoverageError that lists every name
    which is no parameter, which a rank lacks, or of which it has another shape or dtype than it should;
    ConfigurationError where the model cannot be cut for so many ranks.

    Parameters that nobody has are left out: whether they are needed is for `check_coverage` to say."""
    check_divisible(specs, len(ranks))
    flat = flat_names(specs, [*(name for slices in ranks for name in slices), *aliases])
    own = [{flat.renamed.get(name, name): piece for name, piece in slices.items()} for slices in ranks]
    given = dict.fromkeys(name for slices in own for name in slices)
    by_name = {spec.name: spec for spec in specs}
    problems = [problem for name in given for problem in _problems(name, by_name.get(name), own)]
    if problems:
        listed = problems[:MAX_LISTED_PROBLEMS]
        more = [f"... and {len(problems) - len(listed)} more"] if len(problems) > len(listed) else []
        raise CoverageError("\n".join([f"{len(problems)} problems with what the ranks have:", *listed, *more]))
    joined = [join(by_name[name], [slices[name] for slices in own]) for name in given]
    return JoinedTensors(
        layout=f"tp:{len(ranks)}",
        tensors=tuple(tensor for tensor, _ in joined),
        twins=tuple((tensor.name, twin) for tensor, twins in joined for twin in twins),
        aliases=_aliases(flat, aliases),
    )


def _aliases(flat: FlatNames, aliases: Mapping[str, str]) -> dict[str, str]:
    """By the engine's names, each of a tensor and not of another alias."""
    named = {flat.renamed.get(name, name): flat.renamed.get(target, target) for name, target in aliases.items()}
    return named | {name: named.get(main, main) for name, main in flat.shared.items()}


def _problems(name: str, spec: ParameterSpec | None, ranks: Sequence[Mapping[str, Slice]]) -> Iterator[str]:
    if spec is None:
        yield f"{name[:600]}: not a tensor of this model"
        return
    expected, dtypes = spec.local_shape(len(ranks)), {slices[name].dtype for slices in ranks if name in slices}
    for rank, slices in enumerate(ranks):
        if name not in slices:
            yield f"{name}: rank {rank} of {len(ranks)} has none"
        elif slices[name].shape != expected and not _is_one_value(spec, slices[name].shape, expected):
            whole = ", which is the whole of it" if slices[name].shape == spec.shape else ""
            yield (
                f"{name}: rank {rank} of {len(ranks)} has shape {list(slices[name].shape)}{whole}; this engine's ranks "
                f"have {list(expected)}"
            )
    if len(dtypes) > 1:
        yield f"{name}: the ranks have it as {', '.join(sorted(dtypes))}"


def _is_one_value(spec: ParameterSpec, shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Of a parameter without axes each rank may have its own; the whole, which has to have an axis, is all of them."""
    return spec.shard_axis is not None and (shape, expected) == ((), (1,))


def join(spec: ParameterSpec, slices: Sequence[Slice]) -> tuple[Tensor, list[Part]]:
    """The tensor of slices that fit, and its twins where it is not cut."""
    shape, size = _published_shape(spec), 0
    if spec.shard_axis is None:
        first, *twins = (Part(piece.segment, piece.offset, 0, 0) for piece in slices)
        parts = [first]
    else:
        twins, size = [], spec.shape[spec.shard_axis] // len(slices)
        length = shape[spec.shard_axis]
        spans = [(min(rank * size, length), min((rank + 1) * size, length)) for rank in range(len(slices))]
        parts = [Part(piece.segment, piece.offset, *span) for piece, span in zip(slices, spans, strict=True)]
    tensor = Tensor(
        name=spec.name,
        dtype=slices[0].dtype,
        shape=shape,
        shard_axis=spec.shard_axis,
        parts=tuple(parts),
        checksum=UNSUMMED,
        is_transposed=spec.is_transposed,
        fused=Fused(spec.fused_axis, tuple(_runs(spec, len(slices)))) if spec.fused else None,
    )
    return tensor, twins


def _published_shape(spec: ParameterSpec) -> tuple[int, ...]:
    """Without the rows that pad a vocabulary, where they are the last bytes of a slice: nobody needs to read them."""
    is_first = not spec.is_transposed or len(spec.shape) > 2
    if spec.vocab_rows is None or not is_first or spec.shard_axis not in (None, 0):
        return spec.shape
    return (spec.vocab_rows, *spec.shape[1:])


def _runs(spec: ParameterSpec, num_ranks: int) -> Iterator[Run]:
    """Where its logical tensors lie along the fused axis of the whole: rank by rank, where that is the axis which is
    cut, since each rank has its share of each of them."""
    cuts = num_ranks if spec.fused_axis == spec.shard_axis else 1
    for rank in range(cuts):
        for part in spec.fused:
            size = part.size // cuts
            yield Run(part.name, rank * size, (rank + 1) * size)
