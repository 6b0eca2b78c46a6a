"""Results on every process: scalars, such as the loss, and those that the user names."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping

from mpmd.runtime.program.graph import EntryGraph, OutputSpec, TransferOp


def with_results_everywhere(
    graph: EntryGraph, processes: Mapping[str, tuple[int, ...]], replicated: Collection[int] = ()
) -> EntryGraph:
    """Transfers scalar and replicated results to meshes of the other processes, where they are results too.

    ```
    loss = m1["f"](x); return loss   ->   loss = m1["f"](x); copy = transfer loss to m0; return loss, copy
    ```

    Args:
        graph: the entry function.
        processes: for each mesh the indices of its processes, in pipeline order; empty if there is one.
        replicated: positions of results that are not scalars, which every process gets too.

    Returns:
        The graph; results that are there twice have one index.
    """
    ops, outputs, types = list(graph.ops), list(graph.outputs), dict(graph.types)
    fresh = itertools.count(max(types, default=-1) + 1)
    for spec in graph.outputs:
        kind = types[spec.value]
        if kind.shape != () and spec.index not in replicated:
            continue
        value, own = spec.value, processes.get(kind.mesh, ())
        if len(own) > 1 and kind.sharding is not None:  # whole in each of its processes
            value = next(fresh)
            types[value] = dataclasses.replace(kind, sharding=None, memory_kind=None)
            ops.append(TransferOp(spec.value, value))
            outputs[outputs.index(spec)] = dataclasses.replace(spec, value=value)
        copies = [copy for copy in graph.copies if copy.index == spec.index]
        outputs += copies
        there = (process for copy in copies for process in processes[types[copy.value].mesh])
        for mesh in _meshes_of_others(processes, {*own, *there}):
            copy = next(fresh)
            types[copy] = dataclasses.replace(kind, mesh=mesh, sharding=None, memory_kind=None)
            ops.append(TransferOp(spec.value, copy))
            outputs.append(OutputSpec(copy, spec.index, spec.path))
    return dataclasses.replace(graph, ops=tuple(ops), outputs=tuple(outputs), types=types)


def mesh_of_each(processes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The first mesh of each process; none where a mesh is over several, whose scalars both have."""
    first: dict[int, str] = {}
    for mesh, indices in processes.items():
        if len(indices) > 1:
            return ()
        first.setdefault(indices[0], mesh)
    return tuple(first.values())


def _meshes_of_others(processes: Mapping[str, tuple[int, ...]], covered: set[int]) -> list[str]:
    """Meshes that cover all other processes, the first ones possible."""
    chosen = []
    for mesh, indices in processes.items():
        if not covered.issuperset(indices):
            covered.update(indices)
            chosen.append(mesh)
    return chosen
