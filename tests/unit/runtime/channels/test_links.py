"""Connections between processes: what is offered before it is computed, and what cannot be offered."""

from __future__ import annotations

import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd import jax_compat, jax_distributed
from mpmd.errors import TransferError
from mpmd.runtime.channels.links import Links
from mpmd.support.resources import on_cores

LARGE, PENDING = 1 << 20, 20
"""Each array has eight times as many bytes as the server has memory for one copy, of which there are 8."""


def test_arrays_that_are_ready_pass_those_that_are_still_computed():
    client = jax.devices()[0].client
    server = jax_distributed.start_transfer_server(client, "127.0.0.1")
    if server is None:
        pytest.skip("this JAX has no transfer server")
    offer, connection = jax_distributed.offering(server), server.connect(server.address())
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    x = jax.device_put(jnp.zeros(LARGE, jnp.float32), here).block_until_ready()
    kind = jax.ShapeDtypeStruct((LARGE,), jnp.float32, sharding=here)

    def pull(number):
        return jax_distributed.pull(connection, client, number, [kind])[0]

    awaited = pull(PENDING + 1)  # not offered yet
    pending = jax.jit(lambda x: [x + k for k in range(PENDING)])(awaited)
    for k, array in enumerate(pending):
        offer(k, [array])
    arrays = [pull(k) for k in range(PENDING)]
    offer(PENDING, [x])
    ready, end = pull(PENDING), time.monotonic() + 10
    while not ready.is_ready() and time.monotonic() < end:
        time.sleep(1e-3)
    assert ready.is_ready() and not any(array.is_ready() for array in (*pending, *arrays))
    offer(PENDING + 1, [x])
    assert [float(array[-1]) for array in arrays] == list(range(PENDING))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be kept on one core")
def test_a_message_takes_no_thread_of_the_client():
    """A client on one core has one thread: a fragment that computes for long does not hold messages up."""
    with on_cores(sorted(os.sched_getaffinity(0))[:1]):
        client = jax_compat.make_cpu_client(1)
    if client is None or (server := jax_distributed.start_transfer_server(client, "127.0.0.1")) is None:
        pytest.skip("this JAX has no clients, or transfer server")
    (device,) = client.devices()
    here = jax.sharding.SingleDeviceSharding(device)
    ready = jax.device_put(np.arange(LARGE, dtype=np.float32), device).block_until_ready()
    began, may_end = threading.Event(), threading.Event()

    def hold(x):
        began.set()
        assert may_end.wait(60)
        return np.float32(1)

    @jax.jit
    def holding(x):
        late = (x[:512, None] * x[None, :512] @ jnp.ones((512, 512))).sum() * 0
        return jax.pure_callback(hold, jax.ShapeDtypeStruct((), jnp.float32), late)

    holding.lower(ready).compile()
    try:
        blocked = jax.jit(lambda x: x + 1)(ready)  # not ready: what reads it runs on the client's thread
        held = threading.Thread(target=lambda: holding(blocked).block_until_ready())
        held.start()
        assert began.wait(60)
        jax_distributed.offering(server)(1, [ready])
        kind = jax.ShapeDtypeStruct((LARGE,), jnp.float32, sharding=here)
        (got,) = jax_distributed.pull(server.connect(server.address()), client, 1, [kind])
        end = time.monotonic() + 20
        while not got.is_ready() and time.monotonic() < end:
            time.sleep(1e-3)
        assert got.is_ready() and not may_end.is_set()
    finally:
        may_end.set()
        held.join()
    assert float(got[-1]) == LARGE - 1


def test_what_cannot_be_offered_names_its_mesh_and_the_cause():
    class Unconnected(Links):
        def __init__(self):
            pass

        def offer(self, number, arrays):
            raise ValueError("no connection")

    with pytest.raises(TransferError, match="^mesh 'm' could not send an array to another") as raised:
        Unconnected().send("m", 1, [])
    assert raised.value.mesh == "m" and "ValueError: no connection" in str(raised.value)
