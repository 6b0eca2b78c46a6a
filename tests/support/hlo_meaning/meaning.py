"""The evaluator of the library, and what opcodes mean that it never computes."""

from __future__ import annotations

from mpmd.compile.hlo.evaluator import Evaluator
from tests.support.hlo_meaning import custom_calls, random
from tests.support.hlo_meaning.collectives import GROUP_RULES


class Meaning(Evaluator):
    """One evaluation of any program on one or several devices.

    Attributes:
        random_state: the program's counter for rng-get-and-update-state.
    """

    rules = {**Evaluator.rules, **random.RULES, **custom_calls.RULES}
    joint_rules = {**Evaluator.joint_rules, **GROUP_RULES}

    def __init__(self, replicas: int = 1, partitions: int = 1) -> None:
        super().__init__(replicas, partitions)
        self.random_state = 1
        self._ticks = 0

    def tick(self) -> int:
        """How often this was asked before: separates the runs of one instruction."""
        self._ticks += 1
        return self._ticks - 1
