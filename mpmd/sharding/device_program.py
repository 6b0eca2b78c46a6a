"""Programs of each device within a program of whole values, as `jax.shard_map` writes them.

`sums` writes those that only add terms of the devices of a mesh.  No compiler can then communicate more than
these sums.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from mpmd import ir
from mpmd.sharding.shardings import Split, innermost, split_of, text_of, without


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum that devices take of terms.

    Attributes:
        kind: the type of the result, in partial form if terms along some axes are `kept` apart.
        terms: for each dim of terms, in front of the others, the axes that split it.
        kept: the axes along which the result is partial.
    """

    kind: ir.MeshTensor
    terms: Split
    kept: tuple[str, ...] = ()


def sums(wanted: Sequence[Sum], sizes: Mapping[str, int], mesh: str) -> ir.Module:
    """A module whose `main` takes terms and returns their sums.

    A value that is split along one of the axes of its terms is reduced into its parts.

    Args:
        wanted: the sums.
        sizes: the axes of the mesh and their sizes.
        mesh: how shardings refer to it.
    """
    program = DeviceProgram(sizes, mesh)
    for total in wanted:
        own = 1 if total.kept else 0
        shape = list(total.kind.shape)[own:]
        split = split_of(total.kind.sharding, len(total.kind.shape))[own:]
        along = [axis for dim in total.terms for axis in dim if axis not in total.kept]
        counts = [math.prod(sizes[axis] for axis in dim) for dim in total.terms]
        terms = (*total.terms, *without(split, along))
        value = program.take([*counts, *shape], str(total.kind.element_type), terms)
        value.reshape(value.local[len(counts) :])
        value.split = terms[len(counts) :]
        inner = innermost(split, along)
        rest = [axis for axis in along if axis not in inner]
        for axis, dim in inner.items():
            value.reduce_scatter(axis, dim)
        if rest:  # last, as parts are smaller
            value.all_reduce(rest)
        if total.kept:
            value.reshape([1, *value.local])
            value.split, split = (total.kept, *value.split), (total.kept, *split)
        program.give(value, total.kind.shape, split)
    return program.module()


REDUCES_TERMS = "mpmd.reduces_terms"
"""On the sum over some of several dims of terms: between devices, in a microbatch."""


def partly_reduced(
    value: ir.Value, axes: Sequence[str], kept: Sequence[str], rest: Split, sizes: Mapping[str, int],
    mesh: str, where: ir.InsertionPoint,
) -> ir.Value:  # fmt: skip
    """The partial form along `kept` of a value, from the one along `axes`: a sum over the other axes.

    Args:
        value: the partial form along `axes`.
        axes: along them its terms lie, the outermost first.
        kept: some of them.
        rest: how other dims of the terms are split.
        sizes: the axes of the mesh and their sizes.
        mesh: how shardings refer to it.
        where: place of the ops.
    """
    element, shape = str(value.type.element_type), list(value.type.shape)[1:]
    counts = [sizes[axis] for axis in axes]
    apart = tensor_type([*counts, *shape], element)
    left = tensor_type([*(sizes[axis] for axis in axes if axis in kept), *shape], element)
    total = tensor_type([math.prod(sizes[axis] for axis in kept), *shape], element)
    dims = [k for k, axis in enumerate(axes) if axis not in kept]
    known = ", ".join(f'"{axis}"={size}' for axis, size in sizes.items())
    split = text_of((*((axis,) for axis in axes), *rest), mesh)
    module = ir.parse(
        f"sdy.mesh {mesh} = <[{known}]>\n"
        f"func.func @sum(%x: {value.type}) -> {total} {{\n"
        f"  %zero = stablehlo.constant dense<0.0> : tensor<{element}>\n"
        f"  %terms = stablehlo.reshape %x : ({value.type}) -> {apart}\n"
        f"  %split = sdy.sharding_constraint %terms {split} : {apart}\n"
        f"  %sum = stablehlo.reduce(%split init: %zero) applies stablehlo.add across dimensions = {dims} "
        f"{{{REDUCES_TERMS}}} : ({apart}, tensor<{element}>) -> {left}\n"
        f"  %total = stablehlo.reshape %sum : ({left}) -> {total}\n"
        f"  return %total : {total}\n}}"
    )
    (program,) = ir.funcs(module)
    return ir.clone_body(program.body, {program.args[0]: value}, where)[1][0]


def groups(axes: Sequence[str], sizes: Mapping[str, int]) -> list[list[int]]:
    """The devices of a mesh that differ only along some axes, in order: by their positions in the mesh."""
    by_place: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    names = list(sizes)
    for position, place in enumerate(itertools.product(*map(range, sizes.values()))):
        rest = tuple(i for name, i in zip(names, place) if name not in axes)
        own = tuple(place[names.index(axis)] for axis in axes)
        by_place.setdefault(rest, []).append((own, position))
    return [[position for _, position in sorted(group)] for group in by_place.values()]


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
