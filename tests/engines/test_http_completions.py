"""OpenAI's routes over a scripted engine: what is answered, streamed, stamped, refused and cancelled."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import MODEL, AbortingEngine, ScriptedBoard, ScriptedEngine, make_face

from fastdeploy_rl.control.http_app import make_app
from fastdeploy_rl.control.openai_schema import MAX_BODY_BYTES


class Client:
    """Requests against the application itself, without a socket."""

    def __init__(self, engine: ScriptedEngine, board: ScriptedBoard) -> None:
        self.engine, self.board = engine, board
        self.face = make_face(engine, board)
        self._app = make_app(self.face)

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
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13}
    assert body["weight_versions"] == [
        {"version": "1.1", "start": 0, "end": 3},
        {"version": "1.2", "start": 3, "end": 6},
    ]


def test_chat_goes_through_the_template(client: Client) -> None:
    body = client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Paris"}
    assert bytes(client.engine.requests[0].token_ids) == b"<user>hi"
    assert client.engine.requests[0].max_tokens == client.engine.max_model_len - len(b"<user>hi")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stream_adds_up_to_the_whole_answer(client: Client, path: str) -> None:
    is_chat = "chat" in path
    body = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "hi"}
    events = client.events(path, body | {"stream_options": {"include_usage": True}})
    pieces = [e["choices"][0]["delta"].get("content", "") if is_chat else e["choices"][0]["text"] for e in events]
    assert "".join(pieces) == "Paris"
    assert [e["choices"][0]["finish_reason"] for e in events if e["choices"][0]["finish_reason"]] == ["stop"]
    assert events[-1]["weight_versions"][1] == {"version": "1.2", "start": 3, "end": 6}
    assert events[-1]["usage"]["completion_tokens"] == 6


def test_max_tokens_ends_with_length(client: Client) -> None:
    body = client.post("/v1/completions", completion(max_tokens=2)).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("Pa", "length")


def test_stop_string_cuts_the_text_and_cancels_the_rest(client: Client) -> None:
    body = client.post("/v1/completions", completion(stop=["ri", "xx"])).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("Pa", "stop")


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
    assert choice["logprobs"]["text_offset"][:3] == [0, 1, 2]
    assert bytes(choice["completion_token_ids"]) == b"Paris\0"
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    content = client.post("/v1/chat/completions", chat).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content[:2]] == ["P", "a"]


def test_sampling_options_reach_the_engine(client: Client) -> None:
    client.post("/v1/completions", completion(temperature=0.5, top_p=0.9, top_k=7, seed=3, ignore_eos=True))
    (request,) = client.engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 3)
    assert request.ignore_eos


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2}, "`n` = 2 is not supported"),
        ({"best_of": 3}, "`best_of`"),
        ({"logit_bias": {"1": 2.0}}, "`logit_bias`"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [1, 256]}, "vocabulary of 256"),
        ({"prompt": "x" * 60}, "60 tokens and 16 more"),
        ({"model": "other"}, "'other'"),
        ({"stop": ["a"] * 5}, "`stop`"),
        ({"stop": ""}, "`stop`"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_bad_values_are_refused_by_name(client: Client, fields: dict[str, Any], words: str) -> None:
    answer = client.post("/v1/completions", completion(**fields))
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "RequestError"
    assert client.engine.requests == []


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": "\\ud800"}'])
def test_bad_json_is_a_400_in_the_error_form(client: Client, data: bytes) -> None:
    answer = client.request("POST", "/v1/completions", content=data)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert client.engine.requests == []


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
    client.face.weights.close()


def test_models_and_health_name_the_live_version(client: Client) -> None:
    (model,) = client.request("GET", "/v1/models").json()["data"]
    assert (model["id"], model["weight_version"]) == (MODEL, "1.1")
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
