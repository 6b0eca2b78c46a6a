"""A fragment from StableHLO to machine code: the phases, in order, with their dumps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Mapping

from mpmd.compile.analysis.call_graph import CallGraph
from mpmd.compile.analysis.cost import CostModel
from mpmd.compile.backends.native_cpu.artefact import Artefact, KeptArtefacts, Texts
from mpmd.compile.backends.native_cpu.compiled_program import CompiledProgram
from mpmd.compile.backends.native_cpu.fitting import fit
from mpmd.compile.backends.native_cpu.handler import compile_with_handler
from mpmd.compile.backends.native_cpu.llvm.engine import assembly_of
from mpmd.compile.backends.native_cpu.miscompiled import check_program
from mpmd.compile.backends.native_cpu.overrides import overrides_of
from mpmd.compile.backends.native_cpu.steps import NativeProgram, PlanCode, native_program
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.backends.native_cpu.tuning import tuning_for
from mpmd.compile.buffers.assignment import BufferAssignment, assign_buffers
from mpmd.compile.buffers.donation import pair_donations
from mpmd.compile.buffers.plot import memory_plot
from mpmd.compile.buffers.report import assignment_report
from mpmd.compile.dump import Dump
from mpmd.compile.executable import MemoryStats
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import HloModule, print_module, verify
from mpmd.compile.kernels.planning.plan_cache import caching_plans
from mpmd.compile.lowering import lower, lower_for_mesh
from mpmd.compile.options import DEFAULTS, CompileOptions
from mpmd.compile.passes.fusion.prices import MEASURED, PROJECTED
from mpmd.compile.pipelines import configured, cpu_pipeline, scheduling_pipeline, watched
from mpmd.compile.thunks.cost_plot import cost_plot
from mpmd.compile.thunks.costs import FragmentCosts, fragment_costs
from mpmd.compile.thunks.emission import Emitter, KernelPlans
from mpmd.compile.thunks.thunk import Thunk, kernels_text, listing
from mpmd.support import diagnostics
from mpmd.support.garbage import garbage_kept
from mpmd.support.passes import Pass
from mpmd.support.pipeline import Timing, Watch, run_pipeline


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A fragment in order and with memory, before there is machine code.

    Attributes:
        fragment: what it was.
        target: for which CPU.
        options: what the user said about compiling.
        module: the optimised, scheduled HLO.
        assignment: its memory.
        thunks: its work.
        native: its steps.
        seconds: per phase.
        notices: what the passes had to say.
    """

    fragment: FragmentModule
    target: CpuTarget
    options: CompileOptions
    module: HloModule
    assignment: BufferAssignment
    thunks: tuple[Thunk, ...]
    native: NativeProgram
    seconds: dict[str, float]
    notices: tuple[str, ...]

    def compiled(self) -> Compilation:
        """With machine code; writes the dump."""
        clock = _Clock(self.seconds)
        code = compile_with_handler(
            self.native.program,
            self.target,
            arguments=len(self.fragment.arguments),
            results=len(self.fragment.results),
            arena=True,
            overrides=overrides_of(self.fragment, self.options.kernel_overrides),
        )
        clock("code")
        made = Compilation(**vars(self), code=code)
        if self.options.dump is not None:
            texts = {**made.texts(), "module.ll": code.llvm, "module.s": assembly_of(code.llvm, self.target)}
            texts["notices.txt"] = "".join(f"{notice}\n" for notice in self.notices)
            self.options.dump.write_all(self.fragment, texts)
        return made


@dataclasses.dataclass(frozen=True)
class Compilation(Prepared):
    """Everything that compiling a fragment made, before it is loaded.

    Attributes:
        code: its machine code.
    """

    code: CompiledProgram

    @property
    def aliases(self) -> dict[int, int]:
        """Argument → the result that takes its memory, if it has any."""
        found = self.module.input_output_alias
        parameters = self.module.entry.parameters
        return {
            a.parameter: a.output_index[0] if a.output_index else 0
            for a in found
            if parameters[a.parameter].shape.size
        }

    @functools.cached_property
    def costs(self) -> dict[str, float]:
        """Our own count of the work."""
        cost = CostModel().module(self.module)
        return {
            "flops": float(cost.flops),
            "transcendentals": float(cost.transcendentals),
            "bytes accessed": float(cost.bytes_read + cost.bytes_written),
            **self.kernel_costs.totals(),
        }

    @functools.cached_property
    def kernel_costs(self) -> FragmentCosts:
        """What each kernel costs by the models."""
        return fragment_costs(self.thunks, self.module)

    @property
    def memory(self) -> MemoryStats:
        """From the assignment of memory."""
        allocations = self.assignment.allocations
        sizes = {kind: sum(a.size for a in allocations if a.kind == kind) for kind in ("parameter", "result")}
        aliased = sum(allocations[d].size for d in self.aliases)
        temporaries = self.assignment.arena_bytes
        return MemoryStats(sizes["parameter"], sizes["result"], aliased, temporaries, len(self.code.code))

    def texts(self) -> dict[str, str]:
        """File name → text of everything that can be read, by the names of XLA's dumps."""
        return {
            "after_optimizations.txt": print_module(self.module),
            "buffer-assignment.txt": assignment_report(self.assignment),
            "memory.svg": memory_plot(self.assignment),
            "thunk_sequence.txt": listing(self.thunks) + "\n",
            "kernels.txt": kernels_text(self.thunks),
            "costs.txt": self.kernel_costs.text(),
            "costs.svg": cost_plot(self.kernel_costs),
        }

    def artefact(self) -> Artefact:
        """What outlives this process."""
        return Artefact(
            self.code,
            self.native.arena_bytes,
            self.native.constants,
            self.aliases,
            self.costs,
            self.memory,
            Texts(self.texts),
        )


@garbage_kept()
@caching_plans()
def prepare_fragment(
    fragment: FragmentModule,
    target: CpuTarget,
    options: CompileOptions = DEFAULTS,
    module: HloModule | None = None,
    *,
    axes: Mapping[str, int] | None = None,
    poison: bool = False,
) -> Prepared:
    """From StableHLO to steps with addresses: everything but machine code, which `compiled` makes.

    Args:
        fragment: what to compile.
        target: for which CPU.
        options: what the user says about compiling.
        module: the fragment lowered, if that was done; the passes change it.
        axes: the axes of its mesh and their sizes; None for one device.
        poison: overwrite memory as soon as it is free, so that wrong reads show.

    Raises:
        CompileError: something in it has no native code.
        MiscompiledError: its memory is wrong; every program is checked.
    """
    seconds: dict[str, float] = {}
    clock = _Clock(seconds)
    module = module or lowered(fragment, axes)
    module.is_scheduled = False  # an order was given: one of those that may be
    clock("lowering")
    timing = Timing()
    tuning = tuning_for(target, options)
    passes = _passes(fragment, options, _count(axes), PROJECTED if tuning is None else MEASURED)
    watch = _watch(fragment, module, options.dump)
    asked = tuning.measuring() if tuning is not None else contextlib.nullcontext()
    with diagnostics.collecting() as found, asked:
        run_pipeline(module, passes, watch, timing)
    clock("passes")
    plans = KernelPlans()
    plans.plan_all(CallGraph(module).sequential())
    clock("kernels")
    module.input_output_alias = pair_donations(module, fragment.donated, plans.may_share)
    order = configured(scheduling_pipeline(_count(axes)), options)
    run_pipeline(module, order, watch, timing, first=len(passes))
    for name, spent in timing.seconds:
        seconds[name] = seconds.get(name, 0.0) + spent
    clock("schedule")
    code = PlanCode(target, tuning)

    def assign() -> BufferAssignment:
        plans.plan_all(CallGraph(module).sequential())
        return assign_buffers(module, plans.may_share, lambda i: code.scratch_bytes(plans.plan_of(i)))

    memory = options.memory_bytes
    assignment = fit(module, fragment, memory, assign) if memory else assign()
    clock("buffers")
    thunks = Emitter(assignment, plans, poison=poison).program()
    clock("thunks")
    check_program(fragment, module, thunks, assignment)
    clock("check")
    native = native_program(f"f{fragment.fingerprint[:16]}", thunks, assignment, code)
    clock("steps")
    notices = tuple(d.message for d in found)
    return Prepared(fragment, target, options, module, assignment, thunks, native, seconds, notices)


def compiled_or_kept(
    fragment: FragmentModule,
    target: CpuTarget,
    options: CompileOptions,
    module: HloModule | None = None,
    axes: Mapping[str, int] | None = None,
) -> tuple[Artefact, bool]:
    """What a fragment becomes: from the cache if it has it, and whether it is from there.

    A dump is of a compilation, so that where one is asked for the cache is not; nor where kernels may come
    from files.

    Args:
        fragment: what to compile.
        target: for which CPU.
        options: what the user says about compiling.
        module: the fragment as HLO, if its text is no StableHLO; the passes change it.
        axes: the axes of its mesh and their sizes; None for one device.

    Raises:
        CompileError: something in it has no native code.
    """
    if options.cache is None or options.dump is not None or options.kernel_overrides is not None:
        return prepare_fragment(fragment, target, options, module, axes=axes).compiled().artefact(), False
    reserved = f" {fragment.reserved_bytes}" if options.memory_bytes else ""
    devices = f" {tuple(axes.items())}" if axes is not None and _count(axes) > 1 else ""
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
    if axes is None or _count(axes) == 1:
        return lower(fragment.text)
    arguments, results = ([v.spec for v in values] for values in (fragment.arguments, fragment.results))
    return lower_for_mesh(fragment.text, axes, arguments, results)


def _passes(fragment: FragmentModule, options: CompileOptions, devices: int, costs: str) -> list[Pass]:
    """What runs before kernels are planned, as the options want it."""
    pipeline = cpu_pipeline(devices, options.attention_stitching, costs, options.float_jitter)
    passes = configured(pipeline, options)
    if options.dump is None:
        return passes
    return watched(passes, _inner_dump(fragment, options.dump))


def _count(axes: Mapping[str, int] | None) -> int:
    """How many devices a mesh of such axes has."""
    return math.prod((axes or {}).values())


def _watch(fragment: FragmentModule, module: HloModule, dump: Dump | None) -> Watch:
    """What is done around each pass: with a dump, files and checks."""
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


def _inner_dump(fragment: FragmentModule, dump: Dump) -> Callable[[str, Pass, HloModule], None]:
    """Writes the module after each pass of a group that changed it: `027.simplification.003.hlo-cse`."""
    turns: dict[str, int] = {}

    def after(group: str, pass_: Pass, module: HloModule) -> None:
        turns[group] = turns.get(group, -1) + 1
        if re.search(dump.passes, pass_.name):
            dump.write(fragment, f"{group}.{turns[group]:03d}.{pass_.name}.txt", print_module(module))

    return after


def _unchecked(module: HloModule) -> None:
    """Passes are verified in tests and where a dump is asked for, not in every compilation."""


class _Clock:
    """Notes the seconds since it was last asked."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.last = time.perf_counter()

    def __call__(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now
