"""A function as a flat list of items: equations, in program order, over numbered values.

Nested jits are inlined.  `jax.checkpoint` is inlined too; each item lists the checkpoints around it, which
`emit` puts around the items of each stage again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import Literal

from mpmd.jax_compat import place_of, rebind, scope_of
from mpmd.tracing.names import decode

_CHECKPOINTS = ("checkpoint", "remat", "remat2")
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
"""Equations that only call a function, and the parameter that holds it."""

Operand: TypeAlias = int | Literal
"""The number of a value, or a constant in the text of the jaxpr."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One `jax.checkpoint` of the function; `number` distinguishes it from equal ones."""

    number: int
    policy: Any
    prevent_cse: Any


@dataclasses.dataclass(eq=False)  # so that items are keys
class Item:
    """An equation, or some iterations of a scan.

    Attributes:
        compute: the outputs from the inputs.
        inputs: values that it reads.
        outputs: numbers of its values.
        equation: its equation, or the scan's whose rows it slices or joins.
        checkpoints: those around it, outermost first.
        stage: its stage; None if it has none, and mesh inference places it.
        iterations: how many iterations it runs of a scan that was divided.
        stays_out: whether it never gets a stage: it slices or joins a stack, which is in parts later.
        rows: the range of the rows that it slices from a stack.
        scope: the `jax.named_scope`s, modules and transformations around it, separated by `/`.
    """

    compute: Callable[..., Sequence[Any]]
    inputs: Sequence[Operand]
    outputs: Sequence[int]
    equation: Any
    checkpoints: tuple[Checkpoint, ...] = ()
    stage: int | None = None
    iterations: int | None = None
    stays_out: bool = False
    rows: tuple[int, int] | None = None
    scope: str = ""

    @property
    def reads(self) -> list[int]:
        return numbers(self.inputs)

    @property
    def where(self) -> str:
        place = place_of(self.equation)
        return f"{self.equation.primitive.name} ({place})" if place else str(self.equation.primitive.name)


def numbers(operands: Iterable[Operand]) -> list[int]:
    return [operand for operand in operands if isinstance(operand, int)]


class FlatFunction:
    """A jaxpr as items.

    Attributes:
        avals: shape and dtype of each value.
        items: in program order.
        constants: number of a value → its array.
        inputs: the values of the arguments.
        outputs: the results.
    """

    def __init__(self, closed: Any) -> None:
        self.avals: list[Any] = []
        self.items: list[Item] = []
        self.constants: dict[int, Any] = {}
        self._checkpoints = itertools.count()
        self.inputs = [self.value(v.aval) for v in closed.jaxpr.invars]
        self.outputs = self._inline(closed.jaxpr, closed.consts, self.inputs, (), "")
        self._drop_dead_items()

    def value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def readers(self) -> dict[int, list[Item]]:
        found: dict[int, list[Item]] = {v: [] for v in range(len(self.avals))}
        for item in self.items:
            for v in dict.fromkeys(item.reads):
                found[v].append(item)
        return found

    def inlined(
        self, closed: Any, given: Sequence[Operand], around: tuple[Checkpoint, ...], scope: str
    ) -> tuple[list[Item], list[Operand]]:
        """The items and the results of another jaxpr; its items are not yet in `items`.

        Args:
            closed: the jaxpr.
            given: its arguments.
            around: the checkpoints around it.
            scope: its scope.
        """
        items, self.items = self.items, []
        outputs = self._inline(closed.jaxpr, closed.consts, given, around, scope)
        made, self.items = self.items, items
        return made, outputs

    def replace(self, values: Mapping[int, Operand]) -> None:
        """Items and results read other values in place of some; unneeded items are dropped."""

        def new(operand: Operand) -> Operand:
            return values.get(operand, operand) if isinstance(operand, int) else operand

        for item in self.items:
            item.inputs = list(map(new, item.inputs))
        self.outputs = list(map(new, self.outputs))
        self._drop_dead_items()

    def _inline(
        self,
        jaxpr: Any,
        constants: Sequence[Any],
        given: Sequence[Operand],
        around: tuple[Checkpoint, ...],
        outside: str,
    ) -> list[Operand]:
        """Adds the items of a jaxpr.

        Args:
            jaxpr: its equations have scopes relative to its call's.
            constants: the values of its constants.
            given: its arguments.
            around: the checkpoints around its call.
            outside: the scope of its call.
        """
        env: dict[Any, Operand] = dict(zip(jaxpr.invars, given, strict=True))
        for variable, constant in zip(jaxpr.constvars, constants, strict=True):
            number = self.value(variable.aval)
            env[variable] = number
            self.constants[number] = constant

        def read(atom: Any) -> Operand:
            return atom if isinstance(atom, Literal) else env[atom]

        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            inner, checkpoint = _body(equation), around
            scope = "/".join(filter(None, (outside, scope_of(equation))))
            if inner is None and equation.primitive.name in _CHECKPOINTS:
                inner = equation.params["jaxpr"], ()
                kept = equation.params["policy"], equation.params["prevent_cse"]
                checkpoint = (*around, Checkpoint(next(self._checkpoints), *kept))
            if inner is not None:
                outputs = self._inline(*inner, inputs, checkpoint, scope)
            else:
                outputs = [self.value(v.aval) for v in equation.outvars]
                item = Item(_computing(equation), inputs, numbers(outputs), equation, around, scope=scope)
                self.items.append(item)
            env.update(zip(equation.outvars, outputs))
        return [read(atom) for atom in jaxpr.outvars]

    def _drop_dead_items(self) -> None:
        needed = set(numbers(self.outputs))
        kept = []
        for item in reversed(self.items):
            if item.equation.effects or not needed.isdisjoint(item.outputs):
                needed.update(item.reads)
                kept.append(item)
        self.items = kept[::-1]


def _body(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """The jaxpr and the constants of a call that is inlined: any without a name of ours."""
    parameter = _CALLS.get(equation.primitive.name)
    if parameter is None or decode(str(equation.params.get("name", ""))):
        return None
    closed = equation.params[parameter]
    return closed.jaxpr, closed.consts


def _computing(equation: Any) -> Callable[..., Sequence[Any]]:
    return lambda *values: rebind(equation, values)
