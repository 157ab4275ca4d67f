"""Where parameters lie after a rebind: in published memory, or packed one after another in an arena.

Owns the arithmetic only, for memory that is there as for memory that is only thought of. Invariant: where published
memory is used at all, some byte of it is needed.
"""

from collections.abc import Sequence

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import StepFailedError
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.plan import Plan, PlannedParameter
from fastdeploy_rl.update.packing import packed, packed_bytes


def copied_parameters(plan: Plan, *, may_alias: bool) -> dict[str, PlannedParameter]:
    """Those that need memory of the engine's own, by name. Where no byte of published memory would be used, all do: it
    is let go then, and parameters without bytes must not lie there either."""
    if not may_alias or not any(p.num_bytes for p in plan.parameters if p.alias is not None):
        return {p.name: p for p in plan.parameters}
    return {p.name: p for p in plan.parameters if p.alias is None}


def arena_bytes(copied: dict[str, PlannedParameter]) -> int:
    """What they need; 0 for none."""
    return packed_bytes([p.num_bytes for p in copied.values()]) if copied else 0


def placed(
    plan: Plan, copied: dict[str, PlannedParameter], segments: Sequence[Mapping], arena: Mapping | None
) -> dict[str, TensorView]:
    """Every parameter's place, in the plan's order; `arena` may be None where nothing is copied."""
    offsets = dict(zip(copied, packed([p.num_bytes for p in copied.values()]), strict=True))

    def place(parameter: PlannedParameter) -> tuple[Mapping, int]:
        alias = parameter.alias
        if alias is not None and parameter.name not in copied:
            return segments[alias.segment], alias.offset
        if arena is None:
            raise StepFailedError(f"parameter {parameter.name} has no place")
        return arena, offsets[parameter.name]

    return {p.name: TensorView(*place(p), p.dtype, p.local_shape) for p in plan.parameters}
