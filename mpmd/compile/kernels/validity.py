"""Invariants of a KernelPlan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpmd.compile.kernels.index import Index
from mpmd.compile.kernels.nodes import (
    BATCH,
    COLUMN,
    ROW,
    Apply,
    IndexValue,
    Load,
    Node,
    Operand,
    ReduceNode,
    Store,
    store_arguments,
)
from mpmd.compile.kernels.operations import DTYPE_BYTES, OPERATIONS, REDUCTIONS

if TYPE_CHECKING:
    from mpmd.compile.kernels.plan import KernelPlan


def problems_of(plan: KernelPlan) -> list[str]:
    problems = []
    if plan.batch_dims < 0 or plan.row_dims < 0 or plan.batch_dims + plan.row_dims > plan.rank:
        return [f"{plan.batch_dims} batch dims and {plan.row_dims} row dims of {plan.rank} dims"]
    if any(e < 0 for e in plan.extents):
        problems.append(f"a negative extent in {plan.extents}")
    problems += [
        f"operand {o.name} has the unknown dtype {o.dtype}"
        for o in plan.operands
        if o.dtype not in DTYPE_BYTES
    ]
    for number, node in enumerate(plan.nodes):
        late = [a for a in plan.uses[number] if not 0 <= a < number]
        if late:
            problems.append(f"%{number} uses %{late[0]}, which is not before it")
            return problems
        problems += [f"%{number}: {p}" for p in _node_problems(plan, node)]
    if not problems:
        problems += [p for store in plan.stores for p in _store_problems(plan, store)]
        problems += _level_problems(plan)
    return problems


def _node_problems(plan: KernelPlan, node: Node) -> list[str]:
    if node.dtype not in DTYPE_BYTES:
        return [f"unknown dtype {node.dtype}"]
    if isinstance(node, Load):
        return _load_problems(plan, node)
    if isinstance(node, ReduceNode):
        return _reduce_problems(plan, node)
    return _apply_problems(plan, node) if isinstance(node, Apply) else []


def _load_problems(plan: KernelPlan, node: Load) -> list[str]:
    if not 0 <= node.operand < len(plan.operands):
        return [f"there is no operand {node.operand}"]
    operand = plan.operands[node.operand]
    problems = []
    if operand.dtype != node.dtype:
        problems.append(f"loads {node.dtype} from {operand.name}, which holds {operand.dtype}")
    if node.where >= 0 and plan.nodes[node.where].dtype != "pred":
        problems.append(f"its guard %{node.where} is {plan.nodes[node.where].dtype}, not pred")
    if node.where < 0 and not node.index.values() and plan.size:
        problems += _outside(node.index, operand, plan)
    return problems


def _outside(index: Index, operand: Operand, plan: KernelPlan) -> list[str]:
    low, high = index.bounds(plan.extents)
    if low < 0 or high >= operand.size:
        return [f"{index} reaches [{low}, {high}] of {operand.name}, which has {operand.size} elements"]
    return []


def _reduce_problems(plan: KernelPlan, node: ReduceNode) -> list[str]:
    if node.op not in REDUCTIONS:
        return [f"no reduction is named {node.op}; there are {', '.join(REDUCTIONS)}"]
    problems = []
    if node.axis not in (ROW, COLUMN):
        problems.append(f"the axis {node.axis!r} is neither row nor column")
    if node.dtype not in REDUCTIONS[node.op].dtypes:
        problems.append(f"reduce-{node.op} is not defined for {node.dtype}")
    if plan.nodes[node.arg].dtype != node.dtype:
        problems.append(f"reduces {plan.nodes[node.arg].dtype} to {node.dtype}")
    return problems


def _apply_problems(plan: KernelPlan, node: Apply) -> list[str]:
    if node.op not in OPERATIONS:
        return [f"no operation is named {node.op}"]
    operation = OPERATIONS[node.op]
    if len(node.args) != operation.arity:
        return [f"{node.op} takes {operation.arity} operands, got {len(node.args)}"]
    kinds = [plan.nodes[a].dtype for a in node.args]
    problems = []
    data = kinds[1:] if node.op == "select" else kinds
    if node.op == "select" and kinds[0] != "pred":
        problems.append(f"select chooses by {kinds[0]}, not pred")
    if len(set(data)) > 1:
        problems.append(f"{node.op} of {' and '.join(data)}: convert them to one dtype")
    if data[0] not in operation.dtypes:
        problems.append(f"{node.op} is not defined for {data[0]}")
    wanted = {"same": data[0], "pred": "pred", "given": node.dtype}[operation.result]
    if node.dtype != wanted:
        problems.append(f"{node.op} of {data[0]} gives {wanted}, not {node.dtype}")
    if node.op == "bitcast-convert" and DTYPE_BYTES[data[0]] != DTYPE_BYTES[node.dtype]:
        problems.append(f"bitcast-convert from {data[0]} to {node.dtype}: sizes differ")
    return problems


def _store_problems(plan: KernelPlan, store: Store) -> list[str]:
    if not 0 <= store.operand < len(plan.operands) or not 0 <= store.node < len(plan.nodes):
        return [f"a store of %{store.node} to operand {store.operand}: one of them does not exist"]
    operand, node = plan.operands[store.operand], plan.nodes[store.node]
    problems = []
    if operand.dtype != node.dtype:
        problems.append(f"stores {node.dtype} to {operand.name}, which holds {operand.dtype}")
    if store.combine and store.combine not in REDUCTIONS:
        problems.append(f"combines by {store.combine!r}, which is not a reduction")
    if store.where < 0 and not store.index.values() and plan.size:
        problems += _outside(store.index, operand, plan)
    if store.where >= 0 and plan.nodes[store.where].dtype != "pred":
        problems.append(f"its guard %{store.where} is {plan.nodes[store.where].dtype}, not pred")
    return problems


def _level_problems(plan: KernelPlan) -> list[str]:
    """Sums over the outer dims can only be combined with values without outer dims, and not reduced again.

    A store combines its value, its guard and what its place is computed from.
    """
    final = [level in (COLUMN, BATCH) for level in plan.levels]
    if not any(final):
        return []
    outer, problems = set(plan.outer), list[str]()
    reduced: list[bool] = []
    for number, node in enumerate(plan.nodes):
        reduced.append(isinstance(node, ReduceNode) or any(reduced[a] for a in plan.uses[number]))
    users: list[tuple[str, Node | Store, tuple[int, ...]]] = [
        (f"%{k}", n, plan.uses[k]) for k, n in enumerate(plan.nodes)
    ]
    users += [(f"a store to {plan.operands[s.operand].name}", s, store_arguments(s)) for s in plan.stores]
    for name, user, used in users:
        if not any(final[a] for a in used):
            continue
        if isinstance(user, ReduceNode):
            problems.append(f"{name} reduces a value that is already reduced over the outer dims")
        problems += [
            f"{name} combines a sum over the outer dims with %{a}, which is inside of it"
            for a in used
            if not final[a] and (plan.depends[a] & outer or reduced[a])
        ]
        here = user.index.dims() & outer if isinstance(user, Load | IndexValue | Store) else ()
        if here:
            names = ", ".join(f"d{d}" for d in sorted(here))
            problems.append(f"{name} uses a sum over the outer dims, but its place depends on {names}")
    return problems
