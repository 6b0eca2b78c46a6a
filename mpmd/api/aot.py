"""The stages of a function: Traced -> Lowered -> Compiled, as in JAX; all print."""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from mpmd import ir
from mpmd.api.compare import Comparison, FragmentComparison, kept, reported
from mpmd.api.initial_state import Reader
from mpmd.api.jax_stages import NO_EXPORT, OF_JAX_ALONE, StepStage
from mpmd.api.one_picture import one_picture
from mpmd.api.processes import (
    compiling,
    cores_of_own,
    devices_of,
    executor_of,
    merged_scratch,
    own_meshes,
    shared_warning,
    together,
)
from mpmd.api.step_arguments import PerLeaf, StepArguments
from mpmd.api.step_card import compiled_card, lowered_card, traced_card
from mpmd.api.step_log import say_compiled, say_lowered
from mpmd.api.step_measure import StepMeasure
from mpmd.api.step_memory import MemoryTable
from mpmd.api.step_runner import StepRunner
from mpmd.brief import as_html
from mpmd.compile.compiler import compile_fragments, fallback_warning, programs
from mpmd.compile.executable import TEXTS, Executable, MemoryStats
from mpmd.compile.fragment import fragment_modules
from mpmd.config.ambient import refuse_within_jit, without_ambient_mesh
from mpmd.config.compiler_options import with_compiler_options
from mpmd.config.config import Config
from mpmd.config.described import described_world
from mpmd.cost.device import HOST, Device
from mpmd.errors import CompileError, ConfigError
from mpmd.estimate.estimate import estimate_costs
from mpmd.estimate.program_timeline import Scratch, predicted_timeline
from mpmd.jax_compat import back_from_host, format_of, host_callbacks
from mpmd.partition.lowering import LoweringObserver, Partitioned, partition
from mpmd.partition.name_checks import CalledNames
from mpmd.partition.signature import Arguments, StepSignature
from mpmd.runtime.measure.run_costs import ProgramCosts
from mpmd.runtime.processes.exchange import WorldExchange
from mpmd.runtime.program.figures import ProgramFigures
from mpmd.runtime.program.streams import Copy, Program, between_memories
from mpmd.runtime.run.decode import unwatched_executables
from mpmd.runtime.run.executor import RuntimeOptions
from mpmd.scheduling.render import render_text
from mpmd.scheduling.timeline import Timeline
from mpmd.support.option_texts import CompilerOptions, titled
from mpmd.support.resources import garbage_kept
from mpmd.support.user_code import warn_user
from mpmd.tracing.stages.select.selectors import Selector
from mpmd.tracing.stages.staged import TracedStages
from mpmd.tracing.trace import live_names, lower

DIALECTS = ("stages", "stablehlo", "mpmd", "program", "schedule")


@dataclasses.dataclass
class Traced(StepStage):
    """A function traced for one signature.

    Attributes:
        jax_traced: as JAX traced it.
        config: its configuration.
        arguments: of the call.
        argument_paths: pytree path of each flat argument.
        names: names that were called.
        known_names: names that were called for these or for other static arguments.
        stages: those that `stages=` of the configuration gave its losses; None without it.
        explicit: whether axes were explicit while it was traced: its values have shardings as types.
        name: of the function.
        again: in a dry run, traces it under another configuration.
    """

    jax_traced: Any
    config: Config
    arguments: Arguments
    argument_paths: list[str]
    names: frozenset[str] = frozenset()
    known_names: frozenset[str] = frozenset()
    stages: TracedStages | None = None
    explicit: bool = False
    name: str = "step"
    again: Callable[[Config], Traced] | None = None

    lacks = dict.fromkeys(("lojax", "physicalize", "closure_convert", "with_consts_as_arg"), OF_JAX_ALONE)
    __repr__ = traced_card

    @property
    def _of(self) -> Traced:
        return self

    @property
    def fun_name(self) -> str:
        """`name`, by its name in `jax.stages.Traced`."""
        return self.name

    @property
    def effects(self) -> Any:
        """The effects of its computations, as JAX names them."""
        return self.jaxpr.effects

    @property
    def out_avals(self) -> Any:
        """The shape and dtype of each result, as JAX's types."""
        return self.jax_traced.out_avals

    @property
    def stages_text(self) -> str:
        """The stages that `stages=` of the configuration gave the losses of the function."""
        if self.stages is None:
            return "the stages are named in the function itself"
        return "\n\n".join(self.stages.texts)

    @property
    def warnings(self) -> list[str]:
        """The warnings of tracing."""
        return [] if self.stages is None else list(self.stages.warnings)

    @property
    def takes_parts(self) -> bool:
        """Whether stacked arguments and results are in parts, as `mpmd.split` makes them."""
        return self.stages is not None and self.stages.selector.stacked

    @property
    def signature(self) -> StepSignature:
        """The arguments that a call must have."""
        return StepSignature(self.arguments, self.argument_paths, self.takes_parts)

    @property
    def jaxpr(self) -> Any:
        """The function as JAX traced it."""
        return self.jax_traced.jaxpr

    @garbage_kept()
    @without_ambient_mesh
    def lower(
        self,
        observer: LoweringObserver | None = None,
        *,
        lowering_platforms: Sequence[str] | None = None,
        _private_parameters: Any = None,
    ) -> Lowered:
        """Partitions, schedules and linearizes; `observer` is called with the program after every pass.

        The warnings in `Lowered.warnings` are also issued as Python warnings.

        Args:
            observer: see `LoweringObserver`.
            lowering_platforms: as `jax.export` gives it, which a step for several meshes refuses.

        Raises:
            ConfigError: names do not fit the assignment, a sharding cannot be used, or the step is exported.
            PassError: a pass found the program wrong; holds all findings.
        """
        if lowering_platforms is not None or _private_parameters is not None:
            raise ConfigError(NO_EXPORT)
        begin = time.perf_counter()
        platform = next(iter(self.config.topology.values())).devices.flat[0].platform
        lowered = lower(self.jax_traced, platform)
        partitioned = self.partition(lowered, observer)
        result = Lowered(self, lowered, partitioned)
        if jax.process_index() == 0:
            warn_user(result.warnings)
        say_lowered(result, begin)
        return result

    def partition(self, lowered: Any, observer: LoweringObserver | None = None) -> Partitioned:
        """Takes the step as JAX lowered it through the passes."""
        called = CalledNames(self.names, self.known_names, frozenset(live_names(self.jaxpr.jaxpr)))
        step = self.config, self.arguments, self.argument_paths, self.out_tree
        return partition(lowered, *step, called, observer, explicit=self.explicit)


@dataclasses.dataclass
class Lowered(StepStage):
    """A function partitioned over its meshes, before its fragments are compiled."""

    traced: Traced
    jax_lowered: Any
    partitioned: Partitioned

    lacks = {"cost_analysis": "before it is compiled work is estimated: lowered.estimated_costs()"}
    __repr__ = lowered_card

    def _repr_html_(self) -> str:
        """The lines of its `repr` above its timeline, for notebooks."""
        return as_html(repr(self), self.schedule()._repr_svg_())

    @property
    def _of(self) -> Traced:
        return self.traced

    @functools.cached_property
    def figures(self) -> ProgramFigures:
        """What a step runs and sends."""
        return ProgramFigures(self.program)

    @property
    def config(self) -> Config:
        """Its configuration."""
        return self.traced.config

    @functools.cached_property
    def program(self) -> Program:
        """The instruction streams, verified; named as the function."""
        return dataclasses.replace(self.partitioned.program, name=self.name)

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.traced.name

    @property
    def stages(self) -> Selector | None:
        """The stages that `stages=` of the configuration found, as `stages=` of another configuration.

        Found by cost for one length of rows, they are then the stages of all lengths, and of other steps with
        the same loss, such as an evaluation: the state stays where it is.  None for stages that are named.
        """
        return None if self.traced.stages is None else self.traced.stages.found

    @property
    def warnings(self) -> list[str]:
        """All warnings of tracing and lowering: of passes, schedule and checks."""
        return [*self.traced.warnings, *self._of_offloading, *self.partitioned.warnings]

    @property
    def _of_offloading(self) -> list[str]:
        """A warning if values that a policy offloads all stay in device memory."""
        offloaded = collections.Counter(back_from_host(self.traced.jax_traced.jaxpr.jaxpr))
        copies = ((op, s) for s in self.program.streams for op in s.instructions if isinstance(op, Copy))
        if not offloaded or any(between_memories(op, stream) for op, stream in copies):
            return []
        kinds = ", ".join(f"{kind} ({count} times)" for kind, count in offloaded.items())
        return [
            f"values that jax.checkpoint offloads stay in device memory: {kinds}"
            "\n  they are moved where at least two tasks of the mesh run between a forward and its backward, "
            "in steps that compute nothing on the host"
            "\n  use more stages or microbatches, or a policy that offloads nothing",
        ]

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

    def compiler_ir(self, dialect: str = "mpmd") -> Any:
        """The module after all passes, or with `"stablehlo"` as JAX lowers the step.

        Raises:
            ConfigError: another word.
        """
        if dialect == "mpmd":
            return self.partitioned.module
        if dialect == "stablehlo":
            return self.jax_lowered.compiler_ir(dialect)
        raise ConfigError(f"there is no module in dialect {dialect!r}\n  there are 'mpmd', 'stablehlo'")

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
            costs: what `compiled.measure.costs` measured, or seconds of fragments by name, 1 for each that is
                missing; by default `estimated_costs()`.  With `{}`, or where work cannot be counted, every
                fragment takes one step.
        """
        costs = self.default_costs if costs is None else costs
        return predicted_timeline(self.program, costs, list(self.config.topology))

    @functools.cached_property
    def default_costs(self) -> ProgramCosts | dict[str, float]:
        """`estimated_costs()`; none where the work of a fragment cannot be counted."""
        try:
            return self.estimated_costs()
        except CompileError:
            return {}

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
        if (described := described_world()) is not None:
            return described.take(self)
        topology, begin = self.config.topology, time.perf_counter()
        fragments = with_compiler_options(self.fragments, compiler_options, topology)
        with compiling(self.partitioned, topology) as exchange:
            compiled = self._compiled(fragments, runtime or RuntimeOptions(), exchange)
        compiled.fallbacks.show()
        say_compiled(compiled, begin)
        return compiled

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
        compiled = Compiled(self, executables, runtime, exchange)
        compiled.fallbacks = shared_warning(compiled.fallbacks, exchange)
        return compiled


class Compiled(StepStage):
    """A function ready to run on its meshes.

    Attributes:
        arguments: where its arguments are read, and arguments created there.
        measure: its seconds and bytes.
        figures: what a step runs and sends.
        fallbacks: the warning that names fragments that XLA compiles although native code was requested.
    """

    lacks = {
        "call": "call it: compiled(...)",
        "runtime_executable": "a step is several executables, compiled.executables, and the streams between",
    }
    __repr__ = compiled_card

    def __init__(
        self,
        lowered: Lowered,
        executables: dict[str, Executable],
        runtime: RuntimeOptions,
        exchange: WorldExchange | None = None,
    ) -> None:
        self.lowered, self.executables = lowered, executables
        self.fallbacks = fallback_warning(executables)
        topology, graph = lowered.config.topology, lowered.partitioned.graph
        devices = devices_of(topology, exchange, runtime.transfers)
        scratch = merged_scratch(Scratch.of(executables, devices.meshes), exchange)
        table = {(e.fragment.mesh, name): e for name, e in executables.items()}
        executor = executor_of(lowered.program, table, devices, runtime, scratch.workspace, exchange)
        signature, results = lowered.traced.signature, lowered.traced.jax_traced.out_info
        self.runner = StepRunner(executor, devices, signature, results)
        types = [graph.types[spec.value] for spec in graph.inputs]
        self.arguments = StepArguments(signature.arguments, types, executor.own_program, devices)
        self.measure = StepMeasure(self.runner, executables, topology, scratch, lambda: lowered.default_costs)
        self.figures = ProgramFigures(lowered.program, scratch.workspace, scratch.kept)
        self._compares = lowered.partitioned.compare

    def _repr_html_(self) -> str:
        """The lines of its `repr` above its predicted timeline and its memory, for notebooks."""
        return as_html(repr(self), self.schedule()._repr_svg_(), self.memory_analysis()._repr_svg_())

    @property
    def _of(self) -> Traced:
        return self.lowered.traced

    @property
    def program(self) -> Program:
        """The instruction streams that it runs."""
        return self.lowered.program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step on arguments of the signature it was compiled for, without static arguments.

        Raises:
            SignatureError: the signature differs; names every leaf that differs.
        """
        leaves = self.runner.signature.leaves(args, kwargs)
        refuse_within_jit()
        return self.run_flat(leaves)

    @without_ambient_mesh
    def run_flat(self, leaves: list[Any]) -> Any:
        """Runs one step on flat arguments; under `jax.debug_nans`, `jax.debug_infs` fragment by fragment."""
        if self.fallbacks.waits:  # a filter ignored it so far
            self.fallbacks.show()
        if self._compares:
            self._compares = False
            return reported(self._compared(leaves)).results
        return self.runner.run_flat(leaves)

    @without_ambient_mesh
    def compare(self, *args: Any, **kwargs: Any) -> Comparison:
        """Runs one step in which XLA computes every fragment, too, with the same inputs.

            print(compiled.compare(state, batch))  # true if no fragment differs beyond rounding

        It takes the time in which XLA compiles the step and runs it once.  No argument is consumed, and
        callbacks happen once: fragments that have them are not compared.
        """
        signature = self.runner.signature
        return self._compared(kept(signature.leaves(args, kwargs), signature.arguments.donated))

    def _compared(self, leaves: list[Any]) -> Comparison:
        """`compare` of flat arguments, which are consumed as a step's are."""
        meshes, partitioned = own_meshes(self.lowered.config.topology), self.lowered.partitioned
        comparison = FragmentComparison(self.executables, meshes, partitioned.compile_options)
        results = self.runner.run(leaves, [comparison], one_by_one=True)
        return comparison.report(partitioned.module, results)

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
            return "\n".join([f"// the step\n{self.measure.bounds.text()}", *tables])
        if what in _PICTURES:
            return one_picture({name: e.as_text(what) for name, e in self.executables.items()})
        executables = self.executables.values()
        return "\n\n".join(
            f"{titled(e.name, e.fragment.compiler_options)}\n{e.as_text(what)}" for e in executables
        )

    @property
    def programs(self) -> list[list[str]]:
        """The distinct programs that were compiled: for each the names of its fragments.

        Identical stages share their programs, each on its own mesh.  Fragments that only fill zeros have
        none.
        """
        return programs(self.lowered.fragments, self.lowered.config.topology)

    @property
    def input_shardings(self) -> PerLeaf:
        """`arguments.shardings`, by its name in `jax.stages.Compiled`."""
        return self.arguments.shardings

    @property
    def output_shardings(self) -> Any:
        """For each result its sharding on the mesh that computes it."""
        return self.runner.result_shardings

    @property
    def input_formats(self) -> Any:
        """`input_shardings` with layouts: elements are in the default order."""
        return jax.tree.map(format_of, self.in_avals, self.input_shardings)

    @property
    def output_formats(self) -> Any:
        """`output_shardings` with layouts: elements are in the default order."""
        return jax.tree.map(format_of, self._of.out_info, self.output_shardings)

    @property
    def out_info(self) -> Any:
        """The results as `jax.ShapeDtypeStruct`s with their shardings."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self._of.out_info,
            self.output_shardings,
        )

    def cost_analysis(self) -> dict[str, Any]:
        """`measure.work()`, by its name in `jax.stages.Compiled`."""
        return self.measure.work()

    def memory_analysis(self, *others: Compiled) -> MemoryTable:
        """`measure.memory()`, by its name in `jax.stages.Compiled`; of this step and others together."""
        return self.measure.memory(*(other.measure for other in others))

    def schedule(self, costs: ProgramCosts | Mapping[str, float] | None = None) -> Timeline:
        """The predicted timeline, as in `Lowered`, the scratch memory of fragments included."""
        return self.measure.schedule(costs)

    def synchronize(self) -> None:
        """Waits until every step so far is computed.

        Raises:
            FragmentError: a fragment failed on its device; names it.
        """
        self.runner.executor.synchronize()

    def close(self) -> None:
        """Ends the threads that run it."""
        self.runner.executor.close()

    # the names of 0.1, kept for this version

    @property
    def abstract_args(self) -> tuple[Any, ...]:
        """`arguments.abstract`."""
        return self.arguments.abstract

    @property
    def inputs_used(self) -> PerLeaf:
        """`arguments.used`."""
        return self.arguments.used

    def init(self, init_fn: Callable[..., Any], *args: Any, argnum: int = 0) -> Any:
        """`arguments.init(...)`."""
        return self.arguments.init(init_fn, *args, argnum=argnum)

    def load(self, reader: Reader, *, argnum: int = 0) -> Any:
        """`arguments.load(...)`."""
        return self.arguments.load(reader, argnum=argnum)

    def live_bytes(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, int]]:
        """`measure.live_bytes(...)`."""
        return self.measure.live_bytes(*args, **kwargs)

    def fragment_memory(self) -> dict[str, MemoryStats]:
        """`measure.fragment_memory()`."""
        return self.measure.fragment_memory()

    def costs(self, *args: Any, **kwargs: Any) -> tuple[Any, ProgramCosts]:
        """`measure.costs(...)`."""
        return self.measure.costs(*args, **kwargs)

    def timeline(self, *args: Any, **kwargs: Any) -> tuple[Any, Timeline]:
        """`measure.timeline(...)`."""
        return self.measure.timeline(*args, **kwargs)


_PICTURES = ("memory", "bars")
"""The texts of a fragment that are pictures."""
