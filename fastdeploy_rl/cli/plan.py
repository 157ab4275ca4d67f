"""`plan`: what each rank would do with a publication, without an engine and without touching a byte of it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fastdeploy_rl.cli.options import Verbs, add_json, add_verb, megabytes, positive, print_fields, print_json
from fastdeploy_rl.config import Deadlines

if TYPE_CHECKING:
    from fastdeploy_rl.coverage import ParameterSpec
    from fastdeploy_rl.manifest import Manifest
    from fastdeploy_rl.plan.plan import Plan, PlannedParameter

MAX_RANKS = 1024
_EXAMPLES = """\
  fastdeploy-rl plan /dev/shm/fastdeploy_rl-1000 --tensor-parallel-size 2      # the latest version of a channel
  fastdeploy-rl plan manifest-3.1200-0123456789abcdef.json --tensor-parallel-size 4 --model ~/models/smollm2
  fastdeploy-rl plan CHANNEL --tensor-parallel-size 2 --verbose      # every parameter, and why it is copied
  fastdeploy-rl plan CHANNEL --tensor-parallel-size 2 --json | jq '.ranks[].copied_bytes'"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(
        verbs, "plan", "show what each rank would read, use in place and copy of a publication, and why", _EXAMPLES
    )
    parser.add_argument("manifest", type=Path, metavar="MANIFEST", help="a manifest file, or a channel's directory")
    parser.add_argument(
        "--tensor-parallel-size", type=_num_ranks, required=True, metavar="N", help="how many ranks the engine has"
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=None,
        metavar="DIR",
        help="plan for this Hugging Face model; without it for the tensors as they are published, each a parameter of "
        "its own, split as Llama's are",
    )
    parser.add_argument("--verbose", action="store_true", help="list every parameter of every rank")
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fastdeploy_rl.plan.planner import make_plan
    from fastdeploy_rl.plan.proofs import check_plan, check_reads

    manifest = _read_manifest(options.manifest)
    num_ranks = options.tensor_parallel_size
    specs = _published_specs(manifest) if options.model is None else _model_specs(options.model, num_ranks)
    plans = [make_plan(manifest, specs, rank, num_ranks) for rank in range(num_ranks)]
    for plan in plans:
        check_plan(plan)
    check_reads(manifest, plans)
    if options.json:
        print_json(_described(manifest, plans, options.verbose))
    else:
        _print_plans(manifest, plans, options.verbose)
    return 0


def _num_ranks(text: str) -> int:
    num_ranks = positive(text)
    if num_ranks > MAX_RANKS:
        raise argparse.ArgumentTypeError(f"expected at most {MAX_RANKS} ranks, got {text}")
    return num_ranks


# --- what is planned ------------------------------------------------------------------------------


def _read_manifest(path: Path) -> "Manifest":
    """The one of the file, or the latest of the channel."""
    import time

    from fastdeploy_rl.errors import ConfigurationError
    from fastdeploy_rl.publish.channel import Channel

    if not path.is_dir():
        return _read_file(path)
    if (path / "config.json").exists():
        raise ConfigurationError(f"{path} is a model: name a manifest file or a channel; --model takes the model")
    return Channel(path).read_publication(time.monotonic_ns() + int(Deadlines.resolve_s * 1e9))[1]


def _read_file(path: Path) -> "Manifest":
    from fastdeploy_rl import manifest as manifests
    from fastdeploy_rl.errors import ConfigurationError, ManifestError

    try:
        if path.exists() and not path.is_file():
            raise ManifestError(f"{path} is neither a manifest file nor a channel's directory")
        with path.open("rb") as file:
            data = file.read(manifests.MAX_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(
            f"{path}: {error.strerror}; name a manifest file or the directory of a channel"
        ) from error
    try:
        return manifests.decode(data)
    except ManifestError as error:
        raise ManifestError(f"{path}: {error}") from error


def _model_specs(directory: Path, num_ranks: int) -> "tuple[ParameterSpec, ...]":
    from fastdeploy_rl.engines.embedded.model_config import parameter_specs, read_config

    config = read_config(directory)
    config.check_divides(num_ranks)
    return parameter_specs(config, num_ranks)


def _published_specs(manifest: "Manifest") -> "tuple[ParameterSpec, ...]":
    """An engine that has every logical tensor of the publication, in its dtype, split where Llama splits that name."""
    from fastdeploy_rl.coverage import Coverage, ParameterSpec
    from fastdeploy_rl.plan.llama import shard_axis
    from fastdeploy_rl.plan.logical import logical_tensors

    specs = []
    for name, logical in logical_tensors(manifest).items():
        axis = shard_axis(logical.name)
        fits = axis is not None and axis < len(logical.shape)
        is_alias = name != logical.name
        specs.append(
            ParameterSpec(
                name,
                logical.dtype,
                logical.shape,
                axis if fits else None,
                Coverage.TIED if is_alias else Coverage.UPDATED,
                logical.name if is_alias else None,
            )
        )
    return tuple(specs)


# --- what is told ---------------------------------------------------------------------------------


def _described(manifest: "Manifest", plans: "list[Plan]", is_verbose: bool) -> dict[str, object]:
    return {
        "version": manifest.version,
        "layout": manifest.layout,
        "num_tensors": len(manifest.tensors),
        "num_bytes": sum(tensor.num_bytes for tensor in manifest.tensors),
        "ranks": [_described_rank(plan, is_verbose) for plan in plans],
    }


def _described_rank(plan: "Plan", is_verbose: bool) -> dict[str, object]:
    rank: dict[str, object] = {
        "rank": plan.rank,
        "bytes_in": plan.read_bytes,
        "bytes_out": plan.aliased_bytes + plan.copied_bytes,
        "aliased_bytes": plan.aliased_bytes,
        "copied_bytes": plan.copied_bytes,
        "num_aliased": sum(parameter.alias is not None for parameter in plan.parameters),
        "not_aliased": [
            {"reason": reason, "count": len(of_reason), "num_bytes": sum(p.num_bytes for p in of_reason)}
            for reason, of_reason in _by_reason(plan).items()
        ],
    }
    if is_verbose:
        rank["parameters"] = [_described_parameter(parameter) for parameter in plan.parameters]
    return rank


def _described_parameter(parameter: "PlannedParameter") -> dict[str, object]:
    return {
        "name": parameter.name,
        "sources": parameter.sources,
        "dtype": parameter.dtype,
        "local_shape": parameter.local_shape,
        "num_bytes": parameter.num_bytes,
        "num_regions": len(parameter.regions),
        "is_aliased": parameter.alias is not None,
        "why_not_alias": parameter.why_not_alias,
    }


def _by_reason(plan: "Plan") -> "dict[str, list[PlannedParameter]]":
    """Those that are copied, the reason with the most bytes first."""
    groups: dict[str, list[PlannedParameter]] = {}
    for parameter in plan.parameters:
        if parameter.alias is None:
            groups.setdefault(parameter.why_not_alias, []).append(parameter)
    return dict(sorted(groups.items(), key=lambda group: -sum(parameter.num_bytes for parameter in group[1])))


def _print_plans(manifest: "Manifest", plans: "list[Plan]", is_verbose: bool) -> None:
    total = sum(tensor.num_bytes for tensor in manifest.tensors)
    ranks = "1 rank" if len(plans) == 1 else f"{len(plans)} ranks"
    print(f"version {manifest.version} for {ranks}: each byte is written once and counted once")
    print_fields(layout=manifest.layout, tensors=len(manifest.tensors), published=megabytes(total))
    for plan in plans:
        print(f"rank {plan.rank}")
        print_fields(bytes_in=megabytes(plan.read_bytes), bytes_out=megabytes(plan.aliased_bytes + plan.copied_bytes))
        in_place = [parameter for parameter in plan.parameters if parameter.alias is not None]
        for how, parameters in {"in place": in_place, **_by_reason(plan)}.items():
            size = megabytes(sum(parameter.num_bytes for parameter in parameters))
            print(f"  {len(parameters):>6} parameters {size:>12}  {how if how == 'in place' else f'copied: {how}'}")
        for parameter in plan.parameters if is_verbose else ():
            print(f"  {parameter.name}  {_told(parameter)}")


def _told(parameter: "PlannedParameter") -> str:
    how = f"copied: {parameter.why_not_alias}" if parameter.alias is None else "in place"
    return f"{parameter.dtype} {list(parameter.local_shape)}  {how}"
