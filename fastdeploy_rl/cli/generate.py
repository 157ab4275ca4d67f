"""`generate`: one completion of a prompt."""

import argparse
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

from fastdeploy_rl.cli.options import Verbs, add_verb, print_json, print_line
from fastdeploy_rl.cli.text_options import add_text_options, asked, open_client, sendable
from fastdeploy_rl.errors import ConfigurationError

if TYPE_CHECKING:
    from fastdeploy_rl.control.text_client import TextClient

_ROUTE = "/v1/completions"
_DEFAULT_TOKENS = 128
_EXAMPLES = """\
  fastdeploy-rl generate --prompt "Once upon a time" --stream
  fastdeploy-rl generate --engine http://127.0.0.1:8180 --prompt "2 + 2 =" --max-tokens 4 --temperature 0 --json
  cat story.txt | fastdeploy-rl generate --prompt - --max-tokens 256"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "generate", "let a running engine continue a text", _EXAMPLES)
    parser.add_argument(
        "--prompt", type=sendable, required=True, metavar="TEXT", help="what to continue; - reads standard input"
    )
    add_text_options(parser)
    parser.add_argument("--stream", action="store_true", help="print the text as it comes; with --json chunk by chunk")
    parser.set_defaults(run=run, max_tokens=_DEFAULT_TOKENS)


def run(options: argparse.Namespace) -> int:
    prompt = _read_prompt() if options.prompt == "-" else options.prompt
    body = {"prompt": prompt} | asked(options)
    with open_client(options) as client:
        if options.stream:
            _stream(client, body, as_json=options.json)
            return 0
        answer = client.ask(_ROUTE, body)
    if options.json:
        print_json(answer)
    else:
        print(_text_of(answer))
    return 0


def _read_prompt() -> str:
    """Standard input; no more of it than an engine would take."""
    from fastdeploy_rl.control.openai_schema import MAX_BODY_BYTES

    data = sys.stdin.buffer.read(MAX_BODY_BYTES + 1)
    if len(data) > MAX_BODY_BYTES:
        raise ConfigurationError(f"the prompt on standard input is larger than {MAX_BODY_BYTES} bytes; cut it")
    return data.decode(errors="replace")


def _stream(client: "TextClient", body: dict[str, Any], *, as_json: bool) -> None:
    has_begun = False
    try:
        with closing(client.stream(_ROUTE, body)) as chunks:
            for chunk in chunks:
                if as_json:
                    print_line(chunk)
                else:
                    print(_text_of(chunk), end="", flush=True)
                has_begun = True
    finally:  # a complaint gets a line of its own
        if has_begun and not as_json:
            print(flush=True)


def _text_of(answer: dict[str, Any]) -> str:
    from fastdeploy_rl.control.text_client import first_choice

    return str(first_choice(answer).get("text") or "")
