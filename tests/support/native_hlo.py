"""Running HLO modules as native code, without XLA around them."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpmd.compile.backends.arrays import value_spec
from mpmd.compile.backends.native_cpu.compilation import Compilation, prepare_fragment
from mpmd.compile.backends.native_cpu.target import host_target
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import HloModule
from tests.support import native_fragments


def fragment_of_module(module: HloModule) -> FragmentModule:
    """The border of a module as that of a fragment."""
    parameters = tuple(value_spec(p.shape) for p in module.entry.parameters)
    results = tuple(value_spec(shape) for _, shape in module.entry.root.shape.leaves())
    return FragmentModule("fragment", "mesh", module.name, parameters, results)


def compile_module(module: HloModule) -> tuple[FragmentModule, Compilation]:
    """A module compiled for this machine; the passes work on a copy."""
    fragment = fragment_of_module(module)
    return fragment, prepare_fragment(fragment, host_target(), module=module.clone()).compiled()


def run_module(module: HloModule, arguments: list[Any]) -> list[np.ndarray]:
    """The leaves of the result of one run."""
    fragment, made = compile_module(module)
    return native_fragments.run(fragment, arguments, made)
