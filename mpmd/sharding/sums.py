"""Programs that only add terms of the devices of a mesh: the sums of partial values.

They are written device by device, as `jax.shard_map` writes them, so that every compiler communicates just
that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from mpmd import ir
from mpmd.sharding.device_program import DeviceProgram, tensor_type
from mpmd.sharding.shards import Split, innermost, split_of, text_of, without


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
