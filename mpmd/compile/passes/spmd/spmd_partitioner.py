"""hlo-spmd-partitioner."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from mpmd import jax_compat
from mpmd.compile.hlo import print_module
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import Shape
from mpmd.compile.lowering import lower_for_mesh
from mpmd.compile.lowering.spmd.hlo_shardings import (
    Tiling,
    axes_of_tiling,
    common_mesh,
    parse_sharding,
    parse_shardings,
)
from mpmd.compile.passes.expand.comparisons import TopkDecomposer
from mpmd.compile.passes.hlo_pass import HloPass
from mpmd.compile.passes.simplify.control_flow import CallInliner
from mpmd.errors import CompileError

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
        made = _partitioned(whole)
        made.input_output_alias, made.buffer_donor = module.input_output_alias, module.buffer_donor
        made.replica_count = module.replica_count
        module.become(made)
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

    def constraint(found: re.Match[str]) -> str:
        result, operand, sharding, type_ = found.groups()
        spec = axes_of_tiling(parse_sharding(sharding, devices), len(re.findall(r"\d+x", type_)), mesh)
        dims = ", ".join("{" + ", ".join(f'"{name}"' for name in dim) + "}" for dim in spec)
        return f"{result}sdy.sharding_constraint {operand} <@mesh, [{dims}]> : {type_}"

    axes = ", ".join(f'"{name}"={size}' for name, size in mesh.items())
    plain = _CONSTRAINT.sub(constraint, _LOCATION.sub("", text))
    return re.sub(r"(?m)^(module .*\{)$", rf"\1\n  sdy.mesh @mesh = <[{axes}]>", plain, count=1)
