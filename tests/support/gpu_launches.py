"""A GPU that is not there: a launch program on NumPy arrays, step by step as it is listed.

Kernels are run by Triton's interpreter, products by NumPy from their descriptors; memory begins as NaN or -1.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mpmd.compile.backends.arrays import numpy_dtype
from mpmd.compile.backends.native_gpu.launches import (
    BranchLaunch,
    CopyLaunch,
    FillLaunch,
    KernelLaunch,
    LaunchProgram,
    LoopLaunch,
    ProductLaunch,
    Step,
)
from mpmd.compile.backends.native_gpu.products import ProductDescriptor, StoredMatrix
from mpmd.compile.buffers.assignment import Slice
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.thunks.poison import POISON


class StandInGpu:
    """The memory of one call of a program.

    Args:
        program: what is called.
    """

    def __init__(self, program: LaunchProgram) -> None:
        self.program = program
        self.buffers = [np.full(a.size, POISON, np.uint8) for a in program.allocations]
        for allocation, buffer in zip(program.allocations, self.buffers, strict=True):
            if allocation.kind == "constant":
                buffer[: len(program.constants)] = np.frombuffer(program.constants, np.uint8)

    def call(self, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The bytes of the results, from those of the arguments."""
        for buffer, data in zip(self.buffers, arguments):
            buffer[:] = data
        self._run(self.program.steps)
        return [self._at(place) for place in self.program.results]

    def _at(self, place: Slice) -> np.ndarray:
        return self.buffers[place.allocation][place.offset : place.offset + place.size]

    def _run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, LoopLaunch):
                self._run(step.condition)
                while self._at(step.flag)[0]:
                    self._run(step.body)
                    self._run(step.condition)
            elif isinstance(step, BranchLaunch):
                selector, last = int(self._at(step.selector).view(np.int32)[0]), len(step.branches) - 1
                self._run(step.branches[selector if 0 <= selector <= last else last])
            elif isinstance(step, KernelLaunch):
                # Triton is imported where there are kernels: programs of products alone run without it
                interpreter = importlib.import_module("tests.support.triton_interpreter")
                kernel = self.program.kernels[step.kernel]
                interpreter.run_kernel(kernel, [self._at(place) for place in step.arguments])
            elif isinstance(step, ProductLaunch):
                self._multiply(step)
            elif isinstance(step, CopyLaunch):
                self._at(step.target)[:] = self._at(step.source)
            else:
                assert isinstance(step, FillLaunch)
                self._at(step.target).view(np.uint32)[:] = step.word

    def _multiply(self, step: ProductLaunch) -> None:
        """As the library's documents say, but that sums are exact to f64 and rounded once."""
        this = step.descriptor
        a = self._matrices(step.a, this, this.a, this.m, this.k).astype(np.float64)
        b = self._matrices(step.b, this, this.b, this.k, this.n).astype(np.float64)
        d = self._matrices(step.d, this, this.d, this.m, this.n)
        with np.errstate(all="ignore"):
            d[...] = np.matmul(a, b).astype(d.dtype)

    def _matrices(
        self, place: Slice, product: ProductDescriptor, matrix: StoredMatrix, rows: int, columns: int
    ) -> np.ndarray:
        kind = np.dtype(NUMPY_DTYPE[matrix.dtype])
        steps = (matrix.stride, *((1, matrix.pitch) if matrix.transposed else (matrix.pitch, 1)))
        sizes = (product.batch, rows, columns)
        reach = sum((size - 1) * step for size, step in zip(sizes, steps)) + 1
        assert matrix.pitch >= (rows if matrix.transposed else columns), "the library refuses such a pitch"
        elements = self._at(place)[: reach * kind.itemsize].view(kind)
        assert elements.size == reach, "the matrix does not end inside of its array"
        return as_strided(elements, sizes, [step * kind.itemsize for step in steps])


def run_program(
    program: LaunchProgram, fragment: FragmentModule, arguments: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The results of a fragment's program."""
    given = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arguments]
    results = StandInGpu(program).call(given)
    return [
        made.view(numpy_dtype(value.dtype)).reshape(value.shape)
        for made, value in zip(results, fragment.results, strict=True)
    ]
