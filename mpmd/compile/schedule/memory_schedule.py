"""hlo-memory-schedule."""

from __future__ import annotations

from collections.abc import Callable

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.schedule.exchange import exchanged
from mpmd.compile.schedule.heap import Heap
from mpmd.compile.schedule.list_order import list_order, post_order
from mpmd.errors import PassError
from mpmd.support.passes import Pass

Scheduler = Callable[[HloComputation, Heap], list[HloInstruction]]

SCHEDULERS: dict[str, Scheduler] = {
    "list": list_order,
    "post-order": post_order,
}
"""By name, in the order of preference among equals."""


class MemorySchedule(Pass):
    """Orders every computation to reduce its peak memory.

    p = f(x); q = f(y); r = sum(p); s = sum(q)  ->  p = f(x); r = sum(p); q = f(y); s = sum(q)

    Callees come first.  Each scheduler orders the computation, the simulated heap gives the peak of each
    order, and the one with the lowest peak is taken; `exchange` then searches near it.

    Requires: nothing; of asynchronous operations the bytes are not known exactly.
    Ensures: the module is scheduled, and operands come before users.
    Cost: n log n for each scheduler; the exchange a bounded number of simulations.
    Source: XLA's memory schedulers, of which it also takes the best.

    Attributes:
        scheduler: one of `list`, `post-order`, or `best`.
        exchange: whether to search near the best order.
    """

    prefix = "hlo-"
    scheduler: str = "best"
    exchange: bool = True

    def run(self, module: HloModule) -> bool:
        """Orders `module`; True iff it was not scheduled before.

        Raises:
            PassError: there is no such scheduler.
        """
        if self.scheduler != "best" and self.scheduler not in SCHEDULERS:
            raise PassError(
                f"{self.name} has no scheduler {self.scheduler!r}\n  it has best, {', '.join(SCHEDULERS)}"
            )
        if module.is_scheduled:
            return False
        heap = Heap(module)
        for computation in module.computations:
            if computation not in heap.kept:
                computation.reorder(computation.post_order())
        for computation in heap.computations:
            order = self._best(computation, heap)
            heap.settle(computation, order)
            computation.reorder(order)
        module.is_scheduled = True
        return True

    def _best(self, computation: HloComputation, heap: Heap) -> list[HloInstruction]:
        chosen = SCHEDULERS if self.scheduler == "best" else {self.scheduler: SCHEDULERS[self.scheduler]}
        orders = [scheduler(computation, heap) for scheduler in chosen.values()]
        best = min(orders, key=lambda order: heap.simulate(order).score)
        return exchanged(best, heap) if self.exchange else best
