"""How often ranks may die before their engine is given up.

Pure law: knows neither processes nor clocks. Invariant: a fault that comes back at once, or again and again, ends the
engine with its reason; one that comes now and then does not.
"""

from collections import deque

MAX_DEATHS = 3
DEATHS_WITHIN_S = 300.0
"""So many deaths within such a time are got over; one more ends the engine."""
MAX_DEATHS_AT_START = 1
"""In a row, of one rank, before it was ready again."""


class RestartBudget:
    """Of one engine; `max_deaths` within DEATHS_WITHIN_S."""

    def __init__(self, max_deaths: int = MAX_DEATHS) -> None:
        self._max_deaths = max_deaths
        self._deaths_s: deque[float] = deque()
        self._at_start: dict[int, int] = {}

    def note_death(self, rank: int, now_s: float, *, was_ready: bool) -> str:
        """Counts a death; why that rank must not be started again, empty where it may. `now_s`: of a clock that does
        not go back."""
        self._at_start[rank] = 0 if was_ready else self._at_start.get(rank, 0) + 1
        self._deaths_s.append(now_s)
        while self._deaths_s[0] < now_s - DEATHS_WITHIN_S:
            self._deaths_s.popleft()
        if self._at_start[rank] > MAX_DEATHS_AT_START:
            return f"rank {rank} died {self._at_start[rank]} times in a row before it was ready again"
        if len(self._deaths_s) > self._max_deaths:
            return f"ranks died {len(self._deaths_s)} times within {DEATHS_WITHIN_S:.0f} s"
        return ""
