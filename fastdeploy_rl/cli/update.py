"""`update`: lets an engine take over a published version."""

import argparse

from fastdeploy_rl.cli.options import Verbs, add_deadline, add_engine, add_json, add_kv, add_verb, client_key
from fastdeploy_rl.cli.reports import print_report
from fastdeploy_rl.config import IN_FLIGHT, Deadlines

_EXAMPLES = """\
  fastdeploy-rl update                                   # the newest version
  fastdeploy-rl update --kv keep --in-flight wait        # what becomes of the KV cache, and of requests in flight
  fastdeploy-rl update 3.1200 --engine http://127.0.0.1:8180 --deadline 60"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "update", "take a published version over on all ranks, or none", _EXAMPLES)
    parser.add_argument("version", nargs="?", default=None, metavar="VERSION", help="as `3.1200` (default: the newest)")
    parser.add_argument("--force", action="store_true", help="also a version that goes back, or the one that is live")
    add_kv(parser)
    parser.add_argument(
        "--in-flight",
        choices=IN_FLIGHT,
        default=None,
        help="requests in flight go on afterwards (keep, the default), come to their end first (wait), or end with "
        "what they have (abort)",
    )
    add_engine(parser)
    add_deadline(parser, Deadlines.update_s)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fastdeploy_rl.control.controller import EngineController

    with EngineController(options.engine, api_key=client_key(options)) as engine:
        report = engine.update(
            options.version,
            deadline_s=options.deadline,
            force=options.force,
            kv=options.kv,
            in_flight=options.in_flight,
        )
    print_report(report, as_json=options.json)
    return 0
