"""FastDeploy's status words: one int32 each in POSIX shared memory, named `{word}.{port}`, byte-compatible with its
IPCSignal.

Owns their names, their second hard links and the way a foreign process asks for an update (store 1, poll for 0).
Refuses to know what a value means to the engine: that is lifecycle.py. A foreign Python process that attaches and
exits unlinks the name through its resource tracker, so the keeper restores a vanished name from the second link; a
name that leads to another inode was recreated and is followed."""

import contextlib
import os
import time
from types import TracebackType

from fastdeploy_rl import _native
from fastdeploy_rl.config import checked_deadline
from fastdeploy_rl.errors import DeadlineExceededError, EngineNotFoundError, SegmentError, UpdateRejectedError
from fastdeploy_rl.lifecycle import LegacyStatus
from fastdeploy_rl.memory.shared_segment import SHM_DIR, SharedSegment, unlink_segment

WEIGHTS_WORD = "model_weights_status"
KV_CACHE_WORD = "kv_cache_status"
PREFIX_TREE_WORD = "prefix_tree_status"
WORDS = (WEIGHTS_WORD, KV_CACHE_WORD, PREFIX_TREE_WORD)
WORD_BYTES = 4


def word_name(word: str, port: int) -> str:
    return f"{word}.{port}"


def link_name(word: str, port: int) -> str:
    """Of the second link."""
    return f"fastdeploy_rl_link.{word}.{port}"


def _fresh_name(word: str, port: int) -> str:
    """Of a word that was recreated, while it is followed."""
    return f"{link_name(word, port)}.new"


def create_words(port: int) -> None:
    """The three words of an engine, each zero (NORMAL) and with its second link; what a dead engine left is removed
    first."""
    unlink_words(port)
    for word in WORDS:
        SharedSegment.create(word_name(word, port), WORD_BYTES).close()
        os.link(f"{SHM_DIR}/{word_name(word, port)}", f"{SHM_DIR}/{link_name(word, port)}")


def adopt_word(word: str, port: int) -> None:
    """A word that another program made and owns gets its second link. EngineNotFoundError where it is not there."""
    link = f"{SHM_DIR}/{link_name(word, port)}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(link)
    try:
        os.link(f"{SHM_DIR}/{word_name(word, port)}", link)
    except OSError as error:
        raise EngineNotFoundError(
            f"cannot take up the status word {word_name(word, port)} ({error.strerror}): FastDeploy makes it before "
            "its workers start, as the same user"
        ) from error


def unlink_words(port: int) -> list[str]:
    """Removes names and second links, also where somebody died between two of them; returns those that were there."""
    names = [word_name(word, port) for word in WORDS]
    return [name for name in names if unlink_segment(name)] + unlink_links(port)


def unlink_links(port: int) -> list[str]:
    """As `unlink_words`, of the second links alone: the words are another program's."""
    names = [name(word, port) for word in WORDS for name in (link_name, _fresh_name)]
    return [name for name in names if unlink_segment(name)]


class StatusWord:
    """One word, attached. Its keeper (rank 0) also calls `follow`."""

    def __init__(self, word: str, port: int) -> None:
        self._word, self._port = word, port
        self._segment = _attach(word, port)
        self._linked: os.stat_result | None = None

    @property
    def mapping(self) -> _native.Mapping:
        return self._segment.mapping

    def load(self) -> int:
        return _native.load_i32(self.mapping, 0)

    def exchange(self, expected: int, desired: int) -> int:
        """Compare-and-swap, then wakes whoever waits; returns what was there."""
        found = _native.compare_exchange_i32(self.mapping, 0, expected, desired)
        _native.futex_wake_i32(self.mapping, 0)
        return found

    def store(self, value: int) -> None:
        """A plain store, then wakes whoever waits: what a trainer does to ask for something."""
        _native.store_i32(self.mapping, 0, value)
        _native.futex_wake_i32(self.mapping, 0)

    def wait_change(self, value: int, deadline_ns: int) -> bool:
        """Blocks while the word reads `value`; False when the deadline passed first."""
        return _native.futex_wait_i32(self.mapping, 0, value, deadline_ns)

    def follow(self) -> bool:
        """Keeps name and mapping together; True when the mapping changed, because somebody recreated the word."""
        name, link = (f"{SHM_DIR}/{n}" for n in (word_name(self._word, self._port), link_name(self._word, self._port)))
        try:
            # Looked at many times a second beside a decoding engine: the link, which is ours alone, only once.
            self._linked = self._linked or os.stat(link)
            if os.path.samestat(os.stat(name), self._linked):
                return False
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.link(link, name)
            return False
        return self._adopt(name, link)

    def _adopt(self, name: str, link: str) -> bool:
        # By a name of our own: foreign ones may take the word's away, or recreate it once more, at any moment.
        fresh = f"{SHM_DIR}/{_fresh_name(self._word, self._port)}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        try:
            os.link(name, fresh)
        except OSError:
            return False  # it vanished again, or is nothing to follow: the next look tells
        recreated = _attach_whole(os.path.basename(fresh))
        if recreated is None:
            os.unlink(fresh)
            return False
        os.replace(fresh, link)
        self._linked = None
        self._segment = recreated  # the one before is unmapped when the watcher lets go of it
        return True

    def close(self) -> None:
        self._segment.close()


def _attach(word: str, port: int) -> SharedSegment:
    try:
        return SharedSegment.attach(word_name(word, port), writable=True)
    except SegmentError as error:
        raise EngineNotFoundError(f"no engine has status words at port {port}: {error}") from error


def _attach_whole(name: str) -> SharedSegment | None:
    """None for what is no word, or not one yet: its maker has not given it its size."""
    try:
        segment = SharedSegment.attach(name, writable=True)
    except SegmentError:
        return None
    if segment.num_bytes >= WORD_BYTES:
        return segment
    segment.close()
    return None


class LegacySignal:
    """The plain legacy way, for a trainer: write the signal, poll for the answer. Needs no board.

    The word can only say that the engine is back where it was, not why: after a rejected update it reads as before.
    `EngineController` tells the reason."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._word: StatusWord | None = None

    def __enter__(self) -> "LegacySignal":
        self._word = StatusWord(WEIGHTS_WORD, self._port)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._word is not None:
            self._word.close()
            self._word = None

    def request_update(self, deadline_s: float) -> None:
        """Writes 1 and waits until the word reads 0. DeadlineExceededError; UpdateRejectedError when a cleared engine
        stays cleared."""
        self._request(LegacyStatus.UPDATING, LegacyStatus.NORMAL, deadline_s)

    def request_clear(self, deadline_s: float) -> None:
        """Writes -1 and waits until the word reads -2: by then weights and KV cache are freed on every rank."""
        self._request(LegacyStatus.CLEARING, LegacyStatus.CLEARED, deadline_s)

    def _request(self, command: LegacyStatus, wanted: LegacyStatus, deadline_s: float) -> None:
        if self._word is None:
            raise SegmentError("the signal is not attached; use it in a with statement")
        begun = time.monotonic()
        deadline_ns = time.monotonic_ns() + int(checked_deadline(deadline_s) * 1e9)
        self._word.store(command)
        while (value := self._word.load()) == command:
            if not self._word.wait_change(value, deadline_ns):
                raise DeadlineExceededError.waiting_for(
                    f"answer of the engine at port {self._port} to {command.name}",
                    since_s=begun,
                    hint="it may still carry it out",
                )
        if value != wanted:
            raise UpdateRejectedError(
                f"port {self._port}: after {command.name} the word reads {value}, not {int(wanted)}"
            )
