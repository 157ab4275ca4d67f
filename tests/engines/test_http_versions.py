"""What answers tell of the weights that made them, what a request may demand of these, and what is left of one that was
ended in order."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import (
    NEUTRAL,
    CachingEngine,
    PausingEngine,
    ScriptedBoard,
    ScriptedEngine,
    make_face,
)

from fastdeploy_rl.control.generation import EngineLoad, GeneratedToken, GenerationDefaults, GenerationRequest
from fastdeploy_rl.control.http_app import make_app

ROUTES = ["/v1/completions", "/v1/chat/completions"]


class Client:
    """The application over a scripted engine."""

    def __init__(self, engine: ScriptedEngine, defaults: GenerationDefaults = NEUTRAL) -> None:
        self.engine, self.board = engine, ScriptedBoard()
        self.face = make_face(engine, self.board, defaults)
        self._app = make_app(self.face)

    def ask(self, method: str, path: str, **content: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
                return await http.request(method, path, **content)

        return asyncio.run(call())

    def complete(self, path: str = ROUTES[0], **fields: Any) -> httpx.Response:
        asked = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
        return self.ask("POST", path, json=asked | {"max_tokens": 16} | fields)

    def stream(self, path: str = ROUTES[0], **fields: Any) -> list[Any]:
        answer = self.complete(path, stream=True, **fields)
        assert answer.status_code == 200, answer.text
        *lines, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert done == "[DONE]"
        return [json.loads(line) for line in lines]


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Client] = []

    def make(engine: ScriptedEngine, *options: Any) -> Client:
        made.append(Client(engine, *options))
        return made[-1]

    yield make
    for client in made:
        client.face.weights.close()


def text_of(choice: Any) -> str:
    return choice["delta"].get("content", "") if "delta" in choice else choice["text"]


# --- spans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ROUTES)
def test_every_chunk_carries_the_span_of_its_token_and_the_last_those_of_the_choice(make: Any, path: str) -> None:
    choices = [event["choices"][0] for event in make(ScriptedEngine()).stream(path)]
    spans = [choice["weight_versions"] for choice in choices if choice["finish_reason"] is None]
    tokens = [span for each in spans for span in each]
    assert [(span["version"], span["start"], span["end"]) for span in tokens] == [
        ("1.1" if at < 3 else "1.2", at, at + 1) for at in range(6)
    ]
    assert [choice["weight_version"] for choice in choices if "weight_version" in choice] == ["1.1"] * 3 + ["1.2"] * 3
    assert choices[-1]["weight_versions"] == [
        {"version": "1.1", "start": 0, "end": 3},
        {"version": "1.2", "start": 3, "end": 6},
    ]


def test_a_prompt_counts_as_cached_what_its_first_choice_found(make: Any) -> None:
    client = make(CachingEngine())
    usage = client.complete(prompt=["abcde", "fghij"], n=2, seed=1).json()["usage"]
    assert usage["prompt_tokens"] == 10
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1 + 3}
    *_, last = make(CachingEngine()).stream(stream_options={"include_usage": True})
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


# --- ended in order --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_request_that_a_pause_ended_answers_with_what_it_has(make: Any, path: str, num_tokens: int) -> None:
    client = make(PausingEngine(b"Paris", switch_at=num_tokens))
    answer = client.complete(path)
    assert answer.status_code == 200
    (choice,) = answer.json()["choices"]
    text = choice["message"]["content"] if "chat" in path else choice["text"]
    assert (text, choice["finish_reason"]) == ("Paris"[:num_tokens], "abort")
    assert choice["abort_reason"] == "the engine was paused"
    spans = [{"version": "1.1", "start": 0, "end": num_tokens}] if num_tokens else []
    assert choice["weight_versions"] == answer.json()["weight_versions"] == spans
    assert answer.json()["usage"]["completion_tokens"] == num_tokens

    *events, closing = [event["choices"][0] for event in client.stream(path)]
    assert "".join(map(text_of, events)) + text_of(closing) == "Paris"[:num_tokens]
    assert [event["finish_reason"] for event in events] == [None] * len(events)
    assert (closing["finish_reason"], closing["abort_reason"]) == ("abort", "the engine was paused")
    assert closing["weight_versions"] == spans
    page = client.ask("GET", "/metrics").text
    assert 'fastdeploy_rl_requests_total{result="abort"} 2.0' in page
    assert f'fastdeploy_rl_tokens_total{{kind="completion"}} {2.0 * num_tokens}' in page


@pytest.mark.parametrize("path", ROUTES)
def test_text_that_was_held_back_for_a_stop_string_comes_with_the_end(make: Any, path: str) -> None:
    client = make(PausingEngine(b"Paris", switch_at=3))
    choices = [event["choices"][0] for event in client.stream(path, stop="ring")]
    assert "".join(map(text_of, choices)) == "Par"
    assert text_of(choices[-1]) == "r"
    (choice,) = client.complete(path, stop="ring").json()["choices"]
    assert (choice["message"]["content"] if "chat" in path else choice["text"]) == "Par"


def test_a_choice_that_had_ended_keeps_its_end_while_the_other_is_aborted(make: Any) -> None:
    class Mixed(PausingEngine):
        def script(self, request: GenerationRequest) -> Iterator[GeneratedToken]:
            return ScriptedEngine.script(self, request) if request is self.requests[0] else super().script(request)

    choices = make(Mixed(b"Pa\0", switch_at=2)).complete(n=2, seed=1).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "abort"]
    assert "abort_reason" not in choices[0]


# --- what a request may demand ---------------------------------------------------------------------


def test_demands_on_the_version_reach_the_engine(make: Any) -> None:
    client = make(ScriptedEngine())
    client.complete()
    client.complete(min_weight_version="3.12", max_staleness=0, weight_version_wait_s=2.5)
    silent, spoken = client.engine.requests
    assert (silent.min_version, silent.max_staleness, silent.version_wait_s) == ("", None, 0.0)
    assert (spoken.min_version, spoken.max_staleness, spoken.version_wait_s) == ("3.12", 0, 2.5)


def test_an_engine_may_have_a_staleness_of_its_own_for_who_is_silent(make: Any) -> None:
    client = make(ScriptedEngine(), GenerationDefaults(max_staleness=4))
    client.complete()
    client.complete(max_staleness=9)
    client.complete(max_staleness=None)
    assert [request.max_staleness for request in client.engine.requests] == [4, 9, 4]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"min_weight_version": "new"}, "EPOCH.STEP"),
        ({"min_weight_version": "1.02"}, "EPOCH.STEP"),
        ({"min_weight_version": 1.2}, "str"),
        ({"max_staleness": -1}, "0"),
        ({"max_staleness": 1.5}, "int"),
        ({"max_staleness": 2**63}, str(2**63 - 1)),
        ({"weight_version_wait_s": -0.1}, "0"),
        ({"weight_version_wait_s": 3601}, "3600"),
        ({"weight_version_wait_s": "1"}, "float"),
    ],
)
def test_demands_that_cannot_be_are_refused_by_name(make: Any, fields: dict[str, Any], words: str) -> None:
    client = make(ScriptedEngine())
    answer = client.complete(**fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, *fields)
    assert words in answer.json()["error"]["message"]
    assert client.engine.requests == []


class ChoosyEngine(ScriptedEngine):
    """Refuses what wants a newer version."""

    def script(self, request: GenerationRequest) -> Iterator[GeneratedToken]:
        yield GeneratedToken(
            -1, "", finish_reason="abort", error=f"live is 1.1, and {request.min_version} is asked for"
        )


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_demand_that_is_not_met_is_a_503_with_the_reason_and_when_to_retry(make: Any, is_streamed: bool) -> None:
    client = make(ChoosyEngine())
    answer = client.complete(min_weight_version="2.0", stream=is_streamed)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "NotServingError")
    assert answer.json()["error"]["message"] == "live is 1.1, and 2.0 is asked for"
    assert int(answer.headers["Retry-After"]) >= 1
    assert 'fastdeploy_rl_requests_total{result="refused"} 1.0' in client.ask("GET", "/metrics").text


@pytest.mark.parametrize(
    ("state", "wait_s", "code"),
    [
        ({"phase": "staging"}, 5, 200),
        ({"phase": "staging"}, 0, 503),
        ({"phase": "idle"}, 5, 503),
        ({"phase": "staging", "is_paused": True}, 5, 503),
    ],
)
def test_who_waits_for_a_version_may_come_while_the_update_runs_that_brings_it(
    make: Any, state: dict[str, Any], wait_s: int, code: int
) -> None:
    client = make(ScriptedEngine())
    client.board.legacy_status = "CLEARED"
    for name, value in state.items():
        setattr(client.board, name, value)
    assert client.complete(weight_version_wait_s=wait_s).status_code == code
    assert len(client.engine.requests) == (code == 200)


# --- metrics ---------------------------------------------------------------------------------------


def test_metrics_tell_cache_graphs_residency_and_pause(make: Any) -> None:
    client = make(ScriptedEngine())
    for _ in range(2):  # as often as somebody looks
        page = client.ask("GET", "/metrics").text
        for line in (
            'fastdeploy_rl_prefix_cache_pages_total{result="hit"} 4.0',
            'fastdeploy_rl_prefix_cache_pages_total{result="miss"} 5.0',
            'fastdeploy_rl_prefix_cache_pages_total{result="refused"} 6.0',
            'fastdeploy_rl_graphs_total{event="captured"} 7.0',
            'fastdeploy_rl_graphs_total{event="replayed"} 8.0',
            'fastdeploy_rl_residency{state="resident",tag="weight"} 1.0',
            'fastdeploy_rl_residency{state="offloaded",tag="weight"} 0.0',
            "fastdeploy_rl_paused 0.0",
        ):
            assert f"\n{line}\n" in page
    client.ask("POST", "/v1/weights/pause", json={})
    client.ask("POST", "/v1/weights/sleep", json={"tags": "weight"})
    page = client.ask("GET", "/metrics").text
    for line in (
        'fastdeploy_rl_residency{state="resident",tag="weight"} 0.0',
        'fastdeploy_rl_residency{state="offloaded",tag="weight"} 1.0',
        'fastdeploy_rl_residency{state="resident",tag="graph"} 1.0',
        "fastdeploy_rl_paused 1.0",
        'fastdeploy_rl_updates_total{kind="pause",outcome="done"} 1.0',
        'fastdeploy_rl_updates_total{kind="sleep",outcome="done"} 1.0',
        'fastdeploy_rl_graphs_recaptured_total{kind="sleep"} 2.0',
    ):
        assert f"\n{line}\n" in page


def test_counts_of_an_engine_that_was_started_again_go_on(make: Any) -> None:
    client = make(ScriptedEngine())
    for hits in (4, 3, 5):
        client.engine.load = EngineLoad(num_prefix_hits=hits)
        page = client.ask("GET", "/metrics").text
    assert 'fastdeploy_rl_prefix_cache_pages_total{result="hit"} 9.0' in page
