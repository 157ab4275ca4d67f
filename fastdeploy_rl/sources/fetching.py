"""Weights that are fetched: whatever the wire, a rank brings exactly its own bytes into memory of its own.

Owns the two arenas into which versions are fetched by turns, and which parameters are complete. Refuses to know how
bytes travel (transport/) and which they are (plan/gathering.py). Checks none of them: whoever reads them does, against
the manifest. Invariant: an arena is not handed out again while anybody looks at it, writes there, or is served from it.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import DeadlineExceededError, NoPublicationError
from fastdeploy_rl.manifest import encode, file_digest
from fastdeploy_rl.memory.arena import ArenaPair
from fastdeploy_rl.memory.tensor_view import check_unused
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.plan.gathering import Gathering, gather
from fastdeploy_rl.plan.plan import Plan, PlannedParameter
from fastdeploy_rl.sources.base import ResolvedPublication, SourceConfig
from fastdeploy_rl.sources.version_file import wanted_version
from fastdeploy_rl.transport.base import Fetch, Offer, Transport
from fastdeploy_rl.version import WeightVersion

_logger = logging.getLogger(__name__)
_MAX_OFFERS = 4
"""That are remembered: of the two versions that may be staged, and of two more."""


class Holder(Protocol):
    """Whoever gives others what this rank has fetched. Called from the source's thread."""

    def hold(self, offer: Offer, ranges: Sequence[ByteRange], mapping: Mapping) -> None:
        """All ranges of the version lie in `mapping` now, each from its `target_offset` on, until `withdraw`. Does not
        block."""
        ...

    def withdraw(self, mapping: Mapping) -> None:
        """The memory is needed for something else: when this returns, nobody reads it or keeps a view of it. Blocks no
        longer than it takes to cut connections. A mapping that is not held (any more) is no error."""
        ...

    def close(self) -> None:
        """Nobody is given anything any more. A second close does nothing."""
        ...


class FetchingSource:
    """One engine rank that fetches. Makes no memory and asks nobody before it is used; owns its transport and its
    holder, and closes them."""

    def __init__(self, transport: Transport, config: SourceConfig, holder: Holder | None = None) -> None:
        self._transport = transport
        self._config = config
        self._holder = holder
        self._arenas = ArenaPair(config.num_threads)
        self._gathered: tuple[Plan, Gathering] | None = None
        self._staged: list[FetchedVersion] = []
        self._lock = threading.Lock()
        self._offers: dict[str, Offer] = {}

    # --- which version -----------------------------------------------------------------------------

    def resolve(self, version: WeightVersion | None, *, deadline_ns: int) -> ResolvedPublication:
        """Without a version the one that the model's version file names, else the newest."""
        offer = self._wanted(deadline_ns) if version is None else self._offer(version, deadline_ns)
        return ResolvedPublication(offer.version, offer.manifest)

    def _wanted(self, deadline_ns: int) -> Offer:
        wanted = wanted_version(self._config.model_dir)
        if wanted is None:
            return self._offer(None, deadline_ns)
        epoch = self.current_epoch(deadline_ns=deadline_ns) if wanted.needs_epoch else 0
        try:
            return self._offer(wanted.in_epoch(epoch), deadline_ns)
        except NoPublicationError as error:
            raise NoPublicationError(f"{error} ({wanted.path} asks for {wanted.text})") from error

    def _offer(self, version: WeightVersion | None, deadline_ns: int) -> Offer:
        """What the transport offers; of equal manifests always the same object, so that `stage` knows it again."""
        offer = self._transport.offer(version, deadline_ns=deadline_ns)
        with self._lock:
            known = self._offers.pop(offer.file_digest, offer)
            self._offers[offer.file_digest] = known
            while len(self._offers) > _MAX_OFFERS:
                del self._offers[next(iter(self._offers))]
        return known

    def _offer_of(self, resolved: ResolvedPublication) -> Offer:
        with self._lock:
            for offer in self._offers.values():
                if offer.manifest is resolved.manifest:
                    return offer
        return Offer(resolved.version, resolved.manifest, file_digest(encode(resolved.manifest)))

    def current_epoch(self, *, deadline_ns: int) -> int:
        return self._offer(None, deadline_ns).version.epoch

    def newest_version(self, *, deadline_ns: int) -> WeightVersion | None:
        return self._offer(None, deadline_ns).version

    def discredit(self, resolved: ResolvedPublication) -> None:
        """Its bytes may have been spoilt on the way, by a wire or a peer: asked for again, they are fetched again. No
        older version is there to take in its place."""

    # --- its bytes ---------------------------------------------------------------------------------

    def stage(self, resolved: ResolvedPublication, plan: Plan, *, deadline_ns: int) -> "FetchedVersion":
        """Begins to fetch into an arena. SegmentError where two versions are staged already."""
        if time.monotonic_ns() >= deadline_ns:
            raise DeadlineExceededError(f"no time left to stage version {resolved.version}")
        gathering = self._gather(plan)
        arena = self._arenas.acquire(gathering.num_bytes)
        try:
            check_unused(arena, "an arena of an earlier version")
            offer = self._offer_of(resolved)
            fetch = self._transport.fetch(offer, gathering.ranges, arena, deadline_ns=deadline_ns)
        except BaseException:
            self._arenas.release(arena)
            raise
        staged = FetchedVersion(offer, gathering, arena, fetch, self._holder, self._arenas)
        self._staged = [earlier for earlier in self._staged if not earlier.is_released] + [staged]
        return staged

    def _gather(self, plan: Plan) -> Gathering:
        if self._gathered is None or self._gathered[0] is not plan:
            self._gathered = plan, gather(plan)
        return self._gathered[1]

    def trim(self) -> None:
        """Gives back the arena that no version lies in, after the transport has let go of it."""
        self._transport.trim()
        self._arenas.trim()

    def close(self) -> None:
        """Releases what is staged, with its memory. SegmentError while parameters still lie there: all else is closed
        then; unbind and close again."""
        with contextlib.ExitStack() as closing:
            closing.callback(self._arenas.drop)
            closing.callback(self._transport.close)
            if self._holder is not None:
                closing.callback(self._holder.close)
            for staged in self._staged:
                closing.callback(staged.release)


class FetchedVersion:
    """A version on its way into an arena, or there. The arena is the engine's own, so it stays as it is."""

    is_immutable = True
    is_copied_unless_asked = False

    def __init__(
        self,
        offer: Offer,
        gathering: Gathering,
        arena: Mapping,
        fetch: Fetch,
        holder: Holder | None,
        arenas: ArenaPair,
    ) -> None:
        self._offer = offer
        self._gathering = gathering
        self._arena: Mapping | None = arena
        self._fetch = fetch
        self._holder = holder
        self._arenas = arenas

    @property
    def plan(self) -> Plan:
        return self._gathering.plan

    @property
    def segments(self) -> tuple[Mapping, ...]:
        return () if self._arena is None else (self._arena,)

    @property
    def is_released(self) -> bool:
        return self._arena is None

    def bring_in(self, planned: Sequence[PlannedParameter]) -> None:
        """It is memory."""

    def is_vouched(self) -> bool:
        return True

    def arrivals(self, *, deadline_ns: int) -> Iterator[Sequence[PlannedParameter]]:
        """Each parameter with the batch of ranges that completes it; those that need none first."""
        begun = time.monotonic()
        everything, needs = self.plan.everything, self._gathering.needs
        missing = [len(needed) for needed in needs]
        owners = [number for number, needed in enumerate(needs) for _ in needed]
        num_left = len(owners)
        if ready := [p for p, count in zip(everything, missing, strict=True) if not count]:
            yield ready
        for batch in self._fetch.arrivals():
            num_left -= len(batch)
            complete = _complete(batch, owners, missing)
            if complete:
                yield [everything[number] for number in complete]
            if num_left and time.monotonic_ns() >= deadline_ns:
                hint = f"{num_left} of {len(owners)} byte ranges are missing"
                raise DeadlineExceededError.waiting_for(f"version {self._offer.version}", since_s=begun, hint=hint)
        self._arrived(begun)

    def _arrived(self, begun: float) -> None:
        """Ends the claim on whoever sent the bytes, and gives them to others from now on."""
        self._fetch.close()
        _logger.info(
            "event=fetched version=%s bytes=%d received=%d seconds=%.3f",
            self._offer.version,
            self._gathering.fetched_bytes,
            self._fetch.num_bytes,
            time.monotonic() - begun,
        )
        if self._holder is not None and self._arena is not None:
            self._holder.hold(self._offer, self._gathering.ranges, self._arena)

    def release(self) -> None:
        arena = self._arena
        if arena is None:
            return
        self._fetch.close()
        if self._holder is not None:
            self._holder.withdraw(arena)
        check_unused(arena, f"the memory of version {self._offer.version}")
        self._arena = None
        self._arenas.release(arena)


def _complete(batch: Sequence[int], owners: Sequence[int], missing: list[int]) -> list[int]:
    """Counts the ranges of a batch off; the numbers of the parameters that miss none any more."""
    complete = []
    for index in batch:
        owner = owners[index]
        missing[owner] -= 1
        if not missing[owner]:
            complete.append(owner)
    return complete
