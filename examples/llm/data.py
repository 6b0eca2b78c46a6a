"""Packed text: several documents in a row, each a segment; batches are addressed by step.

The documents are the paragraphs of Python's reference, which its standard library holds for `help()`.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from pydoc_data.topics import topics
from typing import Any

import numpy as np

BEGIN, VOCAB = 256, 257  # a document is the token BEGIN and its bytes
NAMES = "ids", "targets", "segments", "positions"
TEXTS = list(dict.fromkeys(text for _, topic in sorted(topics.items()) for text in topic.split("\n\n")))
FINGERPRINT = zlib.crc32("".join(TEXTS).encode())


def documents(held_out: bool, every: int = 16) -> list[np.ndarray]:
    """The documents to train on, or one of `every`, to evaluate with: each `i32[length]`."""
    chosen = TEXTS[::every] if held_out else [text for k, text in enumerate(TEXTS) if k % every]
    return [np.array([BEGIN, *text.encode()], np.int32) for text in chosen]


def packed(tokens: Sequence[np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Rows of `length` tokens, each filled with pieces of documents: `i32[rows, length]` by name.

    `ids`, `targets` (the next tokens) and `positions` are of one piece where `segments` are equal; the rest
    of a row is segment 0.  The longest pieces are placed first, each where the least room is left over.

    Source: Ding et al., 2024, "Fewer truncations improve language modeling".
    """
    pieces = [text[at : at + length + 1] for text in tokens for at in range(0, len(text) - 1, length)]
    rows: list[list[np.ndarray]] = []
    by_room: dict[int, list[list[np.ndarray]]] = {room: [] for room in range(length + 1)}
    for piece in sorted(pieces, key=len, reverse=True):
        size = len(piece) - 1
        room = next((room for room in range(size, length) if by_room[room]), length)
        row = by_room[room].pop() if room < length else []
        if not row:
            rows.append(row)
        row.append(piece)
        by_room[room - size].append(row)
    filled = {name: np.zeros((len(rows), length), np.int32) for name in NAMES}
    for number, row in enumerate(rows):
        end = 0
        for segment, piece in enumerate(row, 1):
            begin, end = end, end + len(piece) - 1
            values = piece[:-1], piece[1:], segment, np.arange(end - begin)
            for name, value in zip(NAMES, values, strict=True):
                filled[name][number, begin:end] = value
    return filled


@dataclasses.dataclass(frozen=True)
class Batches:
    """Batch `k` is what step `k` reads: the step alone says where training goes on.  Epochs are shuffled."""

    rows: dict[str, np.ndarray]
    size: int
    steps: int
    seed: int = 0

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        count = len(self.rows["ids"])
        places = np.arange(step * self.size, (step + 1) * self.size)
        orders = {e: np.random.default_rng((self.seed, e)).permutation(count) for e in set(places // count)}
        chosen = [orders[place // count][place % count] for place in places]
        return {name: rows[chosen] for name, rows in self.rows.items()}

    def iterate(self, start: int) -> Iterator[Any]:
        """The batches from a step on: read ahead by grain where it is installed, the same without it."""
        try:
            import grain
        except ImportError:
            return (self[step] for step in range(start, len(self)))
        return iter(grain.MapDataset.source(self).slice(slice(start, None)).to_iter_dataset())
