"""Connections for arrays between processes, by JAX's transfer server.

A sender offers arrays under a number, a receiver pulls that number and gets arrays at once that are filled
later; the numbers pair them, in any order.  Arrays may be offered before they are computed: the server begins
to send one when it is, and others pass it meanwhile.  What listens: one server per process, on two free ports
of `address_of_this_host`.  It accepts connections from every program that reaches it.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from typing import Any

import jax

from mpmd import jax_distributed
from mpmd.errors import ConfigError, TransferError
from mpmd.runtime.processes.world import World, world
from mpmd.support.once import once

STEP_BITS, MESSAGE_BITS, PROGRAM_BITS = 28, 24, 10
"""Parts of a number: it must be fresh, because a second offer under one number replaces the first."""
FETCHES = (1 << PROGRAM_BITS) - 1
"""The program number of the messages of `everywhere`, which belong to no program."""


class Links:
    """This process's transfer server, and its connections to those of the other processes.

    Attributes:
        addresses: of the servers of all processes.
        begin: records a step or an exchange, see `World.begin`.
    """

    def __init__(self, joined: World) -> None:
        """Starts the server and exchanges addresses; all processes must do so.

        Raises:
            ConfigError: this version of JAX has no transfer server.
        """
        self._client: Any = jax.local_devices()[0].client
        host = address_of_this_host()
        self._server: Any = jax_distributed.start_transfer_server(self._client, host)
        if self._server is None:
            raise ConfigError("there are several processes, but this version of JAX has no transfer server")
        self._offer = jax_distributed.offering(self._server)
        _, _, port = str(self._server.address()).rpartition(":")
        self.addresses = joined.gather("address", f"{host}:{port}")
        self._connections: dict[int, Any] = {}
        self._programs = itertools.count()
        self.begin = joined.begin
        joined.on_failure(self.poison)

    def next_program(self) -> int:
        """A number for a program, equal in all processes that ask in the same order.

        Raises:
            ConfigError: there were too many.
        """
        number = next(self._programs)
        if number >= FETCHES:
            raise ConfigError(f"more than {FETCHES} programs were compiled by several processes")
        return number

    def offer(self, number: int, arrays: Sequence[jax.Array]) -> None:
        """Offers arrays; they may still be computed, and must not be consumed until they are pulled.

        The receiver of an array that fails gets the failure.
        """
        self._offer(number, list(arrays))

    def send(self, mesh: str, number: int, arrays: Sequence[jax.Array]) -> None:
        """Offers arrays of a mesh, see `offer`.

        Raises:
            TransferError: they cannot be offered, and their receiver would wait for them.
        """
        try:
            self.offer(number, arrays)
        except Exception as error:
            failure = TransferError(
                f"mesh {mesh!r} could not send an array to another process\n"
                f"  {type(error).__name__}: {error}\n"
                "  the processes cannot go on: start all of them again, from a checkpoint"
            )
            failure.mesh = mesh
            raise failure from error

    def pull(self, process: int, number: int, types: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """The arrays that a process offers under a number; they are on their way."""
        if process not in self._connections:
            self._connections[process] = self._server.connect(self.addresses[process])
        return list(jax_distributed.pull(self._connections[process], self._client, number, types))

    def poison(self) -> None:
        """Makes everything fail that is still on its way to this process."""
        for connection in list(self._connections.values()):
            jax_distributed.poison(connection)


def message_number(program: int, step: int, message: int) -> int:
    """The number of a message of a step, 62 bits."""
    return (program << STEP_BITS | step % (1 << STEP_BITS)) << MESSAGE_BITS | message


def address_of_this_host() -> str:
    """The address at which other processes reach this one: loopback if the coordinator is there.

    Otherwise it is the address from which this host reaches the coordinator: its own name may stand for
    another, such as 127.0.1.1.  Nothing is sent to find out.
    """
    host = jax_distributed.coordinator_address().rpartition(":")[0].strip("[]")
    if host in ("127.0.0.1", "localhost", "::1", ""):
        return "127.0.0.1"
    (family, kind, _, _, address), *_ = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        found = str(probe.getsockname()[0])
    return f"[{found}]" if family == socket.AF_INET6 else found


@once
def links() -> Links:
    """The connections of this process; made by the first call, which all processes must make."""
    joined = world()
    assert joined is not None
    return Links(joined)
