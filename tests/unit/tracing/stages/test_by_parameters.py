"""Stages by the paths of parameters: what is selected, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.errors import ConfigError
from tests.support.layered_models import separate


@pytest.fixture(scope="module")
def topology():
    return mpmd.make_topology({"m0": 1, "m1": 1})


def traced(topology, loss, params, batch, *patterns, **options):
    """The step of a loss, traced with stages by parameters; its text of the stages."""
    config = mpmd.make_config(topology, stages=mpmd.by_parameters(*patterns, **options))
    step = mpmd.jit(lambda *a: mpmd.accumulate_gradients(loss, 2)(*a), config)
    return step.trace(params, *batch).stages_text


def parameters(text):
    """The parameters of each stage, from the text of stages."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines()[1:]:
        if not line.startswith(" "):
            name = line.split()[0]
            found[name] = []
        elif not line.startswith("  sends"):
            found[name].append(line.split()[1])
    return found


def test_layers_are_in_equal_ranges_with_the_embedding_first_and_the_head_last(topology):
    params, loss, batch, pattern = separate()
    text = traced(topology, loss, params, batch, pattern)
    of = {
        s: [f"layers/{i}/{n}" for i in layers for n in ("b", "scale", "w")]
        for s, layers in ((0, (0, 1)), (1, (2, 3)))
    }
    assert parameters(text) == {"stage0": ["embed", *of[0], "pos"], "stage1": ["head", *of[1]]}
    first, *rest = text.splitlines()
    assert first == "loss in 2 stages by mpmd.by_parameters(r'layers/(\\d+)')"
    sends = [line for line in rest if line.startswith("  sends")]
    assert len(sends) == 2 and "f32[4,6,16] (1.5 KiB) of add" in sends[0] and "layered_models.py:" in sends[0]
    assert sends[0].endswith(" to stage1") and sends[1].endswith(" to the results")


def test_lengths_order_of_numbers_and_pinned_parameters(topology):
    def loss(params, x):
        for name in sorted(params["blocks"], key=lambda name: int(name[1:])):
            x = jnp.tanh(x @ params["blocks"][name])
        return jnp.mean(x * params["free"])

    w = np.eye(4, dtype=np.float32)
    params = {"blocks": {f"b{i}": w for i in range(11)}, "free": w[0]}
    text = traced(topology, loss, params, (np.ones((4, 4), np.float32),), r"/b(\d+)", lengths=[10, 1])
    assert parameters(text)["stage1"] == ["blocks/b10", "free"]
    with pytest.raises(ConfigError, match="has lengths \\[10, 2\\], 12 in all, but the model has 11 layers"):
        traced(topology, loss, params, (np.ones((4, 4), np.float32),), r"/b(\d+)", lengths=[10, 2])


def test_several_stages_on_one_mesh_are_numbered(topology):
    config = mpmd.make_config(topology, stages=mpmd.by_parameters("x", over=["m0", "m1", "m0", "m1"]))
    assert {name: str(place) for name, place in config.assignment.items()} == {
        "stage0": "m0/0", "stage1": "m1/1", "stage2": "m0/2", "stage3": "m1/3",
    }  # fmt: skip


def test_the_division_is_where_few_bytes_cross(topology):
    """What follows the last parameter of a layer is wide; the narrow value after it crosses."""

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w).reshape(-1, 4, 8).sum(-1)
        return jnp.mean(x)

    w = np.ones((4, 32), np.float32)
    text = traced(topology, loss, [w, w], (np.ones((4, 4), np.float32),), r"(\d+)")
    assert "sends f32[2,4] (32 B) of reduce_sum" in text


def test_a_pattern_that_matches_nothing_is_refused_with_near_paths(topology):
    params, loss, batch, _ = separate()
    message = r"no parameter matches r'layer/\(\\d\+\)/w'; did you mean 'layers/\d/w'.*\n  parameters of the"
    with pytest.raises(ConfigError, match=message):
        traced(topology, loss, params, batch, r"layer/(\d+)/w")


def test_layers_that_run_in_another_order_are_refused(topology):
    params, loss, batch, pattern = separate()

    def backwards(params, *batch):
        return loss({**params, "layers": params["layers"][::-1]}, *batch)

    with pytest.raises(ConfigError, match="layers/0/b is a parameter of stage 0, but .* reads it in stage 1"):
        traced(topology, backwards, params, batch, pattern)


def test_fewer_layers_than_stages_are_refused(topology):
    params, loss, batch, _ = separate()
    with pytest.raises(ConfigError, match="finds 1 layers for 2 stages"):
        traced(topology, loss, params, batch, "layers")


def test_stages_without_a_loss_are_refused(topology):
    config = mpmd.make_config(topology, stages=mpmd.by_parameters("w"))
    with pytest.raises(ConfigError, match="no loss to divide is in the step"):
        mpmd.jit(lambda w: w + 1, config).trace(np.ones(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patterns": ()}, "stages need a pattern"),
        ({"patterns": ("(",)}, "cannot be read"),
        ({"patterns": (3,)}, "is not a pattern"),
        ({"patterns": ("x",), "lengths": [1, 0]}, "a whole number from 1"),
        ({"patterns": ("x",), "lengths": [1]}, "has 1 lengths, for 2 stages over m0, m1"),
        ({"patterns": ("x",), "over": ["m0", "m7"]}, "unknown mesh 'm7'"),
    ],
)
def test_selectors_that_cannot_be_used_are_refused(topology, options, message):
    with pytest.raises(ConfigError, match=message):
        mpmd.make_config(topology, stages=mpmd.by_parameters(*options.pop("patterns"), **options))


def test_staged_is_the_function_itself_outside_of_a_configured_step():
    def loss(params, flag):
        return params * (2.0 if flag else 3.0)

    once = mpmd.staged(loss)
    assert mpmd.staged(once) is once and once(1.0, True) == 2.0
    assert "mpmd" not in str(jax.make_jaxpr(lambda p: mpmd.staged(loss)(p, False))(1.0))


def named_layers(order=(0, 1)):
    """A loss with a scope around each layer, of parameters that have no names."""

    def loss(params, x):
        for i in order:
            with jax.named_scope(f"layer_{i}"):
                x = jax.checkpoint(jnp.tanh)(x @ params[i])
        return jnp.mean(x @ params[2])

    return loss, [np.eye(4, dtype=np.float32)] * 3, (np.ones((4, 4), np.float32),)


def of_scopes(topology, loss, params, batch, pattern, **options):
    config = mpmd.make_config(topology, stages=mpmd.by_scopes(pattern, **options))
    step = mpmd.jit(lambda *a: mpmd.accumulate_gradients(loss, 2)(*a), config)
    return step.trace(params, *batch).stages_text


def test_scopes_select_stages_where_paths_cannot(topology):
    loss, params, batch = named_layers()
    text = of_scopes(topology, loss, params, batch, r"layer_(\d+)")
    assert text.startswith("loss in 2 stages by mpmd.by_scopes(r'layer_(\\d+)')")
    assert parameters(text) == {"stage0": ["0"], "stage1": ["1", "2"]}


def test_scopes_that_nothing_has_or_that_run_in_another_order_are_refused(topology):
    message = (
        r"no scope matches r'layers_\(\\d\+\)'; did you mean 'layer_.*\n  scopes of the loss:\n  layer_0"
    )
    with pytest.raises(ConfigError, match=message):
        of_scopes(topology, *named_layers(), r"layers_(\d+)")
    with pytest.raises(ConfigError, match="layer_0 is of stage 0, but .* in it reads values of stage 1"):
        of_scopes(topology, *named_layers((1, 0)), r"layer_(\d+)")
    with pytest.raises(ConfigError, match="no parameter matches 'head'"):
        of_scopes(topology, *named_layers(), r"layer_(\d+)", last="head")
    with pytest.raises(ConfigError, match="no scope matches 'x'\n  the loss has no scopes"):
        of_scopes(topology, lambda p, x: (x @ p).mean(), np.eye(4), (np.ones((4, 4)),), "x")
