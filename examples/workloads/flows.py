"""What a model has to send between its stages, whatever library runs it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

Edges = tuple[tuple[int, int], ...]
"""Pairs (stage that makes a value, other stage that needs it), one for each value."""


@dataclasses.dataclass(frozen=True)
class Flow:
    """What has to travel between stages, by the data flow of a model alone.

    Attributes:
        forward: activations of one microbatch; what several stages need goes from each to the next of them.
        backward: gradients of activations of one microbatch.
        per_step: gradients of parameters that are used away from where they live, once per step.  Parameters
            and batches themselves are placed wherever they are used, the loss is read where it is made.
    """

    forward: Edges
    backward: Edges
    per_step: Edges = ()

    def needed(self, microbatches: int) -> dict[tuple[int, int], int]:
        """How many values go from stage to stage in one step."""
        found = Counter((*self.forward, *self.backward) * microbatches + self.per_step)
        return dict(sorted(found.items()))


def along_the_chain(stages: int) -> Flow:
    """One activation to the next stage, and its gradient back."""
    there = tuple((s, s + 1) for s in range(stages - 1))
    return Flow(there, _back(there))


def _back(edges: Edges) -> Edges:
    return tuple((target, source) for source, target in edges)


def with_skip(stages: int) -> Flow:
    """Beside the chain, from the first stage to the last; the second needs the same value, and passes it on.

    Its gradients are two values, which meet at the first stage.
    """
    found = along_the_chain(stages)
    if stages == 2:
        return found
    return Flow((*found.forward, (1, stages - 1)), (*found.backward, (stages - 1, 0)))


def shared(stages: int, sharing: Iterable[int], values: int = 1) -> Flow:
    """Beside the chain, gradients of parameters from the stages that share them with the first."""
    per_step = tuple((s, 0) for s in sharing) * values
    return dataclasses.replace(along_the_chain(stages), per_step=per_step)


def without_gradients_of_the_first(stages: int) -> Flow:
    """No gradient goes back to the first stage."""
    there = along_the_chain(stages).forward
    return Flow(there, _back(there[1:]))


def twice(stages: int) -> Flow:
    """The second forward pass goes through the stages before the backward pass comes back."""
    found = along_the_chain(stages)
    return Flow(found.forward * 2, found.backward)
