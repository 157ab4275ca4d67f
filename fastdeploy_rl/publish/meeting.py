"""How several trainer processes publish one version: each offers what it has ready, number 0 decides for all.

    part i:   OFFER.i, then waits           (LATEST names its memory: published; OUTCOME names its offer: refused)
    part 0:   waits for an offer of each    (all of one step, from live processes)
              unites them, and writes the manifest and LATEST while it holds DECISION, after a last look at each offer

An offer is withdrawn only under DECISION, so that no part gives up what becomes published behind its back. Offers of
the dead do not count, nor those that were decided about before. Owns these files and waits; refuses to know tensors and
arenas. Invariant: LATEST changes only with a live, standing offer of every part; every wait has a deadline.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from fastdeploy_rl import _native
from fastdeploy_rl import manifest as manifests
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import (
    ConfigurationError,
    DeadlineExceededError,
    FastDeployRLError,
    ManifestError,
    PeerLostError,
    SegmentError,
    TrainerError,
    from_wire,
)
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.memory.owner_lock import OwnerLock, is_alive, owner_of
from fastdeploy_rl.publish.channel import Channel, Latest
from fastdeploy_rl.publish.contribution import Contribution

_log = logging.getLogger(__name__)

MAX_PARTS = 1024
_BELL_BYTES = 64
_SLICE_NS = 50_000_000
"""The dead ring no bell, so waits look up at least this often."""
_GRACE_NS = int(Deadlines.decide_s * 1e9)


@dataclass(frozen=True)
class Part:
    """This process is number `index` of the `count` that publish each version together; number 0 decides."""

    index: int
    count: int


def checked_part(part: tuple[int, int]) -> Part:
    """ConfigurationError unless it is (index, count) with 0 <= index < count <= MAX_PARTS."""
    if not (isinstance(part, tuple) and len(part) == 2 and all(type(number) is int for number in part)):
        raise ConfigurationError(f"part must be (index, count), got {part!r:.80}")
    if not 0 <= part[0] < part[1] <= MAX_PARTS:
        raise ConfigurationError(f"part must be (index, count) with 0 <= index < count <= {MAX_PARTS}, got {part}")
    return Part(*part)


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one part has ready for `step`, or (`error`: name of a class, `text`) why it has nothing."""

    nonce: str
    num_parts: int
    step: int
    contribution: Contribution | None = None
    error: str = ""
    text: str = ""


class _Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why the offers with these nonces came to nothing."""

    nonces: tuple[str, ...]
    error: str
    text: str


_Decoded = TypeVar("_Decoded", Offer, _Outcome)


class Found(NamedTuple):
    """A version that became the latest."""

    manifest: Manifest
    latest: Latest


class Meeting:
    """One process at the meeting of all parts. Nothing is opened before `open()`."""

    def __init__(self, channel: Channel, part: Part) -> None:
        self.part = part
        self._channel = channel
        self._bell: _native.Mapping | None = None
        self._bell_fd = -1
        self._read: dict[int, tuple[tuple[int, int], Offer]] = {}
        self._has_offered = False
        self._seen: set[int] = set()  # parts that were alive when last looked at: only they can be lost

    def open(self) -> None:
        self._channel.remove_leftovers_of(self.part.index)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with ExitStack() as stack:
            try:
                fd = os.open(self._channel.bell_path, flags, 0o600)
                stack.callback(os.close, fd)
                os.posix_fallocate(fd, 0, _BELL_BYTES)
            except OSError as error:
                raise SegmentError(f"{self._channel.bell_path} cannot be used: {error.strerror}") from error
            self._bell = _native.Mapping.map_fd(fd, _BELL_BYTES, True)
            self._bell_fd = fd
            stack.pop_all()

    def close(self) -> None:
        self._remove_offer()
        if self._bell is not None:
            if not self._is_bell_cut():
                self._ring()
            self._bell.close()
            self._bell = None
            os.close(self._bell_fd)

    # --- part 0 ------------------------------------------------------------------------------------

    def gather(self, step: int, deadline_ns: int) -> list[Offer]:
        """The offers of all other parts, in their order. DeadlineExceededError names the parts that did not come,
        PeerLostError one that died, TrainerError one that publishes something else."""
        begun = time.monotonic()
        outcome = self._outcome()
        decided = set(outcome.nonces) if outcome else set()
        published = self._published_segments()
        while True:
            bell = self._look()
            offers = {
                index: offer
                for index, offer in self._live_offers()
                if offer.nonce not in decided and not _is_among(offer, published)
            }
            ready = {index: offer for index, offer in offers.items() if self._is_ready(index, offer, step)}
            if len(ready) == self.part.count - 1:
                return [ready[index] for index in sorted(ready)]
            self._check_missing(step, ready, begun, deadline_ns)
            self._wait(bell, deadline_ns)

    @contextmanager
    def deciding_about(self, offers: Sequence[Offer], deadline_ns: int) -> Iterator[None]:
        """No part gives up its offer inside. PeerLostError for one that died or gave up before."""
        with self._deciding(deadline_ns):
            self._check_standing(offers)
            yield

    def refuse(self, error: BaseException) -> None:
        """Tells all who wait with an offer that this round came to nothing."""
        outcome = _Outcome(tuple(self._standing_nonces()), *_told(error))
        self._channel.replace("OUTCOME", msgspec.json.encode(outcome))
        self._ring()

    def _standing_nonces(self) -> Iterator[str]:
        for index in range(1, self.part.count):
            try:
                offer = self._standing(index)
            except ManifestError as error:
                # Perhaps the very reason of the refusal: the others are told all the same.
                _log.warning("channel=%s event=unreadable_offer reason=%s", self._channel.path, error)
                continue
            if offer is not None:
                yield offer.nonce

    def await_acknowledged(self) -> None:
        """Returns when every live part has read that its offer was published, or after a moment of grace."""
        deadline_ns = time.monotonic_ns() + _GRACE_NS
        published = self._published_segments()
        while time.monotonic_ns() < deadline_ns:
            bell = self._look()
            if not any(_is_among(offer, published) for _, offer in self._live_offers()):
                return
            self._wait(bell, deadline_ns)
        _log.warning("channel=%s event=outcome_not_read parts=%d", self._channel.path, self.part.count)

    def _is_ready(self, index: int, offer: Offer, step: int) -> bool:
        """False for one that failed at another step: it may still come."""
        if offer.num_parts != self.part.count:
            raise TrainerError(
                f"{self._named(index)} is one of {offer.num_parts} parts, part 0 one of {self.part.count}: "
                "start all with the same count"
            )
        if offer.error and offer.step == step:
            raise from_wire(offer.error, f"{self._named(index)} could not publish step {step}: {offer.text}")
        if offer.step != step and not offer.error:
            raise TrainerError(
                f"{self._named(index)} publishes step {offer.step}, part 0 step {step}: "
                "all parts must publish the same step"
            )
        return not offer.error

    def _check_missing(self, step: int, ready: dict[int, Offer], begun: float, deadline_ns: int) -> None:
        missing = [index for index in range(1, self.part.count) if index not in ready]
        for index in missing:
            self._check_not_lost(index, step)
        if time.monotonic_ns() >= deadline_ns:
            states = "; ".join(f"{self._named(index)} {self._state(index)}" for index in missing)
            raise DeadlineExceededError.waiting_for(f"complete step {step}", since_s=begun, hint=states)

    def _state(self, index: int) -> str:
        return "has not published it" if self._is_alive(index) else "is not running"

    def _check_not_lost(self, index: int, step: int) -> None:
        """PeerLostError for a part that was seen alive and is dead now; said once, then it may come back."""
        if self._is_alive(index):
            self._seen.add(index)
        elif index in self._seen:
            self._seen.remove(index)
            raise PeerLostError(f"{self._named(index)} died before step {step} was published; start it again")

    def _check_standing(self, offers: Sequence[Offer]) -> None:
        for index, offer in enumerate(offers, 1):
            standing = self._standing(index)
            if not self._is_alive(index) or standing is None or standing.nonce != offer.nonce:
                raise PeerLostError(
                    f"{self._named(index)} died or gave up before step {offer.step} was complete; publish again"
                )

    def _live_offers(self) -> list[tuple[int, Offer]]:
        alive = [index for index in range(1, self.part.count) if self._is_alive(index)]
        self._seen.update(alive)
        found = ((index, self._standing(index)) for index in alive)
        return [(index, offer) for index, offer in found if offer is not None]

    def _published_segments(self) -> set[tuple[str, int]]:
        latest = self._channel.read_latest()
        try:
            return _segments(self._channel.read_manifest(latest).segments) if latest else set()
        except FileNotFoundError:
            return set()

    # --- the other parts ---------------------------------------------------------------------------

    def begin(self) -> None:
        """A publication begins: what was said of the one before is no longer true."""
        self._has_offered = False
        self._remove_offer()

    def follow(self, step: int, own: Contribution, deadline_ns: int) -> Found:
        """Offers `own` and waits for what becomes of it: the manifest it stands in, or the error with which part 0
        refused. PeerLostError when part 0 dies, DeadlineExceededError when it does not decide in time; then the offer
        is withdrawn, and will not be published."""
        offer = Offer(secrets.token_hex(8), self.part.count, step, own)
        before = self._channel.read_latest()
        try:
            self._write_offer(offer)
            self._has_offered = True
            outcome = self._await_decision(offer, before, deadline_ns)
            return outcome if isinstance(outcome, Found) else self._withdraw(offer, outcome)
        finally:
            self._remove_offer()
            self._ring()

    def report(self, step: int, error: BaseException) -> None:
        """Tells part 0 that this part has nothing to offer, so that it need not wait; unless it offered something, and
        the error is what became of that."""
        if self._has_offered:
            return
        name, text = _told(error)
        self._write_offer(Offer(secrets.token_hex(8), self.part.count, step, None, name, text))

    def _await_decision(self, offer: Offer, seen: Latest | None, deadline_ns: int) -> Found | FastDeployRLError:
        begun = time.monotonic()
        while True:
            bell = self._look()
            lost = self._lost_leader(offer.step)
            outcome = self._outcome()
            # Read after the outcome: where part 0 broke off with LATEST already written, the version stands.
            latest = self._channel.read_latest()
            if latest is not None and latest != seen:
                found = self._manifest_with(offer, latest)
                if found is not None:
                    return found
                seen = latest
            if outcome is not None and offer.nonce in outcome.nonces:
                raise from_wire(outcome.error, outcome.text)
            if lost is not None:
                return lost
            if time.monotonic_ns() >= deadline_ns:
                return DeadlineExceededError.waiting_for(
                    f"complete step {offer.step}", since_s=begun, hint=f"{self._named(0)} {self._state(0)}"
                )
            self._wait(bell, deadline_ns)

    def _lost_leader(self, step: int) -> PeerLostError | None:
        """To be called before part 0's last words are read, else they could still come in between."""
        try:
            self._check_not_lost(0, step)
        except PeerLostError as error:
            return error
        return None

    def _withdraw(self, offer: Offer, failure: FastDeployRLError) -> Found:
        with self._deciding(time.monotonic_ns() + _GRACE_NS):
            latest = self._channel.read_latest()
            found = self._manifest_with(offer, latest) if latest else None
            self._remove_offer()
        if found is None:
            raise failure
        return found

    def _manifest_with(self, offer: Offer, latest: Latest) -> Found | None:
        try:
            manifest = self._channel.read_manifest(latest)
        except FileNotFoundError:
            return None
        return Found(manifest, latest) if _is_among(offer, _segments(manifest.segments)) else None

    # --- files -------------------------------------------------------------------------------------

    def _write_offer(self, offer: Offer) -> None:
        self._channel.replace(self._channel.offer_of(self.part.index).name, msgspec.json.encode(offer))
        self._ring()

    def _remove_offer(self) -> None:
        self._channel.remove_file(self._channel.offer_of(self.part.index).name)

    def _standing(self, index: int) -> Offer | None:
        """The offer that a part has in the channel now, dead or alive; read anew only when its file is another."""
        path = self._channel.offer_of(index)
        try:
            status = os.stat(path, follow_symlinks=False)
            is_known = index in self._read and self._read[index][0] == (status.st_ino, status.st_mtime_ns)
            if not is_known:
                offer = _decoded(path.name, self._channel.read(path.name, manifests.MAX_BYTES), Offer)
                self._read[index] = (status.st_ino, status.st_mtime_ns), offer
        except FileNotFoundError:
            return None
        return self._read[index][1]

    def _outcome(self) -> _Outcome | None:
        try:
            return _decoded("OUTCOME", self._channel.read("OUTCOME", manifests.MAX_BYTES), _Outcome)
        except FileNotFoundError:
            return None

    # --- who lives, and waiting --------------------------------------------------------------------

    def _is_alive(self, index: int) -> bool:
        return is_alive(self._channel.lock_of(index))

    def _named(self, index: int) -> str:
        owner = owner_of(self._channel.lock_of(index))
        return f"part {index} (pid {owner.pid})" if owner else f"part {index}"

    @contextmanager
    def _deciding(self, deadline_ns: int) -> Iterator[None]:
        lock = OwnerLock(self._channel.decision_path)
        self._until(lock.try_acquire, deadline_ns)
        try:
            yield
        finally:
            lock.release()
            self._ring()

    def _until(self, is_done: Callable[[], bool], deadline_ns: int) -> None:
        begun = time.monotonic()
        while True:
            bell = self._look()
            if is_done():
                return
            if time.monotonic_ns() >= deadline_ns:
                raise DeadlineExceededError.waiting_for(
                    "decision about this version",
                    since_s=begun,
                    hint=f"{owner_of(self._channel.decision_path) or 'another part'} is deciding; look at LATEST of "
                    f"{self._channel.path} for what became of it",
                )
            self._wait(bell, deadline_ns)

    def _look(self) -> int:
        return _native.load_i32(self._words, 0)

    def _ring(self) -> None:
        if self._bell is not None:
            _native.ring_bell(self._words, 0)

    def _wait(self, bell: int, deadline_ns: int) -> None:
        _native.futex_wait_i32(self._words, 0, bell, min(deadline_ns, time.monotonic_ns() + _SLICE_NS))

    @property
    def _words(self) -> _native.Mapping:
        if self._bell is None:
            raise ConfigurationError(f"the meeting at {self._channel.path} is not open")
        if self._is_bell_cut():
            raise SegmentError(f"{self._channel.bell_path} was cut short under those who use it: publish anew")
        return self._bell

    def _is_bell_cut(self) -> bool:
        """Whoever touched what is gone would be killed (SIGBUS)."""
        return os.fstat(self._bell_fd).st_size < _BELL_BYTES


def _told(error: BaseException) -> tuple[str, str]:
    """What another process gets to know of an error: the name of its class, and its text."""
    if isinstance(error, FastDeployRLError):
        return type(error).__name__, f"{error!s:.4000}"
    return PeerLostError.__name__, f"it broke off: {type(error).__name__}: {error!s:.500}"


def _segments(segments: Sequence[manifests.Segment]) -> set[tuple[str, int]]:
    """Which contents of which memory."""
    return {(segment.locator, segment.generation) for segment in segments}


def _is_among(offer: Offer, published: set[tuple[str, int]]) -> bool:
    return offer.contribution is not None and _segments(offer.contribution.segments) <= published


def _decoded(name: str, data: bytes, kind: type[_Decoded]) -> _Decoded:
    manifests.check_bytes(data, f"{name} of the channel")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{name} of the channel cannot be read: {error!s:.500}") from error
