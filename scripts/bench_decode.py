"""Decoding on the real model, one rank: the engine as a user meets it (over HTTP) beside PaddleFormers' `generate`."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_row import Row, at_least
from demo_parts import Engine

TOKENS = 64
PROMPT = "Once upon a time, in a village by the sea, there lived"
PEER = Path(__file__).with_name("bench_peer.py")


def decode_rows(model_dir: Path, runs: int) -> list[Row]:
    """The two take turns, so that both meet the same machine; one waits while the other works."""
    ours, peers = [], []
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl_bench") as folder:
        engine = Engine(model_dir, 1, Path(folder) / "channel", Path(folder))
        command = [sys.executable, str(PEER), str(model_dir), PROMPT, str(TOKENS)]
        peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            engine.await_ready()
            peer.stdout.readline()
            for _ in range(runs + 1):
                ours.append(_engine_rate(engine))
                peer.stdin.write("go\n")
                peer.stdin.flush()
                peers.append(float(json.loads(peer.stdout.readline())))
        finally:
            peer.stdin.close()
            peer.wait(30)
            peer.stdout.close()
            engine.stop()
    rate, limit = statistics.median(ours[1:]), statistics.median(peers[1:])
    name = "decode, real model, 1 rank, 1 stream"
    return [at_least(name, rate, "tokens/s", "PaddleFormers generate", limit, 1.5 * limit, ">= 1.5")]


def _engine_rate(engine: Engine) -> float:
    """Tokens per second of a whole request, prompt included."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    started = time.perf_counter()
    answer = engine.request("POST", "/v1/completions", json=body).raise_for_status().json()
    return answer["usage"]["completion_tokens"] / (time.perf_counter() - started)
