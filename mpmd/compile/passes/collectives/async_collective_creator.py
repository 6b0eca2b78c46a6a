"""hlo-async-collective-creator."""

from __future__ import annotations

import dataclasses

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.opcodes import Category
from mpmd.compile.hlo.shape import Shape, tuple_of
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, Rule

_OWN = {"all-reduce": 1, "all-gather": 2, "collective-permute": 2}
_WRAPPED = ("reduce-scatter", "all-to-all", "collective-broadcast", "ragged-all-to-all")


@dataclasses.dataclass(frozen=True)
class AsyncCollectiveCreator(ComputationPass):
    """Splits collectives into a start and a done, between which other work may run.

    y = all-reduce(x)  ->  s = all-reduce-start(x); y = all-reduce-done(s)

    Those without a start of their own are wrapped in a computation that async-start calls.

    Requires: no schedule; combiners and simplifiers of collectives have run: they do not handle pairs.
    Ensures: all collectives of `opcodes` of `least_bytes` or more are asynchronous.
    Cost: linear.
    Source: XLA's async collective creator.

    Attributes:
        opcodes: collectives that are split.
        least_bytes: smallest operands that are split, in bytes per device.
    """

    name = "hlo-async-collective-creator"
    opcodes: tuple[str, ...] = (*_OWN, *_WRAPPED)
    least_bytes: int = 0

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation; collectives that are wrapped already stay."""
        if any(i.info.category is Category.ASYNC for i in computation.callers):
            return False
        rules: dict[str, tuple[Rule, ...]] = {}
        for opcode in self.opcodes:
            single = opcode == "collective-permute"
            rules[opcode] = (_start_permute if single else _start if opcode in _OWN else _wrap,)
        return Rewriter(computation).run(rules, self._is_large)

    def _is_large(self, instruction: HloInstruction) -> bool:
        return sum(o.shape.byte_size for o in instruction.operands) >= self.least_bytes


def _start(site: RewriteSite) -> HloInstruction:
    """A start of the same name; that of a gather also returns its operands."""
    shape = site.shape
    if _OWN[site.at.opcode] == 2:
        shape = tuple_of([_together([o.shape for o in site.operands]), shape])
    attributes = dict(site.at.attributes)
    start = site.build.add(
        f"{site.at.opcode}-start",
        *site.operands,
        shape=shape,
        called=site.at.called,
        **attributes,  # type: ignore[arg-type]
    )
    return site.build.add(f"{site.at.opcode}-done", start, shape=site.shape)


def _start_permute(site: RewriteSite) -> HloInstruction:
    """A start of the same name, or around a permute of several arrays a wrapper."""
    return _start(site) if len(site.operands) == 1 else _wrap(site)


def _wrap(site: RewriteSite) -> HloInstruction:
    """An async-start of a computation with nothing but the collective."""
    module = site.build.computation.module
    body = module.create_computation(f"wrapped_{site.at.opcode.replace('-', '_')}")
    parameters = [
        body.add(HloInstruction("parameter", o.shape, (), {"parameter_number": i}))
        for i, o in enumerate(site.operands)
    ]
    body.set_root(body.add(site.at.clone(parameters)))
    shape = tuple_of([tuple_of([o.shape for o in site.operands]), site.shape])
    start = site.build.add("async-start", *site.operands, shape=shape, called=(body,))
    return site.build.add("async-done", start, shape=site.shape)


def _together(shapes: list[Shape]) -> Shape:
    return shapes[0] if len(shapes) == 1 else tuple_of(shapes)
