"""HLO with shardings in its own notation, as XLA dumps it, to the program of one device.

    {devices=[2,1,4]<=[8] last_tile_dim_replicate}    dim 0 in two parts, each on four devices

HLO refers to device numbers, Shardy to axes of a mesh.  Along each dim the device number grows by strides;
the strides of all shardings of a program, put in order, are those of the axes of one mesh.  With it Shardy
partitions the program as it does fragments.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mpmd import jax_compat
from mpmd.compile.hlo import print_module
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import Shape
from mpmd.compile.hlo.text import blank_comments, integers, split_top
from mpmd.compile.lowering import lower_for_mesh
from mpmd.compile.passes.expand.bit_patterns import TopkDecomposer
from mpmd.compile.passes.hlo_pass import HloPass
from mpmd.compile.passes.simplify.control_flow import CallInliner
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
    match = _TILED.match(body)
    if match is None:
        raise CompileError(f"the partitioner takes tiled and replicated values, not sharding={text}")
    tiles, ids = integers(match[1]), _device_ids(match)
    if sorted(ids.reshape(-1).tolist()) != list(range(devices)) or ids.size != math.prod(tiles):
        raise CompileError(f"sharding={text} is not over the {devices} devices of the program")
    rest = body[match.end() :]
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


def _device_ids(match: re.Match[str]) -> np.ndarray:
    if match[3] is None:
        return np.array(integers(match[2]))
    dims = integers(match[3])
    order = integers(match[4]) if match[4] else tuple(range(len(dims)))
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
    strides: list[Stride] = []
    done = 1
    while done < len(numbers):
        step, count = numbers[done], 1
        while count * done < len(numbers) and numbers[count * done] == count * step:
            count += 1
        strides.append(Stride(step, count))
        done *= count
    rebuilt = [0]
    for stride in strides:
        rebuilt = [i * stride.step + r for i in range(stride.count) for r in rebuilt]
    if rebuilt != numbers or any(s.step <= 0 for s in strides):
        raise CompileError(f"sharding={text} is not a tiling of a mesh of devices")
    return tuple(reversed(strides))


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


_MARKS = frozenset({"xla.sdy.FuncResultSharding", "xla.sdy.PropagationBarrier"})
_SHAPES = frozenset({"SPMDFullToShardShape", "SPMDShardToFullShape"})
_CONSTRAINT = re.compile(
    r"(?m)^( *%\S+ = )stablehlo\.custom_call @Sharding\((%\S+)\) \{.*mhlo\.sharding = \"(\{[^\"]*\})\".*\}"
    r" : \(.*\) -> (tensor<(?:\d+x)*\w+(?:<\w+>)?>)"
)
_LOCATION = re.compile(r" loc\((?:#loc\d*|\"[^\"]*\"|unknown)\)|^#loc.*\n", re.M)


class SpmdPartitioner(HloPass):
    """Partitions a program with whole arrays and shardings into one device's program.

    p = f32[8,4] parameter(0), sharding={devices=[2,1]<=[2]}
        ->  p = f32[4,4] parameter(0), and an all-reduce where a contraction was sharded

    Shardings are at parameters, at the root, and in custom calls to `Sharding`; Shardy's propagation finds
    the others.  Parameters and results without one are whole on every device.

    Requires: no schedule; the mesh of all shardings is one.
    Ensures: shapes are one device's, communication is collectives; calls are inlined.
    Error: a sharding that is neither tiled nor replicated, shapes of single devices within the program.
    Cost: linear, and Shardy's.
    Source: Shardy for propagation and reshards; the step to one device is shared with fragments.
    """

    def rewrite(self, module: HloModule) -> bool:
        """Rewrites `module`; True iff that changed it."""
        if module.num_partitions == 1:
            return False
        whole = module.clone()
        CallInliner().run(whole)
        TopkDecomposer().run(whole)  # Shardy supports sorts
        _drop_marks(whole)
        partitioned = _partitioned(whole)
        partitioned.input_output_alias, partitioned.buffer_donor = (
            module.input_output_alias,
            module.buffer_donor,
        )
        partitioned.replica_count = module.replica_count
        module.become(partitioned)
        return True


def _drop_marks(module: HloModule) -> None:
    """Markers whose shardings are also at the root are removed; so is the metadata of the source.

    Raises:
        CompileError: the program has shapes of single devices inside.
    """
    module.tables = ""
    for instruction in list(module.instructions()):
        instruction.metadata = ""
        if instruction.opcode != "custom-call":
            continue
        if instruction.custom_call_target in _SHAPES:
            raise CompileError(
                f"{instruction.name} changes to shapes of single devices: {instruction.custom_call_target}"
            )
        if instruction.custom_call_target in _MARKS:
            instruction.parent.replace(instruction, instruction.operands[0])


def _partitioned(module: HloModule) -> HloModule:
    devices, root = module.num_partitions, module.entry.root
    parameters = module.entry.parameters
    results = [shape for _, shape in root.shape.leaves()]
    given = [parse_sharding(p.sharding, devices) for p in parameters]
    taken = parse_shardings(root.sharding, len(results), devices)
    for k, (parameter, tiling) in enumerate(zip(parameters, given)):
        _check_even(f"parameter {k}", parameter.shape, tiling)
    for k, (shape, tiling) in enumerate(zip(results, taken)):
        _check_even(f"result {k}", shape, tiling)
    inner = [parse_sharding(c.sharding, devices) for c in module.instructions() if _is_constraint(c)]
    mesh = common_mesh([*given, *taken, *inner], devices)

    def specs(tilings: Sequence[Tiling], ranks: Sequence[int]) -> list[Sequence[Sequence[str]]]:
        return [axes_of_tiling(t, rank, mesh) for t, rank in zip(tilings, ranks, strict=True)]

    text = jax_compat.hlo_to_stablehlo(print_module(module))
    if text is None:
        raise CompileError("this jaxlib does not translate HLO into StableHLO")
    return lower_for_mesh(
        _with_constraints(text, mesh, devices),
        mesh,
        specs(given, [p.shape.rank for p in parameters]),
        specs(taken, [shape.rank for shape in results]),
    )


def _check_even(what: str, shape: Shape, tiling: Tiling) -> None:
    """The equal part of an array that a device takes or returns.

    Raises:
        CompileError: the array does not divide.
    """
    if not shape.is_array:
        raise CompileError(f"the partitioner takes arrays, but {what} is {shape}")
    parts = [math.prod(stride.count for stride in dim) for dim in tiling]
    if tiling and len(tiling) != shape.rank:
        raise CompileError(f"the sharding of {what} has {len(tiling)} dims, its shape is {shape}")
    for d, (size, count) in enumerate(zip(shape.dims, parts)):
        if size % count:
            raise CompileError(f"dim {d} of {what}, {shape}, does not divide into {count} equal parts")


def _is_constraint(instruction: HloInstruction) -> bool:
    return instruction.opcode == "custom-call" and instruction.custom_call_target == "Sharding"


def _with_constraints(text: str, mesh: dict[str, int], devices: int) -> str:
    """StableHLO whose calls to `Sharding` are constraints of Shardy, on a mesh of that name."""

    def constraint(match: re.Match[str]) -> str:
        result, operand, sharding, type_ = match.groups()
        spec = axes_of_tiling(parse_sharding(sharding, devices), len(re.findall(r"\d+x", type_)), mesh)
        dims = ", ".join("{" + ", ".join(f'"{name}"' for name in dim) + "}" for dim in spec)
        return f"{result}sdy.sharding_constraint {operand} <@mesh, [{dims}]> : {type_}"

    axes = ", ".join(f'"{name}"={size}' for name, size in mesh.items())
    plain = _CONSTRAINT.sub(constraint, _LOCATION.sub("", text))
    return re.sub(r"(?m)^(module .*\{)$", rf"\1\n  sdy.mesh @mesh = <[{axes}]>", plain, count=1)
