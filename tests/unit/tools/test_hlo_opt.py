"""mpmd-hlo-opt: arguments, findings, and that bad text is shown where it is bad."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mpmd
from mpmd.compile.hlo import parse_module
from mpmd.compile.passes import make_pass
from mpmd.errors import ConfigError, PassError
from mpmd.tools import hlo_opt

PLAIN = """HloModule plain

ENTRY main {
  x = f32[4]{0} parameter(0)
  a = f32[4]{0} negate(x)
  b = f32[4]{0} negate(x)
  ROOT r = f32[4]{0} add(a, b)
}
"""
WRONG = """HloModule wrong

ENTRY main {
  x = f32[4]{0} parameter(0)
  ROOT r = f32[4]{0} add(x, y)
}
"""


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def run(text: str, *arguments: str) -> tuple[int, str, str]:
        path = tmp_path / "input.hlo"
        path.write_text(text)
        code = hlo_opt.main([str(path), *arguments])
        out, err = capsys.readouterr()
        return code, out, err.replace(str(path), "FILE")

    return run


def test_passes_run_in_the_order_given(run):
    code, out, err = run(PLAIN, "-hlo-cse", "--hlo-dce", "-print-ir-after-all", "-timing")
    assert code == 0 and out.count("negate") == 1
    assert err.index("HLO after hlo-cse") < err.index("HLO after hlo-dce") < err.index(" ms  hlo-")


def test_a_pipeline_as_text(run):
    text = "hlo-cse{constants=false},hlo-algebraic-simplifier{layout-sensitive=true},hlo-inlining"
    code, out, err = run(PLAIN, f"-pass-pipeline={text}", "-print-ir-after-change", "-verify-each=false")
    assert code == 0 and out.count("negate") == 1
    assert "HLO after hlo-cse{constants=false}" in err and "hlo-dce" not in err


def test_pieces_are_printed_apart_and_lines_count_from_the_begin(run):
    code, out, err = run(f"{PLAIN}// -----\n{WRONG}// -----\n{PLAIN}", "-split-input-file", "-hlo-dce")
    assert code == 1
    assert out.count("// -----") == 1 and out.count("HloModule") == 2
    assert err.startswith("FILE:14:29: error:")


@pytest.mark.parametrize(
    ("line", "marked"),
    [
        ("ROOT r = f32[4]{0} add(x, y)", "y)"),
        ("ROOT r = f32[4]{0} ad(x, x)", "ad(x"),
        ("ROOT r = f33[4]{0} add(x, x)", "f33"),
        ("ROOT r = f32[4]{0} slice(x), slice={[0:q]}", ""),
        ("ROOT r = f32[4]{0,0} add(x, x)", "{0,0}"),
        ("ROOT r = f32[4]{0} add(x, x", ""),
        ("ROOT r = f32[] constant(maybe)", ""),
    ],
)
def test_malformed_text_is_shown_with_a_caret(run, line, marked):
    code, out, err = run(WRONG.replace("ROOT r = f32[4]{0} add(x, y)", line))
    lines = err.splitlines()
    assert code == 1 and out == ""
    assert lines[0].startswith("FILE:") and ": error: " in lines[0]
    source, caret = lines[1], lines[2]
    assert caret.strip() == "^"
    if marked:
        assert abs(source.index(marked) - caret.index("^")) <= 1, err


def test_what_the_verifier_finds_is_an_error(run):
    code, out, err = run(PLAIN.replace("f32[4]{0} add", "f32[5]{0} add"))
    assert code == 1 and out == ""
    assert "its shape should be f32[4], but is f32[5]" in err


def test_expected_findings(run):
    good = WRONG.replace("  ROOT", "  // expected-error@+1 {{y}}\n  ROOT")
    assert run(good, "-verify-diagnostics")[0] == 0
    assert run(PLAIN + "// expected-error@-1 {{nothing}}\n", "-verify-diagnostics")[0] == 1


def test_a_scheduled_module_is_refused(run):
    text = PLAIN.replace("HloModule plain", "HloModule plain, is_scheduled=true")
    code, _, err = run(text, "-hlo-cse")
    assert code == 1 and "hlo-cse must run before the scheduler" in err
    assert run(text, "-hlo-dce")[0] == 0
    with pytest.raises(PassError, match="must run before the scheduler"):
        make_pass("hlo-algebraic-simplifier").run(parse_module(text))


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("-hlo-cze", "unknown pass 'hlo-cze'; did you mean 'hlo-"),
        ("-hlo-cse=speed=9", "hlo-cse has no option 'speed'"),
        ("-hlo-cse=constants=maybe", "cannot read 'maybe' as bool"),
        ("-hlo-simplification=a=1", "has no options"),
    ],
)
def test_wrong_arguments(run, argument, said):
    code, out, err = run(PLAIN, argument)
    assert code == 1 and out == "" and said in err
    with pytest.raises(ConfigError):
        hlo_opt.read_command([argument])


def test_a_missing_file_is_an_error(capsys):
    assert hlo_opt.main(["/nowhere.hlo"]) == 1
    assert "No such file" in capsys.readouterr().err


def test_lists_and_help(capsys):
    assert hlo_opt.main(["-list-passes"]) == 0
    assert re.search("(?m)^-hlo-cse  +[A-Z].*[.]$", capsys.readouterr().out)
    assert hlo_opt.main(["-hlo-algebraic-simplifier", "-help"]) == 0
    assert re.search("layout-sensitive +default false", capsys.readouterr().out)
    assert hlo_opt.main(["--version"]) == 0
    assert mpmd.__version__ in capsys.readouterr().out
    assert hlo_opt.main(["-help"]) == 0
    assert "usage: mpmd-hlo-opt" in capsys.readouterr().out


def test_standard_input_and_an_output_file(tmp_path, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO(PLAIN))
    out = tmp_path / "out.hlo"
    assert hlo_opt.main(["-", "-hlo-cse", "-o", str(out)]) == 0
    assert out.read_text().count("negate") == 1


def test_a_module_is_compiled_for_a_described_device(run, unpoisoned):
    """The device need not be here; costs are those of the device, code needs a compiler for it."""
    code, out, err = run(PLAIN, "-target=sm_90", "-hlo-cse")
    assert (code, err) == (0, "") and out.startswith("on H200:") and "memory-bound: 1 of 1 kernels" in out
    assert (
        run(PLAIN, "-target=cpu", "-text=assembly")[1].count("f")
        and "ENTRY main" in run(PLAIN, "-target=A100", "-text=hlo")[1]
    )
    assert "allocation 0: parameter 0" in run(PLAIN, "-target=B200", "-text=buffers")[1]
    assert run(PLAIN, "-target=cpu", "-text=ptx")[1] == "// fragments for this device have no text 'ptx'\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-target=sm_91"], "unknown target 'sm_91'\n  there are cpu, A100, H100, H200, B200, sm_80, sm_90"),
        (["-target=H100", "-text=word"], "there is no text 'word' of a fragment\n  there are 'stablehlo'"),
    ],
)
def test_targets_and_texts_that_do_not_exist(run, arguments, message):
    code, out, err = run(PLAIN, *arguments)
    assert code == 1 and not out and message in err
