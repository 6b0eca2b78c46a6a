"""Losses that close over models which do not learn: frozen weights, references, teachers; and rollouts."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpmd
from examples.workloads.models import normal
from tests.support.comparing import copied, relative_difference

pytestmark = pytest.mark.usefixtures("plain_xla")

WIDTH, WORDS, LENGTH, LAYERS, MICROBATCHES = 8, 7, 6, 4, 2
SELECTORS = {"separate": mpmd.by_parameters(r"layers/(\d+)"), "stacked": mpmd.split("layers")}
tx = optax.adam(1e-2, eps=1e-3)


def layers(kind, seed, count=LAYERS, **shapes):
    """Layers with a weight of each shape, separate or stacked."""
    stacked = {name: normal(seed + i, count, *shape) for i, (name, shape) in enumerate(shapes.items())}
    return stacked if kind == "stacked" else [{k: a[i] for k, a in stacked.items()} for i in range(count)]


def model(kind, seed, count=LAYERS):
    ends = {"embed": normal(seed, WORDS, WIDTH), "head": normal(seed + 1, WIDTH, WORDS)}
    return ends | {"layers": layers(kind, seed + 2, count, w=(WIDTH, WIDTH))}


def through(layer, of_layers, x):
    """`layer(p, x)` for layers that are separate or stacked; `of_layers` may be a pair of them."""
    if isinstance(jax.tree.leaves(of_layers)[0], jax.Array) and isinstance(of_layers, dict):
        return jax.lax.scan(lambda x, p: (layer(p, x), None), x, of_layers)[0]
    for p in of_layers:
        x = layer(p, x)
    return x


def logits(params, ids, layer=lambda p, x: x + jnp.tanh(x @ p["w"])):
    return through(layer, params["layers"], jnp.asarray(params["embed"])[ids]) @ params["head"]


def entropy(logits, ids):
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()


def answers(seed, rows=4):
    return jax.random.randint(jax.random.key(seed), (rows, LENGTH), 0, WORDS)


def step_of(loss):
    """A step of `state["learns"]`, whose loss closes over `state["frozen"]`."""

    def step(state, *batch):
        of_batch = mpmd.accumulate_gradients(functools.partial(loss, state["frozen"]), MICROBATCHES)
        value, grads = of_batch(state["learns"], *batch)
        updates, opt = tx.update(grads, state["opt"], state["learns"])
        learns = optax.apply_updates(state["learns"], updates)
        return {"learns": learns, "opt": opt, "frozen": state["frozen"]}, value

    return step


def lowered(step, stages, state, *batch):
    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    config = mpmd.make_config(topology, stages=stages, schedule="1f1b")
    ours = mpmd.jit(step, config, donate_argnums=0)
    found = ours.lower(state, *batch)
    assert found.warnings == []
    return ours, found


def check(step, stages, state, *batch, steps=1):
    """Trains; the state and the lowered step."""
    ours, found = lowered(step, stages, state, *batch)
    want, got = state, copied(state)
    for _ in range(steps):
        (want, want_loss), (got, got_loss) = jax.jit(step)(want, *batch), ours(got, *batch)
    assert relative_difference((mpmd.fetch(got), got_loss), (want, want_loss)) < 1e-5
    return got, found


def fed(found, mesh):
    """The paths of the arguments that a mesh takes."""
    text = found.as_text("program").split(f"mesh {mesh}:")[1].split("\nmesh ")[0]
    return [line.split('"')[1] for line in text.splitlines() if " = feed " in line and '"' in line]


def tasks(found, mesh):
    """The letters of the tasks of a mesh, in order."""
    text = found.as_text("program").split(f"mesh {mesh}:")[1].split("\nmesh ")[0]
    return re.findall(r"  # ([A-Z]) stage", text)


def adapted(frozen, adapters, ids):
    def layer(both, x):
        return x + jnp.tanh(x @ both["w"] + x @ both["a"] @ both["b"])

    together = frozen["layers"]
    if isinstance(together, dict):
        together = together | adapters["layers"]
    else:
        of = adapters["layers"]
        together = [
            p | of[i] if i in of else p | {"a": 0 * p["w"], "b": p["w"]} for i, p in enumerate(together)
        ]
    return entropy(logits(frozen | {"layers": together}, ids, layer), ids)


def adapter_state(kind, only=range(LAYERS)):
    shapes = {"a": (WIDTH, 2), "b": (2, WIDTH)}
    adapters = {"layers": layers(kind, 20, **shapes)}
    if kind == "separate":
        adapters = {"layers": {i: adapters["layers"][i] for i in only}}
    return {"learns": adapters, "opt": tx.init(adapters), "frozen": model(kind, 1)}


@pytest.mark.fast_cases("stacked")
@pytest.mark.parametrize("kind", SELECTORS)
def test_frozen_weights_are_on_the_meshes_of_their_adapters(kind):
    """Each mesh takes its own half of them, without gradients."""
    state, found = check(step_of(adapted), SELECTORS[kind], adapter_state(kind), answers(1), steps=2)
    halves = [[path for path in fed(found, mesh) if "'frozen'" in path] for mesh in ("m0", "m1")]
    assert not set(halves[0]) & set(halves[1])
    assert [sum("'layers'" in path for path in half) for half in halves] == (
        [1, 1] if kind == "stacked" else [2, 2]
    )
    backward = [
        line.split(" = run ")[0] for line in found.as_text("program").splitlines() if "# B stage" in line
    ]
    weight = f"{WIDTH},{WIDTH}]"
    assert len(backward) == 2 * MICROBATCHES and not any(weight in results for results in backward)
    assert relative_difference(mpmd.fetch(state["frozen"]), model(kind, 1)) == 0


@pytest.mark.slow
def test_a_stack_that_is_cast_before_the_scan_is_in_parts_under_auto():
    def loss(frozen, adapters, ids):
        narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), frozen["layers"])
        return adapted(frozen | {"layers": narrow}, adapters, ids)

    state, _ = check(step_of(loss), "auto", adapter_state("stacked"), answers(1), steps=2)
    assert isinstance(state["frozen"]["layers"]["w"], mpmd.Stacked)


def test_stages_before_the_first_adapter_have_no_backward():
    state = adapter_state("separate", only=(2, 3))
    _, found = lowered(step_of(adapted), SELECTORS["separate"], state, answers(1))
    assert tasks(found, "m0") == ["F", "F"] and "B" in tasks(found, "m1")
    assert not any("'a'" in path for path in fed(found, "m0"))  # the adapters' and their moments'


def preference(frozen, policy, chosen, rejected, *, together):
    def of(params):
        if together:
            both = jnp.concatenate([chosen, rejected])
            return of_ids(params, both).reshape(2, -1)
        return jnp.stack([of_ids(params, chosen), of_ids(params, rejected)])

    def of_ids(params, ids):
        found = jax.nn.log_softmax(logits(params, ids)[:, :-1])
        return jnp.take_along_axis(found, ids[:, 1:, None], -1).sum((1, 2))

    margins = of(policy) - of(frozen)
    return -jax.nn.log_sigmoid(0.1 * (margins[0] - margins[1])).mean()


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
@pytest.mark.parametrize("kind", SELECTORS)
def test_a_reference_runs_in_the_stages_of_the_policy(kind, together):
    """Both answers in one batch, whose halves have as many rows as a stage has layers, or apart."""
    policy = model(kind, 1)
    state = {"learns": policy, "opt": tx.init(policy), "frozen": model(kind, 30)}
    loss = functools.partial(preference, together=together)
    _, found = check(step_of(loss), SELECTORS[kind], state, answers(1), answers(2))
    halves = [[path for path in fed(found, mesh) if "'frozen'" in path] for mesh in ("m0", "m1")]
    assert not set(halves[0]) & set(halves[1]) and len(halves[0]) == len(halves[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", SELECTORS)
def test_a_teacher_of_other_layers_is_divided_by_itself(kind):
    def loss(teacher, student, ids):
        wide = jax.nn.log_softmax(mpmd.staged(logits)(teacher, ids))  # stages have no stages in them
        return -(jnp.exp(wide) * jax.nn.log_softmax(logits(student, ids))).sum(-1).mean()

    student = model(kind, 1)
    state = {"learns": student, "opt": tx.init(student), "frozen": model(kind, 30, 2 * LAYERS)}
    got, found = check(step_of(loss), SELECTORS[kind], state, answers(1))
    if kind == "stacked":
        assert got["frozen"]["layers"]["w"].lengths == (LAYERS, LAYERS)
        assert got["learns"]["layers"]["w"].lengths == (LAYERS // 2, LAYERS // 2)
    for mesh in ("m0", "m1"):
        assert sum("'frozen'" in path and "'layers'" in path for path in fed(found, mesh)) in (1, LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_teacher_on_meshes_of_its_own(schedule):
    """Its stages are named, and run beside the student's; it has no backward, and its weights stay there."""

    def loss(teacher, student, x):
        def half(name, w, x):
            return mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name=name)(w, x)

        wide = x
        for i in range(2):
            wide, x = half(f"teacher{i}", teacher[i], wide), half(f"student{i}", student[i], x)
        distance = mpmd.named_computation(lambda a, b: ((a - b) ** 2).mean(), name="loss")
        return distance(jax.lax.stop_gradient(wide), x)

    student, teacher = ([normal(seed + i, WIDTH, WIDTH) for i in range(2)] for seed in (1, 5))
    state = {"learns": student, "opt": tx.init(student), "frozen": teacher}
    places = {"student0": "m0", "student1": "m1", "loss": "m1", "teacher0": "m2", "teacher1": "m3"}
    topology = mpmd.make_topology({f"m{i}": 1 for i in range(4)})
    config = mpmd.make_config(topology, places, schedule=schedule)
    step, x = step_of(loss), normal(9, 4, WIDTH)
    found = mpmd.jit(step, config).lower(state, x)
    assert found.warnings == []
    got, want = mpmd.jit(step, config)(state, x), jax.jit(step)(state, x)
    assert relative_difference(mpmd.fetch(got), want) < 1e-5
    for mesh, i in (("m2", 0), ("m3", 1)):
        assert [path for path in fed(found, mesh) if "frozen" in path] == [f"state['frozen'][{i}]"]
        runs = [s for s in found.schedule().compute(mesh) if s.task is not None]
        assert {run.task.phase.value for run in runs} == {"F"} and len(runs) == MICROBATCHES


@pytest.mark.slow
def test_layers_that_lengths_do_not_fit_are_divided_equally():
    student = model("stacked", 1)
    state = {"learns": student, "opt": tx.init(student), "frozen": model("stacked", 30, 6)}

    def loss(teacher, student, ids):
        return ((logits(teacher, ids) - logits(student, ids)) ** 2).mean()

    got, _ = check(step_of(loss), mpmd.split("layers", lengths=[1, 3]), state, answers(1))
    assert got["frozen"]["layers"]["w"].lengths == (3, 3)
    assert got["learns"]["layers"]["w"].lengths == (1, 3)


def test_the_text_of_stages_counts_what_they_close_over():
    student = model("stacked", 1)
    state = {"learns": student, "opt": tx.init(student), "frozen": {"scale": normal(3, WIDTH)}}

    def loss(frozen, params, ids):
        return entropy(logits(params | {"embed": params["embed"] * frozen["scale"]}, ids), ids)

    _, found = lowered(step_of(loss), SELECTORS["stacked"], state, answers(1))
    first, second = [line for line in found.as_text("stages").splitlines() if line.startswith("stage")]
    assert first.endswith(f", {4 * WIDTH} B closed over") and "closed over" not in second


def attend(p, x, cache, start):
    keys = jax.lax.dynamic_update_slice(cache, x @ p["w"], (0, start, 0))
    seen = jnp.arange(LENGTH)[None, :] <= start + jnp.arange(x.shape[1])[:, None]
    weights = jax.nn.softmax(jnp.where(seen, x @ keys.mT, -1e9))
    return x + weights @ keys, keys


@pytest.mark.slow
def test_rollouts_take_the_training_state_where_it_is():
    """A group-relative step and the sampling before it, with the caches in parts."""
    rows, group = 4, 2

    def forward(params, caches, ids, start):
        def layer(x, of):
            return attend(of[0], x, of[1], start)

        x, caches = jax.lax.scan(layer, jnp.asarray(params["embed"])[ids], (params["layers"], caches))
        return jax.nn.log_softmax(x @ params["head"]), caches

    def sample(params, caches, ids, start, key):
        found, caches = mpmd.staged(forward)(params, caches, ids, start)
        return jax.random.categorical(key, found[:, -1]), caches

    def loss(frozen, policy, ids, advantages):
        def of(params):
            empty = jnp.zeros((LAYERS, len(ids), LENGTH, WIDTH))
            found = forward(params, empty, ids, 0)[0][:, :-1]
            return jnp.take_along_axis(found, ids[:, 1:, None], -1)[..., 0]

        new, kept = of(policy), of(frozen)
        ratio = jnp.exp(new - jax.lax.stop_gradient(new))
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        return (0.1 * (jnp.exp(kept - new) - (kept - new) - 1) - gain).mean()

    def run(sample, step, state):
        for number in range(2):
            caches, ids = jnp.zeros((LAYERS, rows, LENGTH, WIDTH)), np.full((rows, 1), 1)
            for start in range(LENGTH - 1):
                key = jax.random.key(LENGTH * number + start)
                token, caches = sample(state["learns"], caches, ids[:, -1:], start, key)
                ids = np.concatenate([ids, jax.device_get(token)[:, None]], 1)
            rewards = (ids == 3).mean(1).reshape(-1, group)
            advantages = (rewards - rewards.mean(1, keepdims=True)).reshape(-1, 1).astype(np.float32)
            state, value = step(state, ids, advantages)
        return ids, value, mpmd.fetch(state), caches

    policy = model("stacked", 1)
    state = {"learns": policy, "opt": tx.init(policy), "frozen": model("stacked", 30)}
    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    forward_config = mpmd.make_config(topology, stages=SELECTORS["stacked"])
    config = mpmd.make_config(topology, stages=SELECTORS["stacked"], schedule="1f1b")
    sampling = mpmd.jit(sample, forward_config, donate_argnums=1)
    ids, *results, caches = run(sampling, mpmd.jit(step_of(loss), config, donate_argnums=0), copied(state))
    expected, *wanted, _ = run(jax.jit(sample), jax.jit(step_of(loss)), state)
    assert (ids == expected).all() and relative_difference(results, wanted) < 1e-5
    assert isinstance(caches, mpmd.Stacked) and caches.lengths == (LAYERS // 2,) * 2
