"""Calls that begin in all processes of a mesh at the same time.

On CPUs a collective holds one thread of its client for each device while it waits for the other processes.
Other fragments run on the same threads: if all of them wait, what another process needs for the same call is
never computed.  Where there are not more threads than that, each call first waits for its arguments, and
until all processes of its mesh have theirs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpmd import jax_compat
from mpmd.runtime.processes.exchange import WorldExchange
from mpmd.runtime.processes.store import Turns
from mpmd.runtime.program.streams import Program
from mpmd.runtime.run.clients import available_cores
from mpmd.runtime.run.interpreter import FragmentExecutable
from mpmd.runtime.run.waiting import wait_for


class MeetingCall:
    """A fragment on a mesh over several processes; its calls wait for each other before they begin."""

    asynchronous = False

    def __init__(self, call: FragmentExecutable, meeting: Meeting) -> None:
        self._call, self._meeting = call, meeting
        self.has_token = bool(getattr(call, "has_token", False))

    @property
    def name(self) -> str:
        return self._call.name

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        """Starts it, once the arguments are ready in all processes."""
        self._meeting.meet(arrays)
        return self._call(*arrays)


class Meeting:
    """Where the processes of one mesh wait for each other."""

    def __init__(self, turns: Turns, check: Callable[[], None]) -> None:
        """Takes where they wait, and what raises the failure of a process."""
        self._turns, self._check = turns, check

    def meet(self, arrays: Sequence[Any]) -> None:
        """Waits for the arrays, and for the other processes.

        Raises:
            PeerError: a process failed meanwhile.
        """
        for array in arrays:
            wait_for(array, self._check)
        self._turns.meet()


def with_meetings(
    program: Program,
    executables: Mapping[tuple[str, str], FragmentExecutable],
    meshes: Mapping[str, Any],
    exchange: WorldExchange,
) -> Mapping[tuple[str, str], FragmentExecutable]:
    """The executables, of which those that wait for other processes begin together where threads are few.

    Args:
        program: the streams of all processes.
        executables: of this process, by (mesh, name).
        meshes: the devices of all meshes.
        exchange: of the compilation of the program.
    """
    spanning = {stream.mesh: stream.processes for stream in program.streams if len(stream.processes) > 1}
    if not spanning or not program.between_processes:
        return executables
    world = exchange.world
    few = _may_starve([meshes[mesh] for mesh in spanning], world.index)
    if "1" not in exchange.gather(str(int(few))):
        return executables
    meetings = {
        mesh: Meeting(exchange.turns(mesh, [p for p in processes if p != world.index]), world.check)
        for mesh, processes in spanning.items()
    }
    return {
        key: MeetingCall(call, meetings[key[0]]) if getattr(call, "waits_for_processes", False) else call
        for key, call in executables.items()
    }


def _may_starve(meshes: Sequence[Any], process: int) -> bool:
    """Whether collectives of these meshes can hold all threads of this process's client.

    XLA runs calls on several devices of a process one after the other, and those on one device side by side.
    """
    counts = [sum(d.process_index == process for d in mesh.devices.flat) for mesh in meshes]
    held = max((count for count in counts if count > 1), default=0) + counts.count(1)
    platform = meshes[0].devices.flat[0].platform
    return platform == "cpu" and held >= max(_threads(), len(jax_compat.devices(platform)))


def _threads() -> int:
    """The threads of a client of XLA: one for each core of this process, unless NPROC gives their number."""
    text = os.environ.get("NPROC", "")
    return int(text) if text.isdecimal() and int(text) else len(available_cores())
