"""A program with whole arrays and shardings, and the same on each device; the evaluator runs both."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from mpmd.compile.backends.native_cpu.target import NativeCpu
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.hlo import parse_module, verify
from mpmd.compile.passes.collectives.spmd_partitioner import (
    SpmdPartitioner,
    Stride,
    common_mesh,
    parse_sharding,
)
from mpmd.errors import CompileError
from tests.support.hlo_meaning import evaluate, evaluate_devices
from tests.support.native_hlo import fragment_of_module

STEPS = Path(__file__).parents[5] / "../shared/conformance/hlo"
SUM = "sum {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT s = add(a, b)\n}"
LOOP = """less {
  t = (s32[], f32[8,4]) parameter(0)
  i = get-tuple-element(t), index=0
  n = s32[] constant(3)
  ROOT r = compare(i, n), direction=LT
}
step {
  t = (s32[], f32[8,4]) parameter(0)
  i = get-tuple-element(t), index=0
  x = get-tuple-element(t), index=1
  one = s32[] constant(1)
  j = add(i, one)
  y = multiply(x, x)
  ROOT r = tuple(j, y)
}"""
ROWS, COLUMNS = "{devices=[8,1]<=[8]}", "{devices=[1,8]<=[8]}"
SQUARE, CROSSED = "{devices=[2,4]<=[8]}", "{devices=[4,2]<=[2,4]T(1,0)}"
PAIRS = "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"
LISTED = "{devices=[2,1,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}"


def module(*lines: str, before: str = "", devices: int = 8) -> str:
    header = f"HloModule m, num_partitions={devices}"
    return "\n".join([header, before, "ENTRY e {", *(f"  {line}" for line in lines), "}", ""])


def parameter(name: str, shape: str, number: int, sharding: str = "") -> str:
    return f"{name} = {shape} parameter({number})" + (f", sharding={sharding}" if sharding else "")


PROGRAMS = {
    "contraction": module(
        parameter("x", "f32[8,16]", 0, COLUMNS),
        parameter("w", "f32[16,8]", 1, ROWS),
        "ROOT d = dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, sharding={replicated}",
    ),
    "two dims": module(
        parameter("x", "f32[8,16]", 0, SQUARE),
        parameter("w", "f32[16,8]", 1, CROSSED),
        f"ROOT d = dot(x, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, sharding={SQUARE}",
    ),
    "constraint": module(
        parameter("x", "f32[8,16]", 0, ROWS),
        f'c = f32[8,16] custom-call(x), custom_call_target="Sharding", sharding={COLUMNS}',
        "n = negate(c)",
        f"ROOT t = transpose(n), dimensions={{1,0}}, sharding={ROWS}",
    ),
    "partly whole": module(
        parameter("x", "f32[8,4]", 0, PAIRS),
        parameter("y", "f32[8,4]", 1, LISTED),
        f"ROOT a = add(x, y), sharding={PAIRS}",
    ),
    "several results": module(
        parameter("x", "f32[8,4]", 0, ROWS),
        "z = f32[] constant(0)",
        "r = reduce(x, z), dimensions={0}, to_apply=sum",
        f"ROOT t = tuple(r, x), sharding={{{{replicated}}, {ROWS}}}",
        before=SUM,
    ),
    "loop": module(
        parameter("x", "f32[8,4]", 0, ROWS),
        "zero = s32[] constant(0)",
        "s = tuple(zero, x)",
        "w = while(s), condition=less, body=step",
        "y = get-tuple-element(w), index=1",
        f"ROOT n = negate(y), sharding={ROWS}",
        before=LOOP,
    ),
    "rows of a table": module(
        parameter("x", "f32[16,4]", 0, "{devices=[8,1]<=[8]}"),
        "i = s32[3] constant({1,7,14})",
        "ROOT g = gather(x, i), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, "
        "index_vector_dim=1, slice_sizes={1,4}, sharding={replicated}",
    ),
    "largest": module(
        parameter("x", "f32[8,6]", 0, ROWS),
        "k = (f32[8,2], s32[8,2]) topk(x), k=2, largest=true",
        f"ROOT v = get-tuple-element(k), index=0, sharding={ROWS}",
    ),
    "nothing sharded": module(parameter("x", "f32[8,4]", 0), "ROOT n = negate(x)"),
}


def parts(array: np.ndarray, sharding: str, devices: int) -> list[np.ndarray]:
    """What each device has of an array, by the definition of shardings."""
    found = re.match(r"\{devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))", sharding)
    if found is None:
        return [array] * devices
    tiles = [int(n) for n in found[1].split(",")]
    if found[4]:
        ids = np.array([int(n) for n in found[4].split(",")])
    else:
        dims = [int(n) for n in found[2].split(",")]
        order = [int(n) for n in found[3].split(",")] if found[3] else range(len(dims))
        ids = np.arange(devices).reshape(dims).transpose(order)
    grid = ids.reshape(tiles)
    out = []
    for device in range(devices):
        place = np.argwhere(grid == device)[0][: array.ndim]
        sizes = [n // t for n, t in zip(array.shape, tiles)]
        out.append(array[tuple(slice(p * s, (p + 1) * s) for p, s in zip(place, sizes))])
    return out


def shardings_of(text: str, count: int) -> list[str]:
    """The shardings of the results."""
    found = re.search(r"ROOT .*sharding=(\{.*\})", text)
    if found is None:
        return [""] * count
    inner = re.findall(r"\{[^{}]+\}", found[1])
    return inner if len(inner) == count else [found[1]] * count


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_devices_together_compute_the_program(name):
    text, devices = PROGRAMS[name], 8
    whole = parse_module(text)
    rng = np.random.default_rng(3)
    given = [rng.integers(-3, 4, p.shape.dims).astype(np.float32) for p in whole.entry.parameters]
    shards = [parts(a, p.sharding, devices) for a, p in zip(given, whole.entry.parameters)]
    wanted = jax.tree.leaves(evaluate(whole, given))
    local = parse_module(text)
    assert SpmdPartitioner().run(local)
    verify(local)
    results = evaluate_devices(local, [list(row) for row in zip(*shards)])
    for k, sharding in enumerate(shardings_of(text, len(wanted))):
        expected = parts(wanted[k], sharding, devices)
        for device in range(devices):
            np.testing.assert_array_equal(jax.tree.leaves(results[device])[k], expected[device])


def test_one_device_has_nothing_to_partition():
    assert not SpmdPartitioner().run(parse_module(module("ROOT x = f32[2] parameter(0)", devices=1)))


@pytest.mark.parametrize(
    ("sharding", "tiling"),
    [
        ("{replicated}", ()),
        ("", ()),
        ("{devices=[8,1]<=[8]}", ((Stride(1, 8),), ())),
        (SQUARE, ((Stride(4, 2),), (Stride(1, 4),))),
        (CROSSED, ((Stride(1, 4),), (Stride(4, 2),))),
        ("{devices=[8]<=[2,4]T(1,0)}", ((Stride(1, 4), Stride(4, 2)),)),
        (LISTED, ((Stride(1, 2),), ())),
        ("{devices=[2,4]<=[8] last_tile_dims={replicated}}", ((Stride(4, 2),),)),
    ],
)
def test_shardings_are_strides_of_devices(sharding, tiling):
    assert parse_sharding(sharding, 8) == tiling


def test_one_mesh_has_the_axes_of_all_shardings():
    tilings = [parse_sharding(text, 8) for text in (SQUARE, PAIRS, ROWS)]
    assert list(common_mesh(tilings, 8).values()) == [2, 2, 2]
    with pytest.raises(CompileError, match="6 devices in ways that have no mesh in common"):
        common_mesh([((Stride(1, 2),),), ((Stride(1, 3),),)], 6)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (parameter("x", "f32[8,4]", 0, "{maximal device=3}"), "takes tiled and replicated values"),
        (parameter("x", "f32[8,4]", 0, "{manual}"), "takes tiled and replicated values"),
        (parameter("x", "f32[6,4]", 0, ROWS), "dim 0 of parameter 0, .* does not divide into 8 equal parts"),
        (parameter("x", "f32[8,4]", 0, "{devices=[4,1]<=[4]}"), "is not over the 8 devices"),
        (parameter("x", "f32[8,4]", 0, "{devices=[8,1]0,1,2,3,4,5,7,6}"), "is not a tiling of a mesh"),
        (parameter("x", "f32[8,4]", 0, "{devices=[8]<=[8]}"), "has 1 dims, its shape is"),
    ],
    ids=[
        "a single device", "parts that the program has made", "a dim that does not divide", "other devices",
        "no steps", "too few dims",
    ],
)  # fmt: skip
def test_what_cannot_be_partitioned_is_refused(line, problem):
    with pytest.raises(CompileError, match=problem):
        SpmdPartitioner().run(parse_module(module(line, "ROOT n = negate(x)")))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["llama3_8b", "mixtral_8x7b", "mlp_mixer", "vit"])
def test_whole_training_steps_have_native_code(name):
    """Without memory for their arrays: nothing runs."""
    path = STEPS / f"{name}_train_step.txt.gz"
    if not path.exists():
        pytest.skip("the training steps are not here")
    step = parse_module(gzip.decompress(path.read_bytes()).decode())
    devices = step.num_partitions
    assert SpmdPartitioner().run(step) is (devices > 1)
    verify(step)
    axes = {"d": devices} if devices > 1 else None
    assert (
        prepare_fragment(fragment_of_module(step), NativeCpu(), module=step, axes=axes).compiled().code.code
    )
