"""Random steps: named and unnamed computations in any order, with and without loops and gradients.

A step is drawn from a number, as plain data, and then built; `str` of it says what it computes.  All arrays
are `f32[4,4]`, and everything that is computed stays small.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import mpmd

N = 4
ROWS = 4  # of every microbatch

UNARY: dict[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "transposed": lambda a: a.T,
    "softmax": jax.nn.softmax,
    "rows summed": lambda a: jnp.broadcast_to(a.sum(0), a.shape) / N,
    "flipped": lambda a: a[::-1],
    "first rows": lambda a: jnp.concatenate([a[:2], jnp.ones((2, N))]),
    "scanned": lambda a: jax.lax.scan(lambda c, row: (jnp.tanh(c + row),) * 2, jnp.zeros(N), a)[1],
    "stopped": jax.lax.stop_gradient,
    "half": lambda a: a.astype(jnp.bfloat16).astype(jnp.float32) / 2,
    "if": lambda a: jax.lax.cond(a.sum() > 0, jnp.tanh, jnp.cos, a),
}


def sharded(*dims: str | None) -> Callable[[Any], Any]:
    """A sharding constraint where there are meshes, and nothing under plain `jax.jit`."""

    def constrained(a: Any) -> Any:
        here = jax.sharding.get_abstract_mesh()
        return a if here.empty else jax.lax.with_sharding_constraint(a, P(*dims))

    return constrained


CONSTRAINTS = {"rows sharded": sharded("x"), "columns sharded": sharded(None, "x")}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: (a + b) / 2,
    "mul": lambda a, b: a * b,
    "matmul": lambda a, b: jnp.tanh(a @ b),
    "where": lambda a, b: jnp.where(a > b, a, jnp.sin(b)),
    "max": jnp.maximum,
}


@dataclasses.dataclass(frozen=True)
class Expression:
    """A chain of operations on some operands: each entry combines what was found so far with an operand."""

    unary: tuple[str, ...]
    binary: tuple[str, ...]

    def __call__(self, *operands: Any) -> Any:
        value = operands[0]
        for i, name in enumerate(self.binary):
            value = BINARY[name](value, operands[(i + 1) % len(operands)])
        for name in self.unary:
            value = (UNARY | CONSTRAINTS)[name](value)
        return value

    def __str__(self) -> str:
        return ", ".join((*self.binary, *self.unary)) or "nothing"


@dataclasses.dataclass(frozen=True)
class Statement:
    """One computation: expressions over earlier values, under a name or none.

    Attributes:
        name: of the computation, None for unnamed work.
        operands: numbers of earlier values.
        results: an expression for each value that it makes.
        remat: whether `jax.checkpoint` stands around it.
        tensor: a name for its first result, None for none.
    """

    name: str | None
    operands: tuple[int, ...]
    results: tuple[Expression, ...]
    remat: bool = False
    tensor: str | None = None

    def __call__(self, values: list[Any]) -> list[Any]:
        def body(*operands: Any) -> tuple[Any, ...]:
            return tuple(expression(*operands) for expression in self.results)

        fn = body if self.name is None else mpmd.named_computation(body, name=self.name)
        fn = jax.checkpoint(fn) if self.remat else fn
        first, *others = fn(*(values[i] for i in self.operands))
        if self.tensor is not None:
            first = mpmd.named_tensor(first, self.tensor)
        return [first, *others]


@dataclasses.dataclass(frozen=True)
class RandomStep:
    """A step and how it is run.

    Attributes:
        seed: what it was drawn from.
        meshes: axis sizes of every mesh.
        assignment: name -> mesh, or mesh and stage.
        statements: what one microbatch computes, from `params` (2) and the rows of two batches.
        loss: which values are summed to a scalar.
        auxiliary: which values are given out for every microbatch.
        kind: "forward" for no loop, "grad" for gradients without one, "eval" for a loop without gradients,
            "train" for accumulated gradients and an update, "carry" for a loop that carries an array,
            "twice" for "train" and then "eval" with the new parameters.
        microbatches: how many.
        schedule: its name.
        donate: whether the parameters are donated.
        sharded: whether batches are sharded over the first axis.
        clip: whether gradients are clipped by their global norm.
    """

    seed: int
    meshes: dict[str, dict[str, int]]
    assignment: dict[str, Any]
    statements: tuple[Statement, ...]
    loss: tuple[int, ...]
    auxiliary: tuple[int, ...]
    kind: str
    microbatches: int
    schedule: str
    donate: bool
    sharded: bool
    clip: bool

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: {self.kind}, {self.microbatches} microbatches, {self.schedule}"
            f"{', donated' * self.donate}{', sharded' * self.sharded}{', clipped' * self.clip}",
            f"  meshes {self.meshes}, assignment {self.assignment}",
        ]
        number = INPUTS
        for s in self.statements:
            made = ", ".join(f"%{number + i}" for i in range(len(s.results)))
            number += len(s.results)
            lines.append(
                f"  {made} = {s.name or 'unnamed'}({', '.join(f'%{i}' for i in s.operands)}): "
                f"{'; '.join(map(str, s.results))}{' (checkpoint)' * s.remat}"
                f"{f' named {s.tensor}' if s.tensor else ''}"
            )
        return "\n".join([*lines, f"  loss of {self.loss}, auxiliary {self.auxiliary}"])

    def computed(self, params: Any, x: Any, y: Any, carry: Any) -> list[Any]:
        """All values of one microbatch."""
        values = [params["a"], params["b"], x, y, carry]
        for statement in self.statements:
            values += statement(values)
        return values

    def loss_and_aux(self, params: Any, x: Any, y: Any, carry: Any) -> Any:
        """A scalar, and the auxiliary values."""
        values = self.computed(params, x, y, carry)
        return sum((values[i] ** 2).mean() for i in self.loss), tuple(values[i] for i in self.auxiliary)

    def step(self) -> Callable[..., Any]:
        """`step(params, x, y)`."""
        return getattr(self, f"_{self.kind}")

    def _forward(self, params: Any, x: Any, y: Any) -> Any:
        return self.loss_and_aux(params, x, y, x)

    def _grad(self, params: Any, x: Any, y: Any) -> Any:
        return jax.value_and_grad(self.loss_and_aux, has_aux=True)(params, x, y, y)

    def _eval(self, params: Any, x: Any, y: Any) -> Any:
        def body(total: Any, x: Any, y: Any) -> Any:
            loss, aux = self.loss_and_aux(params, x, y, y)
            return (total[0] + loss, jnp.maximum(total[1], loss)), (loss, aux)

        zero = jnp.float32(0)
        return mpmd.microbatch_loop(body, (zero, zero), x, y, num_microbatches=self.microbatches)

    def _carry(self, params: Any, x: Any, y: Any) -> Any:
        def body(carry: Any, x: Any, y: Any) -> Any:
            values = self.computed(params, x, y, carry)
            return values[self.loss[0]], values[self.loss[-1]].sum()

        return mpmd.microbatch_loop(body, jnp.ones((N, N)), x, y, num_microbatches=self.microbatches)

    def _train(self, params: Any, x: Any, y: Any) -> Any:
        def loss(params: Any, x: Any, y: Any) -> Any:
            return self.loss_and_aux(params, x, y, x)

        accumulate = mpmd.accumulate_gradients(loss, self.microbatches, has_aux=True)
        (value, aux), grads = accumulate(params, x, y)
        if self.clip:
            norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
            grads = jax.tree.map(lambda g: g / (1 + norm), grads)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, aux, params["b"], 1.0

    def _twice(self, params: Any, x: Any, y: Any) -> Any:
        params, *others = self._train(params, x, y)
        return params, others, self._eval(params, x, y)

    def arguments(self) -> tuple[Any, ...]:
        """Parameters and two batches, as host arrays."""
        rng = np.random.default_rng(self.seed)
        rows = ROWS * (self.microbatches if self.kind not in ("forward", "grad") else 1)
        draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
        return {"a": draw(N, N), "b": draw(N, N), "unused": draw(2)}, draw(rows, N), draw(rows, N)

    def config(self, schedule: str = "") -> mpmd.Config:
        """The meshes, the places of the names that are called, and a schedule: its own if none is given."""
        used = {s.name for s in self.statements} | {s.tensor for s in self.statements}
        assignment = {name: place for name, place in self.assignment.items() if name in used}
        specs = {"in_shardings": (None, P("x"), P("x"))} if self.sharded else {}
        topology = mpmd.make_topology(self.meshes)
        return mpmd.make_config(topology, assignment, schedule=schedule or self.schedule, **specs)

    def jitted(self) -> Any:
        """The step under `mpmd.jit`."""
        return mpmd.jit(self.step(), self.config(), donate_argnums=0 if self.donate else ())


INPUTS = 5
"""Values that every microbatch begins with: two parameters, two batches, a carried array."""


def draw(seed: int) -> RandomStep:
    """The step that a number stands for."""
    rng = random.Random(seed)
    num_meshes = rng.choice([1, 2, 2, 3, 3, 4])
    devices = rng.choice([1, 1, 2])
    alike = rng.random() < 0.7
    meshes = {f"m{i}": {"x": devices if alike else rng.choice([1, 2])} for i in range(num_meshes)}
    statements: list[Statement] = []
    available = INPUTS
    names = [f"f{i}" for i in range(rng.randint(1, 4))]
    for number in range(rng.randint(2, 7)):
        named = number == 0 or rng.random() < 0.65
        operands = tuple(_operand(rng, available) for _ in range(rng.randint(1, 3)))
        results = tuple(_expression(rng, len(operands)) for _ in range(rng.choice([1, 1, 1, 2])))
        statements.append(
            Statement(
                rng.choice(names) if named else None,
                operands,
                results,
                remat=rng.random() < 0.2,
                tensor=f"t{number}" if rng.random() < 0.1 else None,
            )
        )
        available += len(results)
    kinds = ["forward", "grad", "eval", "train", "train", "train", "carry"]
    places = [*names, *(s.tensor for s in statements if s.tensor)]
    return RandomStep(
        seed=seed,
        meshes=meshes,
        assignment={name: rng.choice(list(meshes)) for name in places},
        statements=tuple(statements),
        loss=tuple(rng.sample(range(INPUTS, available), rng.randint(1, min(3, available - INPUTS)))),
        auxiliary=tuple(rng.choices(range(available), k=rng.randint(0, 3))),
        kind=rng.choice(kinds),
        microbatches=rng.choice([1, 2, 3, 4]),
        schedule=rng.choice(["gpipe", "1f1b"]),
        donate=rng.random() < 0.5,
        sharded=rng.random() < 0.5,
        clip=rng.random() < 0.5,
    )


def _operand(rng: random.Random, available: int) -> int:
    """An earlier value; late ones are likelier, so that chains become long."""
    return rng.randrange(available) if rng.random() < 0.5 else rng.randrange(max(0, available - 3), available)


def _expression(rng: random.Random, operands: int) -> Expression:
    unary = rng.choices(list(UNARY), k=rng.randint(0, 2))
    binary = rng.choices(list(BINARY), k=operands - 1 if operands > 1 else rng.randint(0, 1))
    return Expression(tuple(unary), tuple(binary))
