"""Configuration of `mpmd.jit`: where names are placed, and how the pipeline runs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax

from mpmd.brief import card, few, in_one_line
from mpmd.config.described import device_of_meshes
from mpmd.config.topology import Topology
from mpmd.errors import ConfigError, NotPicklableError, close_to, collect
from mpmd.options import BACKENDS, PipelineOptions
from mpmd.scheduling.catalogue import PipelineSchedule, get_schedule
from mpmd.support.option_texts import CompilerOptions, NamePlacement, OptionsRow
from mpmd.tracing.stages.select.automatic import AutomaticSelector, by_cost
from mpmd.tracing.stages.select.selectors import Selector

PlaceLike = str | tuple[str, int]
"""How a user writes a `NamePlacement`: a mesh, `"m0"` or `"m0#pinned_host"`, or with a stage, `("m0", 0)`."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Made by `make_config`, which documents the fields."""

    topology: Topology
    assignment: dict[str, NamePlacement]
    schedule: Any = None
    input_meshes: Any = None
    output_meshes: Any = None
    constraints: tuple[tuple[int, int], ...] = ()
    in_shardings: Any = None
    out_shardings: Any = None
    backend: str | None = None
    options: PipelineOptions | None = None
    stages: Selector | None = None
    replicate: Any = None
    compiler_options: tuple[OptionsRow, ...] = ()

    def __repr__(self) -> str:
        """The fields that were given."""
        others = [
            field for field in dataclasses.fields(self)[2:] if getattr(self, field.name) != field.default
        ]
        rows = [
            ("topology", in_one_line(self.topology)),
            ("assignment", few(f"{name} on {place}" for name, place in self.assignment.items())),
            *((field.name, in_one_line(getattr(self, field.name))) for field in others),
        ]
        return card("Config", rows)

    def __copy__(self) -> Config:
        return self  # nothing in it changes

    def __deepcopy__(self, memo: Any) -> Config:
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Its fields.

        Raises:
            NotPicklableError: shardings name devices.
        """
        for name in ("in_shardings", "out_shardings"):
            shardings = jax.tree.leaves(getattr(self, name), is_leaf=lambda leaf: hasattr(leaf, "device_set"))
            if any(hasattr(leaf, "device_set") for leaf in shardings):
                raise NotPicklableError(
                    f"{name} of a configuration names devices, which another process does not have\n  give "
                    "jax.sharding.PartitionSpec over the axes of the meshes, such as PartitionSpec('data')"
                )
        return dict(self.__dict__)

    @property
    def pipeline_schedule(self) -> PipelineSchedule:
        """The schedule: the user's, or 1F1B; interleaved, if stages are given that come to a mesh again."""
        if self.schedule is not None:
            return get_schedule(self.schedule)
        over = () if self.stages is None else [mesh for mesh, _ in itertools.groupby(self.stages.over)]
        return get_schedule("1f1b" if len(set(over)) == len(over) else "interleaved_1f1b")


def make_config(
    topology: Topology,
    assignment: Mapping[str, PlaceLike] | None = None,
    *,
    stages: Selector | str | int | None = None,
    schedule: Any = None,
    input_meshes: Any = None,
    output_meshes: Any = None,
    constraints: tuple[tuple[int, int], ...] = (),
    in_shardings: Any = None,
    out_shardings: Any = None,
    backend: str | None = None,
    options: PipelineOptions | None = None,
    replicate: Any = None,
    compiler_options: CompilerOptions | None = None,
) -> Config:
    """Says where the named parts of a step run.

    Args:
        topology: the meshes, in pipeline order.
        assignment: for each named computation or tensor its mesh, such as `"m1"`, `("m1", 1)` with a
            pipeline stage, or `"m1#pinned_host"` for a tensor in host memory.
        stages: stages of a loss without names: `"auto"` or a number, found by cost as `mpmd.by_cost` does,
            or made by `mpmd.by_parameters`, `mpmd.split` or `mpmd.by_cost`; the assignment is then only for
            other names, and usually left out.  Names in the loss that it lacks mean nothing.
        schedule: name of a pipeline schedule, or a schedule of your own; None for `"1f1b"` where there are
            microbatches.
        input_meshes: pytree prefix of the arguments: mesh names, or None where inference decides.
        output_meshes: likewise for the results.
        constraints: pairs (flat argument, flat result) that must live on one mesh.
        in_shardings: pytree prefix of the arguments: `PartitionSpec`s over the axes of the meshes, or
            `NamedSharding`s.  An axis means the same on all meshes that have it, whatever its size there; the
            others do not split.  One over the devices of a mesh of the topology also puts the argument there.
        out_shardings: likewise for the results.
        backend: `"native"` (XLA compiles what it cannot, counted and warned of), `"xla"`, `"auto"`
            (native on CPUs, XLA elsewhere), or `"reference"` (what `"native"` compiles, run by NumPy, slowly,
            on any platform); None for the options' one.
        options: pass options; None for the flags', read when a function is first traced.
        replicate: pytree prefix of the results: True for those that every process gets, where there are
            several.  Scalars are in every process anyway.
        compiler_options: options of XLA, as `jax.jit` takes them, for what it compiles of the fragments:
            `{"xla_gpu_enable_triton_gemm": False}`.  Under the name of a mesh or of a computation are options
            of its fragments: `{"m1": {"optimization_level": "O2"}}`; a name's count before a mesh's, and a
            mesh's before general ones.

    Raises:
        ConfigError: an unknown mesh or memory, a bad stage, or an option that XLA does not take; all problems
            at once.
        ScheduleError: an unknown schedule.
    """
    assignment = {} if assignment is None and stages is not None else assignment
    stages = _from_shorthand(stages)
    problems = _kind_problems(topology, assignment, stages, backend, options, constraints)
    if problems or assignment is None:
        raise collect(ConfigError, problems, "the configuration cannot be used:")
    if stages is not None:
        stages = _on_topology(stages, topology)
        problems += _moved_stages(stages, assignment, topology)
        assignment = {**stages.places, **assignment}
    placed = _placements(assignment, topology, problems)
    rows = _option_rows(compiler_options, topology, placed, problems)
    if schedule is not None:
        get_schedule(schedule)
    if problems:
        raise collect(ConfigError, problems, "the configuration cannot be used:")
    return Config(
        topology, placed, schedule, input_meshes, output_meshes, tuple(constraints), in_shardings,
        out_shardings, backend, options, stages, replicate, rows,
    )  # fmt: skip


def _placements(
    assignment: Mapping[str, PlaceLike], topology: Topology, problems: list[str]
) -> dict[str, NamePlacement]:
    places = {name: _placement(name, place, topology, problems) for name, place in assignment.items()}
    placed = {name: place for name, place in places.items() if place is not None}
    if not assignment:
        problems.append(_NOTHING_PLACED)
    problems += _stage_problems(placed)
    return placed


def _moved_stages(stages: Selector, given: Mapping[str, PlaceLike], topology: Topology) -> list[str]:
    """Stages that an assignment gives other places than the stages are on."""
    problems = []
    for name in filter(given.__contains__, stages.places):
        here, there = (_placement(name, places[name], topology, []) for places in (given, stages.places))
        if here and there and here != there:
            problems.append(
                f"{name!r} is assigned to {here}, but it is a stage of {stages}, on {there}\n  over= of the "
                f"stages chooses their meshes; leave {name!r} out if it is a name of the model"
            )
    return problems


def _option_rows(
    given: Any, topology: Topology, placed: Mapping[str, NamePlacement], problems: list[str]
) -> tuple[OptionsRow, ...]:
    if given is None:
        return ()
    from mpmd.config.compiler_options import read_rows  # brings the compiler

    rows, refused = read_rows(given, topology, {name: place.mesh for name, place in placed.items()})
    problems += refused
    return rows


def with_stages(config: Config, stages: Selector) -> Config:
    """The configuration with other stages, whose meshes are given."""
    own = set() if config.stages is None else set(config.stages.names)
    problems: list[str] = []
    places = {
        name: _placement(name, place, config.topology, problems) for name, place in stages.places.items()
    }
    others = {name: place for name, place in config.assignment.items() if name not in own}
    placed = {name: place for name, place in places.items() if place is not None}
    if problems:
        raise collect(ConfigError, problems, "the stages cannot be used:")
    return dataclasses.replace(config, stages=stages, assignment={**placed, **others})


_NOTHING_PLACED = (
    "nothing is placed on a mesh: give stages='auto', which divides the loss by cost, or name computations "
    "with mpmd.named_computation and assign the names: {'encode': 'm0', 'decode': 'm1'}"
)


def with_compiler_options(config: Config, given: CompilerOptions) -> Config:
    """The configuration with options of XLA, as `make_config` takes them.

    Raises:
        ConfigError: XLA does not take one of them.
    """
    problems: list[str] = []
    rows = _option_rows(given, config.topology, config.assignment, problems)
    if problems:
        raise collect(ConfigError, problems, "the compiler options cannot be used:")
    return dataclasses.replace(config, compiler_options=rows)


def _kind_problems(
    topology: Any, assignment: Any, stages: Any, backend: Any, options: Any, constraints: Any
) -> list[str]:
    problems = []
    if not isinstance(topology, Topology):
        problems.append(f"the topology is {topology!r}; make one with mpmd.make_topology")
    if assignment is None:
        problems.append(_NOTHING_PLACED)
    elif not isinstance(assignment, Mapping):
        problems.append(f"the assignment is {assignment!r}; it must map names to meshes: {{'encode': 'm0'}}")
    if stages is not None and not isinstance(stages, Selector):
        problems.append(
            f"the stages are {stages!r}; use 'auto', a number, mpmd.by_cost, mpmd.by_parameters or mpmd.split"
        )
    if backend is not None and backend not in BACKENDS:
        problems.append(f"backend is {backend!r}; there are {', '.join(map(repr, BACKENDS))}")
    if options is not None and not isinstance(options, PipelineOptions):
        problems.append(f"the options are {options!r}; they must be mpmd.PipelineOptions, or None")
    pairs = constraints if isinstance(constraints, (tuple, list)) else [constraints]
    problems += [
        f"{pair!r} is not a constraint; it must be a pair of numbers: (flat argument, flat result)"
        for pair in pairs
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(n, int) for n in pair))
    ]
    return problems


def _placement(name: Any, place: Any, topology: Topology, problems: list[str]) -> NamePlacement | None:
    if not isinstance(name, str) or not name:
        problems.append(f"{name!r} is assigned to {place!r}, but it is not a name")
        return None
    if "," in name:
        problems.append(f"{name!r} is assigned to {place!r}: a name has no commas, which separate names")
        return None
    mesh, stage = (*place, None)[:2] if isinstance(place, (tuple, list)) and place else (place, None)
    if not isinstance(mesh, str) or (isinstance(place, (tuple, list)) and len(place) > 2):
        problems.append(
            f"{name!r} is assigned to {place!r}; write a mesh, 'm0', or a mesh and a stage, ('m0', 0)"
        )
        return None
    mesh, _, memory = mesh.partition("#")
    if mesh not in topology:
        problems.append(f"{name!r} is assigned to an unknown mesh {mesh!r}{did_you_mean(mesh, topology)}")
        return None
    if memory not in ("", "device", "pinned_host"):
        problems.append(f"{name!r} is assigned to an unknown memory {memory!r}; use 'pinned_host'")
    if stage is not None and (isinstance(stage, bool) or not isinstance(stage, int) or stage < 0):
        problems.append(f"{name!r} has stage {stage!r}; a stage is a whole number from 0")
    return NamePlacement(mesh, stage, memory or None)


def _stage_problems(placed: dict[str, NamePlacement]) -> list[str]:
    """A stage lives on one mesh; either all computations on a schedule have one, or none."""
    meshes: dict[int, dict[str, str]] = {}
    for name, place in placed.items():
        if place.stage is not None:
            meshes.setdefault(place.stage, {})[place.mesh] = name
    return [
        f"stage {stage} is assigned to several meshes: "
        + ", ".join(f"{name!r} to {mesh!r}" for mesh, name in sorted(names.items()))
        for stage, names in sorted(meshes.items())
        if len(names) > 1
    ]


def did_you_mean(word: str, known: Any) -> str:
    """The end of a sentence about an unknown word: a known one that looks like it, or else all of them."""
    return close_to(word, known) or f"; there are {', '.join(map(repr, known))}"


def _from_shorthand(stages: Any) -> Any:
    """The stages of a configuration: `"auto"` and a number are stages by cost.

    Raises:
        ConfigError: another text, or a number below 1.
    """
    if isinstance(stages, bool):
        return stages
    if isinstance(stages, int):
        return by_cost(stages)
    if isinstance(stages, str):
        if stages != "auto":
            raise ConfigError(
                f"stages is {stages!r}; there is 'auto'\n  for a pattern use mpmd.by_parameters({stages!r}) "
                f"or mpmd.split({stages!r})"
            )
        return by_cost()
    return stages


def _on_topology(stages: Any, topology: Topology) -> Selector:
    """The stages on the meshes of a topology.

    Raises:
        ConfigError: meshes and stages do not fit.
    """
    placed: Selector = stages.on(list(topology))
    if not isinstance(placed, AutomaticSelector) or any(mesh not in topology for mesh in placed.over):
        return placed  # the assignment of an unknown mesh is reported with the others
    sizes = {name: mesh.size for name, mesh in topology.items()}
    return placed.on_devices(sizes, device_of_meshes(topology))
