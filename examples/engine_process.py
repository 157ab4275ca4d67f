"""What the examples share: their common options, and an engine for the time of the run where none is named."""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastdeploy_rl.config import default_channel

START_S = 600.0
"""How long an engine may take until it serves: a large model has much to read."""
STOP_S = 60.0


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, required=True, help="Hugging Face directory (scripts/make_model prints one)"
    )
    parser.add_argument("--engine", help="port or URL of a running engine (default: start one, and end it)")
    parser.add_argument("--ipc-dir", type=Path, default=default_channel(), help="the channel (default: this user's)")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel size of the engine that is started")
    parser.add_argument("--steps", type=int, default=3, help="training steps (default 3)")
    return parser


@contextmanager
def engine_of(options: argparse.Namespace, load_strategy: str = "ipc") -> Iterator[int | str]:
    """The address of the engine to steer: the one that was named, or one of our own."""
    if options.engine is not None:
        yield int(options.engine) if options.engine.isdigit() else options.engine
        return
    port = str(_free_port())  # of its HTTP server, and the number that names its board
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl-log-") as log_dir:
        command = [
            *(sys.executable, "-m", "fastdeploy_rl.cli", "serve", "--json", "--model", str(options.model)),
            *("--tensor-parallel-size", str(options.ranks), "--ipc-dir", str(options.ipc_dir), "--log-dir", log_dir),
            *("--port", port, "--engine-worker-queue-port", port, "--load-strategy", load_strategy),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
            try:
                _await_ready(engine)
                yield int(port)
            finally:
                _stop(engine)


def _await_ready(engine: "subprocess.Popen[str]") -> None:
    """The engine tells as JSON lines what it starts, and when it serves."""
    deadline = threading.Timer(START_S, engine.kill)  # which ends its output, and the loop
    deadline.start()
    try:
        for line in engine.stdout or ():
            event = json.loads(line)["event"]
            print(f"engine: {event}", flush=True)
            if event == "ready":
                return
    finally:
        deadline.cancel()
    sys.exit("the engine did not start: see its message above")


def _stop(engine: "subprocess.Popen[str]") -> None:
    engine.terminate()
    try:
        engine.wait(STOP_S)
    except subprocess.TimeoutExpired:
        engine.kill()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
