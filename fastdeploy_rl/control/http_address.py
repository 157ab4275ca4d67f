"""Where an engine on this machine listens for HTTP, found by its worker queue port.

Owns one small file in the engine's run directory. So a verb that speaks HTTP takes the same `--engine` as all others.
"""

import os
from pathlib import Path

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.errors import EngineNotFoundError

_FILE = "http_address"
_MAX_BYTES = 1024


def http_url(host: str, port: int) -> str:
    """Of a server that listens on `host`, as its own machine reaches it: all interfaces become the loopback one."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def write_http_address(run_dir: Path, host: str, port: int) -> None:
    """By the engine, once it listens."""
    path = run_dir / _FILE
    path.with_suffix(".new").write_text(http_url(host, port))
    os.replace(path.with_suffix(".new"), path)


def find_http_address(engine: int | str) -> str:
    """The URL for a worker queue port; a URL is its own. EngineNotFoundError where no live engine is there, or it
    listens for no HTTP."""
    if isinstance(engine, str):
        return engine
    board = Board.attach(engine)
    try:
        with (board.run_dir / _FILE).open("rb") as file:
            url = file.read(_MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise EngineNotFoundError(f"port {engine}: the engine there tells of no HTTP server; give a URL") from error
    finally:
        board.close()
    if not url.startswith("http://"):
        raise EngineNotFoundError(f"port {engine}: the engine left no URL but {url[:80]!r}; give it yourself")
    return url
