"""From a lowered step to verified instruction streams: the whole MPMD pipeline in order."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from mpmd import ir
from mpmd.brief import brief
from mpmd.compile.cache import DiskCache
from mpmd.compile.options import CompileOptions, Dump
from mpmd.compile.passes import make_pass
from mpmd.config.compiler_options import put_options, warn_of_unused_options
from mpmd.config.config import Config, did_you_mean
from mpmd.config.topology import Topology
from mpmd.errors import ConfigError, IRError, PassError, collect
from mpmd.estimate.estimate import predicted_seconds
from mpmd.options import (
    OrderOptions,
    PassRunOptions,
    PipelineOptions,
    ShardingOptions,
    current_options,
    ordered_by,
    ways_to_reduce,
)
from mpmd.partition import pipeline
from mpmd.partition.name_checks import CalledNames, check_names, warn_of_idle_meshes, warn_of_vanished_names
from mpmd.partition.prepare import (
    erase_batch_marks,
    flat_prefix,
    for_arguments,
    mark_donated,
    mark_shardings,
    place_of_sharding,
)
from mpmd.partition.signature import Arguments
from mpmd.partition.tasks import mirrored_places, numbered, task_orders
from mpmd.passes.calls.carried_sums import SUFFIX
from mpmd.passes.export.programs import is_reduction
from mpmd.passes.verify import verify
from mpmd.runtime.channels.everywhere import mesh_of_each
from mpmd.runtime.program.graph import EntryGraph, read_entry
from mpmd.runtime.program.linearize import linearize
from mpmd.runtime.program.stream_memory import predict_memory
from mpmd.runtime.program.streams import Program
from mpmd.sharding.shardings import split_of
from mpmd.support import diagnostics
from mpmd.support.diagnostics import Diagnostic, Diagnostics, Severity
from mpmd.support.passes import Pass, Timing, Watch, name_of, run_pipeline, with_overrides
from mpmd.support.resources import garbage_kept
from mpmd.support.user_code import frames_of, readable
from mpmd.tracing.trace import to_module

_OVER_HLO = "hlo-"
"""Prefix of the names of HLO passes."""


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """A step partitioned over its meshes.

    Attributes:
        module: the exported module.
        graph: its entry function as plain data.
        program: the streams.
        argument_paths: pytree path of each flat argument.
        backend: name of the compile backend in the options.
        compile_options: how the options want the fragments to be compiled.
        compare: whether they want the first call to be compared with XLA.
        diagnostics: warnings and remarks of all passes.
        seconds: how long each phase took.
        pass_seconds: name of each pass with its options, and how long it took, in order.
    """

    module: ir.Module
    graph: EntryGraph
    program: Program
    argument_paths: list[str]
    backend: str
    compile_options: CompileOptions
    compare: bool
    diagnostics: Diagnostics
    seconds: dict[str, float] = dataclasses.field(repr=False)
    pass_seconds: list[tuple[str, float]] = dataclasses.field(repr=False)

    __repr__ = brief

    @property
    def warnings(self) -> list[str]:
        """The warnings of the passes, the schedule and the checks, each once."""
        return list(dict.fromkeys(_for_people(d) for d in self.diagnostics.of(Severity.WARNING)))

    @property
    def notices(self) -> list[str]:
        return [_for_people(d) for d in self.diagnostics.of(Severity.NOTICE)]


def _for_people(diagnostic: Diagnostic) -> str:
    """A finding, after the file and line that it is about, if they are known."""
    frames = [] if diagnostic.location is None else frames_of(diagnostic.location)
    message = _in_words(diagnostic.message)
    return f"{frames[0]}: {message}" if frames else message


def _in_words(message: str) -> str:
    """A report of a pass without the notation of the IR; second copies of names are called so."""
    return _SECOND_COPY.sub(r'"\1, second copy"', readable(message))


_SECOND_COPY = re.compile(rf'"([^"\n]+){SUFFIX}"')


class LoweringObserver(Protocol):
    """Callbacks of the pipeline while a step is lowered."""

    def begins(self, module: ir.Module) -> None:
        """Called with the module before the first pipeline."""

    def phase_begins(self, phase: str, steps: list[pipeline.Step]) -> None:
        """Called before a pipeline, with its steps."""

    def pass_ended(self, pass_: Pass, module: ir.Module, changed: bool, seconds: float) -> None:
        """Called after a pass; not after one that found the program wrong."""


def _folder(name: str) -> Path:
    """A folder for files; created if it does not exist.

    Raises:
        ConfigError: it cannot be made.
    """
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"dump_to is {name!r}, which cannot be created: {error}") from error
    return path


class _Phases:
    """Runs pipelines one after the other and times them."""

    def __init__(self, module: ir.Module, options: PassRunOptions, observer: LoweringObserver | None) -> None:
        self.module = module
        self.overrides = tuple(e for e in options.pass_options if not e.startswith(_OVER_HLO))
        self.dump_to = _folder(options.dump_to) if options.dump_to else None
        self.watch = Watch(
            verify=verify,
            text=ir.to_text,
            verify_each=options.verify_each,
            disabled=frozenset(options.disable_passes),
            dump_passes=options.dump_passes,
        )
        self.diagnostics = Diagnostics()
        self.timing = Timing()
        self.seconds: dict[str, float] = {}
        self.ran: set[str] = set()
        self.observer = observer

    def run(self, name: str, steps: list[pipeline.Step]) -> None:
        start = time.perf_counter()
        steps = [dataclasses.replace(s, pass_=with_overrides(s.pass_, self.overrides)) for s in steps]
        passes = [step.pass_ for step in steps]
        after = None
        if self.observer is not None:
            after = self.observer.pass_ended
            due = [step for step in steps if name_of(step.pass_) not in self.watch.disabled]
            self.observer.phase_begins(name, due)
        folder = self.dump_to / f"{len(self.seconds)}.{name}" if self.dump_to else None
        watch = dataclasses.replace(self.watch, dump_to=folder, after=after)
        try:
            self.diagnostics += run_pipeline(self.module, passes, watch, self.timing)
        except PassError as error:
            raise PassError(_in_words(str(error)), error.diagnostics) from None
        except IRError as error:
            raise IRError(
                f"mpmd made an invalid program of the step, in the phase {name!r}: this is a fault of mpmd\n"
                "  please report it with the step, or with the folder that the option dump_to writes"
            ) from error
        self.seconds[name] = time.perf_counter() - start
        self.ran |= {name_of(pass_) for pass_ in passes}

    def warn_of_unused_overrides(self) -> None:
        """Warns of options of passes that did not run: they had no effect."""
        with self.collecting():
            for entry in self.overrides:
                if entry.partition("{")[0] not in self.ran:
                    diagnostics.warning(
                        f"the option {entry} has no effect: with these options its pass does not run"
                    )

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        with diagnostics.collecting() as diagnosed:
            yield
        self.diagnostics += diagnosed


def partition(
    lowered: Any,
    config: Config,
    arguments: Arguments,
    argument_paths: list[str],
    out_tree: Any,
    called: CalledNames,
    observer: LoweringObserver | None = None,
    *,
    explicit: bool = False,
) -> Partitioned:
    """Takes a step that JAX lowered through the whole MPMD pipeline.

    Args:
        lowered: by JAX.
        config: the user's.
        arguments: of the call that it was traced for.
        argument_paths: pytree path of each flat argument.
        out_tree: the pytree of its results.
        called: names that were called while the step was traced; their computations may be dead code.
        observer: is called with the module before the first pass, and after each.
        explicit: whether it was traced with explicit axes.

    Raises:
        ConfigError: names do not fit the assignment, or shardings or meshes cannot be used.
        PassError: a pass found the program wrong.
        ProgramError: the streams break a rule of the runtime.
    """

    def of(config: Config) -> Partitioned:
        return _partition(lowered, config, arguments, argument_paths, out_tree, called, observer, explicit)

    with _ONE_AT_A_TIME, garbage_kept():
        return _within_memory(of, config)


def _within_memory(partitioned: Callable[[Config], Partitioned], config: Config) -> Partitioned:
    """The step with options that are `auto`: where memory is limited, the fastest way that fits."""
    step = partitioned(config)
    options = config.options if config.options is not None else current_options()
    limit, meshes = options.device_memory_bytes, config.topology
    if not limit or all(mesh.size == 1 for mesh in meshes.values()):
        return step
    most = _peak_of_a_device(step.program, meshes)
    if most <= limit:
        return step
    ways: list[tuple[bool, float, int, Partitioned, int, dict[str, Any]]] = [(True, most, 0, step, most, {})]
    for tried in _in_less_memory(options, step.module):
        other = partitioned(dataclasses.replace(config, options=dataclasses.replace(options, **tried)))
        peak = _peak_of_a_device(other.program, meshes)
        cost = peak if peak > limit else predicted_seconds(other.program, other.module, meshes)
        ways.append((peak > limit, cost, len(ways), other, peak, tried))
    *_, step, least, changed = min(ways, key=lambda way: way[:3])
    if changed:
        chosen = dataclasses.replace(options, **changed)
        said = " and ".join(f"{name}={getattr(chosen, name)}" for name in changed)
        step.diagnostics.append(
            Diagnostic(
                Severity.WARNING,
                f"{said}, as a device would hold {most:,} bytes otherwise, and device_memory_bytes is "
                f"{limit:,}; now it holds {least:,}, without the scratch memory of fragments",
            )
        )
    return step


def _in_less_memory(options: PipelineOptions, module: ir.Module) -> Iterator[dict[str, Any]]:
    """Settings of the options that are `auto`, with less memory than they have otherwise.

    Args:
        options: the user's.
        module: the step as it is exported with them.
    """
    gathers: list[dict[str, Any]] = [{}]
    if options.gather_weights == "auto":
        gathers.append({"gather_weights": "per_use"})
    reductions: list[dict[str, Any]] = [{}]
    if options.reduce_gradients == "auto":
        reduced, split = _axes_of_reductions(module)
        if split and reduced - split:
            ways = {axis: "per_microbatch" if axis in split else "once" for axis in sorted(reduced)}
            reductions.append({"reduce_gradients": ways})
        reductions.append({"reduce_gradients": "per_microbatch"})
    for reduction, gather in itertools.product(reductions, gathers):
        if gather or reduction:
            yield gather | reduction


def _axes_of_reductions(module: ir.Module) -> tuple[frozenset[str], frozenset[str]]:
    """The axes over which deferred values are reduced; the ones among them that split the results."""
    reduced, split = set[str](), set[str]()
    for f in ir.funcs(module):
        for call in ir.ops(f, ir.FragmentCall) if f.is_mpmd else ():
            if not is_reduction(call.callee_name):
                continue
            terms = {axis for v in call.operands for axis in (*split_of(v.type.sharding, 1)[:1], ())[0]}
            parts = {axis for v in call.results for dim in split_of(v.type.sharding, 0) for axis in dim}
            reduced |= terms
            split |= terms & parts
    return frozenset(reduced), frozenset(split)


def _peak_of_a_device(program: Program, meshes: Mapping[str, Any]) -> int:
    """The predicted peak of arrays on the device that holds most."""
    return max((m.peak_bytes // meshes[m.mesh].size for m in predict_memory(program)), default=0)


_ONE_AT_A_TIME = threading.RLock()  # passes share the context, erased ops, the count of edits


def _partition(
    lowered: Any,
    config: Config,
    arguments: Arguments,
    argument_paths: list[str],
    out_tree: Any,
    called: CalledNames,
    observer: LoweringObserver | None,
    explicit: bool,
) -> Partitioned:
    start = time.perf_counter()
    options = _options(config, arguments, out_tree)
    pipeline.check_options(options)
    compiling = compile_options(options)
    module = to_module(lowered, config.topology.ir(), explicit=explicit)
    phases = _Phases(module, options, observer)
    with phases.collecting():
        named = set(check_names(module, config, called))
    _prepare(module, config, arguments, argument_paths, out_tree)
    put_options(module, config.topology, config.compiler_options, options.mirrored_names)
    if observer is not None:
        observer.begins(module)
    phases.seconds["trace"] = time.perf_counter() - start
    phases.run("import", pipeline.import_pipeline(options))
    start = time.perf_counter()
    with phases.collecting():
        warn_of_vanished_names(module, named, config)
        orders = None if ordered_by(options) else task_orders(module, config)
    phases.seconds["order"] = time.perf_counter() - start
    phases.run("optimize", pipeline.optimize_pipeline(options, orders))
    phases.run("sharding", pipeline.sharding_propagation_pipeline(options))
    phases.run("export", pipeline.export_pipeline(options, orders))
    phases.warn_of_unused_overrides()
    start = time.perf_counter()
    graph = read_entry(module, argument_paths, _result_paths(out_tree), arguments.donated)
    everywhere = _positions(config.replicate, out_tree)
    program = linearize(graph, processes=config.topology.processes, replicated=everywhere)
    with phases.collecting():
        warn_of_idle_meshes(program, config)
        warn_of_unused_options(module, config.compiler_options)
    phases.seconds["linearize"] = time.perf_counter() - start
    return Partitioned(
        module, graph, program, argument_paths, options.backend, compiling, options.compare != "",
        phases.diagnostics, phases.seconds, phases.timing.seconds,
    )  # fmt: skip


def compile_options(options: PipelineOptions) -> CompileOptions:
    """The compile options of fragments, from the pass options that are set.

    Raises:
        ConfigError: there is no such pass over HLO, or it has no such option; all problems at once.
    """
    problems = []
    for entry in (*options.disable_passes, *options.pass_options):
        if entry.startswith(_OVER_HLO):
            name, _, given = entry.partition("{")
            try:
                make_pass(name, given.removesuffix("}"))
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        raise collect(ConfigError, problems, "the options of the compiler cannot be used:")
    overrides = Path(options.kernel_overrides) if options.kernel_overrides else None
    dump = Dump(Path(options.dump_to) / "fragments", options.dump_passes) if options.dump_to else None
    folder = options.compile_cache_dir or _folder_in_jax_cache()
    cache = DiskCache(Path(folder), options.compile_cache_bytes) if folder not in ("", "off") else None
    return CompileOptions(
        dump=dump,
        cache=cache,
        attention_stitching=options.attention_stitching,
        float_jitter=options.float_jitter,
        kernel_overrides=overrides,
        memory_bytes=options.device_memory_bytes,
        command_buffers=options.command_buffers,
        pass_options=tuple(e for e in options.pass_options if e.startswith(_OVER_HLO)),
        disable_passes=tuple(n for n in options.disable_passes if n.startswith(_OVER_HLO)),
    )


def _folder_in_jax_cache() -> str:
    """A folder in JAX's own compilation cache; "" if JAX has none, or not on this machine."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or not jax.config.jax_enable_compilation_cache or "://" in folder:
        return ""
    return str(Path(folder) / "mpmd")


def _options(config: Config, arguments: Arguments, out_tree: Any) -> PipelineOptions:
    """The options of the configuration, or the flags', with the configuration's own fields."""
    options = config.options if config.options is not None else current_options()
    _check_one_order(config, options)
    _check_axes(config, options)
    backend = config.backend or options.backend
    platforms = {mesh.devices.flat[0].platform for mesh in config.topology.values()}
    given = flat_prefix(for_arguments(config.in_shardings), arguments.tree, "in_shardings")
    results = flat_prefix(config.out_shardings, out_tree, "out_shardings")
    mirrored, assignment = mirrored_places(config), _text(config.assignment)
    if mirrored:
        copies = {f"{name}{SUFFIX}": place for name, place in mirrored.items()}
        assignment = _text({**numbered(config), **copies})
    return dataclasses.replace(
        options,
        name_to_mesh_assignment=assignment,
        mirrored_names=tuple(mirrored),
        input_assignment=_meshes(
            for_arguments(config.input_meshes), given, arguments.tree, config.topology, "input_meshes"
        ),
        output_assignment=_meshes(config.output_meshes, results, out_tree, config.topology, "output_meshes"),
        copy_scalar_results=mesh_of_each(config.topology.processes),
        constraints=tuple(f"{i}:{o}" for i, o in config.constraints),
        backend=backend,
        attention_stitching=options.attention_stitching if stitches_attention(backend, platforms) else "off",
        split_bwd_fragments=options.split_bwd_fragments or config.pipeline_schedule.splits_backward,
        fail_on_impossible_order=options.fail_on_impossible_order
        or not isinstance(config.schedule, str | None),
    )


def stitches_attention(backend: str, platforms: Collection[str]) -> bool:
    """Whether fragments are compiled by a target of ours, which stitches attention.

    Args:
        backend: the configured one.
        platforms: of the devices of all meshes.
    """
    ours = {"cpu": backend != "xla", "gpu": backend == "native"}
    return all(ours.get(platform, False) for platform in platforms)


def _check_one_order(config: Config, options: OrderOptions) -> None:
    """Rejects `schedule=` together with an option that already fixes the order.

    Raises:
        ConfigError: both are given.
    """
    option = ordered_by(options)
    if option and config.schedule is not None:
        raise ConfigError(
            f"the schedule {config.pipeline_schedule.name!r} and the option {option} both say in which order "
            "tasks run\n  leave one of them out"
        )


def _check_axes(config: Config, options: ShardingOptions) -> None:
    """Refuses an option that names an axis of no mesh.

    Raises:
        ConfigError: there is one.
    """
    known = dict.fromkeys(axis for mesh in config.topology.values() for axis in mesh.shape)
    for axis in ways_to_reduce(options):
        if axis not in known:
            raise ConfigError(
                f"reduce_gradients names the axis {axis!r}, which no mesh has{did_you_mean(axis, known)}"
            )


def _text(assignment: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{name}@{place}" for name, place in assignment.items())


def _meshes(
    prefix: Any, shardings: Sequence[Any], tree: Any, topology: Topology, what: str
) -> tuple[str, ...]:
    """Assignments of flat arguments or results, such as `2@m2#pinned_host`.

    Args:
        prefix: the user's meshes.
        shardings: the user's sharding of each leaf; one over the devices of a mesh names that mesh.
        tree: of the arguments or results.
        topology: the meshes.
        what: the name of the option with the prefix.

    Raises:
        ConfigError: an unknown mesh or memory, or two meshes for one leaf.
    """
    places = {}
    for i, (mesh, sharding) in enumerate(zip(flat_prefix(prefix, tree, what), shardings, strict=True)):
        own = place_of_sharding(sharding, topology)
        if mesh is None:
            places[i] = own
            continue
        name, _, memory = mesh.partition("#") if isinstance(mesh, str) else (mesh, "", "")
        if not isinstance(name, str) or name not in topology:
            raise ConfigError(f"{what} names an unknown mesh {mesh!r}; there are {', '.join(topology)}")
        if memory not in ("", "device", "pinned_host"):
            raise ConfigError(f"{what} names an unknown memory {memory!r}; use 'pinned_host'")
        if own is not None and own.partition("#")[0] != name:
            raise ConfigError(
                f"{what} names the mesh {name!r}, but {sharding} is over the devices of {own!r}"
            )
        places[i] = mesh
    return tuple(f"{i}@{mesh}" for i, mesh in places.items() if mesh is not None)


def _prepare(
    module: ir.Module, config: Config, arguments: Arguments, argument_paths: list[str], out_tree: Any
) -> None:
    inputs = flat_prefix(for_arguments(config.in_shardings), arguments.tree, "in_shardings")
    results = flat_prefix(config.out_shardings, out_tree, "out_shardings")
    with ir.context(), ir.Location.unknown():
        mark_donated(module, arguments.donated)
        paths = argument_paths, _result_paths(out_tree)
        mark_shardings(module, inputs, results, config.topology.axes, paths)
        erase_batch_marks(module)


def _positions(replicate: Any, out_tree: Any) -> frozenset[int]:
    """Flat positions of the results that `replicate` names.

    Raises:
        ConfigError: it is not a prefix of the results, or has other values than True, False and None.
    """
    flat = flat_prefix(replicate, out_tree, "replicate")
    wrong = [value for value in flat if value is not None and not isinstance(value, bool)]
    if wrong:
        raise ConfigError(f"replicate has {wrong[0]!r}; it must be True, False or None for each result")
    return frozenset(k for k, value in enumerate(flat) if value)


def _result_paths(out_tree: Any) -> list[str]:
    full = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    return [f"result{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(full)]
