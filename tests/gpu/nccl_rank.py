"""One of two processes that meet over NCCL: `python -m tests.gpu.nccl_rank RANK`, the endpoints in Paddle's variables.

Sums over the group, shuts its groups down and starts them again in FastDeploy's order, twice; prints one JSON line."""

import json
import sys
from typing import Any

import paddle
from paddle import distributed

NUM_ROUNDS = 3
NUM_VALUES = 1 << 20


def expected_sum(round_number: int) -> float:
    return float(sum(rank + 10 * round_number for rank in range(2)))


def summed(group: Any, rank: int, round_number: int) -> float:
    values = paddle.full([NUM_VALUES], float(rank + 10 * round_number))
    distributed.all_reduce(values, group=group)
    return float(values.mean())


def shut_down(tensor_parallel: Any) -> None:
    """The smaller group first, and nobody before all have come out of it."""
    distributed.barrier(tensor_parallel)
    distributed.shutdown_process_group(tensor_parallel)
    distributed.shutdown_process_group()


def restart(tensor_parallel: Any) -> None:
    distributed.restart_process_group()
    distributed.restart_process_group(tensor_parallel)


def main() -> None:
    rank = int(sys.argv[1])
    paddle.device.set_device(f"gpu:{rank}")
    distributed.init_parallel_env()
    tensor_parallel = distributed.new_group([0, 1])
    sums = [summed(tensor_parallel, rank, 0)]
    for round_number in range(1, NUM_ROUNDS):
        shut_down(tensor_parallel)
        restart(tensor_parallel)
        sums.append(summed(tensor_parallel, rank, round_number))
    print(json.dumps(sums), flush=True)


if __name__ == "__main__":
    main()
