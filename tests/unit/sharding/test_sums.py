"""Programs that add what devices hold: which of them exchange, and what they get."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpmd import ir
from mpmd.compile.hlo import HloModule
from mpmd.compile.lowering import lower_for_mesh
from mpmd.sharding.device_program import Sum, groups, sums
from mpmd.sharding.shardings import innermost, without
from tests.support.hlo_meaning import evaluate_devices
from tests.support.meshes import part

SIZES = {"x": 2, "y": 3, "z": 2}


def test_groups_differ_only_along_the_axes():
    assert groups(["x"], {"x": 2}) == [[0, 1]]
    assert groups(["y"], {"x": 2, "y": 3}) == [[0, 1, 2], [3, 4, 5]]
    assert groups(["x"], {"x": 2, "y": 3}) == [[0, 3], [1, 4], [2, 5]]
    assert groups(["x", "z"], {"x": 2, "y": 2, "z": 2}) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_the_order_of_a_group_is_that_of_its_axes():
    assert groups(["x", "y"], {"x": 2, "y": 2}) == [[0, 1, 2, 3]]
    assert groups(["y", "x"], {"x": 2, "y": 2}) == [[0, 2, 1, 3]]


@pytest.mark.parametrize("axes", [[], ["x"], ["z", "x"], ["x", "y", "z"]])
def test_groups_have_each_device_once(axes):
    found = groups(axes, SIZES)
    assert sorted(itertools.chain(*found)) == list(range(12))
    assert {len(group) for group in found} == {int(np.prod([SIZES[a] for a in axes], dtype=int))}


@pytest.mark.parametrize(
    ("split", "axes", "inner"),
    [
        ((("x",), ()), ["x"], {"x": 0}),
        (((), ("x",)), ["x"], {"x": 1}),
        (((), ()), ["x"], {}),
        ((("y", "x"),), ["x"], {"x": 0}),
        ((("x", "y"),), ["x"], {}),
        ((("x", "y"),), ["x", "y"], {"x": 0, "y": 0}),
        ((("x", "z", "y"),), ["x", "y"], {}),
        ((("x",), ("y",)), ["x", "y"], {"x": 0, "y": 1}),
    ],
)
def test_axes_that_split_within_all_others(split, axes, inner):
    found = innermost(split, axes)
    assert found == inner
    assert list(found) == list(inner)


def test_a_split_without_axes():
    assert without((("x", "y"), (), ("z",)), ["x", "z"]) == (("y",), (), ())


CASES = [
    ([(4, 6)], [((), ())], [("x",)]),
    ([(4, 6)], [(("x",), ())], [("x",)]),
    ([(4, 6)], [((), ("x",))], [("x",)]),
    ([(6, 4)], [(("y",), ("x",))], [("x",)]),
    ([(12, 6)], [(("y", "x"), ())], [("x",)]),
    ([(12, 6)], [(("x", "y"), ())], [("x",)]),
    ([(12, 6)], [(("x", "y"), ())], [("x", "y")]),
    ([(12, 6)], [(("y", "x"), ())], [("x", "y")]),
    ([(4, 6)], [(("z",), ())], [("x", "z")]),
    ([(4, 6)], [((), ("y",))], [("z", "x")]),
    ([(4, 6), (3,), ()], [(("x",), ()), (("y",),), ()], [("x",), ("x", "z"), ("x",)]),
]
"""Shapes of values, how each is split, and along which axes its terms lie."""


@pytest.mark.parametrize(("shapes", "splits", "axes"), CASES)
def test_devices_get_their_parts_of_the_sum(shapes, splits, axes):
    """The program of each device, evaluated in NumPy."""
    kinds = [kind_of(shape, split) for shape, split in zip(shapes, splits)]
    program = sums([Sum(kind, (tuple(along),)) for kind, along in zip(kinds, axes)], SIZES, "@mesh")
    rng = np.random.default_rng(0)
    counts = [int(np.prod([SIZES[a] for a in along])) for along in axes]
    given = [rng.integers(-9, 9, (n, *shape)).astype(np.float32) for n, shape in zip(counts, shapes)]
    partial = [(tuple(along), *without(split, along)) for split, along in zip(splits, axes)]
    module: HloModule = lower_for_mesh(str(program), SIZES, partial, splits)
    devices = range(12)
    rows = [[part(a, s, SIZES, d) for a, s in zip(given, partial)] for d in devices]
    for d, found in zip(devices, evaluate_devices(module, rows)):
        got = list(found) if isinstance(found, tuple) else [found]
        for value, terms, split in zip(got, given, splits, strict=True):
            np.testing.assert_array_equal(value, part(terms.sum(0), split, SIZES, d))


@pytest.mark.parametrize(
    ("shape", "split", "axes", "kept"),
    [
        ((6, 4), ((), ()), ("x", "y"), ("x",)),
        ((6, 4), (("y",), ()), ("x", "y"), ("x",)),
        ((6, 4), ((), ("z",)), ("z", "x"), ("x",)),
        ((6, 4), (("y",), ("z",)), ("x", "y"), ("x",)),
        ((6, 4), (("y",), ()), ("z", "y", "x"), ("z", "x")),
        ((6, 4), (("z",), ()), ("x", "z", "y"), ("x", "y")),
    ],
)
def test_terms_along_other_axes_stay_apart(shape, split, axes, kept):
    terms = tuple((axis,) for axis in axes)
    counts = [SIZES[axis] for axis in axes]
    at_end = (kept, *split)
    kind = kind_of((int(np.prod([SIZES[axis] for axis in kept])), *shape), at_end)
    program = sums([Sum(kind, terms, kept)], SIZES, "@mesh")
    given = np.random.default_rng(0).integers(-9, 9, (*counts, *shape)).astype(np.float32)
    at_start = (*terms, *without(split, axes))
    module: HloModule = lower_for_mesh(str(program), SIZES, [at_start], [at_end])
    rows = [[part(given, at_start, SIZES, d)] for d in range(12)]
    wanted = given.sum(tuple(i for i, axis in enumerate(axes) if axis not in kept)).reshape(kind.shape)
    for d, value in enumerate(evaluate_devices(module, rows)):
        np.testing.assert_array_equal(value, part(wanted, at_end, SIZES, d))


def kind_of(shape: tuple[int, ...], split: tuple[tuple[str, ...], ...]) -> ir.MeshTensor:
    dims = ", ".join("{" + ", ".join(f'"{axis}"' for axis in dim) + "}" for dim in split)
    tensor = f"tensor<{''.join(f'{n}x' for n in shape)}f32>"
    text = f'!mpmd.mesh_tensor<"m", {tensor}, sharding=<@mesh, [{dims}]>>'
    with ir.context():
        kind = ir.Type.parse(text)
    assert isinstance(kind, ir.MeshTensor)
    return kind
