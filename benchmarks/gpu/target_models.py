"""Do all test models give on a GPU, by our own target, what `jax.jit` gives?

Method: loss, gradients and a step of gradient descent of each model as one fragment, parameters donated,
compiled by the target; the same function by `jax.jit`.  Both have products in full f32.

What the answer means: a model that differs has a kernel, a product or an address that is wrong on the device
and right in Triton's interpreter; `largest` is the largest difference over the largest value of a result.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.gpu.experiment import Experiment, run_experiment

STEP = 0.1
LOOSER = 10  # than the tests, whose sums are exact to f64
FEW = ("mlp",)


def measure(run: Experiment) -> None:
    """Finds it out."""
    from examples.workloads.models import MODELS

    for name in MODELS if run.gpu else FEW:
        if run.has_time(name, 5):
            with run.part(name):
                compare(run, name, MODELS[name])


def compare(run: Experiment, name: str, model: Any) -> None:
    """One model, forward and backward."""
    import jax
    import jax.numpy as jnp

    from benchmarks.gpu.target import compiled, fragment_of

    params, loss, batch = model.build(2)
    leaves, tree = jax.tree.flatten(params)
    count = len(leaves)

    def step(*given: Any) -> list[Any]:
        params = jax.tree.unflatten(tree, given[:count])
        value, gradients = jax.value_and_grad(loss)(params, *given[count:])
        return [p - STEP * g for p, g in zip(given, jax.tree.leaves(gradients))] + [value]

    arguments = [np.asarray(jnp.asarray(a)) for a in (*leaves, *batch)]
    with jax.default_matmul_precision("highest"):
        wanted = [np.asarray(a, np.float32) for a in jax.jit(step)(*arguments)]
        fragment = fragment_of(name, step, arguments, range(count))
    made = compiled(run, fragment)
    program: Any = made.artefact.code
    run.figure(f"launches.{name}", len(list(program.program.launches())))
    worst = 0.0
    for _ in range(2):  # the second call has memory that the first has used
        found = made(*map(jnp.asarray, arguments))
        for got, want in zip(found, wanted, strict=True):
            distance = np.abs(np.asarray(got, np.float32) - want).max(initial=0.0)
            worst = max(worst, float(distance / max(1.0, np.abs(want).max(initial=0.0))))
    run.figure(f"largest.{name}", worst)
    limit = LOOSER * model.tolerance
    run.check(f"{name} equals jax.jit", worst <= limit, f"{worst:.1e}, allowed {limit:.0e}")


if __name__ == "__main__":
    run_experiment("target_models", __doc__, measure)
