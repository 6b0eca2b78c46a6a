"""Programs of each device within a program of whole values, as `jax.shard_map` writes them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from mpmd import ir
from mpmd.sharding.shards import Split, text_of


def groups(axes: Sequence[str], sizes: Mapping[str, int]) -> list[list[int]]:
    """The devices of a mesh that differ only along some axes, in order: by their positions in the mesh."""
    found: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    names = list(sizes)
    for position, place in enumerate(itertools.product(*map(range, sizes.values()))):
        rest = tuple(i for name, i in zip(names, place) if name not in axes)
        own = tuple(place[names.index(axis)] for axis in axes)
        found.setdefault(rest, []).append((own, position))
    return [[position for _, position in sorted(group)] for group in found.values()]


def tensor_type(shape: Sequence[int], element: str) -> str:
    return f"tensor<{''.join(f'{size}x' for size in shape)}{element}>"


class LocalValue:
    """A value of one device, to which ops of a program are applied.

    Attributes:
        local: its shape.
        split: how the whole value is split over the devices.
    """

    def __init__(
        self, program: DeviceProgram, name: str, local: list[int], element: str, split: Split
    ) -> None:
        self.program, self.name, self.local, self.element, self.split = program, name, local, element, split

    @property
    def kind(self) -> str:
        return tensor_type(self.local, self.element)

    def reshape(self, shape: Sequence[int]) -> None:
        before, self.local = self.kind, list(shape)
        self.name = self.program.add(f"stablehlo.reshape {self.name} : ({before}) -> {self.kind}")

    def all_reduce(self, axes: Sequence[str]) -> None:
        self._collective("all_reduce", axes, self.kind, "")

    def reduce_scatter(self, axis: str, dim: int) -> None:
        """The part of a device of the sum over those along an axis."""
        before = self.kind
        self.local[dim] //= self.program.sizes[axis]
        self.split = tuple((*of, axis) if d == dim else of for d, of in enumerate(self.split))
        self._collective("reduce_scatter", [axis], before, f", scatter_dimension = {dim} : i64")

    def all_gather(self, axis: str, dim: int) -> None:
        """The parts of the devices along an axis, which splits a dim within all others that do."""
        before = self.kind
        self.local[dim] *= self.program.sizes[axis]
        self.split = tuple(of[:-1] if d == dim else of for d, of in enumerate(self.split))
        self._collective("all_gather", [axis], before, f", all_gather_dim = {dim} : i64", is_sum=False)

    def _collective(
        self, name: str, axes: Sequence[str], before: str, more: str, *, is_sum: bool = True
    ) -> None:
        devices = groups(axes, self.program.sizes)
        scalar = f"tensor<{self.element}>"
        region = (
            f" ({{\n^bb0(%a: {scalar}, %b: {scalar}):\n  %c = stablehlo.add %a, %b : {scalar}\n"
            f"  stablehlo.return %c : {scalar}\n}})"
        )
        self.name = self.program.add(
            f'"stablehlo.{name}"({self.name}) <{{channel_handle = #stablehlo.channel_handle<handle = 1, '
            f"type = 1>, replica_groups = dense<{devices}> : tensor<{len(devices)}x{len(devices[0])}xi64>"
            f"{more}, use_global_device_ids}}>{region if is_sum else ''} : ({before}) -> {self.kind}"
        )


class DeviceProgram:
    """The text of a program of each device, within one of whole values."""

    def __init__(self, sizes: Mapping[str, int], mesh: str) -> None:
        self.sizes, self.mesh = sizes, mesh
        self.lines: list[str] = []
        self.taken: list[tuple[str, str, str]] = []  # whole type, sharding, type of one device
        self.given: list[tuple[str, str, str, str, str]] = []

    def add(self, op: str) -> str:
        name = f"%x{len(self.lines)}"
        self.lines.append(f"{name} = {op}")
        return name

    def take(self, shape: Sequence[int], element: str, split: Split) -> LocalValue:
        local = [n // math.prod(self.sizes[axis] for axis in dim) for n, dim in zip(shape, split)]
        value = LocalValue(self, f"%t{len(self.taken)}", local, element, split)
        self.taken.append((tensor_type(shape, element), text_of(split, self.mesh), value.kind))
        return value

    def give(self, value: LocalValue, shape: Sequence[int], split: Split) -> None:
        """The next result, to be split in a given way: a reshard follows if it is not yet."""
        given, wanted = text_of(value.split, self.mesh), text_of(split, self.mesh)
        self.given.append((value.name, value.kind, tensor_type(shape, value.element), given, wanted))

    def module(self) -> ir.Module:
        known = ", ".join(f'"{axis}"={size}' for axis, size in self.sizes.items())
        manual = ", ".join(f'"{axis}"' for axis in self.sizes)
        parts = [kind for _, kind, *_ in self.given]
        outer, inner, kinds = [], [], [kind for _, _, kind, _, _ in self.given]
        for k, (kind, _, local) in enumerate(self.taken):
            outer.append(f"%a{k}: {kind}")
            inner.append(f"%t{k}: {local}")
        lines = [
            f"sdy.mesh {self.mesh} = <[{known}]>",
            f"func.func public @main({', '.join(outer)}) -> ({', '.join(kinds)}) {{",
            f"%m:{len(kinds)} = sdy.manual_computation({', '.join(f'%a{k}' for k in range(len(outer)))}) "
            f"in_shardings=[{', '.join(s for _, s, _ in self.taken)}] "
            f"out_shardings=[{', '.join(s for _, _, _, s, _ in self.given)}] "
            f"manual_axes={{{manual}}} ({', '.join(inner)}) {{",
            *self.lines,
            f"sdy.return {', '.join(v for v, *_ in self.given)} : {', '.join(parts)}",
            f"}} : ({', '.join(kind for kind, _, _ in self.taken)}) -> ({', '.join(kinds)})",
        ]
        returned = []
        for k, (_, _, kind, given, wanted) in enumerate(self.given):
            returned.append(f"%m#{k}")
            if given != wanted:
                lines.append(f"%o{k} = sdy.sharding_constraint %m#{k} {wanted} : {kind}")
                returned[-1] = f"%o{k}"
        lines += [f"return {', '.join(returned)} : {', '.join(kinds)}", "}"]
        return ir.parse("\n".join(lines))
