"""Instructions that are not needed: dead, equal to others, or without elements."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction, Literal
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.opcodes import Category
from mpmd.compile.hlo.printer import computation_digest
from mpmd.compile.passes.hlo_pass import ComputationPass, HloPass, unfused
from mpmd.compile.passes.rewriter import Rewriter, is_dead, remove_unused
from mpmd.compile.passes.value_queries import is_trivial


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


_NEVER = frozenset(
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
            found = known.setdefault(_key(instruction, digests), instruction)
            if found is not instruction:
                instruction.replace_all_uses_with(found)
                remove_unused(instruction)
                changed = True
        return changed

    def _may_share(self, instruction: HloInstruction) -> bool:
        if instruction.opcode in _NEVER or instruction.has_control_edges:
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
