"""Every verb that speaks HTTP: the key it shows, and what it says where no answer comes in time."""

from pathlib import Path

import httpx
import pytest

from fastdeploy_rl.cli import main
from fastdeploy_rl.config import API_KEY_VARIABLES

KEY, OTHER_KEY = "sk-first-0123456789", "sk-second-9876543210"
VERBS = [
    ["update"],
    ["update", "1.2", "--deadline", "0.3"],
    ["clear"],
    ["pause"],
    ["resume"],
    ["sleep"],
    ["wake"],
    ["status"],
    ["receipt"],
    ["receipt", "--recompute"],
    ["history"],
    ["generate", "--prompt", "France?"],
    ["generate", "--prompt", "France?", "--stream"],
    ["chat"],
]


class Network:
    """In the place of the real one: never answers in time, or with 401; keeps what it was shown."""

    def __init__(self) -> None:
        self.shown: list[str | None] = []
        self.answer: httpx.Response | None = None

    def handle(self, transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        self.shown.append(request.headers.get("Authorization"))
        if self.answer is None:
            raise httpx.ReadTimeout("timed out", request=request)
        return self.answer


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    for variable in API_KEY_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    network = Network()
    monkeypatch.setattr(
        httpx.HTTPTransport, "handle_request", lambda transport, request: network.handle(transport, request)
    )
    return network


def run(verb: list[str], *options: str) -> int:
    return main([*verb, "--engine", "http://127.0.0.1:8180", *options])


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_no_answer_in_time_is_one_line_and_exit_code_1(
    network: Network, verb: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(verb) == 1
    told = capfd.readouterr()
    assert told.out == ""
    assert told.err.startswith("fastdeploy-rl: error: no answer of http://127.0.0.1:8180/v1/")
    assert "(since " in told.err
    assert told.err.count("\n") == 1


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_key_that_is_wrong_is_one_line_and_exit_code_2(
    network: Network, verb: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    network.answer = httpx.Response(401, json={"error": {"type": "AuthenticationError", "message": "no"}})
    assert run(verb, "--api-key", KEY) == 2
    told = capfd.readouterr()
    assert told.out == ""
    assert "the API key is missing or unknown" in told.err
    assert KEY not in told.err
    assert told.err.count("\n") == 1


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_shows_the_key_it_was_given(
    network: Network, verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "engine.key"
    file.write_text(f"\n{OTHER_KEY}\n{KEY}\n")
    run(verb)
    run(verb, "--api-key", KEY)
    run(verb, "--api-key-file", str(file))
    monkeypatch.setenv("FD_API_KEY", KEY)
    run(verb)
    run(verb, "--api-key-file", str(file))
    assert network.shown == [
        None,
        f"Bearer {KEY}",
        f"Bearer {OTHER_KEY}",
        f"Bearer {KEY}",
        f"Bearer {OTHER_KEY}",
    ]


@pytest.mark.parametrize("content", [b"", b"\n \n", b"two words\n", "schl\u00fcssel".encode(), b"\xff", b"x" * 70_000])
def test_a_file_without_a_key_is_refused_and_nothing_sent(
    network: Network, content: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "engine.key"
    file.write_bytes(content)
    for verb in (["status"], ["serve", "--model", str(tmp_path)]):
        with pytest.raises(SystemExit) as ended:
            main([*verb, "--api-key-file", str(file)])
        assert ended.value.code == 2
    assert "two words" not in capfd.readouterr().err
    assert network.shown == []


def test_a_key_that_can_be_none_is_not_repeated(network: Network, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["status"], "--api-key", "my secret")
    assert ended.value.code == 2
    assert "my secret" not in capfd.readouterr().err


def test_a_key_of_the_environment_that_can_be_none_is_named_by_its_variable(
    network: Network, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FD_API_KEY", "my secret")
    assert run(["status"]) == 2
    told = capfd.readouterr().err
    assert "FD_API_KEY must be" in told
    assert "my secret" not in told
    assert network.shown == []
