"""The golden sequences as steps of the engine: what transformers on torch saw at once, the engine sees piece by piece.

The same list on every rank. `tests/engines/golden/` holds the models, made by scripts/make_golden.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from tiny_llama import EmbeddedRunner, relative_error

from fastdeploy_rl.engines.embedded.page_allocator import PAGE_TOKENS
from fastdeploy_rl.engines.embedded.scheduler import SequenceSlice, Step

GOLDEN = Path(__file__).parent / "golden"
FIRST_PIECE, SECOND_PIECE = 15, 4
"""Tokens of a prompt; what follows goes through the model one by one."""


class Sequence(NamedTuple):
    """`logits[i]` are what transformers gives after token i: [length, vocab]."""

    tokens: list[int]
    logits: np.ndarray


def read_sequences(name: str) -> list[Sequence]:
    with np.load(GOLDEN / name / "golden.npz") as arrays:
        count = len(arrays.files) // 2
        return [Sequence(arrays[f"tokens_{i}"].tolist(), arrays[f"logits_{i}"]) for i in range(count)]


def whole_prompts(name: str) -> list[Step]:
    """One step: prefixes of the longest sequence, each a prompt of its own."""
    sequence = read_sequences(name)[-1].tokens
    ends = range(1, len(sequence) + 1, 7)
    return [_step([[(sequence[:end], 0)] for end in ends], 0)]


def pieces(name: str) -> list[Step]:
    """Every sequence in pieces, each beginning one step after the one before it, so that prompts and single tokens
    share most steps."""
    parts = [_cut(sequence.tokens) for sequence in read_sequences(name)]
    waiting = [[None] * index + own for index, own in enumerate(parts)]
    return [_step(waiting, number) for number in range(max(map(len, waiting)))]


def expected_logits(name: str, steps: list[Step]) -> np.ndarray:
    """What transformers says to every slice, in the order of the engine's logits."""
    sequences = read_sequences(name)
    is_whole = len(steps) == 1
    rows = []
    for step in steps:
        for part in step.slices:
            sequence = sequences[-1] if is_whole else sequences[int(part.request_id)]
            rows.append(sequence.logits[part.start + len(part.token_ids) - 1])
    return np.stack(rows)


def run_steps(runner: EmbeddedRunner, steps: list[Step]) -> np.ndarray:
    """Logits of all slices: [slices, vocab]."""
    return np.concatenate([runner.execute(step) for step in steps])


def golden_error(runner: EmbeddedRunner, name: str, steps: list[Step]) -> float:
    return relative_error(run_steps(runner, steps), expected_logits(name, steps))


def _cut(tokens: list[int]) -> list[tuple[list[int], int]]:
    """(tokens, position of the first)"""
    second, rest = FIRST_PIECE, FIRST_PIECE + SECOND_PIECE
    cut = [
        (tokens[:second], 0),
        (tokens[second:rest], second),
        *(([token], rest + i) for i, token in enumerate(tokens[rest:])),
    ]
    return [piece for piece in cut if piece[0]]


def _step(parts: list[list[tuple[list[int], int] | None]], number: int) -> Step:
    """The `number`-th piece of each sequence. Pages are dealt in turns, so that no page table is contiguous."""
    slices, new_pages = [], []
    for index, own in enumerate(parts):
        piece = own[number] if number < len(own) else None
        if piece is None:
            continue
        tokens, start = piece
        pages = [index + len(parts) * page for page in range(-(-(start + len(tokens)) // PAGE_TOKENS))]
        new_pages += pages[-(-start // PAGE_TOKENS) :]
        slices.append(SequenceSlice(str(index), tokens, start, pages, True))
    slices.sort(key=lambda part: len(part.token_ids) > 1)
    return Step(number, slices, new_pages)
