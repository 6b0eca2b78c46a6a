"""The pipeline from a lowered fragment to a scheduled module: one list, each entry with its reason."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from mpmd.compile.compile_options import CompileOptions
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.passes import pass_groups
from mpmd.compile.passes.expand.float_jitter import FloatJitter
from mpmd.compile.passes.expand.products import DotDecomposer
from mpmd.compile.passes.fusion.attention_stitching import AttentionStitching
from mpmd.compile.passes.fusion.fusion import Fusion
from mpmd.compile.passes.fusion.keep_rounding import KeepRounding
from mpmd.compile.passes.fusion.sort_prefix import SortPrefix
from mpmd.compile.passes.hlo_pass import Fixpoint
from mpmd.compile.passes.layout.layout_normalization import LayoutRemoval
from mpmd.compile.passes.memory.copy_insertion import CopyInsertion
from mpmd.compile.passes.simplify.control_flow import FlattenCallGraph
from mpmd.compile.schedule.memory_schedule import MemorySchedule
from mpmd.cost.device import HOST, Device
from mpmd.support.passes import Pass, with_overrides


def optimization_pipeline(
    devices: int = 1, attention_stitching: str = "auto", jitter: str = "", device: Device = HOST
) -> list[Pass]:
    """The passes before kernels are planned.  All arrays are row-major: kernels read any order.

    Args:
        devices: how many run the program together.
        attention_stitching: the mode of that pass.
        jitter: regular expression on the values that are made a little wrong; empty for none.
        device: what kernels are priced for, and whose limits they keep.
    """
    wrong = [FloatJitter(jitter)] if jitter else []
    return [
        *wrong,  # before anything else: afterwards operations are no longer those that were written
        *preparation(devices),  # each instruction by itself; after it they are kernels
        CopyInsertion(),  # before fusion, so that copies are fused into what computes their value
        KeepRounding(),  # simplification takes its conversions away, kernels hide discrete values
        SortPrefix(device.limits.sort_prefix),  # before fusion, which takes the slices to what reads them
        AttentionStitching(attention_stitching, device),  # before fusion, which takes products one by one
        Fusion(device=device),  # last change of what computes
    ]


def scheduling_pipeline() -> list[Pass]:
    """What runs once kernels are planned and donated parameters have their results."""
    return [MemorySchedule()]  # memory is assigned for one order


def preparation(devices: int = 1, *, unit_dims: bool = True, combined: bool = True) -> list[Pass]:
    """The passes after which kernels can compute each instruction by itself.

    Args:
        devices: how many run the program together.
        unit_dims: whether dims of extent 1 stay.
        combined: whether collectives of several arrays become one.
    """
    together = pass_groups.communication(combined=combined) if devices > 1 else []
    narrowed = [] if unit_dims else pass_groups.without_unit_dims()
    return [
        LayoutRemoval(),  # no later pass need know of layouts
        *pass_groups.inlining(),  # everything later looks at one computation at a time
        *pass_groups.expansion(),  # only operations that kernels have
        *pass_groups.simplification(),  # fewer and simpler ones
        *together,  # constants are folded: values that depend on the device alone are known
        *narrowed,  # before products are decomposed: their dims of 1 are between others
        DotDecomposer(),  # kernels sum over one run of elements
        FlattenCallGraph(),  # buffers are assigned to each loop and branch by itself
    ]


def configured(passes: Sequence[Pass], options: CompileOptions) -> list[Pass]:
    """Passes without the disabled ones, with the options that are set; groups likewise."""
    found: list[Pass] = []
    for pass_ in passes:
        if isinstance(pass_, Fixpoint):
            found.append(dataclasses.replace(pass_, passes=tuple(configured(pass_.passes, options))))
        elif pass_.name not in options.disable_passes:
            found.append(with_overrides(pass_, options.pass_options))
    return found


class Watched(Pass):
    """A pass of a group that runs until nothing changes, and a callback after each change.

    Attributes:
        inner: the pass.
        after: called with the pass and the module.
    """

    inner: Pass
    after: Callable[[Pass, HloModule], None]

    def run(self, module: HloModule) -> bool:
        """Runs the pass."""
        changed = self.inner.run(module)
        if changed:
            self.after(self.inner, module)
        return changed

    def __str__(self) -> str:
        return str(self.inner)


def watched(passes: Sequence[Pass], after: Callable[[str, Pass, HloModule], None]) -> list[Pass]:
    """Passes of which those inside of groups are watched; `after` gets the position of the group, too."""
    found: list[Pass] = []
    for number, pass_ in enumerate(passes):
        if isinstance(pass_, Fixpoint):
            report = functools.partial(after, f"{number:03d}.{pass_.label}")
            inner = tuple(Watched(p, report) for p in pass_.passes)
            pass_ = dataclasses.replace(pass_, passes=inner)
        found.append(pass_)
    return found
