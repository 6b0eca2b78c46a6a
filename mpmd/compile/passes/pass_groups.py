"""The passes in the order in which a pipeline runs them: named groups, each entry with its reason.

A pipeline consists of these and of the passes between and after them (fusion, scheduling, buffers).
"""

from __future__ import annotations

from collections.abc import Callable

from mpmd.compile.passes import collectives, expand, layout, simplify
from mpmd.compile.passes.hlo_pass import Fixpoint
from mpmd.support.passes import Pass


def inlining() -> list[Pass]:
    """One body per loop and branch, no calls, nothing dead."""
    return [
        expand.AsyncExpander(),  # it makes calls
        simplify.CallInliner(),  # before all that follows: calls hide what all others look for
        simplify.FlattenCallGraph(),  # loops and branches may be changed one by one
        simplify.TupleSimplifier(),  # calls returned tuples
        simplify.ZeroSizedRemoval(),  # no later pass need think of empty arrays
        simplify.Dce(),
    ]


def expansion() -> list[Pass]:
    """Operations that no later pass need know, as others; products and indexed accesses in one form."""
    return [
        expand.NarrowTypeExpander(),  # first: later expanders emit only types that kernels support
        expand.BatchNormExpander(),  # it makes reductions and elementwise work
        expand.RngBitGeneratorExpander(),
        expand.StochasticConvertExpander(),
        expand.BitcastConvertExpander(),
        expand.TopkDecomposer(),
        expand.ComparisonExpander(),  # after topk, which compares in total order
        expand.SelectAndScatterExpander(),  # may make maps
        expand.MapInliner(),
        expand.ComplexToPairs(),  # after it: maps of complex numbers; before reductions, which take pairs
        expand.SpecialFunctionExpander(),  # after complex numbers, whose functions need them
        expand.ReducePrecisionExpander(),
        expand.ArgmaxRewriter(),
        expand.ReductionExpander(),  # after it: other reductions of several arrays, and by no plain operation
        expand.ReduceWindowRewriter(),
        expand.ReduceWindowExpander(),  # after it: other windows, likewise
        expand.ConvolutionToDot(),
        expand.GatherSimplifier(),  # one form; batching dims go
        expand.ScatterSimplifier(),
        simplify.ZeroSizedRemoval(),  # expanded operations may have had none
    ]


def simplification() -> list[Pass]:
    """Simplification to a fixed point."""
    return [
        Fixpoint(
            "simplification",
            (
                simplify.AlgebraicSimplifier(),  # opens all others
                simplify.ConstantFolding(),  # feeds the simplifier
                simplify.SortSimplifier(),
                simplify.ConditionalSimplifier(),  # after folding: selectors may have become constant
                simplify.WhileSimplifier(),  # likewise for trip counts and initial states
                simplify.WhileInvariantCodeMotion(),  # after it: constants and unchanged elements are known
                simplify.WhileLoopUnroller(),  # the remaining state is known now
                simplify.Cse(),  # duplicates would be simplified twice
                simplify.Dce(),  # last: removes leftovers of the others
            ),
        )
    ]


def without_unit_dims() -> list[Pass]:
    """No dims of extent 1: attention of one query head per group has them, and is found without."""
    return [
        simplify.UnitDimRemoval(),
        Fixpoint(
            "after-unit-dims",
            (simplify.AlgebraicSimplifier(), simplify.Cse(), simplify.Dce()),  # its reshapes cancel
        ),
    ]


def communication(*, combined: bool = True) -> list[Pass]:
    """Less communication, and if `combined` in fewer and larger pieces."""
    pieces = [
        collectives.AllReduceCombiner(),
        collectives.AllGatherCombiner(),
        collectives.ReduceScatterCombiner(),
    ]
    return [
        collectives.AllReduceMover(),  # before all that look for neighbours of sums
        collectives.AllReduceReassociate(),
        collectives.ReduceScatterCreator(),  # before combiners, whose results have several users
        *(pieces if combined else []),  # last: the others know collectives of one array
        simplify.Dce(),
    ]


def layouts() -> list[Pass]:
    """Layouts, and their description by row-major arrays."""
    return [
        layout.BroadcastCanonicalizer(),  # before layouts: it makes transposes
        layout.LayoutAssignment(),
        layout.ReshapeDecomposer(),  # what moves data becomes copies, the rest bitcasts
        layout.LayoutNormalization(),  # copies become transposes
        Fixpoint(
            "after-layouts",
            (
                simplify.AlgebraicSimplifier(layout_sensitive=True),  # bitcasts cancel
                layout.ReshapeDecomposer(),  # of what it made
                simplify.Cse(),
                simplify.Dce(),
            ),
        ),
    ]


GROUPS: dict[str, Callable[[], list[Pass]]] = {
    "hlo-inlining": inlining,
    "hlo-expansion": expansion,
    "hlo-simplification": simplification,
    "hlo-communication": communication,
    "hlo-layouts": layouts,
}
"""By the name under which `mpmd-hlo-opt` runs them."""
