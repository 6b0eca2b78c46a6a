"""Do zero-bubble schedules fill the bubbles that they are predicted to fill?

    python benchmarks/zero_bubble.py [--svg docs/zero_bubble.svg] [--rounds 5]

Steps of equal sleeping stages on four meshes under 1F1B and schedules that split the backward take turns.
Each is predicted from the costs of its fragments, which are measured one by one, and measured by watching
one step.  `--svg` writes the measured steps as a picture.  The last line is one JSON object: for each
schedule the step and the part of it in which meshes idle, predicted and measured (medians).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import script

SCHEDULES = ("1f1b", "zb_h1", "zb_h2", "zb_v")


class ZeroBubbleCase:
    """A step of sleeping stages under one schedule."""

    def __init__(self, schedule: str, seconds: float, meshes: int, microbatches: int) -> None:
        from examples.workloads.sleeping import Durations, Stages

        self.name = schedule
        folded = schedule == "zb_v"
        each = seconds / (1 + folded)  # as much work on every mesh, in one stage or two
        stages = (Durations(each, each, each),) * (meshes * (1 + folded))
        work = Stages(stages, microbatches, meshes, folded)
        self.params, self.batch = work.arguments()
        self.compiled = work.jitted(schedule).lower(self.params, self.batch).compile()
        self.predicted: list[Any] = []
        self.measured: list[Any] = []
        self._take(self.compiled(self.params, self.batch))

    def _take(self, results: Any) -> None:
        self.params, _ = jax.block_until_ready(results)

    def round(self) -> None:
        """One prediction and one measurement."""
        results, costs = self.compiled.costs(self.params, self.batch)
        self._take(results)
        self.predicted.append(self.compiled.schedule(costs))
        results, timeline = self.compiled.timeline(self.params, self.batch)
        self._take(results)
        self.measured.append(timeline)

    def figures(self) -> dict[str, float]:
        """Medians of steps and bubbles."""
        found = {}
        for kind, timelines in (("predicted", self.predicted), ("measured", self.measured)):
            found[f"{kind}_s"] = statistics.median(t.makespan_s for t in timelines)
            found[f"{kind}_bubble"] = statistics.median(t.bubble_fraction() for t in timelines)
        return found

    def typical(self) -> Any:
        """The measured step of median length."""
        timeline = sorted(self.measured, key=lambda t: t.makespan_s)[len(self.measured) // 2]
        return dataclasses.replace(timeline, title=f"{self.name}, measured")


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--meshes", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of each third of a stage's work")
    parser.add_argument("--svg", type=Path, help="where to write the picture")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.meshes)
    seconds = args.milliseconds / 1e3
    cases = [ZeroBubbleCase(name, seconds, args.meshes, args.microbatches) for name in SCHEDULES]
    for _ in range(args.rounds):
        for case in cases:
            case.round()
    for case in cases:
        print(f"{case.name}: " + ", ".join(f"{key} {value:.4f}" for key, value in case.figures().items()))
    if args.svg:
        from mpmd.scheduling.render_svg import render_svg

        args.svg.write_text(render_svg(*(case.typical() for case in cases[:2])))
    print(json.dumps({case.name: case.figures() for case in cases}))


if __name__ == "__main__":
    script.run(main)
