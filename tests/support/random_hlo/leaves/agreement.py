"""Whether native code, the evaluator and XLA agree on the program of a seed, whole and in two parts."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from mpmd.compile.hlo import HloModule, print_module
from mpmd.errors import MpmdError
from tests.support.hlo_meaning import evaluate
from tests.support.native_hlo import run_module
from tests.support.random_hlo.comparison import differences
from tests.support.random_hlo.draft import Case
from tests.support.random_hlo.leaves import leaves_case
from tests.support.random_hlo.leaves.cutting import cut
from tests.support.xla_hlo import XlaWorker

WHOLE, IN_TWO = "whole", "cut in two"
"""The ways in which native code runs a program."""


def one_way(seed: int) -> str:
    """Whole for half of the seeds, and cut in two for the others."""
    return IN_TWO if seed % 2 else WHOLE


def disagreement(seed: int, xla: XlaWorker | None = None, ways: Sequence[str] = (WHOLE, IN_TWO)) -> str:
    """What differs for the program of a seed, or why native code was refused; "" if nothing.

    Args:
        seed: of the program, of what is donated and of where it is cut.
        xla: runs the whole program, too, if given.
        ways: how native code runs it.
    """
    case = leaves_case(seed)
    want = jax.tree.leaves(evaluate(case.module, case.arguments))
    for way in ways:
        rng = np.random.default_rng([seed, 21, len(way)])
        try:
            problem = differences(_RUNS[way](case, rng), want, case)
        except MpmdError as error:
            problem = f"refused: {error}"
        if problem:
            return f"{case.name}, {way}: {problem}"
    if xla is None:
        return ""
    problem = differences(xla.run(print_module(case.module), case.arguments), want, case)
    return f"{case.name}, XLA: {problem}" if problem else ""


def _whole(case: Case, rng: np.random.Generator) -> list[np.ndarray]:
    return _run(case.module, case.arguments, rng)


def _in_two(case: Case, rng: np.random.Generator) -> list[np.ndarray]:
    """The results of the second of two parts, given those of the first."""
    made = None
    while made is None:
        made = cut(case.module, int(rng.integers(1, len(case.module.entry))))
    before, after = ([case.arguments[n] for n in numbers] for numbers in made.given)
    return _run(made.second, [*after, *_run(made.first, before, rng)], rng)


_RUNS = {WHOLE: _whole, IN_TWO: _in_two}


def _run(module: HloModule, arguments: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    """Native code on poisoned memory, with some of the arguments, all or none of them donated."""
    share = rng.choice([0, 0.5, 1])
    donated = tuple(k for k in range(len(arguments)) if rng.random() < share)
    return run_module(module, list(arguments), donated=donated)
