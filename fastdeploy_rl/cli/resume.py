"""`resume`: lets a paused engine serve again."""

import argparse

from fastdeploy_rl.cli.options import Verbs, add_deadline, add_engine, add_json, add_verb, client_key
from fastdeploy_rl.cli.reports import print_report
from fastdeploy_rl.config import Deadlines

_EXAMPLES = """\
  fastdeploy-rl resume
  fastdeploy-rl resume --engine http://127.0.0.1:8180 --json"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "resume", "serve again after a pause; requests that were kept go on", _EXAMPLES)
    add_engine(parser)
    add_deadline(parser, Deadlines.pause_s)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fastdeploy_rl.control.controller import EngineController

    with EngineController(options.engine, api_key=client_key(options)) as engine:
        report = engine.resume(deadline_s=options.deadline)
    print_report(report, as_json=options.json)
    return 0
