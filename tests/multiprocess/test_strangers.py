"""Strangers that connect to the ports of a run, and stay."""

from __future__ import annotations

import sys

import pytest

from tests.support.launching import launch


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ports are closed to strangers on Linux only")
def test_connections_of_strangers_hold_no_step_up():
    code, found = launch(2, "tests.support.with_strangers", seconds=60)
    assert code == 0 and len(found) == 2
    assert sorted(line["strangers"] for line in found)[0] == 0
    assert max(line["strangers"] for line in found) >= 4, "two ports for arrays in each process"
    assert len({line["found"] for line in found}) == 1
