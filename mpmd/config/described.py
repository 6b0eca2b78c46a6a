"""The world of a dry run: processes and devices that need not be here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from mpmd.brief import brief
from mpmd.cost.device import Device, device_of


@dataclasses.dataclass(frozen=True)
class DescribedWorld:
    """Processes with devices that are described, and what becomes of a step there instead of code.

    Attributes:
        processes: how many.
        devices: of each.
        device: one of them.
        target: its name among the targets of the compiler.
        memory_bytes: of one; None where that is not known.
        is_here: whether the devices are cores of this machine, so that fragments can be timed.
        take: is given each step that would be compiled, as an `mpmd` `Lowered`; its result takes the place of
            the compiled step.
    """

    processes: int
    devices: int
    device: Device
    target: str
    memory_bytes: int | None
    is_here: bool
    take: Callable[[Any], Any]

    __repr__ = brief


_described: list[DescribedWorld] = []


def described_world() -> DescribedWorld | None:
    """The world of the dry run that this process makes; None outside of one."""
    return _described[0] if _described else None


def device_of_meshes(meshes: Mapping[str, Any]) -> Device:
    """The device that the parts of a step are priced for: in a dry run the described one.

    Args:
        meshes: the JAX mesh behind each name.
    """
    described = described_world()
    return described.device if described else device_of(next(iter(meshes.values())).devices.flat[0].platform)


def describe(world: DescribedWorld) -> None:
    """Makes this process a dry run, to its end."""
    _described[:] = [world]
