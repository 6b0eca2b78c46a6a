"""The HLO text of each attribute: one codec per form.

A codec reads one or several `key=text` pairs of a line into one typed value, and writes it back.  Values are
cached by their text, so that each distinct attribute of a module is parsed once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpmd.compile.hlo import attributes as attrs
from mpmd.compile.hlo.attributes import Attribute, braces
from mpmd.compile.hlo.text import TextError, integers, quote, read_int, split_top, unquote

Texts = tuple[str | None, ...]


@dataclass(frozen=True)
class Codec:
    """Text form of one attribute.

    Attributes:
        keys: the keys of the line that it uses.
        read: texts of those keys (None where absent) → value.
        write: value → (key, text) pairs to print.
        needed: how many of the keys an attribute must have; 0: any one.
        memory: texts → value, a cache.
    """

    keys: tuple[str, ...]
    read: Callable[[Texts], Any]
    write: Callable[[Any], list[tuple[str, str]]]
    needed: int = 0
    memory: dict[Texts, Attribute] = field(default_factory=dict, repr=False, compare=False)

    def parse(self, texts: Texts) -> Attribute:
        """The value of these texts."""
        found = self.memory.get(texts)
        if found is None:
            found = self.memory[texts] = self.read(texts)
        return found


def single(key: str, read: Callable[[str], Attribute], write: Callable[[Any], str]) -> Codec:
    """One key, one value."""
    return Codec((key,), lambda texts: read(texts[0] or ""), lambda value: [(key, write(value))], 1)


def ints(key: str) -> Codec:
    """`key={0,1}`."""
    return single(key, integers, braces)


def integer(key: str) -> Codec:
    """`key=3`."""
    return single(key, read_int, str)


def real(key: str) -> Codec:
    """`key=0.5`."""

    def read(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise TextError(f"expected a number, got {text!r}", 0) from None

    return single(
        key,
        read,
        lambda value: np.format_float_positional(value, trim="-") if 1e-4 < abs(value) < 1e6 else repr(value),
    )


def boolean(key: str) -> Codec:
    """`key=true`."""

    def read(text: str) -> bool:
        if text not in ("true", "false"):
            raise TextError(f"expected true or false, got {text!r}", 0)
        return text == "true"

    return single(key, read, lambda value: "true" if value else "false")


def word(key: str, choices: tuple[str, ...] = ()) -> Codec:
    """`key=LT`, one of the choices if there are any."""

    def read(text: str) -> str:
        if choices and text not in choices:
            raise TextError(f"expected one of {', '.join(choices)}, got {text!r}", 0)
        return text

    return single(key, read, str)


def string(key: str) -> Codec:
    """`key="text"`."""
    return single(key, unquote, quote)


def matching(key: str, form: str, example: str) -> Codec:
    """Text of a form that is carried along unchanged."""

    def read(text: str) -> attrs.Verbatim:
        if re.fullmatch(form, text, re.IGNORECASE) is None:
            raise TextError(f"expected {key} such as {example}, got {text!r}", 0)
        return attrs.Verbatim(text)

    return single(key, read, str)


def verbatim(key: str) -> Codec:
    """Any text, unchanged."""
    return single(key, attrs.Verbatim, str)


# -- lists of words and aliases ---------------------------------------------------------------------


def words(key: str) -> Codec:
    """`key={highest,default}`."""
    return single(
        key, lambda text: tuple(split_top(text.strip()[1:-1])), lambda value: "{" + ",".join(value) + "}"
    )


def _fields(text: str, least: int) -> list[str]:
    """The parts of `(a, b, ...)`.

    Raises:
        TextError: there are fewer than expected.
    """
    parts = split_top(text.strip()[1:-1])
    if len(parts) < least:
        raise TextError(f"expected {least} or more parts in brackets, got {text.strip()!r}", 0)
    return parts


def _read_aliases(text: str) -> tuple[attrs.OutputAlias, ...]:
    out = []
    for part in split_top(text.strip()[1:-1]):
        output, _, rest = part.partition(":")
        operand, index = _fields(rest, 2)[:2]
        out.append(attrs.OutputAlias(integers(output), read_int(operand), integers(index)))
    return tuple(out)


OUTPUT_ALIASES = single(
    "output_to_operand_aliasing", _read_aliases, lambda value: "{" + ", ".join(map(str, value)) + "}"
)


def read_io_aliases(text: str) -> tuple[attrs.InputOutputAlias, ...]:
    """The module header's `input_output_alias={ {0}: (0, {}, may-alias), ... }`."""
    out = []
    for part in split_top(text.strip()[1:-1]):
        output, _, rest = part.partition(":")
        fields = _fields(rest, 2)
        kind = fields[2] if len(fields) > 2 else "may-alias"
        out.append(attrs.InputOutputAlias(integers(output), read_int(fields[0]), integers(fields[1]), kind))
    return tuple(out)


def read_donors(text: str) -> tuple[attrs.BufferDonor, ...]:
    """The module header's `buffer_donor={ (0, {}), ... }`."""
    out = []
    for part in split_top(text.strip()[1:-1]):
        fields = _fields(part, 2)
        out.append(attrs.BufferDonor(read_int(fields[0]), integers(fields[1])))
    return tuple(out)
