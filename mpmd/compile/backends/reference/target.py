"""The reference as a target of the driver: a program is its thunks.

Each reads and writes its slices of the buffers by the meaning of its plan.

Devices of a mesh take turns.  Each runs up to the next collective; a group whose devices have all reached the
same one does it, and goes on.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from mpmd.brief import brief
from mpmd.compile.buffers.assignment import Allocation, BufferAssignment, Slice
from mpmd.compile.buffers.offsets import DeviceMemory
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo.evaluator.values import convert
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.evaluate_products import evaluate_attention, evaluate_product
from mpmd.compile.kernels.kernel_plan import Operand
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.kernels.planner.collectives import CollectiveArray
from mpmd.compile.kernels.planner.planned_kernel import PlannedKernel
from mpmd.compile.options import CompileOptions
from mpmd.compile.pipelines import optimization_pipeline, scheduling_pipeline
from mpmd.compile.thunks.thunk import (
    AttentionThunk,
    CollectiveThunk,
    ConditionalThunk,
    CopyThunk,
    DeviceThunk,
    KernelThunk,
    MatmulThunk,
    Thunk,
    WhileThunk,
)
from mpmd.cost.device import HOST, Device
from mpmd.errors import CompileError
from mpmd.support.passes import Pass

_UNWRITTEN = 0xFF
"""In every byte: NaN in all floating-point types, -1 in integers."""


class Memory:
    """The buffers of one device, one array of bytes per allocation; they begin as NaN or -1.

    Args:
        allocations: by number.
    """

    def __init__(self, allocations: Sequence[Allocation]) -> None:
        self.buffers = [np.full(a.size, _UNWRITTEN, np.uint8) for a in allocations]

    def bytes_at(self, place: Slice) -> np.ndarray:
        """The bytes of a slice, as they are in the buffer."""
        return self.buffers[place.allocation][place.offset : place.offset + place.size]

    def array(self, place: Slice, dtype: str) -> np.ndarray:
        """The elements from the beginning of a slice to its end."""
        return self.bytes_at(place).view(NUMPY_DTYPE[dtype])

    def operand(self, place: Slice, operand: Operand) -> np.ndarray:
        return self.array(place, operand.dtype)[: operand.size]


def run_program(thunks: Sequence[Thunk], memories: Sequence[Memory]) -> None:
    """Runs a program on all devices of a mesh.

    Args:
        thunks: in order.
        memories: of each device; their buffers change.

    Raises:
        CompileError: devices wait for each other in different collectives.
    """
    devices = [_run(thunks, memory, device) for device, memory in enumerate(memories)]
    waiting = {d: next(run, None) for d, run in enumerate(devices)}
    while any(waiting.values()):
        group = _met(waiting)
        thunk = waiting[group[0]]
        assert thunk is not None
        _exchange(thunk, group, memories)
        waiting.update({d: next(devices[d], None) for d in group})


def _met(waiting: dict[int, CollectiveThunk | None]) -> tuple[int, ...]:
    """A group of devices that are all in the same collective."""
    for device, thunk in waiting.items():
        if thunk is not None:
            group = next((g for g in thunk.plan.groups if device in g), (device,))
            if all(waiting[d] is thunk for d in group):
                return group
    names = ", ".join(sorted({thunk.name for thunk in waiting.values() if thunk is not None}))
    raise CompileError(f"the devices of a mesh wait for each other in different collectives: {names}")


def _exchange(thunk: CollectiveThunk, group: Sequence[int], memories: Sequence[Memory]) -> None:
    """A collective of a group: all results are computed before the first is written."""
    for array, read, written in zip(thunk.plan.arrays, thunk.reads, thunk.writes, strict=True):
        shape = (array.rows, array.parts, array.elements)
        operands = [memory.array(read, array.dtype)[: array.size].reshape(shape) for memory in memories]
        results = [
            _gathered(array, [operands[source][:, part] for source, part in thunk.plan.sources[device]])
            for device in group
        ]
        for device, result in zip(group, results, strict=True):
            memories[device].array(written, array.dtype)[: result.size] = result.reshape(-1)


def _gathered(array: CollectiveArray, parts: Sequence[np.ndarray]) -> np.ndarray:
    """What a device makes of the parts that it gets."""
    if not parts:
        return np.zeros((array.rows, array.elements), NUMPY_DTYPE[array.dtype])
    if array.reduction is None:
        return np.stack(parts, axis=1)
    dtype = array.reduction.operands[0].dtype
    total, *others = (np.ascontiguousarray(convert(part, array.dtype, dtype)) for part in parts)
    for part in others:
        reduced = np.empty_like(total)
        evaluate(array.reduction, [total, part, reduced])
        total = reduced
    return np.asarray(convert(total, dtype, array.dtype))


def _run(thunks: Sequence[Thunk], memory: Memory, device: int) -> Iterator[CollectiveThunk]:
    """One device; gives each collective, which is done before it goes on."""
    for thunk in thunks:
        if isinstance(thunk, CollectiveThunk):
            yield thunk
        elif isinstance(thunk, WhileThunk):
            yield from _run(thunk.condition, memory, device)
            while memory.array(thunk.flag, "pred")[0]:
                yield from _run(thunk.body, memory, device)
                yield from _run(thunk.condition, memory, device)
        elif isinstance(thunk, ConditionalThunk):
            selector, last = int(memory.array(thunk.selector, "s32")[0]), len(thunk.branches) - 1
            yield from _run(thunk.branches[selector if 0 <= selector <= last else last], memory, device)
        elif isinstance(thunk, DeviceThunk):
            memory.array(thunk.target, "u32")[0] = device
        elif isinstance(thunk, CopyThunk):
            memory.bytes_at(thunk.target)[:] = memory.bytes_at(thunk.source)
        else:
            _compute(thunk, memory)


def _compute(thunk: KernelThunk | MatmulThunk | AttentionThunk, memory: Memory) -> None:
    if isinstance(thunk, KernelThunk):
        pairs = zip(thunk.operands, thunk.plan.operands, strict=True)
        evaluate(thunk.plan, [memory.operand(place, operand) for place, operand in pairs])
    elif isinstance(thunk, MatmulThunk):
        plan = thunk.plan
        a, b = memory.array(thunk.a, plan.a.dtype), memory.array(thunk.b, plan.b.dtype)
        dtypes = [plan.c.dtype] if plan.epilogue is None else [o.dtype for o in plan.epilogue.operands]
        evaluate_product(
            plan, a, b, {k: memory.array(place, dtypes[k]) for k, place in thunk.operands.items()}
        )
    else:
        dtypes_of = {f"p{k}": operand.dtype for k, operand in enumerate(thunk.plan.rows.operands)}
        dtypes_of |= {name: view.dtype for name, view in thunk.plan.views.items()}
        places = {**thunk.inputs, **thunk.outputs}
        evaluate_attention(thunk.plan, {k: memory.array(place, dtypes_of[k]) for k, place in places.items()})


@dataclasses.dataclass(frozen=True)
class ReferenceProgram:
    """Thunks and their memory: a `ThunkProgram`, and its own `Code`.

    Attributes:
        thunks: in order.
        allocations: what each device allocates for a call; parameters first.
        values: each constant, where it is.
        results: where the results are at the end.
        size: of code there is nothing.
        constants: see `values`.
    """

    thunks: tuple[Thunk, ...]
    allocations: tuple[Allocation, ...]
    values: tuple[tuple[Slice, bytes], ...]
    results: tuple[Slice, ...]
    size: int = 0
    constants: bytes = b""

    __repr__ = brief

    @property
    def arena_bytes(self) -> int:
        """Bytes of temporaries."""
        return sum(a.size for a in self.allocations if a.kind == "arena")

    def run(self, arguments: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """The bytes of the results, per device.

        Args:
            arguments: the bytes of the arguments of each device.

        Raises:
            CompileError: devices wait for each other for ever.
        """
        memories = [Memory(self.allocations) for _ in arguments]
        for memory, given in zip(memories, arguments, strict=True):
            for buffer, data in zip(memory.buffers, given):
                buffer[:] = data
            for place, constant in self.values:
                memory.bytes_at(place)[:] = np.frombuffer(constant, np.uint8)
        run_program(self.thunks, memories)
        return [[memory.bytes_at(place) for place in self.results] for memory in memories]

    def to_bytes(self) -> bytes:
        """See `Code`; the same program may give other bytes in another process."""
        return pickle.dumps((self.thunks, self.allocations, self.values, self.results))


@dataclasses.dataclass(frozen=True)
class Reference:
    """NumPy, for devices of any platform; see `Target`."""

    code_texts: ClassVar[Mapping[str, str]] = {}
    device: ClassVar[Device] = HOST
    memory: ClassVar[DeviceMemory] = DeviceMemory()

    def key(self) -> str:
        return "reference"

    def passes(self, devices: int, options: CompileOptions) -> list[Pass]:
        """The native target's, so that thunks and memory are native code's; see `Target`."""
        return optimization_pipeline(devices, options.attention_stitching, options.float_jitter, self.device)

    def schedule(self, devices: int) -> list[Pass]:
        return scheduling_pipeline()

    def refuses(self, instruction: HloInstruction, planned: PlannedKernel | None) -> str:
        return ""

    def scratch_bytes(self, planned: PlannedKernel | None) -> int:
        """The meaning of a plan needs no memory of the fragment."""
        return 0

    def program(self, name: str, thunks: Sequence[Thunk], assignment: BufferAssignment) -> ReferenceProgram:
        """The thunks as they are; see `Target`."""
        values = []
        for value in assignment.constants:
            literal = value.instruction.literal
            assert literal is not None and not isinstance(literal, tuple)
            values.append((assignment.slices[value], literal.tobytes()))
        return ReferenceProgram(tuple(thunks), assignment.allocations, tuple(values), assignment.results)

    def compile(
        self, program: ReferenceProgram, fragment: FragmentModule, options: CompileOptions
    ) -> ReferenceProgram:
        return program

    def code_from_bytes(self, data: bytes) -> ReferenceProgram:
        """What `ReferenceProgram.to_bytes` wrote; see `Target`."""
        try:
            return ReferenceProgram(*pickle.loads(data))
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError) as error:
            raise ValueError(f"no program: {error}") from error

    def code_text(self, code: ReferenceProgram, what: str) -> str:
        """There are none."""
        raise KeyError(what)
