"""Several vectors at once: their operations are interleaved, so that latencies overlap.

An operation takes a few cycles and its result is wanted at once by the next one.  Cores look ahead, but not
past a long chain of operations to the vector after it; so the code does one operation for all vectors of a
round before it does the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpmd.compile.backends.native_cpu.emit.scope import Scope
from mpmd.compile.kernels.kernel_plan import Apply, Constant, KernelPlan, ReduceNode, arguments
from mpmd.compile.kernels.operations import OPERATIONS
from mpmd.compile.llvm.cpu import CpuTarget

MAX_VECTORS = 4
_MAX_OPERATIONS = 128  # of all vectors of a round: more code is not worth its compilation
_KEPT_FREE = 4  # registers for addresses of memory operands that LLVM loads first, and for sums
_INSIDE_EXPENSIVE = 4  # registers that a function such as tanh needs for itself


def needed_nodes(plan: KernelPlan, roots: Iterable[int], known: Iterable[int] = ()) -> list[int]:
    """The nodes that some nodes are computed from, themselves included, each after its arguments.

    Args:
        plan: the plan.
        roots: numbers of the nodes that are wanted.
        known: numbers of nodes whose values are there; what only they need is left out.
    """
    there, found, waiting = set(known), set[int](), list(roots)
    while waiting:
        number = waiting.pop()
        if number in found or number in there:
            continue
        found.add(number)
        if not isinstance(plan.nodes[number], ReduceNode):
            waiting += arguments(plan.nodes[number])
    return sorted(found)


def evaluate(scopes: Sequence[Scope], roots: Sequence[int]) -> None:
    """Compute nodes in all scopes of one plan, an operation of every scope after the other."""
    if not scopes:
        return
    plan = scopes[0].plan
    known = [k for k in range(len(plan.nodes)) if all(s.known(k) is not None for s in scopes)]
    for number in needed_nodes(plan, roots, known):
        for scope in scopes:
            scope.value(number)


def vectors_at_once(plan: KernelPlan, target: CpuTarget, roots: Sequence[int], sums: int = 0) -> int:
    """How many vectors of elements fit into the registers side by side.

    Args:
        plan: the plan.
        target: the CPU.
        roots: numbers of the nodes that are computed.
        sums: running totals that every vector has of its own.
    """
    row = set(plan.row) if plan.row_dims else {plan.rank - 1}
    nodes = [k for k in needed_nodes(plan, roots) if plan.depends[k] & row or not plan.rank]
    operations = [n for n in (plan.nodes[k] for k in nodes) if isinstance(n, Apply)]
    last_use = dict.fromkeys(roots, len(plan.nodes))
    for k in nodes:
        for argument in arguments(plan.nodes[k]):
            last_use[argument] = max(last_use.get(argument, 0), k)
    alive = [n for n in nodes if not isinstance(plan.nodes[n], Constant)]
    most = max((sum(n <= k < last_use.get(n, n) for n in alive) for k in nodes), default=0)
    expensive = any(OPERATIONS[n.op].is_expensive for n in operations)
    each = sums + most + (_INSIDE_EXPENSIVE if expensive else 1)
    fitting = min((target.vector_registers - _KEPT_FREE) // each, _MAX_OPERATIONS // max(1, len(operations)))
    return max(1, min(MAX_VECTORS, fitting))
