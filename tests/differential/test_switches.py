"""With every optional pass on and off, pairwise, a step still gives `jax.jit`'s numbers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from examples.pipelined_transformer.check import TOLERANCE, parameter_differences
from examples.pipelined_transformer.config import TrainConfig
from examples.pipelined_transformer.train_step import make_plain_step, make_state, make_train_step
from examples.workloads.flax_models import FLAX_MODELS
from examples.workloads.models import MODELS
from examples.workloads.steps import pipelined, sgd_momentum, training_step
from mpmd import options
from mpmd.options import USER_DEFAULTS, PipelineOptions
from mpmd.partition import pipeline
from mpmd.support.passes import name_of
from tests.support.comparing import copied, relative_difference
from tests.support.covering import covering_rows

ALL = MODELS | FLAX_MODELS
FAST = (1, 4, 7, 10, 13)

# Without these there is no partitioned program.
NEEDED = {
    "mpmd-call-inline",
    "mpmd-infer-mesh-assign-mesh-func-leaves",
    "mpmd-infer-mesh-finalize",
    "mpmd-infer-mesh-populate-src-set",
    "mpmd-infer-mesh-populate-use-set",
    "mpmd-infer-mesh-rewrite-using-analysis",
    "mpmd-inline",
    "mpmd-lower-to-fragment-calls",
    "mpmd-map-named-ops-to-mpmd-ops",
    "mpmd-unroll-for-loops",
}
# Options of `PipelineOptions` that switch passes, or choose what they do; the first setting is the user's.
SWITCHES = {
    name: (getattr(USER_DEFAULTS, name), not getattr(USER_DEFAULTS, name))
    for name in (
        "absorb_inferred_fragments_on_entry_point_function", "carry_sums", "copy_constants",
        "fragment_remat", "heterogeneous_meshes", "infer_cross_mesh_reductions", "keep_microbatches_equal",
        "merge_after_scheduling", "merge_forward_with_backward", "merge_remat_fragments",
        "merge_transfers", "recompute_cheap_residuals", "split_accumulators",
        "split_bwd_fragments", "swap_transposed_dots", "verify_schedule_units",
    )
} | {"max_clones": (1, 3), "attention_stitching": ("auto", "off"),
     "reduce_gradients": ("once", "per_microbatch"), "gather_weights": ("once", "per_use")}  # fmt: skip
# Which schedule, how many stages and how many microbatches: what switches might depend on.
SHAPES = {"schedule": ("1f1b", "gpipe", "zb_h1"), "stages": (2, 3), "microbatches": (4, 1)}
# Options that are no switches: the user's program, refusals, and how it all is shown.
OTHERS = {
    "backend", "command_buffers", "compare", "compile_cache_bytes", "compile_cache_dir", "constraints",
    "copy_scalar_results", "device_memory_bytes",
    "disable_passes", "dump_passes", "dump_to", "error_limit", "fail_on_backward_deps",
    "fail_on_impossible_order", "fail_on_inferred_fragments", "fail_on_param_transfers",
    "fail_on_reshard_only_fragments", "float_jitter", "infer_transfers", "input_assignment",
    "jax_shardings", "kernel_overrides", "merge_rules", "mirrored_names", "name_to_mesh_assignment",
    "one_fragment_per_task", "output_assignment",
    "param_transfer_pattern", "pass_options", "pipeline_schedule", "schedule_rules", "task_orders",
    "verbose_logging", "verify_each",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def compile_fast():
    """XLA's optimizations are of no interest here, and take most of the time."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@functools.cache
def optional_passes() -> list[str]:
    """The passes that run by default, and may be left out."""
    makers = pipeline.PIPELINES.values()
    names = dict.fromkeys(name_of(step.pass_) for make in makers for step in make(USER_DEFAULTS))
    return [name for name in names if name not in NEEDED]


@functools.cache
def rows() -> list[dict[str, Any]]:
    """Settings of all switches; `True` at the name of a pass means that it runs."""
    return covering_rows(SHAPES | SWITCHES | dict.fromkeys(optional_passes(), (True, False)))


def options_of(row: dict[str, Any]) -> PipelineOptions:
    left_out = tuple(name for name in optional_passes() if not row[name])
    return dataclasses.replace(
        USER_DEFAULTS, **{name: row[name] for name in SWITCHES}, disable_passes=left_out, verify_each=True
    )


@functools.cache
def built(name: str, stages: int, microbatches: int) -> Any:
    """State, step, batch, and what two steps of `jax.jit` make of them."""
    params, loss, batch = ALL[name].build(stages)
    init, update = sgd_momentum()
    state, step = init(params), training_step(loss, microbatches, update)
    plain = jax.jit(step)
    return state, step, batch, plain(plain(state, *batch)[0], *batch)


def check_model(name: str, row: dict[str, Any]) -> None:
    """Two steps, the second on what the first one left on the meshes."""
    state, step, batch, want = built(name, row["stages"], row["microbatches"])
    chosen = {"options": options_of(row)}
    jitted = pipelined(step, row["stages"], row["schedule"], options=chosen, donate_argnums=0)
    got = jitted(jitted(copied(state), *batch)[0], *batch)
    assert relative_difference(got, want) <= ALL[name].tolerance


def check_example(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(
        schedule=row["schedule"], num_stages=row["stages"], num_microbatches=row["microbatches"], layers=3,
        d_model=16, heads=2, seq_len=16, batch_size=4, vocab_size=270, warmup_steps=2, steps=6,
    )  # fmt: skip
    monkeypatch.setattr(options, "_source", lambda: options_of(row))
    batch = np.random.default_rng(0).integers(0, 270, (4, config.seq_len + 1)).astype(np.int32)
    step, plain = make_train_step(config), make_plain_step(config)
    got, got_loss = step(step(make_state(config), batch)[0], batch)
    want, want_loss = plain(plain(make_state(config), batch)[0], batch)
    assert max(parameter_differences(got.params, want).values()) <= TOLERANCE["float32"]
    assert float(got_loss) == pytest.approx(float(want_loss), rel=1e-5)


def test_every_option_is_a_switch_or_known_to_be_none():
    names = {field.name for field in dataclasses.fields(PipelineOptions)}
    assert names == SWITCHES.keys() | OTHERS
    assert not SWITCHES.keys() & OTHERS


def test_any_two_settings_meet_in_some_row():
    switches = SHAPES | SWITCHES | dict.fromkeys(optional_passes(), (True, False))
    assert len(optional_passes()) > 40 and len(rows()) < 24
    for a, b in itertools.combinations(switches, 2):
        wanted = set(itertools.product(switches[a], switches[b]))
        assert {(row[a], row[b]) for row in rows()} == wanted, (a, b)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("row", FAST)
def test_a_model_with_a_skip_connection_gives_the_numbers_of_jit(row):
    check_model("skip", rows()[row])


@pytest.mark.slow
@pytest.mark.parametrize("row", range(len(rows())))
@pytest.mark.parametrize("name", ALL)
def test_every_model_gives_the_numbers_of_jit(name, row):
    check_model(name, rows()[row])


@pytest.mark.slow
@pytest.mark.parametrize("row", range(len(rows())))
def test_the_example_gives_the_numbers_of_jit_in_every_row(row, monkeypatch):
    check_example(rows()[row], monkeypatch)
