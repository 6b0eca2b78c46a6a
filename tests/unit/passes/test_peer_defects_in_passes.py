"""What passes of other partitioners were seen to get wrong: each test would fail here if ours did too."""

from __future__ import annotations

import dataclasses

import pytest

from mpmd import ir
from mpmd.errors import IRError
from mpmd.options import DIALECT_DEFAULTS
from mpmd.partition import pipeline
from mpmd.passes import make_pass
from mpmd.passes.verify import verify
from mpmd.support.diagnostics import Severity
from mpmd.support.passes import Watch, run_pipeline
from tests.support.fragment_programs import fragment, run
from tests.support.ir_programs import HEAD, main_with
from tests.support.named_programs import NamedProgram


def counter(number: int) -> str:
    return f"{{call_counter = {number} : ui32}}"


@pytest.mark.parametrize("op", ["mpmd.call @nobody", '"mpmd.call"', "mpmd.fragment_call"])
def test_defect_7_a_call_of_an_unknown_function_is_an_exception(op: str) -> None:
    forms = {
        "mpmd.call @nobody": "mpmd.call @nobody(%a) : (!m1) -> !m1",
        '"mpmd.call"': '"mpmd.call"(%a) <{callee = @nobody}> : (!m1) -> !m1',
        "mpmd.fragment_call": 'mpmd.fragment_call<mesh="m1", origin=[]> @nobody(%a) : (!m1) -> !m1',
    }
    told = "calls @nobody, which it does not define|'nobody' does not reference a"
    with pytest.raises(IRError, match=told):
        ir.parse(main_with(f"%0 = {forms[op]}", returned="return %0 : !m1"))


def test_defect_8_a_schedule_that_needs_stages_says_so_once() -> None:
    body = "\n".join(
        fragment(f"v{i}{t}", "%a", counter(i), origin=f'"f"({t})' if t else '"f"')
        for t in (0, 1)
        for i in range(4)
    )
    text = main_with(body, returned="return %v00 : !m1")
    _, found = run(text, "mpmd-pipeline-scheduler", "must-happen-before=Circular")
    assert [d.severity for d in found] == [Severity.NOTICE]
    assert found[0].message == "Circular orders nothing that has no stage; assign stages to get an order"


def test_defect_9_a_schedule_and_merge_rules_together_keep_the_program_valid() -> None:
    body = "\n".join([
        fragment("f0", "%a", counter(0), origin='"f"'), fragment("f1", "%a", counter(1), origin='"f"'),
        fragment("g", "%a", counter(0), origin='"g"(1)'), fragment("h", "%a", counter(1), origin='"g"(1)'),
    ])  # fmt: skip
    text = main_with(body, "(!m1, !m1, !m1, !m1)", "return %f0, %f1, %g, %h : !m1, !m1, !m1, !m1")
    infos = [f'FragmentInfo(origins=["f"],call_counter={i},mesh_name="m1")' for i in (0, 1)]
    target = 'FragmentInfo(origins=["f"],mesh_name="m1")'
    rule = f"FragmentMergeRule(sources=[{','.join(infos)}],target={target})"
    module = ir.parse(text)
    passes = [
        make_pass("mpmd-pipeline-scheduler", "must-happen-before=GPipe remove-control-dependencies=false"),
        make_pass("mpmd-rule-based-merge", f"rules={rule}"),
    ]
    run_pipeline(module, passes, Watch(verify=verify, text=ir.to_text, verify_each=True))
    fragments = ir.fragments(ir.funcs(module)[0])
    assert [f.transpose_count for f in fragments] == [0, 1, 1], "the forward work comes first, merged"
    assert len(fragments[0].results) == 2


@pytest.mark.parametrize("seed", range(4))
def test_defect_10_the_program_is_valid_between_all_passes_and_each_is_verified(seed: int) -> None:
    program = NamedProgram(seed, calls=seed % 2 == 1)
    topology = ir.TopologyAttr.from_axes(program.meshes).attribute()
    module = ir.parse(program.text)
    for f in ir.funcs(module):
        ir.put(f, "topology", topology)
    assignment = tuple(f"{name}@{mesh}" for name, mesh in program.assignment.items())
    options = dataclasses.replace(
        DIALECT_DEFAULTS,
        name_to_mesh_assignment=assignment,
        infer_transfers=True,
        fail_on_inferred_fragments=False,
    )
    verified, changed = [], []

    def counted(module: ir.Module) -> None:
        verified.append(verify(module))

    watch = Watch(
        verify=counted, text=ir.to_text, verify_each=True, check_changed=True,
        after=lambda pass_, module, has_changed, seconds: changed.append(has_changed),
    )  # fmt: skip
    makers = (
        pipeline.import_pipeline,
        pipeline.optimize_pipeline,
        pipeline.sharding_propagation_pipeline,
        pipeline.export_pipeline,
    )
    for make in makers:
        run_pipeline(module, [step.pass_ for step in make(options)], watch)
    assert len(verified) == sum(changed) > 5


def test_defect_10_a_pass_that_breaks_the_program_is_named() -> None:
    class Breaks(type(make_pass("mpmd-fragment-dce"))):  # type: ignore[misc]
        name = "mpmd-breaks"

        def rewrite_function(self, f: ir.Func) -> None:
            ir.fragments(f)[0].mesh = "nowhere"

    module = ir.parse(main_with(fragment("f", "%a"), returned="return %f : !m1"))
    with pytest.raises(IRError) as e:
        run_pipeline(module, [Breaks()], Watch(verify=verify, text=ir.to_text, verify_each=True))
    assert e.value.__notes__ == ["after pass 0: mpmd-breaks"]


def split_program(around: int) -> str:
    """A backward fragment of which a part can wait, among `around` others."""
    others = "\n".join(fragment(f"o{i}", "%a", origin='"o"') for i in range(around))
    backward = (
        f'%k:2 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%a, %a) {counter(0)} '
        "(%p: tensor<4xf32>, %q: tensor<4xf32>) {\n"
        "  %x = stablehlo.negate %p : tensor<4xf32>\n  %y = stablehlo.abs %q : tensor<4xf32>\n"
        "  %z = stablehlo.add %y, %y : tensor<4xf32>\n"
        "  mpmd.return %x, %z : tensor<4xf32>, tensor<4xf32>\n} : (!m1, !m1) -> (!m1, !m1)\n"
        "%t = mpmd.transfer %k#0 : (!m1) -> !m2"
    )
    return main_with(f"{others}\n{backward}", "(!m2, !m1)", "return %t, %k#1 : !m2, !m1")


@pytest.mark.parametrize("around", range(8))
def test_defect_11_whether_a_fragment_is_split_depends_on_it_alone(around: int) -> None:
    module, _ = run(split_program(around), "mpmd-split-bwd-fragments")
    fragments = ir.fragments(ir.funcs(module)[0])
    assert len(fragments) == around + 2
    assert sum(f.split_keep_transferred for f in fragments) == 1
    assert sum(f.split_drop_transferred for f in fragments) == 1


@pytest.mark.parametrize(
    "name", ["mpmd-erase-unused-callee-block-arguments", "mpmd-sink-negligible-ops-into-call-op"]
)
def test_defect_12_calls_whose_results_nobody_uses_fit_their_callee(name: str) -> None:
    text = (
        f"{HEAD}func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> "
        "attributes {topology = #topology} {\n"
        "  %c = stablehlo.constant dense<1.0> : tensor<4xf32>\n"
        "  %0 = mpmd.call @g(%a, %c, %a) : (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>\n"
        "  %1 = mpmd.call @g(%a, %c, %a) : (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>\n"
        "  return %1 : tensor<4xf32>\n}\n"
        "func.func private @g(%a: tensor<4xf32>, %b: tensor<4xf32>, %unused: tensor<4xf32>) -> tensor<4xf32> "
        "attributes {topology = #topology} {\n"
        "  %0 = stablehlo.add %a, %b : tensor<4xf32>\n  return %0 : tensor<4xf32>\n}\n"
    )
    before = ir.parse(text)
    module, _ = run(text, name)
    verify(module)
    callee = ir.symbol_table(module)["g"]
    assert len(callee.args) < len(ir.symbol_table(before)["g"].args)
    assert {len(call.operands) for call in ir.walk(module, ir.Call)} == {len(callee.args)}


def test_defect_12_the_verifier_sees_calls_that_do_not_fit() -> None:
    text = (
        f"{HEAD}func.func public @main(%a: !m1) -> !m1 attributes {{topology = #topology}} {{\n"
        "  %0 = mpmd.call @g(%a) : (!m1) -> !m1\n  return %0 : !m1\n}\n"
        "func.func private @g(%a: !m1) -> !m1 attributes {topology = #topology} {\n  return %a : !m1\n}\n"
    )
    module = ir.parse(text)
    (call,) = ir.walk(module, ir.Call)
    made = ir.rebuild(call, [*call.operands, *call.operands], [r.type for r in call.results])
    ir.replace(call, list(made.results))
    with pytest.raises(IRError, match="it has 2 operands, @g has 1 arguments"):
        verify(module)


def test_defect_20_what_absorbing_leaves_is_told_of_callees_and_not_of_entry_points() -> None:
    entry = main_with(fragment("I", "%a"), returned="return %I : !m1")
    _, found = run(entry.replace("public", "private"), "mpmd-absorb-inferred-fragments")
    assert ['unnamed work on mesh "m1"' in d.message for d in found] == [True]
    _, found = run(entry, "mpmd-absorb-inferred-fragments")
    assert found == []


def test_defect_21_a_notice_says_where_the_orders_of_meshes_disagree() -> None:
    text = main_with(fragment("f", "%a", counter(0)), returned="return %f : !m1")
    turned = text.replace('<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>', '<"m2" : <["x"=2]>>, <"m1" : <["x"=2]>>')
    assert turned != text
    _, found = run(turned, "mpmd-pipeline-scheduler", "must-happen-before=GPipe")
    assert [d.severity for d in found] == [Severity.NOTICE]
    assert "the order m2, m1, which is the order of pipeline stages" in found[0].message
    _, found = run(text, "mpmd-pipeline-scheduler", "must-happen-before=GPipe")
    assert found == []
