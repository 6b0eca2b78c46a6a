"""Measured instead of modelled: kernels are timed alone on this machine, once, and what they took is kept.

Fusion asks what groups take, products ask which of their tilings is fastest.  Times lie in a file beside the
compile cache, one per kind of CPU; without a cache they last as long as the process.  Nothing here runs
unless `kernel_costs=measured` asks for it: by default every choice follows from descriptions alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from mpmd.compile.backends.native_cpu.direct import DirectKernel, aligned_empty
from mpmd.compile.backends.native_cpu.emit.epilogue import PlanEpilogue
from mpmd.compile.backends.native_cpu.gemm.kernel import GemmKernel
from mpmd.compile.backends.native_cpu.gemm.problem import Gemm, Matrix
from mpmd.compile.backends.native_cpu.gemm.tiling import Tiling, tilings
from mpmd.compile.backends.native_cpu.profile import best_seconds, profile_plan
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.kernels.cost.device import HOST
from mpmd.compile.kernels.cost.products import product_workloads
from mpmd.compile.kernels.cost.profiled import ProfiledCosts, measured_by
from mpmd.compile.kernels.cost.workload import KernelWorkload
from mpmd.compile.kernels.matmul import MatmulPlan
from mpmd.compile.kernels.operations import FLOATS, NUMPY_DTYPE
from mpmd.compile.kernels.plan import KernelPlan
from mpmd.compile.options import MEASURED, CompileOptions
from mpmd.errors import CompileError

_CLEARLY = 0.97
"""Another tiling takes at most this part of the usual one's time: less is noise."""
_LONGEST = 1 << 31
"""Bytes of the arrays of one kernel: what needs more is not measured."""

_LOCK = threading.Lock()
_COSTS: dict[tuple[str, Path | None], ProfiledCosts] = {}


def costs_path(folder: Path, target: CpuTarget) -> Path:
    """The file of measured times of kernels for a CPU, in the folder of a compile cache."""
    kind = hashlib.sha256(target.key().encode()).hexdigest()[:16]
    return folder / f"kernel-costs-{kind}.jsonl"


def tuning_for(target: CpuTarget, options: CompileOptions) -> Tuning | None:
    """What measures kernels for a compilation; None where costs are modelled.

    Raises:
        CompileError: the code is not for this machine.
    """
    if options.kernel_costs != MEASURED:
        return None
    path = costs_path(options.cache.folder, target) if options.cache is not None else None
    return Tuning(target, path)


class Tuning:
    """Times of kernels on this machine.

    Args:
        target: the CPU.
        path: where times are kept; None keeps them in this process.

    Raises:
        CompileError: the target is another machine's.
    """

    def __init__(self, target: CpuTarget, path: Path | None = None) -> None:
        if not target.runs_here():
            raise CompileError(
                f"kernels for {target.cpu} cannot be measured on this machine\n"
                "  compile for it with kernel_costs=modelled"
            )
        self.target = target
        with _LOCK:
            self.costs = _COSTS.setdefault((target.key(), path), ProfiledCosts(path))

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Let passes ask for measured times meanwhile."""
        with measured_by(self.seconds):
            yield

    def seconds(self, plan: KernelPlan, work: KernelWorkload) -> float | None:
        """What a plan takes on one thread; None if its arrays are too large to try."""
        if sum(operand.bytes for operand in plan.operands) > _LONGEST:
            return None
        with _LOCK:
            return profile_plan(replace(plan, name="kernel"), self.target, HOST, self.costs, work)

    def tiling(self, plan: MatmulPlan, gemm: Gemm) -> Tiling:
        """The tiling with which a product is fastest alone: the usual one unless another clearly is."""
        usual, *others = tilings(gemm, self.target)
        if not others or _bytes(plan, gemm) > _LONGEST:
            return usual
        plan = replace(plan, name="product")
        best, least = usual, self._product_seconds(plan, gemm, usual) * _CLEARLY
        for other in others:
            seconds = self._product_seconds(plan, gemm, other)
            if seconds < least:
                best, least = other, seconds
        return best

    def _product_seconds(self, plan: MatmulPlan, gemm: Gemm, tiling: Tiling) -> float:
        def run() -> float:
            epilogue = None
            arrays = [_filled(_span(gemm.a, gemm, gemm.m, gemm.k), gemm.a.dtype)]
            arrays.append(_filled(_span(gemm.b, gemm, gemm.k, gemm.n), gemm.b.dtype))
            if plan.epilogue is None:
                arrays.append(_filled(_span(gemm.c, gemm, gemm.m, gemm.n), gemm.c.dtype))
            else:
                epilogue = PlanEpilogue(replace(plan.epilogue, name="product_epilogue"), plan.sums)
                numbers = [int(pointer.removeprefix("p")) for pointer in epilogue.pointers]
                operands = [plan.epilogue.operands[k] for k in numbers]
                arrays += [_filled(o.size, o.dtype) for o in operands]
            kernel = DirectKernel(GemmKernel("product", gemm, tiling, epilogue), self.target)
            return best_seconds(kernel.prepare(*arrays))

        with _LOCK:
            return self.costs.measure(HOST, f"{tiling}\n{plan.text()}", product_workloads(plan)[0], run)


def _span(matrix: Matrix, gemm: Gemm, rows: int, columns: int) -> int:
    """Elements from the first of a matrix to its last."""
    sizes = (*gemm.batch, rows, columns)
    strides = (*matrix.batch_strides, matrix.row_stride, matrix.column_stride)
    return 1 + sum(max(0, size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _bytes(plan: MatmulPlan, gemm: Gemm) -> int:
    """Bytes of all arrays of a product, no element of which takes more than 8."""
    spans = _span(gemm.a, gemm, gemm.m, gemm.k) + _span(gemm.b, gemm, gemm.k, gemm.n)
    results = plan.epilogue.operands if plan.epilogue is not None else ()
    return 8 * (spans + gemm.m * gemm.n * gemm.batch_size) + sum(o.bytes for o in results)


def _filled(size: int, dtype: str) -> np.ndarray:
    """An array of floats between 0.1 and 1, or of zeros."""
    array = aligned_empty((size,), NUMPY_DTYPE[dtype])
    array[:] = np.random.default_rng(0).uniform(0.1, 1, size) if dtype in FLOATS else 0
    return array
