"""The devices and cores of all processes, divided among meshes and processes."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from mpmd.errors import ConfigError
from mpmd.runtime.processes.exchange import WorldExchange
from mpmd.runtime.run.clients import available_cores


def placed(devices: Sequence[Any], counts: Mapping[str, int]) -> dict[str, list[Any]]:
    """The devices of each mesh, in order: in one process where it fits, over whole processes where not.

    ```
    processes of 2 devices, meshes of 1, 1, 2 and 4   ->   process 0, process 0, process 1, processes 2 and 3
    ```

    A mesh that does not fit into the rest of a process begins at the next one.

    Args:
        devices: of all processes, in the order of the processes.
        counts: devices per mesh, by name.

    Raises:
        ConfigError: there are too few devices, or a mesh is over a part of a process.
    """
    processes = [list(of) for _, of in itertools.groupby(devices, key=lambda device: device.process_index)]
    sizes = [len(of) for of in processes]
    at = 0
    by_mesh: dict[str, list[Any]] = {}
    for mesh, count in counts.items():
        if at < len(processes) and len(processes[at]) < count and len(processes[at]) < sizes[at]:
            at += 1
        taken: list[Any] = []
        first = at
        while len(taken) < count:
            if at == len(processes):
                raise _too_few(counts, sizes)
            wanted = count - len(taken)
            if at > first and wanted < sizes[at]:
                raise _not_whole(mesh, count, sizes[first : at + 1], first)
            taken += processes[at][:wanted]
            del processes[at][:wanted]
            at += not processes[at]
        by_mesh[mesh] = taken
    return by_mesh


def _too_few(counts: Mapping[str, int], sizes: Sequence[int]) -> ConfigError:
    rows = ", ".join(f"{mesh}: {count}" for mesh, count in counts.items())
    there = ", ".join(f"process {index}: {size}" for index, size in enumerate(sizes))
    return ConfigError(
        f"the topology needs more devices ({rows}) than the processes have ({there})\n"
        "  a mesh lies in one process, or is over whole processes: one that does not fit into the rest of a "
        "process begins at the next\n"
        "  give more devices, smaller meshes, or lists of devices, which meshes may share"
    )


def _not_whole(mesh: str, count: int, sizes: Sequence[int], first: int) -> ConfigError:
    fewer, more = sum(sizes[:-1]), sum(sizes)
    return ConfigError(
        f"mesh {mesh!r} of {count} devices does not fit into a process, and is not over whole processes\n"
        f"  processes {first} to {first + len(sizes) - 1} have {', '.join(map(str, sizes))} devices: give it "
        f"{fewer} or {more} of them, each process as many devices as its meshes need, such as mpmd-run "
        "--devices, or a list of devices"
    )


def own_cores(exchange: WorldExchange) -> tuple[int, ...]:
    """The cores with which this process computes.

    Raises:
        PeerError: a process failed meanwhile.
    """
    of_all = exchange.gather_json([_machine(), available_cores()])
    return share_of(exchange.world.index, [(machine, tuple(cores)) for machine, cores in of_all])


def share_of(index: int, places: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[int, ...]:
    """The part of its cores that a process takes.

    Args:
        index: of the process.
        places: for each process its machine and the cores that it may run on.

    Returns:
        A contiguous run of equal length for each process that shares cores with this one; one core, which
        others have too, if there are fewer cores than processes.
    """
    machine, cores = places[index]
    sharing = [p for p, (there, of) in enumerate(places) if there == machine and set(of) & set(cores)]
    size, turn = len(cores) // len(sharing), sharing.index(index)
    return cores[turn * size : (turn + 1) * size] if size else (cores[turn % len(cores)],)


def _machine() -> str:
    """Identifies this machine: containers on one may have host names of their own."""
    boot = "/proc/sys/kernel/random/boot_id"
    if os.path.exists(boot):
        with open(boot) as file:
            return file.read().strip()
    return socket.gethostname()
