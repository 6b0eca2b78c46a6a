"""What crashes the process, hangs or silently fails in MLIR's bindings raises here, or is harmless."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpmd import ir
from mpmd.errors import ConfigError, IRError
from mpmd.passes.bases import FunctionPass, mlir_pass
from mpmd.passes.fragments.editing import drop, merge
from mpmd.passes.verify import verify
from tests.support.ir_programs import TWO_FRAGMENTS

ROOT = Path(__file__).resolve().parents[3]


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
        verify(module)


def test_verifying_with_a_diagnostic_handler_ends(module: ir.Module) -> None:
    seen = []
    handler = ir.context().attach_diagnostic_handler(lambda d: seen.append(d) is None)
    try:
        ir.fragments(ir.funcs(module)[0])[0].mesh = "nowhere"
        with pytest.raises(IRError, match="nowhere"):
            verify(module)
    finally:
        handler.detach()


# Each of these ends the process with a signal in the bindings; here each prints what stands in its list.
DANGEROUS = """
import gc
from mpmd import ir
from mpmd.errors import IRError
from mpmd.passes.bases import mlir_pass
from mpmd.passes.verify import verify
from tests.support.ir_programs import TWO_FRAGMENTS

def fresh():
    gc.collect()
    for _ in range(3):  # takes the memory of whatever was freed
        ir.parse(TWO_FRAGMENTS)

def program():
    module = ir.parse(TWO_FRAGMENTS)
    first, second = ir.fragments(ir.funcs(module)[0])
    return module, ir.funcs(module)[0], first, second

module, main, first, second = program()
inner, result, again = ir.ops(second)[0], second.result, ir.fragments(main)[1]
ir.replace_uses(second.result, main.args[0])
ir.erase(second)
fresh()
print("op in an erased op:", inner.operation.name, inner.operands[0].type)
print("value of an erased op:", result.type.mesh)
print("another object for an erased op:", again.mesh, again.result.type == result.type)
try:
    second.mesh
except RuntimeError as e:
    print("the erased op:", e)
print("uses of what it read:", len(ir.users(first.results[0])))

module, main, first, second = program()
ir.replace(second, [main.args[0]])
dead = ir.ops(first)[1]
mlir_pass("canonicalize").run(module)
mlir_pass("symbol-dce").run(module)
fresh()
print("op held over passes:", dead.operation.name, first.mesh, main.symbol)
print("the program after passes:", [g.mesh for g in ir.fragments(ir.funcs(module)[0])])

main = ir.funcs(ir.parse(TWO_FRAGMENTS))[0]
fresh()
print("op of a module that nobody holds:", main.symbol, [g.mesh for g in ir.fragments(main)])
value = ir.funcs(ir.parse(TWO_FRAGMENTS))[0].args[0]
fresh()
print("value of a module that nobody holds:", value.type.mesh, len(ir.users(value)))

module, main, first, second = program()
copy = ir.funcs(ir.clone(module))[0]
fresh()
print("op of a copy that nobody holds:", copy.symbol)

module, main, first, second = program()
outer = main.terminator
main.returned = [main.returned[0]]
fresh()
print("a terminator that was replaced:", *(value.type for value in outer.operands))

module, main, first, second = program()
added = ir.append_arg(first.body, first.args[0])
kept = first.args[0]
ir.erase_args(first.body, [2])
for _ in range(100):
    ir.append_arg(first.body, first.args[0])  # takes the memory of an argument that was freed
    ir.erase_args(first.body, [2])
fresh()
print("an erased argument:", added.type, added.location, len(ir.users(added)), ir.is_unused(added))
print("an argument that stays, looked up again:", kept.type == first.args[0].type, len(ir.users(kept)))
verify(module)
ir.set_operand(ir.ops(first)[0], 0, added)
try:
    verify(module)
except IRError as e:
    print("an op that uses an erased argument:", str(e).partition(": ")[2])
ir.replace_uses(added, first.args[0])
verify(module)

module, main, first, second = program()
result, inner = second.result, ir.ops(second)[0].result
ir.replace(second, [main.args[0]])
ir.make_transfer(result, result.type, ir.at_end(main.body))
try:
    verify(module)
except IRError as e:
    print("an op that uses the result of an erased op:", str(e).partition(": ")[2])
ir.create("stablehlo.abs", [inner], [inner.type], ir.at_end(main.body))
try:
    verify(module)
except IRError as e:
    print("an op that uses what was in an erased op:", "stablehlo.abs" in str(e))
"""

SAID = """\
op in an erased op: stablehlo.abs none
value of an erased op: m1
another object for an erased op: m1 True
the erased op: the operation has been invalidated
uses of what it read: 0
op held over passes: stablehlo.negate m1 main
the program after passes: ['m1']
op of a module that nobody holds: main ['m1', 'm1']
value of a module that nobody holds: m1 1
op of a copy that nobody holds: main
a terminator that was replaced: none none
an erased argument: tensor<4xf32> loc("-":8:8) 0 True
an argument that stays, looked up again: True 0
an op that uses an erased argument: operand 0 of stablehlo.add at loc("-":9:10) was erased.
an op that uses the result of an erased op: operand 0 of mpmd.transfer at loc("-":14:8) was erased.
an op that uses what was in an erased op: True
"""


@pytest.mark.slow
def test_objects_for_what_is_gone_do_no_harm() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DANGEROUS], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, SAID), done.stderr


def test_an_erased_block_argument_is_in_no_list(main: ir.Func) -> None:
    added = ir.append_arg(main.body, like=main.args[0])
    assert main.args[2] == added
    ir.erase_args(main.body, [2])
    assert len(main.args) == 2 and all(len(ir.users(arg)) == 1 for arg in main.args)


def test_passes_of_mlir_are_text_and_never_python() -> None:
    """A Python function as a pass in the wrong place aborts the process; there is no way to hand one over."""
    with pytest.raises((TypeError, ConfigError)):
        mlir_pass(lambda op, manager: None).run(ir.parse(TWO_FRAGMENTS))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no-such-pass"):
        ir.run_mlir("no-such-pass", ir.parse(TWO_FRAGMENTS))


def test_what_a_pass_raises_reaches_its_caller(module: ir.Module) -> None:
    class FailingPass(FunctionPass):
        name = "mpmd-fails"

        def rewrite_function(self, f: ir.Func) -> None:
            raise KeyError(f.symbol)

    with pytest.raises(KeyError, match="main"):
        FailingPass().run(module)
    verify(module)


def test_a_failing_pass_of_mlir_leaves_the_module_as_it_was(main: ir.Func, module: ir.Module) -> None:
    ir.set_type(main.args[0], main.args[0].type.on("m2"))
    before = ir.to_text(module)
    with pytest.raises(IRError, match="failed"):
        ir.run_mlir("symbol-dce", module)
    assert ir.to_text(module) == before and main == ir.funcs(module)[0]


def test_what_is_no_pass_of_mlir_raises() -> None:
    with pytest.raises(ConfigError, match="no-such-pass"):
        mlir_pass("no-such-pass")
    with pytest.raises(ConfigError, match="cannot build the pass 'cse'"):
        mlir_pass("cse", "no-such-option=1")


def test_a_failing_pass_of_mlir_raises(main: ir.Func, module: ir.Module) -> None:
    ir.set_type(main.args[0], main.args[0].type.on("m2"))
    with pytest.raises(IRError, match="symbol-dce failed"):
        mlir_pass("symbol-dce").run(module)


def test_a_context_that_was_never_left_does_not_abort_the_process() -> None:
    code = "from mpmd import ir; ir.context().__enter__(); print('done')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
