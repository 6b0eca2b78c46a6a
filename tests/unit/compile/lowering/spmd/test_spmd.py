"""From whole programs to devices' programs: what is communicated, who has what, and what is refused."""

from __future__ import annotations

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mpmd.compile.hlo import print_module
from mpmd.compile.hlo.shape import array
from mpmd.compile.lowering import lower_for_mesh
from mpmd.compile.lowering.reader import sharding_axes
from mpmd.compile.lowering.spmd.moves import even, groups, local, place
from mpmd.compile.lowering.stablehlo_program import Axis
from mpmd.compile.passes.simplify.redundancy import Dce
from mpmd.errors import CompileError
from tests.support.meshes import evaluated, part, partitioned
from tests.support.native_meshes import mesh_of

X, W, TABLE = np.ones((8, 4), np.float32), np.ones((4, 8), np.float32), np.ones((16, 4), np.float32)
ROWS, COLUMNS, WHOLE = [["x"], []], [[], ["x"]], [[], []]
TOKENS = np.zeros((8, 2), np.int32)
DISTINCT = np.arange(8, dtype=np.float32).reshape(4, 2)


def rows_of(table, indices):
    """Rows of a table, the nearest for an index that is out of range."""
    dims = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))
    return jax.lax.gather(table, indices[:, None], dims, (1, 2), mode="clip")


def communication(function, arguments, given, wanted, axes=None):
    """How many collectives of each kind a function needs."""
    module = partitioned(function, arguments, axes or {"x": 2}, given, wanted)
    Dce().run(module)
    kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    return Counter(i.opcode for c in module.call_order() for i in c if i.opcode in kinds)


@pytest.mark.parametrize(
    ("function", "arguments", "given", "wanted", "needed"),
    [
        (lambda x, w: jnp.tanh(x @ w), (X, W), (ROWS, WHOLE), (ROWS,), {}),
        (lambda x, w: jnp.tanh(x @ w), (X, W), (WHOLE, COLUMNS), (COLUMNS,), {}),
        (lambda x, w: x @ w, (X, W), (COLUMNS, ROWS), (WHOLE,), {"all-reduce": 1}),
        (lambda x: jax.nn.softmax(x), (X,), (ROWS,), (ROWS,), {}),
        (lambda x: jax.nn.softmax(x), (X,), (COLUMNS,), (COLUMNS,), {"all-reduce": 2}),
        (lambda x: jax.nn.gelu(x, approximate=False), (X,), (ROWS,), (ROWS,), {}),
        (lambda e, t: e[t], (TABLE, TOKENS), (ROWS, WHOLE), ([[], [], []],), {"all-reduce": 1}),
        (lambda e, t: e[t], (TABLE, TOKENS), (WHOLE, ROWS), ([["x"], [], []],), {}),
        (lambda e, t: e.at[t].add(1.0), (TABLE, TOKENS), (ROWS, WHOLE), (ROWS,), {}),
        (lambda e, t: e.at[t].add(1.0), (TABLE, TOKENS), (WHOLE, ROWS), (WHOLE,), {"all-reduce": 1}),
        (lambda x: jax.lax.top_k(x, 2)[0], (X,), (ROWS,), (ROWS,), {}),
        (lambda x: jnp.tril(jnp.ones((8, 4))) * x, (X,), (ROWS,), (ROWS,), {}),
        (lambda x: x.reshape(2, 4, 4), (X,), (ROWS,), ([["x"], [], []],), {}),
        (lambda x, w: jax.lax.optimization_barrier((x, w)), (X, W), (ROWS, WHOLE), (ROWS, WHOLE), {}),
        (lambda x: x * 2, (X,), (ROWS,), (COLUMNS,), {"all-to-all": 1}),
        (lambda x: x * 2, (X,), (ROWS,), (WHOLE,), {"all-gather": 1}),
        (lambda x: x * 2, (X,), (WHOLE,), (ROWS,), {}),
    ],
)
def test_no_more_communication_than_needed(function, arguments, given, wanted, needed):
    assert communication(function, arguments, given, wanted) == needed


def test_an_order_of_axes_changes_by_a_permutation():
    before, after = [["x", "y"], []], [["y", "x"], []]
    found = communication(lambda x: x * 2, (X,), (before,), (after,), {"x": 2, "y": 2})
    assert found == {"collective-permute": 1}


def test_axes_and_parts_of_axes():
    axes = {"x": 2, "y": 4, "z": 3}
    assert sharding_axes('{"x", "y"}', axes) == (Axis(12, 2), Axis(3, 4))
    assert sharding_axes('{"y":(1)2, ?}', axes) == (Axis(6, 2),)
    assert sharding_axes('{"y":(2)2}p1', axes) == (Axis(3, 2),)
    assert sharding_axes("{}", axes) == ()


def test_groups_are_in_the_order_of_the_parts():
    x, y = Axis(2, 2), Axis(1, 2)
    assert groups((x,), 4) == ((0, 2), (1, 3))
    assert groups((y, x), 4) == ((0, 2, 1, 3),)
    assert [place((y, x), d) for d in range(4)] == [0, 2, 1, 3]


def test_dims_that_do_not_divide_stay_whole():
    cut = ((Axis(1, 4),), (Axis(4, 2),))
    assert even(array("f32", (6, 4)), cut) == ((), (Axis(4, 2),))
    assert local(array("f32", (8, 4)), cut).dims == (2, 2)


def test_a_device_has_its_part_of_a_constant():
    table = np.arange(16, dtype=np.float32).reshape(8, 2)
    module = partitioned(lambda x: x + table, (table,), {"x": 2}, [ROWS], [ROWS])
    assert re.search(r"f32\[4,2\]\S* dynamic-slice", print_module(module))


def test_a_shard_map_returns_what_it_is_given_in_other_parts():
    """One value of a device is a part of several whole ones, and stays what it was outside."""
    axes = {"x": 2}

    def local_part(x):
        doubled = 2 * x
        return x, x, doubled, doubled

    outs = (P("x"), P(None, "x"), P("x"), P())
    mapped = jax.shard_map(local_part, mesh=mesh_of(axes), in_specs=P(), out_specs=outs, check_vma=False)

    def step(x):
        high, wide, twice, once = mapped(x + 1)
        return high.sum(0) + (x + 1).sum(0), wide * 3, twice + 1, once - x

    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    wanted = (3 * (x + 1).sum(0), np.hstack([x + 1] * 2) * 3, np.vstack([2 * x + 2] * 2) + 1, x + 2)
    specs = [[[]], COLUMNS, ROWS, WHOLE]
    found = evaluated(partitioned(step, (x,), axes, [WHOLE], specs), (x,), axes, [WHOLE])
    for device, results in enumerate(found):
        for got, want, spec in zip(results, wanted, specs, strict=True):
            assert (got == part(want, spec, axes, device)).all()


def text_on(mesh, body="return %a : tensor<4xf32>"):
    return (
        f"sdy.mesh @m = {mesh}\nfunc.func public @main(%a: tensor<4xf32> "
        f"{{sdy.sharding = #sdy.sharding<@m, [{{}}]>}}) -> tensor<4xf32> {{\n  {body}\n}}"
    )


def test_a_program_of_another_mesh_is_refused():
    with pytest.raises(CompileError, match=r"values on #sdy.mesh<\[\"y\"=2\]>; its devices are a mesh of"):
        lower_for_mesh(text_on('<["y"=2]>'), {"x": 2}, [[["x"]]], [[[]]])


def test_a_sum_of_nothing_partial_is_refused():
    body = '%b = sdy.all_reduce {"x"} %a out_sharding=<@m, [{}]> : tensor<4xf32>\n  return %b : tensor<4xf32>'
    with pytest.raises(CompileError, match="does not follow an operation with partial results"):
        lower_for_mesh(text_on('<["x"=2]>', body), {"x": 2}, [[[]]], [[[]]])


def test_what_shardy_cannot_do_is_said():
    with pytest.raises(CompileError, match="Shardy cannot partition the fragment"):
        lower_for_mesh(text_on('<["x"=2]>'), {"x": 2}, [[["z"]]], [[[]]])


def differing(function, arguments, given, wanted, axes=None):
    """Devices with other bits than their part of what the whole function computes."""
    axes = axes or {"x": 2}
    whole = np.asarray(jax.jit(function)(*arguments))
    found = evaluated(partitioned(function, arguments, axes, given, [wanted]), arguments, axes, given)
    parts = (part(whole, wanted, axes, device) for device in range(len(found)))
    return [d for d, (want, (got,)) in enumerate(zip(parts, found)) if got.tobytes() != want.tobytes()]


def test_a_count_is_rounded_once_to_a_narrow_type():
    zeros = np.zeros(4096, jnp.bfloat16)
    count = lambda x: x + jax.lax.iota(jnp.bfloat16, 4096)  # noqa: E731
    assert differing(count, (zeros,), [[["x"]]], [["x"]]) == []


@pytest.mark.parametrize("dtype", ["uint32", "uint8", "int32", "int8"])
def test_an_index_out_of_range_means_the_row_that_is_nearest_in_its_own_type(dtype):
    ends = np.iinfo(dtype)
    indices = np.array([0, ends.max, ends.min, 3], dtype)
    assert differing(rows_of, (DISTINCT, indices), [ROWS, [[]]], WHOLE) == []


@pytest.mark.parametrize("cut", [[ROWS, [[]]], [WHOLE, [["x"]]]], ids=["rows", "indices"])
def test_a_zero_keeps_its_sign_where_a_row_is_read_or_added_to(cut):
    table, indices = np.full((4, 2), -0.0, np.float32), np.array([0, 3, 9, 1], np.int32)
    nothing = np.full((4, 2), -0.0, np.float32)
    added = lambda t, i, u: t.at[i].add(u, mode="drop")  # noqa: E731
    assert differing(rows_of, (table, indices), cut, WHOLE) == []
    assert differing(added, (table, indices, nothing), [*cut, [*cut[1], []]], WHOLE) == []
