"""The passes in the order in which a pipeline runs them: named groups, each entry with its reason.

A pipeline is made of these and of what stands between and after them (fusion, scheduling, buffers).
"""

from __future__ import annotations

from collections.abc import Callable

from mpmd.compile.passes.hlo_pass import Fixpoint
from mpmd.compile.passes.simplify.algebraic_simplifier import AlgebraicSimplifier
from mpmd.compile.passes.simplify.constant_folding import ConstantFolding
from mpmd.compile.passes.simplify.cse import Cse
from mpmd.compile.passes.simplify.dce import Dce
from mpmd.support.passes import Pass


def simplification() -> list[Pass]:
    """Simplification to a fixed point."""
    return [
        Fixpoint(
            "simplification",
            (
                AlgebraicSimplifier(),  # opens all others
                ConstantFolding(),  # feeds the simplifier
                Cse(),  # duplicates would be simplified twice
                Dce(),  # last: what the others left behind
            ),
        )
    ]


GROUPS: dict[str, Callable[[], list[Pass]]] = {"hlo-simplification": simplification}
"""By the name under which `mpmd-hlo-opt` runs them."""
