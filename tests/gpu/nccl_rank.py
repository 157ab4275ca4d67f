"""One of two processes that meet over NCCL: `python -m tests.gpu.nccl_rank RANK`, the endpoints in Paddle's variables.

Sums over the group; lets its groups go and come back as they do around weights that are cleared, twice; prints the sums
as a JSON line."""

import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import paddle
from paddle import distributed

from fastdeploy_rl.engines.fastdeploy.expert_parallel import ExpertParallel

NUM_ROUNDS = 3
NUM_VALUES = 1 << 20


def expected_sum(round_number: int) -> float:
    return float(sum(rank + 10 * round_number for rank in range(2)))


def summed(group: Any, rank: int, round_number: int) -> float:
    values = paddle.full([NUM_VALUES], float(rank + 10 * round_number))
    distributed.all_reduce(values, group=group)
    return float(values.mean())


def parallel_config(group: Any) -> SimpleNamespace:
    """What of FastDeploy's is looked at. There is no DeepEP here."""
    return SimpleNamespace(
        enable_expert_parallel=False, tensor_parallel_size=2, tp_group=group, shutdown_comm_group_if_worker_idle=True
    )


def main() -> None:
    rank = int(sys.argv[1])
    paddle.device.set_device(f"gpu:{rank}")
    distributed.init_parallel_env()
    group = distributed.new_group([0, 1])
    groups = ExpertParallel(parallel_config(group), partial(distributed.barrier, group))
    sums = [summed(group, rank, 0)]
    for round_number in range(1, NUM_ROUNDS):
        with groups.standing_still():
            groups.weights_are_gone()
            groups.weights_are_gone()
            groups.restart_groups()
        sums.append(summed(group, rank, round_number))
    print(json.dumps(sums), flush=True)


if __name__ == "__main__":
    main()
