"""Captured decode steps, one for each batch size, kept for each set of addresses that they were captured with.

Owns which graphs there are and which of them may be replayed. Refuses to know devices, tensors and what a graph
computes. Invariant: a graph is replayed only while exactly the addresses are bound that it was captured with; whoever
tries otherwise gets StaleGraphError and no result.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from fastdeploy_rl.engines.embedded.address_ledger import AddressLedger
from fastdeploy_rl.errors import LifecycleError, StaleGraphError

_log = logging.getLogger(__name__)

MAX_SETS = 6
"""Addresses whose graphs are kept: the three arenas of a publisher, the two of the engine's own and the memory of the
cold start take turns. Bounded, since on a device each graph has memory of its own."""

Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")
_Inputs_contra = TypeVar("_Inputs_contra", contravariant=True)
_Outputs_co = TypeVar("_Outputs_co", covariant=True)


class Graph(Protocol[_Inputs_contra, _Outputs_co]):
    """One captured decode step of one batch size. It knows addresses, and nothing of what is bound now."""

    def replay(self, inputs: _Inputs_contra) -> _Outputs_co:
        """The step on the memory it was captured with."""
        ...

    def park(self) -> None:
        """Other addresses are valid now: it keeps nobody's memory alive."""
        ...

    def attach(self) -> None:
        """What is bound now lies where it was captured."""
        ...

    def close(self) -> None:
        """Gives back what it has of its own. It is not used afterwards."""
        ...


@dataclass(eq=False)
class _GraphSet(Generic[Inputs, Outputs]):
    ledger: AddressLedger
    graphs: dict[int, Graph[Inputs, Outputs]]


class GraphPool(Generic[Inputs, Outputs]):
    """All calls come from the loop's thread, except `seconds_for`. Counts since the start: `num_captured` graphs
    and `num_replays`."""

    def __init__(self, capture: Callable[[int], Graph[Inputs, Outputs]], batch_sizes: Collection[int]) -> None:
        """`capture`: the decode step of so many requests, with what is bound at the call."""
        self._capture = capture
        self._batch_sizes = tuple(batch_sizes)
        self._lock = threading.Lock()  # `_sets`: the staging thread looks into it
        self._sets: dict[AddressLedger, _GraphSet[Inputs, Outputs]] = {}  # used last comes last
        self._active: _GraphSet[Inputs, Outputs] | None = None
        self._bound: AddressLedger | None = None
        self._seconds = 0.0
        self.num_captured = 0
        self.num_replays = 0

    def note_bound(self, ledger: AddressLedger | None) -> None:
        """What is bound from now on. It changes no graph: those in use are stale now if their addresses are others.
        None: something that graphs need is gone, so that they keep nobody's memory and none is used until
        `recapture`."""
        self._bound = ledger
        if ledger is None:
            self._park()

    def recapture(self) -> int:
        """Makes the graphs of what is bound the ones in use; returns how many were captured for that. Does nothing
        while something is missing that they need. When a capture fails, no graphs are in use."""
        if self._bound is None or not self._batch_sizes:
            return 0
        if self._active is not None and not self._is_stale(self._active):
            return 0
        self._park()
        known = self._take_known(self._bound)
        graph_set = known or self._capture_set(self._bound)
        with self._lock:
            self._sets.pop(graph_set.ledger, None)
            self._sets[graph_set.ledger] = graph_set
        self._active = graph_set
        return 0 if known else len(graph_set.graphs)

    def drop(self) -> None:
        """Closes every graph."""
        self._active = None
        with self._lock:
            dropped, self._sets = list(self._sets.values()), {}
        for graph_set in dropped:
            _close(graph_set.graphs)

    @property
    def is_in_use(self) -> bool:
        """Some graphs are, stale or not."""
        return self._active is not None

    def has_graph(self, batch_size: int) -> bool:
        """A graph is in use for such a step, stale or not."""
        return self._active is not None and batch_size in self._active.graphs

    def replay(self, batch_size: int, inputs: Inputs) -> Outputs:
        """The step of so many requests; ask `has_graph` before. StaleGraphError: parameters or the KV cache lie
        elsewhere than when it was captured; nothing was computed."""
        self.check_valid()
        active = self._active
        if active is None or batch_size not in active.graphs:
            raise LifecycleError(f"no graph is in use for {batch_size} requests")
        self.num_replays += 1
        return active.graphs[batch_size].replay(inputs)

    def check_valid(self) -> None:
        """StaleGraphError where `replay` would say it: for whoever has something to do between the two."""
        if self._active is not None and self._is_stale(self._active):
            raise _stale(self._active.ledger, self._bound)

    def seconds_for(self, ledger: AddressLedger) -> float:
        """How long `recapture` would take with that bound, from any thread: as long as the last capture of all graphs
        took; 0 where they are there, or none was ever captured."""
        with self._lock:
            is_known = ledger in self._sets
        return 0.0 if is_known else self._seconds

    def _is_stale(self, active: _GraphSet[Inputs, Outputs]) -> bool:
        return active.ledger is not self._bound and active.ledger != self._bound

    def _park(self) -> None:
        if self._active is not None:
            for graph in self._active.graphs.values():
                graph.park()
        self._active = None

    def _take_known(self, ledger: AddressLedger) -> _GraphSet[Inputs, Outputs] | None:
        known = self._sets.get(ledger)
        if known is not None:
            known.ledger = ledger  # the object that is compared before each replay: an equal one takes longer
            for graph in known.graphs.values():
                graph.attach()
        return known

    def _capture_set(self, ledger: AddressLedger) -> _GraphSet[Inputs, Outputs]:
        self._make_room()
        started = time.monotonic()
        graphs: dict[int, Graph[Inputs, Outputs]] = {}
        try:
            for batch_size in self._batch_sizes:
                graphs[batch_size] = self._capture(batch_size)
        except BaseException:
            _close(graphs)
            raise
        self._seconds = time.monotonic() - started
        self.num_captured += len(graphs)
        _log.info("event=graphs_captured num=%d seconds=%.4f", len(graphs), self._seconds)
        return _GraphSet(ledger, graphs)

    def _make_room(self) -> None:
        """For one more: the set that was used longest ago goes."""
        while len(self._sets) >= MAX_SETS:
            with self._lock:
                oldest = self._sets.pop(next(iter(self._sets)))
            _close(oldest.graphs)


def _close(graphs: dict[int, Graph[Inputs, Outputs]]) -> None:
    for graph in graphs.values():
        graph.close()


def _stale(captured: AddressLedger, bound: AddressLedger | None) -> StaleGraphError:
    moved = [] if bound is None else captured.names_elsewhere(bound)
    return StaleGraphError(
        f"the decode graphs were captured with other memory than is bound now: {len(moved)} addresses differ, "
        f"first {moved[:1]}; recapture_graphs makes them valid"
    )
