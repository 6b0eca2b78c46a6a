"""Programs of loops and conditionals over leaves."""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape, array
from tests.support.random_hlo.draft import Case, Draft
from tests.support.random_hlo.leaves.scope import COUNT, FLAG, LeafScope

DTYPES_OF_LEAVES = ("f32", "s32", "pred", "u8", "bf16", "f64", "f16", "s8", "s64", "u32")
DIMS_OF_LEAVES = ((), (1,), (3,), (5,), (7,), (2, 3), (5, 1), (3, 3))
MIN_LEAVES = 20
"""Leaves of the conditionals that a program is about."""
NESTS = (
    "c",
    "l(c)",
    "l(c)",
    "l(c)",
    "c(l)",
    "cc",
    "c(c)",
    "l(cc)",
    "l(c(c))",
    "c(l(c))",
    "l(l(c))",
    "l(c(l))",
    "l(c)l(c)",
)
"""Which conditionals and loops a program has, and how they are nested."""


class LeafProgram:
    """One random program.

    Args:
        draft: where it grows.
    """

    def __init__(self, draft: Draft) -> None:
        self.draft, self.rng = draft, draft.rng
        self.rounded = draft.pick((True, False, False, False, False))
        draft.exact = not self.rounded
        draft.terms = 1 if draft.exact else 64
        self.shapes = self._shapes()

    def _shapes(self) -> list[Shape]:
        """Shapes of all leaves: few different ones, so that many leaves can change places."""
        dtypes = [self.draft.pick(DTYPES_OF_LEAVES) for _ in range(int(self.rng.integers(1, 4)))]
        kinds = [array(d, self.draft.pick(DIMS_OF_LEAVES)) for d in dtypes]
        kinds += [array(d) for d in dtypes] + [COUNT, array("s32", (5,))]
        count = int(self.rng.integers(MIN_LEAVES, MIN_LEAVES + 7))
        return [COUNT, FLAG, *(self.draft.pick(kinds) for _ in range(count - 2))]

    def case(self) -> Case:
        """The program and its arguments."""
        entry = LeafScope(self.rng, self.draft.builder, self._begin(), rounded=self.rounded)
        self._inside(entry, self.draft.pick(NESTS))
        wanted = [k for k in range(len(self.shapes)) if self.rng.random() < 0.8] or [0]
        return self.draft.finish(self.draft.builder.tuple(entry.arranged(wanted, self.shapes)))

    def _begin(self) -> dict[int, HloInstruction]:
        """Leaves as parameters."""
        return {k: self.draft.parameter(self._values(s), s.dtype) for k, s in enumerate(self.shapes)}

    def _values(self, shape: Shape) -> np.ndarray:
        """Distinct numbers, so that a value in another's place shows."""
        info = DTYPES[shape.dtype]
        if info.kind == "pred":
            return self.rng.integers(0, 2, shape.dims).astype(bool)
        low, high = (0, 200) if info.kind == "unsigned" else (-100, 100)
        return self.rng.integers(low, high, shape.dims).astype(info.numpy)

    def _steps(self, scope: LeafScope, most: int = 3) -> None:
        for _ in range(int(self.rng.integers(most + 1))):
            scope.step()

    # -- loops and conditionals
    def _inside(self, scope: LeafScope, nest: str) -> None:
        """The content of a program, branch or body: changes, and the conditionals and loops of a nest."""
        self._steps(scope)
        while nest:
            kind, inner, nest = _taken_apart(nest)
            (self._conditional if kind == "c" else self._loop)(scope, inner)
            self._steps(scope)

    def _conditional(self, scope: LeafScope, nest: str) -> None:
        held = list(scope.values)
        wanted = self._some(held, min(len(held), MIN_LEAVES))
        count = scope.choose((2, 2, 2, 3, 4))
        if count == 2 and (flag := scope.leaf(FLAG)) is not None and scope.happens(0.7):
            selector = scope.values[flag]
        else:
            selector = scope.count()
        operands, branches = [], []
        nested = int(self.rng.integers(count))
        for number in range(count):
            given = held if number == nested and nest else self._some(held, len(held) // 2)
            operands.append(scope.build.tuple([scope.values[k] for k in given]))
            inside = nest if number == nested else ""
            branches.append(self._branch(given, wanted, operands[-1].shape, inside))
        made = scope.build.add("conditional", selector, *operands, called=branches)
        scope.values |= {k: scope.build.element(made, n) for n, k in enumerate(wanted)}

    def _some(self, leaves: list[int], least: int) -> list[int]:
        """Most leaves, in order or in another."""
        count = int(self.rng.integers(least, len(leaves) + 1))
        kept = [int(k) for k in self.rng.permutation(leaves)[:count]]
        return kept if self.rng.random() < 0.3 else sorted(kept)

    def _branch(self, given: list[int], wanted: list[int], shape: Shape, nest: str) -> HloComputation:
        build = HloBuilder.create(self.draft.module, "branch")
        taken = build.parameter(shape)
        values = {k: build.element(taken, n) for n, k in enumerate(given)}
        inner = LeafScope(self.rng, build, values, rounded=self.rounded)
        if nest or inner.happens(0.7):
            self._inside(inner, nest)
        return build.build(build.tuple(inner.arranged(wanted, self.shapes)))

    def _loop(self, scope: LeafScope, nest: str) -> None:
        carried = self._some(list(scope.values), MIN_LEAVES)
        limit = scope.build.constant(int(self.rng.integers(1, 4)), "s32")
        if scope.happens(0.5):
            limit = scope.build.add("minimum", scope.count(), limit)
        begin = [scope.build.constant(0, "s32"), limit, *(scope.values[k] for k in carried)]
        begin = scope.build.tuple(begin)
        condition = HloBuilder.create(self.draft.module, "condition")
        state = condition.parameter(begin.shape)
        less = condition.compare(condition.element(state, 0), condition.element(state, 1), "LT")
        condition.build(less)
        body = HloBuilder.create(self.draft.module, "body")
        state = body.parameter(begin.shape)
        counter, limit = body.element(state, 0), body.element(state, 1)
        values = {k: body.element(state, n + 2) for n, k in enumerate(carried)}
        inner = LeafScope(self.rng, body, values, [counter], self.rounded)
        self._inside(inner, nest)
        following = body.add("add", counter, body.constant(1, "s32"))
        body.build(body.tuple([following, limit, *inner.arranged(carried, self.shapes)]))
        made = scope.build.loop(condition.computation, body.computation, begin)
        scope.values |= {k: scope.build.element(made, n + 2) for n, k in enumerate(carried)}


def _taken_apart(nest: str) -> tuple[str, str, str]:
    """The first of a nest: its kind, what is inside of it, and what comes after it."""
    if nest[1:2] != "(":
        return nest[0], "", nest[1:]
    depth = 0
    for end, letter in enumerate(nest):
        depth += (letter == "(") - (letter == ")")
        if letter == ")" and not depth:
            return nest[0], nest[2:end], nest[end + 1 :]
    raise ValueError(nest)
