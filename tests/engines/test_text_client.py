"""The client for text, against servers that are none of ours: every answer is text, or an error that says so."""

import itertools
from collections.abc import Iterator

import httpx
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


def client_of(*lines: bytes) -> TextClient:
    """Of a server that streams these lines over and over."""
    stream = Lines(itertools.cycle([line + b"\n" for line in lines]))
    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=stream))
    return TextClient("http://stranger", deadline_s=10.0, transport=transport)


def test_a_stream_without_an_end_meets_its_deadline_even_where_it_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(text_client.time, "monotonic", lambda: next(clock))
    with client_of(b": still here") as text, pytest.raises(DeadlineExceededError, match="took over 10 s"):
        list(text.stream("/v1/completions", {}))
    assert next(clock) < 20


def test_an_answer_that_comes_in_drops_meets_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(client.time, "monotonic", lambda: next(clock))
    with client_of(b" ") as text, pytest.raises(DeadlineExceededError, match="did not answer within 25 s"):
        text.ask("/v1/completions", {})
    assert next(clock) < 40


@pytest.mark.parametrize("line", [b"data: <html>", b"data: []", b'data: {"error": "no"}', b'data: {"error": {}}'])
def test_what_is_no_chunk_ends_the_stream_with_an_error(line: bytes) -> None:
    with client_of(line) as text, pytest.raises(EngineError):
        list(text.stream("/v1/completions", {}))


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": None}, {"choices": ["text"]}])
def test_an_answer_without_a_choice_is_said_to_be_none(answer: dict[str, object]) -> None:
    with pytest.raises(EngineError, match="has no choice"):
        first_choice(answer)
