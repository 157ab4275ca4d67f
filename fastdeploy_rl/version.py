"""The order of weights: `WeightVersion(epoch, step)`.

Owns the order and the text form `3.1200`. Refuses to know who hands out epochs (the channel does) or whether a version
may go back (the manager does). Invariant: one version has one text, and text order never matters, only (epoch, step).
"""

import re
from dataclasses import dataclass

from fastdeploy_rl.errors import VersionFormatError

_LIMIT = 2**63
_NUMBER = "(0|[1-9][0-9]{0,18})"
_OWN_TEXT = re.compile(rf"{_NUMBER}\.{_NUMBER}", re.ASCII)
_FOREIGN_TEXT = re.compile(_NUMBER, re.ASCII)


@dataclass(frozen=True, order=True, slots=True)
class WeightVersion:
    """Totally ordered, hashable. Both numbers are >= 0 and < 2^63, else VersionFormatError."""

    epoch: int
    step: int

    def __post_init__(self) -> None:
        for name, value in (("epoch", self.epoch), ("step", self.step)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LIMIT:
                raise VersionFormatError(
                    f"{name} of a weight version must be an integer in [0, 2^63), got {value!r:.80}"
                )

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"

    @classmethod
    def parse(cls, text: str, *, current_epoch: int | None = None) -> "WeightVersion":
        """`"3.1200"`, or, where `current_epoch` is given, also
        FastDeploy's plain `"1200"`: that step of the current epoch.

        Raises VersionFormatError on any other text (leading zeros, signs, spaces, numbers >= 2^63 included).
        """
        own = _OWN_TEXT.fullmatch(text)
        if own:
            return cls(int(own[1]), int(own[2]))
        if current_epoch is not None and _FOREIGN_TEXT.fullmatch(text):
            return cls(current_epoch, int(text))
        expected = "EPOCH.STEP such as 3.1200" + ("" if current_epoch is None else ", or STEP such as 1200")
        raise VersionFormatError(f"{text!r:.80} is no weight version; write {expected}")
