"""A fragment from StableHLO to code: the phases, in order, the same for every target.

    lowering ── passes ── kernels ── schedule ── buffers ── thunks ── check ── steps ── code

Each phase ends in a value that prints.  The driver asks a `Target` for everything that differs between
devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mpmd.compile.analysis.call_graph import CallGraph
from mpmd.compile.artefact import Artefact, KeptArtefacts
from mpmd.compile.buffers.assignment import BufferAssignment, assign_buffers
from mpmd.compile.buffers.fitting import fit
from mpmd.compile.buffers.sharing import pair_donations
from mpmd.compile.compilation import PhaseClock, Prepared
from mpmd.compile.compile_options import DEFAULTS, CompileOptions
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import HloModule
from mpmd.compile.hlo.flat_parameters import flatten_parameters
from mpmd.compile.kernels.planner.plan_cache import caching_plans
from mpmd.compile.lowering import lower, lower_for_mesh
from mpmd.compile.pipelines import configured
from mpmd.compile.target import Target
from mpmd.compile.thunks.check import check_program
from mpmd.compile.thunks.emission import Emitter, KernelPlans
from mpmd.compile.watch import dumping_inside, watch_of
from mpmd.support import diagnostics
from mpmd.support.passes import Timing, run_pipeline
from mpmd.support.resources import garbage_kept


@garbage_kept()
@caching_plans()
def prepare_fragment(
    fragment: FragmentModule,
    target: Target,
    options: CompileOptions = DEFAULTS,
    module: HloModule | None = None,
    *,
    axes: Mapping[str, int] | None = None,
) -> Prepared:
    """From StableHLO to steps with addresses: everything but code, which `Prepared.compiled` generates.

    Args:
        fragment: what to compile.
        target: the target.
        options: the compile options.
        module: the lowered fragment, if there is one; the passes change it.
        axes: the axes of its mesh and their sizes; None for one device.

    Raises:
        CompileError: the target has no code for something in it.
        MiscompiledError: its memory is wrong; every program is checked.
    """
    seconds: dict[str, float] = {}
    clock, devices = PhaseClock(seconds), device_count(axes)
    module = module or lowered(fragment, axes)
    module.is_scheduled = False  # an order was given: one of those that are allowed
    module.source = None  # passes change it
    flatten_parameters(module)
    clock("lowering")

    timing = Timing()
    passes = configured(target.passes(devices, options), options)
    watch = watch_of(fragment, module, options.dump)
    with diagnostics.collecting() as found:
        run_pipeline(module, dumping_inside(passes, fragment, options.dump), watch, timing)
    clock("passes")

    plans = KernelPlans(target.refuses, stores_last=target.device.limits.stores_last)
    plans.plan_all(CallGraph(module).sequential())
    clock("kernels")

    module.input_output_alias = pair_donations(module, fragment.donated, plans.may_share)
    order = configured(target.schedule(devices), options)
    run_pipeline(module, order, watch, timing, first=len(passes))
    for name, spent in timing.seconds:
        seconds[name] = seconds.get(name, 0.0) + spent
    clock("schedule")

    def assign() -> BufferAssignment:
        plans.plan_all(CallGraph(module).sequential())
        return assign_buffers(
            module, plans.may_share, lambda i: target.scratch_bytes(plans.planned(i)), target.memory
        )

    memory = options.memory_bytes
    assignment = fit(module, fragment, memory, assign) if memory else assign()
    clock("buffers")

    thunks = Emitter(assignment, plans).program()
    clock("thunks")

    check_program(fragment, module, thunks, assignment, stores_last=target.device.limits.stores_last)
    clock("check")

    program = target.program(f"f{fragment.fingerprint[:16]}", thunks, assignment)
    clock("steps")
    notices = tuple(d.message for d in found)
    return Prepared(fragment, target, options, module, assignment, thunks, program, seconds, notices)


def compiled_or_kept(
    fragment: FragmentModule,
    target: Target,
    options: CompileOptions,
    module: HloModule | None = None,
    axes: Mapping[str, int] | None = None,
) -> tuple[Artefact, bool]:
    """A fragment compiled, or taken from the cache; and whether it was cached.

    The cache is not used with a dump, which is of a compilation, nor where kernels may come from files.

    Args:
        fragment: what to compile.
        target: the target.
        options: the compile options.
        module: the fragment as HLO, if its text is not StableHLO; the passes change it.
        axes: the axes of its mesh and their sizes; None for one device.

    Raises:
        CompileError: the target has no code for something in it.
    """
    if options.cache is None or options.dump is not None or options.kernel_overrides is not None:
        return prepare_fragment(fragment, target, options, module, axes=axes).compiled().artefact(), False
    reserved = f" {fragment.reserved_bytes}" if options.memory_bytes else ""
    devices = f" {tuple(axes.items())}" if axes is not None and device_count(axes) > 1 else ""
    kept = KeptArtefacts(options.cache, target, options.key + reserved + devices)
    found = kept.of_fragment(fragment)
    if found is not None:
        return found, True
    module = module or lowered(fragment, axes)
    program = kept.program_key(fragment, module)
    found = kept.of_program(fragment, program)
    if found is not None:
        return found, True
    made = prepare_fragment(fragment, target, options, module, axes=axes).compiled().artefact()
    kept.keep(fragment, program, made)
    return made, False


def lowered(fragment: FragmentModule, axes: Mapping[str, int] | None = None) -> HloModule:
    """The fragment as HLO: that of each device, if its mesh has several.

    Raises:
        CompileError: something in it has no HLO, or cannot be partitioned.
    """
    if axes is None or device_count(axes) == 1:
        return lower(fragment.text)
    arguments, results = ([v.spec for v in values] for values in (fragment.arguments, fragment.results))
    return lower_for_mesh(fragment.text, axes, arguments, results)


def device_count(axes: Mapping[str, int] | None) -> int:
    return math.prod((axes or {}).values())
