"""`wake`: brings back what an engine gave away."""

import argparse

from fastdeploy_rl.cli.options import Verbs, add_deadline, add_engine, add_json, add_kv, add_tags, add_verb, client_key
from fastdeploy_rl.cli.reports import print_report
from fastdeploy_rl.config import Deadlines

_EXAMPLES = """\
  fastdeploy-rl wake                                     # everything; then it serves, also after a pause
  fastdeploy-rl wake --tags weight --deadline 120 --json"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(
        verbs, "wake", "bring memory back on all ranks; dropped weights come as the newest version", _EXAMPLES
    )
    add_tags(parser)
    add_kv(parser)
    add_engine(parser)
    add_deadline(parser, Deadlines.update_s)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fastdeploy_rl.control.controller import EngineController

    with EngineController(options.engine, api_key=client_key(options)) as engine:
        report = engine.wake(options.tags, deadline_s=options.deadline, kv=options.kv)
    print_report(report, as_json=options.json)
    return 0
