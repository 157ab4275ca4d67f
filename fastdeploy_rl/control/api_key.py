"""Who may use an engine's HTTP routes: its keys, and the guard that stands in front of all of them.

Owns how keys are compared and what a refusal says. Refuses to know what the routes do. Invariant: a request without
a known key reaches no route but those of OPEN_PATHS; how long its refusal takes tells nothing of the keys, which are
kept as digests and stand in no message and no log.
"""

import hashlib
import hmac
from collections.abc import Sequence

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fastdeploy_rl.control.openai_format import error_body
from fastdeploy_rl.errors import AuthenticationError

OPEN_PATHS = frozenset({"/health", "/metrics"})
"""Probes and Prometheus ask these without a key, of FastDeploy and vLLM as well: they change nothing and show no text.
All else needs one, also FastDeploy's two control routes, which FastDeploy itself leaves open."""


class ApiKeyGuard:
    """ASGI middleware: lets a request through that brings one of `keys` as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if self._is_known(given):
            return await self._app(scope, receive, send)
        await _refusal(has_key=bool(given))(scope, receive, send)

    def _is_known(self, given: Sequence[bytes]) -> bool:
        """One header exactly: of two, a proxy may have looked at the other one."""
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        digest = _digest(key.strip(b" "))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # each of them, whichever matches
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    """Of one length for all keys: a comparison of bytes is only as blind as their lengths are equal."""
    return hashlib.sha256(key).digest()


def _refusal(*, has_key: bool) -> Response:
    found = "the API key is not one of this engine's" if has_key else "this engine answers only with an API key"
    error = AuthenticationError(
        f"{found}; send `Authorization: Bearer KEY` (fastdeploy_rl's clients: FASTDEPLOY_RL_API_KEY, --api-key-file or "
        "api_key=)"
    )
    challenge = 'Bearer realm="fastdeploy_rl"' + (', error="invalid_token"' if has_key else "")
    headers = {"WWW-Authenticate": challenge}
    return Response(msgspec.json.encode(error_body(error)), error.http_status, headers, "application/json")
