"""What other partitioners for JAX were seen to get wrong: each test would fail here if we did too.

From the user's function on; what single passes were seen to get wrong is in `test_peer_defects_in_passes`.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from examples.workloads.models import (
    D,
    dense,
    dense_params,
    mlp,
    named,
    normal,
    square,
)
from examples.workloads.steps import pipelined
from mpmd.errors import ConfigError, PassError, PlacementError
from mpmd.options import USER_DEFAULTS
from mpmd.runtime.program.streams import Run, Send
from mpmd.scheduling.catalogue import from_function
from mpmd.scheduling.table import Phase
from tests.support.comparing import messages, programs_per_mesh, relative_difference

pytestmark = pytest.mark.usefixtures("plain_xla")

X = jax.device_put(np.ones((8, 4), np.float32))


def changed(**options):
    """For `pipelined`: options other than the user's defaults."""
    return {"options": dataclasses.replace(USER_DEFAULTS, **options)}


def training(stages: int, microbatches: int):
    """A step of gradient descent, and its arguments."""
    params, loss, batch = mlp(stages)

    def step(params, *batch):
        value, grads = mpmd.accumulate_gradients(loss, microbatches)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, (params, *batch)


def tasks_of(program, mesh: str) -> list[str]:
    """The named runs of a mesh in order, such as `F0 F1 B0 B1`."""
    (stream,) = [stream for stream in program.streams if stream.mesh == mesh]
    runs = [op for op in stream.instructions if isinstance(op, Run) and op.microbatch is not None]
    return [f"{op.phase}{op.microbatch}" for op in runs]


def two_names(first: str = "m0", second: str = "m1"):
    """A topology of two meshes on one device, and an assignment of two names to them."""
    meshes = {f"m{i}": jax.sharding.Mesh(jax.devices()[i : i + 1], ("data",)) for i in range(2)}
    return mpmd.make_topology(meshes), {"first": first, "second": second}


def conflict(x, y):
    """Values of two meshes meet where no name says on which."""
    a = mpmd.named_computation(lambda x: 2 * x, name="first")(x)
    b = mpmd.named_computation(lambda x: x + 1, name="second")(y)
    return jnp.sin(a) - b, jnp.cos(a) / b


def strict(fn):
    topology, assignment = two_names()
    options = dataclasses.replace(USER_DEFAULTS, infer_transfers=False)
    return mpmd.jit(fn, mpmd.make_config(topology, assignment, options=options))


def test_defect_1_what_was_partitioned_runs_here():
    step, arguments = training(2, 2)
    got = pipelined(step, 2)(*arguments)
    assert relative_difference(got, jax.jit(step)(*arguments)) <= 1e-5


def test_defect_2_an_order_that_no_schedule_has_is_obeyed():
    """Forward passes of the first mesh from the last microbatch to the first."""

    def key(task):
        turned = task.phase is Phase.F and task.stage == 0
        return (task.phase is not Phase.F, -task.microbatch if turned else task.microbatch)

    step, arguments = training(2, 4)
    mine = pipelined(step, 2, schedule=from_function(key, name="backwards"))
    want = ["F3", "F2", "F1", "F0", "B0", "B1", "B2", "B3"]
    assert tasks_of(mine.lower(*arguments).program, "m0") == want
    assert relative_difference(mine(*arguments), jax.jit(step)(*arguments)) <= 1e-5


@pytest.mark.fast_cases(7)
@pytest.mark.parametrize(
    ("option", "others"),
    [
        ("fragment_remat", {}),
        ("split_bwd_fragments", {}),
        ("merge_remat_fragments", {"fragment_remat": True}),
        ("absorb_inferred_fragments_on_entry_point_function", {"keep_microbatches_equal": False}),
        ("copy_constants", {}),
        ("merge_transfers", {}),
        ("merge_after_scheduling", {}),
        ("merge_forward_with_backward", {}),
        ("keep_microbatches_equal", {}),
        ("split_accumulators", {}),
        ("recompute_cheap_residuals", {}),
        ("swap_transposed_dots", {}),
        ("heterogeneous_meshes", {}),
    ],
)
def test_defect_3_every_option_changes_something(option, others):
    params = {"s0": dense_params(0) | {"v": normal(3, D, 4)}, "s1": dense_params(1, 4)}

    def loss(params, x, y):
        ones = jnp.ones(4) * 3.0

        def first(p, x):
            weights = jnp.exp(dense(p, x))  # which is its own derivative: the backward reads it
            return (weights / x.sum(1, keepdims=True)) @ p["v"], ones, x.mean(), x.max()

        def second(p, x, c, mean, largest, y):
            return square(dense(p, x * c), y) + mean * largest

        x, c, mean, largest = named(first, 0)(params["s0"], x)
        return named(second, 1)(params["s1"], x, c, mean, largest, y) + 0.1 * (params["s0"]["w"] ** 2).sum()

    def step(params, x, y):
        value, grads = mpmd.accumulate_gradients(loss, 2)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    batch = normal(7, 8, D), normal(8, 8, D)
    before = pipelined(step, 2, options=changed(**others)).lower(params, *batch).as_text()
    flipped = {option: not getattr(USER_DEFAULTS, option)}
    after = pipelined(step, 2, options=changed(**others, **flipped)).lower(params, *batch).as_text()
    assert after != before


@pytest.mark.parametrize("option", ["infer_transfers", "infer_cross_mesh_reductions"])
def test_defect_3_options_that_allow_something(option):
    """A sum of values of two meshes needs one of the two."""

    def total(x, y):
        return named(jnp.sin, 0)(x) + named(jnp.cos, 1)(y)

    neither = {"infer_transfers": False, "infer_cross_mesh_reductions": False}
    with pytest.raises(PassError, match="Mesh assignment is not possible"):
        pipelined(total, 2, options=changed(**neither)).lower(X, X)
    got = pipelined(total, 2, options=changed(**neither | {option: True}))(X, X)
    assert relative_difference(got, jax.jit(total)(X, X)) <= 1e-6


@pytest.mark.parametrize(
    ("options", "first_line"),
    [
        ({"disable_passes": ("mpmd-fragment-dec",)}, "disable_passes: there is no pass 'mpmd-fragment-dec'"),
        (
            {"pass_options": ("mpmd-remat-fragmnt{merge-remat-fragments=true}",)},
            "pass_options: there is no pass 'mpmd-remat-fragmnt'",
        ),
        (
            {"pass_options": ("mpmd-remat-fragment{merge=true}",)},
            "mpmd-remat-fragment has no option 'merge'",
        ),
    ],
)
def test_defect_3_options_that_cannot_be_used_are_refused(options, first_line):
    with pytest.raises(ConfigError, match=re.escape(first_line)):
        pipelined(lambda x: named(jnp.sin, 0)(x), 1, options=changed(**options)).lower(X)


def test_defect_4_all_errors_are_told_in_the_order_of_their_places():
    with pytest.raises(PassError, match="2 errors:") as e:
        strict(conflict).lower(X, X)
    first, _, second = str(e.value).partition("\n  2. ")
    assert "subtract" in first
    assert "divide" in second


def test_defect_5_warnings_are_kept_and_nothing_goes_to_stdout(capfd):
    topology = mpmd.make_topology({"z": 1, "a": 1})
    step = mpmd.jit(
        lambda x: named(jnp.cos, 1)(named(jnp.sin, 0)(x)),
        mpmd.make_config(
            topology,
            {"stage0": "z", "stage1": "a"},
            options=dataclasses.replace(USER_DEFAULTS, pipeline_schedule="GPipe", verify_schedule_units=True),
        ),
    )
    lowered = step.lower(X)
    lowered.compile()(X)
    said = [*lowered.warnings, *lowered.notices]
    assert any("z, a" in text for text in said), said
    assert capfd.readouterr().out == ""


def user_rule(*infos: str, target: str) -> str:
    return f"FragmentMergeRule(sources=[{','.join(infos)}],target={target})"


def info(name: str, counter: int, mesh: str = "m0", transposed: int = 0, more: str = "") -> str:
    origin = f'"{name}"' + (f"({transposed})" if transposed else "")
    return f'FragmentInfo(origins=[{origin}]{more},call_counter={counter},mesh_name="{mesh}")'


F0, F1, F2 = (info("stage0", i) for i in range(3))
IMPOSSIBLE = {
    "a fragment in two merge rules": {
        "options": {"merge_rules": (user_rule(F0, F1, target=F0), user_rule(F0, F2, target=F0))},
        "first_line": "is a source of two merge rules",
    },
    "a rule about two meshes": {
        "options": {"merge_rules": (user_rule(F0, info("stage1", 0, "m1"), target=F0),)},
        "first_line": "is about the meshes m0, m1",
    },
    "a rule about two stages": {
        "options": {
            "merge_rules": (
                user_rule(info("stage0", 0, more=",stage=0"), info("stage0", 1, more=",stage=1"), target=F0),
            )
        },
        "first_line": "are of the stages 0, 1",
    },
    "an argument that does not exist": {
        "config": {"constraints": ((99, 0),)},
        "first_line": "99",
    },
    "a result that does not exist": {
        "config": {"constraints": ((0, 99),)},
        "first_line": "99",
    },
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_defect_6_what_cannot_be_is_an_exception(case):
    """Were it the end of the process, there would be no test report."""
    step, arguments = training(2, 3 if "two merge rules" in case else 2)
    params, x, y = arguments
    given = IMPOSSIBLE[case]
    config = dict(given.get("config", {}))
    if "options" in given:
        config |= changed(**given["options"])
    rows = 6 if "two merge rules" in case else 8
    with pytest.raises((PassError, ConfigError), match=given["first_line"]):
        pipelined(step, 2, options=config).lower(params, x[:rows], y[:rows])


@pytest.mark.slow
def test_defect_13_sums_in_their_natural_form_cost_no_more():
    """Gradients are added outside of the microbatch; each sum moves to where its terms arise."""
    stages, microbatches = 4, 8
    params, loss, batch = mlp(stages)

    def natural(params, *batch):
        total = None
        for i in range(microbatches):
            part = tuple(b[i : i + 1] for b in batch)
            grads = mpmd.call(jax.grad(loss), call_counter=i)(params, *part)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        return total

    def carried(params, *batch):
        return mpmd.accumulate_gradients(loss, microbatches)(params, *batch)[1]

    def operands_and_peak(step, **options):
        lowered = pipelined(step, stages, options=changed(**options)).lower(params, *batch)
        runs = [op for s in lowered.program.streams for op in s.instructions if isinstance(op, Run)]
        memory = lowered.compile().memory_analysis().values()
        peak = max(m.peak_bytes - m.kept_bytes for m in memory)  # scratch memory is of programs, not of sums
        return max(len(op.inputs) for op in runs), peak

    got = pipelined(natural, stages)(params, *batch)
    assert relative_difference(got, jax.jit(natural)(params, *batch)) <= 1e-5
    (many, peak), (few, least) = operands_and_peak(natural), operands_and_peak(carried)
    assert many == few
    assert peak <= 1.1 * least
    many, peak = operands_and_peak(natural, carry_sums=False)
    assert many > 2 * few
    assert peak > 2 * least


def test_defect_14_all_microbatches_run_the_same_programs_and_the_optimizer_its_own():
    stages, microbatches = 4, 8
    step, arguments = training(stages, microbatches)
    program = pipelined(step, stages).lower(*arguments).program
    for stream in program.streams:
        runs = [op for op in stream.instructions if isinstance(op, Run)]
        named_runs = Counter(op.executable for op in runs if op.microbatch is not None)
        assert set(named_runs.values()) == {microbatches}, named_runs
        assert not any(op.executable in named_runs for op in runs if op.microbatch is None)
    assert max(programs_per_mesh(program).values()) <= 4


def test_defect_15_transfers_of_different_microbatches_stay_apart():
    stages, microbatches = 4, 8
    step, arguments = training(stages, microbatches)
    program = pipelined(step, stages).lower(*arguments).program
    assert messages(program) == 2 * (stages - 1) * microbatches
    for stream in program.streams:
        made = set()
        for before, op in zip([None, *stream.instructions], stream.instructions):
            if isinstance(op, Run):
                made = set(op.outputs)
            elif isinstance(op, Send):
                assert op.buffer in made or isinstance(before, Send), "it is sent as soon as it is made"


def test_defect_16_checkpoint_around_named_computations():
    params, _, (x, y) = mlp(2)

    def both(params, x):
        return named(dense, 1)(params["s1"], named(dense, 0)(params["s0"], x))

    def loss(params, x, y):
        return square(jax.checkpoint(both)(params, x), y)

    step = jax.value_and_grad(loss)
    got = pipelined(step, 2)(params, x, y)
    assert relative_difference(got, jax.jit(step)(params, x, y)) <= 1e-5


def test_defect_17_names_in_a_scan_are_unrolled():
    def step(w, x):
        def body(x, _):
            return named(lambda w, x: jnp.tanh(x @ w), 0)(w, x), None

        return jax.lax.scan(body, x, None, length=3)[0]

    w, x = normal(1, D, D), normal(2, 4, D)
    assert relative_difference(pipelined(step, 1)(w, x), jax.jit(step)(w, x)) <= 1e-5


def test_defect_17_names_in_a_loop_of_unknown_length_name_the_loop_and_its_line():
    def step(x, n):
        def body(carry):
            return named(jnp.sin, 0)(carry[0]), carry[1] + 1

        return jax.lax.while_loop(lambda carry: carry[1] < n, body, (x, 0))[0]

    with pytest.raises(PlacementError, match=r"inside a loop .* at .*test_peer_defects.py:\d+"):
        pipelined(step, 1).lower(X, 3)


def test_defect_18_mesh_conflicts_are_told_in_the_words_of_the_user():
    with pytest.raises(PassError) as e:
        strict(conflict).lower(X, X)
    text = str(e.value)
    assert "first" in text
    assert "second" in text
    assert "test_peer_defects.py" in text
    for word in (
        "src_set",
        "use_set",
        "#mpmd",
        "meshes_with_origins",
        "site-packages",
        "<frozen",
        "mpmd/api",
        "loc(",
    ):
        assert word not in text


def test_defect_19_the_second_call_compiles_nothing():
    traced = []

    def step(x):
        traced.append(x.shape)
        return named(jnp.sin, 0)(x)

    jitted = pipelined(step, 1)
    for shape in [(8, 4), (8, 4), (4, 4), (8, 4), (4, 4)]:
        jitted(jnp.ones(shape))
    assert traced == [(8, 4), (4, 4)]


@pytest.mark.slow
def test_defect_21_stages_follow_the_topology_not_the_names_of_meshes():
    names = ["m10", "m2", "m1"]
    topology = mpmd.make_topology(dict.fromkeys(names, 1))
    config = mpmd.make_config(topology, {f"stage{i}": name for i, name in enumerate(names)}, schedule="1f1b")
    step, arguments = training(3, 4)
    jitted = mpmd.jit(step, config)
    program = jitted.lower(*arguments).program
    assert tasks_of(program, "m10")[:4] == ["F0", "F1", "F2", "B0"]
    assert tasks_of(program, "m2")[:3] == ["F0", "F1", "B0"]
    assert relative_difference(jitted(*arguments), jax.jit(step)(*arguments)) <= 1e-5
