"""`chat`: a conversation with a running engine, line by line.

Answers go to standard output and everything else to standard error, so that a piped conversation gives the answers
alone. A turn that fails or is interrupted is forgotten.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from fastdeploy_rl.cli.options import Verbs, add_verb, print_line
from fastdeploy_rl.cli.text_options import add_text_options, asked, open_client, sendable
from fastdeploy_rl.errors import FastDeployRLError, NotServingError, OverloadedError, RequestError

if TYPE_CHECKING:
    from fastdeploy_rl.control.text_client import TextClient

_ROUTE = "/v1/chat/completions"
_COMMANDS = "/reset forgets the conversation, /quit or the end of the input ends it"
_EXAMPLES = """\
  fastdeploy-rl chat
  fastdeploy-rl chat --engine http://127.0.0.1:8180 --system "Answer in one sentence." --temperature 0
  echo "What is the capital of France?" | fastdeploy-rl chat --json"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "chat", "talk to a running engine; one line a turn", _EXAMPLES)
    parser.add_argument("--system", type=sendable, default="", metavar="TEXT", help="what the model is told first")
    add_text_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    is_interactive = sys.stdin.isatty()
    with open_client(options) as client:
        conversation = _Conversation(client, options)
        conversation.begin()
        for line in _lines(is_interactive):
            if line == "/quit":
                break
            _take_line(conversation, line, is_interactive)
    return 0


def _take_line(conversation: "_Conversation", line: str, is_interactive: bool) -> None:
    if line == "/reset":
        conversation.reset()
    elif line.startswith("/"):
        _note(f"no such command; {_COMMANDS}")
    elif line and is_interactive:
        _say_to_a_person(conversation, line)
    elif line:
        conversation.say(line)


def _say_to_a_person(conversation: "_Conversation", line: str) -> None:
    """Whoever sits there may ask again; a script gets the error."""
    try:
        conversation.say(line)
    except KeyboardInterrupt:
        print(flush=True)
        _note("interrupted; this turn is forgotten")
    except (NotServingError, OverloadedError, RequestError) as error:
        _note(f"error: {error}")


class _Conversation:
    """The turns so far, and the version of the weights that spoke last."""

    def __init__(self, client: "TextClient", options: argparse.Namespace) -> None:
        self._client = client
        self._options = options
        self._version = ""
        self._turns: list[dict[str, str]] = []

    def begin(self) -> None:
        """EngineNotFoundError where nobody answers."""
        card = self._client.model()
        self._version = str(card.get("weight_version", ""))
        _note(f"{card.get('id')}, weights {self._version or 'none'}; {_COMMANDS}")
        self.reset()

    def reset(self) -> None:
        system = self._options.system
        self._turns = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> None:
        turns = [*self._turns, {"role": "user", "content": text}]
        content, last = self._answer({"messages": turns} | asked(self._options))
        if self._options.json:
            known = {name: last.get(name) for name in ("finish_reason", "weight_versions")}
            print_line({"role": "assistant", "content": content} | known)
        self._turns = [*turns, {"role": "assistant", "content": content}]
        self._tell_versions(last.get("weight_versions") or [])

    def _answer(self, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The whole text, printed as it comes, and the choice of the last chunk."""
        from fastdeploy_rl.control.text_client import first_choice

        pieces: list[str] = []
        last: dict[str, Any] = {}
        try:
            with closing(self._client.stream(_ROUTE, body)) as chunks:
                for chunk in chunks:
                    last = first_choice(chunk)
                    pieces.append((last.get("delta") or {}).get("content") or "")
                    if not self._options.json:
                        print(pieces[-1], end="", flush=True)
        except FastDeployRLError:
            if pieces and not self._options.json:
                print(flush=True)  # the complaint gets a line of its own
            raise
        if not self._options.json:
            print(flush=True)
        return "".join(pieces), last

    def _tell_versions(self, spans: list[dict[str, Any]]) -> None:
        for span in spans:
            if span["version"] != self._version:
                self._version = span["version"]
                _note(f"weights {self._version}" + (f" from token {span['start']} on" if span["start"] else ""))


def _lines(is_interactive: bool) -> Iterator[str]:
    """Without blanks around them; ends with the input."""
    if not is_interactive:
        for line in sys.stdin.buffer:
            yield line.decode(errors="replace").strip()
        return
    while True:
        try:
            text = input("> ")
        except EOFError:
            print(file=sys.stderr)
            return
        yield text.encode(errors="replace").decode().strip()


def _note(text: str) -> None:
    print(f"[{text}]", file=sys.stderr, flush=True)
