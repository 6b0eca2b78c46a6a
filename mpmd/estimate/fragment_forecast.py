"""One fragment on a device that need not be here: its seconds, temporary memory and collectives.

Kernels are planned and memory is assigned as for code; only the code is not generated.  A fragment with
collectives is divided as it would be for GPUs: clusters of the target between collectives of XLA's.  What the
target has no kernel for is priced by the roofline, as one kernel.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from mpmd.brief import brief
from mpmd.compile.analysis.dataflow import Position
from mpmd.compile.backends.jax_function import value_spec
from mpmd.compile.backends.mixed.backend import prepared
from mpmd.compile.backends.mixed.clusters import Cluster, Clusters, divide
from mpmd.compile.cost.hlo_cost import CostModel, exchanged
from mpmd.compile.driver import Prepared, prepare_fragment
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import HloInstruction, print_module
from mpmd.compile.hlo.collective_groups import collective_groups
from mpmd.compile.kernels.planner.collectives import COLLECTIVES
from mpmd.compile.target import Target
from mpmd.cost.device import Device
from mpmd.errors import CompileError
from mpmd.estimate.estimate import arithmetic_seconds


@dataclasses.dataclass(frozen=True)
class CollectiveForecast:
    """Collectives of one kind in one call of a fragment.

    Attributes:
        opcode: of HLO.
        near: whether each group of devices is in one process.
        times: how many.
        sent_bytes: that one device sends, in all of them.
        seconds: of all of them.
    """

    opcode: str
    near: bool
    times: int
    sent_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class FragmentForecast:
    """One call of a fragment on one device of its mesh.

    Attributes:
        kernel_seconds: of everything but collectives.
        collectives: by kind.
        temporary_bytes: of values inside of it.
        kept_bytes: that its program keeps between calls.
        reasons: why parts of it have no kernels of the target; empty where all have.
    """

    kernel_seconds: float
    collectives: tuple[CollectiveForecast, ...]
    temporary_bytes: int
    kept_bytes: int
    reasons: tuple[str, ...]

    __repr__ = brief

    @property
    def seconds(self) -> float:
        return self.kernel_seconds + sum(c.seconds for c in self.collectives)


def forecast_fragment(
    fragment: FragmentModule, target: Target, axes: Mapping[str, int], processes: Sequence[int]
) -> FragmentForecast:
    """What a fragment would take.

    Args:
        fragment: what to forecast.
        target: of the devices.
        axes: the axes of its mesh and their sizes.
        processes: the process of each device of the mesh, in order.

    Raises:
        CompileError: the fragment has no HLO; names the operation.
    """
    reasons: tuple[str, ...] = ()
    if len(processes) == 1:
        try:
            return _of_program(prepare_fragment(fragment, target, axes=axes))
        except CompileError as error:
            reasons = (str(error).splitlines()[0],)
    module = prepared(fragment, axes=axes)
    clusters = divide(module, target.refuses, COLLECTIVES)
    work = _ForecastWork(fragment, target, processes)
    work.add(clusters, 1)
    temporary = _peak(clusters, work.sizes, frozenset(clusters.results))
    return FragmentForecast(
        work.kernel_seconds + target.device.call_seconds,
        tuple(work.collectives()),
        temporary,
        work.kept_bytes,
        (*reasons, *dict.fromkeys(work.reasons)),
    )


def _of_program(program: Prepared) -> FragmentForecast:
    arena, kept = _memory(program)
    return FragmentForecast(program.kernel_costs.all_seconds, (), arena, kept, ())


def _memory(program: Prepared) -> tuple[int, int]:
    """(temporary, kept) bytes of a program."""
    steps = program.program
    if hasattr(steps, "kept_bytes"):
        return 0, int(steps.kept_bytes)
    return int(steps.arena_bytes), 0


class _ForecastWork:
    """Adds up the clusters of a fragment.

    Attributes:
        kernel_seconds: so far.
        kept_bytes: so far.
        reasons: so far.
        sizes: temporary bytes inside of each cluster.
    """

    def __init__(self, fragment: FragmentModule, target: Target, processes: Sequence[int]) -> None:
        self._fragment, self._target, self._processes = fragment, target, processes
        self.kernel_seconds, self.kept_bytes = 0.0, 0
        self.reasons: list[str] = []
        self.sizes: dict[int, int] = {}
        self._found: dict[tuple[str, bool], list[float]] = collections.defaultdict(lambda: [0, 0, 0.0])

    def collectives(self) -> Iterator[CollectiveForecast]:
        for (opcode, near), (times, sent, seconds) in sorted(self._found.items()):
            yield CollectiveForecast(opcode, near, int(times), int(sent), seconds)

    def add(self, clusters: Clusters, times: int) -> None:
        """Counts clusters that run so many times."""
        for cluster in clusters.parts:
            if cluster.loop is not None:
                self.add(cluster.loop.body, times * cluster.loop.trips)
                body = cluster.loop.body
                self.sizes[id(cluster)] = _peak(body, self.sizes, frozenset(body.results))
            elif cluster.native:
                self._native(cluster, times)
            else:
                self._others(cluster, times)

    def _native(self, cluster: Cluster, times: int) -> None:
        module = cluster.module
        alone = FragmentModule(
            name=f"{self._fragment.name}.part",
            mesh=self._fragment.mesh,
            text=print_module(module),
            arguments=tuple(value_spec(p.shape) for p in module.entry.parameters),
            results=tuple(value_spec(shape) for _, shape in module.entry.root.shape.leaves()),
            donated=tuple(k for k in cluster.last_reads if cluster.inputs[k][0].opcode != "parameter"),
        )
        try:
            program = prepare_fragment(alone, self._target, module=module.clone())
        except CompileError as error:
            self.reasons.append(str(error).splitlines()[0])
            self._others(cluster, times)
            return
        costs = program.kernel_costs
        self.kernel_seconds += times * (costs.all_seconds - self._target.device.call_seconds)
        self.sizes[id(cluster)], kept = _memory(program)
        self.kept_bytes += kept

    def _others(self, cluster: Cluster, times: int) -> None:
        """Counts collectives, and everything else as one kernel."""
        device = self._target.device
        self.reasons += [reason for reason in cluster.reasons.values() if reason]
        model, alone = CostModel(), True
        for member in cluster.members:
            if member.opcode.removesuffix("-start") in COLLECTIVES:
                self._collective(member, times, device)
            elif member.opcode not in ("get-tuple-element", "tuple", "constant"):
                alone = False
        if not alone:
            work = model.module(cluster.module)
            memory = work.bytes / device.bandwidth
            self.kernel_seconds += times * max(arithmetic_seconds(work, device), memory)

    def _collective(self, member: HloInstruction, times: int, device: Device) -> None:
        module = member.parent.module
        sent, messages = exchanged(member)
        if not sent:
            return
        near, neighbours = self._spread(member, module)
        entry = self._found[member.opcode.removesuffix("-start"), near]
        entry[0] += times
        entry[1] += times * sent
        entry[2] += times * device.exchange_seconds(sent, messages, neighbours, near=near)

    def _spread(self, member: HloInstruction, module: Any) -> tuple[bool, int]:
        """Whether each group is in one process, and the fewest devices that a group has in a process."""
        if member.opcode.startswith("collective-permute"):
            pairs = cast("tuple[tuple[int, int], ...]", member.attributes["source_target_pairs"])
            return all(self._processes[a] == self._processes[b] for a, b in pairs), 1
        groups = collective_groups(member, module.replica_count, module.num_partitions)
        counts = [collections.Counter(self._processes[d] for d in group) for group in groups]
        return all(len(c) == 1 for c in counts), min(min(c.values()) for c in counts)


def _peak(clusters: Clusters, sizes: Mapping[int, int], results: frozenset[Position]) -> int:
    """The most bytes of arrays between clusters, and inside of the one that runs; results do not count."""
    last: dict[Position, int] = {}
    for number, cluster in enumerate(clusters.parts):
        last.update((position, number) for position in cluster.inputs)
    alive: dict[Position, int] = {}
    most = 0
    for number, cluster in enumerate(clusters.parts):
        for position in cluster.outputs:
            if position not in results:
                producer, index = position
                alive[position] = producer.shape.subshape(index).byte_size
        most = max(most, sum(alive.values()) + sizes.get(id(cluster), 0))
        for position in [p for p in alive if last.get(p, number) <= number]:
            del alive[position]
    return most
