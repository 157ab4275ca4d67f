"""`pause`: makes every rank of an engine quiet; its memory stays."""

import argparse

from fastdeploy_rl.cli.options import Verbs, add_deadline, add_engine, add_in_flight, add_json, add_verb, client_key
from fastdeploy_rl.cli.reports import print_report
from fastdeploy_rl.config import Deadlines

_EXAMPLES = """\
  fastdeploy-rl pause                                    # requests in flight end with what they have
  fastdeploy-rl pause --mode keep                        # they go on at `resume`, also across an update
  fastdeploy-rl pause --mode wait --deadline 60 --on-timeout abort"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "pause", "close admission and make every rank quiet; `resume` opens it", _EXAMPLES)
    add_in_flight(parser)
    add_engine(parser)
    add_deadline(parser, Deadlines.pause_s)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fastdeploy_rl.control.controller import EngineController

    with EngineController(options.engine, api_key=client_key(options)) as engine:
        report = engine.pause(options.mode, on_timeout=options.on_timeout, deadline_s=options.deadline)
    print_report(report, as_json=options.json)
    return 0
