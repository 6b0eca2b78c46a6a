"""Steps of two processes while strangers hold connections to every port of both; each prints a JSON line.

    mpmd-run -n 2 -m tests.support.with_strangers

Between two runs of steps process 0 connects to all ports that its own and the other process listen on, as a
port scanner does; one of the strangers speaks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket

import jax
import jax.numpy as jnp

import mpmd
from mpmd.runtime.processes.world import world

STEPS = 50


def ports(pids: list[int]) -> list[int]:
    """The ports of loopback that some processes listen on, by inodes."""
    owned = set()
    for pid in pids:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                owned |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{entry}")))
    with open("/proc/net/tcp") as file:
        rows = [line.split() for line in file][1:]
    return [int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in owned]


def main() -> None:
    config = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), {"f": "m0", "g": "m1"})
    f = mpmd.named_computation(jnp.tanh, name="f")
    g = mpmd.named_computation(lambda x: x + 1, name="g")
    step = mpmd.jit(config)(lambda x: g(f(x)))
    x = jnp.ones(4)
    for _ in range(STEPS):
        step(x)
    joined = world()
    assert joined is not None
    with joined.exchange("processes") as exchange:
        pids = exchange.gather_json(os.getpid())
    strangers = []
    if jax.process_index() == 0:
        strangers = [socket.create_connection(("127.0.0.1", port), 5) for port in ports(pids)]
        for stranger in strangers[::2]:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
    with joined.exchange("strangers") as exchange:
        exchange.gather("")
    for _ in range(STEPS):
        last = step(x)
    found = float(mpmd.fetch(last)[0])
    print(
        json.dumps({"process": jax.process_index(), "strangers": len(strangers), "found": found}), flush=True
    )
    for stranger in strangers:
        stranger.close()


if __name__ == "__main__":
    main()
