"""From a lowered step to verified instruction streams: the whole MPMD pipeline in order."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax

from mpmd import ir, pipeline
from mpmd.api.config import Config
from mpmd.api.prepare import check_meshes, check_names, flat_prefix, forget_cuts, mark_donated, mark_shardings
from mpmd.api.signature import Arguments
from mpmd.api.tasks import task_orders
from mpmd.compile.dump import Dump
from mpmd.errors import ConfigError
from mpmd.options import PipelineOptions, current_options
from mpmd.runtime.entry import read_entry
from mpmd.runtime.graph import EntryGraph
from mpmd.runtime.linearize import linearize
from mpmd.runtime.program import Program
from mpmd.support import diagnostics
from mpmd.support.diagnostics import Diagnostic, Diagnostics, Severity
from mpmd.support.passes import with_overrides
from mpmd.support.pipeline import Timing, Watch, run_pipeline
from mpmd.tracing.trace import to_module


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """A step partitioned over its meshes.

    Attributes:
        module: the exported module.
        graph: its entry function as plain data.
        program: the streams.
        argument_paths: what the user calls each flat argument.
        backend: name of the compile backend that the options ask for.
        dump: where the options want compilation to write what it makes of the fragments.
        diagnostics: warnings and notices of all passes.
        seconds: how long each phase took.
    """

    module: ir.Module
    graph: EntryGraph
    program: Program
    argument_paths: list[str]
    backend: str
    dump: Dump | None
    diagnostics: Diagnostics
    seconds: dict[str, float]

    @property
    def warnings(self) -> list[str]:
        """What the passes warn about."""
        return [_for_people(d) for d in self.diagnostics.of(Severity.WARNING)]

    @property
    def notices(self) -> list[str]:
        """What the passes noted beside that."""
        return [_for_people(d) for d in self.diagnostics.of(Severity.NOTICE)]


def _for_people(diagnostic: Diagnostic) -> str:
    """A finding behind the file and line that it is about, if they are known."""
    frames = [] if diagnostic.location is None else ir.frames_of(diagnostic.location)
    return f"{frames[0]}: {diagnostic.message}" if frames else diagnostic.message


class _Phases:
    """Runs pipelines one after the other and times them."""

    def __init__(self, module: ir.Module, options: PipelineOptions) -> None:
        self.module = module
        self.overrides = options.pass_options
        self.dump_to = Path(options.dump_to) if options.dump_to else None
        self.watch = Watch(
            verify=ir.verify,
            text=ir.to_text,
            verify_each=options.verify_each,
            disabled=frozenset(options.disable_passes),
            dump_passes=options.dump_passes,
        )
        self.diagnostics = Diagnostics()
        self.timing = Timing()
        self.seconds: dict[str, float] = {}

    def run(self, name: str, steps: list[pipeline.Step]) -> None:
        """Runs the passes of one phase."""
        start = time.perf_counter()
        passes = [with_overrides(step.pass_, self.overrides) for step in steps]
        folder = self.dump_to / f"{len(self.seconds)}.{name}" if self.dump_to else None
        watch = dataclasses.replace(self.watch, dump_to=folder)
        self.diagnostics += run_pipeline(self.module, passes, watch, self.timing)
        self.seconds[name] = time.perf_counter() - start


def partition(
    lowered: Any,
    config: Config,
    arguments: Arguments,
    argument_paths: list[str],
    out_tree: Any,
    names: Collection[str] = (),
) -> Partitioned:
    """Takes a step that JAX lowered through the whole MPMD pipeline.

    Args:
        lowered: by JAX.
        config: the user's.
        arguments: of the call that it was traced for.
        argument_paths: what the user calls each flat argument.
        out_tree: the pytree of its results.
        names: names that the step was seen to call; what they name may be dead and gone.

    Raises:
        ConfigError: names do not fit the assignment, or shardings or meshes cannot be used.
        PassError: a pass found the program wrong.
        ProgramError: the streams break a rule of the runtime.
    """
    start = time.perf_counter()
    options = _options(config, arguments, out_tree)
    module = to_module(lowered, config.topology.ir())
    check_names(module, config, names)
    if not options.heterogeneous_meshes:
        check_meshes(module, config)
    _prepare(module, config, arguments, out_tree)
    phases = _Phases(module, options)
    phases.seconds["trace"] = time.perf_counter() - start
    phases.run("import", pipeline.import_pipeline(options))
    with diagnostics.collecting() as found:
        orders = task_orders(module, config)
    phases.diagnostics += found
    phases.run("optimize", pipeline.optimize_pipeline(dataclasses.replace(options, task_orders=orders)))
    phases.run("sharding", pipeline.sharding_propagation_pipeline(options))
    phases.run("export", pipeline.export_pipeline(options))
    start = time.perf_counter()
    graph = read_entry(module, argument_paths, _result_paths(out_tree), arguments.donated)
    program = linearize(graph)
    phases.seconds["linearize"] = time.perf_counter() - start
    dump = Dump(Path(options.dump_to) / "fragments", options.dump_passes) if options.dump_to else None
    return Partitioned(
        module, graph, program, argument_paths, options.backend, dump, phases.diagnostics, phases.seconds
    )


def _options(config: Config, arguments: Arguments, out_tree: Any) -> PipelineOptions:
    """The options of the configuration, or those of the flags, with what the configuration itself says."""
    options = config.options if config.options is not None else current_options()
    return dataclasses.replace(
        options,
        name_to_mesh_assignment=_text(config.assignment),
        input_assignment=_meshes(config.input_meshes, arguments.tree, config, "input_meshes", inputs=True),
        output_assignment=_meshes(config.output_meshes, out_tree, config, "output_meshes"),
        constraints=tuple(f"{i}:{o}" for i, o in config.constraints),
        fail_on_impossible_order=options.fail_on_impossible_order or not isinstance(config.schedule, str),
    )


def _text(assignment: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{name}@{place}" for name, place in assignment.items())


def _meshes(prefix: Any, tree: Any, config: Config, what: str, inputs: bool = False) -> tuple[str, ...]:
    """Assignments of flat arguments or results, such as `2@m2#pinned_host`."""
    flat = flat_prefix(_for_arguments(prefix) if inputs else prefix, tree, what)
    for mesh in flat:
        if mesh is not None and mesh.partition("#")[0] not in config.topology:
            raise ConfigError(
                f"{what} names an unknown mesh {mesh!r}; there are {', '.join(config.topology)}"
            )
    return tuple(f"{i}@{mesh}" for i, mesh in enumerate(flat) if mesh is not None)


def _for_arguments(prefix: Any) -> Any:
    """A prefix of the arguments as one of `(positional, keywords)`."""
    return (
        None if prefix is None else (tuple(prefix) if isinstance(prefix, (tuple, list)) else (prefix,), None)
    )


def _prepare(module: ir.Module, config: Config, arguments: Arguments, out_tree: Any) -> None:
    mesh = next(iter(config.topology.values()))
    inputs = flat_prefix(_for_arguments(config.in_shardings), arguments.tree, "in_shardings")
    results = flat_prefix(config.out_shardings, out_tree, "out_shardings")
    with ir.context(), ir.Location.unknown():
        mark_donated(module, arguments.donated)
        mark_shardings(module, inputs, results, dict(mesh.shape))
        forget_cuts(module)


def _result_paths(out_tree: Any) -> list[str]:
    full = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    return [f"result{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(full)]
