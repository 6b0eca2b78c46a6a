"""hlo-convert-mover."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, Rule
from mpmd.compile.passes.values import only_user

_MOVES = ("reshape", "transpose", "slice", "reverse", "dynamic-slice", "concatenate", "pad")


class ConvertMover(ComputationPass):
    """Moves data while it is narrow: widening conversions down, narrowing conversions up.

    transpose(convert(x: bf16) to f32) -> convert(transpose(x)) to f32
    convert(transpose(x: f32)) to bf16 -> transpose(convert(x) to bf16)

    Requires: no schedule.
    Ensures: no reshape, transpose, slice, reverse, dynamic-slice or concatenate moves a value that a
        conversion without other users has just widened, or, unless it drops elements, that one narrows
        afterwards to numbers of the same kind.
    Cost: linear in instructions and moves.
    Source: XLA's convert mover.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        rules: dict[str, tuple[Rule, ...]] = dict.fromkeys(_MOVES, (_widen_later,))
        rules["convert"] = (_narrow_earlier,)
        return Rewriter(computation).run(rules, lambda instruction: not instruction.shape.dynamic)


def _is_wider(a: Shape, b: Shape) -> bool:
    return a.info.bits > b.info.bits


def _widen_later(site: RewriteSite) -> HloInstruction | None:
    """move(widen(x)) → widen(move(x))."""
    data = _data(site.at)
    sources = {o.operands[0].shape.dtype if o.opcode == "convert" else "" for o in data}
    if len(sources) != 1 or "" in sources:
        return None
    if any(only_user(o) is not site.at or not _is_wider(o.shape, o.operands[0].shape) for o in data):
        return None
    values = [o.operands[0] for o in data]
    made = site.same(*values, *site.operands[len(data) :], shape=site.shape.with_dtype(values[0].shape.dtype))
    return site.build.convert(made, site.shape.dtype)


def _narrow_earlier(site: RewriteSite) -> HloInstruction | None:
    """narrow(move(x)) → move(narrow(x))."""
    (move,) = site.operands
    if move.opcode not in _MOVES or not _is_wider(move.shape, site.shape) or only_user(move) is not site.at:
        return None
    if site.shape.info.kind != move.shape.info.kind or move.opcode == "pad":
        return None
    data = _data(move)
    if sum(o.shape.size for o in data) > move.shape.size:
        return None
    values = [site.build.convert(o, site.shape.dtype) for o in data]
    return site.build.like(move, [*values, *move.operands[len(data) :]], site.shape)


def _data(move: HloInstruction) -> list[HloInstruction]:
    """The operands that are moved."""
    if move.opcode == "concatenate":
        return move.operands
    return move.operands[: 2 if move.opcode == "pad" else 1]
