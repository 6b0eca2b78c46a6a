"""`mpmd-run`: its command line, and what it does with processes and their output."""

from __future__ import annotations

import os
import sys
import time

import pytest

from mpmd.support.resources import on_cores
from mpmd.tools import run
from mpmd.tools.run import parse, shares, threads
from tests.support.launching import output


def test_the_command_line(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    plan = parse(["-n", "2", "--devices", "3", "--max-restarts", "1", str(script), "--steps", "5", "-n", "7"])
    assert (plan.processes, plan.devices, plan.restarts) == (2, 3, 1)
    assert plan.command == (str(script), "--steps", "5", "-n", "7")
    assert parse(["-n", "2", "-m", "package.train", "-m"]).command == ("-m", "package.train", "-m")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-n", "2"], "no script was given"),
        (["-n", "0", "-m", "x"], "-n must be at least 1"),
        (["-n", "2", "--devices", "0", "-m", "x"], "--devices must be at least 1"),
        (["-n", "2", "absent.py"], "there is no file 'absent.py'"),
        (["-n", "2", "--min-processes", "3", "-m", "x"], "--min-processes is 3; it must be from 1 to the 2"),
        (["-n", "2", "--min-processes", "0", "-m", "x"], "--min-processes is 0"),
    ],
)
def test_a_wrong_command_line_is_a_usage_message(arguments, says, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "codes", "starts", "ends"),
    [
        ([], [7], "4", 7),
        (["--max-restarts", "1"], [7, 7], "44", 7),
        (["--max-restarts", "1", "--min-processes", "2"], [7] * 6, "443322", 7),
        (["--max-restarts", "1", "--min-processes", "2"], [7, 7, 7, 0], "4433", 0),
        (["--min-processes", "1"], [137, 1, 0], "432", 0),
    ],
)
def test_a_job_goes_on_with_fewer_processes_once_restarts_are_used_up(
    options, codes, starts, ends, monkeypatch, capfd
):
    started, left = [], iter(codes)

    def launch_once(launch, environment, signals, printer):
        started.append((launch.processes, environment["MPMD_RESTART_COUNT"], environment["MPMD_RUN_ID"]))
        return next(left)

    monkeypatch.setattr(run, "launch_once", launch_once)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    assert run.main(["-n", "4", *options, "-m", "x"]) == ends
    assert "".join(str(count) for count, _, _ in started) == starts
    assert [number for _, number, _ in started] == [str(k) for k in range(len(codes))]
    assert len({run_id for _, _, run_id in started}) == 1
    assert ("going on with 3 processes" in capfd.readouterr().err) == ("3" in starts)


def test_cores_are_divided_evenly_or_shared():
    assert shares(2, [0, 1, 2, 3, 4]) == [[0, 1], [2, 3]]
    assert shares(3, [4, 5]) == [[4, 5]] * 3


@pytest.mark.parametrize(("processes", "cores", "of_each"), [(1, 2, 2), (2, 2, 2), (4, 2, 1), (2, 16, 8)])
def test_processes_that_share_a_core_have_one_thread_each(processes, cores, of_each):
    assert threads(processes, cores) == of_each


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes cannot be kept on one core")
@pytest.mark.parametrize(("own", "seen"), [(None, "1"), ("3", "3")])
def test_xla_gets_the_number_of_threads_unless_the_user_gives_one(own, seen, tmp_path, monkeypatch):
    script = tmp_path / "show.py"
    script.write_text("import os; print(os.environ['NPROC'])\n")
    if own is None:
        monkeypatch.delenv("NPROC", raising=False)
    else:
        monkeypatch.setenv("NPROC", own)
    with on_cores(sorted(os.sched_getaffinity(0))[:1]):
        done = output([sys.executable, "-m", "mpmd.tools.run", "-n", "2", str(script)], 60)
    assert sorted(done.stdout.splitlines()) == [f"[{index}] {seen}" for index in range(2)]


@pytest.mark.slow
def test_the_first_failure_ends_all_gives_the_exit_code_and_restarts(tmp_path):
    script = tmp_path / "fail.py"
    script.write_text(
        "import sys, time, jax\n"
        "print('argument', sys.argv[1], jax.process_index(), jax.process_count(), flush=True)\n"
        "if jax.process_index() == 1: sys.exit(7)\n"
        "time.sleep(60)\n"
    )
    start = time.monotonic()
    command = [sys.executable, "-m", "mpmd.tools.run", "-n", "2", "--grace", "0.5", "--max-restarts", "1"]
    done = output([*command, str(script), "a b"], 55)
    assert done.returncode == 7 and time.monotonic() - start < 50
    assert sorted(done.stdout.splitlines()) == [*["[0] argument a b 0 2"] * 2, *["[1] argument a b 1 2"] * 2]
    assert "mpmd-run: exit code 7; starting again, 1 left" in done.stderr


@pytest.mark.slow
def test_an_error_at_the_start_of_one_process_is_all_that_it_prints(tmp_path):
    """It ends before its watching thread has made a call, which Python 3.12 would not let it begin then."""
    script = tmp_path / "fail.py"
    script.write_text("import time, jax\nif jax.process_index(): time.sleep(2)\nraise ValueError('mine')\n")
    done = output([sys.executable, "-m", "mpmd.tools.run", "-n", "2", str(script)], 55)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if "Error: " in line] == [
        "[0] ValueError: mine",
        "[1] ValueError: mine",
    ]
    assert "Exception in thread" not in done.stderr
