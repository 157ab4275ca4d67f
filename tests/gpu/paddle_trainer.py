"""A trainer that knows FastDeploy alone: `python -m tests.gpu.paddle_trainer DEVICE FILE`.

Writes where its tensors on a device lie, as FastDeploy's readers take it; prints the sha256 of each one's bytes as a
JSON object; keeps them until its standard input ends."""

import hashlib
import json
import sys
from typing import Any

import paddle

NUM_TENSORS = 40


def row(tensor: Any) -> list[Any]:
    """The handle as text, which is what FastDeploy encodes before it opens it."""
    handle, *rest = tensor.value().get_tensor()._share_cuda()
    return [handle.decode("latin-1"), *rest]


def main() -> None:
    device, file = sys.argv[1:]
    paddle.device.set_device(f"gpu:{device}")
    dtypes = ("float32", "bfloat16", "float16", "int64")
    tensors = {f"layer.{k}.weight": (paddle.rand([3, 5 + k]) * 100).astype(dtypes[k % 4]) for k in range(NUM_TENSORS)}
    paddle.device.synchronize()
    paddle.save({name: row(tensor) for name, tensor in tensors.items()}, file)
    print(json.dumps({name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}))
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
