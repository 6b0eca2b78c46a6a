"""The passes of GPUs before kernels are planned: one list, each entry with its reason."""

from __future__ import annotations

from mpmd.compile.kernels.cost.device import Device
from mpmd.compile.options import CompileOptions
from mpmd.compile.passes.expand.dot_padding import DotPadding
from mpmd.compile.passes.expand.float_jitter import FloatJitter
from mpmd.compile.passes.expand.indexing import ScatterWidener
from mpmd.compile.passes.expand.products import DotAlgorithmRewriter
from mpmd.compile.passes.fusion.attention_stitching import AttentionStitching
from mpmd.compile.passes.fusion.fusion import Fusion
from mpmd.compile.passes.fusion.keep_rounding import KeepRounding
from mpmd.compile.passes.fusion.sort_prefix import SortPrefix
from mpmd.compile.passes.memory.copy_insertion import CopyInsertion
from mpmd.compile.passes.simplify.one_per_row_rewriter import OnePerRowRewriter
from mpmd.compile.passes.simplify.redundancy import Cse, Dce
from mpmd.compile.pipelines import preparation
from mpmd.support.passes import Pass


def gpu_pipeline(devices: int, options: CompileOptions, device: Device) -> list[Pass]:
    """The passes.  All arrays are row-major: kernels and products read any order.

    Args:
        devices: how many run the program together.
        options: the compile options.
        device: what kernels are priced for, and whose limits they keep.
    """
    wrong = [FloatJitter(options.float_jitter)] if options.float_jitter else []
    return [
        *wrong,  # before anything else: afterwards operations are no longer those that were written
        *preparation(devices, unit_dims=False),  # each instruction by itself; after it they are kernels
        DotAlgorithmRewriter(),  # before attention and products are planned, by the types of their factors
        OnePerRowRewriter(),  # after gathers have one form: the rows of a loss need not be arrays then
        ScatterWidener(),  # after that has taken the scatters of labels
        DotPadding(device),  # after the rows of a loss are elementwise: they become longer with the product
        Cse(),  # the loss and its gradient compare with the same labels
        Dce(),  # what only made indices
        CopyInsertion(),  # before fusion, so that copies are fused into what computes their value
        KeepRounding(),  # simplification takes its conversions away, kernels hide discrete values
        SortPrefix(device.limits.sort_prefix),  # before fusion, which takes the slices to what reads them
        AttentionStitching(options.attention_stitching, device),  # before products are taken one by one
        Fusion(device=device, narrow_products=True),  # last change of what computes
    ]
