"""Passes that make programs smaller."""

from __future__ import annotations

from mpmd.compile.passes.simplify.algebraic_simplifier import AlgebraicSimplifier
from mpmd.compile.passes.simplify.constant_folding import ConstantFolding
from mpmd.compile.passes.simplify.cse import Cse
from mpmd.compile.passes.simplify.dce import Dce
from mpmd.support.passes import Pass

PASSES: tuple[type[Pass], ...] = (AlgebraicSimplifier, ConstantFolding, Cse, Dce)
