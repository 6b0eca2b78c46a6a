"""How scripts end: without a word if their reader goes away, with an error if the compiler is at fault."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from benchmarks import script

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


def test_a_fault_of_the_compiler_ends_a_benchmark_and_a_test(pytestconfig):
    fault = (
        "fragment 'f' is compiled by xla\n  its program is wrong\n  please report this; the text is in f.txt"
    )
    with warnings.catch_warnings(action="ignore"), pytest.raises(UserWarning, match="its program is wrong"):
        script.run(lambda: warnings.warn(fault, UserWarning, stacklevel=1))
    assert f"error:{script.COMPILER_FAULT}:UserWarning" in pytestconfig.getini("filterwarnings")


@pytest.mark.slow
def test_what_a_script_returns_is_its_status():
    code = "import mpmd.tools.command_line as m; m.run_script(lambda: 3)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 3
