"""The pipeline from a lowered fragment to a scheduled module: one list, each entry with its reason."""

from __future__ import annotations

from mpmd.compile.passes import groups
from mpmd.compile.passes.expand.dot_decomposer import DotDecomposer
from mpmd.compile.passes.fusion.attention_stitching import AttentionStitching
from mpmd.compile.passes.fusion.fusion import Fusion
from mpmd.compile.passes.memory.copy_insertion import CopyInsertion
from mpmd.compile.passes.simplify.flatten_call_graph import FlattenCallGraph
from mpmd.compile.schedule.memory_schedule import MemorySchedule
from mpmd.support.passes import Pass


def cpu_pipeline(devices: int = 1, attention_stitching: str = "auto") -> list[Pass]:
    """What runs before kernels are planned, on a CPU.  Layouts stay row-major: kernels read any order.

    Args:
        devices: how many run the program together.
        attention_stitching: the mode of that pass.
    """
    return [
        *cpu_preparation(devices),  # before this each instruction stands alone, after it they are kernels
        CopyInsertion(),  # before fusion, so that copies are fused into what computes their value
        AttentionStitching(attention_stitching),  # before fusion, which takes products one by one
        Fusion(),  # last change of the graph
    ]


def scheduling_pipeline() -> list[Pass]:
    """What runs once kernels are planned and donated parameters have their results."""
    return [
        MemorySchedule(),  # memory is assigned for one order
    ]


def cpu_preparation(devices: int = 1) -> list[Pass]:
    """What makes of any program one of instructions that kernels can compute, each by itself.

    Args:
        devices: how many run the program together.
    """
    together = groups.communication() if devices > 1 else []
    return [
        *groups.inlining(),  # everything later looks at one computation at a time
        *groups.expansion(),  # only operations that kernels have
        *groups.simplification(),  # fewer and simpler ones
        *together,  # constants are folded: what depends on the device alone can be told
        *groups.products(),  # products as the kernels like them
        DotDecomposer(scattered=True),  # kernels sum over one run of elements
        FlattenCallGraph(),  # equal loops and branches were joined; memory is given to each by itself
    ]
