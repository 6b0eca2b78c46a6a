import json
from pathlib import Path

import pytest

from mpmd.scheduling import from_csv
from mpmd.tools.schedule import main


def test_the_table_is_sorted_by_step_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--stages", "8", "--meshes", "4", "--microbatches", "8"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    times = [float(row[1]) for row in rows]
    assert times == sorted(times) and len(times) == 15
    found = {row[0]: row[1:] for row in rows}
    assert found["zb_v"] == ["51", "5.9%", "8", "1", "0"]
    assert "forward_only" not in found


def test_chosen_schedules_charts_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.csv"
    mine.write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    files = {kind: tmp_path / f"out.{kind}" for kind in ("svg", "html", "trace", "csv")}
    arguments = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]
    chosen = ["--stages", "2", "--microbatches", "2", "--schedules", f"1f1b,{mine}", "--chart"]
    assert main([*chosen, *arguments]) == 0
    assert "mesh1 |....[F0][B0    ][F1][B1    ]" in capsys.readouterr().out
    assert files["svg"].read_text().startswith("<svg")
    assert files["html"].read_text().startswith("<!DOCTYPE html>")
    assert len(json.loads(files["trace"].read_text())["traceEvents"]) > 16
    assert from_csv(files["csv"]).table(2, 2, 2).num_microbatches == 2


def test_search_with_costs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--stages", "4", "--microbatches", "8", "--forward", "7,10,12,9", "--latency", "1"]
    assert main([*arguments, "--limit", "4", "--search", "--schedules", "1f1b,zb_h1"]) == 0
    printed = capsys.readouterr().out
    assert "307 s, bound 307 s, optimal\nweights on its fullest mesh: 1 times a" in printed
    rows = printed.splitlines()[-3:]
    assert rows[0].startswith("search (") and rows[1].startswith("zb_h1") and rows[2].startswith("1f1b")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--schedules", "1f1"], "mpmd-schedule: there is no schedule '1f1'; did you mean '1f1b'?"),
        (["--forward", "1,2,3"], "mpmd-schedule: --forward gives 3 numbers"),
        (["--forward", "x"], "mpmd-schedule: --forward: 'x' is not a list of numbers"),
        (
            ["--schedules", "zb_v"],
            "mpmd-schedule: schedule 'zb_v' needs two stages per mesh: 4 for 2 meshes, got 2",
        ),
    ],
)
def test_errors_go_to_stderr(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--stages", "2", "--microbatches", "2", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[0] == line


def test_schedules_that_do_not_fit_are_listed_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--stages", "2", "--microbatches", "2"]) == 0
    assert "v_half: schedule 'v_half' needs two stages per mesh" in capsys.readouterr().out
