"""Shardings in HLO's notation, and the mesh that they have in common.

    {devices=[2,1,4]<=[8] last_tile_dim_replicate}    dim 0 in two parts, each on four devices

HLO refers to device numbers, Shardy to axes of a mesh.  Along each dim the device number grows by strides;
the strides of all shardings of a program, put in order, are those of the axes of one mesh.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mpmd.compile.hlo.text import blank_comments, integers, split_top
from mpmd.errors import CompileError

_TILED = re.compile(r"devices=\[([\d,]+)\](<=\[([\d,]+)\](?:T\(([\d,]+)\))?|[\d,]+)")


@dataclass(frozen=True, slots=True)
class Stride:
    """A step of the device number: `count` parts, `step` devices apart."""

    step: int
    count: int


Tiling = tuple[tuple[Stride, ...], ...]
"""For each dim its strides, the outermost first; () for a value that is whole on every device."""


def parse_sharding(text: str, devices: int) -> Tiling:
    """The tiling in the sharding of one array.

    Args:
        text: the attribute, such as `{devices=[8,1]<=[8]}`; "" for none, which is whole.
        devices: how many there are.

    Raises:
        CompileError: the value is on some of the devices only, or it is tiled over other devices.
    """
    body = re.sub(r"metadata=\{.*\}", "", blank_comments(text)).strip()
    body = body.removeprefix("{").removesuffix("}").strip()
    if body in ("", "replicated"):
        return ()
    found = _TILED.match(body)
    if found is None:
        raise CompileError(f"the partitioner takes tiled and replicated values, not sharding={text}")
    tiles, ids = integers(found[1]), _device_ids(found)
    if sorted(ids.reshape(-1).tolist()) != list(range(devices)) or ids.size != math.prod(tiles):
        raise CompileError(f"sharding={text} is not over the {devices} devices of the program")
    rest = body[found.end() :]
    subgroups = re.search(r"last_tile_dims=\{([\w, ]*)\}", rest)
    kinds = split_top(subgroups[1]) if subgroups else ["replicated"] * ("last_tile_dim_replicate" in rest)
    if any(kind != "replicated" for kind in kinds):
        raise CompileError(f"the partitioner takes tiled and replicated values, not sharding={text}")
    grid = ids.reshape(tiles)
    return tuple(_strides(grid, d, text) for d in range(len(tiles) - len(kinds)))


def parse_shardings(text: str, count: int, devices: int) -> list[Tiling]:
    """The tilings of a tuple of `count` arrays; one sharding without inner braces holds for all.

    Raises:
        CompileError: there is another number of shardings, or one that the partitioner does not support.
    """
    body = blank_comments(text).strip()
    inner = split_top(body[1:-1]) if body.startswith("{") else []
    if not inner or not inner[0].startswith("{"):
        return [parse_sharding(text, devices)] * count
    if len(inner) != count:
        raise CompileError(f"{count} values have {len(inner)} shardings: sharding={text[:200]}")
    return [parse_sharding(part, devices) for part in inner]


def _device_ids(found: re.Match[str]) -> np.ndarray:
    if found[3] is None:
        return np.array(integers(found[2]))
    dims = integers(found[3])
    order = integers(found[4]) if found[4] else tuple(range(len(dims)))
    return np.arange(math.prod(dims)).reshape(dims).transpose(order)


def _strides(grid: np.ndarray, dim: int, text: str) -> tuple[Stride, ...]:
    """How the device number grows along one dim of a grid of devices.

    Raises:
        CompileError: it does not grow by strides.
    """
    steps = (grid - np.take(grid, [0], dim)).swapaxes(0, dim).reshape(grid.shape[dim], -1)
    numbers = steps[:, 0].tolist()
    if (steps != steps[:, :1]).any():
        raise CompileError(f"sharding={text} is not a tiling of a mesh of devices")
    found: list[Stride] = []
    done = 1
    while done < len(numbers):
        step, count = numbers[done], 1
        while count * done < len(numbers) and numbers[count * done] == count * step:
            count += 1
        found.append(Stride(step, count))
        done *= count
    rebuilt = [0]
    for stride in found:
        rebuilt = [i * stride.step + r for i in range(stride.count) for r in rebuilt]
    if rebuilt != numbers or any(s.step <= 0 for s in found):
        raise CompileError(f"sharding={text} is not a tiling of a mesh of devices")
    return tuple(reversed(found))


def common_mesh(tilings: Iterable[Tiling], devices: int) -> dict[str, int]:
    """The axes that generate all tilings and their sizes, the outermost first.

    Raises:
        CompileError: there is no such mesh.
    """
    bounds = {1, devices}
    for stride in itertools.chain.from_iterable(itertools.chain.from_iterable(tilings)):
        bounds |= {stride.step, stride.step * stride.count}
    ordered = sorted(bounds, reverse=True)
    for large, small in itertools.pairwise(ordered):
        if large % small:
            raise CompileError(f"the shardings divide {devices} devices in ways that have no mesh in common")
    return {f"a{k}": large // small for k, (large, small) in enumerate(itertools.pairwise(ordered))}


def axes_of_tiling(tiling: Tiling, rank: int, mesh: dict[str, int]) -> Sequence[Sequence[str]]:
    """For each dim of an array the axes that shard it, the outermost first."""
    if not tiling:
        return ((),) * rank
    step, covered = math.prod(mesh.values()), {}
    for name, size in mesh.items():
        covered[name] = (step // size, step)
        step //= size
    return tuple(
        tuple(
            name
            for stride in dim
            for name, (low, high) in covered.items()
            if stride.step <= low and high <= stride.step * stride.count
        )
        for dim in tiling
    )
