"""Stages of a step have what JAX's have, or say why not; pickle, copies, `jax.export`, loggers."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import subprocess
import sys
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mpmd
from mpmd.errors import ConfigError, NotPicklableError
from mpmd.scheduling import get_schedule
from tests.repo.tree import ROOT, text

FIRST = mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name="first")
SECOND = mpmd.named_computation(lambda w, h: jnp.mean((h @ w) ** 2), name="second")
CONFIG = mpmd.make_config(
    mpmd.make_topology({"m0": 2, "m1": 1}),
    {"first": "m0", "second": "m1"},
    schedule="1f1b",
    in_shardings=(None, PartitionSpec("data")),
)
PARAMS, X = {"a": np.eye(4, dtype=np.float32), "b": np.ones((4, 2), np.float32)}, np.ones((8, 4), np.float32)


def plain_step(params, x, scale=2.0, *, shift=1.0):
    def loss(params, x):
        return SECOND(params["b"], FIRST(params["a"], x))

    value, grads = mpmd.accumulate_gradients(loss, num_microbatches=2)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value * scale + shift


STEP = mpmd.jit(plain_step, CONFIG, donate_argnums=0, static_argnames="scale")
GIVEN, NAMED = (PARAMS, X), {"shift": np.float32(3)}


@pytest.fixture(scope="module")
def stages() -> dict[str, tuple[Any, Any]]:
    """Ours and JAX's, of one function."""
    lowered = STEP.lower(*GIVEN, **NAMED)
    theirs = jax.jit(plain_step, donate_argnums=0, static_argnames="scale").trace(*GIVEN, **NAMED)
    return {
        "Traced": (lowered.traced, theirs),
        "Lowered": (lowered, theirs.lower()),
        "Compiled": (lowered.compile(), theirs.lower().compile()),
    }


def names_of_jax(stage: str) -> list[str]:
    return [name for name in dir(getattr(jax.stages, stage)) if not name.startswith("_")]


@pytest.mark.parametrize("stage", ["Traced", "Lowered", "Compiled"])
def test_a_stage_has_the_names_of_jax_or_a_reason(stages, stage):
    """The reasons are in the guide, too."""
    ours, _ = stages[stage]
    guide, lacking = text("docs/guides/objects.md"), set()
    for name in names_of_jax(stage):
        try:
            getattr(ours, name)
        except AttributeError as error:
            lacking.add(name)
            reason = str(error).partition(f"mpmd's {stage} has no {name}: ")[2]
            assert reason and f"| `{stage}.{name}` | {reason} |" in guide
    assert lacking <= ours.lacks.keys(), "other versions of JAX have more names"
    assert set(re.findall(rf"\| `{stage}\.(\w+)` \|", guide)) == ours.lacks.keys()
    with pytest.raises(AttributeError, match=f"'{stage}' object has no attribute 'not_there'"):
        _ = ours.not_there


@pytest.mark.parametrize("stage", ["Traced", "Lowered", "Compiled"])
def test_a_stage_says_what_jax_says(stages, stage):
    ours, theirs = stages[stage]
    for name in ("in_tree", "out_tree", "args_info", "donate_argnums", "in_avals"):
        assert getattr(ours, name) == getattr(theirs, name), name
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(s.out_info)] for s in (ours, theirs)]
    assert shapes[0] == shapes[1]


def test_results_are_where_the_compiled_step_says(stages):
    compiled, theirs = stages["Compiled"]
    arguments = jax.tree.map(jax.device_put, (PARAMS, X), compiled.input_shardings[0])
    results = compiled(*arguments, **NAMED)
    for result, sharding, form, info in zip(
        *map(
            jax.tree.leaves, (results, compiled.output_shardings, compiled.output_formats, compiled.out_info)
        ),
        strict=True,
    ):
        assert result.sharding.is_equivalent_to(sharding, result.ndim)
        assert (info.shape, info.dtype, info.sharding) == (result.shape, result.dtype, sharding)
        assert form.layout == result.format.layout and form.sharding == sharding
    layouts = [[f.layout for f in jax.tree.leaves(s.input_formats)] for s in (compiled, theirs)]
    assert layouts[0] == layouts[1]


def test_modules_of_a_lowered_step(stages):
    lowered, _ = stages["Lowered"]
    assert str(lowered.compiler_ir()) == str(lowered.partitioned.module)
    assert "stablehlo" in str(lowered.compiler_ir("stablehlo"))
    with pytest.raises(ConfigError, match="^there is no module in dialect 'hlo'\n"):
        lowered.compiler_ir("hlo")


def test_exporting_a_step_is_refused_with_what_can_be_exported():
    with pytest.raises(
        ConfigError, match="^a step for several meshes cannot be exported: it is a program for"
    ):
        jax.export.export(STEP)(*GIVEN, **NAMED)
    with pytest.raises(ConfigError, match="cannot be exported"):
        STEP.trace(*GIVEN, **NAMED).lower(lowering_platforms=("cpu",))
    exported = jax.export.export(jax.jit(STEP.__wrapped__))(*GIVEN)
    assert float(exported.call(*GIVEN)[1]) == pytest.approx(float(plain_step(*GIVEN)[1]))


LAMBDA = mpmd.jit(lambda x: FIRST(PARAMS["a"], x), CONFIG)


def test_a_step_is_refused_by_pickle_in_words(stages):
    for stage, (ours, _) in stages.items():
        with pytest.raises(
            NotPicklableError, match=f"^{stage} of mpmd cannot be pickled: .*\n  pickle the config"
        ):
            pickle.dumps(ours)
        assert copy.deepcopy(ours) is ours and copy.copy(ours) is ours
    with pytest.raises(
        NotPicklableError, match="^Jitted of mpmd cannot be pickled: .*\n  it is pickled by its "
    ):
        pickle.dumps(LAMBDA)
    assert copy.deepcopy({"step": STEP})["step"] is STEP


@mpmd.jit(CONFIG)
def decorated(x):
    return FIRST(PARAMS["a"], x)


def test_a_jitted_function_is_pickled_by_its_name():
    """As a function is, where its module has it."""
    assert pickle.loads(pickle.dumps(decorated)) is decorated


def test_a_configuration_is_the_same_after_pickle():
    given = mpmd.make_config(
        mpmd.make_topology({"m0": {"data": 2, "model": 2}, "m1": {"data": 2}}),
        {"first": ("m0", 0), "second": "m1#pinned_host"},
        schedule=get_schedule("zb_h2", latency=0.5),
        in_shardings=(None, PartitionSpec("data")),
        options=mpmd.PipelineOptions(backend="xla"),
    )
    back = pickle.loads(pickle.dumps(given))
    assert back == given and back.topology == given.topology and copy.deepcopy(given) == given
    stages = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), stages=mpmd.by_parameters(r"(\d)"))
    assert pickle.loads(pickle.dumps(stages)) == stages


def test_a_topology_of_given_devices_has_the_same_again():
    devices = jax.devices()
    mesh = Mesh(np.array(devices[3:1:-1]), ("x",), axis_types=(AxisType.Explicit,))
    given = mpmd.make_topology({"m0": [devices[5]], "m1": mesh})
    back = pickle.loads(pickle.dumps(given))
    assert back == given and back.explicit_axes == ("x",)
    made = mpmd.make_topology({"m0": len(devices), "m1": 1})
    assert pickle.loads(pickle.dumps(made)) == made


def test_shardings_that_name_devices_are_not_pickled():
    of_devices = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec())
    config = mpmd.make_config(CONFIG.topology, {"first": "m0"}, in_shardings=(of_devices,))
    with pytest.raises(
        NotPicklableError, match="^in_shardings of a configuration names devices, which another"
    ):
        pickle.dumps(config)


OTHER = """
import pickle, sys
import jax
jax.config.update("jax_num_cpu_devices", {devices})
import mpmd
from mpmd.errors import ConfigError
try:
    topology = pickle.loads(bytes.fromhex({data!r}))
    same = topology == mpmd.make_topology({{"m0": 1, "m1": 2}})
    print("the same" if same else "another", list(topology), topology["m1"].size)
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "devices", "said"),
    [
        ((0, 1, 2), 4, "the same ['m0', 'm1'] 2"),
        ((0, 1, 2), 1, "the same ['m0', 'm1'] 2"),
        (
            (5, 1, 2),
            2,
            "the pickled topology of m0, m1 uses device 5 of jax.devices(), and this process has 2",
        ),
    ],
)
def test_a_topology_in_another_process(numbers, devices, said):
    """By sizes where it has the first devices, made where these are too few; by numbers otherwise."""
    first, *rest = [jax.devices()[number] for number in numbers]
    data = pickle.dumps(mpmd.make_topology({"m0": [first], "m1": rest})).hex()
    program = OTHER.format(devices=devices, data=data)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.startswith(said)


def test_loggers_say_what_a_step_took_and_why_it_is_compiled_again(caplog, tmp_path):
    caplog.set_level(logging.INFO, "mpmd")
    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    config = mpmd.make_config(topology, {"first": "m0", "second": "m1"})
    double = mpmd.jit(lambda x: SECOND(PARAMS["b"], FIRST(PARAMS["a"], x)), config)
    double(X)
    double(X[:2])
    mpmd.checkpoint.save(tmp_path, 3, {"x": X})
    mpmd.checkpoint.restore(tmp_path, {"x": X})
    said = [f"{record.name}: {record.message}" for record in caplog.records]
    for pattern in (
        r"mpmd.devices: meshes: m0 on .*; m1 on .*",
        r"mpmd.step: <lambda>: traced in .*, 1 argument array",
        r"mpmd.step: <lambda>: partitioned in .*: 2 fragments on 2 meshes, 1 message \(.*\), no microbatches",
        r"mpmd.step: <lambda>: compiled in .*: 2 fragments \(2 \w+\)",
        r"mpmd.step: <lambda>: compiles signature 2, as x is float32\[2,4\] and was float32\[8,4\]",
        r"mpmd.checkpoint: wrote step 3 to .*, 128 B of this process",
        r"mpmd.checkpoint: restored step 3 of .*",
    ):
        assert [line for line in said if re.fullmatch(pattern, line)], (pattern, said)


def test_every_logger_is_in_the_guide():
    guide = text("docs/guides/logging.md")
    named = set()
    for path in (ROOT / "mpmd").rglob("*.py"):
        named |= set(re.findall(r'getLogger\("(mpmd[\w.]*)"\)', path.read_text()))
    assert named == set(re.findall(r"^\| `(mpmd[\w.]*)` \|", guide, re.M))
