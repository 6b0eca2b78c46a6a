"""A run one of whose processes is killed goes on from its newest checkpoint, with the same loss curve."""

from __future__ import annotations

import pytest

from benchmarks.restarts import campaign


@pytest.mark.slow
def test_the_loss_curve_after_a_kill_and_a_restart_is_that_of_an_undisturbed_run():
    found = campaign(runs=2, processes=2, seed=1)
    assert (found["killed"], found["restarts_equal"]) == (2, 2)
    assert found["restarts"] >= 2
