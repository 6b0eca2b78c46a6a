"""Options of XLA for all fragments, for a mesh and for a name: they arrive, or are refused."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.config.compiler_options import default_rows
from mpmd.errors import ConfigError
from mpmd.jax_compat import effort_levels
from tests.support.two_stages import two_stages

TOPOLOGY = mpmd.make_topology({"m0": 1, "m1": 1})
PLACES = {"first": "m0", "second": "m1"}
FAST_MATH, TEXT = "xla_cpu_enable_fast_math", "xla_detailed_logging"


def config(options, **more):
    return mpmd.make_config(TOPOLOGY, PLACES, compiler_options=options, **{"backend": "xla", **more})


def lowered(options, **more):
    return mpmd.jit(two_stages, config(options, **more)).lower(jnp.ones(4))


def dumped(folder):
    return {file.name.split(".")[1] for file in folder.glob("module_*")}


def test_a_name_counts_before_its_mesh_and_a_mesh_before_all():
    given = {FAST_MATH: True, "second": {TEXT: True}, "m1": {FAST_MATH: False, TEXT: False}}
    made = lowered(given)
    first, second = made.fragments.values()
    assert first.compiler_options == ((FAST_MATH, True),)
    assert second.compiler_options == ((FAST_MATH, False), (TEXT, True))
    assert '{mesh = "m1", options = {xla_cpu_enable_fast_math = false' in made.as_text("mpmd")
    assert "mpmd.compiler_options = {xla_cpu_enable_fast_math = true}" in made.as_text("mpmd")
    without = lowered(None)
    assert "compiler_options" not in without.as_text("mpmd")
    assert without.fragments[first.name].fingerprint != first.fingerprint


@pytest.mark.parametrize("backend", ["xla", "native"])
def test_they_reach_what_xla_compiles_and_those_of_compile_count_most(backend, tmp_path):
    """In native fragments XLA compiles the call of our program."""
    made = lowered({"m0": {"xla_dump_to": str(tmp_path / "a")}, FAST_MATH: True}, backend=backend)
    first, second = made.fragments
    compiled = made.compile({second: {"xla_dump_to": str(tmp_path / "b"), FAST_MATH: False}})
    assert f"// {second} {FAST_MATH}=False xla_dump_to=" in compiled.as_text()
    assert np.array_equal(compiled(jnp.arange(4.0)), [1, 3, 5, 7])
    name = f"jit_{first.rpartition('.')[0]}"
    assert any(found.startswith(name) for found in dumped(tmp_path / "a"))
    assert not any(found.startswith(name) for found in dumped(tmp_path / "b"))


def test_fragments_of_one_program_are_two_where_their_options_differ():
    """Both halves do the same on one mesh."""

    def step(x):
        for name in ("first", "between", "last"):
            x = mpmd.named_computation(jnp.tanh, name=name)(x)
        return x

    places = {"first": "m0", "between": "m1", "last": "m0"}
    for options, count in ((None, 2), ({"last": {FAST_MATH: True}}, 3)):
        made = mpmd.make_config(TOPOLOGY, places, compiler_options=options)
        fragments = mpmd.jit(step, made).lower(jnp.ones(4)).fragments.values()
        assert len(fragments) == count
        assert [f.compiler_options for f in fragments].count(((FAST_MATH, True),)) == count - 2


def test_the_second_copy_of_a_stage_has_its_options():
    def step(w, xs):
        def loss(w, x):
            h = mpmd.named_computation(lambda w, x: jnp.tanh(x * w), name="first")(w, x)
            return mpmd.named_computation(lambda w, h: (h * w).sum(), name="second")(w, h)

        return mpmd.accumulate_gradients(loss, 4)(w, xs)

    made = config({"first": {FAST_MATH: True}}, schedule="dualpipe")
    fragments = mpmd.jit(step, made).lower(jnp.ones(4), jnp.ones((8, 4))).fragments
    of_first = {name: f.mesh for name, f in fragments.items() if f.compiler_options}
    assert set(of_first.values()) == {"m0", "m1"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"nope": 1}, "compiler_options: nope=1: No such compile option: 'nope'"),
        (
            {FAST_MATH: True, "m1": {FAST_MATH: "yes", TEXT: True}},
            f"compiler_options of 'm1': {FAST_MATH}='yes': While setting option {FAST_MATH}, 'yes' is not",
        ),
        ({"second": {"optimization_level": 1}}, "optimization_level is 1; there are 'UNKNOWN', 'O0', 'O1'"),
        ({"seconds": {FAST_MATH: True}}, "of 'seconds': neither a mesh nor a name; did you mean 'second'?"),
        ({FAST_MATH: [True]}, f"{FAST_MATH} is [True]; it must be True, False, a number of at most 64 bits"),
        ({"xla_dump_max_hlo_modules": 2**64}, "a number of at most 64 bits or a text"),
        ({3: True}, "3 is not an option"),
        ([FAST_MATH], "compiler_options is ['xla_cpu_enable_fast_math']; it must map options of XLA"),
    ],
)
def test_what_xla_does_not_take_is_refused_when_the_configuration_is_made(options, problem):
    with pytest.raises(ConfigError) as caught:
        config(options)
    assert problem in str(caught.value)


def test_all_problems_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        config({"nope": 1, "m0": {"neither": True}})
    assert "1. compiler_options: nope=1" in str(caught.value)
    assert "2. compiler_options of 'm0': neither=True" in str(caught.value)
    with pytest.raises(ConfigError, match="neither a mesh nor a name; there are 'm0', 'm1', 'p0_first"):
        lowered(None).compile({"other": {FAST_MATH: True}})
    with pytest.raises(ConfigError, match="a mesh and a computation have this name"):
        mpmd.make_config(TOPOLOGY, {"m0": "m0"}, compiler_options={"m0": {FAST_MATH: True}})


def test_options_of_a_name_without_a_fragment_are_reported():
    def step(x):
        return two_stages(mpmd.named_tensor(x, name="x"))

    made = mpmd.make_config(TOPOLOGY, {**PLACES, "x": "m0"}, compiler_options={"x": {FAST_MATH: True}})
    with pytest.warns(UserWarning, match="options of 'x' have no effect: no fragment holds a computation"):
        mpmd.jit(step, made).lower(jnp.ones(4))


def gpus(processes=(0, 0), **shape):
    """A mesh of GPUs that are not there."""
    devices = [types.SimpleNamespace(platform="gpu", process_index=p) for p in processes]
    return types.SimpleNamespace(shape=shape, size=len(devices), devices=np.array(devices))


LEVEL, BUFFERS = ("optimization_level", 19), ("xla_gpu_enable_command_buffer", "")


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        ({"a": gpus(x=2)}, {"a": [LEVEL]}),
        ({"a": gpus((0,), x=1), "b": gpus(x=2)}, {"b": [LEVEL]}),
        ({"a": gpus(x=2), "b": gpus(x=2)}, {"a": [LEVEL, BUFFERS], "b": [LEVEL, BUFFERS]}),
        ({"a": gpus((0, 0), x=2), "b": gpus((1, 1), x=2)}, {"a": [LEVEL], "b": [LEVEL]}),
        ({"a": gpus((0, 0, 1, 1), x=2, y=2)}, {"a": [LEVEL, BUFFERS]}),
        (TOPOLOGY, {}),
    ],
)
def test_meshes_of_several_gpus_overlap_collectives_and_leave_out_command_buffers(topology, expected):
    assert LEVEL[1] == effort_levels()["O1"]
    found = {}
    for row in default_rows(topology):
        assert row.mesh and not row.name
        found.setdefault(row.mesh, []).extend(row.options)
    assert found == expected


def test_the_users_own_flags_replace_the_defaults(monkeypatch):
    topology = {"a": gpus(x=2), "b": gpus(x=2)}
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION")
    assert [row.options for row in default_rows(topology)] == [(LEVEL,), (LEVEL,)]
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=false")
    assert [row.options for row in default_rows(topology)] == [(BUFFERS,), (BUFFERS,)]
    monkeypatch.delenv("XLA_FLAGS")
    before = jax.config.jax_optimization_level
    jax.config.update("jax_optimization_level", "O0")
    try:
        assert [row.options for row in default_rows(topology)] == [(BUFFERS,), (BUFFERS,)]
    finally:
        jax.config.update("jax_optimization_level", before)


def test_an_option_that_the_level_would_undo_counts(monkeypatch):
    rows = tuple(dataclasses.replace(row, mesh="m0") for row in default_rows({"a": gpus(x=2)}))
    monkeypatch.setattr("mpmd.config.compiler_options.default_rows", lambda topology: list(rows))
    option = "xla_gpu_enable_latency_hiding_scheduler"
    first, second = lowered({"second": {option: False}}).fragments.values()
    assert first.compiler_options == (LEVEL,) and second.compiler_options == ((option, False),)
    first, _ = lowered({"first": {option: False}}).fragments.values()
    assert first.compiler_options == ((option, False),)
    first, _ = lowered({"optimization_level": "O3"}).fragments.values()
    assert first.compiler_options == (("optimization_level", effort_levels()["O3"]),)
