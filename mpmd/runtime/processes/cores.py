"""The cores of each process: those that several processes of a host may use are divided between them.

A process computes with as many threads as it has cores.  Four processes that each take both cores of a
machine would have eight threads, which wait for each other and take the cores from the others meanwhile.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from mpmd.runtime.clients import available_cores
from mpmd.runtime.processes.exchange import WorldExchange


def own_cores(exchange: WorldExchange) -> tuple[int, ...]:
    """The cores with which this process computes.

    Raises:
        PeerError: a process failed meanwhile.
    """
    found = exchange.gather_json([_machine(), available_cores()])
    return share_of(exchange.world.index, [(machine, tuple(cores)) for machine, cores in found])


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
