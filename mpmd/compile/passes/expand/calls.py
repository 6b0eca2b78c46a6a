"""Operations with a computation, inlined or as calls."""

from __future__ import annotations

from typing import Any

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.expand.functions import applied, is_inlinable
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite

_SYNCHRONOUS = {
    "copy-done": "copy",
    "all-reduce-done": "all-reduce",
    "all-gather-done": "all-gather",
    "collective-permute-done": "collective-permute",
    "async-done": "call",
}


class AsyncExpander(ComputationPass):
    """Replaces asynchronous pairs by the synchronous operation: the backend chooses what to overlap.

    copy-done(copy-start(x)) -> copy(x);  async-done(async-start(x), calls=f) -> call(x), to_apply=f

    Requires: no schedule.
    Ensures: no pair of a start and its done is left, but those of send, recv and of starts that other
        instructions read, too.
    Cost: linear.
    Source: the definition of the pairs.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        changed = False
        for done in computation.instructions:
            chain = _chain(done) if done.opcode in _SYNCHRONOUS else []
            if chain and all(len(i.users) == 1 for i in chain):
                _join(computation, done, chain)
                changed = True
        return changed


def _chain(done: HloInstruction) -> list[HloInstruction]:
    """What belongs to the end of a pair, the start last."""
    chain = [done.operands[0]]
    while chain[-1].opcode == "async-update":
        chain.append(chain[-1].operands[0])
    return chain


def _join(computation: HloComputation, done: HloInstruction, chain: list[HloInstruction]) -> None:
    """Replace a pair; the start goes though it may have effects, which the new instruction has."""
    start, opcode = chain[-1], _SYNCHRONOUS[done.opcode]
    attributes: dict[str, Any] = {} if opcode in ("copy", "call") else dict(start.attributes)
    build = HloBuilder(computation)
    build.metadata = done.metadata
    made = build.add(opcode, *start.operands, shape=done.shape, called=start.called, **attributes)
    for early in start.control_predecessors:
        made.add_control_predecessor(early)
    computation.replace(done, made)
    for instruction in chain:
        computation.remove(instruction)


class MapInliner(ComputationPass):
    """Applies the operations of a map to whole arrays.

    map(x, y), to_apply=(a, b) -> add(a, negate(b))  ->  add(x, negate(y))

    Requires: no schedule; calls are inlined.
    Ensures: no map is left whose computation is elementwise.
    Cost: linear.
    Source: an elementwise operation is the same on arrays as on their elements.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"map": (_inline,)}, lambda i: True)


def _inline(site: RewriteSite) -> HloInstruction | None:
    body = site.at.to_apply
    if not is_inlinable(body) or body.root.shape.is_tuple:
        return None
    (value,) = applied(site.build, body, site.operands)
    return value
