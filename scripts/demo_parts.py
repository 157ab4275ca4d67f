"""The demo's stage hands: processes that speak JSON lines, an engine over HTTP, the memory of its workers.

Owns how a story starts, asks, measures and stops; the stories are demo_story.py and lifecycle_story.py.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

Json = dict[str, Any]
START_S = 120.0
ANSWER_S = 120.0
STOP_S = 20.0


class DemoError(Exception):
    """A part of the demo did not do what it should; the text says where to look."""


@dataclass
class Teller:
    """Says on the terminal what happens, and which promises were kept."""

    console: Console
    broken_promises: list[str] = field(default_factory=list, init=False)

    def say(self, text: str) -> None:
        self.console.print(f"  {text}")

    def promise(self, is_kept: bool, text: str) -> bool:
        """One line with its verdict; a broken one fails the demo in the end."""
        mark = "[green]kept[/]" if is_kept else "[bold red]BROKEN[/]"
        self.console.print(f"  {mark}  {text}")
        if not is_kept:
            self.broken_promises.append(text)
        return is_kept


class JsonProcess:
    """A child that writes JSON lines and, where it takes commands,
    reads them; what it complains about goes to `log`."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        self._buffer = b""
        with log.open("wb") as errors:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                # Ctrl-C on the terminal is for the story, which stops its processes in order.
                start_new_session=True,
            )

    def send(self, **command: Any) -> None:
        if self._child.stdin is None:
            raise DemoError("the process takes no commands")
        with contextlib.suppress(BrokenPipeError):  # its death is told by what reads from it
            self._child.stdin.write(json.dumps(command).encode() + b"\n")
            self._child.stdin.flush()

    def events(self, last: str, timeout_s: float) -> Iterator[Json]:
        """Lines up to and with the event `last`. DemoError for an error, the end of the process or silence."""
        deadline = time.monotonic() + timeout_s
        while True:
            event = self._read(deadline)
            if event["event"] == "error":
                raise DemoError(f"{event['type']}: {event['message']}")
            yield event
            if event["event"] == last:
                return

    def ask(self, timeout_s: float = ANSWER_S, **command: Any) -> Json:
        """Sends a command; the fields of all its answers together."""
        self.send(**command)
        answer: Json = {}
        for event in self.events("done", timeout_s):
            answer |= event
        return answer

    def _read(self, deadline: float) -> Json:
        stdout = self._child.stdout
        if stdout is None:
            raise DemoError("the process says nothing")
        while b"\n" not in self._buffer:
            if not select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise DemoError(f"no answer in time; see {self._log}")
            data = os.read(stdout.fileno(), 1 << 16)
            if not data:
                raise DemoError(self._end())
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        event: Json = json.loads(line)
        return event

    def _end(self) -> str:
        code = self._child.wait(STOP_S)
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"{lines[-1] if lines else 'it said nothing'} (exit code {code}; see {self._log})"

    def stop(self) -> None:
        """Interrupts it, and kills it when it does not end in time."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGINT)
            try:
                self._child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait(STOP_S)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Engine:
    """`fastdeploy-rl serve` as a process, asked over HTTP."""

    def __init__(
        self,
        model_dir: Path,
        num_ranks: int,
        channel: Path,
        log_dir: Path,
        load_strategy: str = "ipc",
        options: Sequence[str] = (),
    ) -> None:
        """`options`: further ones of `serve`."""
        self.port, self.board_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.weight_bytes: list[int] = []
        self._process = JsonProcess(
            [
                *(sys.executable, "-m", "fastdeploy_rl.cli", "serve"),
                "--json",
                *("--model", str(model_dir)),
                *("--tensor-parallel-size", str(num_ranks)),
                *("--load-strategy", load_strategy),
                *("--ipc-dir", str(channel)),
                *("--port", str(self.port)),
                *("--engine-worker-queue-port", str(self.board_port)),
                *("--max-model-len", "1024"),
                *("--log-dir", str(log_dir)),
                *options,
            ],
            log_dir / "serve",
        )
        self._http = httpx.Client(base_url=self.url, timeout=ANSWER_S)

    def await_ready(self) -> Json:
        event = list(self._process.events("ready", START_S))[-1]
        self.weight_bytes = event["weight_bytes"]
        return event

    def chat(self, question: str, max_tokens: int = 24, **options: Any) -> Json:
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": max_tokens}
        return self._json(self._http.post("/v1/chat/completions", json=body | {"return_token_ids": True} | options))

    def request(self, method: str, path: str, **content: Any) -> httpx.Response:
        """An answer whatever its code."""
        return self._http.request(method, path, **content)

    def weights(self, path: str = "") -> Json:
        return self._json(self._http.get(f"/v1/weights{path}"))

    def command(self, name: str) -> Json:
        """POST /v1/weights/{name}: the report."""
        return self._json(self._http.post(f"/v1/weights/{name}", json={"deadline_s": 60}))

    def memory(self) -> list[int]:
        """Bytes of private and shared memory that each worker holds, in rank order."""
        return [resident_bytes(rank["pid"]) for rank in self.weights()["ranks"]]

    def stop(self) -> None:
        self._http.close()
        self._process.stop()

    @staticmethod
    def _json(answer: httpx.Response) -> Json:
        if answer.is_error:
            raise DemoError(f"{answer.request.url.path} answered {answer.status_code}: {answer.text}")
        body: Json = answer.json()
        return body


def resident_bytes(pid: int) -> int:
    """RssAnon + RssShmem of a process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
