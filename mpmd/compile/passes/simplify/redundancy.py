"""Instructions that are not needed: dead, equal to others, empty, constant, or sorted for no reader."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator import Evaluator, is_evaluable
from mpmd.compile.hlo.instruction import HloInstruction, Literal
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.opcodes import Category
from mpmd.compile.hlo.printer import computation_digest
from mpmd.compile.hlo.shape import tuple_of
from mpmd.compile.passes.hlo_pass import ComputationPass, HloPass, unfused
from mpmd.compile.passes.rewriter import (
    Rewriter,
    RewriteSite,
    Rule,
    TrackingBuilder,
    is_dead,
    is_trivial,
    remove_unused,
)


class Dce(HloPass):
    """Removes unused instructions, and computations without callers.

    a = add(x, y); ROOT b = negate(x)  ->  ROOT b = negate(x)

    Requires: nothing.
    Ensures: every instruction is the root, a parameter, has a side effect, has users, or orders others.
    Cost: linear.
    Source: dead-code elimination; unused elements of loop states are for the while simplifier.
    """

    def run(self, module: HloModule) -> bool:
        """Rewrites `module`; True iff that changed it.  Removal keeps a schedule."""
        return self.rewrite(module)

    def rewrite(self, module: HloModule) -> bool:
        """Removes dead instructions, callers before callees: a dead call makes its computation dead."""
        changed = module.remove_unreached()
        for computation in reversed(module.call_order()):
            for instruction in computation.instructions:
                if instruction.computation is not None and is_dead(instruction):
                    remove_unused(instruction)
                    changed = True
        return module.remove_unreached() or changed


_UNMERGED = frozenset(
    ["parameter", "rng", "rng-get-and-update-state", "partition-id", "replica-id", "after-all", "opt-barrier"]
)


class Cse(HloPass):
    """Computes equal expressions once.

    a = add(x, y); b = add(y, x); tuple(a, b)  ->  a = add(x, y); tuple(a, a)

    Requires: no schedule: a shared value lives longer.
    Ensures: no two instructions of a computation have equal opcode, shape with layout, operands (in any
        order if commutative), attributes, literal and called computations.  Values that opt-barriers separate
            stay separate, so rematerialised values are not merged with the originals.
    Cost: linear.
    Source: value numbering; called computations are compared by their digests.

    Attributes:
        constants: also share constants.
        collectives: also share collectives.
    """

    constants: bool = True
    collectives: bool = True

    def rewrite(self, module: HloModule) -> bool:
        """Rewrites the computations; callees first, so that equal callees compare equal."""
        digests: dict[HloComputation, bytes] = {}
        shared = set(unfused(module))
        changed = False
        for computation in module.call_order():
            if computation in shared:
                changed |= self._share(computation, digests)
            if computation.callers:
                digests[computation] = computation_digest(computation, digests)
        return changed

    def _share(self, computation: HloComputation, digests: dict[HloComputation, bytes]) -> bool:
        known: dict[Hashable, HloInstruction] = {}
        changed = False
        for instruction in computation.post_order():
            if instruction.computation is None or not self._may_share(instruction):
                continue
            first = known.setdefault(_key(instruction, digests), instruction)
            if first is not instruction:
                instruction.replace_all_uses_with(first)
                remove_unused(instruction)
                changed = True
        return changed

    def _may_share(self, instruction: HloInstruction) -> bool:
        if instruction.opcode in _UNMERGED or instruction.has_control_edges:
            return False
        if instruction.opcode == "constant":
            return self.constants
        if instruction.info.category is Category.COLLECTIVE:
            return self.collectives
        return instruction.info.category is not Category.ASYNC and not instruction.has_side_effect


def _key(instruction: HloInstruction, digests: dict[HloComputation, bytes]) -> Hashable:
    operands = [o.uid for o in instruction.operands]
    if instruction.info.commutative:
        operands.sort()
    return (
        instruction.opcode,
        instruction.shape,
        tuple(operands),
        tuple(sorted(instruction.attributes.items(), key=lambda item: item[0])),
        tuple(digests[c] for c in instruction.called),
        _bytes(instruction.literal) if instruction.literal is not None else None,
        instruction.sharding,
        instruction.backend_config,
    )


def _bytes(literal: Literal) -> Hashable:
    if isinstance(literal, tuple):
        return tuple(_bytes(part) for part in literal)
    return literal.tobytes()


_OUTSIDE = frozenset({Category.COLLECTIVE, Category.ASYNC, Category.EXTERNAL})


class ZeroSizedRemoval(ComputationPass):
    """Replaces arrays without elements by constants.

    negate(x: f32[0,3]) -> constant(f32[0,3])

    Requires: no schedule.
    Ensures: only parameters, constants, elements of tuples and operations with effects have no elements.
    Cost: linear.
    Source: there is nothing to compute.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        rewriter = Rewriter(computation)
        for instruction in computation.instructions:
            if instruction.computation is not None and _is_removable(instruction):
                value = np.zeros(instruction.shape.dims, instruction.shape.numpy_dtype)
                rewriter.replace(instruction, rewriter.build.constant(value))
        return rewriter.changed


def _is_removable(instruction: HloInstruction) -> bool:
    if not is_trivial(instruction) or instruction.shape.dynamic or instruction.has_side_effect:
        return False
    if instruction.opcode in ("parameter", "constant", "get-tuple-element"):
        return False
    return instruction.info.category not in _OUTSIDE


_UNFOLDED = frozenset(
    ["constant", "iota", "broadcast", "tuple", "get-tuple-element", "partition-id", "replica-id", "copy"]
)


class ConstantFolding(ComputationPass):
    """Evaluates elementwise operations, conversions and movement of constants at compile time.

    add(constant(1), constant(2))  ->  constant(3)

    Broadcasts and iotas stay symbolic: they need no memory, their values do.  Reductions, products, gathers
    and sorts of constants stay kernels.

    Requires: no schedule.
    Ensures: no operation with constant operands is left whose result is small enough: no larger than the
        operands, or than `max_bytes`.
    Cost: that of the evaluator, linear in elements.
    Source: the evaluator defines the result; denormals are kept.

    Attributes:
        max_bytes: largest result that is folded although it is larger than its operands, in bytes.
    """

    max_bytes: int = 1 << 20

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Folds in post-order, so that chains fold at once."""
        rewriter = Rewriter(computation)
        for instruction in computation.post_order():
            if instruction.computation is not None and self._is_foldable(instruction):
                value = _folded(instruction, rewriter.build)
                rewriter.replace(instruction, value)
        return rewriter.changed

    def _is_foldable(self, instruction: HloInstruction) -> bool:
        if instruction.opcode in _UNFOLDED or not is_evaluable(instruction) or instruction.has_control_edges:
            return False
        if not instruction.operands or any(o.opcode != "constant" for o in instruction.operands):
            return False
        shape = instruction.shape
        if not shape.is_array or shape.dynamic or (shape.layout and not shape.layout.is_row_major):
            return False
        read = sum(o.shape.byte_size for o in instruction.operands)
        return shape.byte_size <= max(read, self.max_bytes)


def _folded(instruction: HloInstruction, build: TrackingBuilder) -> HloInstruction:
    body = instruction.parent.module.create_computation("folded")
    try:
        copies = [body.add(o.clone(())) for o in instruction.operands]
        body.set_root(body.add(instruction.clone(copies)))
        with np.errstate(all="ignore"):
            value = Evaluator().run(body, [])
    finally:
        instruction.parent.module.remove_computation(body)
    return build.constant(value)


class SortSimplifier(ComputationPass):
    """Sorts only used operands, and nothing along a dim of size 1.

    (keys, values) = sort(k, v), only keys used -> keys = sort(k)

    Requires: no schedule.
    Ensures: each operand of a sort is compared or its result used; the sorted dim has two elements or more.
    Cost: linear.
    Source: XLA's sort simplifier.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        rules: dict[str, tuple[Rule, ...]] = {"sort": (_sort_of_one, _sort_used)}
        return Rewriter(computation).run(rules, lambda instruction: True)


def _sort_of_one(site: RewriteSite) -> HloInstruction | None:
    if site.operands[0].shape.dims[site.at.dimensions[0]] > 1:
        return None
    return site.build.tuple(site.operands) if site.shape.is_tuple else site.operands[0]


def _sort_used(site: RewriteSite) -> HloInstruction | None:
    if site.at.is_root or not site.shape.is_tuple:
        return None
    if any(u.opcode != "get-tuple-element" for u in site.at.users):
        return None
    order = site.at.to_apply
    compared = {p.parameter_number // 2 for p in order.parameters if p.users or p.is_root}
    used = {u.tuple_index for u in site.at.users}
    count = len(site.operands)
    kept = [i for i in range(count) if i in used or i in compared]
    if len(kept) == count or not kept:
        return None
    smaller = order.clone()
    for number in reversed(range(2 * count)):
        if number // 2 not in kept:
            smaller.remove_parameter(number)
    values = [site.operands[i] for i in kept]
    ordered = site.build.add(
        "sort",
        *values,
        shape=values[0].shape if len(kept) == 1 else tuple_of([v.shape for v in values]),
        called=(smaller,),
        dimensions=site.at.dimensions,
        is_stable=bool(site.at.attributes.get("is_stable", False)),
    )
    results = [ordered] if len(kept) == 1 else [site.build.element(ordered, i) for i in range(len(kept))]
    # Unused elements may be anything of their shape.
    elements = [results[kept.index(i)] if i in kept else site.operands[i] for i in range(count)]
    return site.build.tuple(elements)
