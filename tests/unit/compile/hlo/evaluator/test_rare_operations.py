"""Operations that random programs do not reach: each against its definition."""

import numpy as np
import pytest

from mpmd.compile.hlo import parse_module, verify
from mpmd.errors import HloError
from tests.support.hlo_meaning import evaluate, evaluate_devices
from tests.support.xla_hlo import XlaWorker


def run(*lines: str, arguments=(), before: str = ""):
    text = "\n".join(["HloModule m", before, "ENTRY main {", *(f"  {line}" for line in lines), "}"])
    module = parse_module(text)
    verify(module)
    return evaluate(module, list(arguments))


@pytest.mark.parametrize(("dtype", "bits"), [("s32", 32), ("u32", 32), ("s8", 8), ("u64", 64)])
def test_mulhi_is_the_upper_half_of_the_product(dtype, bits):
    rng = np.random.default_rng(0)
    numpy = np.dtype(f"{'i' if dtype[0] == 's' else 'u'}{bits // 8}")
    a, b = (np.frombuffer(rng.bytes(8 * bits // 8), numpy) for _ in range(2))
    made = run(f"a = {dtype}[8] parameter(0)", f"b = {dtype}[8] parameter(1)", f"r = {dtype}[8] mulhi(a, b)",
               arguments=[a, b])  # fmt: skip
    assert made.tolist() == [(int(x) * int(y)) >> bits for x, y in zip(a, b)]


def test_ragged_dot_multiplies_each_group_by_its_matrix():
    a = np.arange(12, dtype=np.float32).reshape(4, 3)
    b = np.stack([np.eye(3), 2 * np.eye(3)]).astype(np.float32)
    made = run(
        "a = f32[4,3] parameter(0)",
        "b = f32[2,3,3] parameter(1)",
        "g = s32[2] constant({1, 2})",
        "r = f32[4,3] ragged-dot(a, b, g), lhs_contracting_dims={1}, rhs_contracting_dims={1}, "
        "lhs_ragged_dims={0}, "
        "rhs_group_dims={0}",
        arguments=[a, b],
    )
    np.testing.assert_array_equal(made, a * np.array([1, 2, 2, 0])[:, None])


def test_scaled_dot_spreads_scales_over_blocks():
    a, b = np.ones((2, 4), np.float32), np.ones((4, 3), np.float32)
    scales = [np.array([[1, 2], [3, 4]], np.float32), np.ones((1, 3), np.float32)]
    made = run(
        "a = f32[2,4] parameter(0)",
        "b = f32[4,3] parameter(1)",
        "s = f32[2,2] parameter(2)",
        "t = f32[1,3] parameter(3)",
        "r = f32[2,3] scaled-dot(a, b, s, t), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        arguments=[a, b, *scales],
    )
    np.testing.assert_array_equal(made, np.array([[6.0] * 3, [14.0] * 3]))


def test_stochastic_convert_rounds_up_as_often_as_the_fraction_says():
    values = np.full(1000, 2.25, np.float32)
    bits = np.random.default_rng(0).integers(0, 2**32, 1000, dtype=np.uint32)
    lines = [
        "v = f32[1000] parameter(0)",
        "b = u32[1000] parameter(1)",
        "r = s32[1000] stochastic-convert(v, b)",
    ]
    made = run(*lines, arguments=[values, bits])
    assert set(made.tolist()) == {2, 3} and 180 < int((made == 3).sum()) < 320
    np.testing.assert_array_equal(run(*lines, arguments=[-values, bits]), -made)


def test_sizes_of_dims():
    lines = ["a = f32[2,5] parameter(0)", "n = s32[] get-dimension-size(a), dimensions={1}"]
    assert int(run(*lines, arguments=[np.zeros((2, 5), np.float32)])) == 5
    lines = [
        "a = f32[2,5] parameter(0)",
        "n = s32[] constant(3)",
        "r = f32[2,5] set-dimension-size(a, n), dimensions={1}",
    ]
    with pytest.raises(HloError, match="arrays with run-time sizes are not supported: size 3"):
        run(*lines, arguments=[np.zeros((2, 5), np.float32)])


def test_random_values_lie_in_their_distribution():
    lines = [
        "a = f32[] constant(-2)",
        "b = f32[] constant(3)",
        "r = f32[2000] rng(a, b), distribution=rng_uniform",
    ]
    uniform = run(*lines)
    assert uniform.min() >= -2 and uniform.max() < 3 and abs(uniform.mean() - 0.5) < 0.2
    normal = run(lines[0], "b = f32[] constant(1)", "r = f32[2000] rng(a, b), distribution=rng_normal")
    assert abs(normal.mean() + 2) < 0.2 and abs(normal.std() - 1) < 0.1
    whole = run(
        "a = s32[] constant(5)", "b = s32[] constant(8)", "r = s32[100] rng(a, b), distribution=rng_uniform"
    )
    assert set(whole.tolist()) == {5, 6, 7}


def test_the_state_of_the_program_moves_on():
    lines = [
        "a = u64[2] rng-get-and-update-state(), delta=3",
        "b = u64[2] rng-get-and-update-state(), delta=3",
        "t = (u64[2], u64[2]) tuple(a, b)",
    ]
    first, second = run(*lines)
    assert abs(int(second[0]) - int(first[0])) == 3


def test_what_only_orders_or_marks_hands_values_on():
    value = np.arange(3, dtype=np.float32)
    made = run(
        "a = f32[3] parameter(0)",
        "t = token[] after-all()",
        "d = f32[3] add-dependency(a, t)",
        "o = f32[3] opt-barrier(d)",
        "s = (f32[3], f32[3], u32[]) copy-start(o)",
        "c = f32[3] copy-done(s)",
        'p = f32[3] custom-call(c), custom_call_target="annotate_device_placement"',
        arguments=[value],
    )
    np.testing.assert_array_equal(made, value)


def test_custom_calls_with_a_meaning():
    value = np.array([3, 9, 1, 9], np.float32)
    best, places = run(
        "a = f32[4] parameter(0)",
        't = (f32[2], s32[2]) custom-call(a), custom_call_target="TopK"',
        arguments=[value],
    )
    assert best.tolist() == [9, 9] and places.tolist() == [1, 3]


SUM = """sum {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT z = f32[] add(x, y)
}
"""


def on_devices(lines, rows, kind="num_partitions"):
    text = f"HloModule m, {kind}={len(rows)}\n{SUM}\nENTRY e {{\n" + "\n".join(lines) + "\n}"
    module = parse_module(text)
    verify(module)
    return evaluate_devices(module, rows), text


TWO = [[np.arange(4, dtype=np.float32)], [np.arange(4, dtype=np.float32) * 10]]
GLOBAL = "channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true"
GROUPS = "replica_groups={{0,1}}"
SYNCHRONOUS = {
    "all-reduce": [f"ROOT r = f32[4]{{0}} all-reduce(p), {GROUPS}, to_apply=sum"],
    "all-gather": [f"ROOT r = f32[8]{{0}} all-gather(p), {GROUPS}, dimensions={{0}}"],
    "reduce-scatter": [f"ROOT r = f32[2]{{0}} reduce-scatter(p), {GROUPS}, dimensions={{0}}, to_apply=sum"],
    "all-to-all": [f"ROOT r = f32[4]{{0}} all-to-all(p), {GROUPS}, dimensions={{0}}"],
    "collective-permute": ["ROOT r = f32[4]{0} collective-permute(p), source_target_pairs={{0,1}}"],
    "replica-id": [
        "i = u32[] replica-id()",
        "f = f32[] convert(i)",
        "b = f32[4]{0} broadcast(f), dimensions={}",
        "ROOT r = f32[4]{0} add(p, b)",
    ],
}


@pytest.fixture(scope="module")
def two_devices():
    with XlaWorker(devices=2) as worker:
        yield worker


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_collectives_as_xla_runs_them(name, two_devices):
    lines = ["p = f32[4]{0} parameter(0)", *SYNCHRONOUS[name]]
    ours, text = on_devices(lines, TWO, kind="replica_count")
    for mine, theirs in zip(ours, two_devices.run_devices(text, TWO)):
        np.testing.assert_array_equal(mine, theirs[0])


def test_asynchronous_pairs_give_what_the_operation_gives():
    lines = [
        "p = f32[4]{0} parameter(0)",
        f"s = f32[4]{{0}} all-reduce-start(p), {GLOBAL}, to_apply=sum",
        "d = f32[4]{0} all-reduce-done(s)",
        f"g = (f32[4]{{0}}, f32[8]{{0}}) all-gather-start(d), {GLOBAL}, dimensions={{0}}",
        "h = f32[8]{0} all-gather-done(g)",
        "q = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(h), channel_id=2, "
        "source_target_pairs={{0,1},{1,0}}",
        "ROOT r = f32[8]{0} collective-permute-done(q)",
    ]
    results, _ = on_devices(lines, TWO)
    total = TWO[0][0] + TWO[1][0]
    for result in results:
        np.testing.assert_array_equal(result, np.concatenate([total, total]))


def test_broadcast_and_exchange_of_tuples():
    lines = [
        "p = f32[4]{0} parameter(0)",
        "ROOT r = f32[4]{0} collective-broadcast(p), replica_groups={{1,0}}, channel_id=1",
    ]
    results, _ = on_devices(lines, TWO)
    np.testing.assert_array_equal(results[0], TWO[1][0])
    lines = [
        "p = f32[4]{0} parameter(0)",
        "n = f32[4]{0} negate(p)",
        "ROOT r = (f32[4]{0}, f32[4]{0}) all-to-all(p, n), replica_groups={{0,1}}, channel_id=1",
    ]
    results, _ = on_devices(lines, TWO)
    np.testing.assert_array_equal(results[1][0], -TWO[0][0])
    np.testing.assert_array_equal(results[0][1], TWO[1][0])


def test_ragged_exchange():
    lines = [
        "p = f32[4]{0} parameter(0)",
        "o = f32[6]{0} parameter(1)",
        *(f"x{i} = s32[2]{{0}} parameter({i + 2})" for i in range(4)),
        "ROOT r = f32[6]{0} ragged-all-to-all(p, o, x0, x1, x2, x3), replica_groups={{0,1}}, channel_id=1",
    ]

    def row(values, *columns):
        return [values, np.full(6, -1, np.float32), *(np.array(c, np.int32) for c in columns)]

    rows = [
        row(TWO[0][0], [0, 1], [1, 3], [0, 0], [1, 2]),
        row(TWO[1][0], [0, 2], [2, 2], [1, 3], [3, 2]),
    ]
    results, _ = on_devices(lines, rows)
    np.testing.assert_array_equal(results[0], [0, 0, 10, -1, -1, -1])
    np.testing.assert_array_equal(results[1], [1, 2, 3, 20, 30, -1])
