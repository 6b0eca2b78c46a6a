"""Orders of arrays, kernels and copies on programs made for them: the numbers stay in their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from mpmd.compile.backends.reference.target import Reference
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.hlo import HloModule, print_module, verify
from mpmd.compile.passes import make_pass
from mpmd.compile.pipelines import GROUPS
from tests.support.directed import seeds
from tests.support.directed.copying import copying_case
from tests.support.directed.layouts import fusion_case, layout_case
from tests.support.hlo_meaning import evaluate
from tests.support.native_hlo import fragment_of_module
from tests.support.random_hlo.draft import Case
from tests.support.reference_runs import run_program
from tests.support.rewrite_checks import identical

FAST, SLOW = 6, 2000


def group(module: HloModule, *names: str) -> None:
    """Runs groups of passes."""
    for name in names:
        for pass_ in GROUPS[name]():
            pass_.run(module)
            verify(module)


def agree(case: Case, module: HloModule, *found: Sequence[Any]) -> None:
    """What a program gives, and what is found in other ways, is what the case means."""
    wanted = jax.tree.leaves(evaluate(case.module, case.arguments))
    for got in (jax.tree.leaves(evaluate(module, case.arguments)), *found):
        for a, b in zip(got, wanted, strict=True):
            same = identical(np.asarray(a), np.asarray(b), signs=False)
            assert same, (
                f"{case.name}: {a}, expected {b}\n{print_module(case.module)}\n---\n{print_module(module)}"
            )


def in_memory(case: Case, donated: tuple[int, ...] = ()) -> list[np.ndarray]:
    """The results of the plans and buffers of a program."""
    fragment = fragment_of_module(case.module, donated)
    made = prepare_fragment(fragment, Reference(), module=case.module.clone())
    return run_program(made.program, fragment, [case.arguments])[0]


def layouts(seed: int) -> bool:
    """Whether an array in the program lies in another order than its dims."""
    case = layout_case(seed)
    module = case.module.clone()
    for pass_ in GROUPS["hlo-layouts"]():
        pass_.run(module)
        verify(module)
        agree(case, module)
    inside = [i.shape for i in module.instructions() if i.opcode != "parameter" and i.shape.is_array]
    return any(s.layout is not None and not s.layout.is_row_major for s in inside)


def fusion(seed: int) -> bool:
    """Whether some of the work becomes one kernel."""
    case = fusion_case(seed)
    module = case.module.clone()
    group(module, "hlo-expansion", "hlo-layouts")
    make_pass("hlo-fusion").run(module)
    verify(module)
    agree(case, module, in_memory(case))
    return any(
        i.opcode == "fusion" and sum(j.opcode != "parameter" for j in i.to_apply) > 1 for i in module.entry
    )


def copies(seed: int) -> bool:
    """Whether values are copied."""
    case, donated = copying_case(seed)
    module = case.module.clone()
    group(module, "hlo-inlining")
    changed = make_pass("hlo-copy-insertion").run(module)
    verify(module)
    agree(case, module, in_memory(case, donated))
    return changed


SUBJECTS = (layouts, fusion, copies)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.__name__)
def test_the_numbers_stay(subject: Callable[[int], bool]):
    assert sum(subject(seed) for seed in seeds(FAST)) >= FAST / 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.__name__)
def test_the_numbers_stay_in_many_programs(subject: Callable[[int], bool]):
    assert sum(subject(seed) for seed in seeds(SLOW)) >= SLOW / 2
