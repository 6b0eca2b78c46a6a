"""`mpmd.jit` is `jax.jit` with a configuration: arguments, signatures, donation, stages, placement."""

from __future__ import annotations

import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.errors import ConfigError, SignatureError
from tests.support.two_stages import two_stages

X = np.arange(32, dtype=np.float32).reshape(8, 4)
TOPOLOGY = mpmd.make_topology({"m0": 1, "m1": 1})
CONFIG = mpmd.make_config(TOPOLOGY, {"first": "m0", "second": "m1"})


def mesh_of(array):
    """The name of the mesh that an array lives on."""
    return next(name for name, mesh in TOPOLOGY.items() if array.device in mesh.devices.flat)


def feeds(lowered):
    """For each argument that is used the meshes it is fed to."""
    found = {}
    for stream in lowered.program.streams:
        for op in stream.instructions:
            if type(op).__name__ == "Feed":
                found.setdefault(lowered.program.inputs[op.input].path, []).append(stream.mesh)
    return found


@pytest.mark.parametrize(
    "decorate",
    [
        lambda fn: mpmd.jit(fn, CONFIG),
        lambda fn: mpmd.jit(fn, config=CONFIG),
        lambda fn: mpmd.jit(CONFIG)(fn),
        lambda fn: mpmd.jit(config=CONFIG, donate_argnums=())(fn),
        lambda fn: functools.partial(mpmd.jit, config=CONFIG)(fn),
    ],
)
def test_every_way_to_write_it(decorate):
    step = decorate(two_stages)
    assert step.__name__ == "two_stages" and step.__wrapped__ is two_stages
    result = step(X)
    assert isinstance(result, jax.Array) and mesh_of(result) == "m1"
    np.testing.assert_array_equal(result, 2 * X + 1)


def test_pytrees_keywords_and_none():
    @mpmd.jit(CONFIG)
    def step(state, *, batch, extra=None):
        y = two_stages(state["w"] * batch["x"])
        return {"y": y, "nothing": None, "kept": state["w"], "number": 3}, extra

    out, extra = step({"w": np.float32(2)}, batch={"x": X})
    np.testing.assert_array_equal(out["y"], 4 * X + 1)
    assert out["nothing"] is None and extra is None
    assert float(out["kept"]) == 2 and int(out["number"]) == 3


@pytest.mark.parametrize("options", [{"static_argnums": 1}, {"static_argnames": "times"}])
@pytest.mark.parametrize("by_name", [False, True])
def test_static_arguments_are_compiled_in(options, by_name):
    traced = []

    @mpmd.jit(CONFIG, **options)
    def step(x, times):
        traced.append(times)
        for _ in range(times):
            x = two_stages(x)
        return x

    for times in (1, 2, 1):
        got = step(X, times=times) if by_name else step(X, times)
        np.testing.assert_array_equal(got, 2 * X + 1 if times == 1 else 4 * X + 3)
    assert traced == [1, 2]


def test_it_is_traced_once_per_signature():
    traced = []

    @mpmd.jit(CONFIG)
    def step(x):
        traced.append(x.shape)
        return two_stages(x)

    for x in (X, jnp.asarray(X), step(X), X[:4], X.astype(np.int32), X):
        step(x)
    assert traced == [(8, 4), (4, 4), (8, 4)]
    step.clear_cache()
    np.testing.assert_array_equal(step(X), 2 * X + 1)


def test_the_same_argument_of_another_dtype_gives_another_dtype():
    step = mpmd.jit(two_stages, CONFIG)
    assert step(X).dtype == np.float32
    assert step(X.astype(np.int32)).dtype == np.int32


def test_python_numbers_keep_their_weak_type():
    """A counter that begins as a Python number is not traced for anew when it comes back."""
    traced = []

    @mpmd.jit(CONFIG)
    def step(count, x):
        traced.append(count)
        return count + 1, two_stages(x) * count

    count = 0
    for number in range(3):
        count, y = step(count, X)
        assert count.weak_type and not y.weak_type and int(count) == number + 1
    assert len(traced) == 1
    plain = jax.jit(step.__wrapped__)(1.5, X)
    assert [r.weak_type for r in step(1.5, X)] == [r.weak_type for r in plain]


@pytest.mark.parametrize("options", [{"donate_argnums": 0}, {"donate_argnames": ("x",)}])
def test_donated_arguments_are_deleted_and_others_are_not(options):
    step = mpmd.jit(lambda x, y: two_stages(x) + y, CONFIG, **options)
    x = jax.device_put(X, TOPOLOGY["m0"].devices.flat[0])
    y = jax.device_put(X, TOPOLOGY["m1"].devices.flat[0])
    np.testing.assert_array_equal(step(x, y), 3 * X + 1)
    assert x.is_deleted() and not y.is_deleted()


def test_a_state_goes_around():
    """What a step returns is where the next one wants it: nothing moves, and nothing is traced again."""

    @mpmd.jit(CONFIG, donate_argnums=0)
    def step(state, x):
        def loss(state):
            h = mpmd.named_computation(lambda w, x: x * w, name="first")(state["a"], x)
            return mpmd.named_computation(lambda w, h: (h * w).sum(), name="second")(state["b"], h)

        return jax.tree.map(lambda w, g: w - 1e-4 * g, state, jax.grad(loss)(state))

    state = {"a": np.float32(1), "b": np.float32(2)}
    plain = state
    ran = set()
    for _ in range(3):
        ran.add(step.compiled(state, X))
        state = step(state, X)
        plain = jax.jit(step.__wrapped__)(plain, X)
        assert {name: mesh_of(leaf) for name, leaf in state.items()} == {"a": "m0", "b": "m1"}
    np.testing.assert_allclose(jax.tree.leaves(state), jax.tree.leaves(plain), rtol=1e-6)
    assert len(ran) == 1


def test_arguments_may_be_anywhere():
    step = mpmd.jit(two_stages, CONFIG)
    elsewhere = jax.device_put(X, TOPOLOGY["m1"].devices.flat[0])
    for x in (X, X.tolist()[0][0], jnp.asarray(X), elsewhere):
        np.testing.assert_array_equal(step(x), 2 * np.asarray(x, np.float32) + 1)
    assert not elsewhere.is_deleted()


@pytest.mark.parametrize(
    ("wanted", "found"),
    [(("m0", None, "m0"), ["m0", "m0", "m0"]), ((None, "m1", "m0"), ["m1", "m1", "m0"]), (None, ["m1"] * 3)],
)
def test_input_and_output_meshes(wanted, found):
    """What is not told is inferred: unnamed work goes where its results are wanted, or its arguments are."""

    def step(x, y):
        return two_stages(x), 2 * y, 3 * y

    config = mpmd.make_config(
        TOPOLOGY, {"first": "m0", "second": "m1"}, input_meshes=(None, "m1"), output_meshes=wanted
    )
    results = mpmd.jit(step, config)(X, X)
    assert [mesh_of(r) for r in results] == found
    for got, want in zip(results, step(X, X), strict=True):
        np.testing.assert_array_equal(got, want)


def test_an_argument_and_a_result_that_must_share_a_mesh():
    """Unnamed work alone would leave the parameter where the gradient is."""

    def step(w, x):
        return w + 1, two_stages(x)

    config = mpmd.make_config(
        TOPOLOGY, {"first": "m0", "second": "m1"}, input_meshes=("m1", None), constraints=((0, 0),)
    )
    jitted = mpmd.jit(step, config)
    assert feeds(jitted.lower(X, X))["w"] == ["m1"]
    assert mesh_of(jitted(X, X)[0]) == "m1"


def test_an_unknown_mesh_of_an_input():
    config = mpmd.make_config(TOPOLOGY, {"first": "m0", "second": "m1"}, input_meshes=("m7",))
    with pytest.raises(ConfigError, match="input_meshes names an unknown mesh 'm7'; there are m0, m1"):
        mpmd.jit(two_stages, config).lower(X)


def test_meshes_for_arguments_that_do_not_exist():
    config = mpmd.make_config(TOPOLOGY, {"first": "m0", "second": "m1"}, input_meshes=("m0", "m0"))
    with pytest.raises(ConfigError, match="input_meshes is not a pytree prefix of the arguments"):
        mpmd.jit(two_stages, config).lower(X)


def test_a_named_tensor_is_where_its_name_says():
    def step(x):
        y = mpmd.named_tensor(x * 2, "here")
        return mpmd.named_computation(lambda y: y + 1, name="second")(y)

    config = mpmd.make_config(TOPOLOGY, {"here": "m0", "second": "m1"})
    jitted = mpmd.jit(step, config)
    assert feeds(jitted.lower(X)) == {"x": ["m0"]}
    np.testing.assert_array_equal(jitted(X), 2 * X + 1)


def test_the_stages_print_and_count():
    step = mpmd.jit(two_stages, CONFIG)
    lowered = step.trace(jax.ShapeDtypeStruct(X.shape, X.dtype)).lower()
    assert "stablehlo.multiply" in lowered.as_text("stablehlo")
    assert "mpmd.fragment_call" in lowered.as_text("mpmd")
    assert " send %" in lowered.as_text("program") and "mesh m1" in lowered.as_text("program")
    compiled = lowered.compile()
    assert compiled.as_text("hlo").count("HloModule") == 2
    assert compiled.as_text("program") == lowered.as_text("program")
    costs = compiled.cost_analysis()
    assert costs["flops"] == 2 * X.size and costs["bytes accessed"] >= 4 * X.nbytes
    assert sorted(costs["calls"].values()) == [1, 1]
    memory = compiled.memory_analysis()
    assert set(memory) == {"m0", "m1"} and all(m.peak_bytes >= X.nbytes for m in memory.values())
    np.testing.assert_array_equal(compiled(X), 2 * X + 1)
    results, timeline = compiled.timeline(X)
    np.testing.assert_array_equal(results, 2 * X + 1)
    assert {span.mesh for span in timeline.spans} == {"m0", "m1"}


def test_an_error_in_the_function_is_the_users_own():
    def step(x):
        return two_stages(x) @ jnp.ones((3, 3))

    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        mpmd.jit(step, CONFIG)(X)


def test_too_few_arguments():
    with pytest.raises(TypeError, match="two_stages does not take .* missing a required argument: 'x'"):
        mpmd.jit(two_stages, CONFIG)()


def test_a_static_argument_that_is_a_list():
    step = mpmd.jit(lambda x, n: two_stages(x), CONFIG, static_argnames="n")
    with pytest.raises(SignatureError, match="static argument 'n' is .* which has no hash"):
        step(X, n=[1])


def test_a_microbatch_that_counts_its_calls():
    """Calls with a counter are microbatches, in a loop of the user's own."""

    def step(x):
        return sum(mpmd.call(two_stages, call_counter=i)(x[4 * i : 4 * i + 4]).sum() for i in range(2))

    jitted = mpmd.jit(step, CONFIG)
    runs = [line for line in jitted.lower(X).as_text("program").splitlines() if "# F stage" in line]
    assert sorted(line.split("microbatch ")[1][0] for line in runs) == ["0", "0", "1", "1"]
    np.testing.assert_allclose(jitted(X), step(X))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_are_arguments_and_results(impl):
    def step(state, x):
        key, sub = jax.random.split(state["key"])
        noisy = mpmd.named_computation(lambda x, k: x + jax.random.normal(k, x.shape), name="first")(x, sub)
        return {"key": key}, mpmd.named_computation(lambda x: 2 * x, name="second")(noisy)

    jitted = mpmd.jit(step, CONFIG)
    state, x = {"key": jax.random.key(3, impl=impl)}, jnp.ones((4, 4))
    wanted_state, wanted = jax.jit(step)(state, x)
    wanted_key = jax.random.key_data(wanted_state["key"]).tolist()
    compiled = jitted.compiled(state, x)
    for run in (jitted, compiled, lambda *args: compiled.timeline(*args)[0]):
        got_state, got = run(state, x)
        assert got_state["key"].dtype == state["key"].dtype
        assert jax.random.key_data(got_state["key"]).tolist() == wanted_key
        assert jnp.allclose(jax.device_get(got), wanted)


def test_clear_cache_lets_calls_of_other_threads_finish():
    step, errors, stop = mpmd.jit(two_stages, CONFIG), [], threading.Event()

    def call():
        while not stop.is_set():
            try:
                assert (np.asarray(step(X)) == 2 * X + 1).all()
            except Exception as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    held = step.compiled(X)
    for _ in range(5):
        step.clear_cache()
        time.sleep(0.02)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert (np.asarray(held(X)) == 2 * X + 1).all(), "what a caller holds still runs"


def test_functions_that_trace_without_running_see_the_step_as_one_equation():
    def fn(x, key, scale):
        return {"y": two_stages(x) * scale, "key": key}

    arguments = X, jax.random.key(0), 2.0
    step = mpmd.jit(fn, CONFIG)
    assert jax.eval_shape(step, *arguments) == jax.eval_shape(fn, *arguments)
    (equation,) = jax.make_jaxpr(step)(*arguments).eqns
    assert equation.primitive.name == "mpmd_step"
    assert equation.params["jaxpr"].in_avals == jax.make_jaxpr(fn)(*arguments).in_avals
    weights = jnp.ones(4)  # a value of the trace around the step, which the step closes over
    closed = jax.eval_shape(lambda w, x: mpmd.jit(lambda x: two_stages(x) * w, CONFIG)(x), weights, X)
    assert closed == jax.eval_shape(lambda w, x: two_stages(x) * w, weights, X)


@pytest.mark.parametrize(
    "call, what",
    [
        (lambda step: jax.jit(step)(X), "jax.jit"),
        (lambda step: jax.lax.fori_loop(0, 2, lambda _, x: step(x), X), "a loop of jax.lax"),
        (lambda step: jax.jit(jax.grad(lambda x: step(x).sum()))(X), "jax.grad"),
        (lambda step: jax.jit(jax.vmap(step))(X[None]), "jax.vmap"),
        (lambda step: jax.eval_shape(jax.vmap(step), X[None]), "jax.vmap"),
    ],
)
def test_a_step_does_not_run_as_a_part_of_another_program(call, what):
    with pytest.raises(SignatureError, match=f"the step is called inside of .*{what}"):
        call(mpmd.jit(two_stages, CONFIG))


def test_analyses_have_one_form_whatever_the_number_of_meshes():
    alone = mpmd.make_config(mpmd.make_topology({"m0": 1}), {"first": "m0", "second": "m0"})

    def form(tree):
        return {key: form(value) if isinstance(value, dict) else type(value) for key, value in tree.items()}

    one, two = (mpmd.jit(two_stages, c).lower(X).compile() for c in (alone, CONFIG))
    costs = [compiled.cost_analysis() for compiled in (one, two)]
    fragments = [list(of_step.pop("fragments").values()) for of_step in costs]
    calls = [of_step.pop("calls") for of_step in costs]
    assert form(costs[0]) == form(costs[1])
    assert form(fragments[0][0]) == form(fragments[1][0])
    assert {type(n) for of_step in calls for n in of_step.values()} == {int}
    meshes = [*one.memory_analysis().values(), *two.memory_analysis().values()]
    assert len(meshes) == 3 and len({type(mesh) for mesh in meshes}) == 1


@pytest.mark.parametrize("devices", [1, 2])
def test_results_of_several_meshes_are_combined_on_one_device(devices):
    topology = mpmd.make_topology({"m0": {"x": devices}, "m1": {"x": devices}})
    rows = jax.sharding.PartitionSpec("x") if devices > 1 else None
    config = mpmd.make_config(topology, {"first": "m0", "second": "m1"}, in_shardings=(rows,))

    def both(x):
        return {"in": mpmd.named_computation(jnp.sin, name="first")(x), "out": two_stages(x)}

    results = mpmd.jit(both, config)(X)
    with pytest.raises(ValueError, match="ncompatible devices"):
        results["in"] + results["out"]
    fetched = mpmd.fetch({**results, "note": "kept"})
    assert fetched.pop("note") == "kept"
    np.testing.assert_allclose(fetched["in"] + fetched["out"], np.sin(X) + 2 * X + 1, rtol=1e-6)
    assert {array.device for array in fetched.values()} == {jax.devices()[0]}
    assert mpmd.fetch(results["in"], jax.devices()[1]).device == jax.devices()[1]
