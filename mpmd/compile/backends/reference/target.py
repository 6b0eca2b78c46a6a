"""The reference as a target of the driver: a program is its thunks."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from mpmd.compile.backends.reference.run_thunks import Memory, run_program
from mpmd.compile.buffers.assignment import Allocation, BufferAssignment, Slice
from mpmd.compile.buffers.offsets import DeviceMemory
from mpmd.compile.compile_options import CompileOptions
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.planner.planned_kernel import PlannedKernel
from mpmd.compile.pipelines import optimization_pipeline, scheduling_pipeline
from mpmd.compile.thunks.thunk import Thunk
from mpmd.cost.device import HOST, Device
from mpmd.support.passes import Pass


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
