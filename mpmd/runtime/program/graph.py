"""Input of the runtime: the exported entry function as plain data, in program order, and its requirements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import numpy as np

from mpmd import ir
from mpmd.brief import brief
from mpmd.errors import ProgramError, collect
from mpmd.sharding.shardings import axes_by_dim, axes_of
from mpmd.support.user_code import frames_of

_SHORT_DTYPES = {
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "bfloat16": "bf16",
    "complex64": "c64",
    "complex128": "c128",
    "bool": "pred",
    **{f"{kind}int{bits}": f"{kind or 's'}{bits}" for kind in ("", "u") for bits in (2, 4, 8, 16, 32, 64)},
}


@dataclasses.dataclass(frozen=True, slots=True)
class BufferType:
    """Type and mesh of a value.

    Attributes:
        shape: global shape over its mesh.
        dtype: NumPy name of the element type, such as "float32" or "bfloat16".
        mesh: name of the mesh that holds it.
        sharding: Shardy's text of the sharding over the axes of the mesh, None for replicated.
        memory_kind: memory of the devices, None for their default one.
        bytes: bytes over all devices of the mesh, every replica counted.
    """

    shape: tuple[int, ...]
    dtype: str
    mesh: str
    sharding: str | None = None
    memory_kind: str | None = None
    bytes: int = 0

    def __str__(self) -> str:
        text = f"{_SHORT_DTYPES.get(self.dtype, self.dtype)}[{','.join(map(str, self.shape))}]"
        if self.sharding is not None:
            text += f" {self.sharding}"
        return text if self.memory_kind is None else f"{text} in {self.memory_kind}"

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory: none in host memory."""
        return 0 if self.memory_kind else self.bytes

    def holds_the_same_as(self, other: BufferType) -> bool:
        """Whether a transfer can produce one from the other: equal shape and element type."""
        return self.shape == other.shape and self.dtype == other.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class CallNode:
    """One call of a fragment on its mesh.

    Attributes:
        name: the executable, equal for calls of one compiled fragment.
        mesh: where it runs; all inputs and outputs live there.
        inputs: values read, in argument order.
        outputs: values defined, in result order.
        donated: positions in `inputs` whose buffers the executable consumes.
        stage: pipeline stage, or None.
        microbatch: number of the microbatch, or None.
        phase: "F" forward, "B" backward, "I" input gradient, "W" weight gradient, "" other.
        label: the user's name for it, with the source line when known.
        with_forward: whether a backward computes a forward too.
    """

    name: str
    mesh: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...] = ()
    stage: int | None = None
    microbatch: int | None = None
    phase: str = ""
    label: str = ""
    with_forward: bool = False

    __repr__ = brief


@dataclasses.dataclass(frozen=True, slots=True)
class TransferOp:
    """`target` becomes a copy of `source`, on the target's mesh and in the target's memory."""

    source: int
    target: int


@dataclasses.dataclass(frozen=True, slots=True)
class InputSpec:
    """An argument of the entry function: `value` is the flat user argument `index`, known as `path`."""

    value: int
    index: int
    path: str
    donated: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class OutputSpec:
    """A result of the entry function: the flat user result `index`, known as `path`, is `value`."""

    value: int
    index: int
    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class EntryGraph:
    """The exported entry function.

    Attributes:
        ops: fragment calls and transfers in program order.
        types: the type of every value.
        inputs: the arguments; an argument that several meshes use is transferred by an op.
        outputs: the results.
        copies: some of them once more, on other meshes.
        name: name of the entry function.
    """

    ops: tuple[CallNode | TransferOp, ...]
    types: dict[int, BufferType]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    name: str = "main"
    copies: tuple[OutputSpec, ...] = ()

    __repr__ = brief


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
        with_forward=task not in ("", "F") and any(o.transpose_count == 0 for o in op.origins),
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
