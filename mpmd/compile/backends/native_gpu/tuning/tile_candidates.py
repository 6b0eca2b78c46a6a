"""The ways to compute what a program's kernels compute: tiles, warps, stages and programs of each family."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from mpmd.compile.backends.native_gpu.gpu_devices import GpuModel
from mpmd.compile.backends.native_gpu.products import in_one_kernel, stored_sums
from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.backends.native_gpu.triton import products
from mpmd.compile.backends.native_gpu.triton.attention import attention_kernels
from mpmd.compile.backends.native_gpu.triton.choices import OWN, kernel_key, sized_plan
from mpmd.compile.backends.native_gpu.triton.compile_kernels import Cubin
from mpmd.compile.backends.native_gpu.triton.products import product_kernel
from mpmd.compile.backends.native_gpu.triton.tiling import power_of_two
from mpmd.compile.backends.native_gpu.triton.triton_kernels import PrintedKernel, plan_kernels
from mpmd.compile.kernels.kernel_plan import KernelPlan
from mpmd.compile.kernels.operations import DTYPE_BYTES
from mpmd.compile.kernels.product_plans import AttentionPlan, MatmulPlan
from mpmd.compile.thunks.thunk import Thunk, kernel_thunks

_SIDES, _DEPTHS, _WARPS, _STAGES = (64, 128, 256), (32, 64, 128), (4, 8), (3, 4)
_MIN_HELD, _MAX_HELD = 16, 128
"""Numbers of a tile in one thread: twice as many do not fit into its registers."""
_POSITIONS = ((64, 128), (32, 64, 128), _WARPS, (2, 3))
"""Of a program of attention, of its iterations, and its warps and stages."""
_POINTS, _SHARES, _MAX_WARPS = (1024, 4096), (0.5, 1, 2, 4), 32
"""Points of a tile, and of one of sums; shares of them and of programs."""


@dataclasses.dataclass(frozen=True)
class TileWay:
    """One way to compute something.

    Attributes:
        choice: its tile as a table has it, or `OWN` of that by rules.
        kernels: launched one after the other.
    """

    choice: str
    kernels: tuple[PrintedKernel, ...]


@dataclasses.dataclass(frozen=True)
class TunedKernel:
    """What some kernels compute, and the ways to do so.

    Attributes:
        key: of the kernel by rules; see `kernel_key`.
        name: of an instruction that it computes.
        count: how often it is launched, once in each loop.
        ways: the one by rules, then others.
    """

    key: str
    name: str
    count: int
    ways: tuple[TileWay, ...]


def tuned_kernels(thunks: Iterable[Thunk], gpu: GpuModel, *, library: bool = False) -> list[TunedKernel]:
    """The distinct kernels of programs with their ways.

    Args:
        thunks: of the programs.
        gpu: the GPU that they are for.
        library: whether the matrix library's products are among them.
    """
    kernels: dict[str, TunedKernel] = {}
    for thunk in kernel_thunks(list(thunks)):
        plan: KernelPlan | MatmulPlan | AttentionPlan | None = thunk.plan
        if isinstance(plan, MatmulPlan) and not in_one_kernel(plan):
            multiplied = library and not products.refusal(plan)
            plan = plan if multiplied else plan.epilogue if stored_sums(plan) is None else None
        for own, others in _families(plan, gpu):
            key = kernel_key(own[0])
            if key in kernels:
                kernels[key] = dataclasses.replace(kernels[key], count=kernels[key].count + 1)
                continue
            distinct = {tuple(map(kernel_key, way.kernels)): way for way in others}
            kernels[key] = TunedKernel(key, thunk.name, 1, (TileWay(OWN, own), *distinct.values()))
    return list(kernels.values())


def _families(
    plan: KernelPlan | MatmulPlan | AttentionPlan | None, gpu: GpuModel
) -> Iterator[tuple[tuple[PrintedKernel, ...], Iterator[TileWay]]]:
    """Kernels by rules that get a tile of their own, each with other ways."""
    if isinstance(plan, MatmulPlan):
        yield product_kernel(plan, gpu.device.units).kernels, _of_product(plan, gpu)
    elif isinstance(plan, AttentionPlan):
        for k, kernel in enumerate(attention_kernels(plan).kernels):
            yield (kernel,), _of_attention(plan, k)
    elif plan is not None and (own := plan_kernels(plan, gpu.programs).kernels):
        yield own, _of_plan(plan, gpu.programs)


def _of_product(plan: MatmulPlan, gpu: GpuModel) -> Iterator[TileWay]:
    width = max(int(DTYPE_BYTES[view.dtype]) for view in (plan.a, plan.b))
    for sizes in itertools.product(_SIDES, _SIDES, _DEPTHS, _WARPS, _STAGES):
        rows, columns, depth, warps, stages = sizes
        fits = rows <= power_of_two(plan.m) and columns <= power_of_two(plan.n) and depth <= plan.k
        shared = (stages - 1) * (rows + columns) * depth * width
        if fits and _MIN_HELD <= rows * columns // (32 * warps) <= _MAX_HELD and shared <= gpu.shared_bytes:
            kernel = product_kernel(plan, gpu.device.units, sizes)
            yield TileWay(f"{rows}x{columns}x{depth} w{warps} s{stages}", kernel.kernels)


def _of_attention(plan: AttentionPlan, number: int) -> Iterator[TileWay]:
    """Of one of its kernels, beside one of the same sizes."""
    for outer, inner, warps, stages in itertools.product(*_POSITIONS):
        sizes = (outer, inner, warps, stages)
        kernel = attention_kernels(plan, (sizes, sizes)).kernels[number]
        yield TileWay(f"{outer}x{inner} w{warps} s{stages}", (kernel,))


def _of_plan(plan: KernelPlan, programs: int) -> Iterator[TileWay]:
    sums = plan.kind in ("column", "mixed")
    for share, more, wider in itertools.product(_SHARES, _SHARES if sums else (1,), (0.5, 1, 2)):
        points, count = int(share * _POINTS[sums]), int(more * programs)
        warps = int(wider * plan_kernels(plan, count, points).kernels[0].warps)
        if 1 <= warps <= _MAX_WARPS:
            yield TileWay(f"p{points} g{count} w{warps}", sized_plan(plan, points, count, warps).kernels)


@dataclasses.dataclass(frozen=True)
class CompiledLaunch:
    """A launch of a kernel.

    Attributes:
        cubin: its machine code.
        grid: programs.
        operands: numbers of its arguments; equal ones of launches of a way are one array.
        sizes: their bytes.
        pointers: their types.
        writes: the operands that it writes.
    """

    cubin: Cubin
    grid: int
    operands: tuple[int, ...]
    sizes: tuple[int, ...]
    pointers: tuple[str, ...]
    writes: frozenset[int]


@dataclasses.dataclass(frozen=True)
class CompiledWay:
    """A way as machine code.

    Attributes:
        key, name: see `TunedKernel`.
        choice: see `TileWay`.
        launches: one after the other.
        flops: of its products.
        moved: bytes that it reads and writes at least.
    """

    key: str
    name: str
    choice: str
    launches: tuple[CompiledLaunch, ...]
    flops: float
    moved: int


def compiled(kernel: TunedKernel, way: TileWay, target: GpuTarget) -> CompiledWay | None:
    """A way as machine code; None if it needs more shared memory than there is.

    The way by rules has the tile that the target takes.  Others may have stack: times say what it costs.

    Raises:
        CompileError: it does not compile.
    """
    launches = []
    for each in way.kernels:
        while True:
            (cubin,) = target.compiler.compile({each.name: each}, target.gpu.capability, None).values()
            if target.fits(cubin) or each.smaller is None:
                break
            each = each.smaller
        if cubin.shared_bytes > target.gpu.shared_bytes:
            return None
        launches.append(
            CompiledLaunch(cubin, each.grid, each.operands, each.sizes, each.pointers, each.writes)
        )
    flops, moved = sum(k.flops for k in way.kernels), sum(sum(k.sizes) for k in way.kernels)
    return CompiledWay(kernel.key, kernel.name, way.choice, tuple(launches), flops, moved)
