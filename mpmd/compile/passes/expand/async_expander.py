"""hlo-async-expander."""

from __future__ import annotations

from typing import Any

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
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
        """Rewrites one computation."""
        return Rewriter(computation).run(dict.fromkeys(_SYNCHRONOUS, (_expand,)), lambda i: True)


def _expand(site: RewriteSite) -> HloInstruction | None:
    start = site.operands[0]
    while start.opcode == "async-update":
        start = start.operands[0]
    opcode = _SYNCHRONOUS[site.at.opcode]
    attributes: dict[str, Any] = {} if opcode in ("copy", "call") else dict(start.attributes)
    return site.build.add(opcode, *start.operands, shape=site.shape, called=start.called, **attributes)
