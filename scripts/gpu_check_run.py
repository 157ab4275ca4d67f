"""Checks on one GPU what tests can only check on a fake one. Run it as `scripts/gpu_check`. Not run on a GPU so far.

    scripts/gpu_check --json build/gpu_check.json     everything, within 8 minutes
    scripts/gpu_check --only ipc --only copies        some parts
    scripts/gpu_check --device GPU-5e2f --megabytes 2048
    PYTHON=/opt/torch/bin/python scripts/gpu_check    with the Python that has torch or cupy
    scripts/gpu_check | grep -e ' outcome=failed' -e ' outcome=skipped'

Parts: `device` (driver, name), `ipc` (CUDA memory between two processes: bytes, one open for an allocation, releases,
deaths), `copies` (between device and host, pinned and not, against a plain cuMemcpyDtoD of the same size in the same
run), `checksum` (fletcher4 by torch or cupy, against the native core), `addresses` (memory that is filled again and
again stays where it is, for other processes and for CUDA graphs). Speed is reported and never judged.

It has to find: Linux, a CUDA driver (libcuda.so.1, or $FASTDEPLOY_RL_LIBCUDA), Python >= 3.10 with numpy, msgspec
and posix_ipc, and this repository. The native core is built in place where it is missing, by g++, Python's headers,
setuptools and pybind11. torch or cupy run the checksum, torch a graph; what needs them is skipped where they are not.
Paddle is not used, nothing is downloaded.

Each check is one line, `gpu_check part=.. check=.. outcome=passed|failed|skipped seconds=..`, and each part a process
that is ended at its time limit. Exit code 0: all that could run passed, and something did; the summary names what was
skipped. 1: something failed, or did not end in time. 2: what it needs is missing. 3: there is no device."""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gpu_check_process import Check, PartSettings, run_part

PART_LIMITS_S = {"device": 60.0, "ipc": 90.0, "copies": 120.0, "checksum": 120.0, "addresses": 60.0}
LIMIT_S = 450.0
MAX_MEGABYTES = 16 << 10
PASSED, FAILED, NO_DEVICE = 0, 1, 3
EXIT_NAMES = {PASSED: "passed", FAILED: "failed", NO_DEVICE: "no_device"}


def main() -> int:
    arguments = _parser().parse_args()
    began = time.monotonic()
    checks = list(_play(arguments, began + arguments.limit_s))
    code = exit_code(checks)
    told = {"outcome": EXIT_NAMES[code], "exit_code": code, **_counts(checks), "seconds": time.monotonic() - began}
    print("gpu_check summary " + " ".join(f"{name}={_text(value)}" for name, value in told.items()))
    for check in checks:
        if check.outcome != "passed":
            print(f"gpu_check {check.outcome} {check.part}/{check.name}: {check.reason}")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        rows = [check._asdict() for check in checks]
        arguments.json.write_text(json.dumps({**told, "checks": rows}, indent=1) + "\n")
    return code


def exit_code(checks: list[Check]) -> int:
    """What is skipped counts for nothing: where nothing passed, nothing was shown."""
    outcomes = [check.outcome for check in checks]
    if _has_no_device(checks):
        return NO_DEVICE
    return PASSED if "passed" in outcomes and "failed" not in outcomes else FAILED


def _has_no_device(checks: list[Check]) -> bool:
    return any(check.outcome == "skipped" for check in checks if check.part == "device")


def _play(arguments: argparse.Namespace, deadline: float) -> Iterator[Check]:
    """The part `device` comes always, and the rest where it finds one."""
    parts = [part for part in PART_LIMITS_S if part == "device" or part in (arguments.only or PART_LIMITS_S)]
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl_gpu_check") as folder:
        for part in parts:
            settings = PartSettings(part, folder, arguments.device, arguments.megabytes << 20, arguments.arrays)
            limit_s = min(PART_LIMITS_S[part], deadline - time.monotonic())
            found = []
            for check in run_part(settings, limit_s):
                print(_line(check), flush=True)
                found.append(check)
                yield check
            if _has_no_device(found):
                return


def _line(check: Check) -> str:
    shown = {"part": check.part, "check": check.name, "outcome": check.outcome, "seconds": check.seconds}
    shown |= check.figures | ({"reason": json.dumps(check.reason)} if check.reason else {})
    return "gpu_check " + " ".join(f"{name}={_text(value)}" for name, value in shown.items())


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _counts(checks: list[Check]) -> dict[str, int]:
    return {name: sum(check.outcome == name for check in checks) for name in ("passed", "failed", "skipped")}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=tuple(PART_LIMITS_S), help="this part; may be repeated")
    parser.add_argument(
        "--device", default="0", help="index, or (the beginning of) a GPU- or MIG- identifier (default 0)"
    )
    parser.add_argument("--megabytes", type=_megabytes, default=512, help="bytes that are copied (default 512 MiB)")
    parser.add_argument("--limit-s", type=_seconds, default=LIMIT_S, help=f"for all parts (default {LIMIT_S:g} s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes outcome, figures and reasons there")
    parser.add_argument(
        "--arrays",
        choices=("auto", "torch", "cupy", "numpy"),
        default="auto",
        help="what computes on the device (default: torch and cupy, whichever are there); numpy: on FakeCuda only",
    )
    return parser


def _megabytes(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_MEGABYTES:
        raise argparse.ArgumentTypeError(f"between 1 and {MAX_MEGABYTES}, not {value}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"between 1 and 3600, not {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
