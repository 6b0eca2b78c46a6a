"""A function as a flat list of items: equations, in program order, over numbered values.

Nested jits are inlined, unless they carry a name.  `jax.checkpoint` is inlined too; each item lists the
checkpoints around it.  Once items have stages, `emit` writes them as one named computation per stage, with
these checkpoints around the items of each stage again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import Literal

from mpmd.jax_compat import place_of, rebind, scope_of
from mpmd.tracing.names import carrier, decode

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
        """The operation, or the user's name of it, and its place in the user's source."""
        kind, name = self._named
        place = place_of(self.equation)
        what = f"{_NAMED[kind]} {name!r}" if kind in _NAMED else self.equation.primitive.name
        return f"{what} ({place})" if place else what

    @property
    def why_whole(self) -> str:
        """The line of a message that says why a computation is not taken apart; "" for operations."""
        kind, name = self._named
        advice = f"\n  it stays whole because it is assigned: leave {name!r} out of the assignment"
        return advice if kind in _NAMED else ""

    @property
    def _named(self) -> tuple[str, str]:
        return decode(str(self.equation.params.get("name", ""))) or ("", "")


_NAMED = {"comp": "computation", "tensor": "tensor"}


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
        by_value: dict[int, list[Item]] = {v: [] for v in range(len(self.avals))}
        for item in self.items:
            for v in dict.fromkeys(item.reads):
                by_value[v].append(item)
        return by_value

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
        inlined_items, self.items = self.items, items
        return inlined_items, outputs

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


def emit(flat: FlatFunction, arguments: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Computes the results, stage by stage; items without a stage as soon as their inputs are known.

    Args:
        flat: an item that reads a value of a stage has this stage or a later one, or none.
        arguments: the values of its inputs.
        names: of the stages, in order.
    """
    emission = ItemEmission(flat)
    env: dict[int, Any] = {**flat.constants, **dict(zip(flat.inputs, arguments, strict=True))}
    unnamed = [item for item in flat.items if item.stage is None]
    for stage, name in enumerate(names):
        unnamed = emission.compute_ready(unnamed, env)
        own = [item for item in flat.items if item.stage == stage]
        if own:
            emission.compute_as(lambda of: carrier(of, "comp", name), own, env, 0)  # noqa: B023
    emission.compute_ready(unnamed, env)
    return [env[v] if isinstance(v, int) else v.val for v in flat.outputs]


def outside_of(
    flat: FlatFunction, items: Sequence[Item], readers: Mapping[int, Sequence[Item]]
) -> tuple[list[int], list[int]]:
    """The values that items read of others, and those of their own that others read, or that are results."""
    inside = {v for item in items for v in item.outputs}
    inputs = dict.fromkeys(v for item in items for v in item.reads if v not in inside)
    own, results = set(map(id, items)), set(numbers(flat.outputs))
    outputs = [
        v
        for item in items
        for v in item.outputs
        if v in results or any(id(reader) not in own for reader in readers[v])
    ]
    return list(inputs), outputs


class ItemEmission:
    """Computes items over an environment, which has the values by number."""

    def __init__(self, flat: FlatFunction) -> None:
        self.flat, self.readers = flat, flat.readers()

    def compute_ready(self, items: Sequence[Item], env: dict[int, Any]) -> list[Item]:
        """Computes the items whose inputs are known, under no checkpoint; returns the others."""
        waiting = []
        for item in items:
            if env.keys() >= set(item.reads):
                self.compute_item(item, env)
            else:
                waiting.append(item)
        return waiting

    def compute(self, items: Sequence[Item], env: dict[int, Any], depth: int) -> None:
        """Computes items in order; runs of items of one checkpoint are under a checkpoint again.

        Args:
            items: their inputs are in `env`, or outputs of earlier ones.
            env: gets the outputs.
            depth: how many checkpoints are around already.
        """
        for checkpoint, run in itertools.groupby(items, lambda item: (*item.checkpoints, None)[depth]):
            group = list(run)
            if checkpoint is not None:
                options = {"policy": checkpoint.policy, "prevent_cse": checkpoint.prevent_cse}
                self.compute_as(lambda of: jax.checkpoint(of, **options), group, env, depth + 1)  # noqa: B023
                continue
            for item in group:
                self.compute_item(item, env)

    def compute_item(self, item: Item, env: dict[int, Any]) -> None:
        values = [env[v] if isinstance(v, int) else v.val for v in item.inputs]
        env.update(zip(item.outputs, item.compute(*values), strict=True))

    def compute_as(self, transform: Any, items: list[Item], env: dict[int, Any], depth: int) -> None:
        """Computes items as one function under a transformation of JAX."""
        inputs, outputs = outside_of(self.flat, items, self.readers)

        def together(*values: Any) -> list[Any]:
            local = dict(zip(inputs, values, strict=True))
            self.compute(items, local, depth)
            return [local[v] for v in outputs]

        env.update(zip(outputs, transform(together)(*[env[v] for v in inputs]), strict=True))
