"""`fastdeploy-rl serve` with real workers on a small model, steered by command line and HTTP as a user does."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from served_model import write_tiny_llama

from fastdeploy_rl import EngineController
from fastdeploy_rl.errors import ChecksumMismatchError, CoverageError, NotServingError
from fastdeploy_rl.memory.shared_segment import SharedSegment
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.report import UpdateReport

DEADLINE_S = 60.0
PROMPT = {"prompt": "once upon", "temperature": 0, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
CLI = [sys.executable, "-m", "fastdeploy_rl.cli"]


class Served:
    """A running engine of two ranks, its channel and the checkpoints A (seed 0) and B (seed 1)."""

    def __init__(self, directory: Path) -> None:
        self.port, self.board_port = _free_port(), _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.channel = directory / "channel"
        self.models = {name: write_tiny_llama(directory / name, seed=seed) for name, seed in (("A", 0), ("B", 1))}
        self._next_step = 1
        self.child = subprocess.Popen(
            [
                *CLI,
                "serve",
                "--json",
                *("--model", str(self.models["A"]), "--tensor-parallel-size", "2", "--load-strategy", "ipc"),
                *("--ipc-dir", str(self.channel), "--log-dir", str(directory / "log")),
                *("--port", str(self.port), "--engine-worker-queue-port", str(self.board_port)),
            ],
            stdout=subprocess.PIPE,
            bufsize=0,  # select sees what readline left, and a buffer would hide it
        )

    def await_ready(self) -> None:
        while True:
            assert self.child.stdout is not None
            assert select.select([self.child.stdout], [], [], DEADLINE_S)[0], "not ready in time"
            line = self.child.stdout.readline()
            assert line, f"serve ended with {self.child.wait(DEADLINE_S)}"
            if json.loads(line)["event"] == "ready":
                return

    def publish(self, name: str, layout: str = "full") -> str:
        """Publishes checkpoint A or B as the next step; its version."""
        step, self._next_step = self._next_step, self._next_step + 1
        published = self.cli("publish", str(self.models[name]), "--step", str(step), "--layout", layout, "--json")
        return str(json.loads(published)["version"])

    def cli(self, *arguments: str, code: int = 0) -> str:
        """Runs a verb; its output, or its one line of complaint where `code` is not 0."""
        place = (
            ["--ipc-dir", str(self.channel)]
            if arguments[0] in ("publish", "retire")
            else ["--engine", str(self.board_port)]
        )
        done = subprocess.run([*CLI, *arguments, *place], capture_output=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == code, done.stderr.decode()
        return done.stderr.decode() if code else done.stdout.decode()

    def complete(self, **changes: Any) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}/v1/completions", json=PROMPT | changes, timeout=DEADLINE_S)
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def tokens(self) -> list[int]:
        tokens: list[int] = self.complete()["choices"][0]["completion_token_ids"]
        return tokens

    def stop(self) -> int:
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGINT)
        code = self.child.wait(DEADLINE_S)
        if self.child.stdout is not None:
            self.child.stdout.close()
        return code


@pytest.fixture(scope="module")
def engine_of_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("served"))
    try:
        served.await_ready()
        yield served
    finally:
        code = served.stop()
    assert code == 0
    assert [name for name in os.listdir("/dev/shm") if name.endswith(f".{served.board_port}")] == []


@pytest.fixture
def served(engine_of_two: Served) -> Iterator[Served]:
    """The engine, for a test; what the test published is retired afterwards (the engine keeps what it uses)."""
    yield engine_of_two
    if engine_of_two.channel.exists():
        engine_of_two.cli("retire")


def test_updates_change_the_answers_and_going_back_restores_them(served: Served) -> None:
    tokens_of_a = served.tokens()
    for layout in ("full", "tp:2"):
        version = served.publish("B", layout)
        report = json.loads(served.cli("update", version, "--json"))
        assert (report["outcome"], report["version"]) == ("done", version)
        tokens_of_b = served.tokens()
        assert tokens_of_b != tokens_of_a
        version = served.publish("A", layout)
        with EngineController(served.url) as engine:
            report = engine.update(version)
        assert isinstance(report, UpdateReport)
        body = served.complete()
        assert body["choices"][0]["completion_token_ids"] == tokens_of_a
        assert body["weight_versions"] == [{"version": version, "start": 0, "end": 20}]


def test_a_stream_goes_on_through_an_update_and_says_which_tokens_are_of_which_version(served: Served) -> None:
    before = json.loads(served.cli("status", "--json"))["version"]
    version = served.publish("B", "tp:2")
    body = PROMPT | {"max_tokens": 200, "stream": True}
    events = []
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=DEADLINE_S) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == 3:
                    served.cli("update")
    spans = events[-1]["weight_versions"]
    assert spans[0]["version"] == before
    assert {span["version"] for span in spans} <= {before, version}
    assert (spans[0]["start"], spans[-1]["end"]) == (0, 200)


def test_clear_refuses_requests_until_an_update(served: Served) -> None:
    served.publish("A")
    served.cli("update")
    tokens = served.tokens()
    assert httpx.get(f"{served.url}/clear_load_weight").status_code == 200
    refused = httpx.post(f"{served.url}/v1/completions", json=PROMPT)
    assert refused.status_code == 503
    assert refused.headers["Retry-After"].isdigit()
    assert httpx.get(f"{served.url}/health").status_code == 503
    status = json.loads(served.cli("status", "--json"))
    assert (status["legacy_status"], status["is_serving"]) == ("CLEARED", False)
    assert httpx.get(f"{served.url}/update_model_weight").status_code == 200
    assert served.tokens() == tokens


def test_a_rejected_update_is_told_everywhere_and_changes_nothing(served: Served) -> None:
    served.publish("A")
    served.cli("update")
    tokens, before = served.tokens(), json.loads(served.cli("status", "--json"))["version"]
    other = write_tiny_llama(served.channel.parent / "wide", intermediate_size=64)
    served.models["wide"] = other
    served.publish("wide")
    assert "model.layers.0.mlp.up_proj.weight" in served.cli("update", code=2)
    with (
        EngineController(served.url) as engine,
        pytest.raises(CoverageError, match=r"model\.layers\.1\.mlp\.down_proj"),
    ):
        engine.update()
    answer = httpx.get(f"{served.url}/update_model_weight")
    assert answer.status_code == 409
    assert "model.layers.0.mlp.gate_proj.weight" in answer.json()["message"]
    assert served.tokens() == tokens
    assert json.loads(served.cli("status", "--json"))["version"] == before


def test_a_version_that_goes_back_is_refused_unless_forced(served: Served) -> None:
    served.publish("B")
    served.cli("update")
    live, tokens = json.loads(served.cli("status", "--json"))["version"], served.tokens()
    served.cli("retire")
    (served.channel / "EPOCH").unlink()  # what a trainer on a wiped disk would do
    older = served.publish("A")
    complaint = served.cli("update", code=2)
    assert older in complaint
    assert live in complaint
    assert json.loads(served.cli("status", "--json"))["version"] == live
    assert served.tokens() == tokens
    assert json.loads(served.cli("update", "--force", "--json"))["version"] == older
    assert served.tokens() != tokens


def test_a_byte_that_a_stranger_flips_is_found_by_tensor_and_rank(served: Served) -> None:
    """By whoever asks for the proof; or before, by the rank itself, which looks once more after each update and has the
    engine fenced."""
    name = "model.layers.1.mlp.up_proj.weight"
    served.publish("A", "tp:2")
    served.cli("update")
    assert "live memory is what the receipt says" in served.cli("receipt", "--recompute")
    latest = Channel(served.channel).read_latest()
    assert latest is not None
    manifest = Channel(served.channel).read_manifest(latest)
    part = next(tensor for tensor in manifest.tensors if tensor.name == name).parts[1]
    with SharedSegment.attach(manifest.segments[part.segment].locator, writable=True) as segment:
        flipped = np.frombuffer(segment.mapping, np.uint8)
        flipped[part.offset + 5] ^= 1
        with EngineController(served.url) as engine, pytest.raises((ChecksumMismatchError, NotServingError)) as caught:
            engine.receipt(recompute=True)
        told = str(caught.value) + json.loads(served.cli("status", "--json"))["reason"]
        assert name in told
        assert "rank 1" in told
        flipped[part.offset + 5] ^= 1
        del flipped
    served.cli("update", "--force")
    served.cli("receipt", "--recompute")


def test_sampled_answers_are_the_same_for_the_same_seed(served: Served) -> None:
    options = {"temperature": 1.5, "top_p": 0.9, "seed": 7}
    first = served.complete(**options)["choices"][0]["completion_token_ids"]
    assert served.complete(**options)["choices"][0]["completion_token_ids"] == first
    assert served.complete(**(options | {"seed": 8}))["choices"][0]["completion_token_ids"] != first


def test_a_prompt_that_is_too_long_is_a_400(served: Served) -> None:
    answer = httpx.post(f"{served.url}/v1/completions", json=PROMPT | {"prompt": "x" * 300})
    assert answer.status_code == 400
    assert "300 tokens" in answer.json()["error"]["message"]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
