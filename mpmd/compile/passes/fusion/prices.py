"""Costs of groups, by the cost models: whether joining two saves time, and how much."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpmd.compile.cost.kernel_work import plan_workload, product_workloads
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.planner.dots import DotPlan
from mpmd.compile.kernels.planner.groups import GroupPlan
from mpmd.compile.kernels.planner.planned_kernel import PlannedKernel
from mpmd.cost.device import Device
from mpmd.cost.roofline import combined, projected

CLEARLY = 1.05
"""Tolerated slowdown, below the error of the model, in return for fewer kernels or fewer values in memory."""


class Prices:
    """Prices of planned groups on a device.

    Args:
        device: a description and not a measurement, so that choices are the same everywhere.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._known: dict[tuple[HloInstruction, ...], float | None] = {}

    def of(
        self, members: Sequence[HloInstruction], planned: Callable[[], PlannedKernel | str]
    ) -> float | None:
        """Seconds of a group, None if the models do not price it.

        Args:
            members: what the group is cached by.
            planned: makes its kernel, or says why there is none; called for groups that are not known yet.
        """
        key = tuple(members)
        if key not in self._known:
            self._known[key] = self._price(planned())
        return self._known[key]

    def _price(self, planned: PlannedKernel | str) -> float | None:
        if not isinstance(planned, GroupPlan):
            return None
        work = plan_workload(planned.plan)
        return projected(work, self.device).seconds

    def whole(self, planned: Sequence[PlannedKernel | str]) -> float | None:
        """Seconds of several kernels, products with their epilogues among them; None if one is not priced."""
        total = 0.0
        for kernel in planned:
            seconds = self._price(kernel)
            if isinstance(kernel, DotPlan):
                parts = [projected(work, self.device) for work in product_workloads(kernel.plan)]
                seconds = combined(parts, self.device).seconds
            if seconds is None:
                return None
            total += seconds
        return total

    def saved(self, value: HloInstruction, joining: int, others: int) -> float:
        """Seconds that are saved if everything that can join a value's producer does.

        Args:
            value: it is then not read, and not written either if nothing else reads it.
            joining: how many readers can join.
            others: how many cannot.
        """
        size = value.shape.byte_size
        accesses = joining + (others == 0)
        return accesses * size / self.device.bandwidth_for(size)
