"""Custom calls that say something to passes and return their operand."""

from __future__ import annotations

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.rewriter import RewriteSite, Rule

_MARKS = frozenset(("MoveToDevice", "MoveToHost", "Sharding"))


def drop_mark(site: RewriteSite) -> HloInstruction | None:
    """Sharding(x), MoveToHost(x), MoveToDevice(x) → x, on one device; memory of the host is not used."""
    module = site.at.parent.module
    if site.at.custom_call_target not in _MARKS or module.num_partitions > 1 or len(site.operands) != 1:
        return None
    return site.operands[0] if site.operands[0].shape.logical is site.shape.logical else None


RULES: dict[str, tuple[Rule, ...]] = {"custom-call": (drop_mark,)}
