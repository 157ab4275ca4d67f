"""An engine's HTTP side from start to doctor: who may use it, and that no key of it stands anywhere."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from served_model import write_tiny_llama
from test_supervisor import DEADLINE_S, Engine, _free_port, running

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.cli import serve
from fastdeploy_rl.config import child_environ
from fastdeploy_rl.control.http_address import HttpAccess, find_http_access, http_access, write_http_address
from fastdeploy_rl.engines.embedded.supervisor import CheckedModel, ServeConfig, check_model
from fastdeploy_rl.errors import EngineNotFoundError
from fastdeploy_rl.observe.doctor.channel import check_engines
from fastdeploy_rl.observe.doctor.check import Status

KEY = "sk-guarded-0123456789"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def settings(tmp_path: Path, model_dir: Path) -> dict[str, Any]:
    return {
        "model_dir": str(model_dir),
        "num_ranks": 2,
        "channel": str(tmp_path / "channel"),
        "port": _free_port(),
        "board_port": _free_port(),
        "log_dir": str(tmp_path / "log"),
    }


def status_of(engine: Engine, path: str, key: str = "") -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"http://127.0.0.1:{engine.settings['port']}{path}"
    return httpx.get(url, headers=headers, timeout=DEADLINE_S).status_code


def test_a_key_opens_a_served_engine_and_stands_nowhere(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FASTDEPLOY_RL_API_KEY", KEY)
    with running(settings) as engine:
        engine.await_event("ready")
        assert status_of(engine, "/v1/weights") == 401
        assert status_of(engine, "/v1/weights", "sk-wrong") == 401
        assert status_of(engine, "/v1/weights", KEY) == 200
        assert status_of(engine, "/health") == 503
        assert status_of(engine, "/metrics") == 200
        assert find_http_access(settings["board_port"]) is HttpAccess.KEY
        workers = engine.workers()
        assert len(workers) == 2
        for pid in workers:
            for name in ("environ", "cmdline"):
                assert KEY.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
        with closing(Board.attach(settings["board_port"])) as board:
            kept = [path.read_bytes() for path in board.run_dir.rglob("*") if path.is_file()]
        engine.child.send_signal(signal.SIGINT)
        assert engine.end() == 0
    logs = [path.read_bytes() for path in (tmp_path / "log").iterdir()]
    assert logs
    assert not any(KEY.encode() in text for text in [*logs, *kept])


@pytest.mark.parametrize(
    ("host", "has_keys", "access"),
    [
        ("127.0.0.1", False, HttpAccess.LOOPBACK),
        ("127.0.0.2", False, HttpAccess.LOOPBACK),
        ("::1", False, HttpAccess.LOOPBACK),
        ("localhost", False, HttpAccess.LOOPBACK),
        ("0.0.0.0", False, HttpAccess.OPEN),
        ("::", False, HttpAccess.OPEN),
        ("", False, HttpAccess.OPEN),
        ("192.0.2.1", False, HttpAccess.OPEN),
        ("a name.that cannot be", False, HttpAccess.OPEN),
        ("." * 300, False, HttpAccess.OPEN),
        ("0.0.0.0", True, HttpAccess.KEY),
        ("127.0.0.1", True, HttpAccess.KEY),
    ],
)
def test_only_loopback_addresses_need_no_key(host: str, has_keys: bool, access: HttpAccess) -> None:
    assert http_access(host, has_keys=has_keys) is access


def test_the_doctor_warns_of_an_open_engine() -> None:
    port = _free_port()
    with closing(Board.create(port, num_ranks=1)) as board:
        assert find_http_access(port) is None
        for access, status in [
            (HttpAccess.LOOPBACK, Status.OK),
            (HttpAccess.KEY, Status.OK),
            (HttpAccess.OPEN, Status.WARN),
        ]:
            write_http_address(board.run_dir, "0.0.0.0", 8180, access)
            assert find_http_access(port) is access
            (check,) = check_engines(port)
            assert check.status is status
            assert ("FASTDEPLOY_RL_API_KEY" in check.mend) == (status is Status.WARN)
        (board.run_dir / "http_access").write_bytes(b"\xff" * 10_000)
        assert find_http_access(port) is None
    with pytest.raises(EngineNotFoundError):
        find_http_access(port)


@pytest.fixture
def model(model_dir: Path, tmp_path: Path) -> CheckedModel:
    return check_model(ServeConfig(model_dir=model_dir, num_ranks=2, channel=tmp_path / "channel"))


@pytest.mark.parametrize("announcer", [serve._TextAnnouncer(8182), serve._JsonAnnouncer()], ids=["text", "json"])
@pytest.mark.parametrize(
    ("host", "keys", "words"), [("0.0.0.0", (), "open"), ("0.0.0.0", (KEY,), "key"), ("127.0.0.1", (), "loopback")]
)
def test_an_open_start_warns_once_on_the_terminal_and_in_the_log(
    announcer: Any,
    host: str,
    keys: tuple[str, ...],
    words: str,
    model: CheckedModel,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(serve, "_log_to_file", lambda log_dir: None)
    config = ServeConfig(
        model_dir=model_dir, num_ranks=2, channel=tmp_path / "channel", log_dir=tmp_path, host=host, api_keys=keys
    )
    announcer.starting(config, model, None)
    told = capsys.readouterr()
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == told.err.count("\n") == (words == "open")
    assert ("--host 0.0.0.0 without an API key" in told.err) == (words == "open")
    assert serve.summarize(config, model, None).http_access == words
    assert KEY not in told.out + told.err + caplog.text + repr(config)


def test_serve_takes_keys_from_flags_file_and_environment(tmp_path: Path) -> None:
    """Told by the workers' parent: what `serve` would run with, without running it."""
    file = tmp_path / "engine.key"
    file.write_text("k3\nk4\n")
    program = (
        "import json, sys\n"
        "from fastdeploy_rl.cli import main\n"
        "from fastdeploy_rl.engines.embedded import supervisor\n"
        "supervisor.serve = lambda config, announcer: print(json.dumps(config.api_keys))\n"
        "sys.exit(main(sys.argv[1:]))"
    )

    def keys(*options: str, **environ: str) -> Any:
        command = [sys.executable, "-c", program, "serve", "--model", str(tmp_path), "--json", *options]
        done = subprocess.run(
            command, env=child_environ(environ), capture_output=True, timeout=DEADLINE_S, check=True, text=True
        )
        return json.loads(done.stdout)

    assert keys() == []
    flags = ("--api-key", "k1", "--api-key", "k2", "--api-key-file", str(file))
    assert keys(*flags, FASTDEPLOY_RL_API_KEY="other") == ["k1", "k2", "k3", "k4"]
    assert keys(FASTDEPLOY_RL_API_KEY="k1,k2", FD_API_KEY="other") == ["k1", "k2"]


def test_headers_without_an_end_are_cut_off_and_the_engine_goes_on(settings: dict[str, Any]) -> None:
    """Longer than what HTTP's parser takes: refused before any key is looked at."""
    with running(settings) as engine:
        engine.await_event("ready")
        with socket.create_connection(("127.0.0.1", settings["port"]), timeout=DEADLINE_S) as stranger:
            head = b"GET /v1/weights HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                stranger.sendall(head + b"x" * (1 << 20))
                stranger.sendall(b"\r\n\r\n")
                assert b" 200 " not in stranger.recv(100)
        assert status_of(engine, "/v1/weights") == 200
        engine.child.send_signal(signal.SIGINT)
        assert engine.end() == 0
