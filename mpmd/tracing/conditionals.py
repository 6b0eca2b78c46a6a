"""A conditional over values of several meshes as one for each group of values, with the same predicate.

    a, b = cond(p, (a, b) -> (a * n, b * n), (a, b) -> (a, b))       n = sum(a * a) + sum(b * b)
    ->
    na = cond(p, a -> sum(a * a), a -> 0)        nb = cond(p, b -> sum(b * b), b -> 0)
    a = cond(p, (a, na + nb) -> a * (na + nb), ...)         b = cond(p, (b, na + nb) -> ..., ...)

Optimizers that skip updates have such conditionals over their whole state, which would be one operation, on
one mesh.  Arrays that an operation of a branch reads or writes together are in one group.  Scalars belong to
none, and are computed whichever branch is taken; nor do arrays that are computed of no other, such as zeros,
which each group that reads them computes for itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from mpmd.jax_compat import as_of, inner_jaxprs, rebind, struct_of
from mpmd.tracing.names import decode
from mpmd.tracing.stages.items import FlatFunction, Item


def has_wide_conditional(jaxpr: Any) -> bool:
    """Whether a conditional of a step has several arrays as results."""
    return any(
        sum(_is_array(v.aval) for v in equation.outvars) > 1
        if equation.primitive.name == "cond"
        else has_wide_conditional(inner)
        for equation in jaxpr.eqns
        if equation.primitive.name == "cond" or _is_inlined(equation)
        for inner in inner_jaxprs(equation)[:1]
    )


def with_split_conditionals(closed: Any) -> Callable[..., list[Any]]:
    """A function that computes the same as a jaxpr, with its conditionals split."""

    def run(*values: Any) -> list[Any]:
        return _run(closed.jaxpr, closed.consts, values)

    return run


def _run(jaxpr: Any, constants: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    env.update(zip(jaxpr.invars, values, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        if equation.primitive.name == "cond":
            results = _split(equation, *operands)
        elif _is_inlined(equation) and has_wide_conditional(inner_jaxprs(equation)[0]):
            with as_of(equation):
                inner = equation.params["jaxpr"]
                results = _run(inner.jaxpr, inner.consts, operands)
        else:
            results = rebind(equation, operands)
        env.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _is_inlined(equation: Any) -> bool:
    return equation.primitive.name in ("jit", "pjit") and not decode(str(equation.params["name"]))


def _is_array(aval: Any) -> bool:
    """Whether a value is one of a group: it has several elements."""
    return getattr(aval, "size", 1) > 1


def _split(equation: Any, which: Any, *operands: Any) -> list[Any]:
    """The results of a conditional: of one for each group and level, or of itself if there is one group."""
    if sum(_is_array(v.aval) for v in equation.outvars) < 2:
        return rebind(equation, [which, *operands])
    shapes = [v.aval for v in equation.invars[1:]]
    branches = []
    for closed in equation.params["branches"]:
        inside = jax.make_jaxpr(with_split_conditionals(closed))(*map(struct_of, shapes))
        branches.append(FlatFunction(inside))
    groups = _Groups(branches)
    items = ((item, groups.of(b, flat, item)) for b, flat in enumerate(branches) for item in flat.items)
    if groups.count < 2 or any(_is_fixed(item, group) for item, group in items):
        return rebind(equation, [which, *operands])
    with as_of(equation):
        return _Conditional(which, operands, branches, groups).run()


def _is_fixed(item: Item, group: Any) -> bool:
    """Whether an item cannot be computed by itself, or must not run unless its branch is taken.

    Outside of its branch a loop of unknown length may not end, and items of no group are computed there.
    """
    if item.equation.effects or (group in (None, FREE) and _has_while(item.equation)):
        return True
    return any(jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in _avals(item))


def _has_while(equation: Any) -> bool:
    """Whether an operation is a loop of unknown length, or has one inside."""
    inside = (inner for jaxpr in inner_jaxprs(equation) for inner in jaxpr.eqns)
    return equation.primitive.name == "while" or any(map(_has_while, inside))


def _avals(item: Item) -> list[Any]:
    return [v.aval for v in (*item.equation.invars, *item.equation.outvars)]


class _Groups:
    """Which arrays are used together in any branch: groups of values, and of results of the conditional.

    Attributes:
        count: how many groups there are.
    """

    def __init__(self, branches: Sequence[FlatFunction]) -> None:
        self._above: dict[Any, Any] = {}
        self._free = [_free_values(flat) for flat in branches]
        for b, flat in enumerate(branches):
            for item in flat.items:
                arrays = self._arrays(b, flat, item)
                for other in arrays[1:]:
                    self._join((b, arrays[0]), (b, other))
            for kind, values in (("operand", flat.inputs), ("result", flat.outputs)):
                for position, v in enumerate(values):
                    if isinstance(v, int) and _is_array(flat.avals[v]):
                        self._join((kind, position), (kind, position) if v in self._free[b] else (b, v))
        self.count = len({self._root(node) for node in self._above if node[0] == "result"})

    def of(self, branch: int, flat: FlatFunction, item: Item) -> Any:
        """The group of an item; None if it computes scalars of scalars, `FREE` if arrays of these."""
        arrays = self._arrays(branch, flat, item)
        if arrays:
            return self._root((branch, arrays[0]))
        return FREE if any(_is_array(flat.avals[v]) for v in item.outputs) else None

    def of_result(self, position: int) -> Any:
        """The group of a result of the conditional that is an array."""
        return self._root(("result", position))

    def _arrays(self, branch: int, flat: FlatFunction, item: Item) -> list[int]:
        free = self._free[branch]
        return [v for v in (*item.reads, *item.outputs) if _is_array(flat.avals[v]) and v not in free]

    def _root(self, node: Any) -> Any:
        while self._above.setdefault(node, node) != node:
            node = self._above[node]
        return node

    def _join(self, one: Any, other: Any) -> None:
        self._above[self._root(one)] = self._root(other)


FREE = "free"
"""The group of items that compute arrays of no other array."""


def _free_values(flat: FlatFunction) -> set[int]:
    """The scalars of a branch, its constants, and the arrays that are computed of these alone."""
    free = {v for v, aval in enumerate(flat.avals) if not _is_array(aval)} | set(flat.constants)
    for item in flat.items:
        if free.issuperset(item.reads):
            free.update(item.outputs)
    return free


@dataclasses.dataclass(eq=False)
class _BranchState:
    """A branch while it is computed.

    Attributes:
        flat: its items.
        group: of each item.
        level: of each item and value: how often a value of a group is read outside of the group before it.
        env: the values that are known outside of conditionals; of a branch not taken they are zero.
    """

    flat: FlatFunction
    group: dict[Item, Any]
    level: dict[Any, int]
    env: dict[int, Any]

    def with_free(self, items: Sequence[Item], ends: Sequence[Any]) -> list[Item]:
        """Items, and ungrouped items that they or some values need, in program order."""
        wanted, chosen = {*ends, *(v for item in items for v in item.reads)}, set(items)
        for item in reversed(self.flat.items):
            if self.group[item] is FREE and not wanted.isdisjoint(item.outputs):
                chosen.add(item)
                wanted.update(item.reads)
        return [item for item in self.flat.items if item in chosen]

    def compute(self, items: Sequence[Item], env: dict[int, Any]) -> None:
        for item in items:
            values = [env[v] if isinstance(v, int) else v.val for v in item.inputs]
            env.update(zip(item.outputs, item.compute(*values), strict=True))


class _Conditional:
    """One conditional as many: each level reads the scalars of the original, and values of lower levels."""

    def __init__(
        self, which: Any, operands: Sequence[Any], branches: Sequence[FlatFunction], groups: _Groups
    ) -> None:
        self.which, self.groups = which, groups
        self.branches = []
        for b, flat in enumerate(branches):
            env = {**flat.constants, **dict(zip(flat.inputs, operands, strict=True))}
            group = {item: groups.of(b, flat, item) for item in flat.items}
            self.branches.append(_BranchState(flat, group, _levels(flat, group), env))
        self.results: list[Any] = [None] * len(branches[0].outputs)

    def run(self) -> list[Any]:
        last = max(max(branch.level.values(), default=0) for branch in self.branches)
        for level in range(last + 1):
            for branch in self.branches:
                scalars = branch.with_free([i for i, group in branch.group.items() if group is None], ())
                items = [i for i in scalars if branch.level[i] == level]
                branch.compute(items, branch.env)
                self._zero_unless_taken(branch, items)
            grouped = (branch.group[i] for branch in self.branches for i in branch.flat.items)
            groups = dict.fromkeys([*grouped, *map(self._group, range(len(self.results)))])
            for group in groups:
                if group is not None and group is not FREE:
                    self._compute_group(group, level)
        for position, result in enumerate(self.results):
            if result is None:
                values = [self._value(branch, branch.flat.outputs[position]) for branch in self.branches]
                self.results[position] = _selected(self.which, values)
        return self.results

    def _zero_unless_taken(self, branch: _BranchState, items: Sequence[Item]) -> None:
        """Makes the scalars zero that conditionals read, unless their branch is taken.

        Else they could be NaN, such as the mean of nothing, and be reported where NaNs are looked for.
        """
        taken = self.which == self.branches.index(branch)
        in_groups = (item for item, group in branch.group.items() if group not in (None, FREE))
        read = {v for item in in_groups for v in item.reads}
        for v in (v for item in items for v in item.outputs if v in read):
            if not _is_array(aval := branch.flat.avals[v]) and jnp.issubdtype(aval.dtype, jnp.inexact):
                branch.env[v] = jnp.where(taken, branch.env[v], jnp.zeros((), aval.dtype))

    def _group(self, position: int) -> Any:
        output = self.branches[0].flat.outputs[position]
        is_array = isinstance(output, int) and _is_array(self.branches[0].flat.avals[output])
        return self.groups.of_result(position) if is_array else None

    def _level_of_result(self, position: int) -> int:
        ends = [(branch.level, branch.flat.outputs[position]) for branch in self.branches]
        return max(level.get(v, 0) if isinstance(v, int) else 0 for level, v in ends)

    def _compute_group(self, group: Any, level: int) -> None:
        """Computes what a level computes of a group, under one conditional."""
        own = [
            [i for i in branch.flat.items if branch.group[i] == group and branch.level[i] == level]
            for branch in self.branches
        ]
        results = [
            position
            for position in range(len(self.results))
            if self._group(position) == group and self._level_of_result(position) == level
        ]
        if not results and not any(own):
            return
        kept = [self._read_later(branch, items) for branch, items in zip(self.branches, own)]
        given, functions = [], []
        for branch, items, later in zip(self.branches, own, kept):
            ends = [branch.flat.outputs[position] for position in results]
            items = branch.with_free(items, ends)
            inside = {v for item in items for v in item.outputs}
            read = dict.fromkeys(v for i in items for v in i.reads if v not in inside)
            read.update(dict.fromkeys(v for v in ends if v not in inside))
            names = list(read)
            given.append([branch.env[v] for v in names])
            functions.append(self._branch_function(branch, items, names, ends, later, kept))
        computed = jax.lax.switch(self.which, functions, given)
        for position, value in zip(results, computed):
            self.results[position] = value
        rest = iter(computed[len(results) :])
        for branch, later in zip(self.branches, kept):
            branch.env.update({v: next(rest) for v in later})

    def _branch_function(
        self, branch: _BranchState, items: Any, names: list[int], ends: list[Any], later: Any, kept: Any
    ) -> Callable[..., list[Any]]:
        """What one branch computes; zeros in place of what others compute for later levels."""
        number = self.branches.index(branch)

        def function(given: list[list[Any]]) -> list[Any]:
            env = dict(zip(names, given[number], strict=True))
            branch.compute(items, env)
            results = [env[v] for v in ends]
            for other, values in zip(self.branches, kept):
                avals = [other.flat.avals[v] for v in values]
                results += (
                    [env[v] for v in later]
                    if other is branch
                    else [jnp.zeros(a.shape, a.dtype) for a in avals]
                )
            return results

        return function

    def _read_later(self, branch: _BranchState, items: Sequence[Item]) -> list[int]:
        """The values of items that items of other groups or levels read, or that are results later."""
        own = set(items)
        wanted = {v for item in branch.flat.items if item not in own for v in item.reads}
        for position, v in enumerate(branch.flat.outputs):
            scalar = self._group(position) is None
            if isinstance(v, int) and (scalar or self._level_of_result(position) > branch.level.get(v, 0)):
                wanted.add(v)
        return [v for item in items for v in item.outputs if v in wanted]

    def _value(self, branch: _BranchState, operand: Any) -> Any:
        return branch.env[operand] if isinstance(operand, int) else operand.val


def _levels(flat: FlatFunction, group: dict[Item, Any]) -> dict[Any, int]:
    """The level of each item, and of each value that an item computes; in a level scalars come first."""
    level: dict[Any, int] = {}
    maker: dict[int, Item] = {}
    for item in flat.items:
        before = [maker[v] for v in item.reads if v in maker]
        later = [level[i] + (group[i] not in (None, FREE, group[item])) for i in before]
        level[item] = max(later, default=0)
        for v in item.outputs:
            maker[v], level[v] = item, level[item]
    return level


def _selected(which: Any, values: Sequence[Any]) -> Any:
    selected = values[-1]
    for number in range(len(values) - 2, -1, -1):
        selected = jnp.where(which == number, values[number], selected)
    return selected
