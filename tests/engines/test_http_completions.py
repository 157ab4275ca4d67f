"""OpenAI's routes over a scripted engine: what is answered, streamed, stamped, refused and cancelled."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_engine import (
    MODEL,
    NEUTRAL,
    AbortingEngine,
    ByteTokenizer,
    FullEngine,
    ScriptedBoard,
    ScriptedEngine,
    make_face,
)

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.control.generation import GenerationDefaults, SamplingOptions
from fastdeploy_rl.control.http_app import make_app
from fastdeploy_rl.control.openai_schema import MAX_BODY_BYTES


class Client:
    """Requests against the application itself, without a socket."""

    def __init__(
        self, engine: ScriptedEngine, board: ScriptedBoard, defaults: GenerationDefaults = NEUTRAL, **deadlines: float
    ) -> None:
        self.engine, self.board = engine, board
        self.face = make_face(engine, board, defaults)
        self._app = make_app(self.face, deadlines=Deadlines(**deadlines))

    def request(self, method: str, path: str, **content: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
                return await http.request(method, path, **content)

        return asyncio.run(call())

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.request("POST", path, json=body)

    def events(self, path: str, body: Any) -> list[Any]:
        answer = self.post(path, body | {"stream": True})
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client(ScriptedEngine(), ScriptedBoard())
    yield client
    client.face.weights.close()


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "France?", "max_tokens": 16} | fields


def test_completion_has_text_usage_and_the_versions_that_made_it(client: Client) -> None:
    body = client.post("/v1/completions", completion()).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Paris", "stop")
    cached = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13} | cached
    assert choice["logprobs"] is None
    assert client.engine.requests[0].num_logprobs is None
    assert body["weight_versions"] == choice["weight_versions"]
    assert body["weight_versions"] == [
        {"version": "1.1", "start": 0, "end": 3},
        {"version": "1.2", "start": 3, "end": 6},
    ]


def test_chat_goes_through_the_template(client: Client) -> None:
    body = client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Paris", "refusal": None}
    assert bytes(client.engine.requests[0].token_ids) == b"<user>hi"
    assert client.engine.requests[0].max_tokens == client.engine.max_model_len - len(b"<user>hi")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stream_adds_up_to_the_whole_answer(client: Client, path: str) -> None:
    is_chat = "chat" in path
    body = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "hi"}
    *events, last = client.events(path, body | {"stream_options": {"include_usage": True}})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    assert [event["usage"] for event in events] == [None] * len(events)
    pieces = [e["choices"][0]["delta"].get("content", "") if is_chat else e["choices"][0]["text"] for e in events]
    assert "".join(pieces) == "Paris"
    assert [e["choices"][0]["finish_reason"] for e in events if e["choices"][0]["finish_reason"]] == ["stop"]
    assert events[-1]["weight_versions"][1] == {"version": "1.2", "start": 3, "end": 6}
    assert events[-1]["choices"][0]["weight_versions"] == events[-1]["weight_versions"]
    chunks = [e["choices"][0] for e in events if "weight_version" in e["choices"][0]]
    assert [chunk["weight_version"] for chunk in chunks] == ["1.1"] * 3 + ["1.2"] * 3


def test_a_stream_without_usage_has_no_chunk_for_it(client: Client) -> None:
    events = client.events("/v1/completions", completion())
    assert all(event["choices"] and "usage" not in event for event in events)


def test_choices_and_prompts_are_numbered_through_and_each_prompt_counts_once(client: Client) -> None:
    body = client.post("/v1/completions", completion(prompt=["ab", "cde"], n=2, seed=7, return_token_ids=True)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [bytes(choice["prompt_token_ids"]) for choice in body["choices"]] == [b"ab", b"ab", b"cde", b"cde"]
    cached = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 24, "total_tokens": 29} | cached
    assert [request.sampling.seed for request in client.engine.requests] == [7, 8, 7, 8]
    assert "weight_versions" not in body
    assert all(len(choice["weight_versions"]) == 2 for choice in body["choices"])
    page = client.request("GET", "/metrics").text
    assert 'fastdeploy_rl_requests_total{result="stop"} 4.0' in page


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", [b"ab"]), ([97, 98], [b"ab"]), (["ab", "c"], [b"ab", b"c"]), ([[97], [98, 99]], [b"a", b"bc"])],
)
def test_a_prompt_is_text_or_token_ids_or_a_list_of_either(client: Client, prompt: Any, expected: list[bytes]) -> None:
    assert client.post("/v1/completions", completion(prompt=prompt)).status_code == 200
    assert [bytes(request.token_ids) for request in client.engine.requests] == expected


def test_streamed_choices_come_interleaved_and_each_ends_once(client: Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    events = client.events("/v1/chat/completions", {"messages": messages, "n": 3})
    texts, ends = ["", "", ""], [0, 0, 0]
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        ends[choice["index"]] += choice["finish_reason"] == "stop"
    assert (texts, ends) == (["Paris"] * 3, [1, 1, 1])
    indices = [event["choices"][0]["index"] for event in events]
    assert indices[3:9] == [0, 1, 2, 0, 1, 2]


def test_content_may_be_parts_and_developer_is_system(client: Client) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    turns = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    answer = client.post("/v1/chat/completions", {"messages": turns}).json()["choices"][0]["message"]
    assert bytes(client.engine.requests[0].token_ids) == b"<system>be brief<user>hi"
    again = [*turns, answer, {"role": "user", "content": "?"}]
    client.post("/v1/chat/completions", {"messages": again})
    assert bytes(client.engine.requests[1].token_ids).endswith(b"<assistant>Paris<user>?")


def test_max_tokens_ends_with_length(client: Client) -> None:
    body = client.post("/v1/completions", completion(max_tokens=2)).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("Pa", "length")


def test_stop_string_cuts_the_text_and_cancels_the_rest(client: Client) -> None:
    body = client.post("/v1/completions", completion(stop=["ri", "xx"])).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("Pa", "stop")
    assert client.engine.generations[0].cancelled == [0]


def test_a_stream_never_shows_the_beginning_of_a_stop_string(client: Client) -> None:
    events = client.events("/v1/completions", completion(stop="ris"))
    assert "".join(event["choices"][0]["text"] for event in events) == "Pa"


def test_a_character_of_several_tokens_arrives_whole(client: Client) -> None:
    client.engine.answer = "é€x\0".encode()
    texts = [event["choices"][0]["text"] for event in client.events("/v1/completions", completion())]
    assert [text for text in texts if text] == ["é", "€", "x"]


def test_logprobs_and_token_ids_where_asked_for(client: Client) -> None:
    (choice,) = client.post("/v1/completions", completion(logprobs=0, return_token_ids=True)).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 6
    assert choice["logprobs"]["top_logprobs"] is None
    assert choice["logprobs"]["text_offset"][:3] == [0, 1, 2]
    assert bytes(choice["completion_token_ids"]) == b"Paris\0"
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    content = client.post("/v1/chat/completions", chat).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content[:2]] == ["P", "a"]
    assert content[0] == {"token": "P", "logprob": -0.5, "bytes": [80], "top_logprobs": []}


def test_the_most_likely_tokens_come_along_in_the_form_of_each_route(client: Client) -> None:
    (choice,) = client.post("/v1/completions", completion(logprobs=2)).json()["choices"]
    assert choice["logprobs"]["top_logprobs"][0] == {"P": -0.5, "Q": -1.5}
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 3}
    events = client.events("/v1/chat/completions", chat)
    (entry,) = next(e["choices"][0]["logprobs"] for e in events if e["choices"][0].get("logprobs"))["content"]
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [("P", -0.5), ("Q", -1.5), ("R", -2.5)]


def test_a_token_that_is_part_of_a_character_has_no_bytes_of_its_own(client: Client) -> None:
    client.engine.answer = "é\0".encode()
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    content = client.post("/v1/chat/completions", chat).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content[:2]] == [None, None]


def test_sampling_options_reach_the_engine(client: Client) -> None:
    client.post("/v1/completions", completion(temperature=0.5, top_p=0.9, top_k=7, seed=3, ignore_eos=True))
    (request,) = client.engine.requests
    assert request.sampling == SamplingOptions(temperature=0.5, top_p=0.9, top_k=7, seed=3)
    assert request.ignore_eos
    more = {"min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": -100}, "top_k": -1}
    client.post("/v1/completions", completion(**more))
    assert client.engine.requests[1].sampling == SamplingOptions(
        min_p=0.1, presence_penalty=1.0, frequency_penalty=-1.0, logit_bias={5: -100.0}
    )


def test_null_and_neutral_values_change_nothing(client: Client) -> None:
    nulls = dict.fromkeys(("n", "temperature", "top_p", "seed", "stop", "stream", "logit_bias", "logprobs", "user"))
    answer = client.post("/v1/completions", completion(**nulls, best_of=1, echo=False, suffix=""))
    assert answer.status_code == 200, answer.text
    assert client.engine.requests[0].sampling == SamplingOptions()


def test_a_model_has_its_own_defaults_where_a_request_is_silent() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_p=0.8, top_k=20, repetition_penalty=1.1, max_tokens=4)
    client = Client(ScriptedEngine(), ScriptedBoard(), defaults)
    client.post("/v1/completions", {"prompt": "hi"})
    client.post("/v1/completions", completion(temperature=0, top_k=-1))
    silent, spoken = client.engine.requests
    assert silent.sampling == SamplingOptions(temperature=0.6, top_p=0.8, top_k=20, repetition_penalty=1.1)
    assert silent.max_tokens == 4
    assert spoken.sampling == SamplingOptions(temperature=0.0, top_p=0.8, repetition_penalty=1.1)
    assert spoken.max_tokens == 16
    client.face.weights.close()


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": 0}, "n", "1"),
        ({"n": 129}, "n", "128"),
        ({"n": 7}, "n", "7 choices, and the engine takes 6 at once"),
        ({"prompt": ["a"] * 7}, "prompt", "7 choices"),
        ({"prompt": [*"aaaaaa", ""]}, "prompt", "7 choices"),  # they are counted before any is looked at
        ({"best_of": 3}, "best_of", "`best_of` = 3"),
        ({"logit_bias": {"1": 200.0}}, "logit_bias[...]", "100"),
        ({"logit_bias": {"a": 2.0}}, "logit_bias", "'a'"),
        ({"logit_bias": {"256": 2.0}}, "logit_bias", "vocabulary of 256"),
        ({"presence_penalty": 3}, "presence_penalty", "2.0"),
        ({"temperature": -1}, "temperature", "0"),
        ({"temperature": "hot"}, "temperature", "float"),
        ({"top_p": 0}, "top_p", "0"),
        ({"top_k": -2}, "top_k", "-1"),
        ({"top_k": 2**70}, "top_k", "2147483647"),  # no message to a worker holds such a number
        ({"min_p": 2}, "min_p", "1"),
        ({"logprobs": 6}, "logprobs", "5"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"prompt": 5}, "prompt", "int"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ["a", ""]}, "prompt", "empty"),
        ({"prompt": ["a", 5]}, "prompt", "mixes"),
        ({"prompt": [1, 256]}, "prompt", "vocabulary of 256"),
        ({"prompt": "x" * 60}, "prompt", "60 tokens and 16 more"),
        ({"stop": ["a"] * 5}, "stop", "`stop`"),
        ({"stop": ""}, "stop", "`stop`"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "`stream`"),
        ({"echo": True}, "echo", "True"),
        ({"suffix": "."}, "suffix", "'.'"),
        ({"unheard_of": 1}, "unheard_of", "not supported"),
    ],
)
def test_bad_values_are_refused_by_name(client: Client, fields: dict[str, Any], param: str, words: str) -> None:
    answer = client.post("/v1/completions", completion(**fields))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert words in error["message"]
    assert (error["type"], error["param"]) == ("RequestError", param)
    assert client.engine.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"tools": []}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_what_a_chat_cannot_have_is_refused_by_name(client: Client, fields: dict[str, Any], param: str) -> None:
    answer = client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert client.engine.requests == []


def test_a_prompt_that_is_too_long_has_openais_code(client: Client) -> None:
    long = client.post("/v1/completions", completion(prompt="x" * 64, max_tokens=None))
    chat = client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 60}]})
    for answer, param in ((long, "prompt"), (chat, "messages")):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)


def test_an_unknown_model_is_not_found(client: Client) -> None:
    for answer in (client.post("/v1/completions", completion(model="other")), client.request("GET", "/v1/models/a/b")):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
    assert client.engine.requests == []


def test_a_full_engine_says_when_to_come_back() -> None:
    client = Client(FullEngine(), ScriptedBoard())
    for stream in (False, True):
        answer = client.post("/v1/completions", completion(stream=stream))
        assert answer.status_code == 429
        assert int(answer.headers["Retry-After"]) >= 1
        assert "6 requests are running or waiting" in answer.json()["error"]["message"]
    assert 'fastdeploy_rl_requests_total{result="refused"} 2.0' in client.request("GET", "/metrics").text
    client.face.weights.close()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": "\\ud800"}'])
def test_bad_json_is_a_400_in_the_error_form(client: Client, data: bytes) -> None:
    answer = client.request("POST", "/v1/completions", content=data)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert client.engine.requests == []


def test_a_prompt_that_takes_long_to_read_holds_up_nobody() -> None:
    begun, others_answered = threading.Event(), threading.Event()

    class SlowTokenizer(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            begun.set()
            assert others_answered.wait(20)
            return super().encode(text)

    face = make_face(ScriptedEngine(), ScriptedBoard())
    app = make_app(replace(face, completions=replace(face.completions, tokenizer=SlowTokenizer())))

    async def scene() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://engine") as http:
            slow = asyncio.create_task(http.post("/v1/completions", json=completion()))
            assert await asyncio.to_thread(begun.wait, 20)
            assert (await http.get("/health")).status_code == 200
            others_answered.set()
            assert (await slow).json()["choices"][0]["text"] == "Paris"

    asyncio.run(scene())
    face.weights.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/weights/update", "/v1/weights/clear"])
def test_a_body_that_never_ends_is_not_waited_for(path: str) -> None:
    async def beginning() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    client = Client(ScriptedEngine(), ScriptedBoard(), body_s=0.01)
    answer = client.request("POST", path, content=beginning())
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "DeadlineExceededError"
    assert client.engine.requests == []
    assert client.board.calls == []
    client.face.weights.close()


def test_an_endless_body_is_refused(client: Client) -> None:
    answer = client.request("POST", "/v1/completions", content=b" " * (MAX_BODY_BYTES + 1))
    assert answer.status_code == 400
    assert "larger than" in answer.json()["error"]["message"]


def test_unknown_routes_answer_in_the_error_form(client: Client) -> None:
    answer = client.request("GET", "/v1/nothing")
    assert answer.status_code == 404
    assert "/v1/nothing" in answer.json()["error"]["message"]


def test_while_cleared_requests_get_503_with_the_reason_and_when_to_retry(client: Client) -> None:
    client.board.legacy_status = "CLEARED"
    for method, path, body in [
        ("GET", "/health", None),
        ("POST", "/v1/completions", completion()),
        ("POST", "/v1/completions", completion(stream=True)),
    ]:
        answer = client.request(method, path, json=body)
        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.json()["error"]["message"] == "the engine is cleared"
    assert client.engine.requests == []


def test_a_request_that_is_aborted_by_a_clear_says_so() -> None:
    client = Client(AbortingEngine(), ScriptedBoard())
    answer = client.post("/v1/completions", completion())
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "weights were cleared"
    events = client.events("/v1/completions", completion())
    assert events[-1]["error"]["message"] == "weights were cleared"
    assert all(generation.is_closed for generation in client.engine.generations)
    client.face.weights.close()


def test_models_and_health_name_the_live_version(client: Client) -> None:
    (model,) = client.request("GET", "/v1/models").json()["data"]
    assert (model["id"], model["weight_version"]) == (MODEL, "1.1")
    assert client.request("GET", f"/v1/models/{MODEL}").json() == model
    assert client.request("GET", "/health").status_code == 200


def test_metrics_count_requests_and_tokens(client: Client) -> None:
    client.post("/v1/completions", completion())
    client.post("/v1/completions", completion(max_tokens=2))
    page = client.request("GET", "/metrics").text
    assert 'fastdeploy_rl_requests_total{result="stop"} 1.0' in page
    assert 'fastdeploy_rl_requests_total{result="length"} 1.0' in page
    assert 'fastdeploy_rl_tokens_total{kind="completion"} 8.0' in page
    assert 'fastdeploy_rl_weights_live{content_digest="c0",version="1.1"} 1.0' in page
    assert 'fastdeploy_rl_admission{state="serving"} 1.0' in page
    assert 'fastdeploy_rl_requests_now{state="running"} 1.0' in page
    assert 'fastdeploy_rl_requests_now{state="waiting"} 2.0' in page
    assert 'fastdeploy_rl_kv_pages{state="free"} 3.0' in page
    assert 'fastdeploy_rl_kv_pages{state="held"} 7.0' in page
