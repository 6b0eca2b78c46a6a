"""A fragment from StableHLO to code: the phases, in order, the same for every target.

    lowering ── passes ── kernels ── schedule ── buffers ── thunks ── check ── steps ── code

Each phase ends in a value that prints: `Prepared` is a fragment whose values have memory, `Compilation` one
with code.  The driver asks a `Target` for everything that differs between devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Mapping
from typing import Any

from mpmd.compile.analysis.call_graph import CallGraph
from mpmd.compile.artefact import TEXT_FILES, Artefact, KeptArtefacts, Texts
from mpmd.compile.buffers.assignment import BufferAssignment, assign_buffers
from mpmd.compile.buffers.buffer_report import assignment_report, memory_plot
from mpmd.compile.buffers.fitting import fit
from mpmd.compile.buffers.sharing import pair_donations
from mpmd.compile.cost.hlo_cost import CostModel
from mpmd.compile.executable import MemoryStats, unknown_text
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import HloModule, print_module
from mpmd.compile.kernels.planner.plan_cache import caching_plans
from mpmd.compile.lowering import lower, lower_for_mesh
from mpmd.compile.lowering.lower import flatten_parameters
from mpmd.compile.options import DEFAULTS, CompileOptions
from mpmd.compile.pipelines import configured, dumping_inside, watch_of
from mpmd.compile.target import Code, Target
from mpmd.compile.thunks.check import check_program
from mpmd.compile.thunks.emission import Emitter, KernelPlans
from mpmd.compile.thunks.program_costs import FragmentCosts, cost_plot, fragment_costs
from mpmd.compile.thunks.thunk import Thunk, kernels_text, listing
from mpmd.support import diagnostics
from mpmd.support.passes import Timing, run_pipeline
from mpmd.support.resources import garbage_kept


class PhaseClock:
    """Seconds per phase: each call adds those since the last one.

    Args:
        seconds: phase → seconds, added to.
    """

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.last = time.perf_counter()

    def __call__(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A fragment that is scheduled and has memory, before code generation.

    Attributes:
        fragment: the source.
        target: the target.
        options: the compile options.
        module: the optimised, scheduled HLO.
        assignment: its memory.
        thunks: its work.
        program: the target's steps, a `ThunkProgram`.
        seconds: per phase.
        notices: reports of the passes.
    """

    fragment: FragmentModule
    target: Target
    options: CompileOptions
    module: HloModule
    assignment: BufferAssignment
    thunks: tuple[Thunk, ...]
    program: Any
    seconds: dict[str, float]
    notices: tuple[str, ...]

    def compiled(self) -> Compilation:
        clock = PhaseClock(self.seconds)
        code = self.target.compile(self.program, self.fragment, self.options)
        clock("code")
        compilation = Compilation(**vars(self), code=code)
        if self.options.dump is not None:
            texts = compilation.texts()
            for what, file in self.target.code_texts.items():
                texts[file] = self.target.code_text(code, what)
            texts["notices.txt"] = "".join(f"{notice}\n" for notice in self.notices)
            self.options.dump.write_all(self.fragment, texts)
        return compilation

    @functools.cached_property
    def kernel_costs(self) -> FragmentCosts:
        return fragment_costs(self.thunks, self.module, self.target.device)

    def texts(self) -> dict[str, str]:
        """File name → text of everything that is readable, by the names of XLA's dumps."""
        return {
            "after_optimizations.txt": print_module(self.module),
            "buffer-assignment.txt": assignment_report(self.assignment),
            "memory.svg": memory_plot(self.assignment),
            "thunk_sequence.txt": listing(self.thunks) + "\n",
            "kernels.txt": kernels_text(self.thunks),
            "costs.txt": self.kernel_costs.text(),
            "costs.svg": cost_plot(self.kernel_costs),
        }

    def text(self, what: str) -> str:
        """One of the texts of `Executable.as_text`; code is generated for those that are of the code.

        Raises:
            CompileError: another word, or there is no code.
        """
        if what in self.target.code_texts:
            return self.target.code_text(self.compiled().code, what)
        if what not in TEXT_FILES:
            return unknown_text(what, "fragments for this device")
        return self.texts()[TEXT_FILES[what]]


@dataclasses.dataclass(frozen=True)
class Compilation(Prepared):
    """All results of compiling a fragment, before it is loaded.

    Attributes:
        code: the target's code.
    """

    code: Code

    @property
    def aliases(self) -> dict[int, int]:
        """Argument → the result that takes its memory, if it has any."""
        aliases = self.module.input_output_alias
        parameters = self.module.entry.parameters
        return {
            a.parameter: a.output_index[0] if a.output_index else 0
            for a in aliases
            if parameters[a.parameter].shape.size
        }

    @functools.cached_property
    def costs(self) -> dict[str, float]:
        """Our own count of the operations and bytes."""
        cost = CostModel().module(self.module)
        return {
            "flops": float(cost.flops),
            "transcendentals": float(cost.transcendentals),
            "bytes accessed": float(cost.bytes_read + cost.bytes_written),
            **self.kernel_costs.totals(),
        }

    @property
    def memory(self) -> MemoryStats:
        allocations = self.assignment.allocations
        sizes = {kind: sum(a.size for a in allocations if a.kind == kind) for kind in ("parameter", "result")}
        aliased = sum(allocations[d].size for d in self.aliases)
        temporaries = self.assignment.arena_bytes
        return MemoryStats(sizes["parameter"], sizes["result"], aliased, temporaries, self.code.size)

    def artefact(self) -> Artefact:
        return Artefact(
            self.code,
            self.program.arena_bytes,
            self.program.constants,
            self.aliases,
            self.costs,
            self.memory,
            Texts(self.texts),
        )


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
    with diagnostics.collecting() as collected:
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
    notices = tuple(d.message for d in collected)
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
    artefact = kept.of_fragment(fragment)
    if artefact is not None:
        return artefact, True
    module = module or lowered(fragment, axes)
    program = kept.program_key(fragment, module)
    artefact = kept.of_program(fragment, program)
    if artefact is not None:
        return artefact, True
    artefact = prepare_fragment(fragment, target, options, module, axes=axes).compiled().artefact()
    kept.keep(fragment, program, artefact)
    return artefact, False


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
