"""Programs of several devices without XLA: values cut for devices, and put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mpmd.compile.hlo import HloModule
from mpmd.compile.lowering import lower_for_mesh
from tests.support.hlo_meaning import evaluate_devices

Spec = Sequence[Sequence[str]]
"""For each dim the names of the axes that cut it."""


def partitioned(
    function: Any,
    arguments: Sequence[Any],
    axes: Mapping[str, int],
    given: Sequence[Spec],
    wanted: Sequence[Spec],
) -> HloModule:
    """A function of arrays as the HLO of each device."""
    text = jax.jit(function, keep_unused=True).lower(*arguments).as_text()
    return lower_for_mesh(text, axes, given, wanted)


def places(axes: Mapping[str, int], device: int) -> dict[str, int]:
    """Where a device stands on each axis."""
    found = np.unravel_index(device, tuple(axes.values()))
    return dict(zip(axes, map(int, found)))


def part(value: np.ndarray, spec: Spec, axes: Mapping[str, int], device: int) -> np.ndarray:
    """A device's part of an array."""
    where, index = places(axes, device), []
    for size, names in zip(value.shape, spec, strict=True):
        begin, length = 0, size
        for name in names:
            length //= axes[name]
            begin += where[name] * length
        index.append(slice(begin, begin + length))
    return value[tuple(index)]


def evaluated(
    module: HloModule, arguments: Sequence[np.ndarray], axes: Mapping[str, int], given: Sequence[Spec]
) -> list[list[np.ndarray]]:
    """What each device computes: a list of results per device."""
    devices = int(np.prod(list(axes.values())))
    rows = [[part(a, s, axes, d) for a, s in zip(arguments, given, strict=True)] for d in range(devices)]
    values = evaluate_devices(module, rows)
    return [list(v) if isinstance(v, tuple) else [v] for v in values]
