"""`receipt`: the proof of what an engine's ranks read and hold."""

import argparse

from fastdeploy_rl.cli.options import (
    Verbs,
    add_deadline,
    add_engine,
    add_json,
    add_verb,
    client_key,
    print_fields,
    print_json,
)
from fastdeploy_rl.config import Deadlines

_EXAMPLES = """\
  fastdeploy-rl receipt                  # of the last commit
  fastdeploy-rl receipt --recompute      # reads the live memory of every rank again; exit code 2 where it differs"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(
        verbs, "receipt", "show the proof of the live weights, or check it against live memory", _EXAMPLES
    )
    parser.add_argument(
        "--recompute", action="store_true", help="compute the checksums of live memory again and compare"
    )
    add_engine(parser)
    add_deadline(parser, Deadlines.recompute_s)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fastdeploy_rl.control.controller import EngineController

    with EngineController(options.engine, api_key=client_key(options)) as engine:
        receipt = engine.receipt(recompute=options.recompute, deadline_s=options.deadline)
    if options.json:
        print_json(receipt)
        return 0
    ranks = len(next(iter(receipt.live.values()), ()))
    checked = "live memory is what the receipt says" if options.recompute else "as of the last commit"
    print(f"version {receipt.version} from {receipt.source}: {checked}")
    print_fields(
        tensors_read=len(receipt.read),
        parameters_live=f"{len(receipt.live)} on {ranks} ranks",
        content_digest=receipt.content_digest,
    )
    return 0
