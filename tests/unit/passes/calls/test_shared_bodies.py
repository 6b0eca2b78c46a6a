"""Bodies that fragments share: made, narrowed when results go unused, and put back."""

from __future__ import annotations

import pytest

from mpmd import ir
from mpmd.passes import make_pass
from mpmd.passes.bases import mlir_pass
from mpmd.passes.calls import bodies
from mpmd.passes.fragments.splitting import body_keys
from mpmd.passes.verify import verify

_T = '!mpmd.mesh_tensor<"m1", tensor<4xf32>>'


def _fragment(name: str, x: str, counter: int) -> str:
    """A fragment that returns a sum, its negation twice, its second operand, and a constant."""
    return f"""
    {name}:5 = mpmd.fragment<mesh="m1", origin=["f"]> ({x}, %b) {{call_counter = {counter} : ui32}}
        (%p: tensor<4xf32>, %q: tensor<4xf32>) {{
      %c = stablehlo.constant dense<1.0> : tensor<4xf32>
      %s = stablehlo.add %p, %c : tensor<4xf32>
      %n = stablehlo.negate %p : tensor<4xf32>
      mpmd.return %s, %n, %n, %q, %c : {", ".join(["tensor<4xf32>"] * 5)}
    }} : ({_T}, {_T}) -> ({_T}, {_T}, {_T}, {_T}, {_T})"""


def _module(returned: str = "%g#0, %g#1, %g#2, %g#3, %g#4, %f#1") -> ir.Module:
    types = ", ".join([_T] * (returned.count(",") + 1))
    return ir.parse(f"""
  func.func public @main(%a: {_T}, %b: {_T}) -> ({types}) attributes {{
      topology = #mpmd.topology<<"m1" : <["x"=1]>>>}} {{
    {_fragment("%f", "%a", 0)}
    {_fragment("%g", "%f#0", 1)}
    return {returned} : {types}
  }}""")


def _shared(module: ir.Module) -> list[ir.Fragment]:
    with ir.context(), ir.Location.unknown():
        bodies.share_bodies(ir.fragments(ir.funcs(module)[0]))
    verify(module)
    return ir.fragments(ir.funcs(module)[0])


def test_equal_bodies_become_one_function():
    module = _module()
    first, second = _shared(module)
    (body,) = bodies.functions_of(module)
    assert len({*body_keys([first, second])}) == 1
    assert len(body.args) == 1 and len(body.returned) == 2
    # What is passed on, returned twice or constant can still be seen.
    sum_, negated, twice, passed, constant = second.returned
    assert negated == twice and passed == second.args[1] and ir.is_constant(ir.producer(constant))
    assert ir.producer(sum_) == ir.producer(negated) and ir.is_side_effect_free(second)


def test_a_body_with_effects_is_not_pure():
    kind = "tensor<4xf32>"
    effect = f"stablehlo.custom_call @f(%arg2) {{has_side_effect = true}} : ({kind}) -> {kind}"
    text = ir.to_text(_module()).replace(f"stablehlo.negate %arg2 : {kind}", effect)
    first, _ = _shared(module := ir.parse(text))
    assert len(bodies.functions_of(module)) == 1
    assert not ir.is_side_effect_free(first)


@pytest.mark.parametrize("pass_name", ["mpmd-fragment-dce", "mpmd-simplify-program"])
def test_what_nothing_uses_is_not_computed(pass_name):
    module = _module(returned="%g#1, %f#1")
    _shared(module)
    make_pass(pass_name, []).run(module)
    verify(module)
    first, second = ir.fragments(ir.funcs(module)[0])
    symbols = ir.symbol_table(module)
    calls = [ir.ops(fragment.body, ir.FuncCall)[0] for fragment in (first, second)]
    names = [len(ir.ops(symbols[call.callee.value])) for call in calls]
    assert names == [3, 1]  # the second needs the negation only; the first the constant and the sum too
    assert len(first.inputs) == len(second.inputs) == 1


def test_bodies_come_back_with_the_functions_of_fragments():
    module, plain = _module(), _module()
    _shared(module)
    for m in (module, plain):
        make_pass("mpmd-lower-to-fragment-calls", []).run(m)
        verify(m)
        mlir_pass("canonicalize").run(m)
    assert "mpmd.body" not in ir.to_text(module)
    assert len(ir.funcs(module)) == len(ir.funcs(plain)) == 2
    outlined, expected = (ir.to_text(m).partition("func.func @p0")[2] for m in (module, plain))
    assert sorted(outlined.split()) == sorted(expected.split())


def test_what_a_body_turns_out_to_pass_on_can_be_seen():
    """A sum with zero is its operand: no call returns it, though the copies still share the rest."""
    module = ir.parse(ir.to_text(_module()).replace("dense<1.0", "dense<0.0"))
    _shared(module)
    make_pass("mpmd-propagate-shardings", [("share", "true")]).run(module)
    verify(module)
    (body,) = bodies.functions_of(module)
    assert [op.operation.name for op in ir.ops(body)] == ["stablehlo.negate"]
    for fragment in ir.fragments(ir.symbol_table(module)["main"]):
        assert fragment.returned[0] == fragment.args[0]
        assert bodies.called_bodies(fragment) == [body.symbol]


def test_fragments_with_several_bodies_are_tidied_as_a_whole():
    """What two bodies of a fragment compute alike is computed once, and copies share the result."""
    module = ir.parse(ir.to_text(_module()))
    fragments = _shared(module)
    with ir.context(), ir.Location.unknown():
        for fragment in fragments:
            (call,) = ir.ops(fragment.body, ir.FuncCall)
            again = ir.clone(call, ir.before(call))
            ir.set_operand(fragment.terminator, 2, again.results[1])
    verify(module)
    make_pass("mpmd-propagate-shardings", [("share", "true")]).run(module)
    verify(module)
    for fragment in ir.fragments(ir.symbol_table(module)["main"]):
        assert len(bodies.called_bodies(fragment)) == 1
        assert fragment.returned[1] == fragment.returned[2]
