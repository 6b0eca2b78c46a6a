"""Convolutions become products where that is fast; XLA computes the others, and says so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpmd
from mpmd.compile.lowering import lower
from mpmd.compile.passes.expand import ConvolutionToDot
from tests.support.comparing import relative_difference
from tests.support.hlo_meaning import evaluate
from tests.support.native_fragments import fragment_of

DIMS = ("NHWC", "HWIO", "NHWC")


def convolution(stride, padding, groups=1):
    def function(image, kernel):
        return lax.conv_general_dilated(
            image, kernel, stride, padding, dimension_numbers=DIMS, feature_group_count=groups
        )

    return function


def transposed(stride, padding):
    return lambda image, kernel: lax.conv_transpose(image, kernel, stride, padding)


def with_gradients(function):
    def results(image, kernel):
        value, grads = jax.value_and_grad(lambda i, k: (function(i, k) ** 2).sum(), (0, 1))(image, kernel)
        return function(image, kernel), value, grads

    return results


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape) * 0.3, jnp.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("function", "image", "kernel", "gradients"),
    [
        pytest.param(convolution((4, 4), "VALID"), (2, 8, 8, 3), (4, 4, 3, 5), (1,), id="patches"),
        pytest.param(
            convolution((4, 3), "VALID"),
            (2, 10, 11, 3),
            (4, 3, 3, 5),
            (1,),
            id="rest behind the last patch",
        ),
        pytest.param(convolution((1, 1), "VALID"), (2, 5, 4, 3), (1, 1, 3, 5), (0, 1), id="1 x 1"),
        pytest.param(convolution((1, 2), "VALID"), (2, 5, 4, 3), (1, 2, 3, 5), (1,), id="patches in one dim"),
    ],
)
def test_windows_that_do_not_overlap_are_products(function, image, kernel, gradients):
    arguments = arrays(image, kernel)
    gradient = jax.grad(lambda i, k: (function(i, k) ** 2).sum(), gradients)
    for results in (function, gradient):
        module = lower(fragment_of(results, *arguments).text)
        assert ConvolutionToDot().run(module)
        assert not [i for i in module.instructions() if i.opcode == "convolution"]
        got = jax.tree.leaves(evaluate(module, arguments))
        assert relative_difference(got, jax.tree.leaves(jax.jit(results)(*arguments))) <= 1e-5


CONFIG = {"stage": "m0"}


@pytest.mark.parametrize(
    ("function", "image", "kernel", "by_xla"),
    [
        pytest.param(convolution((1, 1), "VALID"), (2, 6, 6, 3), (1, 1, 3, 5), 0, id="1 x 1"),
        pytest.param(convolution((1, 1), "SAME"), (2, 6, 6, 3), (3, 3, 3, 8), 3, id="3 x 3"),
        pytest.param(convolution((1, 1), "SAME", 8), (2, 6, 6, 8), (3, 3, 1, 8), 3, id="depthwise"),
        pytest.param(convolution((4, 4), "VALID"), (2, 9, 9, 3), (4, 4, 3, 5), 1, id="gradient of patches"),
        pytest.param(transposed((2, 2), "VALID"), (2, 3, 4, 6), (2, 2, 6, 5), 2, id="transposed"),
    ],
)
def test_what_xla_computes_faster_is_left_to_it(function, image, kernel, by_xla, recwarn):
    arguments, results = arrays(image, kernel), with_gradients(function)
    config = mpmd.make_config(mpmd.make_topology({"m0": 1}), CONFIG, backend="native")
    compiled = mpmd.jit(mpmd.named_computation(results, name="stage"), config).lower(*arguments).compile()
    said = [str(warning.message) for warning in recwarn if "compiled by XLA" in str(warning.message)]
    assert len(said) == bool(by_xla)
    assert sum(text.count("XLA has a library for it") for text in said) == by_xla
    assert relative_difference(compiled(*arguments), jax.jit(results)(*arguments)) <= 1e-5
