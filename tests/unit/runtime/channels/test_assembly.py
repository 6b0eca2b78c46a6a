"""Arrays assembled from pieces that are on their way."""

from __future__ import annotations

import time

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from mpmd import jax_distributed
from mpmd.runtime.channels.reshard import assembler, assembling


def test_an_assembly_that_waits_for_a_message_holds_no_fragment_up():
    """The message may depend on the fragment, through another process."""
    device = jax.devices("cpu")[0]
    server = jax_distributed.start_transfer_server(device.client, "127.0.0.1")
    if server is None:
        pytest.skip("this JAX has no transfer server")
    connection = server.connect(server.address().replace("[::]", "127.0.0.1"))
    kind = jax.ShapeDtypeStruct((4,), np.float32, sharding=SingleDeviceSharding(device))
    one, two = (connection.pull(number, [kind])[0] for number in (1, 2))
    with assembling():
        whole = assembler((8,), ((0,), (4,)))(one, two)
    ones = jax.device_put(np.ones((64, 64), np.float32), device)
    product = jax.jit(lambda a: a @ a)(ones)
    until = time.monotonic() + 20
    while not product.is_ready() and time.monotonic() < until:
        time.sleep(0.001)
    held_up, early = not product.is_ready(), whole.is_ready()
    for number in (1, 2):
        server.await_pull(number, [jax.device_put(np.full(4, number, np.float32), device)])
    np.testing.assert_array_equal(whole, [1, 1, 1, 1, 2, 2, 2, 2])
    assert not held_up and not early
