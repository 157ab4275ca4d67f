"""`sleep`: lets an engine give memory back until it is woken."""

import argparse

from fastdeploy_rl.cli.options import (
    Verbs,
    add_deadline,
    add_engine,
    add_in_flight,
    add_json,
    add_tags,
    add_verb,
    client_key,
)
from fastdeploy_rl.cli.reports import print_report
from fastdeploy_rl.config import SLEEP_LEVELS, Deadlines

_EXAMPLES = """\
  fastdeploy-rl sleep                                    # everything; the weights stay in host memory
  fastdeploy-rl sleep --tags weight,kv_cache --level 2   # the weights come back from the channel
  fastdeploy-rl sleep --tags kv_cache --mode wait --deadline 60"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "sleep", "give memory back on all ranks; `wake` brings it back", _EXAMPLES)
    add_tags(parser)
    parser.add_argument(
        "--level",
        type=int,
        choices=SLEEP_LEVELS,
        default=SLEEP_LEVELS[0],
        help="weights stay in host memory (1), or are dropped and come back from the channel (2; default 1)",
    )
    add_in_flight(parser)
    add_engine(parser)
    add_deadline(parser, Deadlines.pause_s)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fastdeploy_rl.control.controller import EngineController

    with EngineController(options.engine, api_key=client_key(options)) as engine:
        report = engine.sleep(
            options.tags,
            level=options.level,
            mode=options.mode,
            on_timeout=options.on_timeout,
            deadline_s=options.deadline,
        )
    print_report(report, as_json=options.json)
    return 0
