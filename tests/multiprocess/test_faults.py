"""A fault in one process is an error in every other, in bounded time, that names it."""

from __future__ import annotations

import pytest

from tests.support.launching import launch

PROGRAM = "tests.support.faulty_training"
SAYS = {
    "kill": "has ended, or does not answer",
    "stop": "has not answered for 8 s",
    "fragment": "failed in step {at}:",
    "script": "ended with ValueError: the fault of a script",
    "exit": "has ended, and another process waits for it",
}


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(("processes", "process"), [(2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("kind", SAYS)
def test_every_other_process_names_the_one_that_failed(kind, processes, process, at, tmp_path):
    code, found = launch(processes, PROGRAM, kind, str(process), str(at), str(tmp_path / "time"))
    errors = {line["process"]: line for line in found}
    assert code == (137 if kind == "kill" else 1)
    assert set(errors) >= set(range(processes)) - {process}
    for index in set(range(processes)) - {process}:
        lines = errors[index]["text"].splitlines()
        assert errors[index]["error"] == "PeerError"
        assert lines[0].startswith(f"process {process} (host ") and f"mesh 'm{process}'" in lines[0]
        assert lines[0].endswith(SAYS[kind].format(at=at))
        last = f"step {at - 1} is the last one completed" if at else "no step was completed"
        assert f"  {last} by all processes" in lines
        assert errors[index]["seconds"] < 10


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
