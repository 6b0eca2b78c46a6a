"""Results on every process: scalars, such as the loss, and those that the user names."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from mpmd.runtime.graph import EntryGraph, OutputSpec, TransferOp


def with_results_everywhere(
    graph: EntryGraph, processes: Mapping[str, int], replicated: Collection[int] = ()
) -> EntryGraph:
    """Transfers scalar and replicated results to one mesh of each other process, where they are results too.

    ```
    loss = m1["f"](x); return loss   ->   loss = m1["f"](x); copy = transfer loss to m0; return loss, copy
    ```

    Args:
        graph: the entry function.
        processes: for each mesh the index of its process, in pipeline order; empty if there is one.
        replicated: positions of results that are not scalars, which every process gets too.

    Returns:
        The graph; results that are there twice have one index.
    """
    first_mesh: dict[int, str] = {}
    for mesh, process in processes.items():
        first_mesh.setdefault(process, mesh)
    ops, outputs, types = list(graph.ops), list(graph.outputs), dict(graph.types)
    for spec in graph.outputs:
        kind = types[spec.value]
        others = [mesh for process, mesh in first_mesh.items() if process != processes.get(kind.mesh, 0)]
        for mesh in others if kind.shape == () or spec.index in replicated else ():
            copy = max(types) + 1
            types[copy] = dataclasses.replace(kind, mesh=mesh, sharding=None, memory_kind=None)
            ops.append(TransferOp(spec.value, copy))
            outputs.append(OutputSpec(copy, spec.index, spec.path))
    return dataclasses.replace(graph, ops=tuple(ops), outputs=tuple(outputs), types=types)
