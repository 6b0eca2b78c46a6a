"""Connections for arrays between processes, by JAX's transfer server, whose ports are closed to strangers."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from mpmd import jax_distributed
from mpmd.errors import ConfigError, TransferError
from mpmd.runtime.processes.exchange import WorldExchange
from mpmd.runtime.run.waiting import wait_for

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER; Python has no name for it
_ONLY_SYN = [
    (0x30, 0, 0, 13),  # load the byte of the flags
    (0x45, 0, 1, 0x02),  # is SYN set?
    (0x06, 0, 0, 0xFFFFFFFF),  # keep the packet
    (0x06, 0, 0, 0),  # drop it
]
"""Instructions of a filter: code, jump if true, jump if false, operand."""


def listening_sockets() -> set[int]:
    """The inodes of the sockets of this process that listen for TCP connections; none but on Linux."""
    return {os.fstat(listening.fileno()).st_ino for listening in _listening()}


def close_to_strangers(inode: int) -> bool:
    """Keeps new connections from a listening socket; those that it has accepted stay.

    Returns:
        Whether it did: systems other than Linux cannot.
    """
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in _ONLY_SYN))
    program = struct.pack("HP", len(_ONLY_SYN), ctypes.addressof(code))
    closed = False
    for listening in _listening():
        if os.fstat(listening.fileno()).st_ino == inode:
            with contextlib.suppress(OSError):
                listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
                closed = True
    return closed


def _listening() -> Iterator[socket.socket]:
    """Each such socket for a moment, by a descriptor of its own."""
    folder = Path("/proc/self/fd")
    if sys.platform != "linux" or not folder.is_dir():
        return
    for entry in folder.iterdir():
        try:
            copy = os.dup(int(entry.name))
        except OSError:  # closed meanwhile
            continue
        try:
            candidate = socket.socket(fileno=copy)
        except OSError:  # no socket
            os.close(copy)
            continue
        with candidate:
            try:
                listens = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            except OSError:
                continue
            if listens and candidate.family in (socket.AF_INET, socket.AF_INET6):
                yield candidate


GREETING = (1 << 28) - 1
"""In place of a step: the number of the messages that show that connections work."""
_GREETING_POLLS = 600
"""How often a wait of 50 ms for the message of another process is repeated."""
STEP_BITS, MESSAGE_BITS, PROGRAM_BITS = 28, 24, 10
"""Parts of a number: it must be fresh, because a second offer under one number replaces the first."""
FETCHES = (1 << PROGRAM_BITS) - 1
"""The program number of the messages of `everywhere`, which belong to no program."""


class Links:
    """This process's transfer server, and its connections to those of the other processes.

    Attributes:
        world: the processes.
        addresses: of the servers of all processes.
    """

    def __init__(self, exchange: WorldExchange) -> None:
        """Starts the server, connects it to all others, and accepts no other connection from then on.

        Raises:
            ConfigError: this version of JAX has no transfer server.
            TransferError: a process cannot be reached.
        """
        self.world = joined = exchange.world
        doors = listening_sockets()
        self._client: Any = jax.local_devices()[0].client
        host = address_of_this_host()
        self._server: Any = jax_distributed.start_transfer_server(self._client, host)
        if self._server is None:
            raise ConfigError("there are several processes, but this version of JAX has no transfer server")
        self._offer = jax_distributed.offering(self._server)
        _, _, port = str(self._server.address()).rpartition(":")
        doors = listening_sockets() - doors
        self.addresses = exchange.gather(f"{host}:{port}")
        others = [process for process in range(joined.count) if process != joined.index]
        self._connections = {process: self._server.connect(self.addresses[process]) for process in others}
        self._programs = itertools.count()
        joined.on_failure(self.poison)
        self._greet(others)
        exchange.gather("")  # all are connected
        for door in doors:
            close_to_strangers(door)

    def _greet(self, others: Sequence[int]) -> None:
        """Sends an array to each process and waits for one of each: a connection that hangs is found here.

        Raises:
            TransferError: none came.
        """
        here = SingleDeviceSharding(jax.local_devices()[0])
        kind = jax.ShapeDtypeStruct((1,), np.int32, sharding=here)
        word = jax.device_put(np.zeros(1, np.int32), here)
        for process in others:
            self.offer(message_number(FETCHES, GREETING, process), [word])
        polls = itertools.count()  # time is counted in polls: a process that is stopped loses none

        def check() -> None:
            self.world.check()
            if next(polls) > _GREETING_POLLS:
                raise TransferError(
                    f"no connection for arrays to process {process} after {_GREETING_POLLS} polls\n"
                    f"  got: {self.addresses[process]} accepts, and does not answer\n"
                    "  another program may have connected to that port: start all processes again"
                )

        for process in others:
            (answer,) = self.pull(process, message_number(FETCHES, GREETING, self.world.index), [kind])
            wait_for(answer, check)

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
        own_address = str(probe.getsockname()[0])
    return f"[{own_address}]" if family == socket.AF_INET6 else own_address


_links: list[Links] = []


def links(exchange: WorldExchange) -> Links:
    """The connections of this process; made in the first exchange that needs them."""
    if not _links:
        _links.append(Links(exchange))
    return _links[0]
