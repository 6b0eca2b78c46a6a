"""This process's part of a program: its streams run here, and failures of any process end the step here.

Times of several processes are compared by their clocks.  Each process asks process 0 for its time over the
key-value store, several times in turn.  The answer was written between the question and its arrival: half of
the shortest round trip is the error.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from mpmd import jax_compat
from mpmd.brief import brief
from mpmd.errors import FragmentError, PeerError, SignatureError, TransferError
from mpmd.runtime.channels.protocol import Stopped
from mpmd.runtime.measure.step_trace import StepTimes
from mpmd.runtime.processes.exchange import WorldExchange
from mpmd.runtime.program.pairs import MessageKey
from mpmd.runtime.program.streams import Feed, Program
from mpmd.runtime.run.decode import ArrayEngine
from mpmd.runtime.run.executor import Executor, RuntimeOptions
from mpmd.runtime.run.interpreter import FragmentExecutable, Observer

_ROUNDS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class ClockOffset:
    """Offset of this process's `time.perf_counter` to process 0's.

    Attributes:
        seconds: to add to a time here to get process 0's.
        error_s: the largest error of it, in seconds.
    """

    seconds: float
    error_s: float


def compare_clocks(exchange: WorldExchange) -> ClockOffset:
    """Compares the clock of this process with process 0's.

    Raises:
        PeerError: a process failed meanwhile.
    """
    world = exchange.world
    offset = ClockOffset(0.0, 0.0 if world.index == 0 else float("inf"))
    for process in range(1, world.count):
        for _ in range(_ROUNDS):
            question, answer = f"clock/{process}/question", f"clock/{process}/answer"
            if world.index == 0:
                exchange.take(question)
                exchange.put(answer, repr(time.perf_counter()))
            elif world.index == process:
                begin = time.perf_counter()
                exchange.put(question, "")
                there = float(exchange.take(answer))
                half = (time.perf_counter() - begin) / 2
                if half < offset.error_s:
                    offset = ClockOffset(there - begin - half, half)
    return offset


class WorldEngine(ArrayEngine, Protocol):
    """Moves arrays in a world of several processes."""

    def can_place(self, value: Any, mesh: str) -> bool:
        """Whether an argument can be placed on a mesh of this process."""


class Part:
    """Runs the streams of this process; a step returns when they are done.

    So an error of any process is raised by the step in which it occurred.
    """

    __repr__ = brief

    def __init__(
        self,
        program: Program,
        executables: Mapping[tuple[str, str], FragmentExecutable],
        engine: WorldEngine,
        options: RuntimeOptions,
        workspace: Mapping[tuple[str, str], int],
        exchange: WorldExchange,
    ) -> None:
        """See `Executor`; all processes make the same parts in their exchange about a program."""
        world = exchange.world
        self._name = f"program {exchange.number}"
        waiting = dataclasses.replace(options, blocking=True)
        self.program, self._world, self._engine = program, world, engine
        self._executor = Executor(program, executables, engine, waiting, workspace, world.index)
        self._paths = {spec.index: spec.path for spec in program.inputs}
        self._placed: dict[tuple[int, str], Any] = {}
        """The shardings of the last step's arguments: the next step's are usually the same."""
        self._fed = sorted(
            {
                (op.input, stream.mesh)
                for stream in program.part(world.index).streams
                for op in stream.instructions
                if isinstance(op, Feed)
            }
        )
        world.on_failure(self._executor.stop)

    def run(
        self, inputs: Sequence[Any], *, observers: Iterable[Observer] = (), one_by_one: bool = False
    ) -> list[Any]:
        """Runs one step; see `Executor.run`.

        Args:
            inputs: the user's flat arguments; this process reads only leaves of its own meshes.
            observers: see `Executor.run`.
            one_by_one: see `Executor.run`.

        Returns:
            The flat results; None for other processes' results.

        Raises:
            PeerError: another process failed.
            FragmentError: a fragment failed here.
            TransferError: a message to another process could not be sent.
            SignatureError: the arguments do not fit the program.
        """
        world = self._world
        world.check()
        self._refuse_absent(inputs)
        with world.turn(f"a step of {self.program.name!r}"), world.waiting():
            results = self._run(inputs, observers, one_by_one)
        world.check()
        world.complete()
        return results

    def _run(self, inputs: Sequence[Any], observers: Iterable[Observer], one_by_one: bool) -> list[Any]:
        world, begun = self._world, self._executor.steps
        try:
            results = self._executor.run(inputs, observers=observers, one_by_one=one_by_one)
            for k in self._executor.moved_results:  # the executor has looked at those of calls
                if results[k] is not None:
                    results[k].block_until_ready()
        except FragmentError as error:
            world.explain(error, error.mesh, error.position)
            raise
        except (Stopped, jax_compat.JaxRuntimeError) as error:
            world.explain(error)
            raise
        except TransferError as error:  # its receiver would wait for the message
            world.fail_here(error, error.mesh)
            raise
        except PeerError:
            raise
        except BaseException as error:
            if self._executor.steps > begun:  # the others would wait for the messages of this step
                world.fail_here(error)
            raise
        return results

    @property
    def own_program(self) -> Program:
        return self._executor.own_program

    @property
    def pairs(self) -> Sequence[MessageKey]:
        """The messages that are sent directly, in their order."""
        return self._executor.pairs

    @property
    def executables(self) -> Mapping[tuple[str, str], FragmentExecutable]:
        return self._executor.executables

    def gathered_times(self, what: str, times: StepTimes) -> tuple[StepTimes, float]:
        """The times of all processes by the clock of process 0; all processes must call it.

        Args:
            what: they are for, such as `timeline`.
            times: of this process.

        Returns:
            The times, and the largest error of a clock, in seconds.

        Raises:
            PeerError: a process failed meanwhile.
        """
        with self._world.exchange(f"the {what} of {self.program.name!r}") as exchange:
            offset = compare_clocks(exchange)
            runs = [(*key, *(time + offset.seconds for time in of)) for key, of in times.runs.items()]
            arrivals = [(*key, time + offset.seconds) for key, time in times.arrivals.items()]
            of_all = exchange.gather_json([runs, arrivals, offset.error_s])
        return merged_times(of_all), max(error for _, _, error in of_all)

    def gathered(self, what: str, value: Any) -> list[Any]:
        """A value that JSON can express, of every process; all processes must call it.

        Args:
            what: it is, such as `live bytes`.
            value: of this process.

        Raises:
            PeerError: a process failed meanwhile.
        """
        with self._world.exchange(f"the {what} of {self.program.name!r}") as exchange:
            return exchange.gather_json(value)

    def record(self, leaves: Sequence[Any]) -> None:
        """Notes the results of a step, as the user gets them."""
        self._world.origins.record(self._name, leaves)

    def synchronize(self) -> None:
        """Does nothing but report failures: every step that returned is done."""
        self._world.check()

    def close(self) -> None:
        self._executor.close()

    def _refuse_absent(self, inputs: Sequence[Any]) -> None:
        """Arguments are read in the process of their own mesh, which must hold them."""
        absent, placed = list[str](), self._placed
        for at in self._fed:
            k, mesh = at
            sharding = getattr(inputs[k], "sharding", None)
            if sharding is None or sharding is placed.get(at):
                continue
            if self._engine.can_place(inputs[k], mesh):
                placed[at] = sharding
            else:
                absent.append(f"{self._paths[k]}, which mesh {mesh!r} reads, is in another process")
        if absent:
            more = f"\n  and {len(absent) - 1} more" if len(absent) > 1 else ""
            raise SignatureError(
                f"{absent[0]}{more}\n  bring it here with mpmd.fetch, which all processes must call, or "
                "assign the argument, and the result it was, to one mesh (input_meshes, output_meshes)"
            )


def merged_times(of_processes: Sequence[tuple[list[Any], list[Any], float]]) -> StepTimes:
    """The times of all processes: runs and arrivals, each with its mesh and position.

    What several processes of a mesh ran lasts from the first begin to the last end.
    """
    intervals: dict[tuple[str, int], tuple[float, float]] = {}
    times: dict[tuple[str, int], float] = {}
    for runs, arrivals, _ in of_processes:
        for mesh, at, start, end in runs:
            known = intervals.get((mesh, at), (start, end))
            intervals[mesh, at] = min(start, known[0]), max(end, known[1])
        for mesh, at, moment in arrivals:
            times[mesh, at] = max(moment, times.get((mesh, at), moment))
    return StepTimes(intervals, times)
