"""What a graph must be, to become a program."""

from __future__ import annotations

from mpmd.errors import ProgramError, collect
from mpmd.runtime.graph import BufferType, CallNode, EntryGraph


def check_graph(graph: EntryGraph) -> None:
    """Raises a ProgramError that lists everything wrong with the graph itself."""
    problems: list[str] = []
    defined: dict[int, str] = {}

    def define(value: int, where: str) -> None:
        if value not in graph.types:
            problems.append(f"{where}: value {value} has no type")
        elif value in defined:
            problems.append(f"{where}: value {value} is defined twice, first by {defined[value]}")
        defined.setdefault(value, where)

    def use(value: int, where: str) -> None:
        if value not in defined:
            problems.append(f"{where}: value {value} is used before it is defined")
            defined[value] = where

    for spec in graph.inputs:
        define(spec.value, f"input {spec.index} ({spec.path})")
    for at, op in enumerate(graph.ops):
        if isinstance(op, CallNode):
            where = f"op {at}, call of {op.name!r} on mesh {op.mesh!r}"
            for value in op.inputs:
                use(value, where)
            for value in op.outputs:
                define(value, where)
            problems += _call_problems(op, where, graph.types)
        else:
            where = f"op {at}, transfer of value {op.source} to value {op.target}"
            use(op.source, where)
            define(op.target, where)
            source, target = graph.types.get(op.source), graph.types.get(op.target)
            if source and target and not source.holds_the_same_as(target):
                problems.append(f"{where}: makes {target} from {source}")
    for output in graph.outputs:
        use(output.value, f"output {output.index} ({output.path})")
    if problems:
        raise collect(
            ProgramError, problems, f"the entry function is not a program, {len(problems)} problems:"
        )


def _call_problems(op: CallNode, where: str, types: dict[int, BufferType]) -> list[str]:
    problems = [
        f"{where}: value {value} lives on mesh {types[value].mesh!r}"
        for value in dict.fromkeys((*op.inputs, *op.outputs))
        if value in types and types[value].mesh != op.mesh
    ]
    wrong = [k for k in op.donated if not 0 <= k < len(op.inputs)]
    return problems + [f"{where}: donates argument {k}, but has {len(op.inputs)}" for k in wrong]
