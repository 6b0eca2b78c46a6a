"""Stages by cost: where they end, on chains of units and on models."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.cost.device import H100
from mpmd.errors import ConfigError
from mpmd.tracing.stages.select.division import (
    Chain,
    Meshes,
    Segments,
    best_division,
    choose,
    divided_at,
    products_work,
)
from tests.support.comparing import relative_difference
from tests.support.layered_models import SEPARATE, scanned, separate


@pytest.fixture(scope="module")
def topology():
    return mpmd.make_topology({"m0": 1, "m1": 1})


def stages_text(topology, model, stages="auto"):
    params, loss, batch, *_ = model
    config = mpmd.make_config(topology, stages=stages)
    return mpmd.jit(mpmd.staged(loss), config).trace(params, *batch).stages_text


def parameters(text):
    """The parameters of each stage, without shapes; shared ones in each."""
    found = []
    for line in text.splitlines():
        if line.startswith("stage"):
            found.append([])
        elif line.startswith("  ") and found and line.split()[0].endswith("]"):
            found[-1].append(line.split()[1])
    return found


def chain(rng, count=9):
    readers = [sorted(rng.choice(count, size=rng.integers(1, 4), replace=False).tolist()) for _ in range(4)]
    return Chain(
        rng.integers(1, 9, count).astype(float).tolist(),
        rng.integers(1, 5, count + 1).tolist(),
        rng.integers(0, 9, count).tolist(),
        [(int(rng.integers(1, 30)), float(rng.integers(0, 3)), r) for r in readers],
    )


@pytest.mark.parametrize("seed", range(12))
def test_the_heaviest_stage_is_as_light_as_in_any_division_and_the_bytes_are_fewest(seed):
    rng = np.random.default_rng(seed)
    stages = 2 + seed % 3
    meshes = Meshes(tuple(rng.integers(1, 3, stages).tolist()), limit=[None, 200, 120][seed % 3])
    segments = Segments(chain(rng), meshes)
    places = range(1, 9)
    allowed = [
        divided_at(segments, starts)
        for starts in itertools.combinations(places, stages - 1)
        if all(
            segments.held(s, a, b) <= (meshes.limit or 1e9)
            for s, (a, b) in enumerate(itertools.pairwise((0, *starts, 9)))
        )
    ]
    found = best_division(segments, stages, list(places))
    if not allowed:
        assert found is None
        return
    lightest = min(d.heaviest for d in allowed)
    fewest = min(sum(d.crossing) for d in allowed if d.heaviest <= 1.02 * lightest)
    assert found.heaviest <= 1.02 * lightest and sum(found.crossing) == fewest


def test_candidates_of_a_long_chain_are_spread_over_all_of_it():
    count = 1500
    division, places = choose(
        Segments(Chain([1.0] * count, [1] * count, [0] * count, []), Meshes((1,) * 8)), 8
    )
    assert len(places) < count and division.heaviest < 1.05 * count / 8


def test_more_bytes_cross_only_where_the_step_is_clearly_shorter():
    """Few bytes cross only near the ends, as in networks with skip connections."""
    crossing = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]
    of = lambda wire: choose(Segments(Chain([1.0] * 9, crossing, [0] * 9, []), Meshes((1, 1), wire)), 2)[0]  # noqa: E731
    assert of(0.01).starts in ((4,), (5,))
    assert of(5.0).starts in ((1,), (8,))


@pytest.mark.fast_cases("separate", "scanned")
@pytest.mark.parametrize("name", [*SEPARATE, "scanned"])
def test_models_are_divided_as_by_hand(topology, name):
    model = scanned() if name == "scanned" else SEPARATE[name]()
    by_hand = mpmd.split("layers") if name == "scanned" else mpmd.by_parameters(model[3])
    assert parameters(stages_text(topology, model)) == parameters(stages_text(topology, model, by_hand))


def test_the_text_says_why_and_what_the_next_best_costs(topology):
    text = stages_text(topology, separate())
    assert text == stages_text(topology, separate())
    *_, work, where, why, other = text.splitlines()
    assert work.startswith("work of a microbatch, forward and backward, estimated: ")
    assert where.startswith("between stage0 and stage1: before reduce_sum (")
    assert where.endswith("before layers/2/scale is read")
    assert "3.0 KiB cross; 4 of 80 places there are candidates; the heaviest stage takes " in why
    assert "before layers/3/scale is read: 3.0 KiB cross, the heaviest stage takes " in other
    assert float(other.rpartition("+")[2].removesuffix("%)")) > 5


D = 32


def chained_products(count, first=1):
    """Equal products; the first one several times as wide."""

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    shapes = [(D, D * first), (D * first, D), *[(D, D)] * (count - 2)]
    return [np.eye(*s, dtype=np.float32) for s in shapes], loss, (np.ones((64, D), np.float32),)


def test_devices_of_uneven_meshes_share_the_work():
    uneven = mpmd.make_topology({"m0": 1, "m1": 3})
    found = parameters(stages_text(uneven, chained_products(8)))
    assert [len(stage) for stage in found] == [2, 6]


def test_memory_that_no_division_fits(topology):
    message = r"no division of loss into 2 stages fits 32.0 KiB for each device\n  balanced stages hold .*KiB"
    with pytest.raises(ConfigError, match=message):
        stages_text(topology, chained_products(8, first=4), mpmd.by_cost(memory=32 << 10))


def test_rematerialised_stages_are_under_a_checkpoint_each(topology):
    params, loss, batch = chained_products(4)
    count = {}
    for remat in (False, True):
        config = mpmd.make_config(topology, stages=mpmd.by_cost(rematerialise=remat))

        def train_step(*args):
            return jax.grad(mpmd.staged(loss))(*args)

        traced = mpmd.jit(train_step, config).trace(params, *batch)
        assert traced.name == traced.jax_traced.fun_name == "train_step"
        count[remat] = str(traced.jaxpr).count("prevent_cse")
    assert count[True] >= count[False] + 2


def test_requests_that_cannot_be_met(topology):
    model = separate()
    with pytest.raises(ConfigError, match="loss cannot be divided into 200 stages: it has 81 operations"):
        stages_text(topology, model, 200)
    with pytest.raises(ConfigError, match=r"by_cost\(1\) is 1 stage for 2 meshes: m1 would have none"):
        mpmd.make_config(topology, stages=1)
    with pytest.raises(ConfigError, match="stages is 'layers'; there is 'auto'"):
        mpmd.make_config(topology, stages="layers")
    with pytest.raises(ConfigError, match="stages is 0; it must be a whole number from 1"):
        mpmd.make_config(topology, stages=0)
    with pytest.raises(ConfigError, match="stages is 3, but over names 2 meshes"):
        mpmd.by_cost(3, over=["m0", "m1"])


@pytest.mark.slow
def test_measured_seconds_choose_the_stages(topology):
    """The estimate does not know how often a loop runs; the measurement does."""

    def loss(params, x):
        def slow(x, w):
            return jax.lax.while_loop(lambda c: c[0] < 64, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[
                1
            ]

        x = jax.lax.stop_gradient(slow(x @ params[0], params[0]))
        for w in params[1:]:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    params = [np.eye(D, dtype=np.float32)] * 8
    model = params, loss, (np.ones((2, 64, D), np.float32),)

    def text(refine):
        config = mpmd.make_config(topology, stages=mpmd.by_cost(refine=refine))
        step = mpmd.jit(lambda *a: mpmd.accumulate_gradients(loss, 2)(*a), config)
        return step.trace(model[0], *model[2]).stages_text

    assert len(parameters(text(False))[0]) > 2
    refined = text(True)
    assert "measured" in refined and len(parameters(refined)[0]) == 1


@pytest.mark.slow
def test_several_losses_are_measured_together(topology):
    """The larger loss and the smaller one have stages of their own, chosen from one measurement."""

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    def step(params, head, x):
        first = mpmd.accumulate_gradients(loss, 2)(params, x)
        return first, mpmd.accumulate_gradients(lambda p, x: loss(p, x) ** 2, 2)(head, x)

    params, head = [np.eye(D, dtype=np.float32)] * 8, [np.eye(D, dtype=np.float32)] * 6
    x = np.ones((64, D), np.float32)
    ours = mpmd.jit(step, mpmd.make_config(topology, stages=mpmd.by_cost(refine=True)))
    text = ours.trace(params, head, x).stages_text
    assert text.count("backward, measured: ") == 2 and "in 2 stages" in text
    assert relative_difference(ours(params, head, x), jax.jit(step)(params, head, x)) < 1e-5


@pytest.mark.parametrize("stages", ("auto", mpmd.split("layers")), ids=("separate", "stacked"))
def test_scalars_among_the_parameters(topology, stages):
    """A learnt temperature goes through operations of its own, beside layers that are separate or stacked."""
    stacked = stages != "auto"

    def loss(p, x, y):
        if stacked:
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["layers"])
        else:
            for w in p["layers"]:
                x = jnp.tanh(x @ w)
        return jnp.mean((x * jnp.exp(p["scale"]) - y) ** 2)

    layers = [np.eye(8, dtype=np.float32) * 0.5] * 4
    p = {"layers": np.stack(layers) if stacked else layers, "scale": np.float32(0.1)}
    x = np.ones((8, 8), np.float32)
    step = mpmd.accumulate_gradients(loss, 2)
    value, grads = mpmd.jit(step, mpmd.make_config(topology, stages=stages, backend="xla"))(p, x, x)
    wanted, wanted_grads = jax.jit(step)(p, x, x)
    got = jax.device_get((value, grads["scale"]))
    assert relative_difference(got, (wanted, wanted_grads["scale"])) < 1e-5


def test_work_that_cannot_be_divided_is_reported(topology):
    """A loop that ends when it likes: most of the work is one operation."""
    w = jnp.ones((64, 64))

    def looped(p, x):
        x = jnp.tanh(x @ p["first"])
        x, shared = jax.lax.stop_gradient((x, p["shared"]))
        x = jax.lax.while_loop(lambda x: x.sum() < 0, lambda x: x @ w @ w @ w @ w @ w @ w @ shared, x)
        return jnp.mean(x @ p["last"])

    def step(p, x):
        return mpmd.accumulate_gradients(looped, 2)(p, x)

    config = mpmd.make_config(topology, stages="auto")
    params, x = {"first": w[:, :8] @ w[:8], "shared": w, "last": w[:, :1]}, w[:8]
    with pytest.warns(UserWarning, match="stages of looped by cost are not balanced") as caught:
        mpmd.jit(step, config).lower(params, x)
    (text,) = [str(w.message) for w in caught if "not balanced" in str(w.message)]
    assert "work is on mesh 'm1', one of 2\n  while (" in text and "looped)) has" in text
    assert "a loop is divided between its iterations if their number is known, as of jax.lax.scan" in text


def test_a_product_of_narrow_factors_is_priced_by_them_whatever_its_sums_are_kept_in():
    a, b = jnp.ones((512, 512), jnp.bfloat16), jnp.ones((512, 512), jnp.bfloat16)

    def seconds(kept):
        jaxpr = jax.make_jaxpr(lambda a, b: jnp.matmul(a, b, preferred_element_type=kept))(a, b)
        return products_work(jaxpr.eqns, H100)[1]

    assert seconds(jnp.float32) == seconds(jnp.bfloat16)
