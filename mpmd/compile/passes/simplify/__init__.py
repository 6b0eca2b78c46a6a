"""Passes that make programs smaller."""

from __future__ import annotations

from mpmd.compile.passes.simplify.algebraic_simplifier import AlgebraicSimplifier
from mpmd.compile.passes.simplify.constant_folding import ConstantFolding
from mpmd.compile.passes.simplify.control_flow import (
    CallInliner,
    ConditionalSimplifier,
    FlattenCallGraph,
    TupleSimplifier,
)
from mpmd.compile.passes.simplify.loops import WhileInvariantCodeMotion, WhileLoopUnroller, WhileSimplifier
from mpmd.compile.passes.simplify.one_per_row_rewriter import OnePerRowRewriter
from mpmd.compile.passes.simplify.redundancy import Cse, Dce, ZeroSizedRemoval
from mpmd.compile.passes.simplify.sort_simplifier import SortSimplifier
from mpmd.compile.passes.simplify.unit_dim_removal import UnitDimRemoval
from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)
