"""The stages of a function: Traced -> Lowered -> Compiled, as in JAX; all print."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mpmd import ir
from mpmd.api.compare import Comparison, FragmentComparison, kept, reported
from mpmd.api.initial_state import Reader, initialized, loaded
from mpmd.api.inputs import StoredForms, argument, structs, used
from mpmd.api.pictures import PICTURES, stacked
from mpmd.api.processes import (
    absent_results,
    compiling,
    cores_of_own,
    devices_of,
    executor_of,
    merged,
    merged_scratch,
    own_meshes,
    record_results,
    shared_warning,
    together,
    with_absent,
)
from mpmd.compile.compiler import compile_fragments, fallback_warning, programs
from mpmd.compile.executable import TEXTS, Executable, MemoryStats
from mpmd.compile.fragment import fragment_modules
from mpmd.config.ambient import refuse_within_jit, without_ambient_mesh
from mpmd.config.compiler_options import with_compiler_options
from mpmd.config.config import Config
from mpmd.cost.device import HOST, Device
from mpmd.errors import ConfigError, SignatureError
from mpmd.estimate.estimate import StepBounds, estimate_costs, step_bounds
from mpmd.estimate.program_timeline import (
    Scratch,
    measured_timeline,
    predicted_timeline,
    recorder_of,
    wait_for,
    warn_of_unseen,
)
from mpmd.jax_compat import host_callbacks
from mpmd.partition.lowering import LoweringObserver, Partitioned, partition
from mpmd.partition.name_checks import CalledNames
from mpmd.partition.signature import Arguments, check_leaves, describe, fitted, structure_problem
from mpmd.runtime.measure.run_costs import ProgramCosts, measure_costs
from mpmd.runtime.processes.exchange import WorldExchange
from mpmd.runtime.program.stream_memory import MemoryMeter, MeshMemory, predict_memory
from mpmd.runtime.program.streams import Program, Run
from mpmd.runtime.run.decode import unwatched_executables
from mpmd.runtime.run.executor import RuntimeOptions
from mpmd.runtime.run.observe import FiniteCheck
from mpmd.scheduling.render import render_text
from mpmd.scheduling.timeline import Timeline
from mpmd.support.option_texts import CompilerOptions, titled
from mpmd.support.resources import garbage_kept
from mpmd.support.user_code import warn_user
from mpmd.tracing.stages.staged import StagePlan
from mpmd.tracing.trace import live_names, lower

DIALECTS = ("stages", "stablehlo", "mpmd", "program", "schedule")


@dataclasses.dataclass
class Traced:
    """A function traced for one signature.

    Attributes:
        jax_traced: as JAX traced it.
        config: its configuration.
        arguments: of the call.
        argument_paths: pytree path of each flat argument.
        names: names that were called.
        known_names: names that were called for these or for other static arguments.
        plan: the stages that `stages=` of the configuration gave its losses; None without it.
        explicit: whether axes were explicit while it was traced: its values have shardings as types.
    """

    jax_traced: Any
    config: Config
    arguments: Arguments
    argument_paths: list[str]
    names: frozenset[str] = frozenset()
    known_names: frozenset[str] = frozenset()
    plan: StagePlan | None = None
    explicit: bool = False

    @property
    def stages_text(self) -> str:
        """The stages that `stages=` of the configuration gave the losses of the function."""
        if self.plan is None:
            return "the stages are named in the function itself"
        return "\n\n".join(self.plan.texts)

    @property
    def warnings(self) -> list[str]:
        """The warnings of tracing."""
        return [] if self.plan is None else list(self.plan.warnings)

    @property
    def takes_parts(self) -> bool:
        """Whether stacked arguments and results are in parts, as `mpmd.split` makes them."""
        return self.plan is not None and self.plan.selector.stacked

    @property
    def jaxpr(self) -> Any:
        """The function as JAX traced it."""
        return self.jax_traced.jaxpr

    @property
    def out_tree(self) -> Any:
        """The pytree of the results."""
        return jax.tree.structure(self.jax_traced.out_info)

    @garbage_kept()
    @without_ambient_mesh
    def lower(self, observer: LoweringObserver | None = None) -> Lowered:
        """Partitions, schedules and linearizes; `observer` is called with the program after every pass.

        The warnings in `Lowered.warnings` are also issued as Python warnings.

        Raises:
            ConfigError: names do not fit the assignment, or a sharding cannot be used.
            PassError: a pass found the program wrong; holds all findings.
        """
        platform = next(iter(self.config.topology.values())).devices.flat[0].platform
        lowered = lower(self.jax_traced, platform)
        partitioned = self.partition(lowered, observer)
        made = Lowered(self, lowered, partitioned)
        if jax.process_index() == 0:
            warn_user(made.warnings)
        return made

    def partition(self, lowered: Any, observer: LoweringObserver | None = None) -> Partitioned:
        """Takes the step as JAX lowered it through the passes."""
        called = CalledNames(self.names, self.known_names, frozenset(live_names(self.jaxpr.jaxpr)))
        step = self.config, self.arguments, self.argument_paths, self.out_tree
        return partition(lowered, *step, called, observer, explicit=self.explicit)


@dataclasses.dataclass
class Lowered:
    """A function partitioned over its meshes, before its fragments are compiled."""

    traced: Traced
    jax_lowered: Any
    partitioned: Partitioned

    @property
    def config(self) -> Config:
        """Its configuration."""
        return self.traced.config

    @property
    def program(self) -> Program:
        """The instruction streams, verified."""
        return self.partitioned.program

    @property
    def warnings(self) -> list[str]:
        """All warnings of tracing and lowering: of passes, schedule and checks."""
        return [*self.traced.warnings, *self.partitioned.warnings]

    @property
    def notices(self) -> list[str]:
        """The remarks of the passes."""
        return self.partitioned.notices

    def as_text(self, dialect: str = "mpmd") -> str:
        """The program as text.

        Args:
            dialect: `"stages"` for the stages that `stages=` of the configuration found, `"stablehlo"` as JAX
                lowers it, `"mpmd"` after all passes, `"program"` for the instruction streams, `"schedule"`
                for the order of tasks on each mesh.

        Raises:
            ConfigError: another word.
        """
        if dialect == "stages":
            return self.traced.stages_text
        if dialect == "stablehlo":
            return str(self.jax_lowered.as_text())
        if dialect == "mpmd":
            return ir.to_text(self.partitioned.module)
        if dialect == "program":
            return self.program.as_text()
        if dialect == "schedule":
            return render_text(self.schedule())
        raise ConfigError(f"there is no dialect {dialect!r}\n  there are {', '.join(map(repr, DIALECTS))}")

    @functools.cached_property
    def fragments(self) -> dict[str, Any]:
        """The distinct fragments by name, as they will be compiled.

        Raises:
            ConfigError: one calls back to Python, and this version of JAX does not say what.
        """
        return fragment_modules(self.partitioned.module, host_callbacks(self.jax_lowered))

    def schedule(self, costs: ProgramCosts | Mapping[str, float] | None = None) -> Timeline:
        """The predicted timeline, with the bytes that every mesh holds.

        Args:
            costs: `estimated_costs`, `Compiled.costs`, or seconds of fragments by name; 1 for each that is
                missing.
        """
        return predicted_timeline(self.program, costs, list(self.config.topology))

    def estimated_costs(self, device: Device = HOST) -> ProgramCosts:
        """Estimated seconds of fragments and messages on such devices, by the work in them.

        Args:
            device: each one of the meshes; by default about a CPU core.

        Raises:
            CompileError: the work of a fragment cannot be counted; names the operation.
        """
        return estimate_costs(self.program, self.fragments, self.config.topology, device)

    @garbage_kept()
    @without_ambient_mesh
    def compile(
        self, compiler_options: CompilerOptions | None = None, *, runtime: RuntimeOptions | None = None
    ) -> Compiled:
        """Compiles the fragments and makes the program ready to run.

        Args:
            compiler_options: options of XLA, which count before the configuration's; under the name of
                a mesh or a fragment its own.
            runtime: how it runs.

        Raises:
            CompileError: a fragment cannot be compiled; names it.
            ConfigError: `runtime` is something else, or XLA does not take an option.
        """
        if runtime is not None and not isinstance(runtime, RuntimeOptions):
            raise ConfigError(f"runtime is {runtime!r}; it must be mpmd.RuntimeOptions, or None")
        topology = self.config.topology
        fragments = with_compiler_options(self.fragments, compiler_options, topology)
        with compiling(self.partitioned, topology) as exchange:
            made = self._compiled(fragments, runtime or RuntimeOptions(), exchange)
        made.fallbacks.show()
        return made

    def _compiled(
        self, fragments: Mapping[str, Any], runtime: RuntimeOptions, exchange: WorldExchange | None
    ) -> Compiled:
        meshes = own_meshes(self.config.topology)
        unwatched = {name for _, name in unwatched_executables(self.program)}
        fragments = {
            name: dataclasses.replace(fragment, token=name in unwatched)
            for name, fragment in fragments.items()
            if fragment.mesh in meshes
        }
        cores = cores_of_own(meshes, exchange)
        options = dataclasses.replace(self.partitioned.compile_options, cores=cores)
        backend = self.partitioned.backend
        executables = together(exchange, lambda: compile_fragments(fragments, meshes, backend, options))
        made = Compiled(self, executables, runtime, exchange)
        made.fallbacks = shared_warning(made.fallbacks, exchange)
        return made


class Compiled:
    """A function ready to run on its meshes.

    Attributes:
        fallbacks: the warning that names fragments that XLA compiles although native code was requested.
    """

    def __init__(
        self,
        lowered: Lowered,
        executables: dict[str, Executable],
        runtime: RuntimeOptions,
        exchange: WorldExchange | None = None,
    ) -> None:
        self.lowered, self.executables = lowered, executables
        self.fallbacks = fallback_warning(executables)
        program = lowered.program
        self._devices = devices_of(lowered.config.topology, exchange, runtime.transfers)
        self._scratch = merged_scratch(Scratch.of(executables, self._devices.meshes), exchange)
        table = {(e.fragment.mesh, name): e for name, e in executables.items()}
        workspace = self._scratch.workspace
        self._executor = executor_of(program, table, self._devices, runtime, workspace, exchange)
        self._out_tree = lowered.traced.out_tree
        self._arguments = StoredForms(lowered.traced.arguments.leaves)
        self._compares = lowered.partitioned.compare
        self._made = StoredForms(jax.tree.leaves(lowered.traced.jax_traced.out_info))

    @property
    def program(self) -> Program:
        """The instruction streams that it runs."""
        return self.lowered.program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step on arguments of the signature it was compiled for, without static arguments.

        Raises:
            SignatureError: the signature differs; names every leaf that differs.
        """
        leaves = self._checked(args, kwargs)
        refuse_within_jit()
        return self.run_flat(leaves)

    @without_ambient_mesh
    def init(self, init_fn: Callable[..., Any], *args: Any, argnum: int = 0) -> Any:
        """The argument that `init_fn(*args)` returns, each leaf computed on the mesh that uses it.

            compiled = step.compiled(jax.eval_shape(init_fn, key), batch)
            state = compiled.init(init_fn, key)

        Every process calls it, and computes the leaves of its own meshes, with the shardings of the step;
        stacks of `mpmd.split` in parts.  The values equal `jax.jit(init_fn)`'s, but for the rounding of
        another fusion.

        Args:
            init_fn: traced, never called on arrays.
            *args: small arrays, such as a random key, which are copied to every mesh.
            argnum: the argument of the step, among those that are not static.

        Raises:
            SignatureError: it returns other leaves, shapes or dtypes than the argument has.
            PeerError: another process initializes something else, or failed.
        """
        of = argument(self.lowered, self._devices, argnum)
        return initialized(of, self._devices.meshes, init_fn, args)

    def load(self, reader: Reader, *, argnum: int = 0) -> Any:
        """An argument whose leaves are read, such as pretrained weights, each where it is used.

            weights = np.load("weights.npz", mmap_mode="r")
            state = compiled.load(lambda path, leaf, index: weights[path][index])

        Args:
            reader: is called with the path of a leaf, such as `['params']['w']`, its shape and dtype, and an
                index of slices; returns that part of it.  Every process calls it, and reads what its devices
                hold.
            argnum: the argument of the step, among those that are not static.

        Raises:
            SignatureError: the reader returns another shape or dtype.
            PeerError: another process read other values for the same part, or failed.
        """
        return loaded(argument(self.lowered, self._devices, argnum), reader)

    @property
    def abstract_args(self) -> tuple[Any, ...]:
        """The positional arguments as `jax.ShapeDtypeStruct`s with the shardings that the step wants.

        `mpmd.checkpoint.restore` takes one of them.  In several processes, and on several meshes, a leaf has
        the sharding of its own mesh, from which it is sent to others.
        """
        return structs(self.lowered, self._devices)[0]

    @property
    def input_shardings(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The shardings of `(positional, keywords)`, as in `jax.stages.Compiled`."""
        found: tuple[tuple[Any, ...], dict[str, Any]] = jax.tree.map(
            lambda leaf: leaf.sharding, structs(self.lowered, self._devices)
        )
        return found

    @property
    def inputs_used(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """For each leaf of `(positional, keywords)` whether this process reads it.

        For the others `jax.ShapeDtypeStruct`s may be given.
        """
        return used(self.lowered, jax.process_index() if self.lowered.config.topology.processes else None)

    @without_ambient_mesh
    def run_flat(self, leaves: list[Any]) -> Any:
        """Runs one step on flat arguments; under `jax.debug_nans`, `jax.debug_infs` fragment by fragment."""
        if self.fallbacks.waits:  # a filter ignored it so far
            self.fallbacks.show()
        if self._compares:
            self._compares = False
            return reported(self._compared(leaves)).results
        try:
            nans, infs = jax.config.jax_debug_nans, jax.config.jax_debug_infs
            if not nans and not infs:
                return self._results(self._executor.run(self._arguments.stored(leaves)))
            check = FiniteCheck(nans=nans, infs=infs)
            with jax.debug_nans(False), jax.debug_infs(False):  # JAX's own check does not know the fragment
                made = self._executor.run(self._arguments.stored(leaves), observers=[check], one_by_one=True)
        except jax.errors.ConcretizationTypeError:  # some have no value yet
            traced = self.lowered.traced
            check_leaves(dataclasses.replace(traced.arguments, leaves=leaves), traced.argument_paths)
            raise
        return self._results(made)

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Flat arguments that match the compiled signature.

        Raises:
            SignatureError: they do not; names every leaf that differs.
        """
        traced = self.lowered.traced
        expected, names = traced.arguments, traced.argument_paths
        if traced.takes_parts:
            args, kwargs = fitted(expected, args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != expected.tree:
            raise SignatureError(structure_problem(tree, expected.tree, names))
        check_leaves(dataclasses.replace(expected, leaves=leaves), names)
        problems = [
            f"{path}: got {_text(leaf)}, compiled for {_text(wanted)}"
            for path, leaf, wanted in zip(names, leaves, expected.leaves, strict=True)
            if describe(leaf)[:2] != describe(wanted)[:2]
        ]
        if problems:
            raise SignatureError(
                "the arguments do not fit what this was compiled for:\n  "
                + "\n  ".join(problems)
                + "\n  call the jitted function instead: it compiles for every signature"
            )
        return leaves

    def as_text(self, what: str = "hlo") -> str:
        """Every distinct fragment after compilation; words of `Lowered.as_text` work too.

        `"costs"` begins with the roofline of the whole step: compute-bound and memory-bound seconds.
        `"memory"` and `"bars"` are one SVG each, with a picture for each fragment.

        Raises:
            ConfigError: another word.
        """
        if what in DIALECTS:
            return self.lowered.as_text(what)
        if what not in TEXTS:
            words = ", ".join(map(repr, dict.fromkeys([*DIALECTS, *TEXTS])))
            raise ConfigError(f"there is no text {what!r} of a step\n  there are {words}")
        if what == "costs":
            ours = [(name, e) for name, e in self.executables.items() if e.backend not in ("xla", "zeros")]
            tables = [f"// {name}\n{e.as_text(what)}" for name, e in ours]
            return "\n".join([f"// the step\n{self._bounds.text()}", *tables])
        if what in PICTURES:
            return stacked({name: e.as_text(what) for name, e in self.executables.items()})
        made = self.executables.values()
        return "\n\n".join(f"{titled(e.name, e.fragment.compiler_options)}\n{e.as_text(what)}" for e in made)

    def cost_analysis(self) -> dict[str, Any]:
        """`flops` and `bytes accessed` of one step over all meshes, and the same for each fragment.

        In several processes over the meshes of this one.

        `fallbacks` is the number of distinct fragments that the requested backend could not compile.
        `compute-bound seconds` and `memory-bound seconds` are projected by the cost models; the latter
        include calls and transfers, which `transfer seconds` counts alone.
        """
        fragments = {name: e.cost_analysis() for name, e in self.executables.items()}
        streams = self._executor.own_program.streams
        runs = (op for stream in streams for op in stream.instructions if isinstance(op, Run))
        calls = dict(collections.Counter(op.executable for op in runs))
        total = {
            key: sum(fragments[name].get(key, 0.0) * n for name, n in calls.items())
            for key in ("flops", "bytes accessed")
        }
        total["fallbacks"] = sum(costs.get("fallbacks", 0.0) for costs in fragments.values())
        return {**total, **self._bounds.totals(), "fragments": fragments, "calls": calls}

    @functools.cached_property
    def _bounds(self) -> StepBounds:
        meshes = self.lowered.config.topology
        platforms = {name: mesh.devices.flat[0].platform for name, mesh in meshes.items()}
        return step_bounds(self._executor.own_program, self.executables, platforms)

    def memory_analysis(self) -> dict[str, MeshMemory]:
        """For each mesh the predicted peak in bytes over its devices, and which values are live there.

        On CPUs calls issued ahead may hold 4 % or 16 MiB more, whichever is larger, and messages on their way
        `in_flight_bytes`.  Freed memory that glibc keeps is not counted; `RuntimeOptions.keep_freed_memory`
        says how much that is.
        """
        scratch = self._scratch
        return {m.mesh: m for m in predict_memory(self.program, scratch.workspace, scratch.kept)}

    @without_ambient_mesh
    def live_bytes(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, int]]:
        """Runs one step and counts the arrays of its streams; its results, and the peak of each mesh.

        The scratch memory of fragments cannot be observed, and is not counted.
        """
        executor = self._executor
        meter = MemoryMeter(executor.own_program)
        leaves = self._arguments.stored(self._checked(args, kwargs))
        results = executor.run(leaves, observers=[meter])
        return self._results(results), merged(executor, "live bytes", meter.peaks)

    @property
    def programs(self) -> list[list[str]]:
        """The distinct programs that were compiled: for each the names of its fragments.

        Identical stages share their programs, each on its own mesh.  Fragments that only fill zeros have
        none.
        """
        return programs(self.lowered.fragments, self.lowered.config.topology)

    def fragment_memory(self) -> dict[str, MemoryStats]:
        """Costs of each fragment, by the backend's own count."""
        return {name: e.memory_analysis() for name, e in self.executables.items()}

    def schedule(self, costs: ProgramCosts | Mapping[str, float] | None = None) -> Timeline:
        """The predicted timeline, as in `Lowered`, the scratch memory of fragments included."""
        meshes = list(self.lowered.config.topology)
        return predicted_timeline(self.program, costs, meshes, self._scratch)

    @without_ambient_mesh
    def costs(self, *args: Any, **kwargs: Any) -> tuple[Any, ProgramCosts]:
        """Runs one step fragment by fragment; returns its results and the seconds of each fragment.

        In several processes, which must all call it, all fragments.
        """
        executor = self._executor
        leaves = self._arguments.stored(self._checked(args, kwargs))
        wait_for(leaves)  # or the first fragments would be charged with the step before
        recorder = recorder_of(executor, self._devices, one_by_one=True)
        results, costs = measure_costs(executor, self._devices, leaves, recorder)
        warn_of_unseen(recorder)
        return self._results(results), costs

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
        executor = self._executor
        leaves = self._arguments.stored(self._checked(args, kwargs))
        meshes = list(self.lowered.config.topology)
        results, timeline = measured_timeline(executor, self._devices, leaves, meshes, self._scratch)
        return self._results(results), timeline

    @without_ambient_mesh
    def compare(self, *args: Any, **kwargs: Any) -> Comparison:
        """Runs one step in which XLA computes every fragment, too, with the same inputs.

            print(compiled.compare(state, batch))  # true if no fragment differs beyond rounding

        It takes the time in which XLA compiles the step and runs it once.  No argument is consumed, and
        callbacks happen once: fragments that have them are not compared.
        """
        return self._compared(kept(self._checked(args, kwargs), self.lowered.traced.arguments.donated))

    def _compared(self, leaves: list[Any]) -> Comparison:
        """`compare` of flat arguments, which are consumed as a step's are."""
        meshes, partitioned = own_meshes(self.lowered.config.topology), self.lowered.partitioned
        comparison = FragmentComparison(self.executables, meshes, partitioned.compile_options)
        results = self._executor.run(self._arguments.stored(leaves), observers=[comparison], one_by_one=True)
        return comparison.report(partitioned.module, self._results(results))

    @functools.cached_property
    def _absent(self) -> Mapping[int, Callable[[], jax.Array]]:
        return absent_results(self.program, self._devices, self._made.weak)

    def _results(self, leaves: list[Any]) -> Any:
        leaves = self._made.seen(with_absent(leaves, self._absent))
        record_results(self._executor, leaves)
        return jax.tree.unflatten(self._out_tree, leaves)

    def synchronize(self) -> None:
        """Waits until every step so far is computed.

        Raises:
            FragmentError: a fragment failed on its device; names it.
        """
        self._executor.synchronize()

    def close(self) -> None:
        """Ends the threads that run it."""
        self._executor.close()


def _text(leaf: Any) -> str:
    shape, dtype, _ = describe(leaf)
    return f"{dtype}[{','.join(map(str, shape))}]"
