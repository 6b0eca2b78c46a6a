"""The same steps under plain `jax.jit`, and how far the pipeline is from them."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

from examples.pipelined_transformer.config import TrainConfig
from examples.pipelined_transformer.train_step import make_plain_step, whole_arrays
from mpmd.errors import MpmdError

# Adam divides a gradient by its own size, so that rounding errors of elements whose gradient is almost
# zero become steps of ordinary size: the parameters differ by much more than the gradients do.
# Measured over five steps of models of two to four stages: up to 9e-6 in float32, 4e-2 in bfloat16.
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-1}
_NO_GRADIENT = 1e-6


class CheckError(MpmdError):
    """The pipeline does not compute what plain `jax.jit` computes."""


class Check:
    """Runs steps with plain `jax.jit` beside those of the pipeline.

    Attributes:
        max_rel_diff: the largest relative difference of a parameter leaf or a loss so far.
        seconds: how long each plain step took.
    """

    def __init__(self, config: TrainConfig, state: TrainState, batch: np.ndarray) -> None:
        self._config, self._state = config, state
        self._step = make_plain_step(config).lower(state, batch).compile()
        self.max_rel_diff = 0.0
        self.seconds: list[float] = []

    def compare(self, step: int, batch: np.ndarray, state: TrainState, loss: Any) -> float:
        """Takes a plain step; the largest relative difference of `state` and `loss` from its results.

        Raises:
            CheckError: it is larger than rounding explains.
        """
        start = time.perf_counter()
        self._state, plain_loss = jax.block_until_ready(self._step(self._state, batch))
        self.seconds.append(time.perf_counter() - start)
        found = {
            "loss": abs(float(loss) - float(plain_loss)) / abs(float(plain_loss)),
            **parameter_differences(whole_arrays(state.params), self._state),
        }
        worst = max(found, key=lambda name: _or_infinity(found[name]))
        self.max_rel_diff = max(self.max_rel_diff, _or_infinity(found[worst]))
        tolerance = TOLERANCE[self._config.dtype]
        if not found[worst] <= tolerance:
            raise CheckError(
                f"step {step} of the pipeline differs from plain jax.jit\n  where: {worst}\n"
                f"  got: a relative difference of {found[worst]:.2e}\n  expected: at most {tolerance:.0e}"
            )
        return found[worst]


def parameter_differences(params: Any, plain: TrainState) -> dict[str, float]:
    """‖a - b‖ / ‖b‖ for each leaf; a leaf without gradient is judged against the norm of all parameters."""
    moments = jax.tree.leaves(optax.tree_utils.tree_get(plain.opt_state, "mu"))
    whole = _norm([_norm(leaf) for leaf in jax.tree.leaves(plain.params)])
    negligible = _NO_GRADIENT * _norm([_norm(moment) for moment in moments])
    found = {}
    leaves = jax.tree_util.tree_leaves_with_path(plain.params)
    for (path, leaf), ours, moment in zip(leaves, jax.tree.leaves(params), moments, strict=True):
        scale = _norm(leaf) if _norm(moment) > negligible else whole
        found[jax.tree_util.keystr(path)] = _norm(np.asarray(ours, np.float64) - np.asarray(leaf)) / scale
    return found


def _norm(leaf: Any) -> float:
    return float(np.linalg.norm(np.asarray(leaf, np.float64).ravel()))


def _or_infinity(difference: float) -> float:
    return difference if difference == difference else float("inf")
