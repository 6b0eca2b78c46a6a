"""Real steps that are hurt, interrupted, and taken many times."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import soak
from mpmd.errors import FragmentError

pytestmark = pytest.mark.usefixtures("plain_xla")


def test_each_fault_ends_in_one_right_error_and_a_working_next_step():
    found = soak.inject(12)
    assert found["wrong"] == []
    assert found["faults"] == dict.fromkeys(soak.KINDS, 3)
    assert found["threads_left"] == 0


@pytest.mark.slow
def test_two_hundred_faults():
    found = soak.inject(200, seed=1)
    assert found["wrong"] == [] and found["threads_left"] == 0


@pytest.mark.slow
def test_two_thousand_steps_leave_nothing_behind():
    found = soak.soak(2000)
    assert abs(found["bytes_per_step"]) < 500
    assert found["threads_left"] == found["files_left"] == 0


def test_many_steps_leave_no_thread_and_no_file():
    found = soak.soak(40)
    assert found["threads_left"] == found["files_left"] == 0
    assert np.isfinite(found["loss"])


def test_a_backward_whose_results_are_all_consumed_is_watched():
    """The first stage's backward only adds to gradients, which the next backward consumes."""
    compiled = soak.lowered(donate=False).compile()
    tokens = {name for name, executable in compiled.executables.items() if executable.has_token}
    assert any("bwd" in name for name in tokens) and not any("fwd_calls" in name for name in tokens)
    params, x, waits = soak.arguments()
    waits[4:8, 0, 1] = soak.OUT_OF_MEMORY
    with pytest.raises(FragmentError, match=r"stage0_bwd.*B stage 0 microbatch 1, step 0.*RES"):
        compiled(params, x, waits)
        compiled.synchronize()
    compiled.close()
