"""Layouts: the order of the dims of an array in memory.

`{2,0,1}` lists dims from minor to major: in `f32[10,20,30]{2,0,1}` dim 2 (30 long) is contiguous, then comes
dim 0, and dim 1 is outermost.
"""

from __future__ import annotations

import re
from typing import ClassVar

from mpmd.compile.hlo.text import TextError, integers

_NUMBER = r"\d{1,18}"
_FORMS = {
    "D": ("D(D,C)", r"[DCSH]\+?~?(,[DCSH]\+?~?)*"),
    "T": ("T(8,128)", rf"({_NUMBER}|\*)(,({_NUMBER}|\*))*"),
    "L": ("L(4)", _NUMBER),
    "#": ("#(u32)", r"u(2|4|8|16|32|64)"),
    "*": ("*(u32)", r"u(2|4|8|16|32|64)"),
    "E": ("E(4)", _NUMBER),
    "S": ("S(1)", _NUMBER),
    "SC": ("SC(0:1,2)", rf"{_NUMBER}:({_NUMBER}(,{_NUMBER})*)?"),
    "M": ("M(8)", _NUMBER),
}
"""An example of each part of a layout, and what may be between its brackets; in XLA's order."""
_ORDER = tuple(_FORMS)
_PART = re.compile(r"\s*([A-Z#*]+)((?:\s*\([^()]*\))+)\s*")
_BODY = re.compile(r"\(([^()]*)\)")


class Layout:
    """An interned layout: equal layouts are the same object.

    Attributes:
        minor_to_major: dims from the contiguous one outwards.
        memory_space: 0 is the device's default memory.
        element_bits: bits per packed element; 0 means whole bytes.
        tiles: each a tuple of tile dims, applied in turn.
        extra: further parts in XLA's text form, unchanged.
    """

    __slots__ = ("element_bits", "extra", "memory_space", "minor_to_major", "tiles")
    minor_to_major: tuple[int, ...]
    memory_space: int
    element_bits: int
    tiles: tuple[tuple[int, ...], ...]
    extra: str
    _pool: ClassVar[dict[tuple[object, ...], Layout]] = {}

    def __new__(
        cls,
        minor_to_major: tuple[int, ...],
        memory_space: int = 0,
        element_bits: int = 0,
        tiles: tuple[tuple[int, ...], ...] = (),
        extra: str = "",
    ) -> Layout:
        key = (minor_to_major, memory_space, element_bits, tiles, extra)
        pooled = cls._pool.get(key)
        if pooled is not None:
            return pooled
        self = object.__new__(cls)
        self.minor_to_major, self.memory_space = minor_to_major, memory_space
        self.element_bits, self.tiles, self.extra = element_bits, tiles, extra
        return cls._pool.setdefault(key, self)

    def __reduce__(self) -> tuple[object, ...]:
        return Layout, (self.minor_to_major, self.memory_space, self.element_bits, self.tiles, self.extra)

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: object) -> Layout:
        return self

    @staticmethod
    def row_major(rank: int) -> Layout:
        """`{rank-1, ..., 0}`: the last dim is contiguous."""
        return Layout(tuple(range(rank - 1, -1, -1)))

    @property
    def is_row_major(self) -> bool:
        """True if the dims lie in their logical order, nothing tiled or packed."""
        order = self.minor_to_major
        plain = not (self.tiles or self.element_bits or self.extra)
        return plain and order == tuple(range(len(order) - 1, -1, -1))

    def __str__(self) -> str:
        return "{" + self.inner_text() + "}"

    __repr__ = __str__

    def inner_text(self) -> str:
        text = ",".join(map(str, self.minor_to_major))
        parts = {part.group(1): part.group() for part in _PART.finditer(self.extra)}
        if self.tiles:
            parts["T"] = "T" + "".join(
                "(" + ",".join("*" if d < 0 else str(d) for d in t) + ")" for t in self.tiles
            )
        if self.element_bits:
            parts["E"] = f"E({self.element_bits})"
        if self.memory_space:
            parts["S"] = f"S({self.memory_space})"
        return f"{text}:{''.join(parts[key] for key in _ORDER if key in parts)}" if parts else text


def parse_layout(text: str) -> Layout:
    """The layout between the braces, e.g. `1,0:T(8,128)S(5)`.

    Raises:
        TextError: the text is not a layout.
    """
    order, colon, rest = text.partition(":")
    minor_to_major = integers(order)
    if sorted(minor_to_major) != list(range(len(minor_to_major))):
        raise TextError(f"layout {{{order}}} is not a permutation of its dims", 0)
    if not colon:
        return Layout(minor_to_major)
    first = len(order) + 1
    parts: dict[str, list[str]] = {}
    position = 0
    while position < len(rest.rstrip()):
        part = _PART.match(rest, position)
        if part is None or part.group(1) not in _ORDER:
            raise TextError(
                f"expected a layout part such as T(8,128) or S(1), got {rest[position:]!r}", first + position
            )
        letter = part.group(1)
        late = next((known for known in parts if _ORDER.index(known) >= _ORDER.index(letter)), None)
        if late is not None:
            raise TextError(f"layout part {letter} must come once, and before {late}", first + part.start(1))
        parts[letter] = [body.replace(" ", "") for body in _BODY.findall(part.group(2))]
        _check_part(letter, parts[letter], first + part.start(2))
        position = part.end()
    tiles = tuple(
        tuple(-1 if d == "*" else int(d) for d in body.split(",") if d) for body in parts.pop("T", [])
    )
    space, bits = (int(parts.pop(key, ["0"])[0]) for key in ("S", "E"))
    extra = "".join(key + "".join(f"({body})" for body in bodies) for key, bodies in parts.items())
    return Layout(minor_to_major, space, bits, tiles, extra)


def _check_part(letter: str, bodies: list[str], at: int) -> None:
    example, form = _FORMS[letter]
    if len(bodies) > 1 and letter not in ("T", "SC"):
        raise TextError(f"layout part {letter} takes one pair of brackets", at)
    wrong = next((body for body in bodies if re.fullmatch(form, body) is None), None)
    if wrong is not None:
        raise TextError(f"expected a layout part such as {example}, got {letter}({wrong})", at)
