"""For every test: eight virtual CPU devices, Ctrl-C interrupts, poison, short compiles, little garbage."""

import gc
import signal

import jax
import pytest

from mpmd.compile.llvm import engine
from tests.preconditions import rooms, rows
from tests.support.fast_cases import mark_slow_cases
from tests.support.poison import poison, poison_always
from tests.support.xla_hlo import XlaWorker

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)

# A shell ignores Ctrl-C for what it runs in the background, and Python then leaves it ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

poison_always()  # native code finds NaN in memory that nobody wrote


gc.disable()  # until the tests are collected: they are many objects, and none of them is garbage


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Garbage collections do not traverse modules and collected tests: a full one would take 0.25 s."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def unpoisoned():
    """Native code as users get it, for tests of its text, its size or its speed."""
    with poison(False):
        yield


@pytest.fixture(scope="session")
def xla_processes():
    """One with most of XLA's optimizations and one without; each starts with its first program."""
    with XlaWorker(optimized=True) as optimized, XlaWorker(optimized=False) as plain:
        yield {True: optimized, False: plain}


@pytest.fixture
def xla(request, xla_processes):
    """XLA in a process of its own."""
    return xla_processes[is_optimized(request.node)]


_USERS_EFFORT = engine._EFFORT


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    named = {row.test for room in rooms() for row in rows(room)}
    mark_slow_cases(items, whole=not any("::" in argument for argument in config.args), named=named)


def is_optimized(item):
    return bool(item.get_closest_marker("slow") or item.get_closest_marker("optimized"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """XLA and LLVM optimize little, in half of the time; tests `slow` or `optimized` compile as users do."""
    optimized = is_optimized(item)
    engine._EFFORT = _USERS_EFFORT if optimized else 0
    jax.config.update("jax_disable_most_optimizations", not optimized)


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
