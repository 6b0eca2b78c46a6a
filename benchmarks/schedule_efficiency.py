"""Does a step take as long as it is predicted to, and as long as its schedule allows?

    python benchmarks/schedule_efficiency.py [--rounds 5] [--microbatches 8]

Steps of sleeping stages under 1F1B on two and on four meshes, and a step of the example with two stages,
one mesh per core, take turns.  In every round each is predicted from the costs of its fragments, which are
measured one by one in that round, and run a few times; ratios are the median over the rounds, so that a
machine that slows down and recovers does not count.  The last line is one JSON object:
`measured_over_simulated` is the worst of the sleeping stages, `efficiency` the least part of a measured
step that the ideal one takes, `example_measured_over_predicted` the same ratio for the example.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import script

FORWARD_S, HALF_BACKWARD_S = 0.02, 0.02


class EfficiencyCase:
    """A compiled step, its state between rounds, and its results."""

    def __init__(self, name: str, jitted: Any, state: Any, batch: Any, ideal_s: float | None = None) -> None:
        self.name, self.batch, self.ideal_s = name, batch, ideal_s
        self.compiled = jitted.lower(state, batch).compile()
        self.state, _ = self.compiled(state, batch)
        jax.block_until_ready(self.state)
        self.measured: list[float] = []
        self.predicted: list[float] = []
        self.ratios: list[float] = []

    def round(self, steps: int) -> None:
        """Predicts, then takes steps."""
        (self.state, _), costs = self.compiled.costs(self.state, self.batch)
        self.predicted.append(self.compiled.schedule(costs).makespan_s)
        measured = []
        for _ in range(steps):
            jax.block_until_ready(self.state)
            start = time.perf_counter()
            self.state, loss = self.compiled(self.state, self.batch)
            jax.block_until_ready((self.state, loss))
            measured.append(time.perf_counter() - start)
        self.measured += measured
        self.ratios.append(statistics.median(measured) / self.predicted[-1])

    def figures(self) -> dict[str, float]:
        """Medians over all rounds."""
        measured, predicted = statistics.median(self.measured), statistics.median(self.predicted)
        found = {
            "measured_s": measured,
            "least_measured_s": min(self.measured),
            "predicted_s": predicted,
            "measured_over_predicted": statistics.median(self.ratios),
        }
        if self.ideal_s is not None:
            found |= {"ideal_s": self.ideal_s, "efficiency": self.ideal_s / measured}
        return found


def sleeping(meshes: int, microbatches: int) -> EfficiencyCase:
    """Equal stages that sleep."""
    from examples.workloads.sleeping import Durations, Stages

    durations = Durations(FORWARD_S, HALF_BACKWARD_S, HALF_BACKWARD_S)
    stages = Stages((durations,) * meshes, microbatches, meshes)
    name = f"1f1b, {meshes} sleeping stages"
    return EfficiencyCase(name, stages.jitted("1f1b"), *stages.arguments(), ideal_s=stages.ideal_1f1b_s())


def example(microbatches: int) -> EfficiencyCase:
    """The pipelined transformer with two stages, on random tokens."""
    from examples.pipelined_transformer.config import TrainConfig
    from examples.pipelined_transformer.train_step import make_state, make_train_step

    config = TrainConfig(num_stages=2, num_microbatches=microbatches)
    shape = config.batch_size, config.seq_len + 1
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape).astype(np.int32)
    state = jax.device_get(make_state(config))
    return EfficiencyCase("example, 2 stages", make_train_step(config), state, tokens)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each case in a round")
    parser.add_argument("--microbatches", type=int, default=8)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)
    cases = [sleeping(2, args.microbatches), sleeping(4, args.microbatches), example(args.microbatches)]
    for _ in range(args.rounds):
        for case in cases:
            case.round(args.steps)
    figures = {case.name: case.figures() for case in cases}
    for name, found in figures.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.4f}" for key, value in found.items()))
    *timed, real = figures.values()
    ratios = [found["measured_over_predicted"] for found in timed]
    result = {
        "measured_over_simulated": max(ratios, key=lambda ratio: abs(ratio - 1)),
        "efficiency": min(found["efficiency"] for found in timed),
        "example_measured_over_predicted": real["measured_over_predicted"],
        "cases": figures,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    script.run(main)
