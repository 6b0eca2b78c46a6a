"""A target: everything that differs between kinds of devices for the compiler.

`driver.py` is one list for all targets; it asks a target for its passes, its memory, and for the way from
thunks to an executable program.  `backends/targets.py` is the table of targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mpmd.compile.buffers.assignment import BufferAssignment
from mpmd.compile.buffers.offsets import DeviceMemory
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.planner.planned_kernel import PlannedKernel
from mpmd.compile.options import CompileOptions
from mpmd.compile.thunks.thunk import Thunk
from mpmd.cost.device import Device
from mpmd.support.passes import Pass


class ThunkProgram(Protocol):
    """The steps of a fragment with addresses, before there is code of them."""

    @property
    def arena_bytes(self) -> int:
        """Bytes of temporary memory of a call, constants included."""

    @property
    def constants(self) -> bytes:
        """Initial and constant content of the temporary memory."""


class Code(Protocol):
    """Code of a program: it can be stored on disk and loaded in another process."""

    @property
    def size(self) -> int:
        """Bytes of machine code."""

    def to_bytes(self) -> bytes:
        """The code as bytes; equal code gives equal bytes.  `Target.code_from_bytes` reads them."""


class Target(Protocol):
    """A kind of device for which fragments are compiled."""

    @property
    def code_texts(self) -> Mapping[str, str]:
        """The texts of its code, as `Executable.as_text` names them → their file names in a dump."""

    @property
    def device(self) -> Device:
        """What the cost models price kernels for: a description, so that choices are the same everywhere."""

    @property
    def memory(self) -> DeviceMemory:
        """Its memory spaces, and where arrays begin."""

    def key(self) -> str:
        """Text that differs whenever code for two targets may differ; part of cache keys."""

    def passes(self, devices: int, options: CompileOptions) -> Sequence[Pass]:
        """The passes before kernels are planned.

        Args:
            devices: how many run the program together.
            options: the compile options.
        """

    def schedule(self, devices: int) -> Sequence[Pass]:
        """The passes after kernels are planned and donated parameters are paired with results."""

    def refuses(self, instruction: HloInstruction, planned: PlannedKernel | None) -> str:
        """Why there is no code for an instruction and its kernel, if it has one; "" if there is.

        Collectives are kernels, too: a plan says what each device gets; a target that cannot get it there
        refuses the plan.
        """

    def scratch_bytes(self, planned: PlannedKernel | None) -> int:
        """Bytes that a kernel needs while it runs, beside operands and results."""

    def program(self, name: str, thunks: Sequence[Thunk], assignment: BufferAssignment) -> ThunkProgram:
        """The `ThunkProgram` of a sequence of thunks.

        Args:
            name: symbol of its entry.
            thunks: what it does.
            assignment: where its values are.

        Raises:
            CompileError: the target cannot run it.
        """

    def compile(self, program: Any, fragment: FragmentModule, options: CompileOptions) -> Code:
        """The code of a program that `program` built.

        Raises:
            CompileError: a kernel that the options name does not fit.
        """

    def code_from_bytes(self, data: bytes) -> Code:
        """The code in the bytes that `Code.to_bytes` wrote.

        Raises:
            ValueError: the bytes are something else; or `struct.error`, if there are too few.
        """

    def code_text(self, code: Any, what: str) -> str:
        """One of `code_texts`."""
