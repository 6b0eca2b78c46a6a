"""From the exported module to the plain graph of the runtime."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from mpmd import ir
from mpmd.errors import ProgramError
from mpmd.runtime.program.graph import BufferType, CallNode, EntryGraph, InputSpec, OutputSpec, TransferOp
from mpmd.sharding.shards import axes_by_dim, axes_of
from mpmd.support.source import frames_of

_NAMES = {"i1": "bool", "bf16": "bfloat16", "complex<f32>": "complex64", "complex<f64>": "complex128"}


def read_entry(
    module: ir.Module,
    argument_paths: Sequence[str],
    result_paths: Sequence[str],
    donated: Collection[int],
) -> EntryGraph:
    """The entry function of an exported module as a graph.

    Args:
        module: after the export pipeline: fragment calls, transfers and a return.
        argument_paths: pytree path of each flat argument.
        result_paths: pytree path of each flat result.
        donated: flat arguments that a step may consume.

    Raises:
        ProgramError: the entry function has other operations.
    """
    main = next(f for f in ir.funcs(module) if f.is_entry)
    symbols = ir.symbol_table(module)
    meshes = {name: axes_of(mesh) for name, mesh in main.topology.items()}
    stages = {mesh: position for position, mesh in enumerate(main.topology.schedulable)}
    numbers: dict[ir.Value, int] = {}
    types: dict[int, BufferType] = {}
    of_kind: dict[ir.Type, BufferType] = {}

    def number(value: ir.Value) -> int:
        if value not in numbers:
            kind = value.type
            if kind not in of_kind:
                of_kind[kind] = buffer_type(kind, meshes)
            numbers[value] = len(numbers)
            types[numbers[value]] = of_kind[kind]
        return numbers[value]

    inputs = tuple(
        InputSpec(number(arg), i, argument_paths[i], i in donated) for i, arg in enumerate(main.args)
    )
    ops: list[CallNode | TransferOp] = []
    donated_by: dict[str, tuple[int, ...]] = {}
    for op in ir.ops(main):
        if isinstance(op, ir.Transfer):
            ops.append(TransferOp(number(op.tensor), number(op.result)))
        elif isinstance(op, ir.FragmentCall):
            callee = op.callee_name
            if callee not in donated_by:
                donated_by[callee] = _donated(symbols[callee])
            inputs_of, outputs_of = tuple(map(number, op.operands)), tuple(map(number, op.results))
            ops.append(_call(op, inputs_of, outputs_of, donated_by[callee], stages))
        else:
            raise ProgramError(
                f"the exported program holds a {op.operation.name} at {op.location}\n"
                f"  expected: calls of fragments, and transfers; a pass of the export pipeline left it behind"
            )
    count, of = len(result_paths), ir.attribute_dicts(main, "res_attrs", len(main.returned))
    results = [
        ir.IntegerAttr(of[i]["mpmd.copy_of"]).value if i >= count else i for i in range(len(main.returned))
    ]
    specs = [OutputSpec(number(v), k, result_paths[k]) for k, v in zip(results, main.returned, strict=True)]
    return EntryGraph(tuple(ops), types, inputs, tuple(specs[:count]), main.symbol, tuple(specs[count:]))


def _donated(f: ir.Func) -> tuple[int, ...]:
    attributes = ir.attribute_dicts(f, "arg_attrs", 0)
    return tuple(i for i, of_arg in enumerate(attributes) if "tf.aliasing_output" in of_arg)


def _call(
    op: ir.FragmentCall,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    donated: tuple[int, ...],
    stages: dict[str, int],
) -> CallNode:
    """A call; if work of a microbatch has no stage, the stage of its mesh in `stages` is used."""
    frames = frames_of(op)
    names = ", ".join(dict.fromkeys(o.name for o in op.origins)) or "unnamed work"
    task = phase(op)
    stage = stages.get(op.mesh) if task and op.stage is None else op.stage
    return CallNode(
        name=op.callee_name,
        mesh=op.mesh,
        inputs=inputs,
        outputs=outputs,
        donated=donated,
        stage=stage,
        microbatch=op.call_counter,
        phase=task,
        label=f"{names} ({frames[0]})" if frames else names,
    )


def phase(op: ir.FragmentCall | ir.Fragment) -> str:
    """`F`, `B`, `I` or `W` for work of a microbatch; empty for other work."""
    counts = {o.transpose_count for o in op.origins}
    if not counts or op.call_counter is None:
        return ""
    if op.split_keep_transferred:
        return "I"
    if op.split_drop_transferred:
        return "W"
    return "B" if max(counts) else "F"


def buffer_type(kind: ir.MeshTensor, meshes: dict[str, dict[str, int]]) -> BufferType:
    """A mesh tensor type as the runtime knows it; `meshes` gives the axis sizes of each mesh."""
    element = str(kind.element_type)
    axes = meshes[kind.mesh]
    sharding = kind.sharding
    shards = 1
    if sharding is not None:
        names = [axis.name for dim in axes_by_dim(sharding) for axis in dim]
        shards = math.prod(axes[name] for name in names)
    local = math.prod(kind.shape) * np.dtype(_dtype(element)).itemsize // shards
    return BufferType(
        shape=tuple(kind.shape),
        dtype=_dtype(element),
        mesh=kind.mesh,
        sharding=None if sharding is None else str(sharding).removeprefix("#sdy.sharding"),
        memory_kind=kind.memory_kind if kind.on_host else None,
        bytes=local * math.prod(axes.values()),
    )


def _bits(element: str) -> int:
    return int(element[element[0] == "u" :][1:].split("E")[0])


def _dtype(element: str) -> str:
    """NumPy's name of MLIR's type: `float32` of `f32`, `float8_e4m3fn` of `f8E4M3FN`."""
    if element in _NAMES:
        return _NAMES[element]
    if "E" in element:
        return f"float{_bits(element)}_{element[element.index('E') :].lower()}"
    prefix = {"f": "float", "i": "int", "u": "uint"}[element[0]]
    return f"{prefix}{_bits(element)}"
