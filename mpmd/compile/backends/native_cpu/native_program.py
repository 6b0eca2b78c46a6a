"""A native program: kernels in order, loops and branches around them, one entry for all threads.

    void run(i64 thread, i64 threads, ptr table)

Every thread runs the same steps, takes its share of each kernel's units and meets the others at barriers.
The table holds the caller's pointers, the workspaces and the barrier, then the memory of the mesh and the
device's number.  Nothing here knows of XLA.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mpmd.compile.backends.native_cpu.barrier import DEVICE_AT, FUNCTIONS, MET_AT, MeshLayout
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import KernelSequence
from mpmd.compile.backends.native_cpu.mesh_collectives import Address, Exchange, ExchangeEntry, WriteDevice
from mpmd.compile.backends.native_cpu.shared import CpuKernel, SharedFunction
from mpmd.compile.backends.native_cpu.threads import Barrier
from mpmd.compile.llvm.cpu import LINE_BYTES
from mpmd.compile.llvm.function_builder import FunctionBuilder, Index, Module
from mpmd.compile.llvm.llvm_types import Value, constant
from mpmd.errors import CompileError

_MIN_SHARED_UNITS = 8


@dataclass(frozen=True)
class Run:
    """A kernel on some buffers.

    Attributes:
        kernel: the kernel; kernels of one program that share a name are one function.
        addresses: where each of its pointers points.
        waits: whether all earlier steps must be finished first.
    """

    kernel: CpuKernel
    addresses: Mapping[str, Address]
    waits: bool = True


@dataclass(frozen=True)
class Alone:
    """Steps that the first thread does, one after the other, while the others go on to the next wait.

    Attributes:
        steps: its steps, without waits between them.
        waits: whether all earlier steps must be finished first.
    """

    steps: tuple[Step, ...]
    waits: bool = True


@dataclass(frozen=True)
class Repeat:
    """Steps done a number of times.

    Attributes:
        times: how often.
        body: the steps; its first step waits for its last.
    """

    times: int
    body: tuple[Step, ...]


@dataclass(frozen=True)
class While:
    """Steps done while a flag is set.

    Attributes:
        test: steps that compute the flag.
        flag: a byte, 0 or 1.
        body: the steps.
    """

    test: tuple[Step, ...]
    flag: Address
    body: tuple[Step, ...]


@dataclass(frozen=True)
class Choose:
    """One of several lists of steps.

    Attributes:
        selector: an `s32`; a number outside of the list means its last entry.
        branches: the lists.
    """

    selector: Address
    branches: tuple[tuple[Step, ...], ...]


Step = Run | Alone | Repeat | While | Choose | Exchange | WriteDevice


@dataclass(frozen=True)
class ThreadedProgram:
    """Steps over a table of pointers.

    Attributes:
        name: symbol of the entry.
        pointers: how many pointers the caller gives.
        steps: the steps.
        devices: how many devices run it together.
    """

    name: str
    pointers: int
    steps: tuple[Step, ...]
    devices: int = 1

    @property
    def workspace_bytes(self) -> int:
        """Size of one thread's workspace, in whole cache lines."""
        most = max((k.workspace_bytes for k in self.kernels()), default=0)
        return -(-most // LINE_BYTES) * LINE_BYTES

    def kernels(self) -> list[CpuKernel]:
        """The kernels of all steps, in order."""
        moves = [m.kernel for step in _of_type(self.steps, Exchange) for m in step.moves]
        return [r.kernel for r in runs(self.steps)] + moves

    @functools.cached_property
    def mesh(self) -> MeshLayout | None:
        """The memory that its devices share; None if they never meet."""
        exchanges = _of_type(self.steps, Exchange)
        if not exchanges:
            return None
        arrays = max(e.first + len(e.arrays) for e in exchanges)
        return MeshLayout(self.devices, arrays, 1 + max(e.number for e in exchanges))

    def emit(self, module: Module) -> list[SharedFunction]:
        """Add all kernels and the entry to a module; returns the shared functions that they call.

        Raises:
            CompileError: a step lacks an address for one of its kernel's pointers, or has one outside of the
                table.
        """
        shared: dict[str, SharedFunction] = {Barrier().name: Barrier()}
        if self.mesh is not None:
            shared.update({f.name: f for f in FUNCTIONS})
        for run in runs(self.steps):
            self._check(run)
        for kernel in self.kernels():
            if not module.defines(kernel.name):
                shared.update({s.name: s for s in kernel.emit(module)})
        arguments = [("thread", "i64"), ("threads", "i64"), ("table", "ptr")]
        with FunctionBuilder(module, self.name, arguments, plain=True) as f:
            _Entry(self, f).emit()
        return [shared[name] for name in sorted(shared)]

    def _check(self, run: Run) -> None:
        missing = [p for p in run.kernel.pointers if p not in run.addresses]
        if missing:
            raise CompileError(f"kernel {run.kernel.name} has no address for {', '.join(missing)}")
        for name, address in run.addresses.items():
            if not 0 <= address.entry < self.pointers:
                raise CompileError(
                    f"kernel {run.kernel.name}: {name} is at pointer {address.entry} of {self.pointers}"
                )


def runs(steps: Sequence[Step]) -> list[Run]:
    """All kernel runs inside of steps, in order."""
    return _of_type(steps, Run)


_Kind = TypeVar("_Kind", bound=Step)


def _of_type(steps: Sequence[Step], kind: type[_Kind]) -> list[_Kind]:
    chosen: list[_Kind] = []
    for step in steps:
        if isinstance(step, kind):
            chosen.append(step)
        for part in _parts(step):
            chosen += _of_type(part, kind)
    return chosen


def _parts(step: Step) -> tuple[tuple[Step, ...], ...]:
    if isinstance(step, Choose):
        return step.branches
    if isinstance(step, While):
        return (step.test, step.body)
    if isinstance(step, Alone):
        return (step.steps,)
    return (step.body,) if isinstance(step, Repeat) else ()


class _Entry:
    def __init__(self, program: ThreadedProgram, f: FunctionBuilder) -> None:
        self.program = program
        self.f = f
        self.thread, self.threads = f.arguments["thread"], f.arguments["threads"]
        table = f.arguments["table"]
        self.table = [f.load(table, "ptr", k) for k in range(program.pointers)]
        workspaces = f.load(table, "ptr", program.pointers)
        self.workspace = f.offset(workspaces, f.imul(self.thread, program.workspace_bytes))
        self.barrier = f.load(table, "ptr", program.pointers + 1)
        self.turn = 0  # kernels of few units since the last wait
        self.alone = False  # only the first thread comes here

    def emit(self) -> None:
        self._steps(self.program.steps)

    def wait(self) -> None:
        if self.alone:
            return
        self.turn = 0
        self.f.call(Barrier().name, self.barrier, self.threads)

    def address(self, address: Address) -> Value:
        return self.f.offset(self.table[address.entry], address.offset)

    def _steps(self, steps: Sequence[Step], *, first_waits: bool = False) -> None:
        f = self.f
        for number, step in enumerate(steps):
            if isinstance(step, Run | Alone):
                if (step.waits and number) or (first_waits and not number):
                    self.wait()
                if isinstance(step, Run):
                    self._run(step)
                else:
                    self._alone(step)
                continue
            if number or first_waits:
                self.wait()
            if isinstance(step, Repeat):
                with f.loop(0, step.times) as loop:
                    # between rounds: the first step of the body reads what the last one wrote
                    with f.when(f.compare("ne", loop.i, constant(0, "i64"))):
                        self.wait()
                    self._steps(step.body)
            elif isinstance(step, While):
                self._while(step)
            elif isinstance(step, Choose):
                self._choose(step)
            elif isinstance(step, Exchange):
                assert self.program.mesh is not None
                ExchangeEntry(self, self.program.name, self.program.mesh).exchange(step)
            else:
                self._write_device(step)

    def _run(self, run: Run) -> None:
        """This thread's share of a kernel.

        Of kernels with few units that do not wait for each other, another thread takes the largest share each
        time: else one thread would do all that cannot be divided.
        """
        f, units = self.f, run.kernel.units
        pointers = [self.address(run.addresses[p]) for p in run.kernel.pointers]
        if self.alone:
            f.call(run.kernel.name, *pointers, self.workspace, f.index(0), f.index(units))
            return
        place: Index = self.thread
        if units < _MIN_SHARED_UNITS:
            place = f.irem(f.iadd(self.thread, self.turn), self.threads) if self.turn else place
            self.turn += 1
        # Shares are runs of units, in the order of threads: neighbouring units, which share lines, are of
        # one thread.
        begin = f.index(f.idiv(f.imul(place, units), self.threads))
        end = f.index(f.idiv(f.imul(f.iadd(place, 1), units), self.threads))
        with f.when(f.compare("slt", begin, end)):
            f.call(run.kernel.name, *pointers, self.workspace, begin, end)

    def _alone(self, step: Alone) -> None:
        f, outer = self.f, self.alone
        with f.when(f.compare("eq", self.thread, constant(0, "i64"))):
            self.alone = True
            self._steps(step.steps)
        self.alone = outer

    def _while(self, step: While) -> None:
        f = self.f
        with f.repeat() as leave_if:
            self._steps(step.test)
            self.wait()
            # All threads read the flag after the wait behind the test, and the body begins with another:
            # nothing changes it before the last has read it.
            flag = f.load(self.address(step.flag), "i8")
            leave_if(f.compare("eq", flag, constant(0, "i8")))
            if self.program.mesh is not None:  # without the others the flag may stay set for ever
                met = f.load(f.offset(self.barrier, MET_AT), "i64")
                leave_if(f.compare("eq", met, constant(0, "i64")))
            self._steps(step.body, first_waits=True)
            self.wait()

    def _choose(self, step: Choose) -> None:
        f = self.f
        last = len(step.branches) - 1
        selector = f.load(self.address(step.selector), "i32")
        legal = f.compare("ult", selector, constant(last, "i32"))
        chosen = f.select(legal, selector, constant(last, "i32"))
        self.wait()  # a branch may overwrite its own selector
        for number, branch in enumerate(step.branches):
            with f.when(f.compare("eq", chosen, constant(number, "i32"))):
                self._steps(branch)

    def _write_device(self, step: WriteDevice) -> None:
        f = self.f
        with f.when(f.compare("eq", self.thread, constant(0, "i64"))):
            device = f.load(f.offset(self.barrier, DEVICE_AT), "i64")
            f.store(f.op(f"trunc i64 {device} to i32", "i32"), self.address(step.target))
        self.wait()


def sequence_steps(
    sequence: KernelSequence,
    operands: Sequence[Address],
    temporaries: Sequence[Address],
) -> list[Run]:
    """The steps of a plan's kernels; each waits for all before it.

    Args:
        sequence: kernels and their temporaries.
        operands: where each operand of the plan is.
        temporaries: where each temporary of the sequence is.
    """
    places = {f"p{k}": address for k, address in enumerate(operands)}
    places.update({t.name: a for t, a in zip(sequence.temporaries, temporaries, strict=True)})
    return [Run(kernel, {p: places[p] for p in kernel.pointers}) for kernel in sequence.kernels]
