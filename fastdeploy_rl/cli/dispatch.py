"""From the command line to a verb, and from an error to one line and an exit code."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from fastdeploy_rl.cli import (
    chat,
    clear,
    doctor,
    generate,
    history,
    pause,
    plan,
    publish,
    receipt,
    resume,
    retire,
    serve,
    serve_weights,
    sleep,
    snapshot,
    status,
    update,
    wake,
)
from fastdeploy_rl.cli.options import one_line
from fastdeploy_rl.errors import ConfigurationError, FastDeployRLError

VERBS = (
    *(serve, publish, serve_weights, snapshot, plan, retire),
    *(update, pause, resume, sleep, wake, clear),
    *(status, receipt, generate, chat, history, doctor),
)
_DESCRIPTION = "Live, verified weight updates for LLM inference engines."


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastdeploy-rl", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('fastdeploy_rl')}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for verb in VERBS:
        verb.add_parser(verbs)
    return parser


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code."""
    _open_closed_streams()
    parser = make_parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        return 2
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except FastDeployRLError as error:
        print(f"fastdeploy-rl: error: {one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "fastdeploy_rl"):
            raise
        # A trainer's environment has what trainers need; `[engine,cpu]` brings the rest.
        print(f"fastdeploy-rl: error: {_missing_text(package, is_engine=options.run is serve.run)}", file=sys.stderr)
        return ConfigurationError.exit_code
    except BrokenPipeError:
        # The reader of our output went away, as `head` does; without this the interpreter complains again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"fastdeploy-rl: error: {one_line(str(error))}", file=sys.stderr)
        return 1


def _open_closed_streams() -> None:
    """A stream that whoever started us closed (`>&-`) has no object, and its number goes to the next file that is
    opened: whatever prints without asking Python would write into that."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _missing_text(package: str, *, is_engine: bool) -> str:
    found = f"{package} is not installed for {sys.executable}"
    if is_engine:
        return f"{found}, and an engine needs it: pip install '/path/to/fastdeploy_rl[engine,cpu]' brings all it needs"
    return f"{found}, and this verb needs it: pip install {package}"
