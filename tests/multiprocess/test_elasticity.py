"""A process that is lost for good: the job goes on with fewer, in other stages, from a checkpoint."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.launching import output

PROGRAM = ["-m", "tests.support.elastic_training"]


@pytest.mark.slow
def test_a_job_that_loses_two_of_four_processes_ends_with_the_losses_of_one_process(tmp_path):
    launcher = [sys.executable, "-m", "mpmd.tools.run", "-n", "4", "--min-processes", "2", "--grace", "3"]
    done = output([*launcher, *PROGRAM, str(tmp_path / "lost"), "4", "3"], 250)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1].removeprefix("[0] "))
    assert found["counts"] == [4, 3, 2, 2, 2, 2], "each step's number of processes"
    for count in (3, 2):
        assert f"mpmd-run: exit code 137; going on with {count} processes" in done.stderr
    alone = output([sys.executable, *PROGRAM, str(tmp_path / "alone")], 250)
    assert json.loads(alone.stdout)["losses"] == found["losses"]
