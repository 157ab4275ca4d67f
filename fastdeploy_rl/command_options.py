"""How a command is to be carried out, as the one number that requests and commands carry on the board.

Owns the bits. Refuses to know what follows from them. Invariant: `CommandOptions.decode(options.encode()) == options`;
a number with other bits, or with a word that is none, is refused.
"""

from typing import NamedTuple

from fastdeploy_rl.config import ABORT, IN_FLIGHT, KEEP, KV_POLICIES, ON_TIMEOUT, REFUSE, SLEEP_LEVELS
from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.lifecycle import Tag

_IN_FLIGHT_BITS, _KV_BITS, _TIMEOUT_BITS, _TAG_BITS, _LEVEL_BITS, _WOKEN_BITS, _PAUSE_BIT, _END_BITS = (
    *(0, 2, 4, 5),
    *(8, 10, 13, 14),
)
_TAGS = tuple(Tag)


class CommandOptions(NamedTuple):
    """`in_flight`, `kv`, `on_timeout`: one each of config.IN_FLIGHT, KV_POLICIES and ON_TIMEOUT; an empty `kv` is the
    engine's own. `tags`: what a sleep gives away or a wake brings back; of an update, what it finds in place or brings
    besides the weights. `level`: of a sleep, one of config.SLEEP_LEVELS; else 0. `woken`: tags that sleep no more once
    it is committed; `ends_pause`: and where none sleeps then, a pause is over. These two are rank 0's."""

    in_flight: str = KEEP
    kv: str = ""
    on_timeout: str = REFUSE
    tags: frozenset[Tag] = frozenset()
    level: int = 0
    woken: frozenset[Tag] = frozenset()
    ends_pause: bool = False

    def checked(self) -> "CommandOptions":
        """ConfigurationError for a word or level that is none."""
        for what, word, words in (
            ("in_flight", self.in_flight, IN_FLIGHT),
            ("kv", self.kv, ("", *KV_POLICIES)),
            ("on_timeout", self.on_timeout, ON_TIMEOUT),
            ("level", self.level, (0, *SLEEP_LEVELS)),
        ):
            if word not in words:
                named = ", ".join(str(known) for known in words if known)
                raise ConfigurationError(f"{what} must be one of {named}, got {word!r:.40}")
        return self

    def encode(self) -> int:
        return (
            IN_FLIGHT.index(self.in_flight) << _IN_FLIGHT_BITS
            | ("", *KV_POLICIES).index(self.kv) << _KV_BITS
            | ON_TIMEOUT.index(self.on_timeout) << _TIMEOUT_BITS
            | bits_of(self.tags) << _TAG_BITS
            | self.level << _LEVEL_BITS
            | bits_of(self.woken) << _WOKEN_BITS
            | self.ends_pause << _PAUSE_BIT
        )

    @classmethod
    def decode(cls, number: int) -> "CommandOptions":
        """ConfigurationError for a number that `encode` does not give."""
        if not cls.is_number(number):
            raise ConfigurationError(f"{number:#x} is no number of command options")
        in_flight, kv, level = _words_of(number)
        return cls(
            IN_FLIGHT[in_flight],
            ("", *KV_POLICIES)[kv],
            ON_TIMEOUT[number >> _TIMEOUT_BITS & 1],
            tags_in(number >> _TAG_BITS),
            level,
            tags_in(number >> _WOKEN_BITS),
            bool(number >> _PAUSE_BIT & 1),
        )

    @staticmethod
    def is_number(number: int) -> bool:
        """`encode` gives it for some options."""
        return not number >> _END_BITS and max(_words_of(number)) <= 2

    @property
    def aborts_late(self) -> bool:
        """Requests that do not come to their end in time are aborted."""
        return self.on_timeout == ABORT


def tags_in(bits: int) -> frozenset[Tag]:
    """The tags whose bits are set, in the order of lifecycle.Tag; further bits are others'."""
    return frozenset(tag for index, tag in enumerate(_TAGS) if bits >> index & 1)


def bits_of(tags: frozenset[Tag]) -> int:
    """A bit for each tag, in the order of lifecycle.Tag."""
    return sum(1 << _TAGS.index(tag) for tag in tags)


def _words_of(number: int) -> tuple[int, int, int]:
    """Which word of each kind, as its index; 3 is that of none."""
    return number >> _IN_FLIGHT_BITS & 3, number >> _KV_BITS & 3, number >> _LEVEL_BITS & 3


def tags_of(words: "str | list[str] | tuple[str, ...] | None") -> frozenset[Tag]:
    """The tags that a caller names: a list of words, or one text with commas, as FastDeploy has it; None means all.
    ConfigurationError for a word that is none, and where there is no word."""
    if words is None:
        return frozenset(Tag)
    if not words:
        raise ConfigurationError(f"no tag is named; tags are {', '.join(tag.value for tag in Tag)}")
    named = words.split(",") if isinstance(words, str) else list(words)
    known = {tag.value: tag for tag in Tag}
    unknown = [word for word in named if not isinstance(word, str) or word.strip() not in known]
    if unknown:
        raise ConfigurationError(f"tags are {', '.join(known)}, got {unknown[0]!r:.40}")
    return frozenset(known[word.strip()] for word in named)
