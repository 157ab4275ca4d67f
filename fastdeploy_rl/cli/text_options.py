"""Options of the verbs that ask an engine for text, and what they become in a request."""

import argparse
import math
from typing import TYPE_CHECKING, Any

from fastdeploy_rl.cli.options import add_deadline, add_engine, add_json, client_key, positive
from fastdeploy_rl.config import Deadlines

if TYPE_CHECKING:
    from fastdeploy_rl.control.text_client import TextClient

_SENT = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")


def add_text_options(parser: argparse.ArgumentParser) -> None:
    add_engine(parser)
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="end after this many tokens")
    parser.add_argument("--temperature", type=number, metavar="T", help="0 takes the most likely token each time")
    parser.add_argument("--top-p", type=number, metavar="P", help="draw from the most likely tokens that make up P")
    parser.add_argument("--top-k", type=positive, metavar="K", help="draw from the K most likely tokens")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    parser.add_argument(
        "--stop", type=sendable, action="append", metavar="TEXT", help="end before this text; up to four times"
    )
    add_deadline(parser, Deadlines.answer_s)
    add_json(parser)


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """What was given; where nothing was, the engine's defaults hold."""
    return {name: value for name in _SENT if (value := getattr(options, name)) is not None}


def open_client(options: argparse.Namespace) -> "TextClient":
    """EngineNotFoundError where no engine is at that port."""
    from fastdeploy_rl.control.http_address import find_http_address
    from fastdeploy_rl.control.text_client import TextClient

    return TextClient(find_http_address(options.engine), deadline_s=options.deadline, api_key=client_key(options))


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return value


def sendable(text: str) -> str:
    """Arguments that are not UTF-8 reach a program as text that no JSON can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError("expected text in UTF-8") from error
    return text
