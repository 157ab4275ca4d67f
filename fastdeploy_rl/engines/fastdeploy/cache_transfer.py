"""What FastDeploy's other processes are told when KV pages go and come: the one that swaps pages to the host or to a
storage, over `kv_cache_status`, and the engine's prefix tree, over `prefix_tree_status`.

Owns both handshakes. Refuses to know pages, weights and ranks other than by who may speak. Invariant: every wait has a
deadline; a tree that could not be cleared in time is left to go on as it was.

FastDeploy 2.6: a process that swaps pages stops doing so when it is told CLEARING, lets go of them together with the
runner of each rank, and says CLEARED; told UPDATING it has them again, and says NORMAL. The one of both that owns them
lets go last and has them first. The tree is cleared once nothing is being swapped. It has no thread that listens where
FD_ENABLE_V1_UPDATE_WEIGHTS is set: there the engine tells the other process by its own queue, and resets its tree when
it is paused.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from fastdeploy_rl.board.legacy import KV_CACHE_WORD, PREFIX_TREE_WORD, StatusWord
from fastdeploy_rl.config import Deadlines, has_v1_updates
from fastdeploy_rl.engines.fastdeploy.settings import EngineSettings
from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError
from fastdeploy_rl.lifecycle import LegacyStatus

_LOOK_NS = 10_000_000
"""Foreign processes store into the words without waking anybody."""
_MIXED = "mixed"
_SWAPPING = "of the cache-transfer process"
_TREE = "of the engine's prefix tree"


class CacheTransfer:
    """One rank's. All calls come from its loop's thread."""

    def __init__(
        self,
        port: int,
        *,
        has_process: bool,
        has_prefix_tree: bool,
        leads: bool = True,
        listens: bool = True,
        timeout_s: float = Deadlines.clear_s,
    ) -> None:
        """`port`: of this rank's words. `has_process`: pages are another process's. `leads`: this rank speaks to the
        tree, for all of its engine. `listens`: the tree hears the word. `timeout_s`: of each wait."""
        self._port, self._timeout_s = port, timeout_s
        self.has_process, self.has_prefix_tree = has_process, has_prefix_tree
        self._leads, self._listens = leads, listens
        self.is_tree_silent = False
        """The prefix tree did not answer when it was asked last."""
        self.is_told = False
        """FastDeploy's engine tells the others itself, at present."""

    @classmethod
    def of(cls, fd_config: Any, settings: EngineSettings) -> "CacheTransfer":
        """ConfigurationError where prefill and decode are split over engines: FastDeploy's processes give no pages back
        there."""
        role = getattr(fd_config.scheduler_config, "splitwise_role", _MIXED)
        if role != _MIXED:
            raise ConfigurationError(
                f"splitwise_role {role!r}: weights that change need an engine with splitwise_role {_MIXED!r}, since "
                "FastDeploy neither frees nor clears the KV cache of another one"
            )
        cache = fd_config.cache_config
        return cls(
            settings.own_port,
            has_process=getattr(cache, "num_cpu_blocks", 0) > 0
            or bool(getattr(cache, "kvcache_storage_backend", None)),
            has_prefix_tree=bool(cache.enable_prefix_caching),
            leads=settings.tp_rank == 0,
            listens=not has_v1_updates(),
            timeout_s=settings.deadlines.clear_s,
        )

    @contextmanager
    def told_by_engine(self) -> Iterator[None]:
        """Inside, FastDeploy's engine is paused, has reset its tree, and tells the other process what it must know."""
        before, self.is_told = self.is_told, True
        try:
            yield
        finally:
            self.is_told = before

    def can_reset_tree(self, *, stands_still: bool) -> bool:
        """No request will be given KV of before, if this is wanted. `stands_still`: a trainer has closed the engine by
        its status word. Without that FastDeploy's scheduler may be giving pages away at this moment, and a reset would
        let it give them away twice."""
        return self.is_told or (self._listens and stands_still) or not self.has_prefix_tree

    @property
    def must_swap_owners(self) -> bool:
        """Pages cannot be emptied in place: another process may be copying to and from them."""
        return self.has_process and not self.is_told

    # --- pages -------------------------------------------------------------------------------------

    def tell_pages_go(self) -> None:
        """Before this rank lets go of its pages. Every rank tells: the answer needs all of them."""
        if self.must_swap_owners:
            self._tell(LegacyStatus.CLEARING)

    def await_pages_gone(self) -> None:
        """After. DeadlineExceededError."""
        if self.must_swap_owners:
            self._ask(KV_CACHE_WORD, LegacyStatus.CLEARING, LegacyStatus.CLEARED, _SWAPPING)

    def tell_pages_come(self) -> None:
        """Before this rank makes the pages that were dropped, where they are its own."""
        if self.must_swap_owners:
            self._tell(LegacyStatus.UPDATING)

    def await_foreign_pages(self, are_there: Callable[[], bool]) -> None:
        """Before this rank takes up pages that the other process makes; it may have done so, since FastDeploy's loop or
        a faster rank has told it. DeadlineExceededError, where FastDeploy's runner would wait without a deadline."""

        def are_there_or_told() -> bool:
            if are_there():
                return True
            self.tell_pages_come()
            return False

        self._await(are_there_or_told, f"KV pages {_SWAPPING}")

    def await_pages_come(self) -> None:
        """After: the other process may swap them from here on. DeadlineExceededError."""
        if self.must_swap_owners:
            self._ask(KV_CACHE_WORD, LegacyStatus.UPDATING, LegacyStatus.NORMAL, _SWAPPING)

    def await_detached(self, is_detached: Callable[[], bool]) -> None:
        """Before this rank frees pages that are its own: likewise."""
        if self.has_process:
            self._await(is_detached, f"end of the use of KV pages {_SWAPPING}")

    def _tell(self, status: LegacyStatus) -> None:
        with closing(StatusWord(KV_CACHE_WORD, self._port)) as word:
            found = word.load()
            if found != status:
                word.exchange(found, status)

    # --- the tree ----------------------------------------------------------------------------------

    def clear_tree(self) -> None:
        """From here on the engine finds no KV of before. DeadlineExceededError: the tree is as it was."""
        if self._speaks_to_tree:
            self.is_tree_silent = True
            try:
                self._ask(PREFIX_TREE_WORD, LegacyStatus.CLEARING, LegacyStatus.CLEARED, _TREE)
                self.is_tree_silent = False
            except DeadlineExceededError:
                with closing(StatusWord(PREFIX_TREE_WORD, self._port)) as word:
                    word.exchange(LegacyStatus.CLEARING, LegacyStatus.NORMAL)
                raise

    def renew_tree(self) -> None:
        """The engine may keep KV from here on. DeadlineExceededError."""
        if self._speaks_to_tree:
            with closing(StatusWord(PREFIX_TREE_WORD, self._port)) as word:
                word.store(LegacyStatus.UPDATING)
            self._ask(PREFIX_TREE_WORD, LegacyStatus.UPDATING, LegacyStatus.NORMAL, _TREE)

    @property
    def _speaks_to_tree(self) -> bool:
        return self.has_prefix_tree and self._leads and self._listens and not self.is_told

    # --- waiting -----------------------------------------------------------------------------------

    def _ask(self, name: str, asked: LegacyStatus, answered: LegacyStatus, whose: str) -> None:
        """Asks again where something else comes to stand there: a slower rank's process may answer the last call only
        now, and FastDeploy's loop stores without looking."""
        with closing(StatusWord(name, self._port)) as word:

            def is_answered() -> bool:
                found = word.load()
                if found not in (asked, answered):
                    word.exchange(found, asked)
                return found == answered

            def look(deadline_ns: int) -> None:
                word.wait_change(asked, deadline_ns)

            self._await(is_answered, f"answer {whose} to {asked.name} in {name}.{self._port}", look)

    def _await(self, is_over: Callable[[], bool], what: str, look: Callable[[int], object] | None = None) -> None:
        begun = time.monotonic()
        end_ns = time.monotonic_ns() + int(self._timeout_s * 1e9)
        while not is_over():
            now = time.monotonic_ns()
            if now >= end_ns:
                raise DeadlineExceededError.waiting_for(what, since_s=begun)
            if look is None:
                time.sleep(_LOOK_NS / 1e9)
            else:
                look(min(now + _LOOK_NS, end_ns))
