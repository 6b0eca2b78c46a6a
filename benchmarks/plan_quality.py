"""Are stages that are found as good as stages by hand, and are plans predicted rightly?

    python benchmarks/plan_quality.py [--rounds 12] [--models separate,scanned] [--plans scanned]

Two meshes of one device each.  Each of the models runs with stages by hand and with `stages="auto"`, in
turns; the shortest step of each counts.  Then a plan is searched for some of the models, its first three
candidates run in turns, and their median steps are compared with their predictions.  The order is right if no
candidate that is predicted to be faster is slower than a later one by more than the spread of the
measurement.  Last, a model of 48 layers is planned for 8 described devices.  The last line is one JSON
object: `auto_over_hand` is the geometric mean of the ratios of steps, `predicted_over_measured` the one
furthest from 1, `order_right` whether all orders are right, `search_s` the seconds of the last search,
and `stack_bytes_crossing` the bytes of rows of stacked parameters in messages.
"""

from __future__ import annotations

import argparse
import dataclasses
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

MICROBATCHES = (4, 8, 16)
PLANNED = "separate,scanned"


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
    for _ in range(rounds + 1):
        for step in steps:
            step.run()
    for step in steps:
        del step.seconds[0]


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
    """Ratios of predicted to measured seconds of the first three plans, and whether their order is right."""
    model = MODELS[name]()
    step = train_step(model[1])
    plan = mpmd.plan(step, model[0], *model[2], devices=2, microbatches=MICROBATCHES, measure=4)
    print(f"{plan}\nin {plan.seconds:.1f} s")
    steps = [TimedStep(plan.step_of(k), plan.config_of(k), model) for k in range(3)]
    in_turns(steps, 2 * rounds)
    found = [statistics.median(timed.seconds) for timed in steps]
    spread = max(
        (statistics.quantiles(t.seconds, n=4)[2] - statistics.quantiles(t.seconds, n=4)[0]) / median
        for t, median in zip(steps, found, strict=True)
    )
    ratios = [plan.candidates[k].step_s / seconds for k, seconds in enumerate(found)]
    right = all(found[a] <= found[b] * (1 + spread) for a in range(3) for b in range(a + 1, 3))
    for k, seconds in enumerate(found):
        predicted = plan.candidates[k].step_s
        print(
            f"  {k + 1}: predicted {predicted * 1e3:.2f} ms, measured {seconds * 1e3:.2f} ms, {ratios[k]:.3f}"
        )
    print(f"  spread of a step: {spread:.1%}; order {'right' if right else 'wrong'}")
    return ratios, right


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
