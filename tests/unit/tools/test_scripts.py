"""How scripts end: without a word if their reader goes away, with the status that they return."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("runner", ["mpmd.tools.command_line.run_script", "benchmarks.script.run"])
def test_a_closed_pipe_is_no_error(runner):
    module, _, function = runner.rpartition(".")
    code = f"import {module} as m; m.{function}(lambda: [print('line' * 20) for _ in range(10_000)] and 0)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout.readline().startswith(b"line")
        child.stdout.close()
        said = child.stderr.read()
    assert (child.returncode, said) == (141, b"")


@pytest.mark.slow
def test_what_a_script_returns_is_its_status():
    code = "import mpmd.tools.command_line as m; m.run_script(lambda: 3)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 3
