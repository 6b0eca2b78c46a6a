"""Connections between processes: what is offered before it is computed, and what cannot be offered."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest

from mpmd import jax_distributed
from mpmd.errors import TransferError
from mpmd.runtime.channels.links import Links

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


def test_what_cannot_be_offered_names_its_mesh_and_the_cause():
    def offer(number, arrays):
        raise ValueError("no connection")

    links = object.__new__(Links)
    links._offer = offer
    with pytest.raises(TransferError, match="^mesh 'm' could not send an array to another") as raised:
        links.send("m", 1, [])
    assert raised.value.mesh == "m" and "ValueError: no connection" in str(raised.value)
