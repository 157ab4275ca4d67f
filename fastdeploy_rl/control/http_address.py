"""Where an engine on this machine listens for HTTP, and who may use it there, found by its worker queue port.

Owns two small files in the engine's run directory. So a verb that speaks HTTP takes the same `--engine` as all others,
and the doctor sees an engine that anybody may command.
"""

import enum
import ipaddress
import os
import socket
from pathlib import Path

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.errors import EngineNotFoundError

_FILE = "http_address"
_ACCESS_FILE = "http_access"
_MAX_BYTES = 1024


def http_url(host: str, port: int) -> str:
    """Of a server that listens on `host`, as its own machine reaches it: all interfaces become the loopback one."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpAccess(enum.Enum):
    """Who may use an engine's HTTP routes: LOOPBACK processes of its machine, KEY whoever has one, OPEN everybody who
    reaches the machine."""

    LOOPBACK = "loopback"
    KEY = "key"
    OPEN = "open"


def http_access(host: str, *, has_keys: bool) -> HttpAccess:
    """Of a server that listens on `host`."""
    if has_keys:
        return HttpAccess.KEY
    return HttpAccess.LOOPBACK if _is_loopback(host) else HttpAccess.OPEN


def _is_loopback(host: str) -> bool:
    """Names as well; all interfaces are not, and neither is what cannot be told."""
    try:
        addresses = [place[4][0] for place in socket.getaddrinfo(host, None)] if host else []
        return bool(addresses) and all(ipaddress.ip_address(address).is_loopback for address in addresses)
    except (OSError, UnicodeError, ValueError):
        return False


def write_http_address(run_dir: Path, host: str, port: int, access: HttpAccess) -> None:
    """By the engine, once it listens."""
    for name, text in ((_ACCESS_FILE, access.value), (_FILE, http_url(host, port))):
        path = run_dir / name
        path.with_suffix(".new").write_text(text)
        os.replace(path.with_suffix(".new"), path)


def find_http_access(engine: int) -> HttpAccess | None:
    """Of the live engine at a worker queue port; None where it serves no HTTP, or does not say. EngineNotFoundError."""
    board = Board.attach(engine)
    try:
        with (board.run_dir / _ACCESS_FILE).open("rb") as file:
            return HttpAccess(file.read(_MAX_BYTES).decode())
    except (OSError, ValueError):
        return None
    finally:
        board.close()


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
