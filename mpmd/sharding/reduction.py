"""From the partial form of a value to the value: collectives over the axes along which its terms lie."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from mpmd import ir
from mpmd.sharding.inside import Split, split_of


def without(split: Split, axes: Sequence[str]) -> Split:
    """The same split, along none of the axes."""
    return tuple(tuple(axis for axis in dim if axis not in axes) for dim in split)


def text_of(split: Split, mesh: str) -> str:
    """A split as the sharding of a type."""
    dims = ("{" + ", ".join(f'"{axis}"' for axis in dim) + "}" for dim in split)
    return f"<{mesh}, [{', '.join(dims)}]>"


def sharding_of(split: Split, mesh: str) -> ir.Attribute:
    """A split as an attribute."""
    return ir.Attribute.parse("#sdy.sharding" + text_of(split, mesh), ir.context())


def partial_kind(kind: ir.MeshTensor, axes: Sequence[str], count: int, mesh: str) -> ir.MeshTensor:
    """The type of the partial form of a value: the terms along some axes, on the devices that hold them."""
    shape = [count, *kind.shape]
    inner = without(split_of(kind.sharding, len(kind.shape)), axes)
    tensor = ir.RankedTensorType.get(shape, kind.element_type, loc=ir.Location.unknown(ir.context()))
    return ir.MeshTensor.get(kind.mesh, tensor, sharding_of((tuple(axes), *inner), mesh), kind.memory_kind)


def groups(axes: Sequence[str], sizes: Mapping[str, int]) -> list[list[int]]:
    """The devices of a mesh that differ only along some axes, in order: by their positions in the mesh."""
    found: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    names = list(sizes)
    for position, place in enumerate(itertools.product(*map(range, sizes.values()))):
        rest = tuple(i for name, i in zip(names, place) if name not in axes)
        own = tuple(place[names.index(axis)] for axis in axes)
        found.setdefault(rest, []).append((own, position))
    return [[position for _, position in sorted(group)] for group in found.values()]


def scattered_dims(split: Split, axes: Sequence[str]) -> dict[str, int]:
    """The axes along which a value stays split, and the dims: its terms are reduced into the parts.

    Only innermost axes of a dim: the parts then lie within what a device holds of each term.
    """
    found: dict[str, int] = {}
    for dim, of_dim in enumerate(split):
        inner = list(itertools.takewhile(lambda axis: axis in axes, reversed(of_dim)))
        if set(of_dim) & set(axes) <= set(inner):
            found.update({axis: dim for axis in reversed(inner)})
    return found


def reduction(
    kinds: Sequence[ir.MeshTensor], axes: Sequence[Sequence[str]], sizes: Mapping[str, int], mesh: str
) -> ir.Module:
    """A module whose `main` takes partial forms and returns the values.

    Args:
        kinds: the types of the values.
        axes: for each the axes along which its terms lie.
        sizes: the axes of the mesh and their sizes.
        mesh: how shardings refer to it.
    """
    body, taken, given, inside, results, outs = [], [], [], [], [], []
    for k, (kind, along) in enumerate(zip(kinds, axes)):
        split = split_of(kind.sharding, len(kind.shape))
        element = str(kind.element_type)
        local = [
            size // math.prod(sizes[axis] for axis in dim)
            for size, dim in zip(kind.shape, without(split, along))
        ]
        whole = [math.prod(sizes[axis] for axis in along), *kind.shape]
        taken.append(_tensor(whole, element))
        given.append(text_of((tuple(along), *without(split, along)), mesh))
        inside.append(_tensor([1, *local], element))
        value = f"%v{k}"
        body.append(f"{value} = stablehlo.reshape %t{k} : ({inside[-1]}) -> {_tensor(local, element)}")
        scattered = scattered_dims(split, along)
        rest = [axis for axis in along if axis not in scattered]
        if rest:
            kind_of = _tensor(local, element)
            body.append(_collective(f"%r{k}", value, "all_reduce", kind_of, kind_of, groups(rest, sizes), ""))
            value = f"%r{k}"
        for axis, dim in scattered.items():
            before = _tensor(local, element)
            local[dim] //= sizes[axis]
            extra = f", scatter_dimension = {dim} : i64"
            made = f"%s{k}_{axis}".replace("-", "_")
            made = f"%s{k}_{list(sizes).index(axis)}"
            body.append(
                _collective(
                    made, value, "reduce_scatter", before, _tensor(local, element), groups([axis], sizes), extra
                )
            )
            value = made
        results.append((value, _tensor(local, element)))
        kept = tuple(
            tuple(a for a in dim if a not in along or scattered.get(a) == d) for d, dim in enumerate(split)
        )
        outs.append((text_of(kept, mesh), _tensor(kind.shape, element), kept != split, text_of(split, mesh)))
    known = ", ".join(f'"{axis}"={size}' for axis, size in sizes.items())
    text = _text(body, taken, given, inside, results, outs, sizes)
    return ir.parse(f"sdy.mesh {mesh} = <[{known}]>\n{text}")


def _tensor(shape: Sequence[int], element: str) -> str:
    return f"tensor<{''.join(f'{size}x' for size in shape)}{element}>"


def _collective(
    made: str, value: str, name: str, before: str, after: str, of_devices: list[list[int]], extra: str
) -> str:
    element = before.removesuffix(">").removeprefix("tensor<").rpartition("x")[2]
    rows, columns = len(of_devices), len(of_devices[0])
    return (
        f'{made} = "stablehlo.{name}"({value}) <{{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, '
        f"replica_groups = dense<{of_devices}> : tensor<{rows}x{columns}xi64>{extra}, use_global_device_ids}}> ({{\n"
        f"^bb0(%a: tensor<{element}>, %b: tensor<{element}>):\n"
        f"  %c = stablehlo.add %a, %b : tensor<{element}>\n"
        f"  stablehlo.return %c : tensor<{element}>\n"
        f"}}) : ({before}) -> {after}"
    )


def _text(
    body: Sequence[str],
    taken: Sequence[str],
    given: Sequence[str],
    inside: Sequence[str],
    results: Sequence[tuple[str, str]],
    outs: Sequence[tuple[str, str, bool, str]],
    sizes: Mapping[str, int],
) -> str:
    count = len(taken)
    arguments = ", ".join(f"%arg{k}: {kind}" for k, kind in enumerate(taken))
    wholes = ", ".join(kind for _, kind, _, _ in outs)
    axes = ", ".join(f'"{axis}"' for axis in sizes)
    inner = ", ".join(f"%t{k}: {kind}" for k, kind in enumerate(inside))
    lines = [f"func.func public @main({arguments}) -> ({wholes}) {{"]
    lines.append(
        f"%m:{count} = sdy.manual_computation({', '.join(f'%arg{k}' for k in range(count))}) "
        f"in_shardings=[{', '.join(given)}] out_shardings=[{', '.join(s for s, _, _, _ in outs)}] "
        f"manual_axes={{{axes}}} ({inner}) {{"
    )
    lines += body
    lines.append(f"sdy.return {', '.join(v for v, _ in results)} : {', '.join(kind for _, kind in results)}")
    lines.append(f"}} : ({', '.join(taken)}) -> ({wholes})")
    returned = []
    for k, (_, kind, differs, wanted) in enumerate(outs):
        value = f"%m#{k}"
        if differs:
            lines.append(f"%o{k} = sdy.sharding_constraint {value} {wanted} : {kind}")
            value = f"%o{k}"
        returned.append(value)
    lines.append(f"return {', '.join(returned)} : {wholes}")
    lines.append("}")
    return "\n".join(lines)
