"""For every test: eight virtual CPU devices, asked for before JAX is used; Ctrl-C interrupts; poison."""

import inspect
import signal

import jax
import pytest

from mpmd.compile.backends.native_cpu.compilation import prepare_fragment

jax.config.update("jax_num_cpu_devices", 8)

# A shell ignores Ctrl-C for what it runs in the background, and Python then leaves it ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_DEFAULTS = inspect.unwrap(prepare_fragment).__kwdefaults__
_DEFAULTS["poison"] = True  # native code overwrites memory as soon as it is free: wrong reads give NaN or -1


@pytest.fixture
def unpoisoned():
    """Native code as users get it, for tests of its text, its size or its speed."""
    _DEFAULTS["poison"] = False
    yield
    _DEFAULTS["poison"] = True


@pytest.fixture
def plain_xla(request):
    """`jax.jit` without most of XLA's optimizations: the same numbers, compiled in two thirds of the time.

    Slow tests compare with what XLA makes of a function when it does all it can.
    """
    if request.node.get_closest_marker("slow"):
        yield
        return
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
