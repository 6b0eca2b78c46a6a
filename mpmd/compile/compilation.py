"""Results of the driver: a fragment with memory, then with code, and the texts of both."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

from mpmd.compile.artefact import TEXT_FILES, Artefact, Texts
from mpmd.compile.buffers.assignment import BufferAssignment
from mpmd.compile.buffers.buffer_report import assignment_report, memory_plot
from mpmd.compile.compile_options import CompileOptions
from mpmd.compile.cost.hlo_cost import CostModel
from mpmd.compile.executable import MemoryStats, unknown_text
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import HloModule, print_module
from mpmd.compile.target import Code, Target
from mpmd.compile.thunks.program_costs import FragmentCosts, cost_plot, fragment_costs
from mpmd.compile.thunks.thunk import Thunk, kernels_text, listing


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
        made = Compilation(**vars(self), code=code)
        if self.options.dump is not None:
            texts = made.texts()
            for what, file in self.target.code_texts.items():
                texts[file] = self.target.code_text(code, what)
            texts["notices.txt"] = "".join(f"{notice}\n" for notice in self.notices)
            self.options.dump.write_all(self.fragment, texts)
        return made

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
        found = self.module.input_output_alias
        parameters = self.module.entry.parameters
        return {
            a.parameter: a.output_index[0] if a.output_index else 0
            for a in found
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
