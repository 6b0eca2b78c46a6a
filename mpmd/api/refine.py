"""Stages chosen again by what their operations take: a run of the step on zeros, in more, smaller stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mpmd.api.aot import Compiled, Traced
from mpmd.config.config import Config, with_stages
from mpmd.errors import ConfigError
from mpmd.jax_compat import as_key, is_key
from mpmd.partition.signature import Arguments, describe
from mpmd.runtime.measure.run_costs import ProgramCosts
from mpmd.runtime.program.streams import Run
from mpmd.tracing.stages.select.automatic import AutomaticSelector, DivisionChoice, MeasuredRanges

_RUNS = 4
"""How often fragments are measured: other work on the machine makes some runs longer."""

_PARTS_OF_A_STAGE = 4
"""How many smaller stages each stage becomes, to be measured."""


def refined(config: Config, trace: Callable[[Config], Traced]) -> Config:
    """The configuration with stages by measured seconds.

    Args:
        config: its stages are by cost.
        trace: traces the step under a configuration.

    Raises:
        ConfigError: the step divides no function.
    """
    selector = config.stages
    assert isinstance(selector, AutomaticSelector)
    plain = dataclasses.replace(selector, refine=False)
    choices = _choices(trace(with_stages(config, plain)))
    if not choices:
        raise ConfigError(
            "refine=True chooses the stages of a loss, but this step divides none\n  leave refine out"
        )
    fewest = min(len(choice.places) // max(1, choice.stages) for choice in choices)
    measured = measure_blocks(config, plain, min(_PARTS_OF_A_STAGE, max(1, fewest)), trace)
    return with_stages(config, dataclasses.replace(plain, measured=measured))


def measure_blocks(
    config: Config, selector: AutomaticSelector, parts: int, trace: Callable[[Config], Traced]
) -> MeasuredRanges:
    """Measured seconds of ranges of units of each function, in units of their estimates.

    Where a step divides several functions, a stage of a mesh has a share of each: they have one factor there.

    Args:
        config: of the step.
        selector: whose stages are divided further.
        parts: into how many each.
        trace: traces the step under a configuration.
    """
    blocks = dataclasses.replace(
        selector,
        over=tuple(mesh for mesh in selector.over for _ in range(parts)),
        devices=tuple(devices for devices in selector.devices for _ in range(parts)),
        count=None,
        memory=None,
    )
    compiled = trace(with_stages(config, blocks)).lower().compile()
    try:
        choices = _choices(compiled.lowered.traced)
        seconds = stage_seconds(compiled, len(blocks.over))
    finally:
        compiled.close()
    estimated = [sum(of_stage) for of_stage in zip(*(c.division.seconds for c in choices), strict=True)]
    factors = [measured / guess if guess else 1.0 for measured, guess in zip(seconds, estimated, strict=True)]
    return tuple(
        (choice.key, tuple(zip((*choice.division.starts, len(choice.units.chain)), factors, strict=True)))
        for choice in choices
    )


def _choices(traced: Traced) -> list[DivisionChoice]:
    """The divisions of the functions of a step, each once, though JAX may trace it several times."""
    choices = [] if traced.stages is None else traced.stages.choices
    return list({choice.key: choice for choice in choices}.values())


def stage_seconds(compiled: Compiled, stages: int) -> list[float]:
    """Seconds of the tasks of one microbatch of each stage, each fragment measured alone, on zeros."""
    costs = measured_fragments(compiled)
    totals, microbatches = [0.0] * stages, set()
    meshes = list(compiled.lowered.config.topology)
    for stream in compiled.program.streams:
        for op in stream.instructions:
            if isinstance(op, Run) and op.microbatch is not None:
                stage = meshes.index(stream.mesh) if op.stage is None else op.stage
                totals[stage] += costs.fragments[op.executable]
                microbatches.add(op.microbatch)
    return [total / max(1, len(microbatches)) for total in totals]


def measured_fragments(compiled: Compiled) -> ProgramCosts:
    """Seconds of each fragment alone, and of each kind of message, on zeros: the least of some runs."""
    runs = []
    for _ in range(_RUNS):
        positional, keywords = zeros(compiled.lowered.traced.arguments)
        runs.append(compiled.measure.costs(*positional, **keywords)[1])
    return ProgramCosts(
        {name: min(run.fragments[name] for run in runs) for name in runs[0].fragments},
        {kinds: min(run.transfers[kinds] for run in runs) for kinds in runs[0].transfers},
        min(run.call_s for run in runs),
    )


def zeros(arguments: Arguments) -> Any:
    return jax.tree.unflatten(arguments.tree, [_zero(leaf) for leaf in arguments.leaves])


def _zero(leaf: Any) -> Any:
    shape, dtype, _ = describe(leaf)
    if is_key(dtype):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        return as_key(jax.numpy.zeros(data.shape, data.dtype), dtype)
    return np.zeros(shape, dtype)
