"""The page that steps through a run of passes."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from mpmd.tools import opt
from mpmd.tools.explorer import runs_between
from tests.unit.ir.programs import HEAD, TWO_FRAGMENTS


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r"const data = (.*);\n", page)
    assert found is not None
    return json.loads(found[1])


def rebuilt(before: list[int], after: list[int], runs: list[list[int]]) -> tuple[list[int], list[int]]:
    """Both lists, from what the runs say of them."""
    old, new, i, j = [], [], 0, 0
    for sign, count in runs:
        if sign <= 0:
            old += before[i : i + count]
            i += count
        if sign >= 0:
            new += after[j : j + count]
            j += count
        if sign == 0:
            assert old[len(old) - count :] == new[len(new) - count :]
    return old, new


@pytest.mark.parametrize("seed", range(40))
def test_runs_say_how_one_list_becomes_the_other(seed: int) -> None:
    rng = random.Random(seed)
    before = [rng.randrange(6) for _ in range(rng.randrange(30))]
    after = [x for x in before if rng.random() < 0.8]
    after.insert(rng.randint(0, len(after)), 99)
    assert rebuilt(before, after, runs_between(before, after)) == (before, after)
    assert runs_between(before, before) == ([[0, len(before)]] if before else [])


def test_a_page_for_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.mlir", tmp_path / "out.html"
    source.write_text(TWO_FRAGMENTS + "\n// </script>")
    passes = ["-mpmd-fragment-dedup", "-mpmd-merge-inferred-fragments", "-mpmd-copy-constants", "-cse"]
    assert opt.main([str(source), *passes, f"-html={target}"]) == 0
    assert "mpmd.fragment" in capsys.readouterr().out
    page = target.read_text()
    assert page.count("</script>") == 1 and "http" not in page.replace("http://www.w3.org/2000/svg", "")
    data = data_of(page)
    steps = data["steps"]
    assert [s["title"] for s in steps] == ["input", *(p[1:] for p in passes)]
    assert [s["changed"] for s in steps] == [False] * 5
    assert steps[0]["meshes"] == ["m1", "m2", ""]
    assert [(n[0], n[1], n[2], n[3]) for n in steps[0]["nodes"]] == [
        (0, '"f" [1]', "forward", []),
        (1, "m1 → m2", "transfer", [0]),
        (0, '"g"(1)', "backward", [0]),
    ]
    assert "\n".join(data["lines"][i] for i in steps[0]["lines"]).startswith("module {")
    assert steps[1]["lines"] is None


def function(results: str, returned: str) -> str:
    """A function of two arguments, %a on m1 and %b on no mesh."""
    return (
        f"{HEAD}func.func public @main(%a: !m1, %b: tensor<4xf32>) -> ({results}) "
        f"attributes {{topology = #topology}} {{\n  return {returned} : {results}\n}}\n"
    )


def test_what_changed_is_marked(tmp_path: Path) -> None:
    source, target = tmp_path / "in.mlir", tmp_path / "out.html"
    source.write_text(function("!m1", "%a"))
    assert opt.main([str(source), "-mpmd-uniquify-function-inputs-outputs", f"-html={target}"]) == 0
    last = data_of(target.read_text())["steps"][-1]
    assert last["changed"] and [n[1] for n in last["nodes"] if n[4]] == ["unnamed"]
    assert {sign for sign, _ in last["runs"]} == {-1, 0, 1}


def test_findings_stand_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.mlir", tmp_path / "out.html"
    source.write_text(function("!m1, tensor<4xf32>", "%a, %b"))
    assert opt.main([str(source), "-mpmd-uniquify-function-inputs-outputs", f"-html={target}"]) == 1
    findings = data_of(target.read_text())["findings"]
    assert len(findings) == 1 and "result 1 of @main is a tensor<4xf32>, on no mesh" in findings[0]
    capsys.readouterr()
