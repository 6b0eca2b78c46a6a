"""Processes whose arrays are texts, and that send them directly: threads, on a wire that keeps the rules.

The n-th call of every process must be about the same message, as JAX counts them, and an array is there when
both ends have made their call, as NCCL pairs them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from mpmd.runtime.channels.direct import DirectChannel, DirectPair, DirectPairs
from mpmd.runtime.program.streams import Program
from mpmd.runtime.run.executor import Executor
from tests.support.fake_engine import FakeArray, FakeEngine, fake_executables

SECONDS = 5


class ArrivingArray(FakeArray):
    """An array that is there once its sender has made its call."""

    def __init__(self, wire: Wire, call: int) -> None:
        super().__init__("on its way")
        self._wire, self._call = wire, call

    @property
    def value(self) -> str:
        self._value = self._wire.wait(self._call)
        return super().value


class Wire:
    """What all processes are connected to.

    Attributes:
        calls: of each process, the messages in the order of its calls.
    """

    def __init__(self) -> None:
        self.calls: dict[int, list[Any]] = {}
        self._sent: dict[int, str] = {}
        self._changed = threading.Condition()

    def call(self, process: int, key: Any, array: FakeArray | None) -> ArrivingArray:
        with self._changed:
            made = self.calls.setdefault(process, [])
            others = [of[len(made)] for of in self.calls.values() if len(of) > len(made)]
            assert all(other == key for other in others), (
                f"process {process} calls {key}, another {others[0]}"
            )
            made.append(key)
            number = len(made) - 1
        if array is not None:
            value = array.value  # the copy is behind the call that computes it
            with self._changed:
                self._sent[number] = value
                self._changed.notify_all()
        return ArrivingArray(self, number)

    def wait(self, number: int) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._sent, SECONDS), "a message never came"
            return self._sent[number]


class WiredEngine(FakeEngine):
    """An engine of one process: its own messages by queues, all others by the wire."""

    def __init__(self, wire: Wire, process: int, paired: Callable[[Program], Any]) -> None:
        self._wire, self._process, self._paired = wire, process, paired

    def paired(self, program: Program) -> Any:
        return self._paired(program)

    def channels(self, program: Program, pairs: Any = ()) -> Any:
        of_mesh = {stream.mesh: stream.processes for stream in program.streams}
        ends = [(of_mesh[c.source], of_mesh[c.target]) for c in program.channels]
        direct = DirectPairs(
            [
                DirectPair(
                    (channel, sequence),
                    self._process in ends[channel][0],
                    self._process in ends[channel][1],
                    lambda array: array,
                    lambda: None,
                    lambda array, key=(channel, sequence): self._wire.call(self._process, key, array),
                )
                for channel, sequence in pairs
            ]
        )
        within = super().channels(program)

        def make() -> list[Any]:
            step = direct.step()
            return [DirectChannel(n, step, direct.position, other) for n, other in enumerate(within())]

        return make


def run_processes(
    program: Program, inputs: Callable[[], list[Any]], steps: int, paired: Callable[[Program], Any]
) -> tuple[list[dict[int, Any]], Wire]:
    """Runs steps of a program in all of its processes: for each step the results by number, and the wire.

    Raises:
        BaseException: of one of the processes.
    """
    wire, processes = Wire(), sorted({p for stream in program.streams for p in stream.processes})
    found: list[dict[int, Any]] = [{} for _ in range(steps)]
    failures: list[BaseException] = []

    def run(process: int) -> None:
        engine = WiredEngine(wire, process, paired)
        try:
            with Executor(program, fake_executables(program), engine, process=process) as executor:
                for of_step in found:
                    for k, result in enumerate(executor.run(inputs())):
                        if result is not None:
                            of_step.setdefault(k, result.value)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(process,), daemon=True) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a process waits for ever"
    return found, wire
