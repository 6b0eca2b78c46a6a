"""Random programs, run by what is tested and by the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax

from mpmd.compile.kernels.planner.elements import NoPlan
from tests.support.hlo_meaning import evaluate
from tests.support.random_hlo.comparison import differences
from tests.support.random_hlo.draft import Case

FASTER_BY_XLA = "faster by XLA's library"

Runner = Callable[[Case], list[Any]]
"""The leaves of what a program computes."""


def compare(case: Case, run: Runner) -> str:
    """What differs for a case, or why it was refused; "" if nothing."""
    try:
        got = run(case)
    except NoPlan as error:
        if FASTER_BY_XLA in str(error):
            return ""
        return f"{case.name}: refused: {error}"
    problem = differences(got, jax.tree.leaves(evaluate(case.module, case.arguments)), case)
    return f"{case.name}: {problem}" if problem else ""


def sweep(cases: Iterable[Case], run: Runner) -> None:
    """None of the cases may differ, and none be refused but for what XLA's library computes faster."""
    assert not any(problems := [compare(case, run) for case in cases]), "\n".join(p for p in problems if p)
