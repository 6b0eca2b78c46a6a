"""Every way in which `mpmd-run` can end: its processes end too, and the exit code says why."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.repo.tree import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc"),
]

WAITS = "import time\nprint('ready', flush=True)\ntime.sleep(300)\n"
HANDLES = """import signal, sys, time
def end(number, frame):
    time.sleep(0.5)
    print('saved after', number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGUSR1, end)
print('ready', flush=True)
time.sleep(300)
"""
IGNORES = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS
LOUD = "for k in range(10**7): print('line', k, 'x' * 60)\n"
STEPS = """import jax, jax.numpy as jnp, mpmd, time
config = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), {"a": "m0", "b": "m1"})
a = mpmd.named_computation(jnp.tanh, name="a")
b = mpmd.named_computation(lambda x: x + 1, name="b")
step = mpmd.jit(config)(lambda x: b(a(x)))
x = jnp.ones(4)
for k in range(300):
    step(x)
    time.sleep(0.03)
    if k == 20: print("ready", flush=True)
print("done", flush=True)
"""


@contextlib.contextmanager
def launched(tmp_path, script: str, *options: str, shell: str = "", **how) -> Iterator[subprocess.Popen[str]]:
    """`mpmd-run -n 2` of a script in a group of its own; nothing of it is left at the end."""
    file = tmp_path / "script.py"
    file.write_text(script)
    command = [sys.executable, "-m", "mpmd.tools.run", "-n", "2", *options, str(file)]
    if shell:
        command = ["sh", "-c", f'"$0" "$@" {shell}', *command]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    run = subprocess.Popen(command, env=environment, text=True, start_new_session=True, **how)
    try:
        yield run
        assert until(lambda: not processes(file), 10), "processes of the script are left"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait(10)
        for pipe in (run.stdout, run.stderr):
            if pipe is not None:
                pipe.close()


def processes(file) -> list[int]:
    """The processes that run a script."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/cmdline") as line:
                if str(file) in line.read().split("\0"):
                    found.append(int(entry))
    return found


def until(holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


def ready(run, count=2):
    """Waits until the processes have printed it."""
    for _ in range(count):
        assert run.stdout.readline().endswith("ready\n")


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
def test_a_signal_ends_the_processes_and_is_the_exit_code(number, code, tmp_path):
    with launched(tmp_path, WAITS, "--max-restarts", "3") as run:
        ready(run)
        run.send_signal(getattr(signal, number))
        assert run.wait(30) == code


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGUSR1", 0)])
def test_processes_that_handle_a_signal_have_time_for_it(number, code, tmp_path):
    """A preemption: a scheduler sends one of these, and the processes save."""
    with launched(tmp_path, HANDLES) as run:
        ready(run)
        run.send_signal(getattr(signal, number))
        assert run.wait(30) == code
        known = getattr(signal, number).value
        assert sorted(run.stdout.read().splitlines()) == [f"[{k}] saved after {known}" for k in range(2)]


def test_a_second_signal_ends_processes_that_ignore_the_first(tmp_path):
    with launched(tmp_path, IGNORES, "--grace", "100") as run:
        ready(run)
        run.terminate()
        time.sleep(1)
        assert run.poll() is None
        run.terminate()
        assert run.wait(20) == 143


def test_one_that_is_ignored_stays_ignored(tmp_path):
    """As under nohup."""
    with launched(tmp_path, WAITS, preexec_fn=ignore_hangups) as run:
        ready(run)
        run.send_signal(signal.SIGHUP)
        time.sleep(1)
        assert run.poll() is None and len(processes(tmp_path / "script.py")) == 3
        run.terminate()
        assert run.wait(30) == 143


def ignore_hangups():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.mark.parametrize("starting", [True, False])
def test_processes_end_with_a_launcher_that_is_killed(starting, tmp_path):
    file = tmp_path / "script.py"
    with launched(tmp_path, WAITS) as run:
        if starting:
            assert until(lambda: len(processes(file)) == 3)
        else:
            ready(run)
        run.kill()
        assert until(lambda: not processes(file), 5)


def test_a_launcher_whose_output_nobody_reads_ends_as_other_programs_do(tmp_path):
    with launched(tmp_path, LOUD, shell='| head -n 1; echo "$?"') as run:
        out, err = run.communicate(timeout=60)
        assert out.startswith("[") and " line 0 " in out and "Traceback" not in err
    with launched(tmp_path, LOUD) as run:
        assert run.stdout.readline()
        run.stdout.close()
        assert run.wait(60) == 141
        run.stdout = None


def test_a_full_disk_ends_it_with_an_error(tmp_path):
    with open("/dev/full", "w") as full, launched(tmp_path, LOUD, stdout=full) as run:
        assert run.wait(60) == 1
        assert "mpmd-run: the output cannot be written: No space left on device" in run.stderr.read()


def test_a_closed_output_is_no_error(tmp_path):
    with launched(tmp_path, "print('x' * 100000)\n", shell=">&- 2>&-") as run:
        assert run.wait(60) == 0


@pytest.mark.parametrize("whole_group", [True, False])
def test_a_launcher_that_is_suspended_goes_on(whole_group, tmp_path):
    """For longer than a process may be silent; as by Ctrl-Z in a terminal, or by `kill -TSTP`."""
    with launched(tmp_path, STEPS) as run:
        ready(run)
        send = (lambda n: os.killpg(run.pid, n)) if whole_group else run.send_signal
        send(signal.SIGTSTP)
        time.sleep(11)
        assert {state(pid) for pid in processes(tmp_path / "script.py")} == {"T"}
        send(signal.SIGCONT)
        assert run.wait(60) == 0, run.stderr.read()
        assert sorted(run.stdout.read().splitlines()) == ["[0] done", "[1] done"]


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(") ")[2][0]


def test_a_gigabyte_of_output_takes_no_memory(tmp_path):
    script = "import sys\nfor _ in range(1 << 13): sys.stdout.write('x' * (1 << 16))\n"
    with launched(tmp_path, script, stdout=subprocess.DEVNULL) as run:
        peak = 0
        while run.poll() is None:
            with contextlib.suppress(OSError), open(f"/proc/{run.pid}/statm") as file:
                pages = file.read().split()
                peak = max(peak, int(pages[1]) - int(pages[2]) if pages else 0)
            time.sleep(0.05)
        assert run.returncode == 0 and peak * os.sysconf("SC_PAGE_SIZE") < 600 << 20
