"""Models whose layers are stacked, with a part of the stack on each mesh: numbers, messages, bytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import mpmd
from examples.workloads.models import normal
from examples.workloads.steps import pipelined
from mpmd.errors import PlacementError
from mpmd.runtime.program.stream_memory import predict_memory
from mpmd.runtime.run.clients import made_devices
from tests.support.comparing import copied, relative_difference
from tests.support.layered_models import LAYERS, SCANNED, block, block_params, entropy, scanned, sliced

pytestmark = pytest.mark.usefixtures("plain_xla")

MICROBATCHES = 4


def training(loss, optimizer):
    """`step(params, state, *batch) -> (params, state, loss)`."""

    def step(params, state, *batch):
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def divided(step, pattern, meshes=2, mesh=1, **options):
    topology = mpmd.make_topology({f"m{s}": mesh for s in range(meshes)})
    config = mpmd.make_config(topology, stages=mpmd.split(pattern, **options.pop("split", {})), **options)
    return mpmd.jit(step, config, donate_argnums=(0, 1))


def whole(tree):
    return jax.tree.map(np.asarray, tree, is_leaf=lambda leaf: isinstance(leaf, mpmd.Stacked))


def sent(program):
    """The shapes of all messages."""
    return [kind.shape for channel in program.channels for kind in channel.types]


def check(model, optimizer, tolerance=1e-5, **options):
    """Two steps give the numbers of `jax.jit`, and no rows of stacked parameters are sent."""
    params, loss, batch, pattern = model
    step, state = training(loss, optimizer), optimizer.init(params)
    ours = divided(step, pattern, **options)
    lowered = ours.lower(params, state, *batch)
    rows = {leaf.shape[1:] for leaf in jax.tree.leaves(params.get("layers", ())) if leaf.ndim > 2}
    assert not [shape for shape in sent(lowered.program) if shape[1:] in rows]
    want, got = (params, state), copied((params, state))
    for _ in range(2):
        *want, want_loss = jax.jit(step)(*want, *batch)
        *got, got_loss = ours(*got, *batch)
        assert relative_difference(whole(got), want) <= tolerance
        assert relative_difference(got_loss, want_loss) <= tolerance
    return lowered, got


ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3))


@pytest.mark.slow
def test_training_is_that_of_jit_and_every_mesh_has_its_own_rows():
    """Three layers on two meshes; the first step takes whole arrays, the second the parts of the first."""
    lowered, (params, state) = check(scanned(layers=3), ADAM)
    assert lowered.warnings == []
    moments = [state[1][0].mu["layers"]["w"], state[1][0].nu["layers"]["w"]]
    assert [stack.lengths for stack in (params["layers"]["w"], *moments)] == [(2, 1)] * 3
    first, second = params["layers"]["w"].parts
    assert first.sharding.mesh.devices.tolist() != second.sharding.mesh.devices.tolist() or (
        first.devices().pop().client is not second.devices().pop().client
    )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("name", SCANNED)
def test_models_under_every_schedule(name, schedule):
    lowered, _ = check(SCANNED[name](), ADAM, tolerance=2e-5, schedule=schedule)
    assert lowered.warnings == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in order", "unstacked", "cast", "decayed"])
def test_stacks_whose_rows_a_loop_of_python_slices(how):
    lowered, (params, *_) = check(sliced(how), ADAM, tolerance=2e-5, split={"lengths": (1, 3)})
    assert lowered.warnings == [] and params["layers"]["w"].lengths == (1, 3)


MUON = optax.contrib.MuonDimensionNumbers
OPTIMIZERS = {
    "momentum": optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(
        optax.cosine_decay_schedule(1e-2, 100),
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 2, params),
        eps=1e-3,
    ),
    "bfloat16": optax.adam(1e-2, eps=1e-3, mu_dtype=jnp.bfloat16),
    "lion": optax.chain(optax.clip_by_block_rms(1.0), optax.lion(1e-3)),
    "lamb": optax.lamb(1e-2, eps=1e-3),
    "adafactor": optax.adafactor(1e-2),
    "factored": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": optax.contrib.muon(
        1e-3,
        muon_weight_dimension_numbers=lambda params: {
            **dict.fromkeys(params),
            "layers": {"w": MUON(1, 2), "b": None, "scale": None},
            "head": MUON(0, 1),
        },
    ),
    "clipped": optax.chain(optax.adaptive_grad_clip(0.1), optax.zero_nans(), optax.sgd(0.05)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_compute_part_by_part(name):
    rounded = name == "bfloat16"  # a sum in another order may round a moment to the next number of 8 bits
    lowered, _ = check(scanned(), OPTIMIZERS[name], tolerance=5e-3 if rounded else 5e-5)
    assert lowered.warnings == []


CONDITIONAL = {
    "apply_if_finite": optax.apply_if_finite(ADAM, 3),
    "multi_steps": optax.MultiSteps(ADAM, 2),
    "both": optax.MultiSteps(optax.apply_if_finite(ADAM, 3), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONDITIONAL)
@pytest.mark.parametrize("model", ["scanned", "shared_and_auxiliary"])
def test_conditionals_over_the_whole_state_are_split_by_mesh(name, model):
    """The second step takes the other branch of `MultiSteps`."""
    lowered, _ = check(SCANNED[model](), CONDITIONAL[name])
    assert lowered.warnings == []


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_skipped_on_every_mesh():
    params, loss, (ids, targets), pattern = scanned()
    optimizer = optax.apply_if_finite(ADAM, 3)
    step, state = training(lambda p, scale, *b: loss(p, *b) * scale.mean(), optimizer), optimizer.init(params)
    ours, want, got = divided(step, pattern), (params, state), copied((params, state))
    for scale in (1.0, np.inf, 1.0):
        batch = np.full((len(ids),), scale, np.float32), ids, targets
        *want, _ = jax.jit(step)(*want, *batch)
        *got, _ = ours(*got, *batch)
        assert relative_difference(whole(got), want) <= 1e-5
    assert int(got[1].total_notfinite) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("model", "tolerance"), [("scanned", 1e-5), ("half_precision_stack", 1e-4)])
def test_a_step_with_loss_scaling_an_average_of_the_weights_and_labels_sends_no_rows(model, tolerance):
    """The loss closes over a scale that is halved where gradients are not finite."""
    params, loss, batch, pattern = SCANNED[model]()
    labels = {k: jax.tree.map(lambda _, k=k: "head" if k == "head" else "rest", v) for k, v in params.items()}
    kinds = {"rest": optax.masked(optax.adamw(1e-2, eps=1e-3), labels_of_matrices), "head": optax.sgd(0.1)}
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.multi_transform(kinds, labels))

    def step(state, *batch):
        params, moments, average, scale = state
        scaled = lambda params, *batch: loss(params, *batch) * scale  # noqa: E731
        value, grads = mpmd.accumulate_gradients(scaled, MICROBATCHES)(params, *batch)
        grads = jax.tree.map(lambda g: g / scale, grads)
        fine = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        updates, after = optimizer.update(grads, moments, params)
        kept = lambda new, old: jax.tree.map(lambda n, o: jnp.where(fine, n, o), new, old)  # noqa: E731
        params = kept(optax.apply_updates(params, updates), params)
        average = optax.incremental_update(params, average, 0.01)
        return (params, kept(after, moments), average, jnp.where(fine, 2 * scale, scale / 2)), value / scale

    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    ours = mpmd.jit(step, mpmd.make_config(topology, stages=mpmd.split(pattern)), donate_argnums=0)
    want = got = params, optimizer.init(params), params, np.float32(1024)
    lowered = ours.lower(got, *batch)
    rows = {leaf.shape[1:] for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim > 2}
    assert lowered.warnings == [] and not [s for s in sent(lowered.program) if s[1:] in rows]
    for _ in range(2):
        want, want_loss = jax.jit(step)(want, *batch)
        got, got_loss = ours(jax.tree.map(np.array, got), *batch)
        assert relative_difference(whole((got, got_loss)), (want, want_loss)) <= tolerance


def labels_of_matrices(params):
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) > 1, params)


def by_hand(params, ids, targets):
    """The loss of `scanned` with a stack and a name for each of two stages."""

    def run(x, layers):
        return jax.lax.scan(lambda x, p: (block(p, x), None), x, layers)[0]

    def first(params, layers, ids):
        return run(params["embed"][ids] + params["pos"], layers)

    def last(params, layers, x, targets):
        return entropy(run(x, layers) @ params["head"], targets)

    x = mpmd.named_computation(first, name="stage0")(params, params["layers0"], ids)
    return mpmd.named_computation(last, name="stage1")(params, params["layers1"], x, targets)


@pytest.mark.slow
def test_messages_and_bytes_are_those_of_the_model_written_by_hand():
    params, loss, batch, pattern = scanned()
    half = LAYERS // 2
    halves = [jax.tree.map(lambda a, s=s: a[s : s + half], params["layers"]) for s in (0, half)]
    rest = {name: leaf for name, leaf in params.items() if name != "layers"}
    rewritten = {**rest, "layers0": halves[0], "layers1": halves[1]}
    found = divided(training(loss, ADAM), pattern).lower(params, ADAM.init(params), *batch)
    wanted = pipelined(training(by_hand, ADAM), 2, donate_argnums=(0, 1)).lower(
        rewritten, ADAM.init(rewritten), *batch
    )
    assert sorted(sent(found.program)) == sorted(sent(wanted.program))
    peaks = [[mesh.peak_bytes for mesh in predict_memory(low.program)] for low in (found, wanted)]
    assert peaks[0] == peaks[1]


@pytest.mark.slow
def test_uneven_lengths_several_stages_per_mesh_and_two_scans():
    def loss(params, ids, targets):
        def run(x, layers):
            return jax.lax.scan(lambda x, p: (block(p, x), None), x, layers)[0]

        x = run(params["embed"][ids], params["encoder"])
        return entropy(run(x, params["decoder"]) @ params["head"], targets)

    params, _, batch, _ = scanned()
    params = {
        "embed": params["embed"],
        "head": params["head"],
        "encoder": block_params(3, 3),
        "decoder": block_params(4, 5),
    }
    model = params, loss, batch, "coder"
    _, (params, _) = check(model, ADAM, split={"lengths": [2, 3, 3]}, meshes=3)
    assert params["encoder"]["w"].lengths == (2, 1) and params["decoder"]["w"].lengths == (2, 3)
    looped = {"split": {"over": ["m0", "m1", "m0", "m1"]}, "schedule": "interleaved_1f1b"}
    _, (params, _) = check(scanned(), ADAM, **looped)
    assert params["layers"]["w"].lengths == (1, 1, 1, 1)


@pytest.mark.slow
def test_meshes_of_several_devices_with_sharded_layers():
    params, loss, batch, pattern = scanned()
    shard = {"w": PartitionSpec(None, None, "model"), "b": PartitionSpec(), "scale": PartitionSpec()}
    specs = {"embed": PartitionSpec(), "pos": PartitionSpec(), "layers": shard, "head": PartitionSpec()}
    optimizer = optax.sgd(0.1, momentum=0.9)
    model = params, loss, batch, pattern
    _, (params, _) = check(
        model,
        optimizer,
        mesh={"data": 2, "model": 2},
        in_shardings=(specs, None, PartitionSpec("data"), PartitionSpec("data")),
        out_shardings=(specs, None, None),
    )
    for part in params["layers"]["w"].parts:
        assert part.sharding.shard_shape(part.shape)[2] == part.shape[2] // 2


@pytest.mark.slow
def test_parts_of_another_division_and_the_compiled_step_take_either():
    params, loss, batch, pattern = scanned()
    optimizer = optax.sgd(0.1)
    step, state = training(loss, optimizer), optimizer.init(params)
    halves = divided(step, pattern)
    once, state, _ = halves(copied(params), state, *batch)
    uneven = divided(step, pattern, split={"lengths": [1, 3]})
    again, _, _ = uneven(once, state, *batch)
    compiled = halves.compiled(params, state, *batch)
    assert halves.compiled(again, state, *batch) is compiled
    third, _, loss_of_parts = compiled(copied(again), state, *batch)
    _, _, loss_of_whole = compiled(whole(again), state, *batch)
    assert float(loss_of_parts) == float(loss_of_whole)
    assert third["layers"]["w"].lengths == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("each", [1, 2])
def test_parts_of_one_client_are_one_array_over_an_axis_of_stages_without_a_copy(each):
    """The step takes it as it takes parts, and consumes the same buffers."""
    params, loss, batch, pattern = scanned()
    step = training(loss, optimizer := optax.sgd(0.1, momentum=0.9))
    devices = jax.devices()
    topology = mpmd.make_topology({"m0": devices[:each], "m1": devices[each : 2 * each]})
    specs = {k: jax.tree.map(lambda _: PartitionSpec(), v) for k, v in params.items()}
    specs["layers"]["w"] = PartitionSpec(None, None, "data")
    placed = {"in_shardings": (specs, None, None, None), "out_shardings": (specs, None, None)}
    config = mpmd.make_config(topology, stages=mpmd.split(pattern), **(placed if each > 1 else {}))
    ours = mpmd.jit(step, config, donate_argnums=(0, 1))
    once, state, _ = ours(*copied((params, optimizer.init(params))), *batch)
    want, want_loss = whole(once), jax.jit(step)(whole(once), whole(state), *batch)[2]
    stack = once["layers"]["w"]
    array = stack.over_axis("stage")
    np.testing.assert_array_equal(array, want["layers"]["w"])
    assert array.sharding.spec == PartitionSpec("stage", None, "data" if each > 1 else None)
    assert {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards} == {
        shard.data.unsafe_buffer_pointer() for part in stack.parts for shard in part.addressable_shards
    }
    once["layers"]["w"] = array
    again, _, got_loss = ours(once, state, *batch)
    assert relative_difference(got_loss, want_loss) <= 1e-5
    assert again["layers"]["w"].lengths == (2, 2) and array.is_deleted()


@pytest.mark.slow
def test_parts_that_cannot_be_one_array_are_refused_with_the_reason():
    uneven = mpmd.Stacked([jnp.zeros((1, 4)), jnp.zeros((3, 4))])
    with pytest.raises(
        PlacementError, match=r"axis 'stage': they have different shapes, \(1, 4\) and \(3, 4\)"
    ):
        uneven.over_axis()
    with pytest.raises(PlacementError, match="their meshes share devices\n  use .whole"):
        mpmd.Stacked([jnp.zeros((2, 4)), jnp.ones((2, 4))]).over_axis()
    with pytest.raises(PlacementError, match="they are not arrays on meshes"):
        mpmd.Stacked([np.zeros((2, 4))] * 2).over_axis()
    topology = mpmd.make_topology(made_devices({"m0": 1, "m1": 1}))
    config = mpmd.make_config(topology, stages=mpmd.split("layers"), schedule=None)
    params, loss, batch, _ = scanned()
    made = mpmd.jit(lambda p, *b: mpmd.accumulate_gradients(loss, 4)(p, *b)[1], config)(params, *batch)
    with pytest.raises(
        PlacementError, match="each mesh has made devices of its own; .*'jax_num_cpu_devices', 2"
    ):
        made["layers"]["w"].over_axis()


@pytest.mark.slow
def test_what_cannot_be_computed_in_parts_is_joined_once_with_a_warning():
    params, loss, batch, pattern = scanned()

    def step(params, *batch):
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, *batch)
        order = jnp.argsort(params["layers"]["w"], axis=0)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, value, order

    ours = divided(lambda params, _, *batch: step(params, *batch), pattern)
    with pytest.warns(
        UserWarning, match=r"sort cannot be computed in parts: .* float32\[4,16,16\] .* joined"
    ):
        lowered = ours.lower(params, None, *batch)
    assert len([text for text in lowered.warnings if "joined" in text]) == 1
    got, want = ours(copied(params), None, *batch), jax.jit(step)(params, *batch)
    np.testing.assert_array_equal(got[2], want[2])
    assert relative_difference(whole(got[:2]), want[:2]) <= 1e-5


def test_a_gradient_of_ones_own_takes_whole_arrays_and_consumes_parts():
    params = {"layers": jnp.asarray(normal(1, 2, 4, 4))}

    def loss(params, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0] ** 2)

    def step(params, _, x):
        return jax.tree.map(jnp.subtract, params, jax.grad(mpmd.staged(loss))(params, x)), None

    ours = divided(step, "layers", schedule=None)
    shapes = jax.eval_shape(ours, params, None, np.ones((2, 4), np.float32))
    assert shapes[0]["layers"].shape == (2, 4, 4)
    want = params["layers"] - jax.grad(loss)(params, np.ones((2, 4), np.float32))["layers"]
    once, _ = ours(params, None, np.ones((2, 4), np.float32))
    assert params["layers"].is_deleted() and once["layers"].lengths == (1, 1)
    np.testing.assert_allclose(once["layers"], want, 1e-5)
    ours(once, None, np.ones((2, 4), np.float32))
    assert all(part.is_deleted() for part in once["layers"].parts)
