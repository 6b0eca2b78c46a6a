"""What users of `jax.jit` and of other libraries write first, and what they read then."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.errors import ConfigError, ScheduleError, SignatureError
from mpmd.scheduling.catalogue import get_schedule
from mpmd.scheduling.schedules.zero_bubble import ZeroBubbleH1
from mpmd.support.other_libraries import JIT_KEYWORDS, NAMES
from tests.support.two_stages import two_stages

X = np.ones((8, 4), np.float32)
CONFIG = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), {"first": "m0", "second": "m1"})


def test_the_function_is_not_dropped():
    with pytest.raises(
        ConfigError, match="got a config first, and then <function two_stages .*\n.*mpmd.jit.step, c"
    ):
        mpmd.jit(CONFIG, two_stages)


@pytest.mark.parametrize("given", [(two_stages,), (two_stages, CONFIG.topology), (two_stages, {}), ()])
def test_without_a_config_both_ways_to_place_are_named(given):
    with pytest.raises(ConfigError, match="mpmd.jit needs a config(?s:.*)stages='auto'"):
        mpmd.jit(*given)


@pytest.mark.parametrize("assignment", [None, {}])
def test_without_an_assignment_both_ways_to_place_are_named(assignment):
    with pytest.raises(ConfigError, match="give stages='auto'.*or name computations"):
        mpmd.make_config(CONFIG.topology, assignment)


def test_each_keyword_of_jax_jit_works_or_says_where_it_goes():
    ours = inspect.signature(mpmd.jit).parameters
    for name, parameter in inspect.signature(jax.jit).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and name not in ours:
            default, _ = JIT_KEYWORDS[name]
            assert default == parameter.default
            mpmd.jit(two_stages, CONFIG, **{name: parameter.default})
            with pytest.raises(SignatureError, match=f"mpmd.jit does not take {name}='it'\n  "):
                mpmd.jit(CONFIG, **{name: "it"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schedule": "1f1b"}, r"mpmd.make_config\(..., schedule=...\)"),
        ({"backend": "native"}, r"mpmd.make_config\(..., backend='xla'\)"),
        ({"num_microbatches": 4}, "mpmd.accumulate_gradients"),
        ({"donate_argnum": 0}, "did you mean 'donate_argnums'"),
        ({"inline": True, "device": "cpu"}, "2 problems:(?s:.*)2. mpmd.jit does not take device='cpu'"),
    ],
)
def test_keywords_of_other_places(given, message):
    with pytest.raises(SignatureError, match=message):
        mpmd.jit(two_stages, CONFIG, **given)


def test_compiler_options_are_the_configurations():
    step = mpmd.jit(two_stages, CONFIG, compiler_options={"m1": {"xla_cpu_enable_fast_math": True}})
    of_config = dataclasses.replace(CONFIG, compiler_options=())
    assert of_config == CONFIG
    with_options = mpmd.make_config(
        CONFIG.topology,
        {"first": "m0", "second": "m1"},
        compiler_options={"m1": {"xla_cpu_enable_fast_math": True}},
    )
    expected = mpmd.jit(two_stages, with_options).lower(X).as_text()
    assert step.lower(X).as_text() == expected
    with pytest.raises(ConfigError, match="xla_cpu_enable_fast_maths"):
        mpmd.jit(two_stages, CONFIG, compiler_options={"xla_cpu_enable_fast_maths": True})
    with pytest.raises(ConfigError, match="mpmd.jit and its config both have compiler_options"):
        mpmd.jit(two_stages, with_options, compiler_options={"xla_cpu_enable_fast_math": True})


def test_none_is_no_position_and_no_name_as_for_jax_jit():
    none = dict.fromkeys(["static_argnums", "static_argnames", "donate_argnums", "donate_argnames"])
    assert (
        mpmd.jit(two_stages, CONFIG, **none).lower(X).as_text()
        == mpmd.jit(two_stages, CONFIG).lower(X).as_text()
    )


def test_names_of_other_libraries_lead_to_ours():
    for name in NAMES:
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'\n  here it is .*\n  the guide"):
            getattr(mpmd, name)
    with pytest.raises(AttributeError, match="^module 'mpmd' has no attribute 'treduced'$"):
        _ = mpmd.treduced
    assert not hasattr(mpmd, "treduce")


def test_the_guide_has_each_of_these_names():
    guide = (Path(__file__).parents[3] / "docs/guides/migrate.md").read_text()
    assert [name for name in NAMES if not re.search(rf"\b{name}\b", guide)] == []


def test_what_they_lead_to_exists():
    ours = "\n".join(NAMES.values())
    words = {word.partition("(")[0] for word in ours.replace("=", " ").split() if word.startswith("mpmd.")}
    names = {word.strip(".,;:)") for word in words} - {"mpmd.scheduling.catalogue"}
    assert len(names) > 8 and all(hasattr(mpmd, name.removeprefix("mpmd.")) for name in names)


class Schedule1F1B:
    """As torch names it."""


@pytest.mark.parametrize("schedule", ["Std1F1B", "Schedule1F1B", Schedule1F1B, Schedule1F1B()])
def test_schedules_of_other_libraries(schedule):
    with pytest.raises(ScheduleError, match="1F1B of another library is schedule='1f1b' here; the guide"):
        mpmd.make_config(CONFIG.topology, {"first": "m0", "second": "m1"}, schedule=schedule)


def test_a_class_of_a_schedule_is_none_yet():
    with pytest.raises(ScheduleError, match=r"that is a class: give ZeroBubbleH1\(\), or 'zb_h1'"):
        get_schedule(ZeroBubbleH1)


def test_transformations_around_a_step_say_what_to_do_instead():
    step = mpmd.jit(two_stages, CONFIG)
    for called, message in [
        (
            lambda: jax.grad(lambda x: step(x).sum())(jnp.asarray(X)),
            "jax.grad (?s:.*)mpmd.accumulate_gradients",
        ),
        (lambda: jax.vmap(step)(X[None]), r"jax.vmap(?s:.*)mpmd.jit\(jax.vmap\(fn\), config\)"),
        (lambda: jax.jit(step)(X), "jax.jit, a loop (?s:.*)leave the jax.jit around it out"),
        (lambda: mpmd.jit(step, CONFIG)(X), "jax.jit, a loop of jax.lax or another step\n"),
        (lambda: jax.lax.fori_loop(0, 2, lambda _, x: step(x), X), "(?s:.*)in a loop of Python"),
    ]:
        with pytest.raises(SignatureError, match=f"the step is called inside of {message}"):
            called()


@dataclasses.dataclass
class Settings:
    rate: float


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "activation"], meta_fields=[])
@dataclasses.dataclass
class FakeEquinoxLayer:
    """A layer as equinox makes them: its function is a leaf."""

    w: jax.Array
    activation: Any = jax.nn.relu


FakeEquinoxLayer.__module__ = "equinox.nn._mlp"


class OfKeras:
    """A variable as keras has them."""

    def __jax_array__(self):
        return X


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [X, "relu"]}, r"tree\['a'\]\[1\] is 'relu', a str, .*\n  let the step close over"),
        ((X, jnp.tanh), r"tree\[1\] is tanh, a .*\n  let the step close over all but arrays"),
        ([X, Settings(0.1)], r"tree\[1\] is a Settings, .*\n.*jax.tree_util.register_dataclass\(Settings\)"),
        ([X, iter(X)], r"tree\[1\] is a iterator, .*\n  make an array of the .*jnp.stack"),
        ([X, object()], r"tree\[1\] is a object, .*\n.*register_pytree_with_keys_class on object"),
        ([X, OfKeras()], r"tree\[1\] is a OfKeras, .*\n  give the array of each OfKeras"),
        (
            [FakeEquinoxLayer(X) for _ in range(16)],
            r"1. tree\[0\].activation is relu, a custom_jvp, (?s:.*)8. tree(?s:.*)\n  and 8 more\n  keep "
            r"arrays apart: params, static = eqx.partition\(model, eqx.is_array\)",
        ),
    ],
)
def test_leaves_that_are_not_arrays_get_a_path_and_advice(tree, message):
    step = mpmd.jit(lambda tree: two_stages(jax.tree.leaves(tree)[0]), CONFIG)
    for call in (step, step.lower):
        with pytest.raises(SignatureError, match=message):
            call(tree)
    with pytest.raises(SignatureError, match="is called inside of jax.jit|which is not an array"):
        jax.jit(lambda x: step(jax.tree.map(lambda leaf: x if leaf is X else leaf, tree)))(X)


def test_a_model_of_equinox_that_is_differentiated():
    for model in (FakeEquinoxLayer(X), [FakeEquinoxLayer(X)]):
        with pytest.raises(SignatureError, match="activation is relu, a custom_jvp, which is not an") as e:
            mpmd.accumulate_gradients(lambda model, x: x.sum(), 2)(model, X)
        assert "params, static = eqx.partition(model, eqx.is_inexact_array)" in str(e.value)
