"""Random graphs of stages with values of several types, control flow inside of stages, and several loops.

What `random_graphs` draws is all `f32[4,4]` in one loop over microbatches.  Here values are matrices,
vectors, integers and masks; stages hold scans, loops and conditionals, return what they compute on the way,
capture values, and share weights; constraints may be anywhere; a step may have two loops, and a named
optimizer.

    python -m tests.support.wide_graphs FIRST END      reports on the graphs of these seeds
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.random_graphs import main, meshes, places
from tests.support.random_steps import BINARY, UNARY, N, sharded

MATRIX, VECTOR, HALF, IDS, MASK = "matrix", "vector", "half", "ids", "mask"
FLOATS = (MATRIX, VECTOR, HALF)


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation: the types of its operands and of its result, and what it computes."""

    operands: tuple[str, ...]
    result: str
    fn: Callable[..., Any]


@jax.custom_vjp
def _scaled_backward(a: Any) -> Any:
    return a * 1.5


_scaled_backward.defvjp(lambda a: (a * 1.5, a), lambda a, g: (g * jnp.cos(a),))


def _layers(a: Any, w: Any) -> Any:
    return jax.lax.scan(lambda h, scale: (jnp.tanh(h @ w * scale), None), a, jnp.array([1.0, 0.5, 0.25]))[0]


def _remat_layers(a: Any, w: Any) -> Any:
    layer = jax.checkpoint(lambda h: jnp.sin(sharded("x")(h) @ w))
    return jax.lax.scan(lambda h, _: (layer(h), h[0]), a, length=3)[0]


def _halved_while_large(a: Any) -> Any:
    a = jax.lax.stop_gradient(a)
    return jax.lax.while_loop(lambda s: (jnp.abs(s) > 1).any(), lambda s: s * 0.5, a)


def _dropout(a: Any) -> Any:
    return jnp.where(jax.random.bernoulli(jax.random.key(7), 0.7, a.shape), a, 0.0)


OPS: dict[str, Op] = {
    **{name: Op((MATRIX,), MATRIX, fn) for name, fn in UNARY.items()},
    **{name: Op((MATRIX, MATRIX), MATRIX, fn) for name, fn in BINARY.items()},
    "rows sharded": Op((MATRIX,), MATRIX, sharded("x")),
    "columns sharded": Op((MATRIX,), MATRIX, sharded(None, "x")),
    "replicated": Op((MATRIX,), MATRIX, sharded()),
    "vector sharded": Op((VECTOR,), VECTOR, sharded("x")),
    "layers": Op((MATRIX, MATRIX), MATRIX, _layers),
    "remat layers": Op((MATRIX, MATRIX), MATRIX, _remat_layers),
    "repeated": Op(
        (MATRIX, MATRIX), MATRIX, lambda a, b: jax.lax.fori_loop(0, 3, lambda i, s: (s + b * i) / 2, a)
    ),
    "halved while large": Op((MATRIX,), MATRIX, _halved_while_large),
    "either": Op(
        (MATRIX, MATRIX),
        MATRIX,
        lambda a, b: jax.lax.cond(a[0, 0] > 0, lambda: jnp.tanh(a @ b), lambda: a - b),
    ),
    "chosen": Op(
        (IDS, MATRIX),
        MATRIX,
        lambda i, a: jax.lax.switch(
            i[0], [jnp.tanh, jnp.sin, lambda a: sharded("x")(a) / 2, lambda a: a.T], a
        ),
    ),
    "for each row": Op((MATRIX, VECTOR), MATRIX, lambda a, v: jax.vmap(lambda r: jnp.tanh(r * v))(a)),
    "own gradient": Op((MATRIX,), MATRIX, _scaled_backward),
    "sorted": Op((MATRIX,), MATRIX, lambda a: jnp.sort(a, axis=0)),
    "summed up": Op((MATRIX,), MATRIX, lambda a: jnp.cumsum(a, axis=1) / N),
    "dropout": Op((MATRIX,), MATRIX, _dropout),
    "embedding": Op((MATRIX, IDS), MATRIX, lambda table, i: table[i]),
    "logits": Op((MATRIX, MATRIX), MATRIX, lambda a, table: jnp.tanh(a @ table.T)),
    "one hot": Op((IDS,), MATRIX, lambda i: jax.nn.one_hot(i, N)),
    "picked": Op((MATRIX, IDS), VECTOR, lambda a, i: jnp.take_along_axis(a, i[:, None], 1)[:, 0]),
    "row means": Op((MATRIX,), VECTOR, lambda a: a.mean(1)),
    "rows scaled": Op((VECTOR, MATRIX), MATRIX, lambda v, a: v[:, None] * a),
    "outer": Op((VECTOR, VECTOR), MATRIX, lambda u, v: jnp.outer(u, v)),
    "vector tanh": Op((VECTOR,), VECTOR, jnp.tanh),
    "largest": Op((MATRIX,), IDS, lambda a: jnp.argmax(a, 1).astype(jnp.int32)),
    "next ids": Op((IDS,), IDS, lambda i: (i + 1) % N),
    "greater": Op((MATRIX, MATRIX), MASK, lambda a, b: a > b),
    "masked": Op((MASK, MATRIX), MATRIX, lambda m, a: jnp.where(m, a, 0.0)),
    "not": Op((MASK,), MASK, jnp.logical_not),
    "to half": Op((MATRIX,), HALF, lambda a: a.astype(jnp.bfloat16)),
    "half doubled": Op((HALF,), HALF, lambda a: a * 2),
    "from half": Op((HALF,), MATRIX, lambda a: a.astype(jnp.float32)),
}

INPUTS = {
    "a": MATRIX,
    "b": MATRIX,
    "c": MATRIX,
    "v": VECTOR,
    "x": MATRIX,
    "y": MATRIX,
    "ids": IDS,
    "carried": MATRIX,
}
PARAMETERS = ("a", "b", "c", "v")
KINDS = (
    "forward",
    "grad",
    "eval",
    "carry",
    "train",
    "train",
    "train",
    "two losses",
    "eval first",
    "train twice",
)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A computation under a name or none.

    Attributes:
        name: None for unnamed work.
        operands: numbers of earlier values.
        captured: how many of the operands, the last ones, are captured rather than given.
        ops: names of operations with the numbers of their operands among its operands and earlier results.
        results: numbers, among its operands and results of operations, of what it returns.
        remat: whether `jax.checkpoint` is around it.
    """

    name: str | None
    operands: tuple[int, ...]
    captured: int
    ops: tuple[tuple[str, tuple[int, ...]], ...]
    results: tuple[int, ...]
    remat: bool

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        operands = [values[i] for i in self.operands]
        given = len(operands) - self.captured

        def body(*arguments: Any) -> tuple[Any, ...]:
            local = [*arguments, *operands[given:]]
            for name, numbers in self.ops:
                local.append(OPS[name].fn(*(local[i] for i in numbers)))
            return tuple(local[i] for i in self.results)

        fn = body if self.name is None else mpmd.named_computation(body, name=self.name)
        return list((jax.checkpoint(fn) if self.remat else fn)(*operands[:given]))


@dataclasses.dataclass(frozen=True)
class WideStep:
    """A step and where it runs.

    Attributes:
        seed: what it was drawn from.
        meshes: axis sizes of every mesh.
        assignment: name -> mesh, or mesh and stage.
        stages: what a microbatch computes.
        losses: for the first and for the second loop: which values are summed to a scalar.
        auxiliary: for either loop: which values are given out for every microbatch.
        kind: one of `KINDS`.
        microbatches: how many.
        donate: whether the parameters are donated.
        sharded: whether batches are sharded over the first axis.
        optimizer: a name for the update, None for none.
    """

    seed: int
    meshes: dict[str, dict[str, int]]
    assignment: dict[str, Any]
    stages: tuple[Stage, ...]
    losses: tuple[tuple[int, ...], tuple[int, ...]]
    auxiliary: tuple[tuple[int, ...], tuple[int, ...]]
    kind: str
    microbatches: int
    donate: bool
    sharded: bool
    optimizer: str | None

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: {self.kind}, {self.microbatches} microbatches",
            f"  {self.meshes}, {self.assignment}",
        ]
        number = len(INPUTS)
        lines.append("  inputs " + ", ".join(f"%{i} {name}" for i, name in enumerate(INPUTS)))
        for s in self.stages:
            made = ", ".join(f"%{number + i}" for i in range(len(s.results)))
            number += len(s.results)
            lines.append(
                f"  {made} = {s.name}({', '.join(f'%{i}' for i in s.operands)}), {s.captured} captured, "
                f"returns {s.results}: {'; '.join(f'{n}{i}' for n, i in s.ops)}{' (checkpoint)' * s.remat}"
            )
        return "\n".join(
            [*lines, f"  losses {self.losses}, auxiliary {self.auxiliary}, optimizer {self.optimizer}"]
        )

    def computed(self, params: Any, x: Any, y: Any, ids: Any, carried: Any) -> list[Any]:
        """All values of one microbatch."""
        values = [*(params[name] for name in PARAMETERS), x, y, ids, carried]
        for stage in self.stages:
            values += stage(values)
        return values

    def loss(self, number: int) -> Callable[..., Any]:
        """A function of parameters and batches: a scalar, and auxiliary values."""

        def loss(params: Any, x: Any, y: Any, ids: Any) -> Any:
            values = self.computed(params, x, y, ids, y)
            total = sum((values[i].astype(jnp.float32) ** 2).mean() for i in self.losses[number])
            return total, tuple(values[i] for i in self.auxiliary[number])

        return loss

    def updated(self, params: Any, grads: Any, rate: Any) -> Any:
        """New parameters, under a name if the optimizer has one."""

        def update(params: Any, grads: Any, rate: Any) -> Any:
            return jax.tree.map(lambda p, g: p - rate * g, params, grads)

        fn = update if self.optimizer is None else mpmd.named_computation(update, name=self.optimizer)
        return fn(params, grads, rate)

    def evaluated(self, number: int, params: Any, *batches: Any) -> Any:
        """A loop without gradients."""

        def body(total: Any, *batch: Any) -> Any:
            loss, aux = self.loss(number)(params, *batch)
            return total + loss, (loss, aux)

        return mpmd.microbatch_loop(body, jnp.float32(0), *batches, num_microbatches=self.microbatches)

    def gradients(self, number: int, params: Any, *batches: Any) -> Any:
        """A loop with gradients."""
        return mpmd.accumulate_gradients(self.loss(number), self.microbatches, has_aux=True)(params, *batches)

    def step(self) -> Callable[..., Any]:
        """`step(params, count, x, y, ids)`."""
        of_kind = getattr(self, f"_{self.kind.replace(' ', '_')}")
        return lambda params, count, *batches: (of_kind(params, 0.1 / count, *batches), count + 1)

    def _forward(self, params: Any, rate: Any, *batches: Any) -> Any:
        return self.loss(0)(params, *batches)

    def _grad(self, params: Any, rate: Any, *batches: Any) -> Any:
        return jax.value_and_grad(self.loss(0), has_aux=True)(params, *batches)

    def _eval(self, params: Any, rate: Any, *batches: Any) -> Any:
        return self.evaluated(0, params, *batches)

    def _carry(self, params: Any, rate: Any, *batches: Any) -> Any:
        def body(carried: Any, *batch: Any) -> Any:
            values = self.computed(params, *batch, carried)
            matrices = [v for v in values[len(INPUTS) :] if v.shape == (N, N) and v.dtype == jnp.float32]
            return [batch[0], *matrices][-1], tuple(values[i] for i in self.auxiliary[0])

        return mpmd.microbatch_loop(body, jnp.ones((N, N)), *batches, num_microbatches=self.microbatches)

    def _train(self, params: Any, rate: Any, *batches: Any) -> Any:
        value, grads = self.gradients(0, params, *batches)
        return self.updated(params, grads, rate), value

    def _two_losses(self, params: Any, rate: Any, *batches: Any) -> Any:
        first, grads = self.gradients(0, params, *batches)
        second, others = self.gradients(1, params, *batches)
        return self.updated(params, jax.tree.map(jnp.add, grads, others), rate), first, second

    def _eval_first(self, params: Any, rate: Any, *batches: Any) -> Any:
        total, aux = self.evaluated(1, params, *batches)
        value, grads = self.gradients(0, params, *batches)
        return self.updated(params, grads, rate / (1 + total)), value, aux

    def _train_twice(self, params: Any, rate: Any, *batches: Any) -> Any:
        params, first = self._train(params, rate, *batches)
        second, grads = self.gradients(1, params, *batches)
        return self.updated(params, grads, rate), first, second

    def arguments(self) -> tuple[Any, ...]:
        """Parameters, a counter, two batches of rows and one of integers, as host arrays."""
        rng = np.random.default_rng(self.seed)
        rows = N * (self.microbatches if self.kind not in ("forward", "grad") else 1)
        draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
        params = {name: draw(N, N) if INPUTS[name] == MATRIX else draw(N) for name in PARAMETERS}
        return params, np.int32(1), draw(rows, N), draw(rows, N), rng.integers(N, size=rows).astype(np.int32)

    def config(self, schedule: str) -> mpmd.Config:
        """The meshes, the places of the names that are called, and a schedule."""
        used = {stage.name for stage in self.stages}
        updates = self.kind in ("train", "two losses", "eval first", "train twice")
        used |= {self.optimizer} if updates else set()
        assignment = {name: place for name, place in self.assignment.items() if name in used}
        specs = {"in_shardings": (None, None, P("x"), P("x"), P("x"))} if self.sharded else {}
        return mpmd.make_config(mpmd.make_topology(self.meshes), assignment, schedule=schedule, **specs)

    def jitted(self) -> Any:
        """The step under `mpmd.jit`."""
        return mpmd.jit(self.step(), self.config("gpipe"), donate_argnums=0 if self.donate else ())


def draw_wide(seed: int) -> WideStep:
    """The graph that a number stands for."""
    rng = random.Random(seed)
    of_meshes = meshes(rng)
    if rng.random() < 0.35:
        names, assignment = _pipeline(rng, list(of_meshes))
        order: list[str | None] = list(names)
    else:
        names = [f"f{i}" for i in range(rng.randint(1, 5))]
        assignment = places(rng, names, list(of_meshes))
        order = [rng.choice(names) if not i or rng.random() < 0.8 else None for i in range(rng.randint(2, 8))]
    types = list(INPUTS.values())
    stages: list[Stage] = []
    for name in order:
        stages.append(_stage(rng, name, types, len(stages)))
        local = [types[i] for i in stages[-1].operands] + [OPS[op].result for op, _ in stages[-1].ops]
        types += [local[i] for i in stages[-1].results]
    optimizer = "opt" if rng.random() < 0.2 else None
    return WideStep(
        seed=seed,
        meshes=of_meshes,
        assignment=assignment | {"opt": rng.choice(list(of_meshes))},
        stages=tuple(stages),
        losses=(_losses(rng, types), _losses(rng, types)),
        auxiliary=tuple(tuple(rng.choices(range(len(types)), k=rng.randint(0, 3))) for _ in range(2)),
        kind=rng.choice(KINDS),
        microbatches=rng.choice([1, 2, 2, 3, 4]),
        donate=rng.random() < 0.3,
        sharded=rng.random() < 0.3,
        optimizer=optimizer,
    )


def _pipeline(rng: random.Random, of_meshes: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Names that follow each other over the meshes: once, in turn, or down and up again; numbered or not."""
    turn = rng.choice([of_meshes, [*of_meshes, *of_meshes], [*of_meshes, *of_meshes[::-1]]])
    names = [f"f{i}" for i in range(len(turn))]
    numbered = rng.random() < 0.6
    return names, {name: (mesh, i) if numbered else mesh for i, (name, mesh) in enumerate(zip(names, turn))}


def _stage(rng: random.Random, name: str | None, types: Sequence[str], number: int) -> Stage:
    """A computation over earlier values, of which late ones are likelier."""
    latest = range(max(0, len(types) - 3), len(types))
    operands = [
        rng.choice(latest if number and rng.random() < 0.7 else range(len(types)))
        for _ in range(rng.randint(1, 3))
    ]
    operands += [rng.randrange(len(PARAMETERS)) for _ in range(rng.choice([0, 1, 1]))]
    local = [types[i] for i in operands]
    ops: list[tuple[str, tuple[int, ...]]] = []
    for _ in range(rng.randint(1, 4)):
        possible = [op for op, of in OPS.items() if all(kind in local for kind in of.operands)]
        op = rng.choice(possible)
        ops.append(
            (
                op,
                tuple(rng.choice([i for i, t in enumerate(local) if t == kind]) for kind in OPS[op].operands),
            )
        )
        local.append(OPS[op].result)
    results = [len(local) - 1, *rng.choices(range(len(local)), k=rng.choice([0, 0, 1, 2]))]
    captured = rng.choice([0, 0, 0, 1]) if len(operands) > 1 else 0
    return Stage(name, tuple(operands), captured, tuple(ops), tuple(results), remat=rng.random() < 0.15)


def _losses(rng: random.Random, types: Sequence[str]) -> tuple[int, ...]:
    floats = [i for i, kind in enumerate(types) if kind in FLOATS]
    late = [i for i in floats if i >= len(INPUTS)] or floats
    return tuple(rng.sample(late, rng.randint(1, min(3, len(late)))))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)
    main(int(sys.argv[1]), int(sys.argv[2]), draw_wide)
