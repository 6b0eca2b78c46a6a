"""What the common passes report, and the differences from the dialect that are on purpose."""

from __future__ import annotations

import pytest

from mpmd import ir
from mpmd.errors import PassError
from mpmd.passes import make_pass
from mpmd.passes.fragments.dependencies import control_edges, put_control_edges
from mpmd.passes.verify import verify
from mpmd.support.diagnostics import Severity, collecting
from tests.support.fragment_programs import fragment, run
from tests.support.ir_programs import HEAD, main_with

INFO = 'FragmentInfo(origins=["{}"],mesh_name="{}"{})'


@pytest.mark.parametrize("other", ["merge-any-consumer", "clone-inferred-fragments"])
def test_merging_sideways_excludes_the_other_ways(other: str) -> None:
    _, found = run(main_with(""), "mpmd-merge-inferred-fragments", f"merge-sideways=true {other}=true")
    with pytest.raises(PassError, match=f"merge-sideways excludes {other}"):
        found.raise_if_errors()


@pytest.mark.parametrize(
    ("sources", "target", "problem"),
    [
        ([("f", "m1", "")], ("f", "m1", ""), "fewer than two sources"),
        ([("f", "m1", ",stage=0"), ("g", "m1", ",stage=1")], ("f", "m1", ""), "of the stages 0, 1"),
        ([("f", "m1", ""), ("g", "m2", "")], ("f", "m1", ""), "about the meshes m1, m2"),
        ([("f", "m1", ""), ("g", "m1", "")], ("f", "m2", ""), "about the meshes m1, m2"),
    ],
)
def test_impossible_rules(sources: list, target: tuple, problem: str) -> None:
    listed = ",".join(INFO.format(*source) for source in sources)
    rule = f"FragmentMergeRule(sources=[{listed}],target={INFO.format(*target)})"
    _, found = run(main_with(""), "mpmd-rule-based-merge", f"rules={rule}")
    with pytest.raises(PassError, match=problem):
        found.raise_if_errors()


def test_a_source_of_two_rules() -> None:
    f, g, h = (INFO.format(name, "m1", "") for name in "fgh")
    rules = ",".join(f"FragmentMergeRule(sources=[{f},{other}],target={f})" for other in (g, h))
    _, found = run(main_with(""), "mpmd-rule-based-merge", f"rules={rules}")
    assert [d.message for d in found.errors] == [
        f"{f} is a source of two merge rules: it can be merged by one only"
    ]


def test_a_rule_that_matches_nothing_is_noticed() -> None:
    f, g = (INFO.format(name, "m1", "") for name in "fg")
    rule = f"FragmentMergeRule(sources=[{f},{g}],target={f})"
    _, found = run(main_with(""), "mpmd-rule-based-merge", f"rules={rule}")
    assert [d.severity for d in found] == [Severity.NOTICE] and "no fragment is a source" in found[0].message


def test_merging_by_rules_keeps_to_control_edges() -> None:
    body = "\n".join([fragment("f", "%a"), fragment("k", "%a"), fragment("g", "%a")])
    module = ir.parse(main_with(body, returned="return %k : !m1"))
    main = ir.funcs(module)[0]
    f, k, g = ir.fragments(main)
    put_control_edges(main, [(g, k)])
    infos = [INFO.format(name, "m1", "") for name in ("f", "g")]
    rule = f"FragmentMergeRule(sources=[{','.join(infos)}],target={infos[0]})"
    make_pass("mpmd-rule-based-merge", f"rules={rule} remove-control-dependencies=false").run(module)
    merged, last = ir.fragments(main)
    assert (last.origins, merged.origins) == ([ir.Origin("k")], [ir.Origin("f")])
    assert control_edges(main) == [(merged, last)]
    del f, k, g


def test_what_absorbing_leaves_in_a_callee_is_noticed() -> None:
    text = main_with(fragment("I", "%a"), returned="return %I : !m1").replace("public", "private")
    _, found = run(text, "mpmd-absorb-inferred-fragments")
    assert len(found) == 1 and found[0].severity is Severity.NOTICE
    assert 'unnamed work on mesh "m1"' in found[0].message and "no neighbour" in found[0].message
    _, found = run(text.replace("private", "public"), "mpmd-absorb-inferred-fragments")
    assert not found


def test_absorbing_where_nothing_is_absorbed_is_no_change() -> None:
    body = "\n".join([
        fragment("P", "%a"), "%t = mpmd.transfer %P : (!m1) -> !m2", "%s = mpmd.transfer %P : (!m1) -> !m2",
        fragment("k", "%t, %s", mesh="m2"), fragment("f", "%P"), "%u = mpmd.transfer %f : (!m1) -> !m2",
    ])  # fmt: skip
    text = main_with(body, "(!m2, !m2)", "return %k, %u : !m2, !m2").replace("public", "private")
    module = ir.parse(text)
    pass_ = make_pass("mpmd-absorb-inferred-fragments")
    with collecting():
        pass_.run(module)
        before = ir.to_text(module)
        assert not pass_.run(module)
    assert ir.to_text(module) == before


def test_stages_kept_apart_by_another_mesh_name_the_way() -> None:
    body = "\n".join([
        fragment("f", "%a"), "%t = mpmd.transfer %f : (!m1) -> !m2", fragment("k", "%t", mesh="m2"),
        "%s = mpmd.transfer %k : (!m2) -> !m1", fragment("g", "%s"),
    ])  # fmt: skip
    text = main_with(body, returned="return %g : !m1")
    for name in "fg":
        text = text.replace(f'origin=["{name}"]', f'origin=["{name}"], stage=0')
    _, found = run(text, "mpmd-verify-stage-merging")
    (error,) = found.errors
    assert 'the earlier one has the origins "f"' in error.message and "m1 -> m2 -> m1" in error.message


def test_programs_without_microbatches_have_nothing_to_count() -> None:
    _, found = run(main_with(fragment("f", "%a")), "mpmd-scheduling-units-verifier")
    assert [d.severity for d in found] == [Severity.NOTICE]


def test_calls_of_functions_without_a_body_cannot_be_inlined() -> None:
    text = (
        f"{HEAD}func.func private @g(!m1) -> !m1\n"
        "func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {\n"
        "  %0 = mpmd.call @g(%a) : (!m1) -> !m1\n  return %0 : !m1\n}\n"
    )
    _, found = run(text, "mpmd-call-inline")
    assert ["which has no body in this module" in d.message for d in found.errors] == [True]


def test_inlined_ops_say_where_they_were_called() -> None:
    text = (
        f"{HEAD}func.func public @main(%a: !m1) -> !m2 attributes {{topology = #topology}} {{\n"
        '  %0 = mpmd.call @g(%a) {call_counter = 2 : ui32} : (!m1) -> !m2 loc("caller")\n'
        "  return %0 : !m2\n}\n"
        "func.func private @g(%a: !m1) -> !m2 attributes {topology = #topology} {\n"
        '  %0 = mpmd.transfer %a : (!m1) -> !m2 loc("callee")\n  return %0 : !m2\n}\n'
    )
    module, _ = run(text, "mpmd-call-inline")
    (transfer,) = ir.ops(ir.funcs(module)[0])
    assert str(transfer.location) == 'loc(callsite("callee" at "caller"))'
    assert ir.name_of(transfer.location) == "callee" and len(list(transfer.attributes)) == 0


def test_a_callee_with_effects_stays_though_no_result_of_it_is_left() -> None:
    text = (
        "func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {\n"
        "  %0 = mpmd.call @g(%a) : (tensor<4xf32>) -> tensor<4xf32>\n  return %0 : tensor<4xf32>\n}\n"
        "func.func private @g(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {\n"
        "  %0 = stablehlo.constant dense<1.0> : tensor<4xf32>\n"
        "  stablehlo.custom_call @log(%0) {has_side_effect = true} : (tensor<4xf32>) -> ()\n"
        "  return %a : tensor<4xf32>\n}\n"
    )
    module, _ = run(HEAD + text, "mpmd-erase-unused-callee-block-arguments")
    verify(module)
    assert "mpmd.call @g() : () -> ()" in ir.to_text(module) and "@log" in ir.to_text(module)


def test_only_pure_ops_are_sunk_into_callees() -> None:
    text = (
        "func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {\n"
        "  %c = stablehlo.custom_call @now() {has_side_effect = true} : () -> tensor<4xf32>\n"
        "  %0 = mpmd.call @g(%a, %c) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>\n"
        "  return %0 : tensor<4xf32>\n}\n"
        "func.func private @g(%a: tensor<4xf32>, %c: tensor<4xf32>) -> tensor<4xf32> "
        "attributes {topology = #topology} {\n"
        "  %0 = stablehlo.add %a, %c : tensor<4xf32>\n  return %0 : tensor<4xf32>\n}\n"
    )
    module, _ = run(HEAD + text, "mpmd-sink-negligible-ops-into-call-op")
    assert "mpmd.call @g(%arg0, %0)" in ir.to_text(module)


def test_fragments_with_equal_bodies_are_simplified_alike() -> None:
    body = "\n".join(
        fragment(name, "%a").replace("negate %p0", "reshape %p0 : (tensor<4xf32>) -> tensor<4xf32> //")
        for name in "fgh"
    ).replace("// : tensor<4xf32>", "")
    text = main_with(body, "(!m1, !m1, !m1)", "return %f, %g, %h : !m1, !m1, !m1")
    module, _ = run(text, "mpmd-simplify-stablehlo")
    verify(module)
    assert "reshape" not in ir.to_text(module)
    assert [f.origins[0].name for f in ir.fragments(ir.funcs(module)[0])] == ["f", "g", "h"]
