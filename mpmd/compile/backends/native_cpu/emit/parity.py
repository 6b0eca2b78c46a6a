"""Even and odd lanes apart: bf16 widened without moving anything between lanes.

A register of bf16 is also one of 32-bit words, each with an even element in its lower half and an odd one in
its upper half.  Shifted left, the words are the even elements as floats; with the lower halves cleared, they
are the odd ones.  What is added up over rows may stay in this order until the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.backends.native_cpu.emit.places import Lanes
from mpmd.compile.backends.native_cpu.emit.scope import Scope
from mpmd.compile.backends.native_cpu.emit.together import needed_nodes
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.types import Value, lanes_of, vector
from mpmd.compile.kernels.plan import ELEMENT, Apply, KernelPlan, Load, store_level


def leaves_apart(plan: KernelPlan, roots: Sequence[int]) -> tuple[int, ...]:
    """Numbers of the loads that can be split into even and odd lanes, if all that change along a row can be.

    Empty if some cannot, if few of them are bf16, or if something is stored at every point, in its order.

    Args:
        plan: the plan.
        roots: numbers of the nodes that are computed at every point.
    """
    if any(store_level(plan, s) == ELEMENT for s in plan.stores):
        return ()
    last, found = plan.rank - 1, list[int]()
    for number in needed_nodes(plan, roots):
        node = plan.nodes[number]
        if last not in plan.depends[number] or isinstance(node, Apply):
            continue
        if not isinstance(node, Load) or not _is_plain(plan, node):
            return ()
        found.append(number)
    narrow = sum(plan.nodes[n].dtype == "bf16" for n in found)
    return tuple(found) if 2 * narrow > len(found) else ()


def _is_plain(plan: KernelPlan, node: Load) -> bool:
    """Whether a load reads neighbours, of a type that has halves or is as wide as their sums."""
    last, index = plan.rank - 1, node.index
    if node.dtype not in ("bf16", "f32") or node.where >= 0 or index.values():
        return False
    return index.is_linear_in(last) and index.factor(last) == 1


def scopes_apart(scope: Scope, leaves: Sequence[int], part: Lanes) -> tuple[Scope, Scope]:
    """Scopes of the even and of the odd lanes of twice a vector.

    Args:
        scope: where a row is known.
        leaves: what `leaves_apart` found.
        part: the lanes of both, none of them masked.
    """
    f, plan, last = scope.f, scope.plan, scope.plan.rank - 1
    first = scope.inside({last: part.start})
    even, odd = (scope.inside(lanes=h) for h in Lanes(last, part.start, part.count // 2).halves())
    for number in leaves:
        node = plan.nodes[number]
        if isinstance(node, Load) and node.dtype == "f32":  # the halves of bf16 are a scope's business
            both = vector("float", part.count)
            low, high = unzipped(f, f.load(scope.pointers[node.operand], both, first.position(node.index)))
            even.define(number, low)
            odd.define(number, high)
    return even, odd


def unzipped(f: FunctionBuilder, both: Value) -> tuple[Value, Value]:
    """The even and the odd lanes of a vector."""
    lanes = lanes_of(both.type)
    return f.shuffle(both, both, range(0, lanes, 2)), f.shuffle(both, both, range(1, lanes, 2))


def zipped(f: FunctionBuilder, even: Value, odd: Value) -> tuple[Value, Value]:
    """Lanes in their order again: the first and the second vector of even and odd lanes."""
    lanes = lanes_of(even.type)
    order = [lane // 2 + lane % 2 * lanes for lane in range(2 * lanes)]
    return f.shuffle(even, odd, order[:lanes]), f.shuffle(even, odd, order[lanes:])
