"""`doctor`: examines the machine, the channel and the engines, and says how to mend what is wrong."""

import argparse
import sys
from typing import TYPE_CHECKING

from fastdeploy_rl.cli.options import Verbs, add_channel, add_json, add_verb, port, print_json

if TYPE_CHECKING:
    from fastdeploy_rl.observe.doctor.check import Section
    from fastdeploy_rl.observe.doctor.examination import Examination

_EXAMPLES = """\
  fastdeploy-rl doctor
  fastdeploy-rl doctor --clean                       # also removes what dead processes left
  fastdeploy-rl doctor --engine 8182 --ipc-dir DIR --json
  fastdeploy-rl doctor --ipc                         # can trainer and engine share memory, also the GPU's?
  fastdeploy-rl doctor --ipc --peer 4711             # this container and process 4711
  fastdeploy-rl doctor --fastdeploy 8182             # is the plugin there, and which runner is at work?"""

_ALL_PORTS = 0
_PID_DIGITS = 10


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(
        verbs, "doctor", "examine machine, channel and engines; exit code 1 where something will not work", _EXAMPLES
    )
    parser.add_argument(
        "--engine",
        type=port,
        default=None,
        metavar="PORT",
        help="the engine worker queue port of an engine that must be there (default: whichever are)",
    )
    add_channel(parser)
    parser.add_argument(
        "--clean",
        action="store_true",
        help="first remove what dead processes left, and name it; nothing of a live one is touched",
    )
    parser.add_argument(
        "--ipc",
        action="store_true",
        help="also compare this process with publishers and engines that live: namespaces, /dev/shm, allocators, GPUs; "
        "and share memory of a GPU between two child processes",
    )
    parser.add_argument(
        "--peer",
        type=pid,
        action="append",
        default=[],
        metavar="PID",
        help="compare with this process of the other side instead; may be given several times; implies --ipc",
    )
    parser.add_argument(
        "--fastdeploy",
        type=port,
        nargs="?",
        const=_ALL_PORTS,
        default=None,
        metavar="PORT",
        help="also examine FastDeploy's plugin, in a child that imports FastDeploy, and which runner is at work at the "
        "port (without one: at all ports)",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def pid(text: str) -> int:
    """A process as its own /proc numbers it."""
    if not text.isascii() or not text.isdecimal() or len(text) > _PID_DIGITS or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a process id is a whole number above 0, got {text!r:.40}")
    return int(text)


def run(options: argparse.Namespace) -> int:
    from fastdeploy_rl.observe.doctor.check import Status
    from fastdeploy_rl.observe.doctor.examination import FastDeployQuestion, IpcQuestion, examine

    is_at_all_ports = options.fastdeploy == _ALL_PORTS
    examination = examine(
        options.ipc_dir,
        engine=options.engine,
        clean=options.clean,
        ipc=IpcQuestion(tuple(options.peer)) if options.ipc or options.peer else None,
        fastdeploy=None
        if options.fastdeploy is None
        else FastDeployQuestion(None if is_at_all_ports else options.fastdeploy),
    )
    if options.json:
        print_json(examination)
    else:
        _print(examination)
    return 1 if examination.status is Status.FAIL else 0


def _print(examination: "Examination") -> None:
    from fastdeploy_rl.observe.sizes import size_text

    for removed in examination.removed:
        print(f"removed {removed.path} ({size_text(removed.num_bytes)})")
    width = max(len(check.name) for section in examination.sections for check in section.checks)
    for section in examination.sections:
        _print_section(section, width)
    statuses = [check.status.value for section in examination.sections for check in section.checks]
    print(", ".join(f"{statuses.count(status)} {status}" for status in ("ok", "warn", "fail")))
    sys.stdout.flush()


def _print_section(section: "Section", width: int) -> None:
    print(section.title)
    for check in section.checks:
        print(f"  {check.status.value:<4}  {check.name:<{width}}  {check.found}")
        if check.mend:
            print(f"        mend: {check.mend}")
