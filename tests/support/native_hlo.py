"""Running HLO modules as native code, without XLA around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from mpmd.compile.backends.jax_function import value_spec
from mpmd.compile.backends.native_cpu.target import NativeCpu
from mpmd.compile.driver import Compilation, prepare_fragment
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import HloModule
from mpmd.compile.llvm import engine
from mpmd.compile.options import DEFAULTS
from mpmd.compile.schedule import memory_schedule
from tests.support import native_fragments
from tests.support.poison import poison as poisoning


def fragment_of_module(module: HloModule, donated: tuple[int, ...] = ()) -> FragmentModule:
    """The border of a module as that of a fragment."""
    parameters = tuple(value_spec(s) for p in module.entry.parameters for _, s in p.shape.leaves())
    results = tuple(value_spec(shape) for _, shape in module.entry.root.shape.leaves())
    return FragmentModule("fragment", "mesh", module.name, parameters, results, donated)


def compile_module(
    module: HloModule, *, donated: tuple[int, ...] = (), poison: bool = True
) -> tuple[FragmentModule, Compilation]:
    """A module compiled for this machine; the passes work on a copy."""
    fragment = fragment_of_module(module, donated)
    with poisoning(poison):
        return fragment, prepare_fragment(fragment, NativeCpu(), DEFAULTS, module.clone()).compiled()


def run_module(
    module: HloModule, arguments: list[Any], *, donated: tuple[int, ...] = (), poison: bool = True
) -> list[np.ndarray]:
    """The leaves of the result of one run."""
    fragment, made = compile_module(module, donated=donated, poison=poison)
    return native_fragments.run(fragment, arguments, made)


@contextmanager
def quick_code() -> Iterator[None]:
    """Compile in half of the time: the least effort of LLVM, and few orders tried in scheduling.

    For programs whose memory is in question rather than their kernels.
    """
    with (
        mock.patch.object(engine, "_EFFORT", 0),
        mock.patch.object(memory_schedule, "_MAX_TRIES", 10),
    ):
        yield
