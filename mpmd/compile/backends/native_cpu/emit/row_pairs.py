"""Sums of bf16 over two rows at once, by the instruction that adds two products to a sum.

The elements of two rows in one column, put side by side, are such a pair; with ones as the other factors,
the instruction adds both to the column's sum in f32, and neither is widened.  It takes denormals for zero, as
every thread of XLA does.  Interleaving two registers leaves columns in an order of its own: within every
eight of them, four are in the one result and four in the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.backends.native_cpu.emit.accumulate import reduce_node
from mpmd.compile.backends.native_cpu.emit.places import Lanes
from mpmd.compile.backends.native_cpu.emit.scope import Scope
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.types import Value, constant, lanes_of, vector
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.kernels.plan import Apply, KernelPlan, Load

_GROUP = 8  # elements of 128 bits, within which registers are interleaved


def summed_loads(
    plan: KernelPlan, target: CpuTarget, leaves: Sequence[int], sums: Sequence[int]
) -> tuple[int, ...]:
    """For each of some sums over rows, the load of bf16 that it adds up; empty if one adds up anything else.

    Args:
        plan: the plan.
        target: the CPU.
        leaves: loads of neighbours, which nothing guards.
        sums: numbers of reductions.
    """
    if not target.bf16_dot or target.vector_bytes != 64:
        return ()
    found: list[int] = []
    for number in sums:
        node = reduce_node(plan, number)
        arg = plan.nodes[node.arg]
        source = arg.args[0] if isinstance(arg, Apply) and arg.op == "convert" else node.arg
        wanted = plan.nodes[source].dtype == "bf16" and node.dtype in ("f32", "bf16")
        if node.op != "add" or source not in leaves or not wanted:
            return ()
        found.append(source)
    return tuple(found)


def raw_vectors(row: Scope, load: Load, parts: Sequence[Lanes]) -> list[Value]:
    """The bits of some columns of a row, twice a vector of floats each."""
    f, last = row.f, row.plan.rank - 1
    places = [row.inside({last: part.start}).position(load.index) for part in parts]
    pointer = row.pointers[load.operand]
    return [f.load(pointer, vector("i16", part.count), at) for part, at in zip(parts, places, strict=True)]


def add_pairs(f: FunctionBuilder, rows: Sequence[Value], low: Value, high: Value) -> tuple[Value, Value]:
    """Add two vectors' width of some rows to the sums of their columns.

    Args:
        f: where the code goes.
        rows: the bits of the same columns in every row.
        low: one half of the sums so far, in the order that interleaving gives.
        high: the other half.
    """
    raw = [*rows, *([constant(0, rows[0].type)] * (len(rows) % 2))]
    for a, b in zip(raw[::2], raw[1::2], strict=True):
        low, high = _add(f, low, _interleaved(f, a, b, 0)), _add(f, high, _interleaved(f, a, b, 1))
    return low, high


def _interleaved(f: FunctionBuilder, a: Value, b: Value, half: int) -> Value:
    count = lanes_of(a.type)
    first = half * _GROUP // 2
    lanes = [g + first + k for g in range(0, count, _GROUP) for k in range(_GROUP // 2)]
    return f.shuffle(a, b, [lane for k in lanes for lane in (k, count + k)])


def _add(f: FunctionBuilder, total: Value, pairs: Value) -> Value:
    type_ = vector("bfloat", lanes_of(pairs.type))
    ones, name = constant(1.0, type_), "llvm.x86.avx512bf16.dpbf16ps.512"
    return f.intrinsic(name, total.type, total, f.cast("bitcast", pairs, type_), ones)


def in_order(f: FunctionBuilder, low: Value, high: Value) -> tuple[Value, Value]:
    """Sums in the order of their columns again, as two vectors."""
    count, four = lanes_of(low.type), _GROUP // 2
    order = [
        half * count + group * four + k
        for group in range(count // four)
        for half in (0, 1)
        for k in range(four)
    ]
    return f.shuffle(low, high, order[:count]), f.shuffle(low, high, order[count:])
