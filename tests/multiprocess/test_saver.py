"""Checkpoints of two processes, written beside their steps: complete, or not there and an error in all."""

from __future__ import annotations

import sys

import pytest

import mpmd
from tests.support.launching import launch, output

PROGRAM = "tests.support.saver_in_processes"


@pytest.mark.slow
def test_two_processes_write_while_they_train(tmp_path):
    code, found = launch(2, PROGRAM, "well", str(tmp_path))
    assert code == 0 and len(found) == 2
    assert all(line["steps"] == [3, 6] and line["same"] and not line["error"] for line in found)
    names = {entry.name for entry in (tmp_path / "6").iterdir()}
    assert names == {"manifest.json", "process_0", "process_1"}, "and no notes"


@pytest.mark.slow
def test_one_that_cannot_write_is_an_error_in_both(tmp_path):
    code, found = launch(2, PROGRAM, "fails", str(tmp_path))
    assert code == 0 and len(found) == 2
    for line in found:
        assert "the disk is full" in line["error"] and line["steps"] == [3] and line["same"]
    assert [
        line["error"].startswith("process 1 (host") for line in sorted(found, key=lambda x: x["process"])
    ] == [
        True,
        False,
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["3"]


@pytest.mark.slow
def test_one_that_is_killed_while_it_writes_leaves_the_older_checkpoint(tmp_path):
    command = [sys.executable, "-m", "mpmd.tools.run", "-n", "2", "-m", PROGRAM, "killed", str(tmp_path)]
    done = output(command)
    assert done.returncode == 137
    assert "mpmd.errors.PeerError: process 1" in done.stderr
    assert mpmd.checkpoint.steps(tmp_path) == [3]
