"""mpmd-opt: arguments, findings, and that nothing crashes it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path
from types import ModuleType

import jax
import pytest

import mpmd
from mpmd.partition import pipeline
from mpmd.passes import PASSES
from mpmd.tools import opt, schedule
from mpmd.tools import run as launcher
from mpmd.tools.command_line import Finding, expectations, mismatches

PLAIN = """func.func @f(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.negate %a : tensor<4xf32>
  %1 = stablehlo.negate %a : tensor<4xf32>
  %2 = stablehlo.add %0, %1 : tensor<4xf32>
  return %2 : tensor<4xf32>
}
"""
WRONG = """func.func @f(%a: tensor<4xf32>) -> tensor<i32> {
  return %a : tensor<4xf32>
}
"""


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def run(text: str, *arguments: str) -> tuple[int, str, str]:
        path = tmp_path / "input.mlir"
        path.write_text(text)
        code = opt.main([str(path), *arguments])
        out, err = capsys.readouterr()
        return code, out, err.replace(str(path), "FILE")

    return run


def test_passes_run_in_the_order_given(run) -> None:
    arguments = ("-mlir-print-ir-after-all", "-cse", "--canonicalize={region-simplify=disabled}")
    code, out, err = run(PLAIN, *arguments)
    assert code == 0 and out.count("negate") == 1
    assert err.index("IR Dump After cse") < err.index("IR Dump After canonicalize{region-simplify=disabled}")


def test_a_pipeline_as_text(run) -> None:
    text = "builtin.module(cse,func.func(cse),mpmd-fragment-dce,canonicalize{max-iterations=3})"
    code, out, err = run(PLAIN, f"-pass-pipeline={text}", "--timing", "-mlir-print-ir-after-change")
    assert code == 0 and out.count("negate") == 1
    assert err.count("IR Dump After") == 1 and "mpmd-fragment-dce" in err


def test_pipelines_stand_in_pipelines(run) -> None:
    imported = "any(mpmd-import-pipeline{name-to-mesh-assignment=f@m1})"
    text = f"builtin.module(func.func(cse,mpmd-fragment-dce{{}}),{imported})"
    code, out, err = run(PLAIN, f"-pass-pipeline={text}", "-mlir-print-ir-after-all")
    assert code == 0 and out.count("negate") == 1
    assert "IR Dump After func.func(cse)" in err and "mpmd-infer-mesh-finalize" in err
    code, _, err = run(PLAIN, "-pass-pipeline=builtin.module(func.func(cse),")
    assert code == 1 and "cannot read 'func.func(cse' as a pass" in err


def test_forms_of_printing(run) -> None:
    assert '"stablehlo.negate"(%arg0)' in run(PLAIN, "-mlir-print-op-generic")[1]
    with_alias = (
        '#t = #mpmd.topology<<"m1" : <["x"=2]>>>\nfunc.func @g() attributes {topology = #t} { return }'
    )
    assert "#topology = " not in run(with_alias, "-mlir-print-local-scope")[1]
    constant = "func.func @g() { %0 = stablehlo.constant dense<[1, 2, 3]> : tensor<3xi32> return }"
    assert "elided" in run(constant, "-mlir-elide-elementsattrs-if-larger=2")[1]
    assert "elided" not in run(constant, "-mlir-elide-elementsattrs-if-larger=3")[1]
    assert run(constant, "-mlir-elide-elementsattrs-if-larger=few")[0] == 1
    assert 'loc("' in run(PLAIN, "-mlir-print-debuginfo")[1]
    assert "loc(" not in run(PLAIN, "-mlir-pretty-debuginfo")[1]
    assert "negate" not in run(PLAIN, "-mlir-print-skip-regions")[1]
    named = PLAIN.replace("negate %a : tensor<4xf32>", 'negate %a : tensor<4xf32> loc("minus")')
    assert "%minus = " in run(named, "-mlir-use-nameloc-as-prefix")[1]


WARNS = """!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
func.func @main(%a: !m1) -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}
"""


def test_what_is_reported(run) -> None:
    verifier = "-mpmd-scheduling-units-verifier"
    assert "warning: Number of backward scheduling units" in run(WARNS, verifier)[2]
    assert run(WARNS, verifier, "-mlir-diagnostic-verbosity-level=errors")[1:] == (run(WARNS)[1], "")
    assert "warning" in run(WARNS, verifier, "-mlir-diagnostic-verbosity-level=warnings")[2]
    code, _, err = run(WRONG, "-mlir-diagnostic-verbosity-level=errors", "-mlir-disable-diagnostic-notes")
    assert code == 1 and "error: type of return operand 0" in err
    code, _, err = run(PLAIN, "-mlir-diagnostic-verbosity-level=some")
    assert code == 1 and "'some' is not one of errors, warnings, remarks" in err


def test_flags_of_mlir_that_are_not_known_here(run) -> None:
    flags = ("-mlir-print-unique-ssa-ids", "--mlir-disable-threading", "-mlir-output-format=json")
    code, out, err = run(PLAIN, *flags)
    assert code == 0 and out == run(PLAIN)[1]
    assert err.splitlines() == [
        "mpmd-opt: warning: -mlir-print-unique-ssa-ids has no effect here",
        "mpmd-opt: warning: -mlir-output-format has no effect here",
    ]
    assert "did you mean 'mlir-print-ir-after-all'?" in run(PLAIN, "-mlir-print-ir-after-al")[2]


def test_dumps_of_some_passes(run) -> None:
    _, _, err = run(
        PLAIN, "-cse", "-canonicalize", "-mlir-print-ir-after=cse", "-mlir-print-ir-before=canonicalize"
    )
    assert [line for line in err.splitlines() if "IR Dump" in line] == [
        "// -----// IR Dump After cse //----- //",
        "// -----// IR Dump Before canonicalize //----- //",
    ]
    assert run(PLAIN, "-cse", "-canonicalize", "-mlir-print-ir-before-all")[2].count("IR Dump Before") == 2


def test_a_pass_that_jaxlib_lacks_is_stood_in_for(run) -> None:
    text = PLAIN.replace("%2 = stablehlo.add %0, %1", "%2 = stablehlo.reshape %0").replace(
        "(tensor<4xf32>) -> tensor<4xf32>\n  return", "tensor<4xf32>\n  return"
    )
    text = text.replace("%2 = stablehlo.reshape %0 :", "%2 = stablehlo.reshape %0 : (tensor<4xf32>) ->")
    code, out, _ = run(text, "-stablehlo-target-independent-optimization=fold-op-element-limit=0")
    assert code == 0 and "reshape" not in out


def test_findings_that_nobody_asked_for_may_be_allowed(run) -> None:
    assert run(WRONG, "-verify-diagnostics")[0] == 1
    assert run(WRONG, "-verify-diagnostics=all")[0] == 1
    assert run(WRONG, "-verify-diagnostics=only-expected")[0] == 0


def test_pieces_are_printed_apart_and_lines_count_from_the_begin(run) -> None:
    code, out, err = run(f"{PLAIN}// -----\n{WRONG}// -----\n{PLAIN}", "-split-input-file")
    assert code == 1
    assert out.count("// -----") == 1 and out.count("func.func") == 2
    assert err.startswith("FILE:9:3: error: type of return operand 0")


def test_expected_findings(run) -> None:
    good = WRONG.replace("  return", "  // expected-error@+1 {{type of return operand 0}}\n  return")
    assert run(good, "-verify-diagnostics")[0] == 0
    code, _, err = run(WRONG, "-verify-diagnostics")
    assert code == 1 and "FILE:2:3: error: unexpected error: type of return operand" in err
    code, _, err = run(good.replace("operand 0", "operand 7"), "-verify-diagnostics")
    assert code == 1 and 'expected error "type of return operand 7" was not produced' in err


def test_unknown_dialects_need_a_switch(run) -> None:
    text = PLAIN.replace("return", '"other.op"() : () -> ()\n  return')
    code, _, err = run(text)
    assert code == 1 and "FILE:5:13: error" in err and "unregistered dialect" in err
    assert run(text, "-allow-unregistered-dialect")[0] == 0


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("-mpmd-fragment-dcf", "did you mean 'mpmd-fragment-dce'"),
        ("-no-such-pass", "cannot build the pass 'no-such-pass'"),
        ("-mpmd-fragment-dce=x=1", "has no option 'x'"),
        ("-mpmd-import-pipeline=x=1", "mpmd-import-pipeline has no option 'x'"),
        ("-pass-pipeline=builtin.module(nope)", "cannot build the pass 'nope'"),
        ("-%", "cannot read the argument"),
    ],
)
def test_wrong_arguments_are_errors(run, argument: str, message: str) -> None:
    code, out, err = run(PLAIN, argument)
    assert (code, out) == (1, "") and message in err


@pytest.mark.parametrize("text", ["", "(", "func.func @f(", "\x00", "module { %0 = }", "// -----\n"])
def test_bad_text_is_an_error_or_empty(run, text: str) -> None:
    code, _, err = run(text, "-split-input-file", "-cse")
    assert code in (0, 1) and "Traceback" not in err


def test_files_that_are_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert opt.main([str(tmp_path / "none.mlir")]) == 1
    assert "none.mlir" in capsys.readouterr().err


def test_help_and_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert opt.main(["-help"]) == 0 and opt.main(["-list-passes"]) == 0
    out = capsys.readouterr().out
    assert "-split-input-file" in out and re.search("(?m)^-mpmd-fragment-dce  +[A-Z].*[.]$", out)
    for kind in (*PASSES.values(), *pipeline.PIPELINES.values()):
        assert (kind.__doc__ or "").splitlines()[0] in out


def test_help_of_passes_names_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    for name, kind in PASSES.items():
        assert opt.main([f"-{name}", "-help"]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"-{name}\n  {(kind.__doc__ or '').splitlines()[0]}")
        for field in dataclasses.fields(kind):
            assert re.search(rf"(?m)^    {field.name.replace('_', '-')} +default \S", out), (name, field.name)
    assert opt.main(["-mpmd-export-pipeline", "-cse", "-help"]) == 0
    out = capsys.readouterr().out
    assert "-mpmd-export-pipeline\n" in out and "-cse\n  a pass of MLIR" in out


@pytest.mark.parametrize("tool", (opt, schedule, launcher))
def test_every_tool_has_a_version(capsys: pytest.CaptureFixture[str], tool: ModuleType) -> None:
    with contextlib.suppress(SystemExit):
        assert tool.main(["--version"]) == 0
    out = capsys.readouterr().out
    assert mpmd.__version__ in out and f"jax {jax.__version__}" in out


def test_output_to_a_file(run, tmp_path: Path) -> None:
    target = tmp_path / "out.mlir"
    assert run(PLAIN, "-o", str(target))[:2] == (0, "")
    assert "stablehlo.add" in target.read_text()
    assert run(PLAIN, "-o", str(tmp_path / "no" / "folder"))[0] == 1


TEXT = """// expected-warning@below {{first}}
// expected-error@+3 {{second}}
line 3
line 4
line 5
// expected-remark@above {{third}}
// expected-note@unknown {{fourth}}
// expected-error-re@-3 {{w{{[a-z]+}}s}}
"""


def test_places_of_expectations() -> None:
    found = [(e.kind, e.line, e.words) for e in expectations(TEXT)]
    assert found == [
        ("warning", 3, "first"),
        ("error", 5, "second"),
        ("remark", 5, "third"),
        ("note", None, "fourth"),
        ("error", 5, "w{{[a-z]+}}s"),
    ]


@pytest.mark.parametrize(
    ("words", "message", "fits"),
    [
        ("a{{.*}}c", "a\nb\nc", True),
        ("a{{x|y}}c", "an ayc", True),
        ("a{{x|y}}c", "ax", False),
        ("f(x)", "of f(x) here", True),
        ("a.c", "abc", False),
    ],
)
def test_expected_regular_expressions(words: str, message: str, fits: bool) -> None:
    expected = expectations(f"// expected-error-re {{{{{words}}}}}")
    assert [e.words for e in expected] == [words]
    assert fits == (not list(mismatches(expected, [Finding("error", message, 1, 1)])))


def test_an_expectation_may_admit_several_findings() -> None:
    twice = [Finding("error", "a second one", 5, 1)] * 2
    (second,) = [e for e in expectations(TEXT) if e.words == "second"]
    assert not list(mismatches([second], twice))
    assert not list(mismatches([second, second], twice))
    (left,) = mismatches([second, second], twice[:1])
    assert left.message == 'expected error "second" was not produced'


def test_findings_without_expectations_and_expectations_without_findings() -> None:
    findings = [Finding("error", words, 5, 1) for words in ("a second one", "words", "w")]
    left = [f.message for f in mismatches(expectations(TEXT), findings)]
    assert left == [
        "unexpected error: w",
        'expected warning "first" was not produced',
        'expected remark "third" was not produced',
        'expected note "fourth" was not produced',
    ]


TOPOLOGY = '#topology = #mpmd.topology<<"m1" : <["x"=2]>>>\n!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>\n'
CALL = """func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %0 = mpmd.call @f(%a) : (!m1) -> !m1
  return %0 : !m1
}
"""
CALLEE = """func.func private @f(%a: !m1, %b: !m1) -> !m1 attributes {topology = #topology} {
  return %b : !m1
}
"""
FRAGMENT = """sdy.mesh @mesh = <["x"=2]>
func.func @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %0 = mpmd.fragment<mesh="m1", origin=["f"], out_shardings=[<@mesh, [{"t"}]>]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %0 : !m1
}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CALL + CALLEE, "it has 1 operands, @f has 2 arguments"),
        (CALL + CALLEE.partition(" attributes")[0], "it calls @f, which has no body"),
        (CALL.replace('topology = #topology', 'topology = #mpmd.topology<<"m2" : <["x"=2]>>>') + CALLEE,
         'argument 0 is on mesh "m1", which its topology lacks'),
        (FRAGMENT, 'the sdy mesh @mesh has no axis "t"; it has x'),
        (FRAGMENT.replace("sdy.mesh @mesh", "sdy.mesh @other"), "there is no sdy mesh @mesh"),
        (FRAGMENT.replace(']>]>', ']>, <@mesh, []>]>', 1), "its out_shardings has 2 entries for 1 values"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["call-inline", "introduce-transfers", "sink-negligible-ops-into-call-op"])
def test_programs_that_break_a_rule_go_through_no_pass(run, text: str, message: str, name: str) -> None:
    code, out, err = run(TOPOLOGY + text, f"-mpmd-{name}")
    assert (code, out) == (1, "") and message in err


def test_what_passes_say_of_such_programs_may_be_expected(run) -> None:
    code, _, err = run(TOPOLOGY + CALL + CALLEE, "-mpmd-call-inline", "-verify-diagnostics")
    assert code == 1 and "unexpected error: mpmd.call in @main" in err


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "not there"),
        (PLAIN.replace("@f", "private @f"), "not @f"),
        (PLAIN + PLAIN.replace("@f", "@g"), "none of @f, @g"),
    ],
)
def test_where_shardings_are_propagated_from(run, text: str, what: str) -> None:
    """Shardy ends the process if it cannot tell."""
    code, _, err = run(text, "-sdy-propagation-pipeline")
    assert code == 1 and f"propagated from the public function @main, which is {what}" in err
    assert run("", "-mpmd-propagate-shardings")[0] == 0


def test_functions_that_are_only_declared(run) -> None:
    declared = "func.func private @g(tensor<4xf32>) -> tensor<4xf32>\n"
    text = declared + PLAIN.replace(
        "stablehlo.negate %a : tensor<4xf32>", "func.call @g(%a) : (tensor<4xf32>) -> tensor<4xf32>"
    )
    code, out, _ = run(text, "-mpmd-inline", "-mpmd-fragment-dce", "-mpmd-import-pipeline=infer-transfers")
    assert code == 0 and "call @g" in out
