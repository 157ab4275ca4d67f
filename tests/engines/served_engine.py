"""A running `serve` with real worker processes, asked over HTTP and board, its memory looked at from outside.

Models are random Llamas of some tens of megabytes: large enough that freeing their weights shows in a process's memory.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import numpy as np

from fastdeploy_rl.control.controller import EngineController
from fastdeploy_rl.coverage import Coverage
from fastdeploy_rl.engines.embedded.checkpoint import save_checkpoint
from fastdeploy_rl.engines.embedded.model_config import parameter_specs, read_config
from tests.process.served_model import CONFIG, write_tiny_llama

DEADLINE_S = 60.0
HERE = Path(__file__).parent
SIZES: dict[str, object] = {
    "vocab_size": 6000,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "max_position_embeddings": 512,
}
Weights = dict[str, np.ndarray]
"""Whole tensors in engine layout, float32."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# --- models ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A checkpoint on disk and the same weights in memory."""

    directory: Path
    weights: Weights

    @classmethod
    def write(cls, directory: Path, *, seed: int, is_tied: bool) -> "Model":
        settings: dict[str, object] = SIZES | {"tie_word_embeddings": is_tied}
        write_tiny_llama(directory, **settings)
        weights = random_weights(directory, seed)
        save_checkpoint(directory, CONFIG | settings, weights)
        return cls(directory, weights)

    def slices(self, rank: int, num_ranks: int) -> dict[str, bytes]:
        """What a rank must hold of it, by cutting alone."""
        axes = {spec.name: spec.shard_axis for spec in parameter_specs(read_config(self.directory))}
        return {name: cut(value, axes[name], rank, num_ranks).tobytes() for name, value in self.weights.items()}


def random_weights(directory: Path, seed: int) -> Weights:
    """Lively enough that greedy tokens differ from position to position and from seed to seed."""
    random = np.random.default_rng(seed)
    specs = [spec for spec in parameter_specs(read_config(directory)) if spec.coverage is Coverage.UPDATED]
    return {
        spec.name: 0.1 * random.standard_normal(spec.shape, np.float32) + np.float32(len(spec.shape) == 1)
        for spec in specs
    }


def cut(value: np.ndarray, axis: int | None, rank: int, num_ranks: int) -> np.ndarray:
    return value if axis is None else np.split(value, num_ranks, axis)[rank]


# --- engines ---------------------------------------------------------------------------------------


class ServedEngine:
    """One engine. A with statement starts and stops it; `await_ready` before anything else."""

    def __init__(
        self,
        model: Model,
        place: Path,
        *,
        num_ranks: int,
        apply_mode: str = "auto",
        options: Sequence[str] = (),
        is_poisoned: bool = False,
    ) -> None:
        """`options`: further ones of `serve`. `is_poisoned`: memory that it gave back is NaN (poison.py)."""
        self.num_ranks = num_ranks
        self.channel = place / "channel"
        self.port, self.board_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log_dir = place / "log"
        self._is_poisoned = is_poisoned
        self._window = f"fastdeploy_rl_test_window.{uuid.uuid4().hex[:12]}"
        self._stack = ExitStack()
        self._command = [
            *(sys.executable, str(HERE / "windowed_serve.py"), "serve", "--json", "--model", str(model.directory)),
            *("--tensor-parallel-size", str(num_ranks), "--apply-mode", apply_mode, "--load-strategy", "ipc"),
            *("--ipc-dir", str(self.channel), "--log-dir", str(self._log_dir), "--port", str(self.port)),
            *("--engine-worker-queue-port", str(self.board_port), *options),
        ]

    def __enter__(self) -> "ServedEngine":
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        environ = dict(os.environ) | {"WINDOW": self._window, "PYTHONPATH": path}
        environ["POISON"] = "1" if self._is_poisoned else ""
        self._log_dir.mkdir(parents=True)
        with ExitStack() as stack:
            # Unbuffered: a line that was read along with another would never make the pipe readable again.
            with (self._log_dir / "stderr").open("wb") as stderr:
                self._child = subprocess.Popen(
                    self._command, stdout=subprocess.PIPE, stderr=stderr, env=environ, bufsize=0
                )
            stack.callback(self._child.stdout.close)
            stack.callback(self._end)
            # No connection outlasts its request: a test must leave as many sockets as it found.
            limits = httpx.Limits(max_keepalive_connections=0)
            self.http = stack.enter_context(httpx.Client(base_url=self.url, timeout=DEADLINE_S, limits=limits))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        if error is None and self._child.returncode:
            raise RuntimeError(f"serve ended with {self._child.returncode}: {self.logs()}")

    def await_ready(self) -> dict[str, Any]:
        event = self.await_event("ready")
        self.control = self._stack.enter_context(EngineController(self.board_port))
        return event

    def await_event(self, name: str) -> dict[str, Any]:
        """The next line of `serve` that tells of it."""
        event: dict[str, Any] = {"event": ""}
        while event["event"] != name:
            has_line = bool(select.select([self._child.stdout], [], [], DEADLINE_S)[0])
            line = self._child.stdout.readline() if has_line else b""
            if not line:
                raise RuntimeError(f"serve does not say {name!r}: {self.logs()}")
            event = json.loads(line)
        return event

    def kill(self, rank: int) -> None:
        """As the kernel does where memory runs out."""
        os.kill(self.pid(rank), signal.SIGKILL)

    def await_serving(self) -> None:
        """Until it serves, or does so again."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.control.status().is_serving:
            if time.monotonic() > deadline:
                raise RuntimeError(f"it does not serve: {self.control.status().reason}: {self.logs()}")
            time.sleep(0.02)  # bounded by the deadline above

    def _end(self) -> None:
        self._child.send_signal(signal.SIGINT)
        try:
            self._child.wait(DEADLINE_S)
        finally:
            self._child.kill()
            self._child.wait(DEADLINE_S)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self._log_dir.glob("*")))

    # --- answers -----------------------------------------------------------------------------------

    def complete(self, prompt: Sequence[int], num_tokens: int, **more: Any) -> dict[str, Any]:
        answer = self.http.post("/v1/completions", json=greedy(prompt, num_tokens) | more)
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.text}")
        body: dict[str, Any] = answer.json()
        return body

    def tokens(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        tokens: list[int] = self.complete(prompt, num_tokens)["choices"][0]["completion_token_ids"]
        return tokens

    @contextmanager
    def stream(self, prompt: Sequence[int], num_tokens: int, **more: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a streamed completion, one by one; closed early, the request is cancelled."""
        body = greedy(prompt, num_tokens) | {"stream": True} | more
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            yield (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {"))

    # --- memory ------------------------------------------------------------------------------------

    def pid(self, rank: int) -> int:
        return self.control.status().ranks[rank].pid

    def places(self, rank: int) -> dict[str, tuple[int, int]]:
        """Address and size in bytes of every parameter that is bound on a rank."""
        with socket.socket(socket.AF_UNIX) as visitor:
            visitor.connect(f"\0{self._window}.{rank}")
            return {name: (place[0], place[1]) for name, place in json.load(visitor.makefile("rb")).items()}

    def file_of(self, rank: int, name: str) -> str:
        """Path of the file, or shared-memory segment, that a bound parameter lies in; empty for private memory."""
        address, _ = self.places(rank)[name]
        for line in Path(f"/proc/{self.pid(rank)}/maps").read_text().splitlines():
            place, *_, path = line.split(maxsplit=5) if "/" in line else [*line.split(maxsplit=5)[:1], ""]
            start, end = (int(text, 16) for text in place.split("-"))
            if start <= address < end:
                return path
        raise RuntimeError(f"rank {rank}: {name} is bound to {address:#x}, where nothing is mapped")

    def bytes_of(self, rank: int) -> dict[str, bytes]:
        """The bytes of every bound parameter, read out of the worker's memory by the kernel."""
        with open(f"/proc/{self.pid(rank)}/mem", "rb", buffering=0) as memory:
            return {name: read_at(memory, *place) for name, place in self.places(rank).items()}

    def flip(self, rank: int, name: str, offset: int) -> None:
        """Turns the lowest bit of one byte of a live parameter around, as a stray write would."""
        address, _ = self.places(rank)[name]
        with open(f"/proc/{self.pid(rank)}/mem", "r+b", buffering=0) as memory:
            byte = read_at(memory, address + offset, 1)[0]
            memory.seek(address + offset)
            memory.write(bytes([byte ^ 1]))

    def differing(self, model: Model) -> list[tuple[int, str]]:
        """(rank, parameter) of everything that is not, to the bit, the rank's slice of `model`."""
        wrong = []
        for rank in range(self.num_ranks):
            found, expected = self.bytes_of(rank), model.slices(rank, self.num_ranks)
            wrong += [(rank, name) for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)]
        return wrong

    def resident_bytes(self, rank: int) -> int:
        """RssAnon + RssShmem of a worker."""
        lines = Path(f"/proc/{self.pid(rank)}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def greedy(prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    options = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": list(prompt), "max_tokens": num_tokens, **options}


def read_at(memory: Any, address: int, num_bytes: int) -> bytes:
    memory.seek(address)
    data = bytearray()
    while len(data) < num_bytes:
        data += memory.read(num_bytes - len(data))
    return bytes(data)
