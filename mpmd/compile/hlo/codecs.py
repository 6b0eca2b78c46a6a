"""Attributes of instructions, between text and values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpmd.compile.hlo import attributes as attrs
from mpmd.compile.hlo.attributes import Attribute, Ints, braces
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
        value = self.memory.get(texts)
        if value is None:
            value = self.memory[texts] = self.read(texts)
        return value


def single(key: str, read: Callable[[str], Attribute], write: Callable[[Any], str]) -> Codec:
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
    def read(text: str) -> attrs.Verbatim:
        if re.fullmatch(form, text, re.IGNORECASE) is None:
            raise TextError(f"expected {key} such as {example}, got {text!r}", 0)
        return attrs.Verbatim(text)

    return single(key, read, str)


def verbatim(key: str) -> Codec:
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


# -- groups of keys ---------------------------------------------------------------------------------


def _grouped(make: Callable[..., Any], keys: dict[str, str], optional: Collection[str] = ()) -> Codec:
    """The codec of a record each of whose fields has a key of its own.

    Args:
        make: the type of the record.
        keys: the key of each field, in the order in which they are written.
        optional: keys that are left out where their lists are empty.
    """

    def one(field: str, text: str | None) -> Ints | int:
        if field == "index_vector_dim":
            return read_int(text or "")
        return integers(text) if text is not None else ()

    def read(texts: Texts) -> Any:
        return make(**{field: one(field, text) for field, text in zip(keys, texts, strict=True)})

    def write(value: Any) -> list[tuple[str, str]]:
        fields = [(key, getattr(value, field)) for field, key in keys.items()]
        return [
            (key, str(v) if isinstance(v, int) else braces(v))
            for key, v in fields
            if v or key not in optional
        ]

    return Codec(tuple(keys.values()), read, write)


def _own(*fields: str) -> dict[str, str]:
    return {field: field for field in fields}


_DOT_KEYS = {
    "lhs_batch": "lhs_batch_dims",
    "lhs_contracting": "lhs_contracting_dims",
    "rhs_batch": "rhs_batch_dims",
    "rhs_contracting": "rhs_contracting_dims",
}
DOT = _grouped(attrs.DotDims, _DOT_KEYS, ("lhs_batch_dims", "rhs_batch_dims"))
GATHER = _grouped(
    attrs.GatherDims,
    _own(
        "offset_dims",
        "collapsed_slice_dims",
        "start_index_map",
        "operand_batching_dims",
        "start_indices_batching_dims",
        "index_vector_dim",
    ),
    ("operand_batching_dims", "start_indices_batching_dims"),
)
SCATTER = _grouped(
    attrs.ScatterDims,
    _own(
        "update_window_dims",
        "inserted_window_dims",
        "scatter_dims_to_operand_dims",
        "input_batching_dims",
        "scatter_indices_batching_dims",
        "index_vector_dim",
    ),
    ("input_batching_dims", "scatter_indices_batching_dims"),
)

# -- windows, slices, padding -----------------------------------------------------------------------

_WINDOW_FIELDS = ("size", "stride", "pad", "lhs_dilate", "rhs_dilate", "rhs_reversal")


def _read_window(text: str) -> attrs.Window:
    fields: dict[str, list[str]] = {}
    for part in text.strip("{} ").split():
        key, _, value = part.partition("=")
        if key not in _WINDOW_FIELDS:
            raise TextError(
                f"unknown window field {key!r}; known: {', '.join(_WINDOW_FIELDS)}", text.find(part)
            )
        fields[key] = value.split("x")
    rank = len(fields.get("size", []))
    short = next((k for k, v in fields.items() if len(v) != rank), None)
    if short is not None:
        raise TextError(
            f"window field {short} has {len(fields[short])} dims, size has {rank}", text.find(short)
        )
    dims = []
    for d in range(rank):
        low, _, high = fields["pad"][d].partition("_") if "pad" in fields else ("0", "", "0")
        stride, lhs, rhs = (
            read_int(fields[k][d]) if k in fields else 1 for k in ("stride", "lhs_dilate", "rhs_dilate")
        )
        flipped = "rhs_reversal" in fields and fields["rhs_reversal"][d] == "1"
        dims.append(
            attrs.WindowDim(
                read_int(fields["size"][d]), stride, read_int(low), read_int(high), lhs, rhs, flipped
            )
        )
    return attrs.Window(tuple(dims))


WINDOW = single("window", _read_window, str)


def _read_padding(text: str) -> attrs.Padding:
    dims = []
    for part in text.split("x") if text else []:
        numbers = [read_int(n) for n in part.split("_")]
        if len(numbers) not in (2, 3):
            raise TextError(f"expected low_high or low_high_interior, got {part!r}", text.find(part))
        dims.append(attrs.PadDim(*numbers))
    return tuple(dims)


def _write_padding(value: attrs.Padding) -> str:
    interior = any(d.interior for d in value)
    return "x".join(f"{d.low}_{d.high}" + (f"_{d.interior}" if interior else "") for d in value)


PADDING = single("padding", _read_padding, _write_padding)


def _read_slice(text: str) -> attrs.SliceDims:
    triples = []
    for part in split_top(text.strip()[1:-1]):
        numbers = [read_int(n) for n in part.strip("[] ").split(":")]
        if len(numbers) not in (2, 3):
            raise TextError(f"expected [start:limit] or [start:limit:stride], got {part!r}", text.find(part))
        triples.append((numbers[0], numbers[1], numbers[2] if len(numbers) == 3 else 1))
    return attrs.SliceDims(
        tuple(t[0] for t in triples), tuple(t[1] for t in triples), tuple(t[2] for t in triples)
    )


def _write_slice(value: attrs.SliceDims) -> str:
    omit = all(s == 1 for s in value.strides)
    parts = [
        f"[{a}:{b}]" if omit else f"[{a}:{b}:{s}]"
        for a, b, s in zip(value.starts, value.limits, value.strides)
    ]
    return "{" + ", ".join(parts) + "}"


SLICE = single("slice", _read_slice, _write_slice)

_LABELS = re.compile(r"([bf\d?]+)_([io\d?]+)->([bf\d?]+)$")


def _read_conv(text: str) -> attrs.ConvDims:
    match = _LABELS.match(text)
    if match is None:
        raise TextError(f"expected dim labels such as b01f_01io->b01f, got {text!r}", 0)
    lhs, rhs, out = match.groups()
    spatial = len(lhs) - lhs.count("?") - 2
    digits = [str(i) for i in range(spatial)]
    for side, letters in ((lhs, "bf"), (rhs, "io"), (out, "bf")):
        if sorted(side.replace("?", "")) != sorted([*digits, *letters]):
            raise TextError(
                f"dim labels {side!r} must be {letters[0]}, {letters[1]} and {' '.join(digits)}",
                text.find(side),
            )
    return attrs.ConvDims(
        lhs.index("b"),
        lhs.index("f"),
        tuple(lhs.index(d) for d in digits),
        rhs.index("i"),
        rhs.index("o"),
        tuple(rhs.index(d) for d in digits),
        out.index("b"),
        out.index("f"),
        tuple(out.index(d) for d in digits),
    )


CONV = single("dim_labels", _read_conv, str)

# -- collectives ------------------------------------------------------------------------------------

_IOTA = re.compile(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(r"mesh\[(.*?)\](?:\s*,?\s*device_ids=(\S+?))?\s*\{(.*)\}$")
_AXIS = re.compile(r"'?([\w.\-]+)'?\s*=\s*(\d+)")


def _read_groups(text: str) -> attrs.ReplicaGroups:
    iota = _IOTA.match(text)
    if iota is not None:
        dims = integers(iota.group(3))
        transpose = integers(iota.group(4)) if iota.group(4) else tuple(range(len(dims)))
        groups, size = read_int(iota.group(1)), read_int(iota.group(2))
        if sorted(transpose) != list(range(len(dims))):
            raise TextError(f"T({iota.group(4)}) is not a permutation of {len(dims)} dims", iota.start(4))
        if groups * size != math.prod(dims):
            raise TextError(f"{groups} groups of {size} are not the {math.prod(dims)} devices of {dims}", 0)
        _check_devices(groups * size)
        return attrs.ReplicaGroups((), (groups, size, dims, transpose))
    if text.lstrip("@").startswith("mesh"):
        return attrs.ReplicaGroups(mesh=text, mesh_groups=_mesh_groups(text))
    return attrs.ReplicaGroups(tuple(integers(part) for part in split_top(text.strip()[1:-1])))


_MAX_DEVICES = 1 << 24


def _check_devices(count: int) -> None:
    if not 0 < count <= _MAX_DEVICES:
        raise TextError(f"groups of {count} devices; there may be 1 to {_MAX_DEVICES}", 0)


def _mesh_groups(text: str) -> tuple[Ints, ...]:
    match = _MESH.match(text.lstrip("@"))
    if match is None or match.group(2):
        raise TextError(f"expected groups such as mesh['a'=2,'b'=4] {{'a'}}, got {text!r}", 0)
    sizes = {name: int(size) for name, size in _AXIS.findall(match.group(1))}
    chosen = [part.strip().strip("'") for part in split_top(match.group(3))]
    unknown = [name for name in chosen if name not in sizes]
    if unknown:
        raise TextError(f"mesh axis {unknown[0]!r} is not among {', '.join(sizes)}", text.find(unknown[0]))
    names = list(sizes)
    _check_devices(math.prod(sizes.values()))
    ids = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    order = [names.index(n) for n in names if n not in chosen] + [names.index(n) for n in chosen]
    rows = ids.transpose(order).reshape(-1, math.prod(sizes[n] for n in chosen))
    return tuple(tuple(int(i) for i in row) for row in rows)


GROUPS = single("replica_groups", _read_groups, str)


def _read_pairs(text: str) -> tuple[Ints, ...]:
    return tuple(integers(part) for part in split_top(text.strip()[1:-1]))


PAIRS = single(
    "source_target_pairs", _read_pairs, lambda value: "{" + ",".join(braces(p) for p in value) + "}"
)
