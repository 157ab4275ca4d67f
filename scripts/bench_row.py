"""One line of the benchmark: a figure, the limit or peer measured beside it, and the target for their ratio."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """`ratio` = value / limit_value, 0 where no limit was measured; `target` says in words what it must keep, `is_met`
    whether it does."""

    name: str
    value: float
    unit: str
    limit: str
    limit_value: float
    target: str
    is_met: bool

    @property
    def ratio(self) -> float:
        return self.value / self.limit_value if self.limit_value else 0.0

    def as_json(self) -> dict[str, object]:
        fields = asdict(self)
        return {name: fields[name] for name in ("name", "value", "unit", "limit", "limit_value")} | {
            "ratio": self.ratio,
            "target": self.target,
            "met": self.is_met,
        }


def at_most(name: str, value: float, unit: str, limit: str, limit_value: float, allowed: float, target: str) -> Row:
    return Row(name, value, unit, limit, limit_value, target, value <= allowed)


def at_least(name: str, value: float, unit: str, limit: str, limit_value: float, wanted: float, target: str) -> Row:
    return Row(name, value, unit, limit, limit_value, target, value >= wanted)


def seconds_of(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started
