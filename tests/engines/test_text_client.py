"""The client for text, against servers that are none of ours: every answer is text, or an error that says so."""

import itertools
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from fastdeploy_rl.control import client, text_client
from fastdeploy_rl.control.text_client import TextClient, first_choice
from fastdeploy_rl.errors import DeadlineExceededError, EngineError


class Lines(httpx.SyncByteStream):
    """An answer that comes line by line."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines = lines

    def __iter__(self) -> Iterator[bytes]:
        return self._lines


def client_of(*lines: bytes, status: int = 200) -> TextClient:
    """Of a server that streams these lines over and over."""
    stream = Lines(itertools.cycle([line + b"\n" for line in lines]))
    transport = httpx.MockTransport(lambda request: httpx.Response(status, stream=stream))
    return TextClient("http://stranger", deadline_s=10.0, transport=transport)


LATE = "no end of the answer of http://stranger after"


@pytest.mark.parametrize("status", [401, 404, 500])
def test_an_error_without_an_end_meets_its_deadline(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(text_client.time, "monotonic", lambda: next(clock))
    with client_of(b" ", status=status) as text, pytest.raises(DeadlineExceededError, match=LATE):
        list(text.stream("/v1/completions", {}))
    assert next(clock) < 20


def test_a_stream_without_an_end_meets_its_deadline_even_where_it_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(text_client.time, "monotonic", lambda: next(clock))
    with client_of(b": still here") as text, pytest.raises(DeadlineExceededError, match=LATE):
        list(text.stream("/v1/completions", {}))
    assert next(clock) < 20


def test_a_line_without_an_end_meets_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(text_client.time, "monotonic", lambda: next(clock))
    drops = Lines(b"x" if number < 100 else b"\n" for number in range(101))
    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=drops))
    text = TextClient("http://stranger", deadline_s=10.0, transport=transport)
    with text, pytest.raises(DeadlineExceededError, match=LATE):
        list(text.stream("/v1/completions", {}))
    assert next(clock) < 20


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_text_may_hold_what_ends_a_line_elsewhere(size: int) -> None:
    """JSON leaves these as they are, and an event ends at a line feed alone."""
    chunks = [{"text": f"a{end}b"} for end in "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r\n"]
    events = [b"data: " + msgspec.json.encode(chunk) for chunk in chunks] + [b"data: [DONE]"]
    for end in (b"\n\n", b"\r\n\r\n"):
        data = end.join([*events, b""])
        pieces = Lines(data[at : at + size] for at in range(0, len(data), size))
        transport = httpx.MockTransport(lambda request, pieces=pieces: httpx.Response(200, stream=pieces))
        with TextClient("http://stranger", deadline_s=10.0, transport=transport) as text:
            assert list(text.stream("/v1/completions", {})) == chunks


def test_an_answer_that_comes_in_drops_meets_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(client.time, "monotonic", lambda: next(clock))
    with client_of(b" ") as text, pytest.raises(DeadlineExceededError, match=r"no answer of .*/v1/completions"):
        text.ask("/v1/completions", {})
    assert next(clock) < 40


@pytest.mark.parametrize(
    "line", [b"data: <html>", b'data: "\xff"', b"data: []", b'data: {"error": "no"}', b'data: {"error": {}}']
)
def test_what_is_no_chunk_ends_the_stream_with_an_error(line: bytes) -> None:
    with client_of(line) as text, pytest.raises(EngineError):
        list(text.stream("/v1/completions", {}))


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": None}, {"choices": ["text"]}])
def test_an_answer_without_a_choice_is_said_to_be_none(answer: dict[str, object]) -> None:
    with pytest.raises(EngineError, match="has no choice"):
        first_choice(answer)
