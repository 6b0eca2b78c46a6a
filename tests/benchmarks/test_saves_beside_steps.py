"""The benchmark of checkpoints beside steps runs, and its runs leave checkpoints."""

from __future__ import annotations

import pytest

from benchmarks.saves_beside_steps import measure


@pytest.mark.slow
def test_each_kind_of_run_is_measured(capfd):
    found = measure(rounds=1, steps=2, layers=2, width=8, rows=8, every=10)
    assert found["step_ms"] > 0 and found["held_up_ms"] > 0
    assert found["before_percent"] == pytest.approx(found["before_ms"] / found["step_ms"] * 10, rel=0.01)
    assert "round 0: without" in capfd.readouterr().out
