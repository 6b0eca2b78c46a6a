"""The runner: one experiment's failure hides none of the others."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import packages, run
from benchmarks.gpu.driver import gpu_is_here, load_driver
from benchmarks.gpu.experiment import Experiment, read_lines
from benchmarks.gpu.pack import TravellingPack
from mpmd.errors import CompileError

ROOT = Path(__file__).resolve().parents[3]
EXPERIMENT = '''"""Does it {name}?

More of it.
"""
import os, time
from benchmarks.gpu.experiment import run_experiment

def measure(run):
    run.figure("a.before", 1.5)
    run.check("begins", True)
    with run.part("middle"):
        {body}
    run.check("goes on", True)

run_experiment("{name}", __doc__, measure)
'''
BODIES = {
    "work": "pass",
    "die": "os.abort()",
    "hang": "time.sleep(600)",
    "raise": "raise ValueError('no luck')",
    "restart": "run.figure('after', run.after) if run.after else run.restart(2)",
}


@pytest.fixture
def placeholders(tmp_path, monkeypatch):
    """Experiments of a package of their own."""
    package = tmp_path / "placeholders"
    package.mkdir()
    for name, body in BODIES.items():
        (package / f"{name}_it.py").write_text(EXPERIMENT.format(name=f"{name}_it", body=body))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(run, "MIN_SECONDS", 0)
    return {name: run.ListedExperiment(f"{name}_it", 200, package="placeholders") for name in BODIES}


def run_them(entries, out, budget=600.0):
    """What the lines say."""
    out.mkdir(exist_ok=True)
    lines = out / "gpu.jsonl"
    lines.unlink(missing_ok=True)
    with (out / "log").open("w") as file:
        outputs = run.Outputs(lines, run.Log(file), TravellingPack(out / "pack"), out)
        run.run_all(entries, run.Mode.NO_GPU, budget, outputs)
    return read_lines(lines)


def test_each_experiment_ends_in_its_own_way(placeholders, tmp_path):
    found = run_them([placeholders[name] for name in ("work", "die", "raise", "restart")], tmp_path / "out")
    assert {name: e["status"] for name, e in found.items()} == {
        "work_it": "compiled",
        "die_it": "crashed (SIGABRT)",
        "raise_it": "failed",
        "restart_it": "compiled",
    }
    assert found["restart_it"]["figures"].pop("after") == 2
    for experiment in found.values():  # what was found before the end is there
        assert experiment["figures"] == {"a.before": 1.5}
        assert experiment["checks"]["begins"]["state"] == "recorded"
    assert found["raise_it"]["errors"]["middle"]["error"] == "ValueError: no luck"
    assert "goes on" in found["raise_it"]["checks"] and "goes on" not in found["die_it"]["checks"]
    assert any("Fatal Python error" in line for line in found["die_it"]["last_lines"])
    text = run.summary(found)
    assert "broke off: middle: ValueError: no luck" in text and "crashed (SIGABRT)" in text
    assert found["work_it"]["question"] == "Does it work_it?"


@pytest.mark.slow
def test_an_experiment_that_hangs_is_ended(placeholders, tmp_path):
    hanging = dataclasses.replace(placeholders["hang"], seconds=20)
    found = run_them([hanging, placeholders["work"]], tmp_path / "out")
    assert found["hang_it"]["status"] == "time limit" and found["work_it"]["status"] == "compiled"
    assert found["hang_it"]["figures"] == {"a.before": 1.5}


def test_missing_packages_and_a_spent_budget_are_said(placeholders, tmp_path, monkeypatch):
    gone = packages.Package("no-such-distribution", (1,), "this test")
    monkeypatch.setitem(packages.PACKAGES, gone.name, gone)
    found = run_them([dataclasses.replace(placeholders["work"], needs=(gone.name,))], tmp_path)
    assert found["work_it"]["status"] == "skipped: needs no-such-distribution"
    found = run_them([placeholders["work"]], tmp_path, budget=-1.0)
    assert found["work_it"]["status"] == "skipped: the budget is used up"
    found = run_them([dataclasses.replace(placeholders["work"], packed=True)], tmp_path)
    assert "was not prepared" in found["work_it"]["status"]


def test_a_gpu_is_never_taken_for_granted():
    here, what = gpu_is_here()
    assert what
    if not here:
        with pytest.raises(CompileError):
            load_driver()


def test_an_experiment_keeps_what_it_found(tmp_path):
    found = Experiment("name", "question", tmp_path / "found.jsonl", False, 100.0)
    with found.part("bad"):
        found.check("before", False, "wrong")
        raise RuntimeError("broken")
    found.skip("other", "why not")
    assert found.failures == ["before", "bad"]
    assert found.has_time("short", 1.0) and not found.has_time("long", 1e6)
    with (tmp_path / "found.jsonl").open("a") as file:
        file.write('{"experiment": "name", "line": "fig')  # of a process that was ended
    written = read_lines(tmp_path / "found.jsonl")["name"]
    assert (
        written["checks"]["before"]["state"] == "failed" and written["checks"]["long"]["state"] == "skipped"
    )
    assert "RuntimeError: broken" in written["errors"]["bad"]["error"]


def test_versions_are_compared_as_numbers():
    numbers = packages.version_numbers
    assert numbers("3.6.0+cu13") == (3, 6, 0) and numbers("0.10.2") > (0, 9, 9) and numbers("2.0rc1") == (2,)


@pytest.mark.parametrize("arguments", [["--only", "no_such_experiment"]])
def test_unknown_experiments_are_refused(arguments, tmp_path):
    command = [sys.executable, "benchmarks/gpu/run.py", "--out", str(tmp_path), "--no_gpu", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "no experiment no_such_experiment; there are environment" in done.stderr


def test_every_experiment_is_a_module_that_asks_something():
    for entry in run.EXPERIMENTS:
        text = (ROOT / "benchmarks/gpu" / f"{entry.name}.py").read_text()
        document = text.split('"""')[1]
        assert document.split("\n\n")[0].rstrip().endswith("?"), entry.name
        assert "\nMethod" in document and "\nWhat the answer means:" in document, entry.name
        assert f'run_experiment("{entry.name}", __doc__, measure)' in text
        assert set(entry.needs) <= set(packages.PACKAGES)
