"""A trainer with CUDA tensors, in a process of its own, and the handle that tests have on it.

As `stock` it knows FastDeploy only: it pickles `ipc_metas_{gpu}` itself, from rows as Paddle's `_share_cuda` gives
them. As `ours` it is a WeightPublisher that publishes for both.
"""

import base64
import json
import pickle
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastdeploy_rl import _native, config, errors
from fastdeploy_rl.dtypes import NAMES
from fastdeploy_rl.memory.cuda_record import open_device
from fastdeploy_rl.publish.fastdeploy_compat import FastDeployFiles
from fastdeploy_rl.publish.publisher import Shard, WeightPublisher

INDICES = {"BOOL": 1, "U8": 2, "I32": 7, "F32": 10, "F64": 11, "F16": 15, "BF16": 16}
"""phi::DataType."""

_BLOCK_BYTES = 2 << 20
_PLACE_BYTES = 256


class FastDeployTrainer:
    """Starts the process and talks to it. What fails there raises here, as the same class."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.process.fastdeploy_trainer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=config.child_environ(environ),
            cwd=Path(__file__).parents[2],
        )

    def send(self, verb: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps([verb, arguments]), file=self._process.stdin, flush=True)

    def receive(self) -> Any:
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise errors.from_wire(answer["error"], answer["text"])
        return answer["result"]

    def ask(self, verb: str, **arguments: Any) -> Any:
        self.send(verb, **arguments)
        return self.receive()

    def write(self, path: Path, tensors: dict[str, np.ndarray[Any, Any]], device: int = 0, cuts: int = 2) -> None:
        """New memory in `cuts` allocations, and a file that names it; what the file named before is freed then."""
        self.ask("write", path=str(path), tensors=_packed(tensors), device=device, cuts=cuts)

    def overwrite(self, path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        """Other values where the tensors lie; the file stays as it is."""
        self.ask("overwrite", path=str(path), tensors=_packed(tensors))

    def begin_publish(self, channel: Path, tensors: dict[str, np.ndarray[Any, Any]], **arguments: Any) -> None:
        """As a WeightPublisher, from CUDA memory, with compat; `receive` gives the version."""
        self.send("publish", channel=str(channel), tensors=_packed(tensors), **arguments)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60)

    def __enter__(self) -> "FastDeployTrainer":
        return self

    def __exit__(self, *error: object) -> None:
        with self._process:
            self._process.kill()


def _packed(tensors: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
    return [
        [name, NAMES[value.dtype], list(value.shape), base64.b64encode(value.tobytes()).decode()]
        for name, value in tensors.items()
    ]


class _Place(NamedTuple):
    memory: _native.CudaMemory
    offset: int
    num_bytes: int


class _CudaTensor:
    """Speaks DLPack as a framework's tensor on a device does."""

    def __init__(self, place: _Place, dtype: str, shape: list[int], device: int) -> None:
        self._place, self._dtype, self._shape, self._device = place, dtype, shape, device

    def __dlpack__(self, **_: Any) -> Any:
        return self._place.memory.dlpack(self._place.offset, self._shape, self._dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._device


class _Server:
    def __init__(self) -> None:
        self._contexts: dict[int, _native.CudaContext] = {}
        self._written: dict[str, tuple[list[_native.CudaMemory], dict[str, _Place]]] = {}
        self._publishers: dict[str, WeightPublisher] = {}
        self._published: dict[str, list[_native.CudaMemory]] = {}
        self._stack = ExitStack()

    def serve(self) -> None:
        with self._stack:
            for line in sys.stdin:
                verb, arguments = json.loads(line)
                print(json.dumps(self._answer(verb, arguments)), flush=True)

    def _answer(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"result": getattr(self, verb)(**arguments)}
        except errors.FastDeployRLError as error:
            return {"error": type(error).__name__, "text": str(error)}

    def _context(self, device: int) -> _native.CudaContext:
        if device not in self._contexts:
            self._contexts[device] = open_device(str(device))[1]
        return self._contexts[device]

    def _allocated(
        self, tensors: list[Any], device: int, cuts: int
    ) -> tuple[list[_native.CudaMemory], dict[str, _Place]]:
        """Tensor number i lies in block i % cuts, one behind the other."""
        blocks = [self._context(device).allocate(_BLOCK_BYTES) for _ in range(cuts)]
        ends = [0] * cuts
        places = {}
        for number, (name, _, _, data) in enumerate(tensors):
            values = base64.b64decode(data)
            cut = number % cuts
            places[name] = _Place(blocks[cut], ends[cut], len(values))
            blocks[cut].write(ends[cut], values)
            ends[cut] += -(-max(len(values), 1) // _PLACE_BYTES) * _PLACE_BYTES
        return blocks, places

    def write(self, path: str, tensors: list[Any], device: int, cuts: int) -> None:
        blocks, places = self._allocated(tensors, device, cuts)
        handles = {id(block): self._context(device).export_handle(block.address) for block in blocks}
        rows = {}
        for name, dtype, shape, _ in tensors:
            place = places[name]
            handle = handles[id(place.memory)].decode("latin-1")
            rows[name] = [handle, place.offset, place.num_bytes, INDICES[dtype], shape, [], device]
        whole = Path(path)
        whole.with_suffix(".new").write_bytes(pickle.dumps(rows, 4))
        whole.with_suffix(".new").rename(whole)
        for block in self._written.pop(path, ([], {}))[0]:
            block.close()
        self._written[path] = blocks, places

    def overwrite(self, path: str, tensors: list[Any]) -> None:
        for name, _, _, data in tensors:
            place = self._written[path][1][name]
            place.memory.write(place.offset, base64.b64decode(data))

    def free(self, path: str) -> None:
        for block in self._written.pop(path)[0]:
            block.close()

    def publish(
        self,
        channel: str,
        tensors: list[Any],
        step: int,
        model_dir: str,
        metas_dir: str,
        gpus: list[str],
        device: int = 0,
        part: tuple[int, int] = (0, 1),
        shards: dict[str, list[int]] | None = None,
    ) -> str:
        blocks, places = self._allocated(tensors, device, 1)
        self._published.setdefault(channel, []).extend(blocks)
        state = {name: _CudaTensor(places[name], dtype, shape, device) for name, dtype, shape, _ in tensors}
        if channel not in self._publishers:
            publisher = WeightPublisher(channel, part=(part[0], part[1]))
            self._publishers[channel] = self._stack.enter_context(publisher)
        published = self._publishers[channel].publish(
            state,
            step=step,
            shards={name: Shard(*numbers) for name, numbers in (shards or {}).items()},
            compat="fastdeploy",
            fastdeploy=FastDeployFiles(model_dir, gpus, metas_dir=metas_dir),
        )
        return str(published.version)

    def borrowed(self, channel: str) -> list[bool]:
        """Of each publication's memory, whether anybody still has a tensor in it."""
        return [block.num_exports > 0 for block in self._published[channel]]

    def close(self, channel: str) -> None:
        self._publishers.pop(channel).close()


if __name__ == "__main__":
    _Server().serve()
