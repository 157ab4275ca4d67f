"""Options that several verbs share, and how results are printed:
a few lines for people, one JSON document for programs."""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from fastdeploy_rl.command_options import tags_of
from fastdeploy_rl.config import (
    ABORT,
    IN_FLIGHT,
    KV_POLICIES,
    ON_TIMEOUT,
    REFUSE,
    checked_api_key,
    checked_deadline,
)
from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.lifecycle import Tag

DEFAULT_ENGINE = "8182"
DEFAULT_HTTP_PORT = 8180
MAX_KEY_FILE_BYTES = 1 << 16

Verbs = Any
"""What `argparse.ArgumentParser.add_subparsers` returns; its class is private."""


def add_verb(verbs: Verbs, name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    """A verb's parser: `summary` is the line in the list of verbs, `examples` stand at the end of its help."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        type=engine_address,
        default=engine_address(DEFAULT_ENGINE),
        metavar="PORT|URL",
        help=f"the engine's worker queue port on this machine, or its HTTP URL (default {DEFAULT_ENGINE})",
    )
    parser.add_argument(
        "--api-key",
        type=api_key,
        metavar="KEY",
        help="of an engine that wants one over HTTP; shows in process lists, so rather set FASTDEPLOY_RL_API_KEY",
    )
    parser.add_argument(
        "--api-key-file", type=api_keys_in, metavar="FILE", help="the same from a file: the first key in it is sent"
    )


def client_key(options: argparse.Namespace) -> str | None:
    """The key that was given, --api-key before --api-key-file; None leaves it to the environment."""
    key: str | None = options.api_key or next(iter(options.api_key_file or ()), None)
    return key


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_deadline(parser: argparse.ArgumentParser, default_s: float) -> None:
    parser.add_argument(
        "--deadline",
        type=seconds,
        default=default_s,
        metavar="SECONDS",
        help=f"give up after this long (default {default_s:g})",
    )


def add_in_flight(parser: argparse.ArgumentParser) -> None:
    """For a command that stops the ranks: what becomes of requests."""
    parser.add_argument(
        "--mode",
        choices=IN_FLIGHT,
        default=ABORT,
        help="requests in flight end with what they have (abort), come to their end first (wait), or stop between two "
        f"tokens and go on afterwards (keep; default {ABORT})",
    )
    parser.add_argument(
        "--on-timeout",
        choices=ON_TIMEOUT,
        default=REFUSE,
        help="where --mode wait takes longer than the deadline: change nothing (refuse), or abort the rest (default "
        f"{REFUSE})",
    )


def add_tags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tags",
        type=tags,
        default=None,
        metavar="TAG,...",
        help=f"of {', '.join(tag.value for tag in Tag)} (default: all)",
    )


def add_kv(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv",
        choices=KV_POLICIES,
        default=None,
        help="the KV cache is dropped and computed anew (rebuild), or stays for requests in flight (keep; default: the "
        "engine's --kv-on-update)",
    )


def add_channel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ipc-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="the channel: where trainer and engine meet (default: this user's)",
    )


def engine_address(text: str) -> int | str:
    """A port number or an http URL."""
    if text.isascii() and text.isdigit():
        return port(text)
    if text.startswith(("http://", "https://")):
        return text
    raise argparse.ArgumentTypeError(f"expected a port or an http:// URL, got {text!r}")


def api_key(text: str) -> str:
    """A key, which no complaint about it repeats."""
    try:
        return checked_api_key(text, "a key")
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def api_keys_in(text: str) -> tuple[str, ...]:
    """The keys of a file, one a line; empty lines are left out."""
    try:
        with Path(text).open("rb") as file:
            data = file.read(MAX_KEY_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_KEY_FILE_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is larger than {MAX_KEY_FILE_BYTES} bytes: is it a file of keys?")
    keys = tuple(api_key(line.strip()) for line in data.decode(errors="replace").splitlines() if line.strip())
    if not keys:
        raise argparse.ArgumentTypeError(f"{text!r} has no key in it")
    return keys


def port(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text[:6]) < 65536:
        raise argparse.ArgumentTypeError(f"expected a port from 1 to 65535, got {text!r}")
    return int(text)


def not_negative(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not int(text[:10]) < 2**31:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text[:10]) < 2**31:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def tags(text: str) -> list[str]:
    """Words of lifecycle.Tag with commas between them."""
    try:
        named = tags_of(text.split(","))
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return [tag.value for tag in Tag if tag in named]


def seconds(text: str) -> float:
    try:
        return checked_deadline(float(text))
    except (ValueError, ConfigurationError) as error:
        raise argparse.ArgumentTypeError(f"expected seconds above 0 and at most a day, got {text!r}") from error


def print_json(result: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())


def print_line(result: Any) -> None:
    """One JSON document on one line, at once."""
    print(msgspec.json.encode(result).decode(), flush=True)


def print_fields(**fields: object) -> None:
    """Aligned `name  value` lines; empty values are left out."""
    shown = {name.replace("_", " "): str(value) for name, value in fields.items() if value not in ("", None)}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        print(f"  {name:<{width}}  {value}")


def one_line(text: str) -> str:
    """A text of several lines, as a list of what is wrong, so that its items stay apart."""
    lines = [line for raw in text.splitlines() if (line := " ".join(raw.split()))]
    return "".join(line + (" " if line[-1] in ".:;," else "; ") for line in lines[:-1]) + "".join(lines[-1:])


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
