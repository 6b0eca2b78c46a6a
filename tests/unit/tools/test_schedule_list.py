"""`mpmd-schedule --list`: every schedule with what it costs."""

from __future__ import annotations

from mpmd.scheduling.catalogue import SCHEDULES
from mpmd.tools import schedule


def test_every_schedule_has_a_line_with_what_it_costs(capsys):
    assert schedule.main(["--list", "--stages", "4", "--microbatches", "8"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[3:]}
    assert set(rows) == set(SCHEDULES)
    assert rows["gpipe"][1:4] == ["27%", "8", "1"]
    assert rows["zb_v"][1:4] == ["6%", "4", "1"]
    assert rows["dualpipe"][3] == "2"


def test_no_meshes_is_an_error(capsys):
    assert schedule.main(["--list", "--stages", "0"]) == 1
    assert capsys.readouterr().err.startswith("mpmd-schedule: ")
