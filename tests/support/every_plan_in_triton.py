"""Pytest plugin: every plan that a test evaluates is run by Triton's interpreter, too, and must agree.

    pytest -p tests.support.every_plan_in_triton tests/unit/compile tests/property ...

A test whose plan does not agree fails.  Plans that have no kernel are counted, with the reasons, at the end.
"""

from __future__ import annotations

import collections

import numpy as np

import mpmd.compile.kernels.evaluate as evaluator
from mpmd.compile.backends.native_gpu.triton.triton_kernels import refusal

_MAX_POINTS = 1 << 17
_evaluate = evaluator.evaluate
_seen: set[str] = set()
_counts: collections.Counter[str] = collections.Counter()


def _both(plan, arrays, *how, **named):
    """Evaluates a plan, and compares what its kernels compute."""
    key = plan.text()
    small = plan.size < _MAX_POINTS and sum(a.size for a in arrays) < _MAX_POINTS
    if key in _seen or not small:
        return _evaluate(plan, arrays, *how, **named)
    _seen.add(key)
    reason = refusal(plan)
    _counts[f"not printed: {reason}" if reason else f"printed: {plan.kind}"] += 1
    found = [a.reshape(-1).copy() for a in arrays]
    _evaluate(plan, arrays, *how, **named)
    if not reason:
        from tests.support.triton_interpreter import differences, run_plan

        run_plan(plan, found)
        wrong = differences(plan, found, [np.reshape(a, -1) for a in arrays])
        assert wrong == [], "\n".join(["Triton's interpreter differs in:", *wrong])
        _counts["equal"] += 1
    return None


evaluator.evaluate = _both


def pytest_terminal_summary(terminalreporter):
    """The counts."""
    terminalreporter.write_line(f"{len(_seen)} distinct plans")
    for what, count in sorted(_counts.items()):
        terminalreporter.write_line(f"  {count:5} {what}")
