"""Stages by cost on the meshes of a topology: shorthands of the user, and the devices."""

from __future__ import annotations

from typing import Any

from mpmd.config.topology import Topology
from mpmd.cost.device import device_of
from mpmd.errors import ConfigError
from mpmd.tracing.stages.select.automatic import AutomaticSelector, by_cost
from mpmd.tracing.stages.select.selectors import Selector


def from_shorthand(stages: Any) -> Any:
    """The stages of a configuration: `"auto"` and a number are stages by cost.

    Raises:
        ConfigError: another text, or a number below 1.
    """
    if isinstance(stages, bool):
        return stages
    if isinstance(stages, int):
        return by_cost(stages)
    if isinstance(stages, str):
        if stages != "auto":
            raise ConfigError(
                f"stages is {stages!r}; there is 'auto'\n  for a pattern use mpmd.by_parameters({stages!r}) "
                f"or mpmd.split({stages!r})"
            )
        return by_cost()
    return stages


def on_topology(stages: Any, topology: Topology) -> Selector:
    """The stages on the meshes of a topology.

    Raises:
        ConfigError: meshes and stages do not fit.
    """
    placed: Selector = stages.on(list(topology))
    if not isinstance(placed, AutomaticSelector) or any(mesh not in topology for mesh in placed.over):
        return placed  # the assignment of an unknown mesh is reported with the others
    platform = next(iter(topology.values())).devices.flat[0].platform
    sizes = {name: mesh.size for name, mesh in topology.items()}
    return placed.on_devices(sizes, device_of(platform))
