"""Input of the runtime: the exported entry function as plain data, in program order, and its requirements."""

from __future__ import annotations

import dataclasses

from mpmd.errors import ProgramError, collect

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
