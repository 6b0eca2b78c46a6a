"""The pipeline from a lowered fragment to a scheduled module: one list, each entry with its reason."""

from __future__ import annotations

from mpmd.compile.passes import groups
from mpmd.compile.passes.expand.dot_decomposer import DotDecomposer
from mpmd.compile.passes.fusion.attention_stitching import AttentionStitching
from mpmd.compile.passes.fusion.fusion import Fusion
from mpmd.compile.passes.memory.copy_insertion import CopyInsertion
from mpmd.compile.passes.simplify.flatten_call_graph import FlattenCallGraph
from mpmd.compile.schedule.depth_first import DepthFirstSchedule
from mpmd.support.passes import Pass


def cpu_pipeline(attention_stitching: str = "auto") -> list[Pass]:
    """What runs before memory is assigned, on a CPU.  Layouts stay row-major: kernels read any order.

    Args:
        attention_stitching: the mode of that pass.
    """
    return [
        *groups.inlining(),  # everything later looks at one computation at a time
        *groups.expansion(),  # only operations that kernels have
        *groups.simplification(),  # fewer and simpler ones
        *groups.products(),  # products as the kernels like them
        DotDecomposer(scattered=True),  # kernels sum over one run of elements
        FlattenCallGraph(),  # equal loops and branches were joined; memory is given to each by itself
        CopyInsertion(),  # before fusion, so that copies are fused into what computes their value
        AttentionStitching(attention_stitching),  # before fusion, which takes products one by one
        Fusion(),  # last change of the graph
        DepthFirstSchedule(),  # memory is assigned for one order
    ]
