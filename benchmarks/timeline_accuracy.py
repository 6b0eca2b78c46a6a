"""Do measured timelines give every fragment the time that it took, and every mesh all of its time?

    python benchmarks/timeline_accuracy.py [--steps 20] [--stages N] [--backends native,xla]
                                           [--d_model 256] [--batch_size 64]

The train step of the example is recorded again and again, on one mesh per core unless `--stages` says
otherwise: meshes that share cores make each other's fragments longer, not an error of the timeline.  With as
many meshes as cores, the threads that issue a step share a core with a mesh, and delay a fragment by up to a
slice of the scheduler, 4 ms.  So by default a forward of a microbatch takes some 20 ms on one core.  With the
sizes of the example, `--d_model 128 --batch_size 32`, it takes 2.5 ms: they need more cores than meshes.

A fragment is compared with the median of its program over all steps, and with what `Compiled.costs` measures
of it alone.  Fragments that only make zeros take no time and are left out.  For each backend a line: its
figures, how long a recorded step takes compared with others, and the worst fragments.  The last line is one
JSON object: `within_25_percent` is the part of all runs within a quarter of their median, `below_half` how
many took less than half of what they take alone, `unattributed` by how much of a step busy, transfer and idle
time of a mesh are off, at most.  Each is the worse backend's; `backends` has both.  `control`
is the same part of equal hashes of 20 ms, which plain threads compute beside each other, one for each mesh,
between the steps: how much the machine itself delays.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import script


def near(durations: list[float], median: float) -> int:
    """How many durations are within a quarter of a median."""
    return sum(abs(seconds - median) <= 0.25 * median for seconds in durations)


class Control:
    """Equal work without a pipeline: hashes, which hold no lock of Python and allocate nothing."""

    def __init__(self, threads: int) -> None:
        self._threads, self.durations = threads, list[float]()
        self._block, self._blocks = bytes(1 << 20), 1
        alone = min(self._hash() for _ in range(20))
        self._blocks = max(1, round(0.02 / alone))

    def _hash(self) -> float:
        start = time.perf_counter()
        made = hashlib.sha256()
        for _ in range(self._blocks):
            made.update(self._block)
        return time.perf_counter() - start

    def run(self) -> None:
        """Ten hashes by each thread."""
        found: list[list[float]] = [[] for _ in range(self._threads)]

        def work(own: list[float]) -> None:
            own += [self._hash() for _ in range(10)]

        threads = [threading.Thread(target=work, args=(own,)) for own in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for own in found:
            self.durations += own

    def within(self) -> float:
        """The part of the hashes that took as long as usual."""
        return near(self.durations, statistics.median(self.durations)) / len(self.durations)


class AccuracyCase:
    """The example's step by one backend."""

    def __init__(self, backend: str, stages: int, d_model: int, batch_size: int) -> None:
        from examples.pipelined_transformer.config import TrainConfig
        from examples.pipelined_transformer.train_step import make_state, make_train_step

        config = TrainConfig(num_stages=stages, backend=backend, d_model=d_model, batch_size=batch_size)
        self.backend = backend
        self.state = jax.device_get(make_state(config))
        random = np.random.default_rng(0)
        shape = config.batch_size, config.seq_len + 1
        self.batch = random.integers(0, config.vocab_size, shape).astype(np.int32)
        self.compiled = make_train_step(config).lower(self.state, self.batch).compile()
        self.zeros = {name for name, e in self.compiled.executables.items() if e.backend == "zeros"}
        self.durations: dict[str, list[float]] = defaultdict(list)
        self.alone: dict[str, list[float]] = defaultdict(list)
        self.plain_s: list[float] = []
        self.recorded_s: list[float] = []
        self.unattributed = 0.0
        for _ in range(3):
            self.plain()
        self.recorded()
        self.forget()

    def forget(self) -> None:
        """Drops the measurements of the first run."""
        for found in (self.durations, self.alone):
            found.clear()
        self.plain_s, self.recorded_s, self.unattributed = [], [], 0.0

    def plain(self) -> None:
        """A step that is not recorded."""
        start = time.perf_counter()
        self.state, _ = jax.block_until_ready(self.compiled(self.state, self.batch))
        self.plain_s.append(time.perf_counter() - start)

    def recorded(self) -> None:
        """A step that is recorded, and one whose fragments run one by one."""
        (self.state, _), timeline = self.compiled.timeline(self.state, self.batch)
        jax.block_until_ready(self.state)
        self.recorded_s.append(timeline.makespan_s)
        for mesh in timeline.meshes:
            lanes = (timeline.compute(mesh), timeline.idle(mesh))
            for span in lanes[0]:
                if span.name not in self.zeros:
                    self.durations[span.name].append(span.seconds)
            known = sum(span.seconds for lane in lanes for span in lane)
            off = abs(known / timeline.makespan_s - 1)
            self.unattributed = max(self.unattributed, off)
        (self.state, _), costs = self.compiled.costs(self.state, self.batch)
        jax.block_until_ready(self.state)
        for name, seconds in costs.fragments.items():
            self.alone[name].append(seconds)

    def figures(self) -> dict[str, Any]:
        """The results."""
        medians = {name: statistics.median(found) for name, found in self.durations.items()}
        runs = [(name, seconds) for name, found in self.durations.items() for seconds in found]
        within = sum(near(found, medians[name]) for name, found in self.durations.items())
        least = {name: min(found) for name, found in self.alone.items()}
        return {
            "within_25_percent": round(within / len(runs), 4),
            "below_half": sum(seconds < 0.5 * least[name] for name, seconds in runs),
            "unattributed": round(self.unattributed, 6),
            "runs": len(runs),
            "recorded_step": round(statistics.median(self.recorded_s) / statistics.median(self.plain_s), 3),
        }

    def worst(self) -> str:
        """The programs whose runs differ most, with their median."""
        rows = []
        for name, found in self.durations.items():
            median = statistics.median(found)
            part = near(found, median) / len(found)
            alone = statistics.median(self.alone[name])
            rows.append((part, f"{name} {1e3 * median:.2f} ms, alone {1e3 * alone:.2f} ms: {part:.0%}"))
        return "; ".join(text for _, text in sorted(rows)[:3])


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stages", type=int, default=max(2, min(4, len(os.sched_getaffinity(0)))))
    parser.add_argument("--backends", default="native,xla")
    parser.add_argument("--d_model", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=64)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.stages)
    found = {}
    control = Control(args.stages)
    for backend in args.backends.split(","):
        case = AccuracyCase(backend, args.stages, args.d_model, args.batch_size)
        for _ in range(args.steps):
            case.plain()
            case.recorded()
            control.run()
        found[backend] = case.figures()
        print(f"{backend}: {json.dumps(found[backend])}; least alike: {case.worst()}", flush=True)
        case.compiled.close()
    print(
        json.dumps(
            {
                "within_25_percent": min(f["within_25_percent"] for f in found.values()),
                "below_half": max(f["below_half"] for f in found.values()),
                "unattributed": max(f["unattributed"] for f in found.values()),
                "control": round(control.within(), 4),
                "backends": found,
            }
        )
    )


if __name__ == "__main__":
    script.run(main)
