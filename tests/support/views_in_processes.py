"""What a compiled step says about itself in several processes, one JSON line of each.

python -m tests.support.views_in_processes MESHES
"""

from __future__ import annotations

import json
import sys

import jax

from examples.workloads.sleeping import Durations, Stages
from mpmd.scheduling.timeline import COMPUTE, TRANSFER

FORWARD_S, HALF_BACKWARD_S, MICROBATCHES = 0.03, 0.02, 3


def main(meshes: int) -> None:
    durations = Durations(FORWARD_S, HALF_BACKWARD_S, HALF_BACKWARD_S)
    stages = Stages((durations,) * meshes, MICROBATCHES, meshes)
    params, batch = stages.arguments()
    compiled = stages.jitted("1f1b").lower(params, batch).compile()
    params, _ = compiled(params, batch)
    (params, _), costs = compiled.costs(params, batch)
    (params, _), live = compiled.live_bytes(params, batch)
    (params, _), timeline = compiled.timeline(params, batch)
    spans = [span for span in timeline.spans if span.kind in (COMPUTE, TRANSFER)]
    found = {
        "process": jax.process_index(),
        "title": timeline.title,
        "costs": {name: round(seconds, 6) for name, seconds in costs.fragments.items()},
        "messages": sorted(round(seconds, 6) for seconds in costs.transfers.values()),
        "live": live,
        "peaks": {mesh: memory.peak_bytes for mesh, memory in compiled.memory_analysis().items()},
        "spans": [(s.mesh, s.name, s.kind, round(s.start_s, 6), round(s.end_s, 6)) for s in spans],
        "predicted": compiled.schedule(costs).makespan_s,
        "measured": timeline.makespan_s,
        "ideal": stages.ideal_1f1b_s(),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    if not jax.distributed.is_initialized():
        jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
    main(int(sys.argv[1]))
