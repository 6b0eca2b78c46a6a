"""Eight virtual CPU devices for every test, asked for before JAX is used; a Ctrl-C that interrupts."""

import signal

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)

# A shell ignores Ctrl-C for what it runs in the background, and Python then leaves it ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
