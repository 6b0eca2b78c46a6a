"""Stages by cost on the meshes of a topology: shorthands of the user, and the speed of the devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpmd.config.topology import Topology
from mpmd.errors import ConfigError
from mpmd.tracing.stages.select.automatic import AutomaticSelector, by_cost
from mpmd.tracing.stages.select.division import DeviceRates
from mpmd.tracing.stages.select.selectors import Selector

if TYPE_CHECKING:
    from mpmd.compile.cost.device import Device

_LONG_NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64"}

_LINKS = {"host": (8e9, 2e-5)}
"""Bytes per second and latency between devices, by the name of the device; `_GPU_LINK` for others."""

_GPU_LINK = (50e9, 1e-5)


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
    from mpmd.compile.cost.device import HOST, OF_PLATFORM  # brings much of the compiler

    platform = next(iter(topology.values())).devices.flat[0].platform
    sizes = {name: mesh.size for name, mesh in topology.items()}
    return placed.on_devices(sizes, rates_of(OF_PLATFORM.get(platform, HOST)))


def rates_of(device: Device) -> DeviceRates:
    """The rates of a device that the cost models of the compiler describe."""
    matmul = tuple(
        (_LONG_NAMES[name], flops * device.matmul_efficiency)
        for name, flops in sorted(device.matmul_flops, key=lambda entry: entry[0] != "f32")
    )
    link = _LINKS.get(device.name, _GPU_LINK)
    elements = device.vector_rate * (device.vector_bytes / 4)
    return DeviceRates(device.name, matmul, elements, device.bandwidth, device.call_seconds, link[0], link[1])
