"""Tiny random Llama checkpoints, and the ways tests run them: in this process, over real ranks, and with PaddleFormers.

Paddle warns while it is imported (about a compiler cache), which would fail every test: import it from here.
"""

import json
import subprocess
import sys
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fastdeploy_rl.engines.embedded.runner import EmbeddedRunner

from fastdeploy_rl._native import CollectiveGroup
from fastdeploy_rl.collectives.shm import ShmCollectives
from fastdeploy_rl.control.generation import GenerationRequest, SamplingOptions
from fastdeploy_rl.coverage import Coverage
from fastdeploy_rl.engines.embedded.checkpoint import save_checkpoint
from fastdeploy_rl.engines.embedded.model_config import parameter_specs, read_config
from fastdeploy_rl.engines.embedded.scheduler import Step
from fastdeploy_rl.memory.shared_segment import SharedSegment

GREEDY = SamplingOptions(temperature=0.0)
PROMPTS = [[5, 6, 7, 8], [9] * 20, [3, 1, 4, 1, 5, 9, 2, 6] * 9, [11], list(range(1, 17))]
SLOT_BYTES = 1 << 20
TIMEOUT_S = 60.0
HERE = Path(__file__).parent


class Generated(NamedTuple):
    """`tokens[i]` of prompt i; `logits[i]` of its last prompt token, [prompts, vocab]."""

    tokens: list[list[int]]
    logits: np.ndarray


def config(**changes: object) -> dict[str, object]:
    """Six heads, so that two and three ranks divide it; no padding token (PaddleFormers would zero its embedding)."""
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 256}
    constants = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "pad_token_id": None}
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "eos_token_id": 2, "torch_dtype": "float32"}
    return kind | sizes | heads | constants | changes


def make_checkpoint(directory: Path, *, seed: int = 0, **changes: object) -> Path:
    """A checkpoint of random weights, large enough that greedy decoding does not fall into one token."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(**changes)))
    save_checkpoint(directory, config(**changes), random_tensors(directory, seed))
    return directory


def random_tensors(directory: Path, seed: int) -> dict[str, np.ndarray]:
    """Engine layout; a tied head is left out."""
    random = np.random.default_rng(seed)
    specs = [spec for spec in parameter_specs(read_config(directory)) if spec.coverage is Coverage.UPDATED]
    return {spec.name: random.normal(0, 0.3, spec.shape).astype(np.float32) + (len(spec.shape) == 1) for spec in specs}


def open_runner(directory: Path, **limits: int) -> EmbeddedRunner:
    """A single rank with its own weights, ready for requests."""
    runner = EmbeddedRunner(directory, 0, 1, None, **limits)
    runner.bind(runner.load())
    runner.rebuild_kv_cache("0" * 64)
    runner.set_version("1.1")
    return runner


def submit(runner: EmbeddedRunner, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    for index, prompt in enumerate(prompts):
        runner.scheduler.submit(str(index), GenerationRequest(list(prompt), max_tokens, GREEDY, ignore_eos=True))


def generate(
    runner: EmbeddedRunner, prompts: Sequence[Sequence[int]], max_tokens: int, ranks: ShmCollectives | None = None
) -> Generated:
    """All prompts in one batch; every rank of `ranks` calls it, only rank 0 gets the tokens."""
    if runner.rank == 0:
        submit(runner, prompts, max_tokens)
    first_logits: dict[str, np.ndarray] = {}
    while (step := next_step(runner, ranks)) is not None:
        logits = runner.execute(step)
        if runner.rank == 0:
            runner.accept(step, logits)
        wanting = [part.request_id for part in step.slices if part.wants_logits]
        first_logits = dict(zip(wanting, logits, strict=True)) | first_logits
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for request_id, token in runner.scheduler.take_outputs() if runner.rank == 0 else ():
        tokens[request_id].append(token.token_id)
    return Generated(list(tokens.values()), np.stack([first_logits[request_id] for request_id in tokens]))


def next_step(runner: EmbeddedRunner, ranks: ShmCollectives | None = None) -> Step | None:
    """What rank 0 schedules, on every rank; None when nothing is left to do."""
    own = runner.scheduler.schedule() if runner.rank == 0 else None
    if ranks is None:
        return own
    payload = ranks.broadcast_bytes(msgspec.msgpack.encode(own) if ranks.rank == 0 else None, 0, timeout_s=TIMEOUT_S)
    return msgspec.msgpack.decode(payload, type=Step | None)


def generate_alone(runner: EmbeddedRunner, prompts: Sequence[Sequence[int]], max_tokens: int) -> Generated:
    """One prompt after the other."""
    single = [generate(runner, [prompt], max_tokens) for prompt in prompts]
    return Generated([one.tokens[0] for one in single], np.concatenate([one.logits for one in single]))


def generate_over_ranks(
    directory: Path, num_ranks: int, prompts: Sequence[Sequence[int]], max_tokens: int, out: Path
) -> tuple[Generated, Generated]:
    """(All in one batch, each alone), by real processes."""
    segment = f"fastdeploy_rl_test.{uuid.uuid4().hex}"
    job = {"directory": str(directory), "num_ranks": num_ranks, "segment": segment, "out": str(out)}
    job |= {"prompts": list(map(list, prompts)), "max_tokens": max_tokens}
    with SharedSegment.create(segment, CollectiveGroup.required_bytes(num_ranks, SLOT_BYTES)) as meeting:
        try:
            run_python("embedded_rank.py", *(job | {"rank": rank} for rank in range(num_ranks)))
        finally:
            meeting.unlink()
    return _read(out, "batched"), _read(out, "alone")


class Case(NamedTuple):
    """A checkpoint, prompts, and what the engine under test made of them."""

    directory: Path
    prompts: Sequence[Sequence[int]]
    actual: Generated


def ask_paddleformers(cases: Sequence[Case], out: Path) -> list[Generated]:
    """What PaddleFormers' own LlamaForCausalLM makes of the same directories and prompts.

    `tokens` are its most likely tokens after each prefix of (prompt, what the engine made): where they equal what the
    engine made, they are what it would have generated greedily by itself, at a fraction of the time.
    """
    jobs = [
        {
            "directory": str(case.directory),
            "prompts": list(map(list, case.prompts)),
            "continuations": case.actual.tokens,
            "out": str(out / f"{index}.npz"),
        }
        for index, case in enumerate(cases)
    ]
    run_python("paddleformers_reference.py", {"cases": jobs})
    return [_read(Path(str(job["out"])), "alone") for job in jobs]


def write(out: Path, **results: Generated) -> None:
    arrays = {}
    for name, result in results.items():
        arrays |= {f"{name}_tokens": np.array(result.tokens), f"{name}_logits": result.logits}
    np.savez(out, **arrays)


def _read(out: Path, name: str) -> Generated:
    with np.load(out) as arrays:
        return Generated(arrays[f"{name}_tokens"].tolist(), arrays[f"{name}_logits"])


def run_python(script: str, *jobs: Mapping[str, object], timeout_s: float = 200.0) -> None:
    """Runs a program of this directory once for each job, all at once. RuntimeError: the output of one that failed."""
    children = [_start(script, job) for job in jobs]
    try:
        outputs = [child.communicate(timeout=timeout_s)[0].decode(errors="replace") for child in children]
    finally:
        for child in children:
            child.kill()
            child.communicate()
    failed = [output for output, child in zip(outputs, children, strict=True) if child.returncode]
    if failed:
        raise RuntimeError(failed[0][-3000:])


def _start(script: str, job: Mapping[str, object]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-W", "ignore", str(HERE / script), msgspec.json.encode(job).decode()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())
