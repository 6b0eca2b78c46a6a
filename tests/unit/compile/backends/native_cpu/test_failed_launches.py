"""Launches on several devices: devices that come late, launches that fail and leave the next one whole."""

from __future__ import annotations

import ctypes
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.support.native_meshes import OnMesh, call_on, giving_up_after, memory_of_mesh, mesh_of, values

pytestmark = pytest.mark.usefixtures("plain_xla")


def late(k):
    """Work that takes a device the longer the larger k is."""
    return lax.fori_loop(0, k * 2000, lambda i, x: jnp.sin(x) + 1, jnp.float32(0)) * 0


def test_devices_that_come_at_different_times():
    def function(a, b):
        for turn in range(4):
            who = (lax.axis_index("x") + turn) % 4
            a = a + late(who)
            total = lax.psum(a, "x") / 4
            a = jnp.tanh(total @ b) + lax.ppermute(a, "x", [(0, 1), (1, 2), (2, 3), (3, 0)])
        return a

    arguments = [values(32, 16), values(16, 16) / 8]
    made = OnMesh(function, arguments, mesh_of({"x": 4}), [P("x"), P()], P("x"))
    for _ in range(5):
        made.check(1e-4)


# -- launches that fail -----------------------------------------------------------------------------------


def sum_on_two():
    """A sum over two devices, and its program."""
    made = OnMesh(lambda a: lax.psum(a, "x"), [values(2, 3)], mesh_of({"x": 2}), [P("x")], P())
    return made, made.program()


def test_a_launch_that_failed_leaves_the_next_one_whole():
    made, program = sum_on_two()
    for device in (0, 1, 1, 0):
        with (
            giving_up_after(program, 20),
            pytest.raises(jax.errors.JaxRuntimeError, match="waited too long for the other devices"),
        ):
            call_on(program, jax.devices()[device]).block_until_ready()
        made.check()


def test_a_device_that_waits_for_a_launch_that_others_never_had_is_told_by_the_next_one():
    made, program = sum_on_two()
    errors = []

    def alone():
        try:
            call_on(program, jax.devices()[0]).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=alone)
    waiting.start()
    arrivals = memory_of_mesh(program) + made.native.artefact.code.mesh.barrier(-1, 0)
    arrived = ctypes.c_int64.from_address(arrivals)
    while waiting.is_alive() and not arrived.value:
        time.sleep(1e-3)
    made.check()
    waiting.join()
    made.check()
    assert len(errors) == 1
    assert "different launches" in errors[0]


def test_a_failure_inside_of_a_program_leaves_the_next_call_whole():
    """In the first call the devices take different branches, in the second the same one."""

    def function(a, alike):
        both = lax.psum(a, "x")
        some = (lax.axis_index("x") == 0) | (alike[0] == 1)
        return lax.cond(some, lambda x: lax.psum(x, "x") + both, lambda x: x - both, jnp.cos(a))

    arguments = [values(4, 6), np.ones(1, np.int32)]
    made = OnMesh(function, arguments, mesh_of({"x": 2}), [P("x"), P()], P("x"))
    for _ in range(3):
        with (
            giving_up_after(made.program(), 1000),
            pytest.raises(jax.errors.JaxRuntimeError, match="or took another branch"),
        ):
            jax.block_until_ready(made.native(made.arguments[0], np.zeros(1, np.int32)))
        made.check(1e-5)
