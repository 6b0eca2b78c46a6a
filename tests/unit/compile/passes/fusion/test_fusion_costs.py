"""Fusion asks the cost models, says why groups stay apart, and is the same every time."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from mpmd.compile.hlo import print_module
from mpmd.compile.lowering import lower
from mpmd.compile.passes import make_pass
from mpmd.compile.passes.fusion.attention_stitching import AttentionStitching
from mpmd.compile.passes.fusion.fusion import Fusion, Prices, merge_groups
from mpmd.compile.passes.fusion.grouping import Grouping
from mpmd.compile.pipelines import optimization_pipeline
from mpmd.cost.device import H200, HOST, KernelLimits
from mpmd.errors import ConfigError
from mpmd.support import diagnostics
from tests.support.native_fragments import fragment_of
from tests.support.native_functions import Floats, gradients, layer_norm

floats = Floats()
FREE = dataclasses.replace(HOST, cycles_per_second=math.inf)
"""Nothing to compute ever takes time."""


def before_fusion(function, *arguments):
    module = lower(fragment_of(function, *arguments).text)
    for pass_ in optimization_pipeline():
        if isinstance(pass_, AttentionStitching | Fusion):
            return module
        pass_.run(module)
    raise AssertionError("the pipeline has no fusion")


def fused(module, **options):
    with diagnostics.collecting() as found:
        Fusion(**options).run(module)
    return print_module(module), [d.message for d in found]


ARGUMENTS = [floats(64, 128), floats(128), floats(128)]


def test_the_same_program_gives_the_same_groups_and_reasons():
    first, second = (fused(before_fusion(gradients(layer_norm), *ARGUMENTS)) for _ in range(2))
    assert first == second


def test_refusals_say_why():
    def turned(x):
        return jax.nn.softmax(x), jnp.cumsum(jax.nn.softmax(x.T), 0)

    _, said = fused(before_fusion(turned, floats(8, 8)))
    assert said
    assert all(text.startswith("hlo-fusion: ") and " stay apart: " in text for text in said)


def test_what_takes_longer_together_stays_apart():
    """A tanh of a row, needed by every row: computing it for each point is a matter of its price."""

    def scaled(x, y):
        return x * jnp.tanh(jnp.exp(y))

    arguments = [floats(512, 256), floats(256)]
    _, said = fused(before_fusion(scaled, *arguments))
    assert any("together they take" in text for text in said)
    module = before_fusion(scaled, *arguments)
    grouping = Grouping(module.entry)
    merge_groups(grouping, 96, Prices(FREE))
    assert len(grouping.groups()) == 1


def test_the_device_decides():
    """A device on which nothing to compute ever takes time, and one whose caches hold no factor."""
    rows = before_fusion(lambda x, y: x * jnp.tanh(jnp.exp(y)), floats(512, 256), floats(256))
    assert not any("together they take" in m for m in fused(rows.clone(), device=FREE)[1])
    attention = before_fusion(lambda q, k: jax.nn.softmax(q @ k.swapaxes(1, 2)) @ k, *[floats(4, 32, 16)] * 2)
    small = dataclasses.replace(HOST, limits=KernelLimits(attention_factor_bytes=64))
    assert AttentionStitching(device=HOST).run(attention.clone())
    with diagnostics.collecting() as found:
        assert not AttentionStitching(device=small).run(attention)
    assert any("is read for every block of queries" in d.message for d in found)


def test_a_device_is_an_option_by_its_name():
    assert make_pass("hlo-fusion", "device=H200") == Fusion(device=H200)
    assert str(Fusion(device=H200)) == "hlo-fusion{device=H200}"
    with pytest.raises(ConfigError, match="there is no description of a device 'H20'.*'H200'"):
        make_pass("hlo-fusion", "device=H20")


def after_a_product(operations):
    def function(x, w, v):
        d = x @ w
        r = d
        for _ in range(operations):
            r = r * d + 1
        return [((d * n) @ v) @ v.T * r + d for n in (2, 3)]

    return before_fusion(function, floats(64, 32), floats(32, 64), floats(64, 32))


def test_what_takes_longer_to_compute_again_is_kept():
    """Fewer bytes move if the last two products compute what they read of the first one again."""
    assert not [m for m in fused(after_a_product(1))[1] if "is kept" in m]
    found = [m for m in fused(after_a_product(11))[1] if "is kept" in m]
    assert len(found) == 1 and "computing it again" in found[0]


def test_a_gpu_computes_functions_again_that_a_cpu_keeps():
    """Of a layer's activation its argument is kept alone: the function of it is computed in its gradient."""

    def layer(x, w, v):
        return jax.nn.gelu(x @ w) @ v

    arguments = [floats(256, 256), floats(256, 1024), floats(1024, 256)]
    made = [before_fusion(gradients(layer), *(a.astype(jnp.bfloat16) for a in arguments)) for _ in range(2)]
    texts = [fused(module, device=device)[0] for module, device in zip(made, (HOST, H200))]
    assert [text.count(" tanh(") for text in texts] == [1, 2]


def test_a_gpu_keeps_the_mean_of_each_row_rather_than_the_differences_from_it():
    def layer(x, scale, shift, w):
        return layer_norm(x, scale, shift) @ w

    def kept(device):
        arguments = (floats(512, 1024), floats(1024), floats(1024), floats(1024, 256))
        module = before_fusion(gradients(layer), *arguments)
        Fusion(device=device).run(module)
        first = next(i for i in module.entry if i.opcode == "fusion")
        return [shape.dims for _, shape in first.shape.leaves()]

    assert kept(HOST).count((512, 1024)) == 2 and kept(H200).count((512, 1024)) == 1
    assert len(kept(H200)) == len(kept(HOST))  # one value of rows more


def test_a_value_that_others_read_too_is_written_all_the_same():
    value = before_fusion(lambda x: jnp.tanh(jnp.exp(x)), floats(64, 64)).entry.root.operands[0]
    assert Prices(HOST).saved(value, 1, 0) == pytest.approx(2 * Prices(HOST).saved(value, 1, 1))
    assert Prices(HOST).saved(value, 2, 0) == pytest.approx(3 * Prices(HOST).saved(value, 1, 5))
