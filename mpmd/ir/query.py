"""Reading a program."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.extend.mlir.ir import OpView as Op
from jax.extend.mlir.ir import Value

from mpmd.ir.ops import Fragment, Func

PURE = "mpmd.pure"  # says of a call that what it calls only computes
CONSTANTS = ("stablehlo.constant", "sdy.constant")


def funcs(module: ir.Module) -> list[Func]:
    """The functions of a module, in order."""
    return [op for op in module.body.operations if isinstance(op, Func)]


def symbol_table(module: ir.Module) -> dict[str, Func]:
    """Function name -> function."""
    return {f.symbol: f for f in funcs(module)}


def module_of(op: Op) -> Op:
    """The `builtin.module` op around an op."""
    operation = op.operation
    while operation.name != "builtin.module":
        operation = operation.parent
    return operation.opview


def parent(op: Op) -> Op:
    """The op that `op` stands in."""
    return op.operation.parent.opview


def module_name(module: ir.Module) -> str | None:
    """The name of a module, such as `jit_train_step`."""
    name = module.operation.attributes.get("sym_name")
    return None if name is None else str(ir.StringAttr(name).value)


def sdy_meshes(module: Any) -> dict[str, sdy.MeshAttr]:
    """Name -> mesh, of the `sdy.mesh` ops of a module."""
    meshes = [op for op in module.regions[0].blocks[0].operations if isinstance(op, sdy.MeshOp)]
    return {str(op.sym_name.value): sdy.MeshAttr(op.mesh) for op in meshes}


def ops(where: Any, kind: type | tuple[type, ...] = Op) -> list[Any]:
    """The ops of a block, or of the body of an op, but for its terminator: a list, safe to erase from."""
    block = where if isinstance(where, ir.Block) else where.body
    found = list(block.operations)
    del found[-1:]
    return found if kind is Op else [op for op in found if isinstance(op, kind)]


def walk(where: Any, kind: type | tuple[type, ...] = Op) -> list[Any]:
    """All ops inside an op, however deep, the op itself included; outer before inner."""
    found: list[Any] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        view = op.opview
        if isinstance(view, kind):
            found.append(view)
        return ir.WalkResult.ADVANCE

    # Of one class of ops MLIR shows us no others, which saves most of the time.
    only = kind if hasattr(kind, "OPERATION_NAME") else None
    where.operation.walk(visit, ir.WalkOrder.PRE_ORDER, op_class=only)
    return found


def fragments(f: Func) -> list[Fragment]:
    """The fragments of a function, in order."""
    return ops(f, Fragment)


def users(x: Value | Op) -> list[Op]:
    """The ops that use a value, or any result of an op; once per use, newest use first."""
    if isinstance(x, Value):
        return [use.owner for use in x.uses]
    return [use.owner for v in x.operation.results for use in v.uses]


def first_user(x: Value | Op) -> Op | None:
    """The user of a value, or of any result of an op, that stands first; all must be in one block."""
    found = users(x)
    return first_of(found) if found else None


def first_of(some: Sequence[Op]) -> Op:
    """The op that stands first, of at least one, all in one block."""
    first = some[0]
    for op in some[1:]:
        if stands_before(op, first):
            first = op
    return first


def block_users(x: Op) -> list[Op]:
    """The ops beside `x` that use its results, in themselves or in their regions; newest use first."""
    block = x.operation.block
    found = []
    for user in users(x):
        operation = user.operation
        while operation.block != block:
            operation = operation.parent
        found.append(operation.opview)
    return found


def in_block_order(some: Iterable[Any]) -> list[Any]:
    """Ops of one block, first one first."""
    return sorted(some, key=functools.cmp_to_key(lambda a, b: -1 if stands_before(a, b) else 1))


def stands_before(a: Op, b: Op) -> bool:
    """Whether `a` comes before `b` in the block of both.  Amortised constant time, moves included."""
    return bool(a.operation.is_before_in_block(b.operation))


def is_unused(x: Value | Op) -> bool:
    """Whether nothing uses a value, or any result of an op."""
    if isinstance(x, Value):
        return next(x.uses, None) is None
    for v in x.operation.results:  # noqa: SIM110  (asked of every op of a program; this is twice as fast)
        if next(v.uses, None) is not None:
            return False
    return True


def producer(v: Value) -> Op | None:
    """The op that makes `v`; None for an argument of a block."""
    owner = v.owner
    return None if isinstance(owner, ir.Block) else owner.opview


def result_index(v: Value) -> int:
    """The position of an op's result among the op's results."""
    return int(ir.OpResult(v).result_number)


def arg_index(v: Value) -> int:
    """The position of a block argument among the block's arguments."""
    return int(ir.BlockArgument(v).arg_number)


def owner_of(arg: Value) -> Op:
    """The op in whose body a block argument stands."""
    return arg.owner.owner.opview


def returned_by(block: ir.Block) -> list[Value]:
    """What the terminator of a block returns."""
    return list(ir.InsertionPoint.at_block_terminator(block).ref_operation.operands)


def is_constant(op: Op | None) -> bool:
    """Whether it is a constant op."""
    return op is not None and op.operation.name in CONSTANTS


# MLIR's isPure is not in the bindings; these are the ops of a traced JAX program that do more than compute.
_EFFECTS = frozenset(
    [
        "stablehlo.infeed",
        "stablehlo.outfeed",
        "stablehlo.send",
        "stablehlo.recv",
        "stablehlo.rng",
        "stablehlo.all_reduce",
        "stablehlo.all_gather",
        "stablehlo.all_to_all",
        "stablehlo.reduce_scatter",
        "stablehlo.collective_permute",
        "stablehlo.collective_broadcast",
        "sdy.sharding_group",
        "mpmd.call",
        "mpmd.fragment_call",
        "mpmd.for",
    ]
)


def is_pure(op: Op) -> bool:
    """Whether the op, and all in it, only computes its results."""
    if op.operation.name in _EFFECTS:
        return False
    pure = True

    def visit(inner: ir.Operation) -> ir.WalkResult:
        nonlocal pure
        if inner.name == "func.call":
            pure = PURE in inner.attributes
        elif inner.name == "stablehlo.custom_call":
            effect = inner.attributes.get("has_side_effect")
            pure = effect is None or not ir.BoolAttr(effect).value
        else:
            pure = inner.name not in _EFFECTS
        return ir.WalkResult.ADVANCE if pure else ir.WalkResult.INTERRUPT

    op.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return pure


def read_by(op: Op) -> list[Value]:
    """What an op uses: its operands, then what its regions capture; each value once."""
    if isinstance(op, Fragment) or not len(op.operation.regions):
        return list(dict.fromkeys(op.operands))
    used, inside = dict.fromkeys(op.operands), set()

    def visit(inner: ir.Operation) -> ir.WalkResult:
        for region in inner.regions:
            for block in region:
                inside.update(block.arguments)
        if inner != op.operation:
            inside.update(inner.results)
            used.update(dict.fromkeys(inner.operands))
        return ir.WalkResult.ADVANCE

    op.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return [v for v in used if v not in inside]


def ops_flowing_to(values: Iterable[Value]) -> set[Op]:
    """The ops of a body by which the values are computed, directly or not."""
    found: set[Op] = set()
    todo = [producer(v) for v in values]
    while todo:
        op = todo.pop()
        if op is not None and op not in found:
            found.add(op)
            todo += [producer(v) for v in read_by(op)]
    return found


def top_down(
    f: Func, rank: Callable[[Op], int] | None = None, edges: Iterable[tuple[Op, Op]] = ()
) -> list[Op]:
    """The ops of a function in dependency order, `edges` (before, after) counting as dependencies.

    Of the ops that are ready the one with the least rank comes first, then the one that stood first.
    Ops on a cycle, which only `edges` can make, are left out of the result.
    """
    place = {op: i for i, op in enumerate(ops(f))}
    waits: dict[Op, set[Op]] = {
        op: {p for v in read_by(op) if (p := producer(v)) is not None and p in place} for op in place
    }
    followers: dict[Op, list[Op]] = {op: [] for op in place}
    for before, after in edges:
        waits[after].add(before)
    for op in place:
        for p in waits[op]:
            followers[p].append(op)
    rank = rank or (lambda op: 0)
    ready = [(rank(op), place[op], op) for op in place if not waits[op]]
    heapq.heapify(ready)
    order = []
    while ready:
        op = heapq.heappop(ready)[2]
        order.append(op)
        for follower in followers[op]:
            waits[follower].discard(op)
            if not waits[follower]:
                heapq.heappush(ready, (rank(follower), place[follower], follower))
    return order
