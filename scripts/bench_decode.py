"""Decoding on the real model, one rank: the engine as a user meets it (over HTTP) beside PaddleFormers' `generate`, and
many requests at once beside one alone."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench_row import Row, at_least
from demo_parts import Engine

TOKENS = 64
AT_ONCE = 8
PROMPT = "Once upon a time, in a village by the sea, there lived"
PEER = Path(__file__).with_name("bench_peer.py")


def decode_rows(model_dir: Path, runs: int) -> list[Row]:
    """All take turns, so that they meet the same machine; one waits while another works."""
    ours, together, peers = [], [], []
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl_bench") as folder:
        engine = Engine(model_dir, 1, Path(folder) / "channel", Path(folder))
        command = [sys.executable, str(PEER), str(model_dir), PROMPT, str(TOKENS)]
        peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            engine.await_ready()
            peer.stdout.readline()
            for _ in range(runs + 1):
                ours.append(_engine_rate(engine, 1))
                together.append(_engine_rate(engine, AT_ONCE))
                peer.stdin.write("go\n")
                peer.stdin.flush()
                peers.append(float(json.loads(peer.stdout.readline())))
        finally:
            peer.stdin.close()
            peer.wait(30)
            peer.stdout.close()
            engine.stop()
    one, many, peer_rate = (statistics.median(rates[1:]) for rates in (ours, together, peers))
    name = "decode, real model, 1 rank, "
    return [
        at_least(name + "1 stream", one, "tokens/s", "PaddleFormers generate", peer_rate, 1.5 * peer_rate, ">= 1.5"),
        at_least(f"{name}{AT_ONCE} requests at once", many, "tokens/s", "1 stream", one, 3 * one, ">= 3"),
    ]


def _engine_rate(engine: Engine, num_requests: int) -> float:
    """Tokens per second of whole requests that begin together, prompts included."""
    bodies = [
        {"prompt": f"{PROMPT} {index}", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        for index in range(num_requests)
    ]

    def complete(body: dict[str, object]) -> int:
        answer = engine.request("POST", "/v1/completions", json=body).raise_for_status().json()
        return int(answer["usage"]["completion_tokens"])

    with ThreadPoolExecutor(num_requests) as clients:
        started = time.perf_counter()
        num_tokens = sum(clients.map(complete, bodies))
        return num_tokens / (time.perf_counter() - started)
