"""Attention in one kernel: products, an operation on rows, and products again, whose scores are never stored.

Its gradients need a term of each row, which is found without another iteration over its keys:

    g = dot(dO, V); o = dot(p / l, V); t = sum over keys of g · w · p
    ->  t = w · l · sum over columns of dO · o

    p / l  ->  p · (1 / l)

Both sums are over keys and columns of dO · V · p.  The second one needs no scores, nor is it of rounded ones:
then g is not rounded either, as it is about the term where a row has one large weight.

Source: FlashAttention (Dao et al. 2022), its backward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpmd.compile.analysis.call_graph import CallGraph
from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.kernels.planner.dots import is_product
from mpmd.compile.kernels.planner.elements import NoPlan
from mpmd.compile.kernels.planner.plan_cache import caching_plans
from mpmd.compile.passes.fusion.attention_search import AttentionCandidate, Search
from mpmd.compile.passes.fusion.grouping import Outlining, remove_all_unused
from mpmd.compile.passes.hlo_pass import HloPass
from mpmd.compile.passes.rewriter import is_splat, reducer
from mpmd.cost.device import HOST, Device, KernelLimits
from mpmd.errors import ConfigError
from mpmd.support import diagnostics

_WIDE = ("f32", "bf16")


def replace_row_terms(groups: Sequence[AttentionCandidate]) -> bool:
    """Replaces such sums of each group by sums of an earlier group's result; True if there was one."""
    changed = False
    for number, group in enumerate(groups):
        results = {d: g.moved[d] for g in groups[:number] for d in g.mixtures if d not in group.members}
        for value in list(group.members):
            term = _term_of(value)
            users = term.scores.operands[1].users if term is not None else ()
            for dot in [user for user in users if user in results]:
                if term is not None and _is_result(dot, term) and not _is_made_of((dot,), {value}, {}):
                    value.replace_all_uses_with(_from_result(term, dot, results[dot]))
                    _widen(term.scores)
                    changed = True
                    break
    return changed


def multiply_by_reciprocals(groups: Sequence[AttentionCandidate]) -> bool:
    """Divides by each softmax's total once for a row; True if there was one."""
    changed = False
    for value in dict.fromkeys(m for g in groups for m in g.members if m.opcode == "divide"):
        total = value.operands[1].operands[0] if _is_of_each_row(value.operands[1]) else None
        if total is None or not value.users or not _is_total(total):
            continue
        build = HloBuilder(value.parent)
        one = build.add("divide", build.full(1.0, "f32", total.shape.dims), total)
        over = build.broadcast(one, value.shape.dims, value.operands[1].dimensions)
        value.replace_all_uses_with(build.add("multiply", value.operands[0], over))
        changed = True
    return changed


@dataclass(frozen=True)
class _RowFactors:
    """A product of matrices, and of values of a row: those to multiply with, and those to divide by."""

    matrices: tuple[HloInstruction, ...] = ()
    times: tuple[HloInstruction, ...] = ()
    over: tuple[HloInstruction, ...] = ()


@dataclass(frozen=True)
class _RowTerm:
    """A sum over keys of scores · weights, and of values of the row."""

    sum: HloInstruction
    scores: HloInstruction
    weights: HloInstruction
    factors: _RowFactors


def _factors_of(value: HloInstruction) -> _RowFactors:
    if value.opcode == "convert" and {value.shape.dtype, value.operands[0].shape.dtype} <= set(_WIDE):
        return _factors_of(value.operands[0])
    if _is_of_each_row(value):
        return _RowFactors(times=tuple(value.operands))
    if value.opcode not in ("multiply", "divide"):
        return _RowFactors((value,))
    a, b = map(_factors_of, value.operands)
    if value.opcode == "divide":
        if b.matrices:
            return _RowFactors((value,))
        b = _RowFactors((), b.over, b.times)
    return _RowFactors(a.matrices + b.matrices, a.times + b.times, a.over + b.over)


def _is_of_each_row(value: HloInstruction) -> bool:
    return value.opcode == "broadcast" and value.dimensions == tuple(range(value.shape.rank - 1))


def _term_of(value: HloInstruction) -> _RowTerm | None:
    """A value as a sum of gradients' scores times weights."""
    if not value.users or not _is_row_sum(value):
        return None
    factors = _factors_of(value.operands[0])
    for scores, weights in (factors.matrices, factors.matrices[::-1]) if len(factors.matrices) == 2 else ():
        if scores.opcode == "dot" and is_product(scores) and _is_of_matrices(scores):
            return _RowTerm(value, scores, weights, factors)
    return None


def _is_row_sum(value: HloInstruction, opcode: str = "add") -> bool:
    """Whether values of a matrix are combined along its rows, in f32."""
    if value.opcode != "reduce" or len(value.operands) != 2 or value.shape.dtype != "f32":
        return False
    along = (value.operands[0].shape.rank - 1,)
    zero = opcode != "add" or is_splat(value.operands[1], 0)
    return value.dimensions == along and zero and reducer(value.to_apply) == opcode


def _is_of_matrices(dot: HloInstruction) -> bool:
    """Whether each factor has one dim besides the batch and the sums' dim."""
    numbers, rank = dot.dot_dims, dot.shape.rank
    return len(numbers.lhs_batch) == rank - 2 and len(numbers.lhs_contracting) == 1


def _is_result(dot: HloInstruction, term: _RowTerm) -> bool:
    """Whether a product is of the same weights, over values of the row, and of the scores' other factor."""
    scores, values = term.scores.dot_dims, term.scores.operands[1]
    weighted = dot.operands[0] is not values
    numbers = dot.dot_dims
    sides = [(numbers.lhs_batch, numbers.lhs_contracting), (numbers.rhs_batch, numbers.rhs_contracting)]
    (own_batch, own_sum), (batch, summed) = sides if weighted else sides[::-1]
    weights = dot.operands[0 if weighted else 1]
    rank = weights.shape.rank
    if not _is_of_matrices(dot) or weights is values:
        return False
    if (tuple(own_batch), tuple(own_sum)) != (tuple(range(rank - 2)), (rank - 1,)):
        return False  # it does not sum over keys
    free = set(range(values.shape.rank)) - {*scores.rhs_batch, *scores.rhs_contracting}
    if tuple(batch) != tuple(scores.rhs_batch) or set(summed) != free:
        return False
    factors = _factors_of(weights)
    known = all(_is_total(each) for each in factors.over)
    return factors.matrices == (term.weights,) and not factors.times and known


def _is_total(value: HloInstruction) -> bool:
    """Whether a value of a row is the sum of a softmax's exponentials, or 1 where that is chosen.

    It is 0, NaN, or between 1 and the number of keys: its reciprocal is a normal number.
    """
    if value.opcode == "select":
        pairs = value.operands[1:], value.operands[:0:-1]
        return any(is_splat(one, 1) and _is_total(other) for one, other in pairs)
    if not _is_row_sum(value) or value.operands[0].opcode != "exponential":
        return False
    inner = value.operands[0].operands[0]
    if inner.opcode != "subtract" or not _is_of_each_row(inner.operands[1]):
        return False
    top = inner.operands[1].operands[0]
    if (
        top.opcode == "select"
    ):  # where the maximum is not finite, all terms are 0, or the total is not finite either
        test, top = top.operands[:2]
        if test.opcode != "is-finite" or test.operands[0] is not top:
            return False
    return _is_row_sum(top, "maximum") and top.operands[0] is inner.operands[0]


def _widen(scores: HloInstruction) -> None:
    """Takes scores as they are summed: the term that is subtracted from them is not of rounded ones."""
    if scores.shape.dtype == "f32":
        return
    build = HloBuilder(scores.parent)
    attributes: dict[str, Any] = dict(scores.attributes)
    wide = build.add("dot", *scores.operands, shape=scores.shape.with_dtype("f32"), **attributes)
    for user in list(scores.users):
        if user.opcode == "convert" and user.shape.dtype == "f32":
            user.replace_all_uses_with(wide)
    if scores.users:
        scores.replace_all_uses_with(build.convert(wide, scores.shape.dtype))


def _from_result(term: _RowTerm, dot: HloInstruction, moved: Sequence[HloInstruction]) -> HloInstruction:
    """The sum from the gradient of a result and that result, as it is stored."""
    build = HloBuilder(term.sum.parent)
    numbers, gradient = term.scores.dot_dims, term.scores.operands[0]
    (row,) = set(range(gradient.shape.rank)) - {*numbers.lhs_batch, *numbers.lhs_contracting}
    gradient = build.transpose(gradient, (*numbers.lhs_batch, row, *numbers.lhs_contracting))
    result = moved[-1] if moved else dot
    for step in reversed(moved):
        if step.opcode == "transpose":
            result = build.transpose(result, [step.dimensions.index(d) for d in range(step.shape.rank)])
        elif step.opcode != "convert":
            result = build.reshape(result, step.operands[0].shape.dims)
    if dot.operands[0] is term.scores.operands[1]:  # it has the columns first
        last = result.shape.rank - 1
        result = build.transpose(result, (*range(last - 1), last, last - 1))
    both = build.add("multiply", build.convert(gradient, "f32"), build.convert(result, "f32"))
    zero = term.sum.operands[1]
    total = build.reduce([both], [zero], (both.shape.rank - 1,), term.sum.to_apply)
    mixed = _factors_of(dot.operands[1 if dot.operands[0] is term.scores.operands[1] else 0])
    times, over = list(term.factors.times), list(term.factors.over)
    for each in mixed.over:  # the result is divided by them
        if each in over:
            over.remove(each)
        else:
            times.append(each)
    scale = None
    for each in times:
        scale = each if scale is None else build.add("multiply", scale, each)
    total = total if scale is None else build.add("multiply", total, scale)
    for each in over:
        total = build.add("divide", total, each)
    return total


class AttentionStitching(HloPass):
    """Forms one kernel of products, an operation on rows of their results, and products of that.

    s = dot(q, k); p = softmax(s); ROOT o = dot(p, v)  ->  ROOT o = fusion(q, k, v), kind=kCustom

    Attention forward and backward: the kernel iterates over blocks of queries and keeps a block of scores in
    the cache, so no matrix of scores is written unless something outside reads it.  There is no list of
    patterns: any elementwise work and reductions of rows between the products are planned.  Values that
    forward and backward both need are computed by both.
    Where a device says so, backward reads what forward knows of each row: reductions, and sum(dO · O).
    Masked blocks after a causal mask are skipped; rows whose own scores are as small as the mask's filler are
    detected at run time, and then computed whole.  Where values behind the mask are infinite or NaN, the
    unstitched program gives NaN and this one may not: `off` avoids that.

    Requires: no `call`; layouts are row-major.
    Ensures: every group is one kernel by its plan; each refused group is reported as a notice.
    Cost: one trial plan per product that may mix rows.
    Source: FlashAttention (Dao et al. 2022) for the iteration over blocks; stitching as in TAO's compiler.

    Attributes:
        mode: `auto` or `off`.
        device: what kernels are priced for, and whose limits they keep.
    """

    mode: str = "auto"
    device: Device = HOST

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "off"):
            raise ConfigError(
                f"option mode of {self.name} is {self.mode!r}\n  it is 'auto' or 'off': say one of them"
            )

    @caching_plans()
    def rewrite(self, module: HloModule) -> bool:
        if self.mode == "off":
            return False
        changed = False
        for computation in CallGraph(module).sequential():
            changed |= _stitch(computation, self.device.limits)
        return changed


def _report(text: str) -> None:
    diagnostics.notice(f"hlo-attention-stitching: {text}")


def _stitch(computation: HloComputation, limits: KernelLimits) -> bool:
    if sum(i.opcode == "dot" for i in computation) < 2:
        return False
    search = Search(computation, _report, limits)
    search.run()
    if limits.attention_keeps_rows:
        replaced = replace_row_terms(search.groups)
        if multiply_by_reciprocals(search.groups) or replaced:
            remove_all_unused(computation)
            search = Search(computation, _report, limits)
            search.run()
        search.share_rows()
    outlining = Outlining(computation)
    sources: dict[HloInstruction, Sequence[HloInstruction]] = {}  # result of a kernel -> its inputs
    for number, group in enumerate(search.groups):
        results = search.results(group, search.groups[:number], search.groups[number + 1 :])
        try:
            search.plan(group, results)
        except NoPlan as reason:
            # values of this group that other groups need are computed as before
            search.refuse(f"{group.mixtures[0].name} stays a product of its own: {reason}")
            continue
        members = search.sorted(group.members)
        arrays = outlining.arrays(members, results)
        if _is_made_of(arrays, set(results), sources):
            search.refuse(f"{group.mixtures[0].name} stays a product of its own: other kernels are between")
            continue
        sources |= dict.fromkeys(results, arrays)
        outlining.add(members, results, "kCustom")
    return outlining.finish()


def _is_made_of(
    arrays: Sequence[HloInstruction],
    results: Collection[HloInstruction],
    sources: Mapping[HloInstruction, Sequence[HloInstruction]],
) -> bool:
    """Whether an array depends on a result through kernels, each of which needs all of its inputs."""
    seen: set[HloInstruction] = set()
    waiting = list(arrays)
    while waiting:
        value = waiting.pop()
        if value in results:
            return True
        if value not in seen:
            seen.add(value)
            waiting += [*sources.get(value, value.operands), *value.control_predecessors]
    return False
