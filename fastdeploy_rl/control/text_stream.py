"""Tokens to text, piece by piece, stopping at a stop string; and the text of a single token.

Owns the text of one completion while it grows. Refuses to know tokens' meaning or HTTP. Invariant: the pieces handed
out, joined, are the decoded completion up to (and without) the first stop string; no piece ends inside a character or
inside what may become a stop string.
"""

from collections.abc import Sequence

from fastdeploy_rl.control.generation import Tokenizer

_INCOMPLETE = "\ufffd"


class TextStream:
    """`push` a token, get the text that is final now; `finish`
    gives the rest. `is_stopped` once a stop string was met."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        # Decoding only from here on keeps the work per token constant; the tokens before `_read` give the left context.
        self._context = 0
        self._read = 0
        self._held = ""
        self.is_stopped = False

    def push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        text = self._fresh_text()
        if text.endswith(_INCOMPLETE):
            return ""
        self._context, self._read = self._read, len(self._token_ids)
        return self._release(text)

    def finish(self) -> str:
        """What was held back; nothing once stopped."""
        if self.is_stopped:
            return ""
        released = self._release(self._fresh_text())
        self._read = len(self._token_ids)
        released += self._held
        self._held = ""
        return released

    def _fresh_text(self) -> str:
        before = self._tokenizer.decode(self._token_ids[self._context : self._read])
        return self._tokenizer.decode(self._token_ids[self._context :])[len(before) :]

    def _release(self, text: str) -> str:
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.is_stopped = True
            released, self._held = self._held[: min(found)], ""
            return released
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released


class TokenText:
    """The text of one token by itself, as it reads in the middle of a sentence: U+FFFD for a part of a character, and
    nothing for a special token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers drop the space before the first word of a text: no token must be the first.
        self._before = tokenizer.encode("a")
        self._num_before = len(tokenizer.decode(self._before))

    def of(self, token_id: int) -> str:
        return self._tokenizer.decode([*self._before, token_id])[self._num_before :]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
