"""One training step, twice: through the pipeline with `mpmd.jit`, and the same mathematics with `jax.jit`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import mpmd
from examples.pipelined_transformer.config import TrainConfig
from examples.pipelined_transformer.model import (
    GPT,
    Params,
    init_params,
    loss_of,
    stage_function,
    stage_params,
)


def make_state(config: TrainConfig) -> TrainState:
    """Fresh parameters and optimizer state."""

    @jax.jit
    def create() -> TrainState:
        params = init_params(config, config.seed)
        state = TrainState.create(apply_fn=GPT(config).apply, params=params, tx=make_optimizer(config))
        return state.replace(step=jnp.int32(state.step))  # as it comes out of a step

    return create()


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW behind global-norm clipping, with warm-up and cosine decay."""
    rate = optax.warmup_cosine_decay_schedule(
        config.learning_rate / (config.warmup_steps + 1), config.learning_rate, config.warmup_steps,
        max(config.steps, config.warmup_steps + 1), end_value=config.learning_rate / 10,
    )  # fmt: skip
    matrices = functools.partial(jax.tree.map, lambda leaf: jnp.ndim(leaf) > 1)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(rate, b2=0.95, weight_decay=config.weight_decay, mask=matrices),
    )


def make_pipeline_config(config: TrainConfig) -> Any:
    """One mesh per stage, and the batch split over the devices of a mesh."""
    topology = mpmd.make_topology(_devices(config))
    assignment = {f"stage{index}": mesh for index, mesh in enumerate(config.meshes)}
    split = (None, PartitionSpec("data")) if config.devices_per_mesh > 1 else None
    return mpmd.make_config(
        topology,
        assignment if config.has_names else None,
        stages=None if config.has_names else stages_from_outside(config),
        schedule=config.schedule,
        in_shardings=split,
        backend=config.backend or None,
    )


def stages_from_outside(config: TrainConfig) -> Any:
    """The stages of a model without names: found by cost, or said by a pattern of its parameters."""
    if config.stages == "auto":
        return "auto"
    return mpmd.split("blocks") if config.scan else mpmd.by_parameters(r"block_(\d+)")


def _devices(config: TrainConfig) -> dict[str, Any]:
    """What each mesh is made of; meshes share devices where there are too few (one GPU, for a test)."""
    each, found = config.devices_per_mesh, jax.devices()
    if len(found) >= each * config.num_stages or len(found) < each:
        return dict.fromkeys(config.meshes, each)
    turns = itertools.cycle([found[at : at + each] for at in range(0, len(found) - each + 1, each)])
    return dict(zip(config.meshes, turns))


def pipelined_loss(config: TrainConfig) -> Callable[[Params, jax.Array], jax.Array]:
    """The loss as a chain of named stages."""
    stages = [
        mpmd.named_computation(stage_function(config, index), name=f"stage{index}")
        for index in range(config.num_stages)
    ]

    def loss_fn(params: Params, batch: jax.Array) -> jax.Array:
        x = None
        for index, stage in enumerate(stages):
            reads_batch = index in (0, config.num_stages - 1)
            x = stage(stage_params(config, params, index), x, batch if reads_batch else None)
        return x

    return loss_fn


def make_train_step(config: TrainConfig) -> Any:
    """The step through the pipeline, as `mpmd.jit` gives it."""
    loss_fn = pipelined_loss(config) if config.has_names else functools.partial(loss_of, config)

    @mpmd.jit(make_pipeline_config(config), donate_argnums=0)
    def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        step = mpmd.accumulate_gradients(loss_fn, num_microbatches=config.num_microbatches)
        loss, grads = step(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    return train_step


def whole_arrays(tree: Any) -> Any:
    """A state with whole arrays for stacks in parts, for what knows no meshes."""

    def is_stacked(value: Any) -> bool:
        return isinstance(value, mpmd.Stacked)

    return jax.tree.map(lambda v: v.whole() if is_stacked(v) else v, tree, is_leaf=is_stacked)


def make_plain_step(config: TrainConfig) -> Any:
    """The step in plain JAX, on one device: what the pipeline must equal."""

    @functools.partial(jax.jit, donate_argnums=0)
    def plain_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        value_and_grad = jax.value_and_grad(functools.partial(loss_of, config))

        def add(total: Any, microbatch: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, value_and_grad(state.params, microbatch)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)
        total, _ = jax.lax.scan(add, zeros, batch.reshape(config.num_microbatches, -1, batch.shape[-1]))
        loss, grads = jax.tree.map(lambda leaf: leaf / config.num_microbatches, total)
        return state.apply_gradients(grads=grads), loss

    return plain_step
