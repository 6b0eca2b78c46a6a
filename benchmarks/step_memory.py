"""How much memory does a process take for a step, and how much of that was predicted?

    python benchmarks/step_memory.py [--layers 12] [--width 768] [--stages 4] [--steps 3]

Steps of the reference GPT are taken while a thread reads, every 2 ms, what the C library has given out and
the resident size of the process.  Live bytes are what it has given out, less what it had given out beside the
arrays of the step between two steps, and the scratch memory that native fragments keep, which is mapped
beside it.  Predicted is the peak of `Compiled.schedule` over all meshes at once, with measured costs.  The
last line is one JSON object: sizes in MB, `predicted_over_live`, and `resident_over_live`: how far the
process grew over what it was after compiling, without freed memory, over the peak of live bytes.  Needs
glibc 2.33.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import script
from mpmd.runtime.run.host_memory import given_out

MB = 1e6
PAGE = 4096


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


class Sampler:
    """Reads sizes until its `with` ends.

    Attributes:
        given_out, resident: the largest seen.
    """

    def __init__(self) -> None:
        self.given_out = self.resident = self.samples = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self.given_out = max(self.given_out, given_out())
            self.resident = max(self.resident, resident())
            self.samples += 1


def array_bytes(compiled: Any) -> int:
    """Bytes of all arrays on the meshes of a step."""
    from mpmd.runtime.program.stream_memory import bytes_on_mesh

    meshes = compiled.lowered.config.topology.values()
    clients = {id(c): c for mesh in meshes for c in [mesh.devices.flat[0].client]}
    return sum(bytes_on_mesh(a) for c in clients.values() for a in c.live_arrays() if not a.is_deleted())


def compiled_step(args: argparse.Namespace) -> tuple[Any, Any, Any, int]:
    """A step compiled for shapes alone, what it is called with, and how many parameters it has."""
    import mpmd
    from benchmarks import reference_gpt as gpt

    sizes = gpt.Sizes(
        layers=args.layers, width=args.width, heads=args.width // 64, stages=args.stages,
        vocabulary=args.vocabulary, microbatches=args.microbatches,
    )  # fmt: skip
    step, optimizer = gpt.make_step(sizes)

    def state() -> list[Any]:
        params = gpt.init(sizes)
        return [params, jax.tree.map(np.asarray, optimizer.init(params))]

    topology = mpmd.make_topology({f"m{s}": 1 for s in range(args.stages)})
    assignment = {f"stage{s}": f"m{s}" for s in range(args.stages)}
    config = mpmd.make_config(topology, assignment, schedule=args.schedule, backend=args.backend)
    given = state()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), given)
    count = sum(x.size for x in jax.tree.leaves(given[0]))
    del given
    batch = gpt.batch(sizes)
    lowered = mpmd.jit(step, config, donate_argnums=(0, 1)).lower(*shapes, *batch)
    runtime = mpmd.RuntimeOptions(run_ahead=args.run_ahead, keep_freed_memory=args.keep_freed_memory)
    return lowered.compile(runtime=runtime), state, batch, count


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--run-ahead", type=int, default=16)
    parser.add_argument("--keep-freed-memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.stages)
    compiled, make_state, batch, count = compiled_step(args)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    base = resident()
    state = make_state()
    state = jax.block_until_ready(compiled(*state, *batch)[:2])
    (*state, _), costs = compiled.costs(*state, *batch)
    jax.block_until_ready(state)
    gc.collect()
    others = given_out() - array_bytes(compiled)
    memory = compiled.memory_analysis()
    kept = sum(m.kept_bytes for m in memory.values())
    with Sampler() as sampler:
        for _ in range(args.steps):
            start = time.perf_counter()
            state = jax.block_until_ready(compiled(*state, *batch)[:2])
            print(f"step {time.perf_counter() - start:.2f} s")
    live = sampler.given_out - others + kept
    timeline = compiled.schedule(costs)
    for mesh, m in memory.items():
        sizes = m.peak_bytes / MB, m.kept_bytes / MB, m.in_flight_bytes / MB
        print("{}: {:.0f} MB, kept {:.0f}, in flight {:.0f}".format(mesh, *sizes))
    figures = {
        "parameters": count,
        "predicted_MB": timeline.peak_bytes / MB,
        "sum_of_mesh_peaks_MB": sum(m.peak_bytes for m in memory.values()) / MB,
        "live_peak_MB": live / MB,
        "predicted_over_live": timeline.peak_bytes / live,
        "resident_MB": (sampler.resident - base) / MB,
        "resident_over_live": (sampler.resident - base) / live,
        "samples": sampler.samples,
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    script.run(main)
