"""A port that is closed to strangers keeps the connections that it has."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from mpmd.runtime.channels.links import close_to_strangers, listening_sockets


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has filters for the packets of a socket")
def test_nobody_is_let_in_and_those_who_are_in_stay():
    before = listening_sockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.3)
        (door,) = listening_sockets() - before
        assert door == os.fstat(server.fileno()).st_ino
        with socket.create_connection(server.getsockname(), 2) as friend, server.accept()[0] as known:
            assert close_to_strangers(door)
            with socket.create_connection(server.getsockname(), 2) as stranger:
                stranger.sendall(b"what the stranger says")
                with pytest.raises(TimeoutError):
                    server.accept()
                friend.sendall(b"hello")
                assert known.recv(5) == b"hello"
    assert not close_to_strangers(door), "it is gone"
