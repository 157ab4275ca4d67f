"""One rank of an embedded engine as a program: python embedded_rank.py JOB (JSON, made by tiny_llama)."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tiny_llama import SLOT_BYTES, TIMEOUT_S, Generated, generate, write

from fastdeploy_rl.collectives.shm import ShmCollectives
from fastdeploy_rl.engines.embedded.runner import EmbeddedRunner


def main(job: dict[str, Any]) -> None:
    rank, num_ranks = job["rank"], job["num_ranks"]
    with ShmCollectives(
        job["segment"], rank, num_ranks, create=False, slot_bytes=SLOT_BYTES, timeout_s=TIMEOUT_S
    ) as ranks:
        runner = EmbeddedRunner(Path(job["directory"]), rank, num_ranks, ranks)
        runner.bind(runner.load())
        runner.rebuild_kv_cache("0" * 64)
        runner.recapture_graphs()
        runner.set_version("1.1")
        batched = generate(runner, job["prompts"], job["max_tokens"], ranks)
        single = [generate(runner, [prompt], job["max_tokens"], ranks) for prompt in job["prompts"]]
        runner.unbind()
    if rank == 0:
        alone = Generated([one.tokens[0] for one in single], np.concatenate([one.logits for one in single]))
        write(Path(job["out"]), batched=batched, alone=alone)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1]))
