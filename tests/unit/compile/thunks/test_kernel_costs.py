"""What bounds a fragment: its table, its picture, and what a step says of all of them."""

import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.compile.cost.kernel_work import product_workloads
from mpmd.compile.kernels.product_plans import MatmulPlan, View
from mpmd.compile.thunks.program_costs import COMPUTE, MEMORY, cost_plot, fragment_costs
from mpmd.cost.device import HOST
from mpmd.cost.roofline import combined, projected, speed_of_light
from tests.support.native_fragments import compiled, fragment_of
from tests.support.native_functions import Floats
from tests.support.svg_texts import overlaps

floats = Floats()


def costs_of(function, *arguments):
    made = compiled(fragment_of(function, *arguments), poison=False)
    return fragment_costs(made.thunks, made.module, HOST)


def test_products_are_bound_by_computing_and_sums_of_arrays_by_memory():
    found = costs_of(lambda a, b, c: (a @ b, c + 1), floats(256, 256), floats(256, 256), floats(1 << 20))
    product, added = sorted(found.kernels, key=lambda k: -k.flops)
    assert (product.limit, added.limit) == (COMPUTE, MEMORY)
    assert (product.flops, product.bytes) == (2 * 256**3, 3 * 256 * 256 * 4)
    assert (added.flops, added.bytes) == (1 << 20, 2 * (1 << 22))
    assert found.seconds(COMPUTE) == product.seconds
    assert found.seconds(MEMORY) == added.seconds + HOST.call_seconds
    for kernel in found.kernels:
        assert 0 < kernel.light.seconds <= kernel.projection.seconds


def test_sums_that_an_epilogue_takes_are_no_traffic():
    given = floats(128, 64), floats(64, 256), floats(256)
    (alone,) = costs_of(lambda a, b: a @ b, *given[:2]).kernels
    (with_bias,) = costs_of(lambda a, b, c: jnp.maximum(a @ b + c, 0), *given).kernels
    assert with_bias.bytes == alone.bytes + 256 * 4
    assert with_bias.flops == alone.flops + 2 * 128 * 256


def test_attention_counts_no_scores():
    def attention(q, k, v):
        return jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v

    (found,) = costs_of(attention, *(floats(4, 64, 32) for _ in range(3))).kernels
    assert found.bytes == 4 * (4 * 64 * 32 * 4)
    assert found.flops > 4 * 4 * 64 * 64 * 32


def test_loops_count_as_often_as_they_run():
    def function(x):
        return jax.lax.fori_loop(0, 500, lambda i, x: jnp.tanh(x) * i.astype(x.dtype), x)

    found = costs_of(function, floats(4096))
    assert max(found.kernels, key=lambda k: k.flops).times == 500


def test_equal_kernels_share_a_row():
    found = costs_of(lambda a, b, c: (a @ b) @ c, *(floats(64, 64) for _ in range(3)))
    assert [k.times for k in found.kernels] == [2]


def test_the_table_has_every_kernel_and_adds_up():
    found = costs_of(lambda a, b: jax.nn.softmax(a @ b), floats(64, 64), floats(64, 64))
    lines = found.text().splitlines()
    rows = lines[2:-2]
    assert len(rows) == len(found.kernels) + 1 and "the call itself" in rows[-1]
    assert sum(float(line.partition("%")[0]) for line in rows) == pytest.approx(100, abs=0.3)
    assert sum(float(line.partition("%")[0]) for line in lines[-2:]) == pytest.approx(100, abs=0.2)


def test_the_picture_has_a_bar_for_each_kernel():
    found = costs_of(lambda a, b: jax.nn.softmax(a @ b), floats(64, 64), floats(64, 64))
    picture = ElementTree.fromstring(cost_plot(found))
    titles = {t.text.partition(":")[0] for t in picture.iter("{http://www.w3.org/2000/svg}title")}
    assert {k.label for k in found.kernels} | {"the call itself"} <= titles
    assert overlaps(cost_plot(found)) == []


def test_parts_of_a_kernel_start_once():
    (work,) = product_workloads(MatmulPlan("product", (), 64, 64, 64, *[View("f32", 0, 64, 1)] * 3))
    one, two = projected(work, HOST), combined([projected(work, HOST)] * 2, HOST)
    assert two.seconds == pytest.approx(2 * one.seconds - one.start_seconds)
    light = speed_of_light(work, HOST)
    assert combined([light, light], HOST).seconds == pytest.approx(2 * light.seconds)


def test_a_step_says_what_bounds_it():
    first = mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name="first")
    second = mpmd.named_computation(lambda w, x: jnp.mean((x @ w) ** 2), name="second")
    config = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), {"first": "m0", "second": "m1"})
    w, x = np.eye(64, dtype=np.float32), np.ones((32, 64), np.float32)
    made = mpmd.jit(lambda w, x: second(w, first(w, x)), config).compiled(w, x)
    costs, text = made.cost_analysis(), made.as_text("costs")
    fragments = [name for name, e in made.executables.items() if e.backend == "native"]
    assert len(fragments) == 2
    assert costs["transfer seconds"] > 0
    bound = {key: sum(costs["fragments"][f][key] for f in fragments) for key in costs if "bound" in key}
    assert costs["compute-bound seconds"] == pytest.approx(bound["compute-bound seconds"])
    memory = bound["memory-bound seconds"] + costs["transfer seconds"]
    assert costs["memory-bound seconds"] == pytest.approx(memory)
    assert text.startswith("// the step\n") and "transfer m0 to m1" in text
    assert all(f"// {name}\n" in text for name in fragments)
    for word, count in (("bars", len(made.executables)), ("memory", len(made.executables))):
        picture = ElementTree.fromstring(made.as_text(word))
        inner = picture.findall("{http://www.w3.org/2000/svg}svg")
        tops = [float(svg.get("y")) for svg in inner]
        assert len(inner) == count and tops == sorted(set(tops))
        assert all(name in made.as_text(word) for name in fragments)
