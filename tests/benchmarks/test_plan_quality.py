"""The benchmark of found stages and plans runs, on smaller models."""

from __future__ import annotations

import pytest

from benchmarks import plan_models, plan_quality


@pytest.mark.slow
def test_stages_and_plans_are_compared(monkeypatch):
    monkeypatch.setattr(plan_models, "WIDTH", 32)
    monkeypatch.setattr(plan_quality, "MICROBATCHES", (4, 8))
    ratio, sent = plan_quality.compare_with_hand("scanned", 2)
    assert 0.2 < ratio < 5 and sent == 0
    ratios, _ = plan_quality.compare_with_measured("skips", 2)
    assert len(ratios) == 3 and all(0.1 < of < 10 for of in ratios)
