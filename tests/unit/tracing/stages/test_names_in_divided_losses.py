"""Names in a loss that `stages=` divides: they mean nothing, unless they are assigned."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpmd
from mpmd.errors import ConfigError
from tests.support.comparing import relative_difference

LAYERS, WIDTH, ROWS = 8, 16, 8
LAYER = r"layers/(\d+)"


def layer(w, x):
    return x + jnp.tanh(x @ w)


def stack(called, layers, x):
    for number, w in enumerate(layers):
        x = called(layer, f"layer{number}")(w, x)
    return x


def halves(called, layers, x):
    """Names in names, under checkpoints, and in a jit."""
    first = called(functools.partial(stack, called), "encode")
    last = jax.checkpoint(called(jax.jit(functools.partial(stack, called)), "decode"))
    return last(layers[LAYERS // 2 :], tensor(called, first(layers[: LAYERS // 2], x)))


def tensor(called, x):
    return mpmd.named_tensor(x, "middle") if called is under_name else x


def scanned(called, layers, x):
    return jax.lax.scan(lambda x, w: (called(layer, "layer")(w, x), None), x, layers)[0]


def under_name(fn, name):
    return mpmd.named_computation(fn, name=name)


def nameless(fn, _):
    return fn


def loss_of(model, called):
    def loss(params, x, y):
        x = called(jnp.sin, "stage1")(x)
        return jnp.mean((model(called, params["layers"], x) - y) ** 2)

    return loss


def step_of(loss):
    def step(params, x, y):
        loss_value, grads = mpmd.accumulate_gradients(loss, num_microbatches=2)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss_value

    return step


def own_step_of(loss):
    def step(params, x, y):
        return jax.value_and_grad(mpmd.staged(loss))(params, x, y)

    return step


def given(model):
    keys = jax.random.split(jax.random.key(0), LAYERS)
    layers = [0.1 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    return {"layers": jnp.stack(layers) if model is scanned else layers}, x, jnp.ones((ROWS, WIDTH))


def on(meshes, stages, assignment=None):
    topology = mpmd.make_topology({f"m{m}": 1 for m in range(meshes)})
    return mpmd.make_config(topology, assignment, stages=stages)


def stages_in(lowered):
    return [line for line in lowered.as_text("stages").splitlines() if "FLOP" in line]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("of_loss", [step_of, own_step_of])
@pytest.mark.parametrize(
    ("model", "stages"),
    [
        (halves, "auto"),
        (halves, mpmd.by_parameters(LAYER)),
        (scanned, "auto"),
        (scanned, mpmd.split("layers")),
    ],
)
@pytest.mark.parametrize("meshes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_stages_and_programs_are_those_without_names(model, stages, of_loss, meshes):
    named, plain = (
        mpmd.jit(of_loss(loss_of(model, called)), on(meshes, stages)).lower(*given(model))
        for called in (under_name, nameless)
    )
    assert stages_in(named) == stages_in(plain)
    assert len(stages_in(named)) == meshes
    assert named.as_text("schedule") == plain.as_text("schedule")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("model", "stages", "meshes"),
    [
        (halves, "auto", 2),
        pytest.param(halves, mpmd.by_parameters(LAYER), 4, marks=pytest.mark.slow),
        pytest.param(scanned, mpmd.split("layers"), 4, marks=pytest.mark.slow),
    ],
)
def test_numbers_are_those_without_names(model, stages, meshes):
    step = step_of(loss_of(model, under_name))
    got = mpmd.fetch(mpmd.jit(step, on(meshes, stages))(*given(model)))
    same = mpmd.fetch(mpmd.jit(step_of(loss_of(model, nameless)), on(meshes, stages))(*given(model)))
    jax.tree.map(np.testing.assert_array_equal, got, same)
    assert relative_difference(got, jax.jit(step)(*given(model))) < 1e-6


class Tied(nnx.Module):
    """What is named closes over the whole module, and reads a part of it."""

    def __init__(self, called):
        rngs = nnx.Rngs(0)
        self.called = called
        self.embed = nnx.Embed(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, ids):
        x = self.called(lambda ids: self.embed(ids), "embed")(ids)
        for number in range(4):
            x = self.called(lambda x, at=number: x + jnp.tanh(self.layers[at](x)), f"layer{number}")(x)
        return self.called(lambda x: self.embed.attend(self.norm(x)), "head")(x)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("stages", ["auto", mpmd.by_parameters(LAYER)])
def test_modules_that_names_close_over_are_read_where_they_are_used(stages):
    def lowered(called):
        graph, params, rest = nnx.split(Tied(called), nnx.Param, ...)

        def loss(params, ids):
            return jnp.mean(nnx.merge(graph, params, rest, copy=True)(ids) ** 2)

        def step(params, ids):
            return jax.value_and_grad(mpmd.staged(loss))(params, ids)

        return mpmd.jit(step, on(4, stages)).lower(params, jnp.arange(ROWS))

    named, plain = lowered(under_name), lowered(nameless)
    assert len(stages_in(named)) == 4
    assert stages_in(named) == stages_in(plain)


def test_a_function_that_was_traced_with_its_names_is_traced_again_without_them():
    model = jax.jit(functools.partial(halves, under_name))
    params, x, y = given(halves)
    assert "comp.encode." in str(jax.make_jaxpr(model)(params["layers"], x))
    loss = loss_of(lambda _, layers, x: model(layers, x), under_name)
    divided = mpmd.jit(own_step_of(loss), on(2, mpmd.by_parameters(LAYER))).lower(params, x, y)
    plain = mpmd.jit(own_step_of(loss_of(halves, nameless)), on(2, mpmd.by_parameters(LAYER)))
    assert stages_in(divided) == stages_in(plain.lower(params, x, y))
    assert "comp.encode." in str(jax.make_jaxpr(model)(params["layers"], x))


def test_an_assigned_name_stays_whole_in_the_stage_on_its_mesh():
    step = own_step_of(loss_of(halves, under_name))
    config = on(2, mpmd.by_parameters(LAYER), {"encode": "m0"})
    assert stages_in(mpmd.jit(step, config).lower(*given(halves))) == stages_in(
        mpmd.jit(step, on(2, mpmd.by_parameters(LAYER))).lower(*given(halves))
    )


@pytest.mark.parametrize(
    ("model", "stages", "name"),
    [
        (halves, mpmd.by_parameters(LAYER), "decode"),
        (halves, mpmd.by_parameters(LAYER), "layer0"),
        (halves, mpmd.by_parameters(LAYER, lengths=[2, 6]), "middle"),
        (scanned, mpmd.split("layers"), "layer"),
    ],
)
def test_an_assigned_name_in_a_stage_of_another_mesh_is_refused(model, stages, name):
    config = on(2, stages, {name: "m0"})
    with pytest.raises(ConfigError) as refused:
        mpmd.jit(own_step_of(loss_of(model, under_name)), config).lower(*given(model))
    assert f"{name!r} is assigned to m0, but {stages} puts it into stage1, on m1" in str(refused.value)
    assert f"leave {name!r} out of the assignment" in str(refused.value)


def test_an_assigned_name_that_is_too_large_is_named_with_the_users_line():
    def loss(params, x, y):
        x = mpmd.named_computation(functools.partial(stack, nameless), name="all of it")(params["layers"], x)
        return jnp.mean((x - y) ** 2)

    with pytest.warns(UserWarning, match="are not balanced") as warned:
        mpmd.jit(own_step_of(loss), on(2, "auto", {"all of it": "m0"})).lower(*given(halves))
    text = "".join(str(warning.message) for warning in warned)
    assert f"computation 'all of it' ({__file__}:" in text
    assert "it stays whole because it is assigned: leave 'all of it' out of the assignment" in text


def test_an_assigned_name_over_several_stages_is_said_to_stay_whole():
    def loss(params, x, y):
        x = mpmd.named_computation(functools.partial(stack, nameless), name="all of it")(params["layers"], x)
        return jnp.mean((x - y) ** 2)

    config = on(2, mpmd.by_parameters(LAYER), {"all of it": "m1"})
    with pytest.raises(ConfigError, match="layers run in another order") as refused:
        mpmd.jit(own_step_of(loss), config).lower(*given(halves))
    assert f"computation 'all of it' ({__file__}:" in str(refused.value)
    assert "leave 'all of it' out of the assignment" in str(refused.value)


def test_a_stage_that_is_assigned_to_another_mesh_is_refused():
    assert on(2, "auto", {"stage1": "m1"}).assignment["stage1"].mesh == "m1"
    with pytest.raises(ConfigError) as refused:
        on(2, "auto", {"stage1": "m0"})
    assert "'stage1' is assigned to m0, but it is a stage of mpmd.by_cost(), on m1" in str(refused.value)
    assert "over=" in str(refused.value)
