"""A fault in one process is an error in every other, in bounded time, that names it."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.launching import launch, output

PROGRAM = "tests.support.faulty_training"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_other_process_names_the_one_that_failed():
    """Every kind in several places; `python -m tests.support.fault_campaign 200` is the whole campaign."""
    done = output([sys.executable, "-W", "ignore", "-m", "tests.support.fault_campaign", "60"], 580)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["faults"] == 60 and found["wrong"] == [] and found["hangs"] == 0
    assert 0 < found["detect_s"] < 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unsent", "interrupt"])
def test_a_step_that_cannot_go_on_is_an_error_in_every_process_at_once(kind):
    """Of the last four messages of a step one is not sent; or it is interrupted.  None waits for a limit."""
    program = ["-m", "tests.support.fault_campaign", "10", "--kinds", kind]
    done = output([sys.executable, "-W", "ignore", *program], 100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["faults"] == 10 and found["wrong"] == [] and 0 < found["detect_s"] < 4


@pytest.mark.slow
def test_the_first_line_that_differs_is_named(tmp_path):
    code, found = launch(2, PROGRAM, "program", "1", "0", str(tmp_path / "time"))
    assert code == 1 and len(found) == 2
    for line in found:
        text = line["text"].splitlines()
        assert text[0] == "process 1 runs another program than process 0"
        assert "1.250000e-01" in text[2] and "2.500000e-01" in text[3]


@pytest.mark.slow
def test_an_array_of_another_process_says_where_it_is_and_how_to_get_it(tmp_path):
    code, found = launch(2, PROGRAM, "none", "1", "0", str(tmp_path / "time"))
    assert code == 0
    (page,) = [line["text"] for line in found if "text" in line]
    assert page.startswith("the value of an array float32[16,16] is in process 1, not in process 0\n")
    assert "mpmd.fetch(tree)" in page
    sums = {line["process"]: line["sum"] for line in found if "sum" in line}
    assert sums[0] == sums[1] and len(sums) == 2
