"""`status`: what an engine is and does now."""

import argparse
from typing import TYPE_CHECKING

from fastdeploy_rl.cli.options import Verbs, add_engine, add_json, add_verb, client_key, print_fields, print_json

if TYPE_CHECKING:
    from fastdeploy_rl.report import EngineStatus, RankStatus

_EXAMPLES = """\
  fastdeploy-rl status
  fastdeploy-rl status --engine http://127.0.0.1:8180 --json"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "status", "show version, admission and ranks of an engine", _EXAMPLES)
    add_engine(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fastdeploy_rl.control.controller import EngineController

    with EngineController(options.engine, api_key=client_key(options)) as engine:
        status = engine.status()
    if options.json:
        print_json(status)
    else:
        _print_status(status)
    return 0


def _print_status(status: "EngineStatus") -> None:
    print(f"engine {status.port}: {status.admission}, version {status.version or 'none'}")
    print_fields(
        paused="yes, until somebody resumes it" if status.is_paused else "",
        live_since=_since(status),
        newest_version=status.newest_version if status.newest_version != status.version else "",
        memory=_memory(status),
        update=status.update,
        legacy_status=status.legacy_status,
        content_digest=status.content_digest,
        commands_done=status.commands_done,
        reason=status.reason,
    )
    for rank in status.ranks:
        print(f"  rank {rank.rank}  {_rank_line(rank)}")


def _since(status: "EngineStatus") -> str:
    """When what is live came, and how."""
    source = f"from {status.source}" if status.source and status.version else ""
    words = (status.live_since, source, f"by {status.apply_mode}" if status.apply_mode else "")
    return ", ".join(word for word in words if word)


def _memory(status: "EngineStatus") -> str:
    """Where each tag's is, and which one waits for somebody to wake it."""
    tags = status.residency.items()
    return ", ".join(f"{tag} {where}" + (" (asleep)" if tag in status.asleep else "") for tag, where in tags)


def _rank_line(rank: "RankStatus") -> str:
    heard = "not heard yet" if rank.heartbeat_age_s is None else f"heard {rank.heartbeat_age_s:.1f} s ago"
    line = f"pid {rank.pid}, {rank.phase}, version {rank.version or 'none'}, {heard}"
    return f"{line}, {rank.error}" if rank.error else line
