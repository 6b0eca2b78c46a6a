"""Steps lowered inside of each other and at the same time, and the garbage collector meanwhile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import mpmd
from mpmd.errors import ConfigError

X = np.ones(4, np.float32)
TOPOLOGY = mpmd.make_topology({"m0": 1})


def _traced(name: str = "f"):
    config = mpmd.make_config(TOPOLOGY, {"f": "m0"})
    return mpmd.jit(mpmd.named_computation(lambda x: 2 * x, name=name), config).trace(X)


def _instructions(lowered) -> list[str]:
    return [type(op).__name__ for stream in lowered.program.streams for op in stream.instructions]


class _Inside:
    """Lowers another step after the first pass of one; notes whether the collector was ever on."""

    def __init__(self, step) -> None:
        self.step = step
        self.other: list[str] = []
        self.was_on: list[bool] = []

    def begins(self, module) -> None:
        self.was_on.append(gc.isenabled())

    def phase_begins(self, phase, steps) -> None:
        self.was_on.append(gc.isenabled())

    def pass_ended(self, pass_, module, changed, seconds) -> None:
        if not self.other:
            self.other = _instructions(self.step.lower())
        self.was_on.append(gc.isenabled())


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("is_on", [True, False])
def test_a_step_lowered_inside_of_another_leaves_the_collector_as_it_was(is_on: bool) -> None:
    (gc.enable if is_on else gc.disable)()
    step, other = [_traced() for _ in range(2)]
    inside = _Inside(other)
    outer = _instructions(step.lower(inside))
    assert outer == inside.other and not any(inside.was_on)
    assert gc.isenabled() == is_on


def test_an_error_leaves_the_collector_as_it_was() -> None:
    gc.enable()
    with pytest.raises(ConfigError):
        _traced("g").lower()
    assert gc.isenabled()


def test_steps_lowered_at_the_same_time_leave_the_collector_as_it_was() -> None:
    gc.enable()
    traced = [_traced() for _ in range(4)]
    found: list[list[str]] = []

    def lower(step) -> None:
        found.append(_instructions(step.lower()))

    threads = [threading.Thread(target=lower, args=(step,)) for step in traced]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(instructions == found[0] for instructions in found)
    assert gc.isenabled()
