"""Random programs in several processes, and their messages that can be pairs."""

from __future__ import annotations

import random

from examples.workloads.graphs import GraphBuilder
from mpmd.runtime.program.graph import EntryGraph
from mpmd.runtime.program.linearize import linearize
from mpmd.runtime.program.streams import Program


def all_pairs(program: Program) -> set[tuple[int, int]]:
    return {(c, k) for c in program.posted for k in range(len(program.channels[c].types))}


def random_program(seed: int) -> Program:
    """The program of a random graph."""
    graph, processes = random_graph(seed, ((3,), (4, 5), (5,)))
    return linearize(graph, processes=processes)


def random_graph(
    seed: int, others: tuple[tuple[int, ...], ...] = ()
) -> tuple[EntryGraph, dict[str, tuple[int, ...]]]:
    """Calls on up to five meshes, each of one process or of two; some processes have several meshes.

    Args:
        seed: of the graph.
        others: processes that meshes may have, too.
    """
    chance = random.Random(seed)
    meshes = "abcde"[: chance.randint(2, 5)]
    spare = [(0,), (1,), (2,), (3, 4), (5, 6), (0,), (1,), *others]
    processes = dict(zip(meshes, chance.sample(spare, len(meshes))))
    b = GraphBuilder()
    on = {mesh: [b.input(mesh)] for mesh in meshes}
    for call in range(chance.randint(3, 14)):
        mesh = chance.choice(meshes)
        inputs = [chance.choice(on[mesh])]
        for other in chance.sample(meshes, chance.randint(0, len(meshes) - 1)):
            value = chance.choice(on[other])
            inputs.append(value if other == mesh else b.transfer(value, mesh))
        inputs = list(dict.fromkeys(inputs))
        on[mesh] += b.call(f"f{call}", mesh, inputs, microbatch=chance.choice([None, call]))
    for mesh in meshes:
        b.output(on[mesh][-1]) if len(on[mesh]) > 1 else None
    return b.graph(), processes
