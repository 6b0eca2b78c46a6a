"""The evaluator: what XLA leaves open or does not run, and what several devices do together."""

import ml_dtypes
import numpy as np
import pytest

from mpmd.compile.hlo import parse_module
from mpmd.compile.hlo.evaluator.values import convert, narrow
from mpmd.compile.hlo.opcodes import OPCODES
from mpmd.errors import HloError
from tests.support.hlo_meaning import evaluate, evaluate_devices
from tests.support.hlo_meaning.meaning import Meaning
from tests.support.hlo_meaning.rounding import reduce_precision

SUM = """sum {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT z = f32[] add(x, y)
}
"""


def run(*lines: str, arguments=(), before: str = ""):
    text = "\n".join(["HloModule m", before, "ENTRY main {", *(f"  {line}" for line in lines), "}"])
    return evaluate(parse_module(text), list(arguments))


def test_every_opcode_has_a_rule():
    assert [o for o in OPCODES if o not in {*Meaning.rules, *Meaning.joint_rules, "parameter"}] == []


@pytest.mark.parametrize(
    ("opcode", "a", "b", "expected"),
    [
        ("divide", [7, -7, 5, -128], [2, 2, 0, -1], [3, -3, -1, -128]),
        ("remainder", [7, -7, 5, -128], [2, 2, 0, -1], [1, -1, 5, 0]),
        ("power", [2, -1, 0, 3], [-1, -3, -1, 5], [0, -1, 0, -13]),
        ("power", [3, -3, -2, 5], [127, 127, 127, 0], [-85, 85, 0, 1]),
        ("add", [127, -128, 1, 0], [1, -1, 1, 0], [-128, 127, 2, 0]),
        ("shift-left", [1, 1, 1, -1], [7, 8, -1, 1], [-128, 0, 0, -2]),
        ("shift-right-arithmetic", [-128, -128, 64, -1], [7, 9, 9, -1], [-1, -1, 0, -1]),
        ("shift-right-logical", [-128, -128, -1, 64], [7, 8, 1, 1], [1, 0, 127, 32]),
    ],
)
def test_integers_at_the_edges(opcode, a, b, expected):
    lines = ["a = s8[4]{0} parameter(0)", "b = s8[4]{0} parameter(1)", f"ROOT r = s8[4]{{0}} {opcode}(a, b)"]
    result = run(*lines, arguments=[np.array(a, np.int8), np.array(b, np.int8)])
    np.testing.assert_array_equal(result, np.array(expected, np.int8))


def test_powers_of_wide_integers_keep_all_bits():
    lines = ["a = u64[2]{0} parameter(0)", "b = u64[2]{0} parameter(1)", "ROOT r = u64[2]{0} power(a, b)"]
    result = run(*lines, arguments=[np.array([7, 3], np.uint64), np.array([22, 41], np.uint64)])
    np.testing.assert_array_equal(result, np.array([7**22, 3**41 % 2**64], np.uint64))


def test_unsigned_division_by_zero_gives_all_ones():
    lines = ["a = u8[2]{0} parameter(0)", "z = u8[2]{0} constant({0, 0})", "ROOT r = u8[2]{0} divide(a, z)"]
    np.testing.assert_array_equal(run(*lines, arguments=[np.array([5, 0], np.uint8)]), [255, 255])


def test_floats_to_integers_saturate():
    values = np.array([np.nan, np.inf, -np.inf, 300.7, -300.7, 2.9, -2.9, 127.99], np.float32)
    np.testing.assert_array_equal(convert(values, "f32", "s8"), [0, 127, -128, 127, -128, 2, -2, 127])
    np.testing.assert_array_equal(convert(values, "f32", "u8"), [0, 255, 0, 255, 0, 2, 0, 127])
    edges = np.array([9.3e18, -9.3e18, 2.0**62], np.float64)
    np.testing.assert_array_equal(convert(edges, "f64", "s64"), [2**63 - 1, -(2**63), 2**62])
    np.testing.assert_array_equal(convert(np.array([-8, 9], np.int32), "s32", "s4").astype(int), [-8, -7])


def test_one_rounding_from_f64_to_narrow_floats():
    above_tie = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8 - 2.0**-40], np.float64)
    np.testing.assert_array_equal(narrow(above_tie, "bf16").astype(np.float64), [1 + 2.0**-7, 1.0])
    assert narrow(np.float64(1 + 2.0**-8), "bf16").astype(np.float64) == 1.0


def test_reduce_precision_overflows_and_flushes():
    values = np.array([65520.0, 65519.0, 6e-5, 1 + 2.0**-11, np.nan, -np.inf], np.float32)
    rounded = reduce_precision(values, "f32", 5, 10)
    np.testing.assert_array_equal(rounded, np.array([np.inf, 65504, 0, 1, np.nan, -np.inf], np.float32))


def test_total_order_and_nan():
    values = np.array([np.nan, -np.nan, 0.0, -0.0, np.inf], np.float32)
    order = run(
        "a = f32[5]{0} parameter(0)",
        "ROOT s = f32[5]{0} sort(a), dimensions={0}, is_stable=true, to_apply=less",
        arguments=[values],
        before="""less {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT l = pred[] compare(x, y), direction=LT, type=TOTALORDER
}""",
    )
    np.testing.assert_array_equal(np.signbit(order), [True, True, False, False, False])
    np.testing.assert_array_equal(np.isnan(order), [True, False, False, False, True])


def test_fusions_and_bitcasts_follow_the_layout():
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    result = run(
        "a = f32[2,3]{0,1} parameter(0)",
        "ROOT f = f32[6]{0} fusion(a), kind=kLoop, calls=fused",
        arguments=[value],
        before="""fused {
  p = f32[2,3]{0,1} parameter(0)
  ROOT b = f32[6]{0} bitcast(p)
}""",
    )
    np.testing.assert_array_equal(result, value.T.reshape(-1))


def test_empty_arrays():
    total = run("a = f32[0,3]{1,0} parameter(0)", "z = f32[] constant(5)",
                "ROOT r = f32[3]{0} reduce(a, z), dimensions={0}, to_apply=sum",
                arguments=[np.zeros((0, 3), np.float32)], before=SUM)  # fmt: skip
    np.testing.assert_array_equal(total, [5, 5, 5])
    product = run("a = f32[2,0]{1,0} parameter(0)", "b = f32[0,3]{1,0} parameter(1)",
                  "ROOT r = f32[2,3]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
                  arguments=[np.zeros((2, 0), np.float32), np.zeros((0, 3), np.float32)])  # fmt: skip
    np.testing.assert_array_equal(product, np.zeros((2, 3)))


def test_reductions_in_bf16_round_once():
    ones = np.full(1000, 1.0, ml_dtypes.bfloat16)
    result = run("a = bf16[1000]{0} parameter(0)", "z = bf16[] constant(0)",
                 "ROOT r = bf16[] reduce(a, z), dimensions={0}, to_apply=sum16",
                 arguments=[ones], before=SUM.replace("f32", "bf16").replace("sum", "sum16"))  # fmt: skip
    assert float(result) == 1000.0


def test_reducers_that_are_no_single_operation():
    body = """f {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  h = f32[] constant(0.5)
  m = f32[] multiply(x, h)
  ROOT z = f32[] add(m, y)
}"""
    result = run("a = f32[3]{0} constant({1, 2, 4})", "z = f32[] constant(0)",
                 "ROOT r = f32[] reduce(a, z), dimensions={0}, to_apply=f", before=body)  # fmt: skip
    assert float(result) == 1 / 4 + 2 / 2 + 4


def test_reducers_with_control_flow_run_element_by_element():
    body = """t {
  q = f32[] parameter(0)
  ROOT n = f32[] negate(q)
}
u {
  ROOT q = f32[] parameter(0)
}
f {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  g = pred[] compare(y, x), direction=GT
  c = f32[] conditional(g, y, y), true_computation=t, false_computation=u
  ROOT z = f32[] add(x, c)
}"""
    result = run("a = f32[2,3]{1,0} constant({{1, 0, 4},{-1, 3, 1}})", "z = f32[] constant(0)",
                 "ROOT r = f32[2]{0} reduce(a, z), dimensions={1}, to_apply=f", before=body)  # fmt: skip
    np.testing.assert_array_equal(result, [-5, -5])


# -- several devices --------------------------------------------------------------------------------


def together(line: str, values, partitions=4, before=SUM, shape="f32[4]{0}"):
    text = (
        f"HloModule m, num_partitions={partitions}\n{before}\nENTRY e "
        f"{{\n  p = {shape} parameter(0)\n  ROOT r = {line}\n}}"
    )
    return evaluate_devices(parse_module(text), [[v] for v in values])


FOUR = [np.arange(4, dtype=np.float32) + 10 * d for d in range(4)]
GLOBAL = "channel_id=1, use_global_device_ids=true"


def test_all_reduce_by_groups():
    line = f"f32[4]{{0}} all-reduce(p), {GLOBAL}, replica_groups={{{{0,2}},{{1,3}}}}, to_apply=sum"
    results = together(line, FOUR)
    for device, partner in ((0, 2), (1, 3), (2, 0), (3, 1)):
        np.testing.assert_array_equal(results[device], FOUR[device] + FOUR[partner])


def test_all_gather_keeps_the_order_of_the_group():
    line = f"f32[8]{{0}} all-gather(p), {GLOBAL}, replica_groups={{{{2,0}},{{1,3}}}}, dimensions={{0}}"
    results = together(line, FOUR)
    np.testing.assert_array_equal(results[0], np.concatenate([FOUR[2], FOUR[0]]))
    np.testing.assert_array_equal(results[3], np.concatenate([FOUR[1], FOUR[3]]))


def test_reduce_scatter_gives_each_member_its_part():
    line = (
        f"f32[1]{{0}} reduce-scatter(p), {GLOBAL}, replica_groups=[1,4]<=[4], dimensions={{0}}, to_apply=sum"
    )
    results = together(line, FOUR)
    np.testing.assert_array_equal(np.concatenate(results), sum(FOUR))


def test_all_to_all_exchanges_parts():
    line = "f32[4]{0} all-to-all(p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}"
    results = together(line, FOUR)
    np.testing.assert_array_equal(np.stack(results), np.stack(FOUR).T)


def test_collective_permute_leaves_zeros():
    line = "f32[4]{0} collective-permute(p), channel_id=1, source_target_pairs={{0,1},{1,3}}"
    results = together(line, FOUR)
    np.testing.assert_array_equal(results[3], FOUR[1])
    np.testing.assert_array_equal(results[0], np.zeros(4))


def test_partition_ids_and_branches_per_device():
    text = """HloModule m, num_partitions=2
one {
  ROOT a = f32[] parameter(0)
}
two {
  b = f32[] parameter(0)
  ROOT n = f32[] negate(b)
}
ENTRY e {
  p = f32[] parameter(0)
  i = u32[] partition-id()
  s = s32[] convert(i)
  ROOT c = f32[] conditional(s, p, p), branch_computations={one, two}
}"""
    results = evaluate_devices(parse_module(text), [[np.float32(3)], [np.float32(4)]])
    assert [float(r) for r in results] == [3.0, -4.0]


def test_loops_run_as_long_as_each_device_wants():
    text = """HloModule m, num_partitions=2
more {
  s = (s32[], s32[]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] get-tuple-element(s), index=1
  ROOT l = pred[] compare(i, n), direction=LT
}
step {
  s = (s32[], s32[]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] get-tuple-element(s), index=1
  o = s32[] constant(2)
  j = s32[] add(i, o)
  ROOT t = (s32[], s32[]) tuple(j, n)
}
ENTRY e {
  n = s32[] parameter(0)
  z = s32[] constant(0)
  t = (s32[], s32[]) tuple(z, n)
  w = (s32[], s32[]) while(t), condition=more, body=step
  ROOT i = s32[] get-tuple-element(w), index=0
}"""
    results = evaluate_devices(parse_module(text), [[np.int32(3)], [np.int32(7)]])
    assert [int(r) for r in results] == [4, 8]


def test_devices_that_wait_in_vain_are_named():
    text = f"""HloModule m, num_partitions=2
{SUM}
yes {{
  a = f32[] parameter(0)
  ROOT r = f32[] all-reduce(a), {GLOBAL}, replica_groups={{{{0,1}}}}, to_apply=sum
}}
no {{
  ROOT b = f32[] parameter(0)
}}
ENTRY e {{
  p = f32[] parameter(0)
  g = pred[] parameter(1)
  ROOT c = f32[] conditional(g, p, p), true_computation=yes, false_computation=no
}}"""
    rows = [[np.float32(1), np.bool_(True)], [np.float32(1), np.bool_(False)]]
    with pytest.raises(HloError, match=r"r: devices \[0\] wait for \[1\], which took another branch"):
        evaluate_devices(parse_module(text), rows)


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "arguments", "problem"),
    [
        (["ROOT a = f32[2]{0} parameter(0)"], [], "main takes 1 arguments, got 0"),
        (
            ["ROOT a = f32[2]{0} parameter(0)"],
            [np.zeros(3, np.float32)],
            r"argument 0 of main must be f32\[2\], got array",
        ),
        (["ROOT a = f32[2]{0} parameter(0)"], [np.zeros(2)], r"must be f32\[2\], got array float64\[2\]"),
        (
            ['ROOT a = f32[] custom-call(), custom_call_target="mystery"'],
            [],
            "custom call 'mystery' has no meaning here",
        ),
        (
            ["t = token[] after-all()", "ROOT i = (f32[], token[]) infeed(t)"],
            [],
            "infeed i cannot be evaluated: it reads",
        ),
    ],
)
def test_refusals(lines, arguments, problem):
    with pytest.raises(HloError, match=problem):
        run(*lines, arguments=arguments)


def test_number_of_devices_must_fit():
    module = parse_module("HloModule m, num_partitions=4\nENTRY e {\n  ROOT a = f32[] parameter(0)\n}")
    with pytest.raises(HloError, match="m has 1 replicas x 4 partitions, but arguments for 2 devices"):
        evaluate_devices(module, [[np.float32(1)], [np.float32(1)]])
