"""Programs in which values must be copied.

State that loops change in place while others read it, tuples of one value, results that are parameters,
arguments that are given away.  All elements are integers.
"""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo import parse_module
from tests.support.random_hlo.draft import Case

SIZES = (1, 2, 7, 8, 9, 16, 17, 33, 65)
_PARTS = ("x", "y", "c", "d")


class _Text:
    """The text of a program under construction, over arrays of `n` elements."""

    def __init__(self, rng: np.random.Generator, n: int) -> None:
        self.rng, self.n = rng, n
        self.array = f"s32[{n}]"
        self.state = f"({self.array}, {self.array}, s32[])"
        self.functions: list[str] = []

    def pick(self, *options: str) -> str:
        return options[int(self.rng.integers(len(options)))]

    def function(self, text: str) -> str:
        """The name of a computation."""
        name = f"f{len(self.functions)}"
        self.functions.append(f"{name} {{\n{text}}}\n")
        return name

    def opened(self) -> str:
        """The lines that take the state apart."""
        return f"  s = {self.state} parameter(0)\n" + "".join(
            f"  {name} = {shape} get-tuple-element(s), index={k}\n"
            for k, (name, shape) in enumerate((("x", self.array), ("y", self.array), ("i", "s32[]")))
        )

    def change(self) -> str:
        """The lines that make `c` and `d` of `x` and `y`."""
        target, other = self.pick("x", "x", "y"), self.pick("x", "y")
        update = (
            f"  part = s32[1] dynamic-slice({other}, i), dynamic_slice_sizes={{1}}\n"
            f"  more = s32[1] add(part, part)\n"
            f"  c = {self.array} dynamic-update-slice({target}, more, i)\n"
        )
        second = self.pick(
            f"subtract({other}, c)", "add(x, y)", f"reverse({target}), dimensions={{0}}", "copy(c)"
        )
        return update + f"  d = {self.array} {second}\n"

    def loop(self, state: str, name: str, depth: int) -> str:
        """A loop over a state, as lines."""
        limit = int(self.rng.integers(0, 4))
        condition = self.function(
            f"{self.opened()}  k = s32[] constant({limit})\n  ROOT l = pred[] compare(i, k), direction=LT\n"
        )
        inner = ""
        first, second = self.pick(*_PARTS), self.pick(*_PARTS)
        if depth and self.rng.random() < 0.5:
            inner = (
                f"  z = s32[] constant(0)\n  t = {self.state} tuple({self.pick(*_PARTS)}, {first}, z)\n"
                + self.nested("t", "w", depth - 1)
                + f"  e = {self.array} get-tuple-element(w), index={int(self.rng.integers(2))}\n"
            )
            second = "e"
        body = self.function(
            f"{self.opened()}{self.change()}{inner}  one = s32[] constant(1)\n  j = s32[] add(i, one)\n"
            f"  ROOT r = {self.state} tuple({first}, {second}, j)\n"
        )
        return f"  {name} = {self.state} while({state}), condition={condition}, body={body}\n"

    def branch(self, state: str, name: str) -> str:
        """A conditional on a state, of which one branch may return what it is given."""
        changed = self.function(
            f"{self.opened()}{self.change()}"
            f"  ROOT r = {self.state} tuple({self.pick(*_PARTS)}, {self.pick(*_PARTS)}, i)\n"
        )
        same = self.function(
            f"{self.opened()}  ROOT r = {self.state} tuple({self.pick('x, y', 'y, x', 'y, y')}, i)\n"
        )
        return (
            f"  {name}n = s32[] get-tuple-element({state}), index=2\n"
            f"  {name} = {self.state} conditional({name}n, {state}, {state}), "
            f"branch_computations={{{self.pick(f'{changed}, {same}', f'{same}, {changed}')}}}\n"
        )

    def nested(self, state: str, name: str, depth: int) -> str:
        return self.loop(state, name, depth) if self.rng.random() < 0.7 else self.branch(state, name)


def copying_case(seed: int) -> tuple[Case, tuple[int, ...]]:
    """A program with its arguments, and which of them are given away."""
    rng = np.random.default_rng([seed, 76])
    p = _Text(rng, SIZES[seed % len(SIZES)])
    lines = f"  a = {p.array} parameter(0)\n  b = {p.array} parameter(1)\n  n = {p.array} add(a, b)\n"
    lines += "  z = s32[] constant(0)\n"
    arrays = ["a", "b", "n"]
    for k in range(int(rng.integers(1, 4))):
        lines += f"  t{k} = {p.state} tuple({p.pick(*arrays)}, {p.pick(*arrays)}, z)\n"
        state = f"t{k}"
        if rng.random() < 0.2:
            lines += f"  o{k} = {p.state} {p.pick('copy', 'opt-barrier')}({state})\n"
            state = f"o{k}"
        lines += p.nested(state, f"w{k}", depth=1)
        lines += "".join(f"  g{k}{j} = {p.array} get-tuple-element(w{k}), index={j}\n" for j in (0, 1))
        lines += f"  h{k} = {p.array} subtract({p.pick(*arrays)}, g{k}0)\n"
        arrays += [f"g{k}0", f"g{k}1", f"h{k}"]
    results = [p.pick(*arrays) for _ in range(int(rng.integers(1, 3)))] + arrays[-2:]
    shape = ", ".join([p.array] * len(results))
    text = (
        "HloModule copying\n\n" + "\n".join(p.functions) + "\nENTRY main {\n" + lines
        + f"  ROOT r = ({shape}) tuple({', '.join(results)})\n}}\n"
    )  # fmt: skip
    arguments = [rng.integers(-3, p.n + 3, p.n).astype(np.int32) for _ in range(2)]
    donated = tuple(k for k in range(2) if rng.random() < 0.5)
    return Case(f"copying#{seed}", parse_module(text), arguments), donated
