"""Running fragments by the reference target, without JAX around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpmd.compile.backends.jax_function import numpy_dtype
from mpmd.compile.backends.reference.target import Reference, ReferenceProgram
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import HloModule
from tests.support.native_hlo import fragment_of_module


def run_program(
    program: ReferenceProgram, fragment: FragmentModule, arguments: Sequence[Sequence[Any]]
) -> list[list[np.ndarray]]:
    """The results of a program, per device, from the arguments of each device."""
    bytes_ = [[np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in own] for own in arguments]
    return [
        [r.view(numpy_dtype(v.dtype)).reshape(v.shape) for r, v in zip(own, fragment.results, strict=True)]
        for own in program.run(bytes_)
    ]


def run_module(
    module: HloModule, arguments: Sequence[Sequence[Any]], axes: Mapping[str, int] | None = None
) -> list[list[np.ndarray]]:
    """The leaves of the result of a module, per device; the passes work on a copy."""
    fragment = fragment_of_module(module)
    made = prepare_fragment(fragment, Reference(), module=module.clone(), axes=axes)
    return run_program(made.program, fragment, arguments)
