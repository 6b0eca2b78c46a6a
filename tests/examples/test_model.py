"""The stages, one after the other, are the model."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from examples.pipelined_transformer.model import GPT, init_params, loss_of, stage_function, stage_params
from mpmd.errors import ConfigError

pytestmark = pytest.mark.usefixtures("plain_xla")


def params_of(config):
    return jax.jit(lambda: init_params(config, 0))()


def batch_of(config):
    rng = np.random.default_rng(0)
    return rng.integers(0, config.vocab_size, (3, config.seq_len + 1)).astype(np.int32)


@pytest.mark.slow  # runs of the example compare the losses too
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stages_in_a_row_give_the_loss_of_the_model(tiny, num_stages):
    config = tiny(layers=4, num_stages=num_stages)
    params, batch = params_of(config), batch_of(config)
    x = None
    for stage in range(num_stages):
        x = stage_function(config, stage)(stage_params(config, params, stage), x, batch)
    np.testing.assert_array_equal(x, loss_of(config, params, batch))


def test_every_parameter_belongs_to_a_stage_and_only_the_token_table_to_two(tiny):
    config = tiny(layers=5, num_stages=3)
    params = params_of(config)
    owners = [name for stage in range(3) for name in stage_params(config, params, stage)]
    assert sorted(owners) == sorted([*params, "tokens"])


def test_blocks_are_spread_evenly_from_the_first_stage(tiny):
    config = tiny(layers=7, num_stages=3)
    assert [list(config.blocks_of(stage)) for stage in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]


def test_a_token_sees_only_those_before_it(tiny):
    config = tiny()
    params, tokens = params_of(config), batch_of(config)[:, :-1]
    other = tokens.copy()
    other[:, 9:] = (other[:, 9:] + 1) % config.vocab_size
    logits = jax.jit(functools.partial(GPT(config).apply, {"params": params}))
    before, after = logits(tokens), logits(other)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert not np.array_equal(before[:, 9:], after[:, 9:])


@pytest.mark.slow
def test_bfloat16_reaches_the_layers_and_not_the_loss(tiny):
    config = tiny(dtype="bfloat16")
    params, batch = params_of(config), batch_of(config)
    first = stage_function(config, 0)(stage_params(config, params, 0), None, batch)
    assert first.dtype == "bfloat16"
    assert loss_of(config, params, batch).dtype == "float32"
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}


def test_flags_that_cannot_be_used_are_all_named(tiny):
    with pytest.raises(ConfigError) as error:
        tiny(layers=1, heads=3, batch_size=5)
    assert str(error.value).splitlines() == [
        "these flags cannot be used:",
        "  1. --layers is 1; each of --num_stages=2 needs one",
        "  2. --d_model is 16, which --heads=3 does not divide",
        "  3. --batch_size is 5, which --num_microbatches=2 does not divide",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"steps": 0}, "--steps is 0; it must be at least 1"),
        ({"vocab_size": 100}, "--vocab_size is 100; it must be at least 256"),
        ({"dtype": "float16"}, "--dtype is 'float16'; use float32 or bfloat16"),
        ({"devices_per_mesh": 4}, "a microbatch has 2 sequences, which --devices_per_mesh=4 does not divide"),
    ],
)
def test_a_flag_that_cannot_be_used(tiny, changes, line):
    with pytest.raises(ConfigError, match=f"^{line}$"):
        tiny(**changes)
