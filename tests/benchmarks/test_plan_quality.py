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


def test_a_pair_is_in_the_wrong_order_only_beyond_the_noise():
    slow, fast = [1.0, 1.1, 1.05] * 4, [0.9, 1.0, 0.95] * 4
    noisy = [0.9, 1.3, 1.0] * 4
    assert plan_quality.order_is_right([fast, slow]) and not plan_quality.order_is_right([slow, fast])
    assert plan_quality.order_is_right([slow, noisy]) and plan_quality.order_is_right([noisy, slow])
    assert plan_quality.median_interval(range(1, 13)) == (3, 10)  # 96.1 %, the table of the sign test
