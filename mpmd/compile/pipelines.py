"""The pipeline from a lowered fragment to a scheduled module: lists, each entry with its reason.

First the named groups of passes, then the pipelines of them and of the passes between and after them (fusion,
scheduling, buffers), then the actions around each pass: dumps, if requested, and checks.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence

from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import HloModule, print_module, verify
from mpmd.compile.options import CompileOptions, Dump
from mpmd.compile.passes import collectives, expand, layout, simplify
from mpmd.compile.passes.expand.float_jitter import FloatJitter
from mpmd.compile.passes.expand.products import DotDecomposer
from mpmd.compile.passes.fusion.attention_stitching import AttentionStitching
from mpmd.compile.passes.fusion.fusion import Fusion
from mpmd.compile.passes.fusion.keep_rounding import KeepRounding
from mpmd.compile.passes.fusion.sort_prefix import SortPrefix
from mpmd.compile.passes.hlo_pass import Fixpoint
from mpmd.compile.passes.layout.copy_insertion import CopyInsertion
from mpmd.compile.passes.layout.layout_normalization import LayoutRemoval
from mpmd.compile.passes.simplify.control_flow import FlattenCallGraph
from mpmd.compile.schedule.memory_schedule import MemorySchedule
from mpmd.cost.device import HOST, Device
from mpmd.support.passes import Pass, Watch, with_overrides


def inlining() -> list[Pass]:
    """One body per loop and branch, no calls, nothing dead."""
    return [
        expand.AsyncExpander(),  # it makes calls
        simplify.CallInliner(),  # before all that follows: calls hide what all others look for
        simplify.FlattenCallGraph(),  # loops and branches may be changed one by one
        simplify.TupleSimplifier(),  # calls returned tuples
        simplify.ZeroSizedRemoval(),  # no later pass need think of empty arrays
        simplify.Dce(),
    ]


def expansion() -> list[Pass]:
    """Operations that no later pass need know, as others; products and indexed accesses in one form."""
    return [
        expand.NarrowTypeExpander(),  # first: later expanders emit only types that kernels support
        expand.BatchNormExpander(),  # it makes reductions and elementwise work
        expand.RngBitGeneratorExpander(),
        expand.StochasticConvertExpander(),
        expand.BitcastConvertExpander(),
        expand.TopkDecomposer(),
        expand.ComparisonExpander(),  # after topk, which compares in total order
        expand.SelectAndScatterExpander(),  # may make maps
        expand.MapInliner(),
        expand.ComplexToPairs(),  # after it: maps of complex numbers; before reductions, which take pairs
        expand.SpecialFunctionExpander(),  # after complex numbers, whose functions need them
        expand.ReducePrecisionExpander(),
        expand.ArgmaxRewriter(),
        expand.ReductionExpander(),  # after it: other reductions of several arrays, and by no plain operation
        expand.ReduceWindowRewriter(),
        expand.ReduceWindowExpander(),  # after it: other windows, likewise
        expand.ConvolutionToDot(),
        expand.GatherSimplifier(),  # one form; batching dims go
        expand.ScatterSimplifier(),
        simplify.ZeroSizedRemoval(),  # expanded operations may have had none
    ]


def simplification() -> list[Pass]:
    """Simplification to a fixed point."""
    return [
        Fixpoint(
            "simplification",
            (
                simplify.AlgebraicSimplifier(),  # opens all others
                simplify.ConstantFolding(),  # feeds the simplifier
                simplify.SortSimplifier(),
                simplify.ConditionalSimplifier(),  # after folding: selectors may have become constant
                simplify.WhileSimplifier(),  # likewise for trip counts and initial states
                simplify.WhileInvariantCodeMotion(),  # after it: constants and unchanged elements are known
                simplify.WhileLoopUnroller(),  # the remaining state is known now
                simplify.Cse(),  # duplicates would be simplified twice
                simplify.Dce(),  # last: removes leftovers of the others
            ),
        )
    ]


def without_unit_dims() -> list[Pass]:
    """No dims of extent 1: attention of one query head per group has them, and is found without."""
    return [
        simplify.UnitDimRemoval(),
        Fixpoint(
            "after-unit-dims",
            (simplify.AlgebraicSimplifier(), simplify.Cse(), simplify.Dce()),  # its reshapes cancel
        ),
    ]


def communication(*, combined: bool = True) -> list[Pass]:
    """Less communication, and if `combined` in fewer and larger pieces."""
    pieces = [
        collectives.AllReduceCombiner(),
        collectives.AllGatherCombiner(),
        collectives.ReduceScatterCombiner(),
    ]
    return [
        collectives.AllReduceMover(),  # before all that look for neighbours of sums
        collectives.AllReduceReassociate(),
        collectives.ReduceScatterCreator(),  # before combiners, whose results have several users
        *(pieces if combined else []),  # last: the others know collectives of one array
        simplify.Dce(),
    ]


def layouts() -> list[Pass]:
    """Layouts, and their description by row-major arrays."""
    return [
        layout.BroadcastCanonicalizer(),  # before layouts: it makes transposes
        layout.LayoutAssignment(),
        layout.ReshapeDecomposer(),  # what moves data becomes copies, the rest bitcasts
        layout.LayoutNormalization(),  # copies become transposes
        Fixpoint(
            "after-layouts",
            (
                simplify.AlgebraicSimplifier(layout_sensitive=True),  # bitcasts cancel
                layout.ReshapeDecomposer(),  # of what it made
                simplify.Cse(),
                simplify.Dce(),
            ),
        ),
    ]


GROUPS: dict[str, Callable[[], list[Pass]]] = {
    "hlo-inlining": inlining,
    "hlo-expansion": expansion,
    "hlo-simplification": simplification,
    "hlo-communication": communication,
    "hlo-layouts": layouts,
}
"""By the name under which `mpmd-hlo-opt` runs them."""


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
    together = communication(combined=combined) if devices > 1 else []
    narrowed = [] if unit_dims else without_unit_dims()
    return [
        LayoutRemoval(),  # no later pass need know of layouts
        *inlining(),  # everything later looks at one computation at a time
        *expansion(),  # only operations that kernels have
        *simplification(),  # fewer and simpler ones
        *together,  # constants are folded: values that depend on the device alone are known
        *narrowed,  # before products are decomposed: their dims of 1 are between others
        DotDecomposer(),  # kernels sum over one run of elements
        FlattenCallGraph(),  # buffers are assigned to each loop and branch by itself
    ]


def configured(passes: Sequence[Pass], options: CompileOptions) -> list[Pass]:
    """Passes without the disabled ones, with the options that are set; groups likewise."""
    chosen: list[Pass] = []
    for pass_ in passes:
        if isinstance(pass_, Fixpoint):
            chosen.append(dataclasses.replace(pass_, passes=tuple(configured(pass_.passes, options))))
        elif pass_.name not in options.disable_passes:
            chosen.append(with_overrides(pass_, options.pass_options))
    return chosen


class Watched(Pass):
    """A pass of a group that runs until nothing changes, and a callback after each change.

    Attributes:
        inner: the pass.
        after: called with the pass and the module.
    """

    inner: Pass
    after: Callable[[Pass, HloModule], None]

    def run(self, module: HloModule) -> bool:
        changed = self.inner.run(module)
        if changed:
            self.after(self.inner, module)
        return changed

    def __str__(self) -> str:
        return str(self.inner)


def watched(passes: Sequence[Pass], after: Callable[[str, Pass, HloModule], None]) -> list[Pass]:
    """Passes, watched where they are inside a group; `after` gets the position of the group, too."""
    wrapped: list[Pass] = []
    for number, pass_ in enumerate(passes):
        if isinstance(pass_, Fixpoint):
            report = functools.partial(after, f"{number:03d}.{pass_.label}")
            inner = tuple(Watched(p, report) for p in pass_.passes)
            pass_ = dataclasses.replace(pass_, passes=inner)
        wrapped.append(pass_)
    return wrapped


def watch_of(fragment: FragmentModule, module: HloModule, dump: Dump | None) -> Watch:
    """The watch of a pipeline over a fragment; with a dump, writes the current module.

    Passes are verified in tests and with a dump, not in every compilation.
    """
    if dump is None:
        return Watch(verify=_unchecked, text=print_module)
    dump.write(fragment, "before_optimizations.txt", print_module(module))
    return Watch(
        verify=verify,
        text=print_module,
        dump_to=dump.folder_of(fragment),
        dump_passes=dump.passes,
        suffix=".txt",
    )


def dumping_inside(passes: Sequence[Pass], fragment: FragmentModule, dump: Dump | None) -> list[Pass]:
    """Passes; each inside a group writes the module, too: `027.simplification.003.hlo-cse`."""
    return list(passes) if dump is None else watched(passes, _inner_dump(fragment, dump))


def _inner_dump(fragment: FragmentModule, dump: Dump) -> Callable[[str, Pass, HloModule], None]:
    """Writes the module after each pass of a group that changed it."""
    turns: dict[str, int] = {}

    def after(group: str, pass_: Pass, module: HloModule) -> None:
        turns[group] = turns.get(group, -1) + 1
        if re.search(dump.passes, pass_.name):
            dump.write(fragment, f"{group}.{turns[group]:03d}.{pass_.name}.txt", print_module(module))

    return after


def _unchecked(module: HloModule) -> None:
    pass
