"""Steps under a schedule, their stages on the meshes that it is made for."""

from __future__ import annotations

import jax

import mpmd
from mpmd.runtime.run.clients import made_devices

FOLDED = ("zb_v", "v_half", "v_min", "dualpipe_v")

LOOPED = ("interleaved_1f1b", "looped_bfs", "circular", "interleaved_zb")


def placement(schedule: str, meshes: int) -> list[int]:
    """The mesh of every stage: two stages per mesh where the schedule is made for them."""
    if schedule in FOLDED:
        return [*range(meshes), *reversed(range(meshes))]
    return [*range(meshes)] * (1 + (schedule in LOOPED))


def jitted(step, schedule, meshes: list[int], donate=True, options=None):
    """`step` with `stage0`, and so on, on these meshes, which have clients of their own in one process."""
    counts = {f"m{m}": 1 for m in range(max(meshes) + 1)}
    topology = mpmd.make_topology(made_devices(counts) if jax.process_count() == 1 else counts)
    assignment = {f"stage{s}": (f"m{m}", s) for s, m in enumerate(meshes)}
    config = mpmd.make_config(topology, assignment, schedule=schedule, options=options)
    return mpmd.jit(step, config, donate_argnums=0 if donate else ())
