"""hlo-float-normalization."""

from __future__ import annotations

import dataclasses

from mpmd.compile.hlo.builder import scalar_computation
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.opcodes import ELEMENTWISE, OPCODES
from mpmd.compile.hlo.shape import Shape
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, Rule
from mpmd.compile.passes.values import reducer

_EXACT = frozenset(["select", "copy", "convert", "bitcast-convert", "map", "stochastic-convert"])


@dataclasses.dataclass(frozen=True)
class FloatNormalization(ComputationPass):
    """Computes in f32 where the target does not support a narrower float.

    add(x: bf16, y: bf16)  ->  convert(add(convert(x) to f32, convert(y) to f32)) to bf16

    Each result is rounded once, as an operation of the narrow type would round it; sums are kept wide to
    their end.  Matrix products and data movement stay narrow.

    Requires: no schedule.
    Ensures: no elementwise operation and no simple reduction works on one of `types`.
    Cost: linear.
    Source: XLA's float normalisation.

    Attributes:
        types: element types that the target lacks.
    """

    name = "hlo-float-normalization"
    types: tuple[str, ...] = ("bf16", "f16")

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation; those on scalars of a reduction are left alone."""
        if any(c.info.called and c.opcode not in _CONTROL for c in computation.callers):
            return False
        rules: dict[str, tuple[Rule, ...]] = {
            name: (self._widen,)
            for name, info in OPCODES.items()
            if info.category in ELEMENTWISE and name not in _EXACT
        }
        rules["reduce"] = (self._widen_reduction,)
        return Rewriter(computation).run(rules, lambda instruction: True)

    def _is_narrow(self, shape: Shape) -> bool:
        return shape.is_array and shape.dtype in self.types

    def _widen(self, site: RewriteSite) -> HloInstruction | None:
        if not any(self._is_narrow(s) for s in (site.shape, *(o.shape for o in site.operands))):
            return None
        operands = [self._wide(site, o) for o in site.operands]
        shape = site.shape.with_dtype("f32") if self._is_narrow(site.shape) else site.shape
        return site.build.convert(site.same(*operands, shape=shape), site.shape.dtype)

    def _wide(self, site: RewriteSite, value: HloInstruction) -> HloInstruction:
        return site.build.convert(value, "f32") if self._is_narrow(value.shape) else value

    def _widen_reduction(self, site: RewriteSite) -> HloInstruction | None:
        if len(site.operands) != 2 or not self._is_narrow(site.shape):
            return None
        opcode = reducer(site.at.to_apply)
        if opcode is None:
            return None
        module = site.build.computation.module
        computation = scalar_computation(module, opcode, "f32")
        values = [self._wide(site, o) for o in site.operands]
        made = site.build.reduce(values[:1], values[1:], site.at.dimensions, computation)
        return site.build.convert(made, site.shape.dtype)


_CONTROL = frozenset(["call", "while", "conditional", "async-start"])
