"""What may be done to ops, by the ops that a traced JAX program has."""

from __future__ import annotations

import pytest

from mpmd import ir

F = "tensor<f32>"
EFFECT = "{has_side_effect = true}"
SUM = f"^bb0(%x: {F}, %y: {F}):\n%z = stablehlo.add %x, %y : {F}\nstablehlo.return %z : {F}"


def custom_call(target, attributes=EFFECT):
    return f"%r = stablehlo.custom_call @{target}(%a) {attributes} : ({F}) -> {F}"


def branch(inside):
    other = f"stablehlo.return %a : {F}"
    return f'%r = "stablehlo.if"(%p) ({{\n{inside}\n{other}\n}}, {{\n{other}\n}}) : (tensor<i1>) -> {F}'


OPS = {
    "computes": (f"%r = stablehlo.add %a, %a : {F}", "free duplicable movable"),
    "a custom call": (custom_call("f", ""), "free duplicable movable"),
    "draws from a key": (
        "%r, %s = stablehlo.rng_bit_generator %k, algorithm = DEFAULT : (tensor<2xui64>) "
        "-> (tensor<2xui64>, tensor<3xui32>)",
        "free duplicable movable",
    ),
    "draws without a key": (
        f"%r = stablehlo.rng %a, %a, %n, distribution = UNIFORM : ({F}, {F}, tensor<1xi64>) -> tensor<3xf32>",
        "",
    ),
    "calls back": (custom_call("f"), ""),
    "says where a value is": (custom_call("annotate_device_placement"), "duplicable"),
    "groups shardings": (f"sdy.sharding_group %a group_id=0 : {F}", "duplicable"),
    "of all devices": (
        f'%r = "stablehlo.all_reduce"(%a) <{{replica_groups = dense<0> : tensor<1x1xi64>}}> ({{\n{SUM}\n}})'
        f" : ({F}) -> {F}",
        "duplicable",
    ),
    "creates a token": ("%r = stablehlo.create_token : !stablehlo.token", "free duplicable ordered"),
    "passes a token on": (
        f"%r = stablehlo.custom_call @f(%t) {EFFECT} : (!stablehlo.token) -> !stablehlo.token",
        "ordered",
    ),
    "in a branch": (branch(custom_call("f")), ""),
    "all devices in a branch": (branch(f"sdy.sharding_group %a group_id=0 : {F}"), "duplicable"),
    "is not known": (f'%r = "strange.op"(%a) : ({F}) -> {F}', ""),
    "calls a function": (f"%r = func.call @g(%a) : ({F}) -> {F}", ""),
    "calls what computes": (f"%r = func.call @g(%a) {{mpmd.pure}} : ({F}) -> {F}", "free duplicable movable"),
    "calls what may be done twice": (
        f"%r = func.call @g(%a) {{mpmd.duplicable}} : ({F}) -> {F}",
        "duplicable",
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_what_may_be_done_to_an_op(name):
    text, allowed = OPS[name]
    given = f"%a: {F}, %p: tensor<i1>, %k: tensor<2xui64>, %n: tensor<1xi64>, %t: !stablehlo.token"
    module = ir.parse(f"func.func private @g({F}) -> {F}\nfunc.func @main({given}) {{\n{text}\nreturn\n}}")
    (op,) = ir.ops(ir.symbol_table(module)["main"])
    answers = {
        "free": ir.is_side_effect_free(op),
        "duplicable": ir.is_duplicable(op),
        "movable": ir.is_movable(op),
        "ordered": ir.is_ordered(op),
    }
    assert [answer for answer, holds in answers.items() if holds] == allowed.split()
    assert ir.is_trivially_dead(op) == answers["free"]


def test_a_used_op_is_not_dead_and_a_constraint_only_where_nothing_else_uses_its_operand():
    module = ir.parse(
        f"""sdy.mesh @m = <["x"=2]>
        func.func @main(%a: {F}, %b: {F}) -> {F} {{
          %0 = sdy.sharding_constraint %a <@m, []> : {F}
          %1 = sdy.sharding_constraint %b <@m, []> : {F}
          %2 = stablehlo.negate %b : {F}
          return %2 : {F}
        }}"""
    )
    alone, beside, used = ir.ops(ir.symbol_table(module)["main"])
    assert [ir.is_trivially_dead(op) for op in (alone, beside, used)] == [True, False, False]
