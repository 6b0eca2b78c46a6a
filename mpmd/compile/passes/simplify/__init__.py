"""Passes that make programs smaller: fewer instructions, loops and elements, with the same results."""

from __future__ import annotations

from mpmd.compile.passes.simplify.algebra import AlgebraicSimplifier
from mpmd.compile.passes.simplify.control_flow import (
    CallInliner,
    ConditionalSimplifier,
    FlattenCallGraph,
    TupleSimplifier,
)
from mpmd.compile.passes.simplify.one_per_row_rewriter import OnePerRowRewriter
from mpmd.compile.passes.simplify.redundancy import (
    ConstantFolding,
    Cse,
    Dce,
    SortSimplifier,
    ZeroSizedRemoval,
)
from mpmd.compile.passes.simplify.unit_dim_removal import UnitDimRemoval
from mpmd.compile.passes.simplify.while_loops import (
    WhileInvariantCodeMotion,
    WhileLoopUnroller,
    WhileSimplifier,
)
from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)
