"""A fragment with floats of 64 bits in place of all narrower ones."""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from mpmd.compile.backends.jax_function import numpy_dtype
from mpmd.compile.comparison.rounding import NARROW_FLOATS
from mpmd.compile.fragment import FragmentModule, ValueSpec

_TYPE = re.compile(rf"(?<=[x<])({NARROW_FLOATS})(?=>)")
_CONSTANT = re.compile(rf"dense<(?P<value>[^>]*)> : tensor<(?:[\dx]*x)?(?P<type>{NARROW_FLOATS})>")
_BITCAST = re.compile(
    r"^(?P<indent> *)(?P<to>%\w+) = stablehlo\.bitcast_convert (?P<of>%[\w#]+) : "
    r"\((?P<given>tensor<[^>]*>)\) -> (?P<made>tensor<[^>]*>)(?P<rest>.*)$",
    re.M,
)
_OPAQUE = re.compile(r"stablehlo\.custom_call @(?!Sharding\b|SPMD)|stablehlo\.composite")


def widened(fragment: FragmentModule) -> FragmentModule | None:
    """The fragment in f64; None if it calls code that exists for its own types only."""
    if _OPAQUE.search(fragment.text):
        return None
    text = _BITCAST.sub(_with_own_bits, _CONSTANT.sub(_constant, fragment.text))
    return dataclasses.replace(
        fragment,
        text=_TYPE.sub("f64", text).replace("narrow!", ""),
        arguments=tuple(map(_value, fragment.arguments)),
        results=tuple(map(_value, fragment.results)),
    )


def _value(value: ValueSpec) -> ValueSpec:
    if value.dtype == "complex<f32>":
        return dataclasses.replace(value, dtype="complex<f64>")
    return dataclasses.replace(value, dtype="f64") if re.fullmatch(NARROW_FLOATS, value.dtype) else value


def _constant(found: re.Match[str]) -> str:
    """A constant whose elements are written as bits, of which f64 has others."""
    dtype = numpy_dtype(found["type"])

    def wider(bits: re.Match[str]) -> str:
        number = np.array(int(bits[0], 16), f"u{dtype.itemsize}").view(dtype).astype(np.float64)
        return f"0x{int(number.view(np.uint64)):016X}"

    value = found["value"]
    if value.startswith('"0x'):
        elements = np.frombuffer(bytes.fromhex(value[3:-1]), dtype).astype(np.float64)
        value = f'"0x{elements.tobytes().hex().upper()}"'
    else:
        value = re.sub(r"0x[0-9A-Fa-f]+", wider, value)
    return f"dense<{value}>{found[0][found[0].index('> : ') + 1 :]}"


def _with_own_bits(found: re.Match[str]) -> str:
    """A cast of bits sees the bits of the narrow float: it is rounded first, or widened afterwards."""
    indent, to, of, given, made, rest = found.groups()
    own_given, own_made = (_TYPE.sub(r"narrow!\1", kind) for kind in (given, made))
    own = f"%bits_{to[1:]}"
    if own_made != made:
        return (
            f"{indent}{own} = stablehlo.bitcast_convert {of} : ({own_given}) -> {own_made}{rest}\n"
            f"{indent}{to} = stablehlo.convert {own} : ({own_made}) -> {made}"
        )
    if own_given != given:
        return (
            f"{indent}{own} = stablehlo.convert {of} : ({given}) -> {own_given}\n"
            f"{indent}{to} = stablehlo.bitcast_convert {own} : ({own_given}) -> {made}{rest}"
        )
    return found[0]
