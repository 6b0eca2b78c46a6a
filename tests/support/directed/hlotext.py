"""Programs for the assignment of memory, and damaged text for the parser.

A program of the memory side changes arrays in place while others still read them, in loops, branches and
given fusions, passes tuples around and copies them, and returns parameters, one value twice, or old values.
Elements are integers: all results are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mpmd.compile.hlo import parse_module
from tests.support.random_hlo.draft import Case

SIZES = (1, 2, 7, 8, 9, 15, 16, 17, 33, 64, 65, 100)
_ADD = "add {\n  a = s32[] parameter(0)\n  b = s32[] parameter(1)\n  ROOT s = s32[] add(a, b)\n}\n"


@dataclass
class _Program:
    """A program under construction.

    Attributes:
        rng: the source of choices.
        n: elements of its arrays.
        lines: of the entry.
        computations: texts of those that it calls.
        arrays: names of the arrays so far.
        scalars: names of the counters so far.
    """

    rng: np.random.Generator
    n: int
    lines: list[str] = field(default_factory=list)
    computations: list[str] = field(default_factory=list)
    arrays: list[str] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)

    @property
    def array(self) -> str:
        return f"s32[{self.n}]"

    def pick(self) -> str:
        """An array, a young one more often."""
        late = self.rng.random() < 0.6
        return self.arrays[-1 - int(self.rng.integers(min(3, len(self.arrays))))] if late else self.any()

    def any(self) -> str:
        return self.arrays[int(self.rng.integers(len(self.arrays)))]

    def scalar(self) -> str:
        return self.scalars[int(self.rng.integers(len(self.scalars)))]

    def line(self, shape: str, right: str) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {shape} {right}")
        return name

    def function(self, text: str) -> str:
        name = f"f{len(self.computations)}"
        self.computations.append(f"{name} {{\n{text}}}\n")
        return name


def _update(p: _Program) -> None:
    size = int(p.rng.integers(1, p.n + 1))
    part = p.line(f"s32[{size}]", f"slice({p.any()}), slice={{[{p.n - size}:{p.n}]}}")
    p.arrays.append(p.line(p.array, f"dynamic-update-slice({p.pick()}, {part}, {p.scalar()})"))


def _scatter(p: _Program) -> None:
    where = p.line(f"s32[{p.n},1]", f"reshape({p.any()})")
    p.arrays.append(
        p.line(
            p.array,
            f"scatter({p.pick()}, {where}, {p.any()}), update_window_dims={{}}, inserted_window_dims={{0}}, "
            "scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=add",
        )
    )


def _elementwise(p: _Program) -> None:
    opcode = ("add", "subtract", "multiply", "maximum")[int(p.rng.integers(4))]
    p.arrays.append(p.line(p.array, f"{opcode}({p.pick()}, {p.any()})"))


def _reverse(p: _Program) -> None:
    p.arrays.append(p.line(p.array, f"reverse({p.pick()}), dimensions={{0}}"))


def _copy(p: _Program) -> None:
    a, b, pair = p.pick(), p.any(), f"({p.array}, {p.array})"
    made = p.line(pair, f"tuple({a}, {b})")
    for opcode in ("copy", "opt-barrier")[: int(p.rng.integers(1, 3))]:
        made = p.line(pair, f"{opcode}({made})")
    p.arrays += [p.line(p.array, f"get-tuple-element({made}), index={k}") for k in (0, 1)]


def _fusion(p: _Program) -> None:
    """A fusion of another compiler: one or two updates, one behind a bitcast, perhaps of one array."""
    x, y, at = p.pick(), p.any(), p.scalar()
    body = (
        f"  x = {p.array} parameter(0)\n  y = {p.array} parameter(1)\n  i = s32[] parameter(2)\n"
        f"  part = s32[1] slice(y), slice={{[0:1]}}\n"
        f"  d = {p.array} dynamic-update-slice(x, part, i)\n"
    )
    if p.rng.random() < 0.5:
        body += f"  b = s32[{p.n},1] bitcast(d)\n  ROOT r = {p.array} bitcast(b)\n"
        p.arrays.append(p.line(p.array, f"fusion({x}, {y}, {at}), kind=kLoop, calls={p.function(body)}"))
        return
    other = ("x", "y")[int(p.rng.integers(2))]
    pair = f"({p.array}, {p.array})"
    body += f"  e = {p.array} dynamic-update-slice({other}, part, i)\n  ROOT r = {pair} tuple(d, e)\n"
    made = p.line(pair, f"fusion({x}, {y}, {at}), kind=kInput, calls={p.function(body)}")
    p.arrays += [p.line(p.array, f"get-tuple-element({made}), index={k}") for k in (0, 1)]


def _loop(p: _Program) -> None:
    """Two arrays and a counter; the body changes one of them in place and may exchange them."""
    state = f"({p.array}, {p.array}, s32[])"
    condition = p.function(
        f"  s = {state} parameter(0)\n  i = s32[] get-tuple-element(s), index=2\n"
        f"  k = s32[] constant({int(p.rng.integers(0, 4))})\n  ROOT l = pred[] compare(i, k), direction=LT\n"
    )
    order = ("c, y", "y, c", "c, x", "c, c", "x, c")[int(p.rng.integers(5))]
    wide = p.rng.random() < 0.5
    change = (
        "  part = s32[1] slice(y), slice={[0:1]}\n  c = " + p.array + " dynamic-update-slice(x, part, i)\n"
        if wide
        else f"  c = {p.array} subtract(x, y)\n"
    )
    body = p.function(
        f"  s = {state} parameter(0)\n  x = {p.array} get-tuple-element(s), index=0\n"
        f"  y = {p.array} get-tuple-element(s), index=1\n  i = s32[] get-tuple-element(s), index=2\n{change}"
        f"  one = s32[] constant(1)\n  j = s32[] add(i, one)\n  ROOT t = {state} tuple({order}, j)\n"
    )
    begin = p.line("s32[]", "constant(0)")
    init = p.line(state, f"tuple({p.pick()}, {p.any()}, {begin})")
    done = p.line(state, f"while({init}), condition={condition}, body={body}")
    p.arrays += [p.line(p.array, f"get-tuple-element({done}), index={k}") for k in (0, 1)]


def _branch(p: _Program) -> None:
    pair = f"({p.array}, {p.array})"
    head = f"  s = {pair} parameter(0)\n  x = {p.array} get-tuple-element(s), index=0\n" + (
        f"  y = {p.array} get-tuple-element(s), index=1\n"
    )
    exchanged = p.function(f"{head}  ROOT r = {pair} tuple(y, x)\n")
    changed = p.function(
        f"{head}  z = s32[] constant(0)\n  part = s32[1] slice(y), slice={{[0:1]}}\n"
        f"  c = {p.array} dynamic-update-slice(x, part, z)\n  ROOT r = {pair} tuple(c, x)\n"
    )
    given = p.line(pair, f"tuple({p.pick()}, {p.any()})")
    names = f"{exchanged}, {changed}" if p.rng.random() < 0.5 else f"{changed}, {exchanged}"
    made = p.line(pair, f"conditional({p.scalar()}, {given}, {given}), branch_computations={{{names}}}")
    p.arrays += [p.line(p.array, f"get-tuple-element({made}), index={k}") for k in (0, 1)]


_STEPS = (_update, _update, _scatter, _elementwise, _reverse, _copy, _fusion, _fusion, _loop, _branch)


def memory_text(seed: int) -> tuple[str, int]:
    """The text of a program, and the number of its arrays' elements."""
    rng = np.random.default_rng((20, seed))
    p = _Program(rng, SIZES[seed % len(SIZES)])
    for k in range(int(rng.integers(1, 4))):
        p.arrays.append(p.line(p.array, f"parameter({k})"))
    count = len(p.arrays)
    p.scalars.append(p.line("s32[]", f"parameter({count})"))
    p.scalars.append(p.line("s32[]", "constant(1)"))
    for _ in range(int(rng.integers(2, 7))):
        _STEPS[int(rng.integers(len(_STEPS)))](p)
    results = [p.any() for _ in range(int(rng.integers(1, 4)))] + [p.arrays[-1]]
    shape = "(" + ", ".join([p.array] * len(results)) + ")"
    p.lines.append(f"ROOT result = {shape} tuple({', '.join(results)})")
    entry = "ENTRY main {\n" + "".join(f"  {line}\n" for line in p.lines) + "}\n"
    return "HloModule memory\n\n" + _ADD + "\n" + "\n".join(p.computations) + "\n" + entry, count


def memory_case(seed: int) -> tuple[Case, tuple[int, ...]]:
    """A program with its arguments, and which of them are given away."""
    text, count = memory_text(seed)
    rng = np.random.default_rng((21, seed))
    module = parse_module(text)
    n = module.entry.parameters[0].shape.dims[0]
    arrays = [rng.integers(-3, n + 3, n).astype(np.int32) for _ in range(count)]
    donated = tuple(k for k in range(count) if rng.random() < 0.5)
    return Case(f"memory {seed}", module, [*arrays, np.int32(rng.integers(-1, 3))]), donated


_BITS = (
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    ",",
    "=",
    '"',
    "%",
    " ",
    "\n",
    "?",
    "/*",
    "*/",
    "//",
    "0",
    "-",
    "x",
    "<=",
    ":T(",
)


def damaged_text(seed: int) -> str:
    """The text of a program in which a few characters are missing, exchanged, repeated or others."""
    rng = np.random.default_rng((22, seed))
    text = memory_text(int(rng.integers(1_000)))[0]
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(len(text)))
        end = at + int(rng.integers(1, 4))
        change = int(rng.integers(4))
        bit = _BITS[int(rng.integers(len(_BITS)))]
        new = ("", bit, text[at:end][::-1], text[at:end] * 2)[change]
        text = text[:at] + new + text[end:]
    return text
