"""Reading and changing programs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from mpmd import ir
from mpmd.errors import IRError
from mpmd.passes.cleanup.fragments import remove_dead_code
from mpmd.passes.fragments.dependencies import control_edges, control_edges_as_operands, put_control_edges
from mpmd.passes.fragments.editing import block_users, in_block_order, merge
from mpmd.passes.fragments.fragment_info import FragmentInfo
from mpmd.passes.fragments.splitting import ops_flowing_to, split
from mpmd.passes.verify import verify
from tests.support.ir_programs import TWO_FRAGMENTS, main_with


@pytest.fixture
def module() -> ir.Module:
    return ir.parse(TWO_FRAGMENTS)


@pytest.fixture
def main(module: ir.Module) -> ir.Func:
    return ir.funcs(module)[0]


def names(some: list[ir.Op]) -> list[str]:
    return [op.operation.name.split(".")[1] for op in some]


def test_fragments_have_their_attributes_as_python_values(main: ir.Func) -> None:
    first, second = ir.fragments(main)
    assert (first.mesh, first.origins, first.call_counter, first.stage) == ("m1", [ir.Origin("f")], 1, None)
    assert (second.origins, second.call_counter, second.stage) == ([ir.Origin("g", 1)], None, 3)
    assert first.is_forward and second.is_backward and first.is_scheduling_unit
    assert not second.is_scheduling_unit
    first.is_remat = True
    assert "remat" in ir.op_text(first)
    first.origins = [ir.Origin("f"), ir.Origin("h", 1)]
    assert first.transpose_count is None and first.is_user


def test_users_newest_first_and_in_block_order(main: ir.Func) -> None:
    first = ir.fragments(main)[0]
    assert names(ir.users(main.args[0])) == ["fragment"]
    assert names(in_block_order(block_users(first))) == ["transfer", "fragment"]


def test_users_in_regions_count_for_the_op_around_them() -> None:
    text = main_with(
        """
        %0 = mpmd.fragment<mesh="m1", origin=[]> (%a) (%p: tensor<4xf32>) {
          %c = stablehlo.constant dense<true> : tensor<i1>
          %x = stablehlo.negate %p : tensor<4xf32>
          %y = "stablehlo.if"(%c) ({ stablehlo.return %x : tensor<4xf32> },
              { stablehlo.return %p : tensor<4xf32> }) : (tensor<i1>) -> tensor<4xf32>
          mpmd.return %y : tensor<4xf32>
        } : (!m1) -> !m1
        """
    )
    module = ir.parse(text)
    body = ir.fragments(ir.funcs(module)[0])[0].body
    constant, negate, branch = ir.ops(body)
    assert block_users(negate) == [branch]
    assert ir.read_by(branch)[0] == constant.result and negate.result in ir.read_by(branch)
    assert ops_flowing_to([branch.result]) == {constant, negate, branch}


def test_moving_to_where_it_stands_is_no_edit(main: ir.Func) -> None:
    first, transfer, second = ir.ops(main)
    edits = ir.edits()
    ir.move_after(transfer, first)
    ir.move_before(transfer, second)
    ir.move_to_start(first, main.body)
    assert ir.edits() == edits
    ir.move_after(transfer, second)
    assert ir.edits() > edits and names(ir.ops(main)) == ["fragment", "fragment", "transfer"]


def test_merging_keeps_what_others_use_first(main: ir.Func) -> None:
    first, second = ir.fragments(main)
    merged = merge(first, second)
    assert merged.origins == [ir.Origin("f"), ir.Origin("g", 1)] and merged.stage == 3
    assert names(ir.ops(merged.body)) == ["add", "negate", "abs"]
    assert len(merged.results) == 2 and names(ir.users(merged.results[0])) == ["transfer"]
    assert merged.call_counter is None
    assert "fused" in str(merged.location)


def test_splitting_hands_over_what_the_rest_needs(main: ir.Func) -> None:
    first = ir.fragments(main)[0]
    add, negate = ir.ops(first.body)
    one, two = split(first, {add}, [0])
    assert names(ir.ops(one.body)) == ["add"] and names(ir.ops(two.body)) == ["negate"]
    assert list(two.inputs) == [*main.args, one.results[1]]
    assert one.call_counter == two.call_counter == 1
    del add, negate


def test_splitting_keeps_ops_with_effects_and_what_they_read() -> None:
    text = main_with(
        """
        %0:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
          %x = stablehlo.negate %p : tensor<4xf32>
          %y = stablehlo.abs %p : tensor<4xf32>
          stablehlo.custom_call @log(%x) {has_side_effect = true} : (tensor<4xf32>) -> ()
          mpmd.return %x, %y : tensor<4xf32>, tensor<4xf32>
        } : (!m1) -> (!m1, !m1)
        """
    )
    module = ir.parse(text)
    fragment = ir.fragments(ir.funcs(module)[0])[0]
    _, second = split(fragment, {ir.ops(fragment.body)[0]}, [0])
    assert names(ir.ops(second.body)) == ["abs", "custom_call"]
    verify(module)


def test_dead_code_goes_from_regions_too() -> None:
    text = main_with(
        """
        %0 = mpmd.fragment<mesh="m1", origin=[]> (%a) (%p: tensor<4xf32>) {
          %c = stablehlo.constant dense<true> : tensor<i1>
          %y = "stablehlo.if"(%c) ({
            %z = stablehlo.abs %p : tensor<4xf32>
            stablehlo.return %p : tensor<4xf32>
          }, { stablehlo.return %p : tensor<4xf32> }) : (tensor<i1>) -> tensor<4xf32>
          mpmd.return %y : tensor<4xf32>
        } : (!m1) -> !m1
        """,
        returned="return %0 : !m1",
    )
    module = ir.parse(text)
    assert remove_dead_code(ir.fragments(ir.funcs(module)[0])[0]) is not None
    assert "abs" not in ir.to_text(module)


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ('origin=["f"]> (%a) {arg_attrs = [{}, {}]} ', "arg_attrs has 2 entries for 1 values"),
        ('origin=["f"]> (%a) {call_counter = 3 : i64} ', "call_counter is a i64, not a ui32"),
        ("origin=[], stage=1> (%a) ", "an inferred fragment has a stage"),
        ('origin=["f"], stage=-1> (%a) ', "its stage -1 is negative"),
        ('origin=["f", "f"]> (%a) ', 'it has the origin "f" twice'),
    ],
)
def test_the_verifier_sees_what_the_dialect_accepts(broken: str, problem: str) -> None:
    body = "(%p: tensor<4xf32>) {\n mpmd.return %p : tensor<4xf32>\n} : (!m1) -> !m1"
    module = ir.parse(main_with(f'%0 = mpmd.fragment<mesh="m1", {broken}{body}'))
    with pytest.raises(IRError, match=problem):
        verify(module)


def test_control_edges_survive_merging_and_print_as_operands(main: ir.Func) -> None:
    first, second = ir.fragments(main)
    third = ir.clone(second, ir.after(second))
    put_control_edges(main, [(second, third), (first, second)])
    assert control_edges(main) == [(first, second), (second, third)]
    merged = merge(first, second)
    assert control_edges(main) == [(merged, third)]
    control_edges_as_operands(main)
    shown = ir.fragments(main)[1]
    assert list(shown.operands)[1] == ir.fragments(main)[0].results[0]
    assert "mpmd.control_operand_start_idx = 1 : i64" in ir.op_text(shown)
    assert control_edges(main) == []


def test_infos_are_equal_whatever_the_order_of_origins() -> None:
    text = 'FragmentInfo(mesh_name="m1",origins=["g"(1),"f"],split_type=kDropTransferred,call_counter=2)'
    info = FragmentInfo.parse(text)
    assert info == FragmentInfo.parse(str(info).replace('"g"(1),"f"', '"f","g"(1)'))
    assert info.origins == (ir.Origin("g", 1), ir.Origin("f"))
    assert info != FragmentInfo.parse(text.replace("2)", "3)"))


def test_edits_of_another_thread_are_not_counted():
    """Two steps may be compiled at once, and a pass may discard the edits that it made."""
    ir.query.note_edit()
    before = ir.edits()

    def of_another_thread():
        since = ir.edits()
        ir.query.note_edit()
        ir.forget_edits(since)
        return ir.edits()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(of_another_thread).result() == 0
    assert ir.edits() == before
