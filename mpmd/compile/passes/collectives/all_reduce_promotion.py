"""hlo-all-reduce-promotion."""

from __future__ import annotations

import dataclasses

from mpmd.compile.hlo.builder import scalar_computation
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, Rule
from mpmd.compile.passes.values import reducer

_WIDE = {"float": "f32", "signed": "s32", "unsigned": "u32"}


@dataclasses.dataclass(frozen=True)
class AllReducePromotion(ComputationPass):
    """Reduces narrow types over devices in a wide one.

    all-reduce(x: bf16) by add  ->  convert(all-reduce(convert(x) to f32)) to bf16

    Requires: no schedule.
    Ensures: no all-reduce or reduce-scatter of one array has one of `types`, except reductions of
        several steps.
    Cost: linear; at run time twice the bytes.
    Source: XLA's all-reduce promotion: libraries lack narrow integers, and sums of narrow floats lose digits.

    Attributes:
        types: element types to be widened.
    """

    name = "hlo-all-reduce-promotion"
    types: tuple[str, ...] = ("bf16", "f16", "s16", "u16")

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        rules: dict[str, tuple[Rule, ...]] = dict.fromkeys(("all-reduce", "reduce-scatter"), (self._widen,))
        return Rewriter(computation).run(rules, lambda i: len(i.operands) == 1)

    def _widen(self, site: RewriteSite) -> HloInstruction | None:
        opcode = reducer(site.at.to_apply)
        if site.shape.dtype not in self.types or opcode is None:
            return None
        wide = _WIDE[site.shape.info.kind]
        module = site.build.computation.module
        attributes = dict(site.at.attributes)
        made = site.build.add(
            site.at.opcode,
            site.build.convert(site.operands[0], wide),
            shape=site.shape.with_dtype(wide),
            called=(scalar_computation(module, opcode, wide),),
            **attributes,  # type: ignore[arg-type]
        )
        return site.build.convert(made, site.shape.dtype)
