"""Squares of values transposed in registers.

First within pieces of 128 bits, by interleaving neighbours, which most vector units do with more of their
ports than other shuffles; then whole pieces change places.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.llvm.llvm_arithmetic import Arithmetic
from mpmd.compile.llvm.llvm_types import Value, bits_of, lanes_of

_PIECE_BITS = 128


def transpose(f: Arithmetic, rows: Sequence[Value]) -> list[Value]:
    """Transpose as many vectors as each has lanes, a power of two, or a few times as many: wider results.

    A round of shuffles per bit.  Rows that are narrower than registers are joined first, which costs nothing
    where they come from memory.

    Args:
        f: where the code goes.
        rows: the vectors; lane `c` of row `r` becomes lane `r` of result `c`.
    """
    size, width = len(rows), lanes_of(rows[0].type)
    piece = min(width, _PIECE_BITS // bits_of(rows[0].type))  # lanes of a piece
    joined, done = size // width, dict[int, Value]()
    groups = []
    for start in range(0, size, joined * piece):
        wide = [_joined(f, rows[start + k : start + joined * piece : piece]) for k in range(piece)]
        groups.append(_within_pieces(f, wide, piece))
    for lane in range(piece):
        columns = _gather_pieces(f, [group[lane] for group in groups], piece)
        done |= {number * piece + lane: column for number, column in enumerate(columns)}
    return [done[column] for column in range(width)]


def _joined(f: Arithmetic, parts: Sequence[Value]) -> Value:
    """Vectors, a power of two of them, after each other in one."""
    while len(parts) > 1:
        lanes = 2 * lanes_of(parts[0].type)
        parts = [f.shuffle(a, b, range(lanes)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _within_pieces(f: Arithmetic, rows: Sequence[Value], piece: int) -> list[Value]:
    """`piece` rows: result `c` holds in each of its pieces lane `c` of that piece of every row."""
    values, size = list(rows), len(rows)
    step, lanes = 1, piece
    names = [0] * size  # which lane of a piece each value holds, so far
    while step < size:
        following, named = [Value("", "")] * size, [0] * size
        for low in range(size):
            if low & step:
                continue
            high = low | step
            for number, half in ((low, 0), (high, 1)):
                following[number] = _interleave(f, values[low], values[high], step, half, piece)
                named[number] = names[low] + half * lanes // (2 * step)
        values, names, step = following, named, step * 2
    ordered = sorted(range(size), key=lambda k: names[k])
    return [values[k] for k in ordered]


def _interleave(f: Arithmetic, a: Value, b: Value, run: int, half: int, piece: int) -> Value:
    """Runs of lanes of `a` and `b` in turn, from the lower or upper half of every piece."""
    total = lanes_of(a.type)
    order = []
    for start in range(0, total, piece):
        first = start + half * piece // 2
        for place in range(first, first + piece // 2, run):
            order += [*range(place, place + run), *range(total + place, total + place + run)]
    return f.shuffle(a, b, order)


def _gather_pieces(f: Arithmetic, values: Sequence[Value], piece: int) -> list[Value]:
    """As many values as each has pieces: result `k` holds piece `k` of every value."""
    if len(values) == 1:
        return list(values)
    total = lanes_of(values[0].type)

    def every_second(a: Value, b: Value, odd: int) -> Value:
        pieces = [p for p in range(2 * total // piece) if p % 2 == odd]
        return f.shuffle(a, b, [p * piece + lane for p in pieces for lane in range(piece)])

    results: dict[int, Value] = {}

    def halve(rest: Sequence[Value], first: int, step: int) -> None:
        if len(rest) == 1:
            results[first] = rest[0]
            return
        for odd in (0, 1):
            pairs = zip(rest[::2], rest[1::2], strict=True)
            halve([every_second(a, b, odd) for a, b in pairs], first + odd * step, 2 * step)

    halve(values, 0, 1)
    return [results[k] for k in range(len(values))]
