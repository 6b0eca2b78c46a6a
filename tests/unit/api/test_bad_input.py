"""Bad input gives an error for people; each is told by its first line."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.errors import ConfigError, PassError, ScheduleError, SignatureError
from tests.support.two_stages import two_stages

X = jax.device_put(np.ones((8, 4), np.float32))


def topology(count: int = 2):
    return mpmd.make_topology(
        {f"m{i}": jax.sharding.Mesh(jax.devices()[:1], ("data",)) for i in range(count)}
    )


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """Meshes of these tests share one device, which is warned about."""


def config(**assignment):
    return mpmd.make_config(topology(), assignment or {"first": "m0", "second": "m1"})


@pytest.mark.parametrize("mesh, end", [("m11", "did you mean 'm1'"), ("gpu", "there are 'm0', 'm1'")])
def test_unknown_mesh(mesh, end):
    with pytest.raises(ConfigError, match=f"'first' is assigned to an unknown mesh {mesh!r}; {end}"):
        mpmd.make_config(topology(), {"first": mesh, "second": "m1"})


def test_several_problems_are_reported_together():
    with pytest.raises(ConfigError, match="the configuration cannot be used:") as e:
        mpmd.make_config(topology(), {"a": "nowhere", "b": ("m1", -1), "c": "m0#disk"})
    text = str(e.value)
    assert "1. 'a' is assigned to an unknown mesh 'nowhere'" in text
    assert "'b' has stage -1" in text
    assert "'c' is assigned to an unknown memory 'disk'" in text


def test_one_stage_on_two_meshes():
    with pytest.raises(ConfigError, match="stage 0 is assigned to several meshes"):
        mpmd.make_config(topology(), {"a": ("m0", 0), "b": ("m1", 0)})


def test_a_name_never_used():
    with pytest.raises(ConfigError, match="'third' is assigned to mesh 'm1', but the function never uses it"):
        mpmd.jit(two_stages, config(first="m0", second="m1", third="m1")).lower(X)


def test_a_name_without_assignment():
    with pytest.raises(
        ConfigError, match="named computation 'second' is not assigned to a mesh .*two_stages.py"
    ):
        mpmd.jit(two_stages, config(first="m0")).lower(X)


def test_a_misspelt_name_is_told_both_ways():
    with pytest.raises(ConfigError, match="the assignment does not fit the function:") as e:
        mpmd.jit(two_stages, config(first="m0", secnd="m1")).lower(X)
    assert "named computation 'second' is not assigned" in str(e.value)
    assert "did you mean 'secnd'?" in str(e.value)


def test_too_few_devices():
    with pytest.raises(
        ConfigError, match=r"the topology needs 1000 devices \(m0: 1000\), but there are"
    ) as e:
        mpmd.make_topology({"m0": 1000}, pinning="never")
    assert "jax.config.update('jax_num_cpu_devices', 1000)" in str(e.value)
    with pytest.raises(ConfigError, match="mesh 'm0' has 4096 devices; a mesh on CPU has 1 to 2048"):
        mpmd.make_topology({"m0": 4096})


@pytest.mark.parametrize(
    "meshes, first_line",
    [
        ({}, "a topology needs at least one mesh"),
        ({"a@b": 1}, "'a@b' is not a mesh name"),
        ({"m#pinned_host": 1}, "'m#pinned_host' is not a mesh name"),
        ({"m": 0}, "mesh 'm': axis 'data' has size 0"),
        ({"m": {"x": -2}}, "mesh 'm': axis 'x' has size -2"),
    ],
)
def test_bad_topologies(meshes, first_line):
    with pytest.raises(ConfigError, match=first_line):
        mpmd.make_topology(meshes)


def test_meshes_that_share_a_device_are_warned_about():
    shared = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    with pytest.warns(UserWarning, match="meshes m0, m1 share .* their fragments take turns on it"):
        mpmd.make_topology({"m0": shared, "m1": shared})


def test_arguments_of_another_shape_or_dtype():
    compiled = mpmd.jit(two_stages, config()).lower(X).compile()
    with pytest.raises(SignatureError, match="the arguments do not fit what this was compiled for") as e:
        compiled(jnp.ones((8, 5), jnp.int32))
    assert "x: got int32[8,5], compiled for float32[8,4]" in str(e.value)


def test_arguments_of_another_structure():
    compiled = mpmd.jit(two_stages, config()).lower(X).compile()
    with pytest.raises(SignatureError, match="the arguments have another structure"):
        compiled(X, X)
    nested = mpmd.jit(lambda tree: two_stages(tree["x"][0]), config()).lower({"x": (X, X)}).compile()
    with pytest.raises(SignatureError, match="another structure") as e:
        nested({"x": [X, X]})
    assert r"tree['x']: got a list of 2, expected a tuple of 2" in str(e.value)
    assert "PyTreeDef" not in str(e.value)


def test_shardings_of_another_structure():
    chosen = mpmd.make_config(topology(), {"first": "m0", "second": "m1"}, in_shardings=({"x": [None]},))
    with pytest.raises(ConfigError, match="in_shardings is not a pytree prefix of the arguments") as e:
        mpmd.jit(lambda tree: two_stages(tree["x"][0]), chosen).lower({"x": (X,)})
    assert "in_shardings[0]['x'] is a list of 1, and the arguments have a tuple of 1 there" in str(e.value)
    chosen = dataclasses.replace(chosen, in_shardings=None, out_shardings=(None, None))
    with pytest.raises(ConfigError, match="out_shardings is a tuple of 2, and the results have an array"):
        mpmd.jit(two_stages, chosen).lower(X)


def test_a_batch_that_is_not_divisible():
    def step(w, x):
        return mpmd.accumulate_gradients(lambda w, x: two_stages(w * x).sum(), 3)(w, x)

    with pytest.raises(SignatureError, match="a batch cannot be split into 3 equal microbatches"):
        mpmd.jit(step, config()).lower(jnp.ones(4), X)


def _product(w, x):
    return w * x


def _total(w, x):
    return (w * x).sum()


@pytest.mark.parametrize(
    ("result", "has_aux", "message"),
    [
        (_product, False, r"must return a scalar, got float32\[4, 4\]\n"),
        (jax.value_and_grad(_total), False, "not jax.value_and_grad of it; if it returns"),
        (
            lambda w, x: (_total(w, x), {"x": x}),
            False,
            r"got \(float32\[\], {x: float32\[4, 4\]}\)\n.*has_aux",
        ),
        (lambda w, x: {"loss": _total(w, x)}, False, r"got {loss: float32\[\]}\n"),
        (lambda w, x: None, False, "got None\n"),
        (_total, True, r"must return \(loss, aux\), got float32\[\]\n"),
        (lambda w, x: (_product(w, x), x), True, r"must return a scalar, got float32\[4, 4\]\n"),
    ],
)
def test_a_loss_that_is_no_scalar(result, has_aux, message):
    def step(w, x):
        return mpmd.accumulate_gradients(result, 2, has_aux=has_aux)(w, x)

    with pytest.raises(SignatureError) as caught:
        mpmd.jit(step, config()).lower(jnp.ones(4), X)
    assert re.search(message, f"{caught.value}\n")


def test_nested_names_on_different_meshes():
    def nested(x):
        inner = mpmd.named_computation(lambda x: 2 * x, name="second")
        return mpmd.named_computation(lambda x: inner(x) + 1, name="first")(x)

    with pytest.raises(PassError, match="'second' is nested in a NamedComputation 'first'"):
        mpmd.jit(nested, config()).lower(X)


def test_transfers_that_are_not_allowed():
    def conflict(x, y):
        a = mpmd.named_computation(lambda x: 2 * x, name="first")(x)
        b = mpmd.named_computation(lambda x: x + 1, name="second")(y)
        return jnp.sin(a) * b

    options = mpmd.PipelineOptions(infer_transfers=False, infer_cross_mesh_reductions=False)
    strict = mpmd.make_config(topology(), {"first": "m0", "second": "m1"}, options=options)
    with pytest.raises(PassError, match="Mesh assignment is not possible for"):
        mpmd.jit(conflict, strict).lower(X, X)


def test_unknown_schedule():
    with pytest.raises(ScheduleError, match="there is no schedule '1f2b'; did you mean '1f1b'"):
        mpmd.make_config(topology(), {"first": "m0"}, schedule="1f2b")


def test_unknown_dialect():
    with pytest.raises(ConfigError, match="there is no dialect 'ifrt'"):
        mpmd.jit(two_stages, config()).lower(X).as_text("ifrt")


def test_unknown_backend():
    with pytest.raises(ConfigError, match="backend is 'triton'; there are .* 'reference', 'xla'"):
        mpmd.make_config(topology(), {"first": "m0", "second": "m1"}, backend="triton")


def test_jit_without_a_config():
    with pytest.raises(ConfigError, match=r"mpmd.jit needs a config"):
        mpmd.jit(two_stages)


@pytest.mark.parametrize(
    "options, first_line",
    [
        ({"static_argnums": 3}, "static_argnums names argument 3, but two_stages takes 1"),
        ({"donate_argnames": "z"}, "donate_argnames names 'z', but two_stages takes x"),
    ],
)
def test_arguments_that_do_not_exist(options, first_line):
    with pytest.raises(SignatureError, match=first_line):
        mpmd.jit(two_stages, config(), **options)


def test_a_static_argument_without_a_hash():
    step = mpmd.jit(lambda x, sizes: two_stages(x), config(), static_argnums=1)
    with pytest.raises(SignatureError, match="static argument 1 is .* which has no hash"):
        step(X, [1, 2])


def test_sharding_over_an_unknown_axis():
    spec = jax.sharding.PartitionSpec("model")
    chosen = mpmd.make_config(topology(), {"first": "m0", "second": "m1"}, in_shardings=(spec,))
    with pytest.raises(ConfigError, match="argument x: .* names an unknown axis 'model'"):
        mpmd.jit(two_stages, chosen).lower(X)


def test_a_sharding_that_splits_unevenly():
    spec = jax.sharding.PartitionSpec(None, "data")
    wide = mpmd.make_topology({"m0": 3, "m1": 3})
    chosen = mpmd.make_config(wide, {"first": "m0", "second": "m1"}, in_shardings=(spec,))
    with pytest.raises(ConfigError, match="argument x: dim 1 of size 4 cannot be split into 3 equal parts"):
        mpmd.jit(two_stages, chosen).lower(X)


def test_a_sharding_of_more_dims_than_there_are():
    spec = jax.sharding.PartitionSpec(None, None, "data")
    chosen = mpmd.make_config(topology(), {"first": "m0", "second": "m1"}, in_shardings=(spec,))
    with pytest.raises(ConfigError, match="argument x: .* is for 3 dims, but it has 2"):
        mpmd.jit(two_stages, chosen).lower(X)


def test_a_sharding_that_uses_an_axis_twice():
    spec = jax.sharding.PartitionSpec("data", "data")
    chosen = mpmd.make_config(topology(), {"first": "m0", "second": "m1"}, in_shardings=(spec,))
    with pytest.raises(ConfigError, match="argument x: .* names axis 'data' twice"):
        mpmd.jit(two_stages, chosen).lower(X)


def test_bad_input_never_ends_the_process():
    """Each of these crashed the peer; here each is an exception, and the process goes on."""
    code = (
        "import jax, mpmd, warnings; warnings.simplefilter('ignore')\n"
        "from mpmd import ir\n"
        "from mpmd.passes.verify import verify\n"
        "for text in ('func.func @f() { mpmd.call @nobody() : () -> () return }', 'nonsense', ''):\n"
        "    try: verify(ir.parse(text))\n"
        "    except mpmd.errors.IRError as e: print('refused:', str(e).splitlines()[0])\n"
        "print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "it calls @nobody, which it does not define" in done.stdout
    assert done.stdout.endswith("alive\n")


def test_a_name_whose_computation_is_dead_is_used():
    """Nothing needs its result, so nothing is left of it; the assignment is right all the same."""

    def step(x):
        mpmd.named_computation(jnp.sin, name="dead")(x)
        return two_stages(x)

    lowered = mpmd.jit(step, config(first="m0", second="m1", dead="m1")).lower(X)
    assert "dead" not in lowered.as_text()
    again = mpmd.jit(step, config(first="m1", second="m0", dead="m1")).lower(X)  # JAX does not trace again
    assert "dead" not in again.as_text()


def test_a_value_that_leaves_a_named_computation_through_an_object_is_named():
    class Keys:
        def __init__(self, key):
            self.key = key

        def next(self):
            self.key, key = jax.random.split(self.key)
            return key

    def stage(name, keys):
        return mpmd.named_computation(lambda x: x * jax.random.uniform(keys.next(), x.shape), name=name)

    def loss(x, key):
        keys = Keys(key)
        return stage("upper", keys)(stage("lower", keys)(x)).sum()

    config = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), {"lower": "m0", "upper": "m1"})

    def accumulated(x, key):
        return mpmd.accumulate_gradients(lambda p, x: loss(p + x, key), 2)(x[0], x)

    for fn in (jax.value_and_grad(loss), accumulated):
        with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
            mpmd.jit(fn, config)(jnp.ones((4, 2)), jax.random.key(0))
        assert "named computation 'lower' computed key<fry>[] at " in str(caught.value)
        assert "test_bad_input.py" in str(caught.value)


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)])
def test_one_key_for_all_microbatches(key):
    def step(w, x, key):
        return mpmd.accumulate_gradients(lambda w, x, key: two_stages(w * x).sum(), 4)(w, x, key)

    with pytest.raises(SignatureError, match=r"key is .*: one random key\n.* jax.random.split\(key, 4\)"):
        mpmd.jit(step, config()).lower(jnp.ones(4), X, key)
    mpmd.jit(step, config()).lower(jnp.ones(4), X, jax.random.split(key, 4))


@pytest.mark.parametrize(
    "call",
    [
        lambda: mpmd.accumulate_gradients(lambda w: (w * X).sum(), 4)(jnp.ones(4)),
        lambda: mpmd.microbatch_loop(lambda carry: (carry, None), 0, num_microbatches=4),
    ],
)
def test_a_batch_that_is_closed_over(call):
    with pytest.raises(SignatureError, match="no batch to split into 4 microbatches\n  pass its arrays"):
        call()
