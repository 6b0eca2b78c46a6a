"""Values of the wrong kind, at every entry: an error of ours that says what was got, before anything runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd import ir
from mpmd.errors import ConfigError, ScheduleError, SignatureError
from mpmd.options import PIPELINE_SCHEDULES, USER_DEFAULTS, current_options
from mpmd.passes.schedule import pipeline_scheduler
from mpmd.scheduling.catalogue import from_csv, from_function, from_table, get_schedule
from tests.support.two_stages import two_stages

X = jax.device_put(np.ones((8, 4), np.float32))
PLACES = {"first": "m0", "second": "m1"}


def config(**more):
    device = jax.devices()[0]
    with pytest.warns(UserWarning, match="share"):
        topology = mpmd.make_topology({"m0": [device], "m1": [device]})
    return mpmd.make_config(topology, PLACES, **more)


@pytest.mark.parametrize(
    ("meshes", "more", "message"),
    [
        (None, {}, "needs at least one mesh, such as .*: got None"),
        (["m0"], {}, "needs at least one mesh"),
        ({1: 1}, {}, "1 is not a mesh name"),
        ({"m,0": 1}, {}, "'m,0' is not a mesh name"),
        ({"m 0": 1}, {}, "'m 0' is not a mesh name"),
        ({"m\\": 1}, {}, r"'m\\\\' is not a mesh name"),
        ({"m\x01": 1}, {}, "is not a mesh name: it must be a text of ASCII letters"),
        ({"größe": 1}, {}, "'größe' is not a mesh name"),
        ({"m0": {"größe": 1}}, {}, "mesh 'm0': 'größe' is not an axis name: it must be a text of ASCII"),
        ({"m0": {"a\nb": 1}}, {}, "is not an axis name"),
        ({"m0": 1.5}, {}, "mesh 'm0' is 1.5; it must be a number of devices"),
        ({"m0": True}, {}, "mesh 'm0' is True; it must be"),
        ({"m0": []}, {}, r"mesh 'm0' is \[\]; it must be"),
        ({"m0": {}}, {}, "mesh 'm0' is {}; it must be"),
        ({"m0": ["cpu"]}, {}, r"mesh 'm0' is \['cpu'\]; it must be"),
        ({"m0": {1: 2}}, {}, "mesh 'm0': 1 is not an axis name"),
        ({"m0": {"x": "2"}}, {}, "mesh 'm0': axis 'x' has size '2'"),
        (
            {"m0": 1},
            {"pinning": "never ever"},
            "pinning is 'never ever'; there are 'auto', 'always', 'never'",
        ),
        ({"m0": 1}, {"devices": 3}, "devices is 3; it must be a list of devices"),
    ],
)
def test_topologies(meshes, more, message):
    with pytest.raises(ConfigError, match=message):
        mpmd.make_topology(meshes, **more)


def test_a_mesh_of_jax_whose_axis_no_text_can_hold():
    with pytest.raises(ConfigError, match="mesh 'm0': 'ä' is not an axis name"):
        mpmd.make_topology({"m0": jax.sharding.Mesh(jax.devices()[:1], ("ä",))})


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "\x7f", "\ud800"])
def test_names_that_no_text_can_hold(name):
    with pytest.raises(ConfigError, match="^named_computation cannot have the name .* cannot hold"):
        mpmd.named_computation(jnp.sin, name=name)
    with pytest.raises(ConfigError, match="^named_tensor cannot have the name"):
        mpmd.named_tensor(X, name)


@pytest.mark.parametrize("name", ["größe 日本 <(%=|)>", "a.b-c's #1; @x:y/z [0]"])
def test_other_names_come_back_from_the_text_of_the_program(name):
    first = mpmd.named_computation(lambda x: x * 2.0, name=name)
    places = {name: "m0<('%=|)>"}
    topology = mpmd.make_topology({"m0<('%=|)>": {"x<('%=|)>": 1}})
    text = mpmd.jit(first, mpmd.make_config(topology, places)).lower(X).as_text("mpmd")
    module = ir.parse(text)
    assert ir.to_text(module) == text
    calls = [op for f in ir.funcs(module) for op in ir.walk(f, ir.FragmentCall)]
    assert [(call.mesh, [o.name for o in call.origins]) for call in calls] == [("m0<('%=|)>", [name])]


def test_batches_of_different_lengths_in_one_call():
    def loss(w, batch, mask):
        return jnp.mean(w * batch["x"]) + mask.mean() + batch["y"].mean()

    batch = {"x": jnp.ones((64, 2)), "y": jnp.ones(32)}
    message = (
        r"(?s)^the batches of one call have different lengths:\n"
        r"  batch\['x'\] is float32\[64,2\]: dim 0 has 64 rows\n"
        r"  batch\['y'\] is float32\[32\]: dim 0 has 32 rows\n  all arrays"
    )
    with pytest.raises(SignatureError, match=message):
        mpmd.accumulate_gradients(loss, 4)(1.0, batch, jnp.ones(64))
    with pytest.raises(SignatureError, match=r"batch\[0\] is .* 64 rows\n  batch\[1\] is .* 32 rows"):
        mpmd.microbatch_loop(lambda c, x, y: (c, None), 0.0, batch["x"], batch["y"], num_microbatches=2)
    keys = jax.random.split(jax.random.key(0), 4)  # one row for each microbatch
    sums = mpmd.microbatch_loop(
        lambda c, x, keys: (c + x.sum() + keys.shape[0], None), 0.0, batch["x"], keys, num_microbatches=4
    )
    assert sums[0] == 128 + 4


def test_a_device_twice_in_one_mesh():
    with pytest.raises(ConfigError, match="mesh 'm0' has .* more than once"):
        mpmd.make_topology({"m0": [jax.devices()[0]] * 2})


@pytest.mark.parametrize(
    ("topology", "assignment", "more", "message"),
    [
        ({"m0": 1}, PLACES, {}, "the topology is {'m0': 1}; make one with mpmd.make_topology"),
        (None, ["first"], {}, r"the assignment is \['first'\]; it must map names to meshes"),
        (None, {"first": None}, {}, "'first' is assigned to None; write a mesh"),
        (None, {"first": ()}, {}, r"'first' is assigned to \(\); write a mesh"),
        (None, {"first": ("m0", 1, 2)}, {}, r"'first' is assigned to \('m0', 1, 2\)"),
        (None, {3: "m0"}, {}, "3 is assigned to 'm0', but it is not a name"),
        (None, {"first": ("m0", True)}, {}, "'first' has stage True"),
        (None, PLACES, {"backend": 3}, "backend is 3; there are .auto., .native., .reference., .xla."),
        (None, PLACES, {"options": {}}, "the options are {}; they must be mpmd.PipelineOptions"),
        (None, PLACES, {"constraints": 3}, "3 is not a constraint"),
        (None, PLACES, {"constraints": ((0, "x"),)}, r"\(0, 'x'\) is not a constraint"),
    ],
)
def test_configurations(topology, assignment, more, message):
    with pytest.raises(ConfigError, match=message):
        mpmd.make_config(topology or config().topology, assignment, **more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"input_meshes": 3}, "input_meshes names an unknown mesh 3"),
        ({"input_meshes": "m0#disk"}, "input_meshes names an unknown memory 'disk'"),
        ({"in_shardings": "data"}, "argument x: 'data' is neither a jax.sharding.PartitionSpec nor"),
        ({"in_shardings": P(3)}, r"argument x: P\(3,\) has 3 for a dim"),
        (
            {"in_shardings": P(P.UNCONSTRAINED)},
            "has UNCONSTRAINED for a dim; name axes of the meshes, or None",
        ),
    ],
)
def test_places_and_shardings_of_arguments(more, message):
    with pytest.raises(ConfigError, match=message):
        mpmd.jit(two_stages, config(**more)).lower(X)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("dump_to", 3, "dump_to is 3; it must be of type str"),
        ("dump_passes", "(", r"dump_passes is '\(', which is not a regular expression"),
        ("disable_passes", "cse", "disable_passes is 'cse'; it must be a tuple of texts"),
        ("max_clones", -3, "max_clones is -3; it must be at least 0"),
        ("device_memory_bytes", "1G", "device_memory_bytes is '1G'; it must be of type int"),
        ("verify_each", "x", "verify_each is 'x'; it must be of type bool"),
        ("pipeline_schedule", "1F2B", "pipeline_schedule is '1F2B'; there are 'none', 'GPipe'"),
        ("reduce_gradients", "twice", "reduce_gradients is 'twice'; there are 'auto', 'once'"),
        ("reduce_gradients", {"x": "auto"}, "'auto' over the axis 'x'; there are 'once', 'per_microbatch'"),
        ("reduce_gradients", 3, "reduce_gradients is 3"),
        ("attention_stitching", "maybe", "attention_stitching is 'maybe'; there are 'auto', 'off'"),
    ],
)
def test_options(option, value, message):
    with pytest.raises(ConfigError, match=message):
        mpmd.PipelineOptions(**{option: value})


def test_an_axis_that_no_mesh_has():
    options = mpmd.PipelineOptions(reduce_gradients={"fdsp": "once"})
    with pytest.raises(ConfigError, match="reduce_gradients names the axis 'fdsp', which no mesh has"):
        mpmd.jit(two_stages, config(options=options)).lower(X)


def test_a_folder_that_cannot_be_made():
    options = mpmd.PipelineOptions(dump_to="/proc/none/here")
    with pytest.raises(ConfigError, match="dump_to is .* which cannot be created"):
        mpmd.jit(two_stages, config(options=options)).lower(X)


def test_all_problems_of_options_are_reported_together():
    with pytest.raises(ConfigError, match=r"(?s)^the options cannot be used:\n  1\. .*\n  2\. .*"):
        mpmd.PipelineOptions(error_limit=-2, backend="tpu")


def test_options_by_themselves_are_those_of_no_options():
    assert config(options=mpmd.PipelineOptions()).options == USER_DEFAULTS == current_options()
    with_options = mpmd.jit(two_stages, config(options=mpmd.PipelineOptions())).lower(X)
    assert with_options.as_text("program") == mpmd.jit(two_stages, config()).lower(X).as_text("program")


def test_the_schedules_of_the_dialect_are_those_of_its_pass():
    assert set(PIPELINE_SCHEDULES) == set(pipeline_scheduler.SCHEDULES)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"issue": 3}, "issue is 3; there are 'auto', 'one-thread', 'thread-per-mesh'"),
        ({"run_ahead": 1.5}, "run_ahead is 1.5; a mesh needs"),
    ],
)
def test_runtime_options(values, message):
    with pytest.raises(ConfigError, match=message):
        mpmd.RuntimeOptions(**values)


def test_what_a_lowered_step_is_asked_for():
    lowered = mpmd.jit(two_stages, config()).lower(X)
    with pytest.raises(ConfigError, match="runtime is 3; it must be mpmd.RuntimeOptions"):
        lowered.compile(runtime=3)
    with pytest.raises(ConfigError, match="costs is 3; it must be seconds by fragment"):
        lowered.schedule(costs=3)
    with pytest.raises(ConfigError, match="costs is {'f': 'x'}"):
        lowered.schedule(costs={"f": "x"})


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        (3, None, "mpmd.jit compiles a function, got 3"),
        (two_stages, PLACES, "mpmd.jit needs a config made by mpmd.make_config, got {'first'"),
    ],
)
def test_what_is_jitted(function, settings, message):
    with pytest.raises(ConfigError, match=message):
        mpmd.jit(function, settings or config())


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"static_argnums": "x"}, "static_argnums is 'x'; it must be a position"),
        ({"donate_argnames": 3}, "donate_argnames is 3; it must be a name"),
    ],
)
def test_which_arguments_are_static_or_donated(rules, message):
    with pytest.raises(SignatureError, match=message):
        mpmd.jit(two_stages, config(), **rules)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "two_stages does not take these arguments: missing a required argument: 'x'"),
        ((X, X), "two_stages does not take these arguments: too many positional arguments"),
        (("text",), "x is 'text', a str, which is not an array or a number"),
        (([1, object()],), r"x\[1\] is a object, which is not an array"),
        ((np.array(["a"]),), "x is of dtype <U1, which is not an array"),
        (({1: X, "a": X},), "an argument is not a pytree"),
        ((jax.ShapeDtypeStruct((8, 4), jnp.float32),), r"x is ShapeDtypeStruct\(.*, which has no data"),
    ],
)
def test_arguments_of_a_call(args, message):
    with pytest.raises(SignatureError, match=message):
        mpmd.jit(two_stages, config())(*args)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: mpmd.named_computation(3, name="a"),
            ConfigError,
            "named_computation takes a function, got 3",
        ),
        (
            lambda: mpmd.named_computation(two_stages, name=3),
            ConfigError,
            "named_computation needs a name.* got 3",
        ),
        (lambda: mpmd.named_tensor(X, name=""), ConfigError, "named_tensor needs a name.* got ''"),
        (lambda: mpmd.call(3), ConfigError, "mpmd.call takes a function, got 3"),
        (lambda: mpmd.call(two_stages, call_counter="0"), ConfigError, "call_counter must be a whole number"),
        (lambda: mpmd.split_microbatches(X, 2.0), SignatureError, "a whole number, got 2.0"),
        (lambda: mpmd.split_microbatches(X, 2, axis=-1), SignatureError, "axis must be the number of a dim"),
        (lambda: mpmd.accumulate_gradients(3, 2), SignatureError, "takes a function, got 3"),
        (lambda: mpmd.accumulate_gradients(two_stages, None), SignatureError, "a whole number, got None"),
        (
            lambda: mpmd.accumulate_gradients(two_stages, 2)(),
            SignatureError,
            r"by the arguments \[0\], but got 0",
        ),
        (lambda: mpmd.fori_loop(1.5, lambda i, c: c, X), SignatureError, "num_iterations must be .* got 1.5"),
        (lambda: from_table(3), ScheduleError, "has 3; it must list the tasks of each mesh"),
        (lambda: from_table("0F0"), ScheduleError, "has '0F0'; it must list the tasks"),
        (lambda: from_table([[3]]), ScheduleError, "has 3, which is not a task"),
        (lambda: from_table([["0F9999999999"]]), ScheduleError, "has task 0F9999999999, but only 1 tasks"),
        (lambda: from_table([["0F0", "0B0"]], ["a"]), ScheduleError, "puts stage 0 on mesh 'a'"),
        (lambda: from_table([["0F0", "0B0"]], 3), ScheduleError, "stage_to_mesh must list .* got 3"),
        (lambda: from_csv(3), ScheduleError, "from_csv takes the path of a file, or its text, got 3"),
        (lambda: from_csv("\0"), ScheduleError, "cannot be read: embedded null byte"),
        (lambda: from_function(3), ScheduleError, "from_function takes a function .* got 3"),
        (lambda: from_function(lambda t: t).table(2, 2, 2), ScheduleError, "cannot rank the tasks"),
        (lambda: get_schedule("zb_h2", latency="x"), ScheduleError, "'zb_h2' cannot use the options"),
        (lambda: get_schedule("1f1b").table(2, 2, 2.5), ScheduleError, "at least one microbatch, got 2.5"),
    ],
)
def test_names_loops_and_schedules(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
