"""Text of other processes, as it may stand on a terminal."""

_LONGEST = 120


def quoted(text: str) -> str:
    """One line of printable characters: names and values come from whoever started the other process."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[:_LONGEST])
    return shown + ("..." if len(text) > _LONGEST else "")
