"""What crashes the process, hangs or silently fails in MLIR's bindings raises here, or is harmless."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mpmd import ir
from mpmd.errors import ConfigError, IRError
from mpmd.passes.bases import mlir_pass
from mpmd.passes.fragments.dropping import drop
from mpmd.passes.fragments.merging import merge
from tests.unit.ir.programs import TWO_FRAGMENTS


@pytest.fixture
def module() -> ir.Module:
    return ir.parse(TWO_FRAGMENTS)


@pytest.fixture
def main(module: ir.Module) -> ir.Func:
    return ir.funcs(module)[0]


def test_an_op_is_found_in_a_set_after_it_changed(main: ir.Func) -> None:
    first, second = ir.fragments(main)
    known = {first: "first", second: "second"}
    first.call_counter = 7
    ir.set_operand(second, 0, main.args[0])
    assert known[first] == "first" and known[second] == "second"
    assert known[ir.fragments(main)[0]] == "first"


def test_an_op_compares_to_anything(main: ir.Func) -> None:
    assert main != None  # noqa: E711
    assert main != "main"
    assert main == main.operation


def test_erasing_what_is_used_raises(main: ir.Func) -> None:
    with pytest.raises(IRError, match=r"cannot erase mpmd\.fragment .* still used"):
        ir.erase(ir.fragments(main)[0])
    with pytest.raises(IRError, match=r"cannot erase stablehlo\.add"):
        ir.erase(ir.ops(ir.fragments(main)[0].body)[0])


def test_erasing_a_block_argument_that_is_used_raises(main: ir.Func) -> None:
    with pytest.raises(IRError, match="cannot erase block argument 1"):
        ir.erase_args(main.body, [1])
    assert len(main.args) == 2


def test_dropping_a_result_that_is_used_raises(main: ir.Func) -> None:
    with pytest.raises(IRError, match="still used"):
        drop(ir.fragments(main)[0], results=[0])


def test_an_erased_op_raises_when_it_is_used(main: ir.Func) -> None:
    second = ir.fragments(main)[1]
    ir.replace_uses(second.result, main.args[0])
    ir.erase(second)
    with pytest.raises(RuntimeError, match="invalidated"):
        _ = second.mesh
    assert second not in ir.fragments(main)


def test_replacing_a_value_by_itself_ends(main: ir.Func) -> None:
    edits = ir.edits()
    ir.replace_uses(main.args[0], main.args[0])
    assert ir.edits() == edits


def test_replacing_an_op_needs_one_value_per_result_and_none_of_its_own(main: ir.Func) -> None:
    first = ir.fragments(main)[0]
    with pytest.raises(IRError, match="2 results, 1 values"):
        ir.replace(first, [main.args[0]])
    with pytest.raises(IRError, match="by its own result"):
        ir.replace(first, [main.args[0], first.results[0]])


def test_merging_across_meshes_or_stages_raises(main: ir.Func) -> None:
    first, second = ir.fragments(main)
    first.stage = 2
    with pytest.raises(IRError, match=r"cannot merge fragments of mesh m1, stage 2 and mesh m1, stage 3"):
        merge(first, second)
    first.stage, first.mesh = None, "m2"
    with pytest.raises(IRError, match="mesh m2, stage None and mesh m1, stage 3"):
        merge(first, second)


@pytest.mark.parametrize(
    "call",
    [
        "mpmd.call @nope(%a) : (tensor<4xf32>) -> tensor<4xf32>",
        '"mpmd.call"(%a) <{callee = @nope}> : (tensor<4xf32>) -> tensor<4xf32>',
    ],
)
def test_calling_an_unknown_function_raises(call: str) -> None:
    body = f"%0 = {call}\n return %0 : tensor<4xf32>"
    with pytest.raises(IRError, match="calls @nope, which it does not define"):
        ir.parse(f"func.func @f(%a: tensor<4xf32>) -> tensor<4xf32> {{ {body} }}")


def test_verifying_a_call_of_a_function_that_is_gone_raises() -> None:
    text = "func.func private @g(%a: tensor<4xf32>) -> tensor<4xf32> { return %a : tensor<4xf32> }\n"
    call = "%0 = mpmd.call @g(%a) : (tensor<4xf32>) -> tensor<4xf32>\n return %0 : tensor<4xf32>"
    module = ir.parse(f"{text} func.func @f(%a: tensor<4xf32>) -> tensor<4xf32> {{ {call} }}")
    ir.erase(ir.funcs(module)[0])
    with pytest.raises(IRError, match="calls @g, which the module does not have"):
        ir.verify(module)


def test_verifying_with_a_diagnostic_handler_ends(module: ir.Module) -> None:
    seen = []
    handler = ir.context().attach_diagnostic_handler(lambda d: seen.append(d) is None)
    try:
        ir.fragments(ir.funcs(module)[0])[0].mesh = "nowhere"
        with pytest.raises(IRError, match="nowhere"):
            ir.verify(module)
    finally:
        handler.detach()


def test_what_is_no_pass_of_mlir_raises() -> None:
    with pytest.raises(ConfigError, match="no-such-pass"):
        mlir_pass("no-such-pass")
    with pytest.raises(ConfigError, match="cannot make the pass 'cse'"):
        mlir_pass("cse", "no-such-option=1")


def test_a_failing_pass_of_mlir_raises(main: ir.Func, module: ir.Module) -> None:
    ir.set_type(main.args[0], main.args[0].type.on("m2"))
    with pytest.raises(IRError, match="symbol-dce failed"):
        mlir_pass("symbol-dce").run(module)


def test_a_context_that_was_never_left_does_not_abort_the_process() -> None:
    code = "from mpmd import ir; ir.context().__enter__(); print('done')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
