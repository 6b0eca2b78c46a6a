"""Are stages that are found as good as stages by hand, and are plans predicted rightly?

    python benchmarks/plan_quality.py [--rounds 12] [--models separate,scanned] [--plans scanned]

Two meshes of one device each.  Each of the models runs with stages by hand and with `stages="auto"`, in
turns; the shortest step of each counts.  Then a plan is searched for some of the models.  Its first
candidates are predicted from their measured fragments, and the median steps of the three that are predicted
to be fastest are compared with that; all of it is measured in turns.  The order is right if no candidate that
is predicted to be faster is slower than a later one, but for noise, which is printed.  Last, a model of 48
layers is planned for 8 described devices.  The last line is one JSON object: `auto_over_hand` is the
geometric mean of the ratios of steps, `predicted_over_measured` the one furthest from 1, `order_right`
whether all orders are right, `search_s` the seconds of the last search, and `stack_bytes_crossing` the bytes
of rows of stacked parameters in messages.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mpmd
from benchmarks import script
from benchmarks.plan_models import MODELS, Model
from mpmd.planning.measure import CandidateSteps

MICROBATCHES = (4, 8, 16)
PLANNED = "separate,scanned"
MEASURED = 4


def train_step(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Gradient descent with any number of microbatches."""

    def step(params: Any, *batch: Any, num_microbatches: int = 8) -> Any:
        value, grads = mpmd.accumulate_gradients(loss, num_microbatches)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    return step


class TimedStep:
    """A compiled step on its own parameters."""

    def __init__(self, step: Callable[..., Any], config: mpmd.Config, model: Model) -> None:
        params, _, batch, _ = model
        self.step = mpmd.jit(step, config)
        self.arguments = (params, *batch)
        self.params, self.batch = params, batch
        self.seconds: list[float] = []
        self.params, _ = jax.block_until_ready(self.step(*self.arguments))

    def run(self) -> None:
        """One step, timed to its end."""
        start = time.perf_counter()
        self.params, _ = jax.block_until_ready(self.step(self.params, *self.batch))
        self.seconds.append(time.perf_counter() - start)

    def program(self) -> Any:
        """Its instruction streams."""
        return self.step.compiled(*self.arguments).program


def in_turns(steps: Sequence[TimedStep], rounds: int) -> None:
    """Runs the steps one after the other, again and again; the first round does not count."""
    counted = [len(step.seconds) for step in steps]
    for _ in range(rounds + 1):
        for step in steps:
            step.run()
    for step, begin in zip(steps, counted, strict=True):
        del step.seconds[begin]


def compare_with_hand(name: str, rounds: int) -> tuple[float, int]:
    """Seconds of a step with found stages, in units of stages by hand; and bytes of stacks that are sent."""
    model = MODELS[name]()
    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    step = train_step(model[1])
    steps = [TimedStep(step, mpmd.make_config(topology, stages=s), model) for s in ("auto", model[3])]
    in_turns(steps, rounds)
    auto, hand = (min(timed.seconds) for timed in steps)
    sent = stack_bytes(model, steps[0].program()) if name == "scanned" else 0
    print(f"{name:16} auto {auto * 1e3:7.2f} ms, by hand {hand * 1e3:7.2f} ms, ratio {auto / hand:.3f}")
    return auto / hand, sent


def stack_bytes(model: Model, program: Any) -> int:
    """Bytes of messages that are as large as some rows of a stacked parameter."""
    stacks = [leaf.shape for leaf in jax.tree.leaves(model[0]["layers"])]
    rows = {(count, *shape[1:]) for shape in stacks for count in range(1, shape[0] + 1)}
    types = [kind for channel in program.channels for kind in channel.types]
    return sum(kind.bytes for kind in types if tuple(kind.shape) in rows)


def compare_with_measured(name: str, rounds: int) -> tuple[list[float], bool]:
    """Ratios of predicted to measured seconds of the first three plans, and whether their order is right.

    In every round the fragments of each candidate are measured alone and in a timeline, from which it is
    predicted, and then whole steps are timed: the machine may be slower a minute later.
    """
    model = MODELS[name]()
    step = train_step(model[1])
    plan = mpmd.plan(step, model[0], *model[2], devices=2, microbatches=MICROBATCHES)
    count = min(MEASURED, len(plan.candidates))
    timed = [TimedStep(plan.step_of(k), plan.config_of(k), model) for k in range(count)]
    arguments = (model[0], *model[2])
    with CandidateSteps(plan.candidates[:count], plan.bind, plan.options, arguments, {}) as candidates:
        for _ in range(rounds):
            candidates.measure()
            in_turns(timed, 1)
        predicted = candidates.predicted()
    ranked = sorted(range(count), key=lambda k: predicted[k].order)[:3]
    print(dataclasses.replace(plan, candidates=tuple(predicted[k] for k in ranked), refused=()))
    ratios = [predicted[k].step_s / statistics.median(timed[k].seconds) for k in ranked]
    for rank, (k, ratio) in enumerate(zip(ranked, ratios, strict=True), 1):
        ms = predicted[k].step_s * 1e3
        print(f"  {rank}: predicted {ms:.2f} ms, measured {ms / ratio:.2f} ms, {ratio:.3f}")
    return ratios, order_is_right([timed[k].seconds for k in ranked])


def order_is_right(seconds: Sequence[Sequence[float]]) -> bool:
    """Whether no step is slower than a later one, but for noise.

    Steps of one round ran one after the other.  A pair is in the wrong order if the median of the ratios of
    its rounds is below 1 with 97.5 % confidence; otherwise it is right, or a tie.

    Args:
        seconds: of the rounds of each step, in the order of the predictions.
    """
    right = True
    for a, b in itertools.combinations(range(len(seconds)), 2):
        low, high = median_interval([y / x for x, y in zip(seconds[a], seconds[b], strict=True)])
        found = "right" if low > 1 else "wrong" if high < 1 else "a tie"
        print(f"  {b + 1} over {a + 1}: {low:.3f} to {high:.3f}, {found}")
        right &= high >= 1
    return right


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, from order statistics: no distribution is assumed."""
    ordered, count = sorted(samples), len(samples)
    tail, skipped = 0.0, -1
    while tail <= 0.025 and skipped < count // 2:
        skipped += 1
        tail += math.comb(count, skipped) / 2**count
    first = max(0, skipped - 1)
    return ordered[first], ordered[count - 1 - first]


def search_seconds() -> float:
    """Seconds of the search for 48 layers on 8 devices."""
    params, loss, batch, _ = MODELS["separate"]()
    shapes = lambda tree: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)  # noqa: E731
    params = shapes({**params, "layers": [params["layers"][0]] * 48})
    batch = tuple(jax.ShapeDtypeStruct((256, leaf.shape[1]), np.int32) for leaf in batch)
    rows = jax.sharding.PartitionSpec("data")
    plan = mpmd.plan(
        train_step(loss), params, *batch, devices=8, memory="80GiB", microbatches=(8, 16, 32),
        device="H100", in_shardings=(None, rows, rows),
    )  # fmt: skip
    print(f"{plan}\n48 layers on 8 devices: {plan.seconds:.1f} s")
    return plan.seconds


@dataclasses.dataclass
class PlanFigures:
    """The last line of the output."""

    auto_over_hand: float | None = None
    predicted_over_measured: float | None = None
    order_right: bool | None = None
    search_s: float | None = None
    stack_bytes_crossing: int | None = None


def main() -> None:
    """Prints a line per model and plan, and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--models", default=",".join(MODELS), help="names with commas, or none")
    parser.add_argument("--plans", default=PLANNED, help="names with commas, or none")
    parser.add_argument("--search", type=int, default=1, help="0 leaves the search for 48 layers out")
    options = parser.parse_args()
    figures = PlanFigures()
    compared = [compare_with_hand(name, options.rounds) for name in _names(options.models)]
    if compared:
        figures.auto_over_hand = math.exp(statistics.mean(math.log(ratio) for ratio, _ in compared))
        figures.stack_bytes_crossing = sum(sent for _, sent in compared)
    planned = [compare_with_measured(name, options.rounds) for name in _names(options.plans)]
    if planned:
        ratios = [ratio for of_model, _ in planned for ratio in of_model]
        figures.predicted_over_measured = max(ratios, key=lambda ratio: abs(math.log(ratio)))
        figures.order_right = all(right for _, right in planned)
    if options.search:
        figures.search_s = search_seconds()
    print(json.dumps(dataclasses.asdict(figures)))


def _names(text: str) -> list[str]:
    return [] if text in ("", "none") else text.split(",")


if __name__ == "__main__":
    script.run(main)
