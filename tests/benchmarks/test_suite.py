"""The suite writes what benchmarks say, and `compare.py` finds what changed by more than noise."""

from __future__ import annotations

import datetime
import json

import pytest

from benchmarks import compare, suite


def result(**figures):
    """A result file with the runs of one benchmark's figures."""
    runs = [{"figures": dict(zip(figures, values))} for values in zip(*figures.values())]
    entry = {"command": "python b.py", "runs": runs}
    return {"machine": {"cores": 2}, "versions": {"jax": "1"}, "commit": "a" * 40, "benchmarks": {"b": entry}}


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ((1.00, 1.02), (1.10, 1.12), True),
        ((1.00, 1.02), (1.01, 1.30), False),  # they overlap
        ((1.00, 1.30), (1.31, 1.35), False),  # apart by less than the runs of either
        ((1.000, 1.001), (1.004, 1.005), False),  # below the least change that counts
        ((1.0,), (2.0,), False),  # noise is not known
        ((0.0, 0.0), (1.0, 1.0), True),
    ],
)
def test_a_change_is_beyond_the_noise(before, after, changed):
    both, single = compare.compare(result(x=before, old=before), result(x=after, new=after))
    assert [(c.path, c.changed) for c in both] == [("b.x", changed)]
    assert single == ["b.new", "b.old"]


def test_figures_are_found_at_any_depth():
    found = dict(compare.numbers({"a": {"b": [1, {"c": 2.5}], "d": "text"}, "ok": True, "none": None}))
    assert found == {"a.b.0": 1.0, "a.b.1.c": 2.5, "ok": 1.0}


def test_what_else_differs_is_said():
    a, b = result(x=(1.0,)), result(x=(1.0,))
    b["versions"], b["benchmarks"]["b"]["command"] = {"jax": "2", "xla": "3"}, "python b.py --more"
    said = list(compare.described(a, b))
    assert said == ["jax: 1 → 2", "xla: None → 3", "b: python b.py → python b.py --more"]


def test_a_run_is_its_last_line_or_its_error(tmp_path):
    (tmp_path / "good.py").write_text("print('a table')\nprint('{\"x\": 2}')")
    (tmp_path / "bad.py").write_text("raise ValueError('no such thing')")
    good = suite.run_once("python good.py", tmp_path)
    assert good["figures"] == {"x": 2} and good["seconds"] >= 0
    assert "no such thing" in suite.run_once("python bad.py", tmp_path)["failed"]


def test_parts_complete_the_file_of_a_commit(tmp_path, monkeypatch):
    now = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)
    ran = {e.name: {"command": e.command(quick=False), "runs": [{"figures": {"x": 1}}]} for e in suite.SUITE}
    first, *rest = ran
    monkeypatch.setattr(suite, "commit", lambda checkout: "a" * 40)
    assert not suite.write(tmp_path, tmp_path, {first: ran[first]}, now)["complete"]
    whole = suite.write(tmp_path, tmp_path, {name: ran[name] for name in rest}, now)
    assert whole["complete"] and whole["machine"]["cores"] >= 1 and whole["versions"]["jax"]
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("2026-01-31-") and json.loads(path.read_text()) == whole
    monkeypatch.setattr(suite, "commit", lambda checkout: "b" * 40)
    failed = {first: {**ran[first], "runs": [{"failed": "not done"}]}}
    assert not suite.write(tmp_path, tmp_path, {**ran, **failed}, now)["complete"]
    assert {p.name for p in tmp_path.iterdir()} == {path.name, f"{path.stem}-bbbbbbbb.json"}
