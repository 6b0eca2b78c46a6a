"""Items with stages as a computation again: one named computation per stage."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from mpmd.tracing.names import carrier
from mpmd.tracing.stages.items import FlatFunction, Item, numbers


def emit(flat: FlatFunction, arguments: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Computes the results, stage by stage; items without a stage as soon as their inputs are known.

    Args:
        flat: an item that reads a value of a stage has this stage or a later one, or none.
        arguments: the values of its inputs.
        names: of the stages, in order.
    """
    emission = ItemEmission(flat)
    env: dict[int, Any] = {**flat.constants, **dict(zip(flat.inputs, arguments, strict=True))}
    unnamed = [item for item in flat.items if item.stage is None]
    for stage, name in enumerate(names):
        unnamed = emission.compute_ready(unnamed, env)
        own = [item for item in flat.items if item.stage == stage]
        if own:
            emission.compute_as(lambda of: carrier(of, "comp", name), own, env, 0)  # noqa: B023
    emission.compute_ready(unnamed, env)
    return [env[v] if isinstance(v, int) else v.val for v in flat.outputs]


def outside_of(
    flat: FlatFunction, items: Sequence[Item], readers: Mapping[int, Sequence[Item]]
) -> tuple[list[int], list[int]]:
    """The values that items read of others, and those of their own that others read, or that are results."""
    inside = {v for item in items for v in item.outputs}
    inputs = dict.fromkeys(v for item in items for v in item.reads if v not in inside)
    own, results = set(map(id, items)), set(numbers(flat.outputs))
    outputs = [
        v
        for item in items
        for v in item.outputs
        if v in results or any(id(reader) not in own for reader in readers[v])
    ]
    return list(inputs), outputs


class ItemEmission:
    """Computes items over an environment, which has the values by number."""

    def __init__(self, flat: FlatFunction) -> None:
        self.flat, self.readers = flat, flat.readers()

    def compute_ready(self, items: Sequence[Item], env: dict[int, Any]) -> list[Item]:
        """Computes the items whose inputs are known, under no checkpoint; returns the others."""
        waiting = []
        for item in items:
            if env.keys() >= set(item.reads):
                self.compute_item(item, env)
            else:
                waiting.append(item)
        return waiting

    def compute(self, items: Sequence[Item], env: dict[int, Any], depth: int) -> None:
        """Computes items in order; runs of items of one checkpoint are under a checkpoint again.

        Args:
            items: their inputs are in `env`, or outputs of earlier ones.
            env: gets the outputs.
            depth: how many checkpoints are around already.
        """
        for checkpoint, run in itertools.groupby(items, lambda item: (*item.checkpoints, None)[depth]):
            group = list(run)
            if checkpoint is not None:
                options = {"policy": checkpoint.policy, "prevent_cse": checkpoint.prevent_cse}
                self.compute_as(lambda of: jax.checkpoint(of, **options), group, env, depth + 1)  # noqa: B023
                continue
            for item in group:
                self.compute_item(item, env)

    def compute_item(self, item: Item, env: dict[int, Any]) -> None:
        values = [env[v] if isinstance(v, int) else v.val for v in item.inputs]
        env.update(zip(item.outputs, item.compute(*values), strict=True))

    def compute_as(self, transform: Any, items: list[Item], env: dict[int, Any], depth: int) -> None:
        """Computes items as one function under a transformation of JAX."""
        inputs, outputs = outside_of(self.flat, items, self.readers)

        def together(*values: Any) -> list[Any]:
            local = dict(zip(inputs, values, strict=True))
            self.compute(items, local, depth)
            return [local[v] for v in outputs]

        env.update(zip(outputs, transform(together)(*[env[v] for v in inputs]), strict=True))
