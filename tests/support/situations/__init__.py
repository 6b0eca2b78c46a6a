"""Situations from public repositories, each run as it is under `mpmd.jit` and compared with `jax.jit`.

    python -m tests.support.situations            runs all of them, and prints a line for each
    python -m tests.support.situations NAME ...   those
    python -m tests.support.situations --page     writes docs/third-party.md

A situation is written anew in a few lines, as its source has it in a larger program: models, losses,
optimizers and habits are the source's, sizes are small.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpmd

FAMILIES = ("optimizers", "losses", "habits", "generative", "agents", "sequences")
SOURCE = re.compile(r"[\w.-]+/[\w.-]+(#\d+|:[\w./-]+\.(py|ipynb|md|yml))")
RUNNER_LINES = 2
"""Lines of configuration that all situations share: the topology, and the jit with its configuration."""


@dataclasses.dataclass(frozen=True)
class UserStep:
    """What a situation runs.

    Attributes:
        step: `step(state, *batch) -> (state, results)`.
        state: a pytree of arrays.
        batch: arrays.
        stages: of `mpmd.make_config`.
        steps: how many.
        tolerance: the largest relative difference of a leaf; gradients are added in another order.
        seen: a list that callbacks of the step append to.
    """

    step: Callable[..., Any]
    state: Any
    batch: tuple[Any, ...]
    stages: Any
    steps: int = 2
    tolerance: float = 2e-5
    seen: list[Any] | None = None


@dataclasses.dataclass(frozen=True)
class Situation:
    """One row of the table; the docstring of its function says in a line what the source does.

    Attributes:
        source: `owner/repository#number` or `owner/repository:path`.
        refused: words of the error, or nothing.
        build: makes the job.
    """

    source: str
    refused: str
    build: Callable[[], UserStep]

    @property
    def name(self) -> str:
        return self.build.__name__

    @property
    def title(self) -> str:
        return (self.build.__doc__ or "").strip().splitlines()[0].rstrip(".")

    @property
    def family(self) -> str:
        return self.build.__module__.rpartition(".")[2]

    @property
    def configuration_lines(self) -> int:
        """Lines that a program has for mpmd and not for `jax.jit`."""
        return RUNNER_LINES + sum("mpmd." in line for line in inspect.getsource(self.build).splitlines())


_FOUND: dict[str, Situation] = {}


def situation(
    source: str, *, refused: str = ""
) -> Callable[[Callable[[], UserStep]], Callable[[], UserStep]]:
    """Enters a function that makes a job into the table."""

    def enter(build: Callable[[], UserStep]) -> Callable[[], UserStep]:
        assert build.__name__ not in _FOUND, build.__name__
        _FOUND[build.__name__] = Situation(source, refused, build)
        return build

    return enter


def situations() -> list[Situation]:
    """All of them, family by family."""
    for family in FAMILIES:
        importlib.import_module(f"{__name__}.{family}")
    return sorted(_FOUND.values(), key=lambda one: FAMILIES.index(one.family))


def compiled_step(job: UserStep) -> Callable[..., Any]:
    """The step under `mpmd.jit`, with two meshes."""
    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    return mpmd.jit(job.step, mpmd.make_config(topology, stages=job.stages), donate_argnums=0)


def run(found: Situation) -> str:
    """Runs a situation both ways.

    Returns:
        A line: what differs at most, or the words of the refusal.

    Raises:
        AssertionError: results or the new state differ, or it is not refused as the table says.
    """
    job = found.build()
    if found.refused:
        try:
            compiled_step(job)(copied(job.state), *job.batch)
        except mpmd.errors.MpmdError as error:
            assert found.refused in str(error), str(error)
            return f"refused: {found.refused}"
        raise AssertionError("it was not refused")
    want = _outcome(jax.jit(job.step), job)
    got = _outcome(compiled_step(job), job)
    assert jax.tree.structure(got) == jax.tree.structure(want), "another tree"
    difference = _difference(got, want)
    assert difference <= job.tolerance, f"{difference:.1e}"
    return f"equal within {difference:.0e}" if difference else "equal"


def _outcome(step: Callable[..., Any], job: UserStep) -> Any:
    """States and results of all steps, and what was seen, in the order of its text."""
    state, results = copied(job.state), []
    if job.seen is not None:
        job.seen.clear()
    for _ in range(job.steps):
        state, of_step = step(state, *job.batch)
        results.append(mpmd.fetch(of_step))
    whole = mpmd.fetch(state)
    if job.seen is not None:
        jax.effects_barrier()
        results.append(sorted(map(float, job.seen)))
    return jax.tree.map(_readable, (whole, results))


def _readable(leaf: Any) -> np.ndarray:
    if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf)


def _difference(got: Any, want: Any) -> float:
    """The largest difference of a leaf, relative to it or a thousandth of the largest; integers are equal."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    norms = [float(np.linalg.norm(np.nan_to_num(_wide(b)).ravel())) for _, b in pairs]
    worst, least = 0.0, 1e-3 * max(norms)
    for (a, b), norm in zip(pairs, norms, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{a.dtype}{a.shape} instead of {b.dtype}{b.shape}"
        if not jnp.issubdtype(b.dtype, jnp.inexact):
            assert (a == b).all(), "integers differ"
            continue
        a, b = _wide(a), _wide(b)
        assert (np.isfinite(a) == np.isfinite(b)).all(), "other elements are not finite"
        apart = float(np.linalg.norm(np.nan_to_num(a - b, nan=0.0).ravel()))
        worst = max(worst, apart / max(norm, least, 1e-30))
    return worst


def _wide(leaf: np.ndarray) -> np.ndarray:
    return leaf.astype(np.complex128 if np.iscomplexobj(leaf) else np.float64)


def copied(tree: Any) -> Any:
    """Fresh copies of all arrays, so that donation does not reach the originals."""
    return jax.tree.map(lambda leaf: leaf.copy() if hasattr(leaf, "copy") else leaf, tree)
