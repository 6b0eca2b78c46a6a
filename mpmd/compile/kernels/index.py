"""Index expressions: the position in an array that an iteration of a kernel reads or writes.

An expression is a sum of multiples of atoms and a constant.  An atom is an iteration dim, the floor quotient
or the remainder of an expression, or the value of an integer node (a gathered position).  Reshapes,
transposes, slices, broadcasts and their compositions all stay in this form, and most of them without a
quotient, because quotients and remainders are simplified by the ranges of their dividends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, total_ordering


@total_ordering
@dataclass(unsafe_hash=True, slots=True)  # never changed; to build frozen ones takes three times as long
class Atom:
    """A variable of an index expression.

    Attributes:
        kind: `dim`, `div`, `mod` or `value`.
        number: the dim, the divisor, or the node.
        inner: the dividend, for `div` and `mod`.
    """

    kind: str
    number: int
    inner: Index | None = None

    def __str__(self) -> str:
        if self.kind == "dim":
            return f"d{self.number}"
        if self.kind == "value":
            return f"%{self.number}"
        return f"({self.inner}) {'//' if self.kind == 'div' else '%'} {self.number}"

    def __lt__(self, other: Atom) -> bool:
        return (self.kind, self.number, str(self.inner)) < (other.kind, other.number, str(other.inner))


@dataclass(unsafe_hash=True, slots=True)
class Index:
    """A sum of multiples of atoms and a constant.

    Attributes:
        terms: (atom, factor) with factors that are not zero, each atom once, in a fixed order.
        constant: the constant term.
    """

    terms: tuple[tuple[Atom, int], ...] = ()
    constant: int = 0

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.terms, self.constant + other)
        if not self.terms or not other.terms:
            return Index(self.terms or other.terms, self.constant + other.constant)
        return _collect((*self.terms, *other.terms), self.constant + other.constant)

    def __mul__(self, factor: int) -> Index:
        if factor == 0:
            return Index()
        return Index(tuple((a, f * factor) for a, f in self.terms), self.constant * factor)

    def __str__(self) -> str:
        parts = [
            str(a) if f == 1 else f"{a}*{f}" if a.kind in ("dim", "value") else f"({a})*{f}"
            for a, f in self.terms
        ]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts)

    def factor(self, dim: int) -> int:
        """The increment per step along a dim, through the linear terms alone."""
        return next((f for a, f in self.terms if a.kind == "dim" and a.number == dim), 0)

    def dims(self) -> frozenset[int]:
        dims: set[int] = set()
        for atom, _ in self.terms:
            if atom.kind == "dim":
                dims.add(atom.number)
            elif atom.inner is not None:
                dims |= atom.inner.dims()
        return frozenset(dims)

    def values(self) -> tuple[int, ...]:
        """Nodes whose values occur, in ascending order."""
        nodes: set[int] = set()
        for atom, _ in self.terms:
            if atom.kind == "value":
                nodes.add(atom.number)
            elif atom.inner is not None:
                nodes |= set(atom.inner.values())
        return tuple(sorted(nodes))

    def is_linear_in(self, dim: int) -> bool:
        """Whether a dim occurs in linear terms only."""
        return all(a.inner is None or dim not in a.inner.dims() for a, _ in self.terms)

    def bounds(self, extents: Sequence[int]) -> tuple[int, int]:
        """Smallest and largest value; values of nodes count as unknown and are not allowed.

        Raises:
            ValueError: the expression depends on a node's value.
        """
        low = high = self.constant
        for atom, factor in self.terms:
            a, b = _atom_bounds(atom, extents)
            low += min(a * factor, b * factor)
            high += max(a * factor, b * factor)
        return low, high

    def divided(self, divisor: int, extents: Sequence[int]) -> Index:
        whole, rest = self._split(divisor, extents)
        if divisor == 1:
            return self
        if _inside(rest, divisor, extents):
            return whole
        step, coarse, _ = _coarse(rest, divisor, extents)
        if step > 1:
            return whole + coarse.divided(divisor // step, extents)
        return whole + Index(((Atom("div", divisor, rest), 1),))

    def modulo(self, divisor: int, extents: Sequence[int]) -> Index:
        if divisor == 1:
            return Index()
        _, rest = self._split(divisor, extents)
        if _inside(rest, divisor, extents):
            return rest
        step, coarse, fine = _coarse(rest, divisor, extents)
        if step > 1:
            return coarse.modulo(divisor // step, extents) * step + fine
        return Index(((Atom("mod", divisor, rest), 1),))

    def _split(self, divisor: int, extents: Sequence[int]) -> tuple[Index, Index]:
        """(q, r), self = q·divisor + r, q as large as the factors show, r not negative if that is known."""
        whole, rest = [], []
        for atom, factor in self.terms:
            quotient, remainder = divmod(factor, divisor)
            if remainder == 0:
                whole.append((atom, quotient))
            else:
                rest.append((atom, factor))
        quotient, remainder = divmod(self.constant, divisor)
        left = Index(tuple(rest), remainder)
        if not left.values():
            # unsigned division is faster
            lift = -min(0, left.bounds(extents)[0] // divisor)
            quotient, left = quotient - lift, left + lift * divisor
        return Index(tuple(whole), quotient), left

    def substitute(self, dims: Mapping[int, Index], extents: Sequence[int]) -> Index:
        """The expression with dims replaced; `extents` are those of the replacing dims."""
        result = Index((), self.constant)
        for atom, factor in self.terms:
            if atom.kind == "dim":
                result += dims.get(atom.number, dim(atom.number)) * factor
            elif atom.inner is None:
                result += Index(((atom, factor),))
            else:
                inner = atom.inner.substitute(dims, extents)
                divide = inner.divided if atom.kind == "div" else inner.modulo
                result += divide(atom.number, extents) * factor
        return result

    def renumber(self, nodes: Mapping[int, int]) -> Index:
        terms = []
        for atom, factor in self.terms:
            if atom.kind == "value":
                atom = Atom("value", nodes[atom.number])
            elif atom.inner is not None:
                atom = Atom(atom.kind, atom.number, atom.inner.renumber(nodes))
            terms.append((atom, factor))
        return _collect(tuple(terms), self.constant)


def _collect(terms: Sequence[tuple[Atom, int]], constant: int) -> Index:
    factors: dict[Atom, int] = {}
    for atom, factor in terms:
        factors[atom] = factors.get(atom, 0) + factor
    while (joined := _joined_parts(factors)) is not None:
        inner, factor = joined
        constant += inner.constant * factor
        for atom, step in inner.terms:
            factors[atom] = factors.get(atom, 0) + step * factor
    kept = [(a, f) for a, f in factors.items() if f]
    return Index(tuple(sorted(kept) if len(kept) > 1 else kept), constant)


def _joined_parts(factors: dict[Atom, int]) -> tuple[Index, int] | None:
    """Remove two terms that are parts of one expression; that expression and its factor.

    (x // n)·n·f + (x % n)·f is x·f, and ((x // n) % m)·n·f + (x % n)·f is (x % (n·m))·f.
    """
    for low, factor in factors.items():
        if low.kind != "mod" or low.inner is None or not factor:
            continue
        quotient = Atom("div", low.number, low.inner)
        wanted = factor * low.number
        if factors.get(quotient) == wanted:
            del factors[quotient], factors[low]
            return low.inner, factor
        for high in factors:
            if high.kind == "mod" and high.inner == Index(((quotient, 1),)) and factors[high] == wanted:
                del factors[high], factors[low]
                return Index(((Atom("mod", low.number * high.number, low.inner), 1),)), factor
    return None


def _atom_bounds(atom: Atom, extents: Sequence[int]) -> tuple[int, int]:
    if atom.kind == "dim":
        return 0, max(extents[atom.number] - 1, 0)
    if atom.inner is None:
        raise ValueError(f"the range of {atom} is not known")
    if atom.kind == "mod":
        return 0, atom.number - 1
    low, high = atom.inner.bounds(extents)
    return low // atom.number, high // atom.number


def _coarse(rest: Index, divisor: int, extents: Sequence[int]) -> tuple[int, Index, Index]:
    """(s, c, f) with rest = s·c + f and f in [0, s), s a divisor of `divisor` as large as is found, or 1.

    Then rest // divisor is c // (divisor / s), and rest % divisor is (c % (divisor / s))·s + f.
    """
    steps = {math.gcd(factor, divisor) for _, factor in rest.terms}
    for step in sorted(steps, reverse=True):
        if step > 1:
            coarse = tuple((a, f // step) for a, f in rest.terms if f % step == 0)
            whole, left = divmod(rest.constant, step)
            fine = Index(tuple((a, f) for a, f in rest.terms if f % step), left)
            if coarse and _inside(fine, step, extents):
                return step, Index(coarse, whole), fine
    return 1, rest, Index()


def _inside(rest: Index, divisor: int, extents: Sequence[int]) -> bool:
    """Whether an expression is known to be in [0, divisor)."""
    if rest.values():
        return False
    low, high = rest.bounds(extents)
    return low >= 0 and high < divisor


@cache
def dim(number: int) -> Index:
    return Index(((Atom("dim", number), 1),))


def value(node: int) -> Index:
    return Index(((Atom("value", node), 1),))


def constant(number: int) -> Index:
    return Index((), number)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Distances between neighbours along each dim of a dense row-major array."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def linear(indices: Sequence[Index], strides: Sequence[int], offset: int = 0) -> Index:
    """The position in memory of an element whose index along each dim is given."""
    terms: list[tuple[Atom, int]] = []
    for index, stride in zip(indices, strides, strict=True):
        offset += index.constant * stride
        terms += [(atom, factor * stride) for atom, factor in index.terms if stride]
    return _collect(terms, offset)


def delinearized(position: Index, shape: Sequence[int], extents: Sequence[int]) -> tuple[Index, ...]:
    """The index along each dim of a dense row-major array of the element at a position."""
    return tuple(
        position.divided(stride, extents).modulo(extent, extents)
        for stride, extent in zip(strides_of(shape), shape, strict=True)
    )
