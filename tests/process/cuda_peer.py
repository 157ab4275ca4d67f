"""The other process of the CUDA tests: `python cuda_peer.py DIRECTORY DEVICE`, and the handle that tests have on it.

It is an exporter and an importer at once, and does what JSON lines on its standard input say; each gets one line back.
"""

import base64
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fastdeploy_rl import _native, config, errors
from fastdeploy_rl.memory.cuda_imports import CudaImport
from fastdeploy_rl.memory.cuda_ipc import CudaAllocation, CudaExporter, CudaImports, CudaRecord
from fastdeploy_rl.memory.cuda_record import open_device


class CudaPeer:
    """Starts the process and talks to it. What fails there raises here, as the same class."""

    def __init__(self, directory: Path, device: str, environ: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tests.process.cuda_peer", str(directory), device]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=config.child_environ(environ),
            cwd=Path(__file__).parents[2],
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, verb: str, *args: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps([verb, *args]), file=self._process.stdin, flush=True)

    def receive(self) -> Any:
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise errors.from_wire(answer["error"], answer["text"])
        return answer["result"]

    def ask(self, verb: str, *args: Any) -> Any:
        self.send(verb, *args)
        return self.receive()

    def open(self, record: CudaRecord) -> int:
        """A number for the import."""
        return int(self.ask("open", record.to_json().decode()))

    def read(self, number: int) -> bytes:
        return base64.b64decode(self.ask("read", number))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60)

    def __enter__(self) -> "CudaPeer":
        return self

    def __exit__(self, *error: object) -> None:
        with self._process:
            self._process.kill()


def held(process: str = "self") -> dict[str, int]:
    """What a process holds: descriptors, mappings, bytes of private memory."""
    status = Path(f"/proc/{process}/status").read_text()
    anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return {
        "descriptors": len(os.listdir(f"/proc/{process}/fd")),
        "mappings": len(Path(f"/proc/{process}/maps").read_text().splitlines()),
        "bytes": int(anonymous.split()[1]) * 1024,
    }


class _Server:
    def __init__(self, directory: Path, device: str) -> None:
        self._device = device
        self._exporter = CudaExporter(directory, device)
        self._imports = CudaImports(directory, device)
        self._allocations: list[CudaAllocation] = []
        self._opened: list[CudaImport] = []
        self._tensors: list[Any] = []

    def serve(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._exporter)
            stack.enter_context(self._imports)
            for line in sys.stdin:
                verb, *args = json.loads(line)
                print(json.dumps(self._answer(getattr(self, verb), args)), flush=True)

    def _answer(self, verb: Callable[..., Any], args: list[Any]) -> dict[str, Any]:
        try:
            return {"result": verb(*args)}
        except errors.FastDeployRLError as error:
            return {"error": type(error).__name__, "text": str(error)}

    def allocate(self, text: str) -> str:
        return self._allocate(text.encode())

    def allocate_filled(self, num_bytes: int, byte: int) -> str:
        return self._allocate(bytes([byte]) * num_bytes)

    def _allocate(self, data: bytes) -> str:
        allocation = self._exporter.allocate(len(data))
        allocation.write(data)
        self._allocations.append(allocation)
        return allocation.record(0, len(data)).to_json().decode()

    def open(self, record: str) -> int:
        self._opened.append(self._imports.open(CudaRecord.from_json(record.encode())))
        return len(self._opened) - 1

    def open_all(self, records: list[str]) -> list[int]:
        return [self.open(record) for record in records]

    def read(self, number: int) -> str:
        data = bytearray(self._opened[number].num_bytes)
        self._opened[number].read(data)
        return base64.b64encode(data).decode()

    def read_all(self, numbers: list[int]) -> list[str]:
        return [self.read(number) for number in numbers]

    def check(self, number: int) -> None:
        self._opened[number].check()

    def release(self, number: int) -> None:
        self._opened[number].release()

    def release_all(self, numbers: list[int]) -> None:
        for number in numbers:
            self._opened[number].release()

    def num_open(self) -> int:
        return self._imports.num_open

    def make_tensor(self, number: int) -> int:
        """Answers how far behind the import's first byte the tensor lies."""
        tensor = _native.borrow_dlpack(self._opened[number].dlpack([2, 3], "BF16", 512))
        assert tensor.device[0] == 2
        self._tensors.append(tensor)
        return tensor.address - self._opened[number].address

    def drop_tensors(self) -> None:
        self._tensors.clear()

    def visit(self, record: str) -> str:
        """Opens, reads and releases."""
        with self._imports.open(CudaRecord.from_json(record.encode())) as imported:
            data = bytearray(imported.num_bytes)
            imported.read(data)
        return base64.b64encode(data).decode()

    def visit_until_stale(self, record: str) -> int:
        """Says how often the memory could be opened before it was freed, having said at the first time."""
        count = 0
        while True:
            try:
                self.visit(record)
            except errors.StaleMemoryError:
                return count
            count += 1

    def open_twice_in_driver(self, record: str) -> bool:
        """Without our layer: does the driver give one address?"""
        parsed = CudaRecord.from_json(record.encode())
        _, context = open_device(self._device)
        first = context.open(parsed.handle, parsed.base_bytes)
        second = context.open(parsed.handle, parsed.base_bytes)
        return first.address == second.address

    def held(self) -> dict[str, int]:
        gc.collect()
        return held()


if __name__ == "__main__":
    _Server(Path(sys.argv[1]), sys.argv[2]).serve()
