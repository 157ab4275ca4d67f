"""Feeds hostile input to whatever reads what another process wrote: manifests, LATEST, EPOCH, the lease table, offers,
files of the run directory, checkpoints, the board, its request slots and the status words. Run it through
`scripts/fuzz`.

    scripts/fuzz 60                         a minute over all targets
    scripts/fuzz 600 --seed 7               other inputs, the same ones again for the same seed
    scripts/fuzz 30 --only board            one target; --list names them
    scripts/fuzz --bombs                    manifests of 64 MiB made to cost time or memory, each measured
    scripts/fuzz --replay build/fuzz/board-1f00a3b2.bin      a find, once more, with its traceback

Only errors of the tree (fastdeploy_rl/errors.py) may come out, each within a second. Anything else is a find: it is
kept under build/fuzz/, told in build/fuzz.json, and makes the exit code 1. Inputs run in a process of their own, so
that a crash or a hang is a find like any other.
"""

import argparse
import collections
import hashlib
import json
import logging
import mmap
import os
import secrets
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from fuzz_board import BOARD_TARGETS
from fuzz_targets import FILE_TARGETS, Reader, Target
from hypothesis import HealthCheck, Phase, given, seed, settings

from fastdeploy_rl.errors import FastDeployRLError

TARGETS = FILE_TARGETS + BOARD_TARGETS
BOUND_S = 1.0
_HANG_S = 10.0
"""A reader that Python cannot interrupt is ended from outside after so long."""
_SLICE_S = 2.0
_DRAWING = settings(
    max_examples=200,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
_LOOK_S = 0.1
_LEAST_S = 0.2
_INPUT_BYTES = 1 << 20
_MAX_FINDS = 100


class TooSlowError(Exception):
    """The reader took longer than BOUND_S, twice."""


class Note:
    """The input in hand, in a mapped file: whoever started this process knows it whatever becomes of it."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _INPUT_BYTES)

    def write(self, target: int, data: bytes) -> None:
        data = data[: _INPUT_BYTES - 24]
        self._map[:24] = struct.pack("<QQQ", target, time.monotonic_ns(), len(data))
        self._map[24 : 24 + len(data)] = data

    def clear(self) -> None:
        self._map[:24] = bytes(24)

    def read(self) -> tuple[int, float, bytes]:
        """Target, seconds since it began (0: nothing is in hand), input."""
        target, since_ns, size = struct.unpack("<QQQ", self._map[:24])
        age_s = (time.monotonic_ns() - since_ns) / 1e9 if since_ns else 0.0
        return target, age_s, bytes(self._map[24 : 24 + size])


class Tally:
    """What one target has been through."""

    def __init__(self) -> None:
        self.inputs = 0
        self.errors: collections.Counter[str] = collections.Counter()
        self.slowest_s = 0.0
        self.seconds = 0.0

    def as_json(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "inputs": self.inputs,
            "errors": dict(self.errors.most_common()),
            "slowest_s": round(self.slowest_s, 4),
            "seconds": round(self.seconds, 2),
        }


class Finds:
    """Kept as files in `directory`, one for each place that an error comes from."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._places: set[str] = set()

    def keep(self, error: BaseException, target: str, data: bytes) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{target} {type(error).__name__} {last.filename}:{last.lineno}"
        if place in self._places or len(self._places) >= _MAX_FINDS:
            return
        self._places.add(place)
        text = "".join(traceback.format_exception(error))
        _write_find(self._directory, target, data, type(error).__name__, text[-3000:])


# --- the process that reads ----------------------------------------------------------------------------


def work(names: list[str], seconds: float, number: int, directory: Path) -> None:
    """Takes the targets in turn until the time is over; what came of it stands in `directory` after each turn."""
    note, finds = Note(directory / "note"), Finds(directory)
    tallies = {name: Tally() for name in names}
    deadline = time.monotonic() + seconds
    taken = [(index, target) for index, target in enumerate(TARGETS) if target.name in tallies]
    while time.monotonic() < deadline:
        for turn, (index, target) in enumerate(taken):
            left = min((deadline - time.monotonic()) / (len(taken) - turn), _SLICE_S)
            if left > 0 or not tallies[target.name].inputs:
                number += 1
                _take_turn(target, index, tallies[target.name], left, number, note, finds)
                _tell_watch([tally.as_json(name) for name, tally in tallies.items()], directory)


def _tell_watch(tallies: list[dict[str, Any]], directory: Path) -> None:
    (directory / "tallies.new").write_text(json.dumps(tallies))
    os.replace(directory / "tallies.new", directory / "tallies")


def _take_turn(target: Target, index: int, tally: Tally, seconds: float, number: int, note: Note, finds: Finds) -> None:
    """At least one input of a target, and more until `seconds` are over; the same ones again for the same `number`."""
    started = time.monotonic()
    with target.open() as reader:

        def read_all(inputs: list[bytes]) -> None:
            for data in inputs:
                if tally.inputs and time.monotonic() > started + seconds:
                    return
                note.write(index, data)
                find = _read_once(reader, data, tally)
                note.clear()
                if find is not None:
                    finds.keep(find, target.name, data)

        batch = 0
        while not tally.inputs or time.monotonic() < started + seconds:
            batch += 1
            seed(number * 1_000_003 + batch)(_DRAWING(given(target.inputs)(read_all)))()
    tally.seconds += time.monotonic() - started


def _read_once(reader: Reader, data: bytes, tally: Tally) -> BaseException | None:
    """What should not have come out of the reader."""
    tally.inputs += 1
    started = time.monotonic()
    try:
        name = _bounded(reader, data)
        if name:
            tally.errors[name] += 1
    except TooSlowError:
        try:
            _bounded(reader, data)  # the machine may be busy: a find is slow whenever it is read
        except Exception as error:
            return error
    except Exception as error:
        return error
    tally.slowest_s = max(tally.slowest_s, time.monotonic() - started)
    return None


def _bounded(reader: Reader, data: bytes) -> str:
    """The class of the error of the tree that came, empty for none."""
    with _alarm(BOUND_S):
        try:
            reader(data)
        except FastDeployRLError as error:
            str(error).encode()
            return type(error).__name__
    return ""


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise TooSlowError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _write_find(directory: Path, target: str, data: bytes, kind: str, text: str) -> None:
    path = directory / f"{target}-{hashlib.sha256(data).hexdigest()[:8]}.bin"
    path.write_bytes(data)
    path.with_suffix(".json").write_text(
        json.dumps({"target": target, "kind": kind, "error": text, "input": str(path)}, indent=1)
    )


# --- the process that watches --------------------------------------------------------------------------


class Watch:
    """Starts the reading process, again where it crashed or hangs, until the time is over."""

    def __init__(self, names: list[str], seconds: float, number: int, directory: Path) -> None:
        self._names, self._seconds, self._number = names, seconds, number
        self._directory = directory
        self._deadline = 0.0
        self.targets: dict[str, dict[str, Any]] = {}

    def run(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        for old in [*self._directory.glob("*.bin"), *self._directory.glob("*.json")]:
            old.unlink()
        (self._directory / "note").write_bytes(bytes(_INPUT_BYTES))
        self._deadline = time.monotonic() + self._seconds
        while self._left_s() > _LEAST_S:
            self._run_once(self._left_s())
            self._number += 7919

    def findings(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self._directory.glob("*.json"))]

    def _run_once(self, seconds: float) -> None:
        note = Note(self._directory / "note")
        note.clear()
        arguments = [str(seconds), "--seed", str(self._number), "--work", "--out", str(self._directory)]
        command = [sys.executable, sys.argv[0], *arguments, *(["--only", ",".join(self._names)])]
        before = dict(self.targets)
        (self._directory / "tallies").write_text("[]")
        reader = subprocess.Popen(command)
        while reader.poll() is None:
            self._hear(before)
            target, age_s, data = note.read()
            if age_s > _HANG_S:
                reader.kill()
                reader.wait()
                text = f"not done after {age_s:.0f} s, and not to be interrupted"
                _write_find(self._directory, TARGETS[target].name, data, "hang", text)
                return
            time.sleep(_LOOK_S)
        self._hear(before)
        if reader.returncode:
            target, age_s, data = note.read()
            if not age_s:
                raise SystemExit(f"the reading process ended with {reader.returncode} between two inputs")
            _write_find(self._directory, TARGETS[target].name, data, "crash", f"exit code {reader.returncode}")

    def _hear(self, before: dict[str, dict[str, Any]]) -> None:
        told = json.loads((self._directory / "tallies").read_text())
        targets = {tally["name"]: _sum(before.get(tally["name"]), tally) for tally in told}
        for name, tally in targets.items():
            if tally["inputs"] > self.targets.get(name, {"inputs": 0})["inputs"]:
                print(f"{self._left_s():5.0f} s left  {_told(tally)}", file=sys.stderr, flush=True)
        self.targets.update(targets)

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


def _told(tally: dict[str, Any]) -> str:
    errors = ", ".join(f"{name} {count}" for name, count in tally["errors"].items())
    counted = f"{tally['inputs']:>8} inputs {_rate(tally):>6.0f}/s"
    return f"{tally['name']:<11} {counted}  slowest {tally['slowest_s']:.3f} s  {errors}"


def _rate(tally: dict[str, Any]) -> float:
    return float(tally["inputs"] / max(tally["seconds"], 0.01))


def _sum(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """Of a process that ended and the one that took its place."""
    if before is None:
        return now
    errors = collections.Counter(before["errors"])
    errors.update(now["errors"])
    return {
        "name": now["name"],
        "inputs": before["inputs"] + now["inputs"],
        "errors": dict(errors.most_common()),
        "slowest_s": max(before["slowest_s"], now["slowest_s"]),
        "seconds": before["seconds"] + now["seconds"],
    }


# --- the command line ----------------------------------------------------------------------------------


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.bombs:
        return subprocess.call([sys.executable, str(Path(__file__).with_name("fuzz_bombs.py"))])
    if arguments.list:
        print("\n".join(target.name for target in TARGETS))
        return 0
    if arguments.replay is not None:
        return _replay(arguments.replay)
    names = _names(arguments.only)
    if arguments.work:
        logging.disable()
        work(names, arguments.seconds, arguments.seed, arguments.out)
        return 0
    number = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    print(f"seed {number}", file=sys.stderr)
    watch = Watch(names, arguments.seconds, number, arguments.out)
    watch.run()
    return _tell(arguments, number, watch)


def _tell(arguments: argparse.Namespace, number: int, watch: Watch) -> int:
    failures, targets = watch.findings(), list(watch.targets.values())
    told = {"seconds": arguments.seconds, "seed": number, "targets": targets, "failures": failures}
    arguments.out.with_suffix(".json").write_text(json.dumps(told, indent=1))
    for tally in targets:
        print(_told(tally))
    for failure in failures:
        print(f"\nFOUND in {failure['target']}: {failure['kind']}\n{failure['error']}")
        print(f"again: scripts/fuzz --replay {failure['input']}")
    print(f"{len(failures)} finds")
    return int(bool(failures))


def _replay(path: Path) -> int:
    target = next(target for target in TARGETS if target.name == path.name.rsplit("-", 1)[0])
    with target.open() as reader:
        started = time.monotonic()
        try:
            reader(path.read_bytes())
        except FastDeployRLError as error:
            print(f"{type(error).__name__}: {error}")
        print(f"{time.monotonic() - started:.3f} s")
    return 0


def _names(only: str) -> list[str]:
    known = [target.name for target in TARGETS]
    wanted = only.split(",") if only else known
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"no target {', '.join(unknown)}; there are {', '.join(known)}")
    return wanted


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seconds", type=float, nargs="?", default=60.0, help="how long, 60 unless told")
    parser.add_argument("--seed", type=int, help="drawn, and printed, unless told")
    parser.add_argument("--only", default="", help="targets, with commas between")
    parser.add_argument("--bombs", action="store_true", help="manifests made to cost time or memory, each measured")
    parser.add_argument("--list", action="store_true", help="names the targets")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="one find, once more")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="where finds go, and the summary beside")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
