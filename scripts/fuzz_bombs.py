"""Manifests made to cost their reader its time or its memory: `scripts/fuzz --bombs` reads all of them, `python
scripts/fuzz_bombs.py CASE...` some. One line for each: case, seconds, error, its text.

Run in a process of its own, with a bound on its memory and an alarm for each case: what blows up ends that one only.
"""

import resource
import signal
import sys
import time
from collections.abc import Callable

from fastdeploy_rl import manifest as manifests
from fastdeploy_rl.errors import FastDeployRLError

MEMORY_BYTES = 4 << 30
"""Of addresses; what a manifest of 64 MiB can cost is a part of it."""
ALARM_S = 10
_SUM = b"0" * 64
_SEGMENT = b'{"kind":"shm","locator":"a%x","num_bytes":4611686018427387904,"arena":0,"generation":2}'
_SPACE = manifests.MAX_BYTES - 2000


def _document(
    tensors: bytes = b"",
    aliases: bytes = b"",
    segments: bytes = _SEGMENT % 0,
    version: bytes = b"1.1",
    end: bytes = b"",
) -> bytes:
    head = b'{"format":"fastdeploy_rl.manifest/1","version":"%s","layout":"full","segments":[%s]' % (version, segments)
    body = b',"tensors":[%s],"aliases":{%s}%s' % (tensors, aliases, end)
    return head + body + b',"layout_digest":"%s","content_digest":"%s"}' % (_SUM, _SUM)


def _tensor(name: bytes, shape: bytes = b"", axis: bytes = b"null", parts: bytes = b"", more: bytes = b"") -> bytes:
    parts = parts or b'{"segment":0,"offset":0,"start":0,"stop":0}'
    text = b'{"name":"%s","dtype":"F32","shape":[%s],"shard_axis":%s,"parts":[%s],"checksum":"%s"%s}'
    return text % (name, shape, axis, parts, _SUM, more)


def _many(text: bytes, num_bytes: int = _SPACE) -> bytes:
    """As many of `text` as there is room for; a `%x` in it counts them."""
    count = num_bytes // (len(text) + 5)
    return b",".join(text % index for index in range(count)) if b"%" in text else b",".join([text] * count)


def _runs(name: bytes, count: int) -> bytes:
    run = b'{"name":"%s","start":0,"stop":0}' % name
    return b',"fused":{"axis":0,"runs":[%s]}' % b",".join([run] * count)


CASES: dict[str, Callable[[], bytes]] = {
    "a-million-tensors": lambda: _document(
        b",".join(
            b'{"name":"%x","dtype":"","shape":[],"shard_axis":null,"parts":[],"checksum":""}' % index
            for index in range(1_000_000)
        )
    ),
    "tensors-without-end": lambda: _document(
        _many(b'{"name":"%x","dtype":"","shape":[],"shard_axis":null,"parts":[],"checksum":""}')
    ),
    "tensors-up-to-the-bound": lambda: _document(
        b",".join(_tensor(b"%x" % index) for index in range(manifests.MAX_TENSORS))
    ),
    "tensors-one-above-the-bound": lambda: _document(
        b",".join(_tensor(b"%x" % index) for index in range(manifests.MAX_TENSORS + 1))
    ),
    "dimensions": lambda: _document(_tensor(b"a", shape=b"0," * (_SPACE // 2) + b"0")),
    "large-dimensions": lambda: _document(_tensor(b"a", shape=b"9999999999999999," * (_SPACE // 17) + b"0")),
    "aliases": lambda: _document(_tensor(b"a"), aliases=_many(b'"%x":"a"')),
    "aliases-that-look-few": lambda: _document(_tensor(b"a"), aliases=_many(b'"%x\\\\":"a\\\\"')),
    "segments": lambda: _document(segments=_many(_SEGMENT)),
    "parts": lambda: _document(_tensor(b"a", b"0", b"0", _many(b'{"segment":0,"offset":0,"start":0,"stop":0}'))),
    "runs": lambda: _document(_tensor(b"a", b"0", more=_runs(b"q", 1_800_000))),
    "runs-up-to-the-bound": lambda: _document(
        b",".join(_tensor(b"%x" % index, b"0", more=_runs(b"q%x" % index, 8000)) for index in range(24))
    ),
    "long-number": lambda: _document(_tensor(b"a", shape=b"9" * _SPACE)),
    "long-fraction": lambda: _document(_tensor(b"a", shape=b"0." + b"9" * _SPACE)),
    "long-exponent": lambda: _document(_tensor(b"a", shape=b"1e" + b"9" * _SPACE)),
    "long-name": lambda: _document(_tensor(b"a" * _SPACE)),
    "escaped-name": lambda: _document(_tensor(b"\\u00e9" * (_SPACE // 6))),
    "long-version": lambda: _document(version=b"9" * _SPACE + b".1"),
    "long-locator": lambda: _document(segments=_SEGMENT.replace(b"a%x", b"a" * _SPACE)),
    "deep-lists": lambda: b"[" * _SPACE,
    "deep-objects": lambda: b'{"format":' * (_SPACE // 10),
    "deep-shape": lambda: _document(_tensor(b"a", shape=b"[" * _SPACE)),
    "deep-aliases": lambda: _document(aliases=b'"a":' + b"[" * _SPACE),
    "deep-unknown-field": lambda: b'{"x":' + b"[" * _SPACE,
    "keys-again": lambda: _document(end=b',"aliases":{}' * (_SPACE // 14)),
    "spaces": lambda: b" " * _SPACE,
    "zeros": lambda: bytes(_SPACE),
    "one-byte-too-many": lambda: b" " * (manifests.MAX_BYTES + 1),
}


def main(names: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for name in names or CASES:
        data = CASES[name]()
        signal.alarm(ALARM_S)
        started = time.monotonic()
        error, text = _read(data)
        signal.alarm(0)
        print(f"{name:<28} {time.monotonic() - started:6.3f} s  {error:<14} {text:.120}", flush=True)


def _read(data: bytes) -> tuple[str, str]:
    try:
        manifests.decode(data)
    except FastDeployRLError as error:
        return type(error).__name__, str(error)
    return "taken", ""


if __name__ == "__main__":
    main(sys.argv[1:])
