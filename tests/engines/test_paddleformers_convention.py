"""A fused PaddleFormers model, published as it is, arrives as what PaddleFormers itself exports of it."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.coverage import FusedPart, ParameterSpec
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.conventions import Convention, hugging_face, paddleformers
from fastdeploy_rl.plan.llama import shard_axis
from fastdeploy_rl.plan.planner import make_plan
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.ipc import IpcSource
from fastdeploy_rl.update.planned_transfer import transfer_planned

PROGRAM = Path(__file__).parent / "paddleformers_fused.py"
NUM_RANKS = 3


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ernie")
    subprocess.run([sys.executable, "-W", "ignore", str(PROGRAM), str(directory)], check=True, timeout=120)
    return directory


def specs_of(split: dict[str, np.ndarray]) -> list[ParameterSpec]:
    """An engine that fuses q, k and v of each rank, and nothing else. `split`: Hugging Face's tensors."""
    shapes = {n: v.shape[::-1] if hugging_face(n, v.shape).is_transposed else v.shape for n, v in split.items()}
    specs = []
    for name, shape in shapes.items():
        if ".q_proj." in name:
            parts = tuple(FusedPart(n, shapes[n][-1]) for n in (name.replace("q_proj", f"{x}_proj") for x in "qkv"))
            fused = (*shape[:-1], sum(part.size for part in parts))
            axis = len(shape) - 1
            specs.append(ParameterSpec(name.replace("q_proj", "qkv"), "F32", fused, axis, fused=parts, fused_axis=axis))
        elif ".k_proj." not in name and ".v_proj." not in name:
            specs.append(ParameterSpec(name, "F32", shape, shard_axis(name)))
    return specs


def live(
    channel: Path, tensors: dict[str, Any], convention: Convention, specs: list[ParameterSpec]
) -> list[dict[str, bytes]]:
    """What each rank's parameters hold after the tensors were published and brought over."""
    with WeightPublisher(channel) as publisher:
        publisher.publish(tensors, step=1, convention=convention)
        source = IpcSource(SourceConfig(channel))
        try:
            return [_taken_over(source, specs, rank) for rank in range(NUM_RANKS)]
        finally:
            source.close()


def _taken_over(source: IpcSource, specs: list[ParameterSpec], rank: int) -> dict[str, bytes]:
    deadline_ns = time.monotonic_ns() + 20_000_000_000
    resolved = source.resolve(None, deadline_ns=deadline_ns)
    plan = make_plan(resolved.manifest, specs, rank, NUM_RANKS)
    staged = source.stage(resolved, plan, deadline_ns=deadline_ns)
    homes = {p.name: TensorView(Mapping.private(p.num_bytes), 0, p.dtype, p.local_shape) for p in plan.parameters}
    transfer_planned(plan.parameters, resolved.manifest, staged.segments, homes, 1)
    staged.release()
    return {name: view.numpy().tobytes() for name, view in homes.items()}


def test_a_fused_model_arrives_as_what_paddleformers_exports(exported: Path, tmp_path: Path) -> None:
    """ERNIE 4.5 has one qkv_proj and one up_gate_proj; its Hugging Face form has them split and turned."""
    (file,) = (exported / "hf").glob("*.safetensors")
    split, own = load_file(file), dict(np.load(exported / "state.npz"))
    assert any("qkv_proj" in name for name in own)
    assert any("up_gate_proj" in name for name in own)
    specs = specs_of(split)
    config = json.loads((exported / "config.json").read_text())
    as_trained = live(tmp_path / "own", own, paddleformers(config), specs)
    as_exported = live(tmp_path / "hf", split, hugging_face, specs)
    assert as_trained == as_exported
    q, k, v = (split[f"model.layers.1.self_attn.{x}_proj.weight"].T for x in "qkv")
    third = [np.split(values, NUM_RANKS, axis=1)[1] for values in (q, k, v)]
    assert as_trained[1]["model.layers.1.self_attn.qkv.weight"] == np.concatenate(third, axis=1).tobytes()
