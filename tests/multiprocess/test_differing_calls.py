"""What all processes must do alike, done otherwise by one: an error in all, soon, and never a hang."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests.support.launching import output


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_call_that_differs_in_one_process_is_an_error_in_all():
    """Sequences of calls with a difference in one argument, or one call left out, added or another."""
    first = int(os.environ.get("MPMD_TEST_SEED", "0")) * 1_000_000
    program = ["-m", "tests.support.differing_calls", "104", "--first", str(first)]
    done = output([sys.executable, "-W", "ignore", *program], 2300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["trials"] == 104 and found["differing"] >= 90
    assert found["hangs"] == 0 and found["wrong"] == []
