"""The switches of `benchmarks/ablation.py` name mechanisms that exist, and turn them off."""

import contextlib

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.ablation import SWITCHES, without
from mpmd.compile.backends.native_cpu.target import NativeCpu
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.llvm.cpu import host_target
from mpmd.compile.llvm.function_builder import Module
from tests.support.native_fragments import fragment_of


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_replaces_what_exists_and_puts_it_back(switch):
    with contextlib.ExitStack() as stack:
        before = [stack.enter_context(off.patch()) for off in SWITCHES[switch]]
    assert len(before) == len(SWITCHES[switch])


def test_a_switch_changes_the_code_of_what_has_the_mechanism():
    fragment = fragment_of(lambda x: jnp.tanh(x.T), np.zeros((64, 48), np.float32))

    def code(switch):
        with without(switch):
            module = Module(host_target())
            prepare_fragment(fragment, NativeCpu()).program.threaded.emit(module)
            return module.text()

    assert code("transposes") != code("") == code("thin products")
