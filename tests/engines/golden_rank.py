"""One rank that runs golden sequences as a program: python golden_rank.py JOB (JSON, made by test_golden_models)."""

import sys
from typing import Any

import msgspec
import numpy as np
from golden_steps import GOLDEN, pieces, run_steps, whole_prompts
from tiny_llama import SLOT_BYTES, TIMEOUT_S, EmbeddedRunner

from fastdeploy_rl.collectives.shm import ShmCollectives


def main(job: dict[str, Any]) -> None:
    rank, num_ranks = job["rank"], job["num_ranks"]
    logits = {}
    with ShmCollectives(
        job["segment"], rank, num_ranks, create=False, slot_bytes=SLOT_BYTES, timeout_s=TIMEOUT_S
    ) as ranks:
        for name in job["models"]:
            runner = EmbeddedRunner(GOLDEN / name, rank, num_ranks, ranks)
            runner.bind(runner.load())
            runner.rebuild_kv_cache("0" * 64)
            logits[f"{name}_whole"] = run_steps(runner, whole_prompts(name))
            logits[f"{name}_pieces"] = run_steps(runner, pieces(name))
            runner.unbind()
    if rank == 0:
        np.savez(job["out"], **logits)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1]))
