"""Stages by cost: no names and no patterns."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from mpmd.brief import brief, bytes_text, seconds_text
from mpmd.cost.device import HOST, Device
from mpmd.errors import ConfigError
from mpmd.tracing.stages.items import Checkpoint, FlatFunction
from mpmd.tracing.stages.select.chains import UnitChain, chain_of
from mpmd.tracing.stages.select.division import (
    MAX_IMBALANCE,
    Meshes,
    Segments,
    StageDivision,
    choose,
    divided_at,
)
from mpmd.tracing.stages.select.placement import place, size
from mpmd.tracing.stages.select.selectors import Selector
from mpmd.tracing.stages.select.stage_report import describe_stages
from mpmd.tracing.stages.stacked.row_views import unroll
from mpmd.tracing.stages.stacked.scan_ranges import Division, divide_by_stages, scans_over

_WHOLE_STAGE = -1
"""Number of the checkpoint around all items of a stage."""


FunctionKey: TypeAlias = tuple[str, int]
"""The name of a function, and how many operations it has."""

MeasuredRanges: TypeAlias = tuple[tuple[FunctionKey, tuple[tuple[int, float], ...]], ...]


@dataclasses.dataclass(frozen=True)
class AutomaticSelector(Selector):
    """Stages by cost; made by `by_cost`.

    Attributes:
        count: how many stages; None for one on each mesh.
        devices: of the mesh of each stage, which share its work.
        device: one of them.
        memory: bytes that a device may hold; None for no limit.
        refine: whether fragments are measured, and the stages chosen again by what they took.
        rematerialise: whether each stage is under a checkpoint.
        measured: for each function, by its key: (end, factor) of ranges of units, which are measured seconds
            in units of the estimate.
        starts: the first units of all stages but the first, if they are chosen already.
        found: the same for each function, by its key and its number of units, as another trace chose them.
    """

    count: int | None = None
    devices: tuple[int, ...] = ()
    device: Device = HOST
    memory: int | None = None
    refine: bool = False
    rematerialise: bool = False
    measured: MeasuredRanges = ()
    starts: tuple[int, ...] = ()
    found: tuple[tuple[FunctionKey, int, tuple[int, ...]], ...] = ()

    __repr__ = brief

    def on(self, meshes: Sequence[str]) -> AutomaticSelector:
        """The same with a mesh for each stage: the meshes in order, again and again.

        Raises:
            ConfigError: a mesh would have no stage.
        """
        if self.over:
            return self
        count = len(meshes) if self.count is None else self.count
        if count < len(meshes):
            raise ConfigError(
                f"{self} is {count} stage{'s' * (count != 1)} for {len(meshes)} meshes: "
                f"{', '.join(meshes[count:])} would have none\n  use at least as many stages as meshes, "
                "or say with over= which meshes have some"
            )
        return dataclasses.replace(self, over=tuple(meshes[s % len(meshes)] for s in range(count)))

    def on_devices(self, sizes: Mapping[str, int], device: Device) -> AutomaticSelector:
        """The same with the devices of each stage, after `on`."""
        return dataclasses.replace(self, devices=tuple(sizes[mesh] for mesh in self.over), device=device)

    @property
    def meshes(self) -> Meshes:
        """The meshes of the stages, for the choice of the division."""
        devices = self.devices or (1,) * len(self.over)
        wire = 2 / self.device.link_bandwidth  # the value, and its gradient back
        return Meshes(devices, wire, self.memory)

    def __str__(self) -> str:
        return f"mpmd.by_cost({'' if self.count is None else self.count})"


def by_cost(
    stages: int | None = None,
    *,
    over: Sequence[str] = (),
    memory: int | None = None,
    refine: bool = False,
    rematerialise: bool = False,
) -> AutomaticSelector:
    """Stages that are found: the model needs no names, and no patterns are given.

        mpmd.make_config(topology, stages="auto")             # or a number of stages
        mpmd.make_config(topology, stages=mpmd.by_cost(4, refine=True))

    The loss is traced before it is differentiated.  Candidates for the ends of stages are the places where
    hardly more bytes cross than anywhere nearby; among them, the work of the heaviest stage is as small as
    possible.  The work is estimated from arithmetic and bytes for the devices of the meshes, and is taken to
    be divided over the devices of a mesh.  Scans over stacked layers are divided between iterations, as by
    `mpmd.split`; each mesh then has only its own part of the stack.  Loops whose iterations share weights are
    divided, too, if the stages are not balanced otherwise.  `lowered.as_text("stages")` says why each stage
    ends where it does, and the cost of the next best place.

    Args:
        stages: how many; by default one for each mesh.  More stages than meshes take turns on the meshes.
        over: the mesh of each stage, in order, instead of a number.
        memory: bytes that each device may hold, estimated: parameters with gradients and two moments, and
            values kept for the backward.
        refine: run the step once on zeros in more, smaller stages, time each fragment alone, and choose
            again by the measured seconds.  Compiles once more.
        rematerialise: put each stage under `jax.checkpoint`.

    Raises:
        ConfigError: `stages` or `memory` is not a positive whole number; when the step is traced: there are
            fewer places than stages, or nothing fits the memory.
    """
    for name, value in (("stages", stages), ("memory", memory)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{name} is {value!r}; it must be a whole number from 1, or None")
    meshes = (over,) if isinstance(over, str) else tuple(over)
    if stages is not None and meshes and len(meshes) != stages:
        raise ConfigError(f"stages is {stages}, but over names {len(meshes)} meshes\n  give one of them")
    return AutomaticSelector(
        patterns=(), over=meshes, lengths=(), first=(), last=(), stacked=True, count=stages, memory=memory,
        refine=refine, rematerialise=rematerialise,
    )  # fmt: skip


def choose_by_cost(
    flat: FlatFunction, paths: Mapping[int, str], selector: AutomaticSelector, name: str
) -> tuple[DivisionChoice, Division, str]:
    """Gives the items of a function their stages.

    Args:
        flat: its items have no stages.
        paths: the path of each value that is a parameter.
        selector: with a mesh for each stage.
        name: of the function.

    Returns:
        The choice, how stacked parameters are divided, and the text of the stages.

    Raises:
        ConfigError: there are fewer places than stages, or nothing fits the memory.
    """
    choice = _choice(flat, list(paths), selector, (name, len(flat.items)))
    units = choice.units
    choice.parameters = {path: size(flat.avals[v]) for v, path in paths.items()}
    text = choice.explain(flat, paths)
    division = _assign(flat, units, choice.division, paths)
    place(flat, [*paths, *division.stage_of], division.stage_of, len(selector.over))
    if selector.rematerialise:
        for item in flat.items:
            if item.stage is not None:
                item.checkpoints = (Checkpoint(_WHOLE_STAGE, None, True), *item.checkpoints)
    return choice, division, f"{describe_stages(flat, paths, selector, name)}\n{text}"


def _choice(
    flat: FlatFunction, parameters: Sequence[int], selector: AutomaticSelector, key: FunctionKey
) -> DivisionChoice:
    """The division of a function; loops of loops are unrolled if its stages are not balanced otherwise."""
    measured = dict(selector.measured).get(key, ())
    # Starts and measured seconds are of units: as many as there were when they were found.
    known = {end for end, _ in measured[-1:]} | {count for of, count, _ in selector.found if of == key}
    while True:
        units = chain_of(flat, parameters, selector.device, measured)
        loops = units.nested_loops()
        is_last = not loops or bool(selector.starts) or len(units.chain) in known
        if is_last or (not known and len(units.chain) >= len(selector.over)):
            choice = DivisionChoice(units, selector, key)
            if is_last or not choice.imbalance():
                return choice
        for loop in loops:
            unroll(flat, loop)


class DivisionChoice:
    """The division of a chain for a selector, and its alternatives.

    Attributes:
        units: the chain.
        key: of the function.
        places: the candidates.
        division: the best one.
        parameters: path and bytes of each parameter.
    """

    __repr__ = brief

    def __init__(self, units: UnitChain, selector: AutomaticSelector, key: FunctionKey) -> None:
        self.units, self.selector, self.key = units, selector, key
        name = key[0]
        self.parameters: dict[str, int] = {}
        self.stages = len(selector.over)
        self.segments = Segments(units.chain, selector.meshes)
        count = len(units.chain)
        if count < self.stages:
            raise ConfigError(
                f"{name} cannot be divided into {self.stages} stages: it has {count} operation"
                f"{'s' * (count != 1)} that use parameters and data\n  use fewer stages"
            )
        divided, self.places = choose(self.segments, self.stages)
        starts = self._found() if selector.found else selector.starts
        if starts:
            divided = divided_at(self.segments, starts)
        if divided is None:
            raise ConfigError(self._too_large(name))
        self.division: StageDivision = divided

    def _found(self) -> tuple[int, ...]:
        """Where another trace of the function has divided it.

        Raises:
            ConfigError: it had other operations.
        """
        count = len(self.units.chain)
        for key, units, starts in self.selector.found:
            if (key, units) == (self.key, count):
                return starts
        known = ", ".join(f"{key[0]} with {key[1]} operations" for key, _, _ in self.selector.found)
        raise ConfigError(
            f"{self.key[0]} has {self.key[1]} operations; the stages were found for {known}\n  the stages of "
            "a lowered step are for the same loss with other lengths; use stages='auto' for another one"
        )

    def _too_large(self, name: str) -> str:
        """The message if nothing fits the memory."""
        limit = self.segments.meshes.limit
        unlimited = Segments(self.units.chain, dataclasses.replace(self.segments.meshes, limit=None))
        divided, _ = choose(unlimited, self.stages)
        assert divided is not None  # without a limit every division is allowed
        ends = [0, *divided.starts, len(self.units.chain)]
        held = [unlimited.held(s, a, b) for s, (a, b) in enumerate(itertools.pairwise(ends))]
        return (
            f"no division of {name} into {self.stages} stages fits {bytes_text(limit or 0)} for each device\n"
            f"  balanced stages hold {', '.join(map(bytes_text, held))}: parameters with gradients and two "
            "moments, and values kept for the backward\n  use more meshes, more devices for each, or "
            "rematerialise=True"
        )

    def imbalance(self) -> list[str]:
        """A warning if a mesh has over `MAX_IMBALANCE` times the mean work, with the operation behind it."""
        work = dict.fromkeys(self.selector.over, 0.0)
        for mesh, seconds in zip(self.selector.over, self.division.seconds, strict=True):
            work[mesh] += seconds
        mesh, most = max(work.items(), key=lambda entry: entry[1])
        total = sum(work.values())
        if most * len(work) <= MAX_IMBALANCE * total:
            return []
        unit, seconds = max(enumerate(self.units.chain.seconds), key=lambda entry: entry[1])
        item = self.units.items[bisect.bisect_right(self.units.first, unit) - 1]
        what = f"an iteration of {item.where}" if item in self.units.scans else item.where
        reason = (
            "\n  a loop is divided between its iterations if their number is known, as of jax.lax.scan"
            if item.equation.primitive.name == "while"
            else item.why_whole
        )
        return [
            f"stages of {self.key[0]} by cost are not balanced: {most / total:.0%} of the work is on mesh "
            f"{mesh!r}, one of {len(work)}\n  {what} has {seconds / total:.0%} of it, and cannot be divided"
            f"{reason}\n  use mpmd.split, mpmd.by_parameters or mpmd.by_scopes to choose the stages"
        ]

    def explain(self, flat: FlatFunction, paths: Mapping[int, str]) -> str:
        """Where each stage starts, why there, and the next best; the items have no stages yet."""
        units, division, segments = self.units, self.division, self.segments
        measured = "measured" if self.selector.measured else "estimated"
        lines = [
            f"work of a microbatch, forward and backward, {measured}: {seconds_text(segments.total_s())} on "
            f"one device of {self.selector.device.name}; by stage "
            f"{', '.join(map(seconds_text, division.seconds))}"
        ]
        ends = [0, *division.starts, len(units.chain)]
        for number, start in enumerate(division.starts):
            names = f"{self.selector.names[number]} and {self.selector.names[number + 1]}"
            crossing = division.crossing[number]
            near = [p for p in self.places if ends[number] < p < ends[number + 2]]
            around = ends[number + 2] - ends[number] - 1
            lines.append(
                f"between {names}: {self._place(start, flat, paths)}\n"
                f"  {bytes_text(crossing)} cross; {len(near)} of {around} places there are candidates; "
                f"the heaviest stage takes {seconds_text(division.heaviest)}"
            )
            lines.append(f"  {self._next_best(number, near, flat, paths)}")
        return "\n".join(lines)

    def _next_best(
        self, number: int, near: Sequence[int], flat: FlatFunction, paths: Mapping[int, str]
    ) -> str:
        """The best of the other candidates between the starts of the neighbouring stages."""
        starts = self.division.starts
        options = []
        for unit in near:
            if unit != starts[number]:
                other = divided_at(self.segments, (*starts[:number], unit, *starts[number + 1 :]))
                options.append((other.heaviest, other.crossing[number], unit))
        if not options:
            return "there is no other candidate nearby"
        heaviest, crossing, unit = min(options)
        more = heaviest / self.division.heaviest - 1
        return (
            f"next best: {self._place(unit, flat, paths)}: {bytes_text(crossing)} cross, the heaviest stage "
            f"takes {seconds_text(heaviest)} ({more:+.1%})"
        )

    def _place(self, unit: int, flat: FlatFunction, paths: Mapping[int, str]) -> str:
        """A place, by the operation after it and the parameter that is read next."""
        at = bisect.bisect_right(self.units.first, unit) - 1
        item = self.units.items[at]
        if item in self.units.scans:
            row, stacks = self.units.iteration(at, unit), self.units.scans[item]
            over = f" over {min(paths[v] for v in stacks)}" if stacks else ""
            if row:
                return f"before iteration {row} of {item.where}{over}"
        text = f"before {item.where}"
        following = [
            (readers[k], -size(flat.avals[v]), paths[v])
            for v, readers in self.units.parameter_units.items()
            if (k := bisect.bisect_left(readers, unit)) < len(readers) and readers[0] >= unit
        ]
        return f"{text}, before {min(following)[2]} is read" if following else text


def _assign(
    flat: FlatFunction, units: UnitChain, division: StageDivision, paths: Mapping[int, str]
) -> Division:
    """Sets the stages of the items of a chain, and divides scans that are in several."""
    stages = {item: units.stages_of(at, division.starts) for at, item in enumerate(units.items)}
    scans = {item: units.scans[item] for item, own in stages.items() if own[0] != own[-1]}
    while True:  # a stack is divided for all scans that read rows of it
        of_stack: dict[int, set[int]] = collections.defaultdict(set)
        for scan, stacks in units.scans.items():
            for v in stacks:
                of_stack[v].update((-1,) if scan in scans else stages[scan])
        several = {v for v, own in of_stack.items() if len(own) > 1}
        more = {scan: of for scan, of in units.scans.items() if scan not in scans and of & several}
        if not more:
            break
        scans |= more
    for item, own in stages.items():
        if item not in scans:
            item.stage = own[0]
    scans_over(flat, set[int]().union(*scans.values()), set(paths))  # marks items that the parts compute
    return divide_by_stages(flat, paths, scans, stages)
