"""Random graphs whose meshes have several devices, with rows and weights split over them."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.errors import ScheduleError
from tests.support.comparing import copied, relative_difference
from tests.support.evaluate_mpmd import evaluate
from tests.support.random_graphs import TOLERANCE, draw_graph
from tests.support.random_steps import RandomStep

SCHEDULES = ("gpipe", "1f1b", "zb_h1", "interleaved_1f1b")
_WHOLE_VALUES = {"disable_passes": ("mpmd-lower-reductions", "mpmd-lower-gathers")}
"""Sums as reductions of whole values, not device by device: how they can be evaluated."""


@dataclasses.dataclass(frozen=True)
class SplitGraph:
    """A graph that trains on meshes that are alike, and how its arguments lie on them.

    Attributes:
        graph: the graph.
        weights: for each of its two weights the dims that are split, by axis.
        options: of the pipeline.
    """

    graph: RandomStep
    weights: tuple[P, P]
    options: mpmd.PipelineOptions

    def __str__(self) -> str:
        return f"{self.graph}\n  weights {self.weights}, {self.options}"

    def lowered(self) -> Any:
        """The partitioned step."""
        a, b = self.weights
        config = dataclasses.replace(
            self.graph.config(),
            in_shardings=({"a": a, "b": b, "unused": P()}, P("x"), P("x")),
            options=self.options,
        )
        return mpmd.jit(self.graph.step(), config).lower(*self.graph.arguments())


def draw_split(seed: int) -> SplitGraph:
    """The graph that a number stands for."""
    rng = random.Random(seed)
    graph = draw_graph(seed)
    axes = rng.choice([{"x": 2}, {"x": 2, "y": 2}, {"y": 2, "x": 2}, {"x": 4}])
    graph = dataclasses.replace(
        graph,
        meshes=dict.fromkeys(graph.meshes, axes),
        kind=rng.choice(["train", "train", "train", "twice", "eval"]),
        microbatches=rng.choice([2, 3, 4]),
        schedule=rng.choice(SCHEDULES),
        sharded=False,
    )
    names = [None, "x", *(axis for axis in axes if axis != "x")]
    weights = tuple(P(rng.choice(names)) if rng.random() < 0.5 else P(None, rng.choice(names)) for _ in "ab")
    options = mpmd.PipelineOptions(
        reduce_gradients=rng.choice(["once", "once", "once", "per_microbatch"]),
        gather_weights=rng.choice(["once", "once", "once", "per_use"]),
        **_WHOLE_VALUES,
    )
    return SplitGraph(graph, weights, options)


def outcome(split: SplitGraph) -> tuple[str, bool]:
    """How it differs from `jax.jit`, "" if it does not or cannot be; and whether a sum was deferred."""
    arguments = split.graph.arguments()
    try:
        lowered = split.lowered()
    except ScheduleError:
        return "", False
    want = jax.tree.leaves(jax.jit(split.graph.step())(*copied(arguments)))
    got = evaluate(lowered.partitioned.module, [np.asarray(leaf) for leaf in jax.tree.leaves(arguments)])
    difference = relative_difference(list(got), want)
    if difference > TOLERANCE:  # a comparison may fall otherwise where NumPy's tanh is not XLA's
        difference = relative_difference(jax.tree.leaves(lowered.compile()(*copied(arguments))), want)
    deferred = any("_reduce." in name for name in lowered.fragments)
    return (f"{split}\ndiffers by {difference:.1e}" if difference > TOLERANCE else ""), deferred
