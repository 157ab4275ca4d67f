"""Where a server listens: a host and a port, and their text. Looks nothing up."""

import re
from typing import NamedTuple

from fastdeploy_rl.errors import ConfigurationError

_LABEL = r"[A-Za-z0-9_-]{1,63}"
_NAME = rf"(?=[^:]{{1,253}}:){_LABEL}(?:\.{_LABEL})*\.?"  # others are no names for the resolver either
_ADDRESS = re.compile(rf"(?:\[([0-9A-Fa-f:.]{{2,45}})\]|({_NAME})):([0-9]{{1,5}})", re.ASCII)
_MAX_PORT = 65535


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Of `host:port` or `[ipv6]:port`; ConfigurationError for other text."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[3]) <= _MAX_PORT:
        raise ConfigurationError(f"an address is host:port or [ipv6]:port, got {text[:80]!r}")
    return Address(match[1] or match[2], int(match[3]))
