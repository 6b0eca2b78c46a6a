"""From a plan to the Triton kernels that compute it: one, or two with partial sums in between.

    tile        each program computes one tile; rows that it reduces are in it as a whole
    long rows   each program iterates over the pieces of its rows, once per stage of reductions that
                do not follow a maximum as it grows
    sums        each program iterates over rows and adds them up

Where several programs share a column, they leave partial sums in scratch memory; a second kernel adds those.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Collection, Iterator, Sequence

from mpmd.compile.backends.native_gpu.triton.accumulators import RowAccumulators
from mpmd.compile.backends.native_gpu.triton.conversions import HALF, pointer_type
from mpmd.compile.backends.native_gpu.triton.emit import TileWriter, unsupported
from mpmd.compile.backends.native_gpu.triton.online import RowReductions
from mpmd.compile.backends.native_gpu.triton.tiling import (
    PlanTiling,
    resized,
    tiling_of,
    tiling_of_few_rows,
)
from mpmd.compile.kernels.index import Index, dim, linear, strides_of
from mpmd.compile.kernels.kernel_plan import (
    COLUMN,
    ELEMENT,
    ROW,
    IndexValue,
    KernelPlan,
    Load,
    ReduceNode,
    Store,
    store_arguments,
    store_level,
)
from mpmd.compile.kernels.normalise import normalise
from mpmd.compile.kernels.operations import DTYPE_BYTES
from mpmd.compile.kernels.picking import decided, with_picked_elements
from mpmd.compile.kernels.plan_builder import PlanBuilder, renumbered
from mpmd.errors import CompileError

ALIGNMENT = 256
"""Bytes: where arrays of scratch memory begin."""
_LOADED_BYTES, _MAX_BESIDE = 16, 8
"""Of a thread at once, and elements."""
PROGRAM = "tl.program_id(0)"
"""The number of a program in the text of a kernel."""


@dataclasses.dataclass(frozen=True)
class PrintedKernel:
    """A kernel.

    Attributes:
        kind: of its plan.
        body: the text of its function, from the parameters on.
        pointers: the type of each argument, `*fp32`.
        aligned: whether each argument is a multiple of 16 bytes, so that loads and stores are wide.
        operands: the arguments: numbers of operands of the plan, then of its scratch arrays.
        sizes: bytes of each argument's array; they and the grid may differ between kernels of one name.
        reads, writes: numbers of the operands that it reads, and of those that it writes.
        grid: how many programs run it.
        warps: of each program.
        flops: of its matrix products; `factors` is the type of what they multiply.
        parts: the text of functions that are its own.
        smaller: what computes the same with a smaller tile, for a GPU on which this one does not fit.
    """

    kind: str
    body: str
    pointers: tuple[str, ...]
    aligned: tuple[bool, ...]
    operands: tuple[int, ...]
    sizes: tuple[int, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    grid: int
    warps: int
    flops: float = 0.0
    factors: str = "f32"
    parts: tuple[str, ...] = ()
    smaller: PrintedKernel | None = None

    @functools.cached_property
    def name(self) -> str:
        code = f"{self.body} {self.pointers} {self.aligned} {self.warps}"
        return f"{self.kind}_{hashlib.sha256(code.encode()).hexdigest()[:8]}"

    @property
    def source(self) -> str:
        return "\n\n".join([*self.parts, f"@triton.jit\ndef {self.name}{self.body}"])

    def with_alignment(self, aligned: Sequence[bool]) -> PrintedKernel:
        """The same kernel for arguments that are not all aligned."""
        if self.aligned == tuple(aligned):
            return self
        smaller = self.smaller.with_alignment(aligned) if self.smaller is not None else None
        return dataclasses.replace(self, aligned=tuple(aligned), smaller=smaller)


@dataclasses.dataclass(frozen=True)
class PlanKernels:
    """The kernels of a plan, each finished before the next.

    Attributes:
        kernels: in order.
        scratch: offsets of the scratch arrays, numbered after the plan's operands.
        scratch_bytes: of all of them.
    """

    kernels: tuple[PrintedKernel, ...]
    scratch: tuple[int, ...] = ()
    scratch_bytes: int = 0


@functools.lru_cache(maxsize=4096)
def plan_kernels(plan: KernelPlan, programs: int, points: int = 0) -> PlanKernels:
    """The kernels of a plan.

    Args:
        plan: the plan.
        programs: how many keep the device busy.
        points: of a tile; by rules if 0.

    Raises:
        CompileError: there is no kernel for it.
    """
    reason = refusal(plan)
    if reason:
        raise CompileError(reason)
    plan = normalise(plan)
    if plan.kind == "loop" and not plan.size:
        return PlanKernels(())
    tiling = tiling_of(plan, programs)
    if tiling.looped and not tiling.sums_columns:
        tiling = tiling_of(normalise(with_picked_elements(plan)), programs)
    if points:
        tiling = resized(tiling, points, programs)
    if not tiling.sums_columns:
        return PlanKernels((_long_rows(tiling) if tiling.looped else _tile(tiling),))
    if tiling.chunks == 1:
        return PlanKernels((_sums(tiling, ()),))
    partial, combined = _combination(plan, tiling.chunks)
    sizes = [-(-size * DTYPE_BYTES[dtype] // ALIGNMENT) * ALIGNMENT for dtype, size in partial]
    places = tuple(sum(sizes[:k]) for k in range(len(sizes)))
    last = _sums(tiling_of_few_rows(combined), ())
    return PlanKernels((_sums(tiling, partial), last), places, sum(sizes))


def refusal(plan: KernelPlan) -> str:
    """Why there is no kernel for a plan, or ""."""
    plan = normalise(plan)
    if plan.kind == "mixed" and tiling_of(plan, 1).looped:
        return f"no GPU kernel adds up rows of {plan.row_size} elements that it also reduces"
    return unsupported(plan)


def _tile(tiling: PlanTiling) -> PrintedKernel:
    write = TileWriter(tiling)
    below = _program(write, tiling)
    write.rows(below)
    write.columns("cb")
    write.stores(tiling.plan.stores)
    return _finished(write, tiling)


def _long_rows(tiling: PlanTiling) -> PrintedKernel:
    """An iteration for reductions that need no other one, for others, and one that stores."""
    write, plan = TileWriter(tiling), tiling.plan
    _program(write, tiling)
    write.rows("pid")
    for each in RowReductions(plan).passes():
        needed = [a for k in each.reductions for a in plan.uses[k]]
        hoist(write, needed, tiling.columns, each.reductions)
        sums = RowAccumulators(write, each, _beside_each_other(plan))
        sums.begin()
        for _ in _pieces(write):
            sums.add_tile()
        sums.finish()
    wide = [s for s in plan.stores if store_level(plan, s) == ELEMENT]
    finished = [s for s in plan.stores if s not in wide]
    hoist(write, [n for s in wide for n in store_arguments(s)], tiling.columns)
    write.prepare(finished)
    if any(isinstance(n, Load) and n.index.values() for n in plan.nodes):
        write.line("tl.debug_barrier()")  # others may store where a thread has read an element
    if wide:
        for _ in _pieces(write):
            write.stores(wide)
    write.stores(finished)
    return _finished(write, tiling)


def _beside_each_other(plan: KernelPlan) -> int:
    """Elements of a row that a thread loads at once, of the widest type."""
    loaded = [n.dtype for k, n in enumerate(plan.nodes) if isinstance(n, Load) and plan.levels[k] == ELEMENT]
    return min([_MAX_BESIDE, *(_LOADED_BYTES // int(DTYPE_BYTES[dtype]) for dtype in loaded)])


def _pieces(write: TileWriter) -> Iterator[None]:
    """The loops over columns: tiles whose points all exist, with the conditions known there, and the last."""
    steps, plan = write.tiling.column_steps, write.plan
    inside = steps.points // steps.side * steps.side
    known = decided(plan, {}, (*plan.extents[:-1], inside)) if plan.row_dims == 1 else {}
    for first, end, whole in ((0, inside, True), (inside // steps.side, steps.points, False)):
        if end > first * steps.side:
            with write.column_tiles(str(first), str(end), whole=whole):
                write.decided = known if whole else {}
                yield
                write.decided = {}


def hoist(
    write: TileWriter, needed: Sequence[int], dims: Sequence[int], changing: Collection[int] = ()
) -> None:
    """Computes what does not change along some dims before the loop over them, but for `changing`."""
    plan, reached, late = write.plan, set(needed), set(changing)
    for number in reversed(range(len(plan.nodes))):
        if number in reached and not write.is_known(number):
            reached |= set(plan.uses[number])
    for number, used in enumerate(plan.uses):
        if late & {number, *used}:
            late.add(number)
        elif number in reached and not plan.depends[number] & set(dims):
            write.value(number)


def _sums(tiling: PlanTiling, partial: Sequence[tuple[str, int]]) -> PrintedKernel:
    """Rows added up; with partial sums, they are stored and the finished values are another kernel's."""
    write, plan = TileWriter(tiling), tiling.plan
    sums = [k for k, n in enumerate(plan.nodes) if isinstance(n, ReduceNode) and n.axis == COLUMN]
    inside = [s for s in plan.stores if store_level(plan, s) in (ELEMENT, ROW)]
    finished = [s for s in plan.stores if s not in inside]
    below = _program(write, tiling)
    write.line(f"chunk = {below} % {tiling.chunks}")
    write.batch(f"{below} // {tiling.chunks}")
    write.columns("cb")
    needed = [n for s in inside for n in store_arguments(s)] + [a for k in sums for a in plan.uses[k]]
    hoist(write, needed, tiling.rows)
    for number in sums:
        write.accumulator(number)
    with write.row_tiles("chunk"):
        write.prepare(inside)
        for number in sums:
            write.accumulate(number)
        write.stores(inside)
    for place, number in enumerate(sums):
        node = plan.nodes[number]
        assert isinstance(node, ReduceNode)
        if partial:
            write.partial(number, node, len(plan.operands) + place)
        else:
            write.define(number, write.reduced(node, f"a{number}", 0))
    if not partial:
        write.stores(finished)
    return _finished(write, tiling, partial)


def _combination(plan: KernelPlan, chunks: int) -> tuple[list[tuple[str, int]], KernelPlan]:
    """The arrays of partial sums, and the plan that finishes them; its operands follow `plan`'s."""
    batch, row = tuple(range(plan.batch_dims)), tuple(plan.row)
    extents = [*(plan.extents[d] for d in batch), chunks, *(plan.extents[d] for d in row)]
    build = PlanBuilder(plan.name, extents, batch_dims=len(batch), row_dims=len(row))
    for operand in plan.operands:
        build.operand(operand.name, operand.dtype, operand.size)
    moved = {d: dim(d) for d in batch} | {d: dim(len(batch) + 1 + k) for k, d in enumerate(row)}
    partial, numbers = [], dict[int, int]()
    for number, node in enumerate(plan.nodes):
        if isinstance(node, ReduceNode) and node.axis == COLUMN:
            wide = bool(plan.depends[node.arg] & set(row))
            dims = [*range(len(batch) + 1), *(range(len(batch) + 1, len(extents)) if wide else ())]
            shape = [extents[d] for d in dims]
            dtype = "f32" if node.dtype in HALF else node.dtype
            size = math.prod(shape)
            place = linear([dim(d) for d in dims], strides_of(shape))
            load = build.load(build.operand("", dtype, size), place)
            partial.append((dtype, size))
            numbers[number] = build.convert(build.reduce_column(node.op, load), node.dtype)
        elif not plan.depends[number] & set(plan.outer) and all(a in numbers for a in plan.uses[number]):
            if isinstance(node, Load | IndexValue):
                node = dataclasses.replace(node, index=node.index.substitute(moved, extents))
            numbers[number] = build.node(renumbered(node, numbers))
    for store in plan.stores:
        if store_level(plan, store) not in (ELEMENT, ROW):
            _add_store(build, store, store.index.substitute(moved, extents), numbers)
    return partial, build.finish()


def _add_store(build: PlanBuilder, store: Store, index: Index, numbers: dict[int, int]) -> None:
    where = numbers[store.where] if store.where >= 0 else -1
    place = index.renumber(numbers)
    build.store(store.operand, place, numbers[store.node], combine=store.combine, where=where)


def _program(write: TileWriter, tiling: PlanTiling) -> str:
    """Writes the number of the program and its column block; returns its number without the block."""
    wide = ".to(tl.int64)" if tiling.index_type == "int64" else ""
    write.line(f"pid = {PROGRAM}{wide}")
    if tiling.column_blocks <= 1:
        return "pid"
    if tiling.grid == tiling.column_blocks and not tiling.sums_columns:
        write.line("cb = pid")  # the text has no size in it: arrays of other sizes have the same kernel
        return "0"
    write.line(f"cb = pid % {tiling.column_blocks}")
    return f"pid // {tiling.column_blocks}"


def _finished(
    write: TileWriter, tiling: PlanTiling, partial: Sequence[tuple[str, int]] = ()
) -> PrintedKernel:
    arrays = [*((o.dtype, o.size) for o in tiling.plan.operands), *partial]
    operands = tuple(sorted(write.reads | write.writes))
    body = f"({', '.join(f'p{k}' for k in operands)}):\n{write.text()}"
    return PrintedKernel(
        kind=tiling.plan.kind,
        body=body,
        pointers=tuple(pointer_type(arrays[k][0]) for k in operands),
        aligned=(True,) * len(operands),
        operands=operands,
        sizes=tuple(int(DTYPE_BYTES[arrays[k][0]] * arrays[k][1]) for k in operands),
        reads=frozenset(write.reads),
        writes=frozenset(write.writes),
        grid=tiling.grid,
        warps=tiling.warps,
    )
