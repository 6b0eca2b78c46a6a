"""The passes in the order in which a pipeline runs them: named groups, each entry with its reason.

A pipeline consists of these and of the passes between and after them (fusion, scheduling, buffers).
"""

from __future__ import annotations

from collections.abc import Callable

from mpmd.compile.passes.collectives.all_gather_combiner import AllGatherCombiner
from mpmd.compile.passes.collectives.all_gather_simplifier import AllGatherSimplifier
from mpmd.compile.passes.collectives.all_reduce_combiner import AllReduceCombiner
from mpmd.compile.passes.collectives.all_reduce_folder import AllReduceFolder
from mpmd.compile.passes.collectives.all_reduce_mover import AllReduceMover
from mpmd.compile.passes.collectives.all_reduce_reassociate import AllReduceReassociate
from mpmd.compile.passes.collectives.async_collective_creator import AsyncCollectiveCreator
from mpmd.compile.passes.collectives.collective_permute_combiner import CollectivePermuteCombiner
from mpmd.compile.passes.collectives.collective_simplifier import CollectiveSimplifier
from mpmd.compile.passes.collectives.reduce_scatter_combiner import ReduceScatterCombiner
from mpmd.compile.passes.collectives.reduce_scatter_creator import ReduceScatterCreator
from mpmd.compile.passes.expand.argmax_rewriter import ArgmaxRewriter
from mpmd.compile.passes.expand.async_expander import AsyncExpander
from mpmd.compile.passes.expand.batch_norm_expander import BatchNormExpander
from mpmd.compile.passes.expand.bitcast_convert_expander import BitcastConvertExpander
from mpmd.compile.passes.expand.cholesky_expander import CholeskyExpander
from mpmd.compile.passes.expand.comparison_expander import ComparisonExpander
from mpmd.compile.passes.expand.complex_to_pairs import ComplexToPairs
from mpmd.compile.passes.expand.convolution_expander import ConvolutionExpander
from mpmd.compile.passes.expand.convolution_to_dot import ConvolutionToDot
from mpmd.compile.passes.expand.dot_dimension_merger import DotDimensionMerger
from mpmd.compile.passes.expand.fft_expander import FftExpander
from mpmd.compile.passes.expand.gather_expander import GatherExpander
from mpmd.compile.passes.expand.gather_simplifier import GatherSimplifier
from mpmd.compile.passes.expand.lapack_expander import LapackExpander
from mpmd.compile.passes.expand.map_inliner import MapInliner
from mpmd.compile.passes.expand.narrow_type_expander import NarrowTypeExpander
from mpmd.compile.passes.expand.reduce_precision_expander import ReducePrecisionExpander
from mpmd.compile.passes.expand.reduce_window_expander import ReduceWindowExpander
from mpmd.compile.passes.expand.reduce_window_rewriter import ReduceWindowRewriter
from mpmd.compile.passes.expand.reduction_expander import ReductionExpander
from mpmd.compile.passes.expand.rng_bit_generator_expander import RngBitGeneratorExpander
from mpmd.compile.passes.expand.scatter_expander import ScatterExpander
from mpmd.compile.passes.expand.scatter_simplifier import ScatterSimplifier
from mpmd.compile.passes.expand.select_and_scatter_expander import SelectAndScatterExpander
from mpmd.compile.passes.expand.special_function_expander import SpecialFunctionExpander
from mpmd.compile.passes.expand.stochastic_convert_expander import StochasticConvertExpander
from mpmd.compile.passes.expand.topk_decomposer import TopkDecomposer
from mpmd.compile.passes.expand.triangular_solve_expander import TriangularSolveExpander
from mpmd.compile.passes.hlo_pass import Fixpoint
from mpmd.compile.passes.layout.broadcast_canonicalizer import BroadcastCanonicalizer
from mpmd.compile.passes.layout.layout_assignment import LayoutAssignment
from mpmd.compile.passes.layout.layout_normalization import LayoutNormalization
from mpmd.compile.passes.layout.reshape_decomposer import ReshapeDecomposer
from mpmd.compile.passes.simplify.algebraic_simplifier import AlgebraicSimplifier
from mpmd.compile.passes.simplify.call_inliner import CallInliner
from mpmd.compile.passes.simplify.computation_deduplicator import ComputationDeduplicator
from mpmd.compile.passes.simplify.conditional_simplifier import ConditionalSimplifier
from mpmd.compile.passes.simplify.constant_folding import ConstantFolding
from mpmd.compile.passes.simplify.convert_mover import ConvertMover
from mpmd.compile.passes.simplify.cse import Cse
from mpmd.compile.passes.simplify.dce import Dce
from mpmd.compile.passes.simplify.flatten_call_graph import FlattenCallGraph
from mpmd.compile.passes.simplify.optimization_barrier_removal import OptimizationBarrierRemoval
from mpmd.compile.passes.simplify.reshape_mover import ReshapeMover
from mpmd.compile.passes.simplify.sort_simplifier import SortSimplifier
from mpmd.compile.passes.simplify.transpose_folding import TransposeFolding
from mpmd.compile.passes.simplify.tuple_simplifier import TupleSimplifier
from mpmd.compile.passes.simplify.while_invariant_code_motion import WhileInvariantCodeMotion
from mpmd.compile.passes.simplify.while_loop_unroller import WhileLoopUnroller
from mpmd.compile.passes.simplify.while_simplifier import WhileSimplifier
from mpmd.compile.passes.simplify.zero_sized_removal import ZeroSizedRemoval
from mpmd.support.passes import Pass


def inlining() -> list[Pass]:
    """One body per loop and branch, no calls, nothing dead."""
    return [
        AsyncExpander(),  # it creates calls
        CallInliner(),  # before all that follows: calls hide their operations
        FlattenCallGraph(),  # loops and branches may be changed one by one
        TupleSimplifier(),  # calls returned tuples
        ZeroSizedRemoval(),  # no later pass handles empty arrays
        Dce(),
    ]


def expansion() -> list[Pass]:
    """Expands operations that later passes do not support; canonicalises products and indexed accesses."""
    return [
        NarrowTypeExpander(),  # first: the others produce types that kernels support
        BatchNormExpander(),  # it creates reductions and elementwise work
        RngBitGeneratorExpander(),
        StochasticConvertExpander(),
        BitcastConvertExpander(),
        TopkDecomposer(),
        ComparisonExpander(),  # after topk, which compares in total order
        SelectAndScatterExpander(),  # may create maps
        LapackExpander(),  # creates cholesky and triangular-solve
        CholeskyExpander(),
        TriangularSolveExpander(),
        FftExpander(),
        MapInliner(),
        ComplexToPairs(),  # after it: maps of complex numbers; before reductions, which take pairs
        SpecialFunctionExpander(),  # after complex numbers, whose functions need them
        ReducePrecisionExpander(),
        ArgmaxRewriter(),
        ReductionExpander(),  # after it: other reductions of several arrays
        ReduceWindowRewriter(),
        ReduceWindowExpander(),  # after it: other windows, likewise
        ConvolutionToDot(),
        ConvolutionExpander(),  # after it: the others need patches
        GatherSimplifier(),  # canonical form; batching dims are removed
        ScatterSimplifier(),
        GatherExpander(),  # of that form only
        ScatterExpander(),
        ZeroSizedRemoval(),  # expanded operations may have had none
    ]


def simplification() -> list[Pass]:
    """Simplification to a fixed point."""
    return [
        Fixpoint(
            "simplification",
            (
                AlgebraicSimplifier(),  # opens all others
                ReshapeMover(),  # elementwise work meets elementwise work
                ConstantFolding(),  # feeds the simplifier
                SortSimplifier(),
                ConditionalSimplifier(),  # after folding: selectors may have become constant
                WhileSimplifier(),  # likewise for trip counts and initial states
                WhileInvariantCodeMotion(),  # after it: constants and unchanged elements are known
                WhileLoopUnroller(),  # the remaining state is known now
                Cse(),  # duplicates would be simplified twice
                Dce(),  # last: it removes the leftovers of the others
            ),
        ),
        ComputationDeduplicator(),  # reducers were copied by inlining
    ]


def products() -> list[Pass]:
    """Matrix products and conversions, once no rule would undo it."""
    return [
        TransposeFolding(),  # after the reshape mover: transposes are next to the products
        DotDimensionMerger(),  # after folding: the others need no transpose
        ConvertMover(),
        Fixpoint("after-products", (AlgebraicSimplifier(), Cse(), Dce())),
    ]


def communication() -> list[Pass]:
    """Less communication, in fewer and larger pieces."""
    return [
        CollectiveSimplifier(),
        AllGatherSimplifier(),
        AllReduceMover(),  # before all that look for neighbours of sums
        AllReduceReassociate(),
        AllReduceFolder(),  # after reassociation: sums of sums
        ReduceScatterCreator(),  # after folding: the groups are final
        AllReduceCombiner(),  # combiners last: the others handle collectives of one array
        AllGatherCombiner(),
        ReduceScatterCombiner(),
        CollectivePermuteCombiner(),
        Dce(),
    ]


def before_scheduling() -> list[Pass]:
    """The last passes before the scheduler."""
    return [
        OptimizationBarrierRemoval(),  # after the last CSE
        TupleSimplifier(),  # barriers took tuples
        AsyncCollectiveCreator(),  # the scheduler moves starts and dones apart
        Dce(),
    ]


def layouts() -> list[Pass]:
    """Layouts, and their description by row-major arrays."""
    return [
        BroadcastCanonicalizer(),  # before layouts: it creates transposes
        LayoutAssignment(),
        ReshapeDecomposer(),  # movement of data becomes copies, other reshapes bitcasts
        LayoutNormalization(),  # copies become transposes
        Fixpoint(
            "after-layouts",
            (
                AlgebraicSimplifier(layout_sensitive=True),  # bitcasts cancel
                ReshapeDecomposer(),  # of its results
                Cse(),
                Dce(),
            ),
        ),
    ]


GROUPS: dict[str, Callable[[], list[Pass]]] = {
    "hlo-inlining": inlining,
    "hlo-expansion": expansion,
    "hlo-simplification": simplification,
    "hlo-products": products,
    "hlo-communication": communication,
    "hlo-layouts": layouts,
    "hlo-before-scheduling": before_scheduling,
}
"""By the name under which `mpmd-hlo-opt` runs them."""
