"""Ports that JAX listens on: found, and closed to those who are not connected yet.

The sockets belong to native code, which has no call to stop listening.  Linux has filters for the packets
of a socket.  This one lets a connection begin and drops all that follows, so that the stranger's half is open
and the native code never learns of it.  Connections that exist have a socket, and so a filter, of their own.

Source: socket(7), SO_ATTACH_FILTER; linux/filter.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

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
    return {os.fstat(found.fileno()).st_ino for found in _listening()}


def close_to_strangers(inode: int) -> bool:
    """Keeps new connections from a listening socket; those that it has accepted stay.

    Returns:
        Whether it did: systems other than Linux cannot.
    """
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in _ONLY_SYN))
    program = struct.pack("HP", len(_ONLY_SYN), ctypes.addressof(code))
    closed = False
    for found in _listening():
        if os.fstat(found.fileno()).st_ino == inode:
            with contextlib.suppress(OSError):
                found.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
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
            found = socket.socket(fileno=copy)
        except OSError:  # no socket
            os.close(copy)
            continue
        with found:
            try:
                listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            except OSError:
                continue
            if listens and found.family in (socket.AF_INET, socket.AF_INET6):
                yield found
