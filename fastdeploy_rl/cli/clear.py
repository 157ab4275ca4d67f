"""`clear`: lets an engine give its weights' memory back."""

import argparse

from fastdeploy_rl.cli.options import Verbs, add_deadline, add_engine, add_json, add_verb, client_key
from fastdeploy_rl.cli.reports import print_report
from fastdeploy_rl.config import Deadlines

_EXAMPLES = """\
  fastdeploy-rl clear
  fastdeploy-rl clear --engine 8182 --json"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "clear", "free weights and KV cache on all ranks; `update` brings them back", _EXAMPLES)
    add_engine(parser)
    add_deadline(parser, Deadlines.clear_s)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fastdeploy_rl.control.controller import EngineController

    with EngineController(options.engine, api_key=client_key(options)) as engine:
        report = engine.clear(deadline_s=options.deadline)
    print_report(report, as_json=options.json)
    return 0
