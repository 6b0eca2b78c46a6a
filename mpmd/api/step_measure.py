"""`compiled.measure`: the seconds and bytes of a step, measured as it runs, or predicted."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any

from mpmd.api.processes import merged
from mpmd.api.step_runner import StepRunner
from mpmd.compile.executable import Executable, MemoryStats
from mpmd.config.ambient import without_ambient_mesh
from mpmd.config.topology import Topology
from mpmd.estimate.estimate import StepBounds, step_bounds
from mpmd.estimate.program_timeline import (
    Scratch,
    measured_timeline,
    predicted_timeline,
    recorder_of,
    wait_for,
    warn_of_unseen,
)
from mpmd.runtime.measure.run_costs import ProgramCosts, measure_costs
from mpmd.runtime.program.stream_memory import MemoryMeter, MeshMemory, predict_memory
from mpmd.runtime.program.streams import Run
from mpmd.scheduling.timeline import Timeline


class StepMeasure:
    """What a compiled step costs.  Methods that take arguments run one step, and return its results, too."""

    def __init__(
        self,
        runner: StepRunner,
        executables: Mapping[str, Executable],
        topology: Topology,
        scratch: Scratch,
        default_costs: Callable[[], ProgramCosts | Mapping[str, float]],
    ) -> None:
        """Takes the step with its executables by name, the scratch memory of all processes, and costs."""
        self._runner, self._executables, self._topology = runner, executables, topology
        self._scratch, self._default_costs = scratch, default_costs

    @without_ambient_mesh
    def timeline(self, *args: Any, **kwargs: Any) -> tuple[Any, Timeline]:
        """Runs one step with every fragment timed; returns its results and the measured timeline.

        On CPUs and GPUs begin and end are taken where a fragment runs: by native code itself, and for other
        fragments by stamps before and after it, which cost the host about 10 µs each.  On other devices one
        thread per mesh waits for each result, which the title says.  In several processes, which must all
        call it, every process gets the timeline of all meshes; its title says how well their clocks agree.

        Raises:
            FragmentError: a fragment failed.
            PeerError: another process failed.
        """
        runner, meshes = self._runner, list(self._topology)
        leaves = runner.inputs(args, kwargs)
        results, timeline = measured_timeline(runner.executor, runner.devices, leaves, meshes, self._scratch)
        return runner.results(results), timeline

    @without_ambient_mesh
    def costs(self, *args: Any, **kwargs: Any) -> tuple[Any, ProgramCosts]:
        """Runs one step fragment by fragment; returns its results and the seconds of each fragment.

        In several processes, which must all call it, all fragments.
        """
        runner = self._runner
        leaves = runner.inputs(args, kwargs)
        wait_for(leaves)  # or the first fragments would be charged with the step before
        recorder = recorder_of(runner.executor, runner.devices, one_by_one=True)
        results, costs = measure_costs(runner.executor, runner.devices, leaves, recorder)
        warn_of_unseen(recorder)
        return runner.results(results), costs

    @without_ambient_mesh
    def live_bytes(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, int]]:
        """Runs one step and counts the arrays of its streams; its results, and the peak of each mesh.

        The scratch memory of fragments cannot be observed, and is not counted.
        """
        runner = self._runner
        meter = MemoryMeter(runner.executor.own_program)
        results = runner.executor.run(runner.inputs(args, kwargs), observers=[meter])
        return runner.results(results), merged(runner.executor, "live bytes", meter.peaks)

    def schedule(self, costs: ProgramCosts | Mapping[str, float] | None = None) -> Timeline:
        """The predicted timeline; see `Lowered.schedule`."""
        costs = self._default_costs() if costs is None else costs
        return predicted_timeline(self._runner.executor.program, costs, list(self._topology), self._scratch)

    def memory(self, *others: StepMeasure) -> dict[str, MeshMemory]:
        """For each mesh the predicted peak in bytes over its devices, and which values are live there.

        With others it is for all these steps, such as those for several lengths of rows, of which one runs at
        a time on the same state: the highest of their peaks, with the scratch memory that any of them keeps.

        On CPUs calls issued ahead may hold 4 % or 16 MiB more, whichever is larger, and messages on their way
        `in_flight_bytes`.  Freed memory that glibc keeps is not counted; `RuntimeOptions.keep_freed_memory`
        says how much that is.
        """
        steps, owned = (self, *others), dict[str, dict[Any, int]]()
        for step in steps:
            for mesh, of_mesh in step._scratch.owned.items():
                owned.setdefault(mesh, {}).update(of_mesh)
        kept, highest = Scratch(owned=owned).kept, dict[str, MeshMemory]()
        for step in steps:
            for memory in predict_memory(step._runner.executor.program, step._scratch.workspace, kept):
                before = highest.setdefault(memory.mesh, memory)
                highest[memory.mesh] = max(before, memory, key=lambda m: m.peak_bytes)
        return highest

    def fragment_memory(self) -> dict[str, MemoryStats]:
        """Bytes of each fragment, by the backend's own count."""
        return {name: e.memory_analysis() for name, e in self._executables.items()}

    def work(self) -> dict[str, Any]:
        """`flops` and `bytes accessed` of one step over all meshes, and the same for each fragment.

        In several processes over the meshes of this one.

        `fallbacks` is the number of distinct fragments that the requested backend could not compile.
        `compute-bound seconds` and `memory-bound seconds` are projected by the cost models; the latter
        include calls and transfers, which `transfer seconds` counts alone.
        """
        fragments = {name: e.cost_analysis() for name, e in self._executables.items()}
        streams = self._runner.executor.own_program.streams
        runs = (op for stream in streams for op in stream.instructions if isinstance(op, Run))
        calls = dict(collections.Counter(op.executable for op in runs))
        total = {
            key: sum(fragments[name].get(key, 0.0) * n for name, n in calls.items())
            for key in ("flops", "bytes accessed")
        }
        total["fallbacks"] = sum(costs.get("fallbacks", 0.0) for costs in fragments.values())
        return {**total, **self.bounds.totals(), "fragments": fragments, "calls": calls}

    @functools.cached_property
    def bounds(self) -> StepBounds:
        """The roofline of the step by the cost models."""
        platforms = {name: mesh.devices.flat[0].platform for name, mesh in self._topology.items()}
        return step_bounds(self._runner.executor.own_program, self._executables, platforms)
