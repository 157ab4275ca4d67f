"""A cold start's receipt: the ranks' reads add up to the engine's own global tensors, however they are held."""

from functools import reduce

import pytest

from fastdeploy_rl.checksum import add, of_bytes
from fastdeploy_rl.coverage import FusedPart, ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, NumpyRunner, local_values, random_weights
from fastdeploy_rl.update.cold_start import cold_weights, specs_digest
from fastdeploy_rl.version import WeightVersion

QKV = (FusedPart("q", 12), FusedPart("k", 6), FusedPart("v", 6))
SPECS = (
    ParameterSpec("rows", "I8", (6, 7), 0),
    ParameterSpec("columns", "BF16", (5, 18), 1),
    ParameterSpec("middle", "F32", (3, 6, 5), 1),
    ParameterSpec("norm", "F32", (5,), None),
    ParameterSpec("scalar", "F64", (), None),
    ParameterSpec("empty", "F32", (0, 6), 1),
    ParameterSpec("turned", "F16", (6, 5), 0, is_transposed=True),
    ParameterSpec("padded", "F32", (12, 3), 0, vocab_rows=7),
    ParameterSpec("fused", "BF16", (5, 24), 1, fused=QKV, fused_axis=1),
    ParameterSpec("fused whole", "I8", (3, 5), None, fused=(FusedPart("a", 2), FusedPart("b", 3)), fused_axis=1),
    ParameterSpec("fused rows", "U8", (6, 5), 0, fused=(FusedPart("c", 2), FusedPart("d", 3)), fused_axis=1),
)
MODEL = NumpyModel(SPECS)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_reads_add_up_to_the_global_tensors_and_live_is_what_a_rank_holds(num_ranks: int) -> None:
    weights = random_weights(MODEL, 5)
    runners = [NumpyRunner(MODEL, rank, num_ranks) for rank in range(num_ranks)]
    cold = [cold_weights(WeightVersion(0, 0), runner.load(5), runner, 2) for runner in runners]
    for spec in SPECS:
        shares = [one.read[spec.name] for one in cold if spec.name in one.read]
        assert reduce(add, shares) == of_bytes(local_values(spec, weights, 0, 1).tobytes())
        for rank, one in enumerate(cold):
            assert one.live[spec.name] == of_bytes(local_values(spec, weights, rank, num_ranks).tobytes())


def test_the_digest_of_a_model_tells_its_layouts_apart() -> None:
    variants = [
        ParameterSpec("w", "F32", (6, 6), 0),
        ParameterSpec("w", "F32", (6, 6), 1),
        ParameterSpec("w", "BF16", (6, 6), 0),
        ParameterSpec("w", "F32", (6, 6), 0, is_transposed=True),
        ParameterSpec("w", "F32", (6, 6), 0, vocab_rows=5),
        ParameterSpec("w", "F32", (6, 6), 0, fused=(FusedPart("a", 2), FusedPart("b", 4))),
        ParameterSpec("w", "F32", (6, 6), 0, fused=(FusedPart("a", 3), FusedPart("b", 3))),
        ParameterSpec("w", "F32", (6, 6), 0, fused=(FusedPart("a", 2), FusedPart("b", 4)), fused_axis=1),
    ]
    assert len({specs_digest([spec]) for spec in variants}) == len(variants)
