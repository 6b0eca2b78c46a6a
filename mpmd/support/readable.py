"""The notation of the IR in reports of passes, in terms of JAX and of the user's code.

#sdy.sharding<@mesh, [{"x", "y"}, {}]>      ->  P(('x', 'y'), None)
tensor<4x8xf32>                             ->  f32[4,8]
loc(callsite("f"("step.py":3:4) at ...))    ->  step.py:3, in f
loc("params['w']")                          ->  params['w']
"""

from __future__ import annotations

import re

from mpmd.support.source import frames_of

_SHARDING = re.compile(r"#sdy\.sharding<@\w+, \[((?:\{[^}]*\}(?:p\d+)?(?:, )?)*)\](, [^>]*)?>")
_TENSOR = re.compile(r"(?:tensor)?<((?:\d+x)*)(complex<f32>|complex<f64>|(?:b?f|[su]?i)\d\w*)>")
_COMPLEX = {"complex<f32>": "c64", "complex<f64>": "c128"}
_LOCATION = re.compile(r"\bloc\(")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()]')
_NAME = re.compile(r'"((?:[^"\\]|\\.)*)"')


def readable(text: str) -> str:
    """The text with shardings, types and locations in the user's terms."""
    text = _SHARDING.sub(lambda found: _spec(found[1]) + (found[2] or ""), _with_places(text))
    return _TENSOR.sub(_shape, text)


def _shape(found: re.Match[str]) -> str:
    return f"{_COMPLEX.get(found[2], found[2])}[{found[1].replace('x', ',').removesuffix(',')}]"


def _spec(dims: str) -> str:
    """The `PartitionSpec` of the dims of a sharding."""
    entries = []
    for dim in re.findall(r"\{([^}]*)\}", dims):
        names = re.findall(r'"([^"]*)"', dim)
        entries.append(None if not names else names[0] if len(names) == 1 else tuple(names))
    return f"P({', '.join(map(repr, entries))})"


def _with_places(text: str) -> str:
    """The text with the innermost place in the user's code, or the name, that each MLIR location holds."""
    found, end = [], 0
    for start in (m.start() for m in _LOCATION.finditer(text)):
        if start >= end:
            found.append(text[end:start])
            end = _end_of_location(text, start + len("loc("))
            found.append(_place(text[start:end]))
    return "".join(found) + text[end:]


def _end_of_location(text: str, start: int) -> int:
    """The end of the location whose part after the first parenthesis begins at `start`."""
    depth = 1
    for token in _TOKEN.finditer(text, start):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if not depth:
            return token.end()
    return len(text)


def _place(location: str) -> str:
    frames, name = frames_of(location), _NAME.search(location)
    return str(frames[0]) if frames else name[1] if name else "an unknown place"
