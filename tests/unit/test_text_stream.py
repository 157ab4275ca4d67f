"""Text out of tokens: the pieces add up to the decoded whole, cut at the first stop string."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_rl.control.generation import version_spans
from fastdeploy_rl.control.text_stream import TextStream, TokenText


class ByteTokenizer:
    eos_token_ids: Sequence[int] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


def pieces(text: str, stop: Sequence[str]) -> list[str]:
    stream = TextStream(ByteTokenizer(), stop)
    found = []
    for token_id in text.encode():
        found.append(stream.push(token_id))
        if stream.is_stopped:
            break
    return [*found, stream.finish()]


class WordTokenizer(ByteTokenizer):
    """Tokens are words with the space before them, which is dropped at the start of a text, as SentencePiece does."""

    words = ("a", " Paris", "is")

    def encode(self, text: str) -> list[int]:
        return [self.words.index(text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.words[token_id] for token_id in token_ids).removeprefix(" ")


def test_the_text_of_a_token_is_what_it_is_inside_a_sentence() -> None:
    assert [TokenText(WordTokenizer()).of(token_id) for token_id in range(3)] == ["a", " Paris", "is"]
    assert [TokenText(ByteTokenizer()).of(token_id) for token_id in b" \xe2"] == [" ", "\ufffd"]


TEXT = st.text(alphabet="abé€🎉 ", max_size=40)


@given(TEXT, st.lists(st.text(alphabet="abé€", min_size=1, max_size=4), max_size=3))
def test_pieces_add_up_to_the_text_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    # A stop string counts as soon as its last character is there; of those that end first, the leftmost cuts.
    ends = [text.index(word) + len(word) for word in stop if word in text]
    seen = text[: min(ends)] if ends else text
    expected = seen[: min(seen.index(word) for word in stop if word in seen)] if ends else text
    assert "".join(pieces(text, stop)) == expected


@given(TEXT)
def test_no_piece_ends_inside_a_character(text: str) -> None:
    assert all("\ufffd" not in piece for piece in pieces(text, []))


def test_bytes_that_are_no_text_come_out_in_the_end() -> None:
    stream = TextStream(ByteTokenizer(), [])
    assert stream.push(0xE2) == ""
    assert stream.finish() == "\ufffd"


@given(st.lists(st.sampled_from(["1.1", "1.2", "2.0"]), max_size=12))
def test_version_spans_say_of_every_token_what_made_it(versions: list[str]) -> None:
    spans = version_spans(versions)
    assert [span.version for span in spans for _ in range(span.start, span.end)] == versions
    assert all(left.version != right.version and left.end == right.start for left, right in itertools.pairwise(spans))
