"""Thunks as steps of a native program: kernels get code, slices get addresses, waiting follows from both.

Products of a matrix and a vector leave most of a register tile empty.  Where the matrix is contiguous along
K, dot products are used (`gemm/thin.py`); where it is contiguous along its rows, the product is a reduction:
one of its columns times a number is added to the result, k times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpmd.compile.backends.native_cpu.attention.attention_kernel import AttentionKernel
from mpmd.compile.backends.native_cpu.dispatch import is_small
from mpmd.compile.backends.native_cpu.gemm.gemm_kernel import gemm_kernel
from mpmd.compile.backends.native_cpu.gemm.problem import Gemm, Matrix
from mpmd.compile.backends.native_cpu.kernels.loop import PlanEpilogue
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import KernelSequence, plan_kernels
from mpmd.compile.backends.native_cpu.mesh_collectives import (
    OWN,
    Exchange,
    Move,
    Peer,
    PeerKernel,
    WriteDevice,
    members_of,
    peer_kernels,
    published,
    ranks_of,
)
from mpmd.compile.backends.native_cpu.native_program import (
    Address,
    Alone,
    Choose,
    Run,
    Step,
    ThreadedProgram,
    While,
    sequence_steps,
)
from mpmd.compile.backends.native_cpu.shared import CpuKernel
from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.buffers.assignment import BufferAssignment, Slice
from mpmd.compile.kernels.index import Index, constant, dim
from mpmd.compile.kernels.kernel_plan import KernelPlan
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.kernels.product_plans import MatmulPlan, View
from mpmd.compile.llvm.cpu import LINE_BYTES, MEMORY, CpuTarget
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
    conflict,
)


def as_reduction(thunk: MatmulThunk) -> KernelThunk | None:
    """The same product as a reduction, or None where tiles are better."""
    plan = thunk.plan
    if not (plan.m and plan.n and plan.k) or plan.epilogue is not None:
        return None
    if plan.n == 1 and plan.a.row == plan.c.row == 1 and plan.m > 1:
        return _columns(thunk, plan.m, plan.a, plan.b, plan.a.column, plan.b.row, swapped=False)
    if plan.m == 1 and plan.b.column == plan.c.column == 1 and plan.n > 1:
        return _columns(thunk, plan.n, plan.b, plan.a, plan.b.row, plan.a.column, swapped=True)
    return None


def _size(view: View, batch: tuple[int, ...], rows: int, columns: int) -> int:
    """Elements of an array up to the last one that a view reaches."""
    steps = zip((*batch, rows, columns), (*view.batch, view.row, view.column))
    return view.offset + sum((extent - 1) * stride for extent, stride in steps) + 1


def _place(view: View, indices: list[tuple[int, int]]) -> Index:
    """Offset of a view, its batch dims first, and so many steps along some dims."""
    index = constant(view.offset)
    for number, stride in [*enumerate(view.batch), *indices]:
        index = index + dim(number) * stride
    return index


def _accumulator(plan: MatmulPlan) -> str:
    return "f64" if plan.a.dtype == "f64" else "f32"


def _columns(
    thunk: MatmulThunk, length: int, matrix: View, vector: View, along: int, step: int, *, swapped: bool
) -> KernelThunk:
    """Sums over k, the outer dim, of rows that are as long as the result."""
    plan, batch = thunk.plan, len(thunk.plan.batch)
    b = PlanBuilder(plan.name, (*plan.batch, plan.k, length), batch_dims=batch, row_dims=1)
    sums, k, row = _accumulator(plan), batch, batch + 1
    shapes = {"a": (plan.m, plan.k), "b": (plan.k, plan.n)}
    wide = b.operand("matrix", matrix.dtype, _size(matrix, plan.batch, *shapes["b" if swapped else "a"]))
    thin = b.operand("vector", vector.dtype, _size(vector, plan.batch, *shapes["a" if swapped else "b"]))
    c = b.operand("c", plan.c.dtype, _size(plan.c, plan.batch, plan.m, plan.n))
    x = b.convert(b.load(wide, _place(matrix, [(k, along), (row, 1)])), sums)
    y = b.convert(b.load(thin, _place(vector, [(k, step)])), sums)
    total = b.reduce_column("add", b.apply("multiply", x, y))
    b.store(c, _place(plan.c, [(row, 1)]), b.convert(total, plan.c.dtype))
    slices = (thunk.b, thunk.a) if swapped else (thunk.a, thunk.b)
    return KernelThunk(thunk.name, b.finish(), (*slices, thunk.operands[0]))


@dataclass(frozen=True)
class NativeProgram:
    """Steps, and the memory they work in.

    Attributes:
        threaded: its table holds the parameters, the results and the arena.
        arena_bytes: bytes of the arena: constants, temporaries, partial sums of kernels.
        constants: bytes at the beginning of the arena.
    """

    threaded: ThreadedProgram
    arena_bytes: int
    constants: bytes

    @property
    def kept_bytes(self) -> int:
        """What one device with one thread keeps from call to call."""
        return max(LINE_BYTES, self.arena_bytes) + max(LINE_BYTES, self.threaded.workspace_bytes)


class PlanCode:
    """The CPU kernels of plans, each made once.

    Args:
        target: the CPU.
    """

    def __init__(self, target: CpuTarget) -> None:
        self.target = target
        self._sequences: dict[str, KernelSequence] = {}

    def of(self, plan: KernelPlan, in_place: tuple[int, ...] = ()) -> KernelSequence:
        """The kernels of a plan with such results in place; equal plans share theirs."""
        key = f"{plan.text()} {in_place}"
        sequence = self._sequences.get(key)
        if sequence is None:
            named = replace(plan, name=f"kernel{len(self._sequences)}")
            sequence = self._sequences[key] = plan_kernels(named, self.target, in_place)
        return sequence

    def scratch_bytes(self, plan: KernelPlan) -> int:
        """Bytes that the kernels of a plan share while they run."""
        if plan.kind in ("loop", "row"):
            return 0
        sequence = plan_kernels(plan, self.target)
        places = scratch_places(sequence)
        return max((at + t.bytes for at, t in zip(places, sequence.temporaries)), default=0)


def scratch_places(sequence: KernelSequence) -> list[int]:
    """Where each temporary of a sequence lies in its scratch memory."""
    places, at = [], 0
    for temporary in sequence.temporaries:
        step = MEMORY.alignment_of(temporary.bytes)
        places.append(-(-at // step) * step)
        at = places[-1] + temporary.bytes
    return places


def native_program(
    name: str, thunks: Sequence[Thunk], assignment: BufferAssignment, code: PlanCode
) -> NativeProgram:
    """The program of a sequence of thunks.

    Args:
        name: symbol of its entry.
        thunks: what it does.
        assignment: where its values lie.
        code: kernels of plans, and for which CPU.

    Raises:
        CompileError: an epilogue does not fit its product.
    """
    lowering = _Lowering(assignment, code)
    steps = lowering.steps(thunks)
    constants = bytearray(assignment.constant_bytes)
    for value in assignment.constants:
        place = assignment.slices[value]
        literal = value.instruction.literal
        assert literal is not None and not isinstance(literal, tuple)
        data = literal.tobytes()
        constants[place.offset : place.offset + len(data)] = data
    pointers = lowering.arena + 1
    arena_bytes = lowering.constant_bytes + assignment.arena_bytes
    module = assignment.occupancy.dataflow.module
    devices = module.replica_count * module.num_partitions
    return NativeProgram(
        ThreadedProgram(name, pointers, tuple(steps), devices), arena_bytes, bytes(constants)
    )


def _is_apart(thunk: Thunk) -> bool:
    """Whether a thunk waits for all before it, and all after it wait for it."""
    if isinstance(thunk, CollectiveThunk):
        return thunk.plan.devices > 1
    return isinstance(thunk, WhileThunk | ConditionalThunk | DeviceThunk)


class _Sequence:
    """Steps in order: a kernel waits only if one since the last wait touches the same memory.

    Small thunks that each need one before them run on the first thread, one after the other, as one step.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._running: list[Thunk] = []  # since the last wait
        self._must_wait = False
        self._chain: list[Thunk] = []  # small ones that make up the last step

    def add_apart(self, steps: Sequence[Step]) -> None:
        """Steps that wait for all before them, and for which the next one waits."""
        self.steps += steps
        self._running, self._chain, self._must_wait = [], [], True

    def add(self, thunk: Thunk, runs: Sequence[Run]) -> None:
        waits = self._waits(thunk)
        first, *others = runs
        self.steps += [replace(first, waits=waits), *others]
        # The second kernel of a plan waits for the first: all that ran before is done by then, too.
        if others:  # which wait for the first
            self._running = [thunk]
        self._chain = []

    def add_small(self, thunk: Thunk, steps: Sequence[Step]) -> None:
        if self._continues_chain(thunk):
            last = self.steps[-1]
            # The chain becomes one step of the first thread, without waits between its thunks. They count
            # as running: a thunk that conflicts with one waits.
            before = last.steps if isinstance(last, Alone) else (last,)
            self.steps[-1] = Alone((*before, *steps), last.waits if isinstance(last, Run | Alone) else True)
            self._running.append(thunk)
            self._chain.append(thunk)
            return
        waits, first = self._waits(thunk), steps[0]
        if len(steps) == 1 and isinstance(first, Run):
            self.steps.append(replace(first, waits=waits))
        else:
            self.steps.append(Alone(tuple(steps), waits))
        self._chain = [thunk]

    def _waits(self, thunk: Thunk) -> bool:
        """Whether a thunk waits for those that are running, to which it is added."""
        waits = self._must_wait or any(conflict(thunk, other) for other in self._running)
        self._running = [thunk] if waits else [*self._running, thunk]
        self._must_wait = False
        return waits

    def _continues_chain(self, thunk: Thunk) -> bool:
        """Whether a thunk conflicts with the chain, and with nothing else that may still run."""
        # A conflict with something that other threads run needs a wait of all; within the chain, the first
        # thread's order is enough.
        inside = {id(t) for t in self._chain}
        others = [t for t in self._running if id(t) not in inside]
        if self._must_wait or any(conflict(thunk, other) for other in others):
            return False
        return any(conflict(thunk, other) for other in self._chain)


class _Lowering:
    def __init__(self, assignment: BufferAssignment, code: PlanCode) -> None:
        self.assignment = assignment
        self.code = code
        self.target = code.target
        self.arena = len(assignment.allocations) - 2
        self.constant_bytes = MEMORY.aligned(assignment.constant_bytes)
        self._products: dict[str, CpuKernel] = {}
        self._attentions: dict[str, AttentionKernel] = {}
        self._exchanges, self._published = 0, 0

    def address(self, place: Slice, elements: int = 0, dtype: str = "u8") -> Address:
        """Where a slice is at run time, and so many elements further."""
        offset = place.offset + elements * BYTES[dtype]
        # Constants and temporaries are two allocations, and one block at run time: the arena, constants
        # first.
        if place.allocation == self.arena:  # the constants
            return Address(self.arena, offset)
        if place.allocation > self.arena:
            return Address(self.arena, self.constant_bytes + offset)
        return Address(place.allocation, offset)

    def steps(self, thunks: Sequence[Thunk]) -> list[Step]:
        sequence = _Sequence()
        for thunk in thunks:
            if _is_apart(thunk):
                apart = self._apart(thunk)
                if is_small(thunk):
                    sequence.add_small(thunk, apart)
                else:
                    sequence.add_apart(apart)
                continue
            runs = self._runs(thunk)
            if runs and is_small(thunk):
                sequence.add_small(thunk, runs)
            elif runs:
                sequence.add(thunk, runs)
        return sequence.steps

    def _apart(self, thunk: Thunk) -> Sequence[Step]:
        if isinstance(thunk, DeviceThunk):
            return [WriteDevice(self.address(thunk.target))]
        if isinstance(thunk, CollectiveThunk):
            return [self._exchange(thunk)]
        if isinstance(thunk, WhileThunk):
            condition, body = self.steps(thunk.condition), self.steps(thunk.body)
            return [While(tuple(condition), self.address(thunk.flag), tuple(body))]
        assert isinstance(thunk, ConditionalThunk)
        branches = tuple(tuple(self.steps(b)) for b in thunk.branches)
        return [Choose(self.address(thunk.selector), branches)]

    def _exchange(self, thunk: CollectiveThunk) -> Exchange:
        plan, number, first = thunk.plan, self._exchanges, self._published
        kernels = peer_kernels(plan)
        places = {array: place for place, array in enumerate(published(kernels))}
        self._exchanges += 1
        self._published += len(places)
        arrays = tuple(self.address(thunk.arrays[array]) for array in places)
        moves = tuple(self._move(thunk, kernel, places) for kernel in kernels)
        return Exchange(number, plan.groups, arrays, first, members_of(plan), ranks_of(plan), moves)

    def _move(self, thunk: CollectiveThunk, across: PeerKernel, published: dict[int, int]) -> Move:
        (kernel,) = self.code.of(across.plan, across.plan.results).kernels
        places = {}
        for number, (pointer, operand) in enumerate(zip(across.pointers, across.plan.operands, strict=True)):
            own = pointer.member == OWN
            array = self.address(thunk.arrays[pointer.array]) if own else published[pointer.array]
            places[f"p{number}"] = Peer(pointer.member, array, pointer.stride * BYTES[operand.dtype])
        return Move(kernel, places, across.shared, across.devices)

    def _alone(self, thunk: CollectiveThunk) -> list[Run]:
        """A collective of one device: its kernels on its own arrays, one after the other."""
        runs = []
        for kernel in peer_kernels(thunk.plan):
            if kernel.devices is None or 0 in kernel.devices:
                operands = [self.address(thunk.arrays[pointer.array]) for pointer in kernel.pointers]
                runs += sequence_steps(self.code.of(kernel.plan, kernel.plan.results), operands, [])
        return runs

    def _runs(self, thunk: Thunk) -> list[Run]:
        if isinstance(thunk, CollectiveThunk):
            return self._alone(thunk)
        if isinstance(thunk, CopyThunk):
            thunk = _copy_kernel(thunk)
        if isinstance(thunk, MatmulThunk):
            reduction = as_reduction(thunk)
            # No scratch memory was assigned to a product, so the reduction must need none.
            if reduction is None or self.code.scratch_bytes(reduction.plan):  # a product has none
                return [self._matmul(thunk)]
            thunk = reduction
        if isinstance(thunk, AttentionThunk):
            return [self._attention(thunk)]
        assert isinstance(thunk, KernelThunk)
        sequence = self.code.of(thunk.plan, _in_place(thunk))
        temporaries: list[Address] = []
        if thunk.scratch is not None:
            start = self.address(thunk.scratch)
            temporaries = [Address(start.entry, start.offset + at) for at in scratch_places(sequence)]
        return sequence_steps(sequence, [self.address(s) for s in thunk.operands], temporaries)

    def _matmul(self, thunk: MatmulThunk) -> Run:
        plan = thunk.plan
        key = plan.text()
        kernel = self._products.get(key)
        if kernel is None:
            kernel = self._products[key] = self._gemm(plan, f"product{len(self._products)}")
        addresses = {
            "a": self.address(thunk.a, plan.a.offset, plan.a.dtype),
            "b": self.address(thunk.b, plan.b.offset, plan.b.dtype),
        }
        for number, place in thunk.operands.items():
            addresses["c" if plan.epilogue is None else f"p{number}"] = self.address(place)
        return Run(kernel, {p: addresses[p] for p in kernel.pointers})

    def _attention(self, thunk: AttentionThunk) -> Run:
        plan, key = thunk.plan, thunk.plan.text()
        kernel = self._attentions.get(key)
        if kernel is None:
            name = f"attention{len(self._attentions)}"
            kernel = self._attentions[key] = AttentionKernel(name, plan, self.target)
        views = plan.views
        addresses = {}
        for name, place in (*thunk.inputs.items(), *thunk.outputs.items()):
            view = views.get(name)
            addresses[name] = self.address(place, view.offset, view.dtype) if view else self.address(place)
        return Run(kernel, addresses)

    def _gemm(self, plan: MatmulPlan, name: str) -> CpuKernel:
        def matrix(view: View) -> Matrix:
            return Matrix(view.dtype, view.row, view.column, view.batch)

        gemm = Gemm(plan.m, plan.n, plan.k, matrix(plan.a), matrix(plan.b), matrix(plan.c), plan.batch)
        if plan.epilogue is None:
            return gemm_kernel(name, gemm, self.target)
        epilogue = PlanEpilogue(replace(plan.epilogue, name=f"{name}_epilogue"), plan.sums)
        epilogue.check(gemm)
        return gemm_kernel(name, gemm, self.target, epilogue)


def _in_place(kernel: KernelThunk) -> tuple[int, ...]:
    """Numbers of the results that lie over something that the kernel reads."""
    read = [s for number, s in enumerate(kernel.operands) if number not in kernel.plan.results]
    return tuple(k for k in kernel.plan.results if any(kernel.operands[k].overlaps(s) for s in read))


def _copy_kernel(copy: CopyThunk) -> KernelThunk:
    """A copy as a kernel, in the widest elements that fit."""
    dtype = next(d for d in ("u32", "u16", "u8") if copy.source.size % BYTES[d] == 0)
    count = copy.source.size // BYTES[dtype]
    build = PlanBuilder("copy", (count,))
    source = build.operand("source", dtype, count)
    build.store(build.operand("target", dtype, count), dim(0), build.load(source, dim(0)))
    return KernelThunk(copy.name, build.finish(), (copy.source, copy.target))
