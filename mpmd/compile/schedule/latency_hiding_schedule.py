"""hlo-latency-hiding-schedule."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from mpmd.compile.analysis.cost import CostModel
from mpmd.compile.analysis.liveness import done_of, is_start
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.kernels.cost.device import CORE, Device
from mpmd.compile.kernels.cost.models import speed_of_light
from mpmd.compile.kernels.cost.workload import KernelWorkload
from mpmd.compile.schedule.heap import Heap
from mpmd.errors import PassError
from mpmd.support.passes import Pass

_TRANSCENDENTAL = 10  # operations that one counts for


class Clock:
    """Seconds of instructions, of messages, and of a whole order.

    Args:
        device: the device model.
        link: bytes per second between devices.
        latency: seconds before the first byte of a message arrives.
    """

    def __init__(self, device: Device, link: float, latency: float) -> None:
        self.device = device
        self.link = link
        self.latency = latency
        self._costs = CostModel()

    def seconds(self, instruction: HloInstruction) -> float:
        """Seconds of the device for an instruction; starts and dones take none."""
        if is_start(instruction) or instruction.opcode.endswith("-done"):
            return 0.0
        cost = self._costs.instruction(instruction)
        if not cost.flops and not cost.bytes and not cost.transcendentals:
            return 0.0
        products = instruction.opcode == "dot" or any(
            i.opcode == "dot" for c in instruction.called for i in c
        )
        work = KernelWorkload(
            kind="matmul" if products else "loop",
            flops=float(cost.flops + _TRANSCENDENTAL * cost.transcendentals),
            vector_bytes=0.0,
            read_bytes=float(cost.bytes_read),
            again_bytes=0.0,
            written_bytes=float(cost.bytes_written),
            parts=1,
            matmul_dtype="f32" if products else "",
        )
        return self.device.start_seconds + speed_of_light(work, self.device).seconds

    def flight(self, start: HloInstruction) -> float:
        """Seconds of a message from its start until its arrival."""
        size = max(
            sum(o.shape.byte_size for o in start.operands if o.shape.is_array),
            done_of(start).shape.byte_size if done_of(start).shape.is_array else 0,
        )
        return self.latency + size / self.link

    def run(self, order: Sequence[HloInstruction]) -> float:
        """Seconds of an order: one instruction after the other, messages at the same time."""
        now, arrives = 0.0, dict[HloInstruction, float]()
        for instruction in order:
            if is_start(instruction):
                arrives[done_of(instruction)] = now + self.flight(instruction)
            now = max(now, arrives.get(instruction, 0.0)) + self.seconds(instruction)
        return now


@dataclasses.dataclass(frozen=True)
class LatencyHidingSchedule(Pass):
    """Moves starts and dones of messages apart, so that other work runs while they are in flight.

    s = all-reduce-start(x); d = all-reduce-done(s); y = dot(a, b)
        ->  s = all-reduce-start(x); y = dot(a, b); d = all-reduce-done(s)

    Goes from the end to the beginning with a clock: a done is as late as its users allow, and its start so
    early that the message has arrived by then; other ready instructions come between.  The order is
    kept only if it takes less time by the clock, and needs at most `memory_limit` bytes.

    Requires: the module is scheduled.
    Ensures: the module is scheduled; no computation takes longer than before by the model.
    Cost: quadratic in the number of instructions that are ready at the same time.
    Source: XLA's latency-hiding scheduler: its rules for dones, resources, stalls and starts.

    Attributes:
        most_in_flight: messages of one kind at the same time.
        memory_limit: bytes of temporaries that the new order may need; 0 for no limit.
        keep_peak: whether the new order may need no more than the old one.
        link: bytes per second between devices.
        latency: seconds before the first byte of a message arrives.
        device: what computes meanwhile.
    """

    name = "hlo-latency-hiding-schedule"

    most_in_flight: int = 1
    memory_limit: int = 0
    keep_peak: bool = False
    link: float = 1e9
    latency: float = 1e-5
    device: Device = CORE

    def run(self, module: HloModule) -> bool:
        """Orders `module` anew; True iff something moved.

        Raises:
            PassError: the module is not scheduled.
        """
        if not module.is_scheduled:
            raise PassError(f"{self.name} needs an order\n  run hlo-memory-schedule first")
        if not any(is_start(i) for c in module.computations for i in c):
            return False
        clock = Clock(self.device, self.link, self.latency)
        heap = Heap(module)
        changed = False
        for computation in heap.computations:
            before = list(computation)
            heap.settle(computation, before)
            if any(is_start(i) for i in before):
                after = _Backwards(computation, clock, self.most_in_flight).run()
                if self._is_better(before, after, clock, heap):
                    computation.reorder(after)
                    heap.settle(computation, after)
                    changed = True
        return changed

    def _is_better(
        self, before: list[HloInstruction], after: list[HloInstruction], clock: Clock, heap: Heap
    ) -> bool:
        if clock.run(after) >= clock.run(before):
            return False
        if not self.memory_limit and not self.keep_peak:
            return True
        peak = heap.simulate(after).peak
        fits = not self.memory_limit or peak <= self.memory_limit
        return fits and (not self.keep_peak or peak <= heap.simulate(before).peak)


class _Backwards:
    """List scheduling of one computation from its end to its beginning.

    Time runs backwards: the clock counts the seconds until the computation ends.
    """

    def __init__(self, computation: HloComputation, clock: Clock, most_in_flight: int) -> None:
        self.clock = clock
        self.most = most_in_flight
        self.places = {instruction: place for place, instruction in enumerate(computation)}
        self.missing = {i: len(dict.fromkeys((*i.users, *i.control_successors))) for i in computation}
        self.ready: dict[HloInstruction, float] = {i: 0.0 for i, count in self.missing.items() if not count}
        self.starts_after: dict[HloInstruction, float] = dict.fromkeys(computation, 0.0)
        self.in_flight: Counter[str] = Counter()
        self.messages = _messages_before(computation)
        self.now = 0.0

    def run(self) -> list[HloInstruction]:
        """The order."""
        backwards: list[HloInstruction] = []
        while self.ready:
            chosen = min(self.ready, key=self._preference)
            self._take(chosen, self.ready.pop(chosen))
            backwards.append(chosen)
        return backwards[::-1]

    def _preference(self, instruction: HloInstruction) -> tuple[bool, bool, float, bool, int, int]:
        """Smallest first.

        A done whose kind has a free slot begins its message now: all that follows hides it.  A done without a
        slot and a start whose message would not have arrived wait for other work.  Among the rest a start is
        better, as it lets the next message begin; then instructions after more messages, as independent work
        is left to hide them; then the old order decides.
        """
        done = _is_done(instruction)
        blocked = done and self.in_flight[_kind(instruction)] >= self.most
        stall = max(0.0, self.ready[instruction] - self.now)
        start = is_start(instruction)
        urgent = done and not stall
        return blocked, not urgent, stall, not start, -self.messages[instruction], -self.places[instruction]

    def _take(self, instruction: HloInstruction, ready: float) -> None:
        self.now = max(self.now, ready) + self.clock.seconds(instruction)
        if _is_done(instruction):
            self.in_flight[_kind(instruction)] += 1
        elif is_start(instruction):
            self.in_flight[_kind(instruction)] -= 1
        for before in dict.fromkeys((*instruction.operands, *instruction.control_predecessors)):
            wait = 0.0
            if is_start(before) and done_of(before) is instruction:
                wait = self.clock.flight(before)
            self.starts_after[before] = max(self.starts_after[before], self.now + wait)
            self.missing[before] -= 1
            if not self.missing[before]:
                self.ready[before] = self.starts_after[before]


def _messages_before(computation: HloComputation) -> dict[HloInstruction, int]:
    """Per instruction the length of the longest chain of messages before it."""
    found: dict[HloInstruction, int] = {}
    for instruction in computation:
        before = dict.fromkeys((*instruction.operands, *instruction.control_predecessors))
        found[instruction] = max((found[b] for b in before), default=0) + _is_done(instruction)
    return found


def _is_done(instruction: HloInstruction) -> bool:
    return instruction.opcode.endswith("-done")


def _kind(instruction: HloInstruction) -> str:
    """Messages of one kind share a resource: a wrapped collective is of the kind that it wraps."""
    start = instruction
    while not is_start(start):
        start = start.operands[0]
    return start.to_apply.root.opcode if start.opcode == "async-start" else start.opcode
