"""Passes that make programs smaller."""

from __future__ import annotations

from mpmd.compile.passes.simplify.algebraic_simplifier import AlgebraicSimplifier
from mpmd.compile.passes.simplify.call_inliner import CallInliner
from mpmd.compile.passes.simplify.conditional_simplifier import ConditionalSimplifier
from mpmd.compile.passes.simplify.constant_folding import ConstantFolding
from mpmd.compile.passes.simplify.cse import Cse
from mpmd.compile.passes.simplify.dce import Dce
from mpmd.compile.passes.simplify.flatten_call_graph import FlattenCallGraph
from mpmd.compile.passes.simplify.one_per_row_rewriter import OnePerRowRewriter
from mpmd.compile.passes.simplify.sort_simplifier import SortSimplifier
from mpmd.compile.passes.simplify.tuple_simplifier import TupleSimplifier
from mpmd.compile.passes.simplify.unit_dim_removal import UnitDimRemoval
from mpmd.compile.passes.simplify.while_invariant_code_motion import WhileInvariantCodeMotion
from mpmd.compile.passes.simplify.while_loop_unroller import WhileLoopUnroller
from mpmd.compile.passes.simplify.while_simplifier import WhileSimplifier
from mpmd.compile.passes.simplify.zero_sized_removal import ZeroSizedRemoval
from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)
