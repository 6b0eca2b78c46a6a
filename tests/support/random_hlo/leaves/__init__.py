"""Random programs whose conditionals and loops carry 20 and more leaves of mixed types.

What is exercised is the memory of leaves: those that a branch passes through, exchanges, rotates, changes in
place at computed positions or reads after such a change.  Integers and extrema are exact; a few programs have
functions of floats, whose results feed neither a position nor a choice.
"""

from __future__ import annotations

import numpy as np

from tests.support.random_hlo.draft import Case, Draft
from tests.support.random_hlo.leaves.program import LeafProgram

__all__ = ["leaves_case"]


def leaves_case(seed: int) -> Case:
    """The program of a seed: always the same."""
    rng = np.random.default_rng([seed, 20])
    return LeafProgram(Draft(rng, f"leaves#{seed}", seed)).case()
