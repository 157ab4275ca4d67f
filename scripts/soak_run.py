"""Soaks the update path: N updates over every load strategy and apply mode, with rejected and cut-short ones, clears,
repeats, two controllers at once and a legacy writer, while every rank is asked for tokens. Run it as `scripts/soak`.

    scripts/soak 300                          about half a minute
    scripts/soak 5000 --json build/soak.json  minutes; a leak of one small object an update shows
    scripts/soak 500 --mode copy --ranks 2    one apply mode, two ranks

Exit code 1 when an answer did not belong to the version that it was stamped with, when anything that is counted grows
with the number of updates, or when the engine did not do what it has to; 0 otherwise."""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the engine's processes are started as the tests start them

from soak_gauges import Slope
from soak_rounds import ROUNDS, play
from soak_scene import Answers, Counts, Readings, Scene, SoakError

from fastdeploy_rl.config import APPLY_MODES
from fastdeploy_rl.sources import registry

READINGS, MIN_READINGS = 24, 12
"""Of each stretch; the fit leaves out the first third."""
WARM_UP_ROUNDS = 2 * len(ROUNDS)
"""Before the first reading: by then every kind of command was there, and as many reports as an engine keeps."""
TOLD_EVERY_S = 10.0
MIN_UPDATES, MAX_UPDATES = 40, 1_000_000


@dataclass
class Stretch:
    """What one strategy in one mode came to."""

    strategy: str
    mode: str
    counts: Counts = field(default_factory=Counts)
    answers: list[Answers] = field(default_factory=list)
    slopes: list[Slope] = field(default_factory=list)
    failure: str = ""

    @property
    def num_answers(self) -> int:
        return sum(rank.right + rank.wrong for rank in self.answers)

    @property
    def num_wrong(self) -> int:
        return sum(rank.wrong for rank in self.answers)

    @property
    def is_good(self) -> bool:
        return not self.failure and not self.num_wrong and bool(self.slopes) and all(s.is_flat for s in self.slopes)


class Progress:
    """A line on standard error: rewritten on a terminal, a new one now and then elsewhere."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began = self._told = time.monotonic()

    def show(self, done: int, stretch: Stretch) -> None:
        now = time.monotonic()
        if not sys.stderr.isatty() and now - self._told < TOLD_EVERY_S:
            return
        self._told = now
        left_s = (now - self._began) * max(self._total - done, 0) / max(done, 1)
        text = (
            f"soak: {done}/{self._total} updates, {stretch.strategy} {stretch.mode}, "
            f"{stretch.num_answers} answers, {stretch.num_wrong} wrong, {left_s:.0f} s left"
        )
        print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, end="", file=sys.stderr, flush=True)
        if not sys.stderr.isatty():
            print(file=sys.stderr, flush=True)

    def end(self) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def main() -> int:
    arguments = _parser().parse_args()
    progress = Progress(arguments.updates)
    began = time.monotonic()
    stretches: list[Stretch] = []
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl_soak") as folder:
        for strategy, mode, share in _shares(arguments):
            stretch = Stretch(strategy, mode)
            stretches.append(stretch)
            done = sum(earlier.counts.updates for earlier in stretches)
            place = Path(folder) / f"{strategy}-{mode}"
            place.mkdir(mode=0o700)
            with Scene(place, strategy, mode, arguments.ranks) as scene:
                _soak(scene, stretch, share, done, progress)
    progress.end()
    summary = _summary(stretches, time.monotonic() - began)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(summary, indent=1) + "\n")
    _tell(summary, stretches)
    return int(not all(stretch.is_good for stretch in stretches))


def _shares(arguments: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Every pair of strategy and mode with its number of updates; together at least those asked for."""
    pairs = [(strategy, mode) for strategy in registry.load_strategies() for mode in arguments.mode or APPLY_MODES]
    share = -(-arguments.updates // len(pairs))
    yield from ((strategy, mode, share) for strategy, mode in pairs)


def _soak(scene: Scene, stretch: Stretch, share: int, done: int, progress: Progress) -> None:
    """Rounds in their order, over and over, until `share` updates are done; then the slopes."""
    stretch.answers = scene.load.answers
    readings = Readings()
    between = max(1, share // READINGS)
    num_rounds = 0
    try:
        while stretch.counts.updates < share or len(readings.updates) < MIN_READINGS:
            for _ in range(between if num_rounds else WARM_UP_ROUNDS):
                play(ROUNDS[num_rounds % len(ROUNDS)], scene)
                num_rounds += 1
            reading = scene.read()
            stretch.counts.add(scene.new_commands())
            readings.add(stretch.counts.updates, reading)
            progress.show(done + stretch.counts.updates, stretch)
    except SoakError as error:
        stretch.failure = f"{error}\n{scene.last_words()}"
        return
    stretch.slopes = readings.slopes(f"{stretch.strategy} {stretch.mode}")


def _summary(stretches: list[Stretch], seconds: float) -> dict[str, object]:
    slopes = [slope for stretch in stretches for slope in stretch.slopes]
    return {
        "updates": sum(stretch.counts.updates for stretch in stretches),
        "rejected": sum(stretch.counts.rejected for stretch in stretches),
        "cleared": sum(stretch.counts.cleared for stretch in stretches),
        "seconds": round(seconds, 1),
        "answers": sum(stretch.num_answers for stretch in stretches),
        "wrong_answers": sum(stretch.num_wrong for stretch in stretches),
        "slopes": {slope.gauge: asdict(slope) | {"is_flat": slope.is_flat} for slope in steepest(slopes)},
        "flat": bool(slopes) and all(slope.is_flat for slope in slopes) and all(s.slopes for s in stretches),
        "failures": [stretch.failure for stretch in stretches if stretch.failure],
        "by": [{"strategy": s.strategy, "mode": s.mode, **asdict(s.counts)} for s in stretches],
    }


def steepest(slopes: list[Slope]) -> list[Slope]:
    """Of every gauge the one that is nearest to its bound, or farthest beyond."""
    found: dict[str, Slope] = {}
    for slope in slopes:
        if slope.gauge not in found or slope.share_of_bound > found[slope.gauge].share_of_bound:
            found[slope.gauge] = slope
    return list(found.values())


def _tell(summary: dict[str, object], stretches: list[Stretch]) -> None:
    slopes = [slope for stretch in stretches for slope in stretch.slopes]
    for slope in steepest(slopes):
        print(f"{'flat' if slope.is_flat else 'GROWS'}  {slope}")
    for slope in (slope for slope in slopes if not slope.is_flat and slope not in steepest(slopes)):
        print(f"GROWS  {slope}")
    for told in (told for stretch in stretches for rank in stretch.answers for told in rank.told):
        print(f"WRONG  {told}")
    for failure in (stretch.failure for stretch in stretches if stretch.failure):
        print(f"FAILED {failure}")
    print(", ".join(f"{name} {summary[name]}" for name in list(summary)[:6]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "updates",
        type=_num_updates,
        metavar="N",
        help=f"updates, {MIN_UPDATES} or more; a short soak makes more, for enough readings to draw lines through",
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--ranks", type=int, default=3, choices=range(1, 9), metavar="R", help="1 to 8 (default 3)")
    parser.add_argument("--mode", action="append", choices=APPLY_MODES, help="only this apply mode; may be repeated")
    return parser


def _num_updates(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not MIN_UPDATES <= int(text) <= MAX_UPDATES:
        raise argparse.ArgumentTypeError(f"{MIN_UPDATES} to {MAX_UPDATES} updates, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
