"""Random HLO programs as launches on a stand-in GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.hlo import HloModule
from mpmd.compile.options import DEFAULTS
from tests.support.gpu_launches import run_program
from tests.support.native_hlo import fragment_of_module
from tests.support.poison import poison

_MULTIPLYING = ("dot", "convolution")


def run_module_on_gpu(module: HloModule, arguments: list[Any]) -> list[np.ndarray]:
    """The leaves of the result of one run; products have all digits, as those of the evaluator.

    Raises:
        CompileError: GPUs have no code for it.
    """
    fragment, module = fragment_of_module(module), module.clone()
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.opcode in _MULTIPLYING:
                instruction.attributes["operand_precision"] = ("highest", "highest")
    with poison(False):
        program = prepare_fragment(fragment, GpuTarget(), DEFAULTS, module).program
    return run_program(program, fragment, [np.asarray(a) for a in arguments])
