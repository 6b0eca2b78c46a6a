"""Kernels of a program in several ways: product tiles, blocks of attention, programs and warps of others."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Iterator, Sequence

from benchmarks.gpu.pack import OWN
from mpmd.compile.backends.native_gpu.devices import GpuModel
from mpmd.compile.backends.native_gpu.triton import attention, products
from mpmd.compile.backends.native_gpu.triton.attention import attention_kernels
from mpmd.compile.backends.native_gpu.triton.kernels import PrintedKernel, plan_kernels
from mpmd.compile.backends.native_gpu.triton.products import product_kernel
from mpmd.compile.backends.native_gpu.triton.tiling import power_of_two
from mpmd.compile.kernels.attention import AttentionPlan
from mpmd.compile.kernels.matmul import MatmulPlan
from mpmd.compile.kernels.plan import KernelPlan
from mpmd.compile.thunks.thunk import AttentionThunk, KernelThunk, MatmulThunk, Thunk

SIDES, DEPTHS, WARPS, STAGES = (64, 128, 256), (32, 64, 128), (4, 8), (3, 4)
MAX_ACCUMULATORS = 128
"""Numbers of a tile in one thread: twice as many do not fit into its registers."""
_LOOP = re.compile(r"in range\((0, \d+, \d+)\):")
_SUMS, _OTHERS = 6, 12
"""Plans of each kind of kernel, the largest first, of which there are variants."""


@dataclasses.dataclass(frozen=True)
class PrintedVariant:
    """A kernel before it is compiled; see `KernelVariant`."""

    group: str
    choice: str
    kernel: PrintedKernel


def variants_of(thunks: Sequence[Thunk], gpu: GpuModel) -> list[PrintedVariant]:
    """The target's own kernels, then others in turn, so that a part of them has some of every group."""
    groups: dict[str, list[PrintedVariant]] = {}
    for found in _all(thunks, gpu):
        known = groups.setdefault(found.group, [])
        if all(found.kernel.name != other.kernel.name or found.choice == OWN for other in known):
            known.append(found)
    for known in groups.values():
        others = known[1:]
        random.Random(0).shuffle(others)
        known[1:] = others
    rounds = itertools.zip_longest(*groups.values())
    return [found for each in rounds for found in each if found is not None]


def _all(thunks: Sequence[Thunk], gpu: GpuModel) -> Iterator[PrintedVariant]:
    multiplied = {t.plan: t.name for t in thunks if isinstance(t, MatmulThunk)}
    known = set[str]()
    for plan, name in sorted(multiplied.items(), key=lambda item: -item[0].flops):
        if not products.refusal(plan):
            own = product_kernel(plan, gpu.device.units).kernels[0]
            if own.name not in known:
                known.add(own.name)
                yield from _of_product(plan, f"{name} {plan.m}x{plan.n}x{plan.k}", own, gpu)
    for rows in {t.plan: t.name for t in thunks if isinstance(t, AttentionThunk)}.items():
        if not attention.refusal(rows[0]):
            yield from _of_attention(*rows, known)
    plans = {t.plan: t.name for t in thunks if isinstance(t, KernelThunk)}
    for kind, most in (("row", _OTHERS), ("column", _SUMS), ("mixed", _SUMS), ("loop", _OTHERS)):
        chosen = [(plan, name) for plan, name in plans.items() if plan.kind == kind]
        for plan, name in sorted(chosen, key=lambda item: -_moved(item[0]))[:most]:
            yield from _of_plan(plan, name, gpu.programs, known)


def _moved(plan: KernelPlan) -> int:
    return sum(operand.size for operand in plan.operands)


def _of_product(plan: MatmulPlan, group: str, own: PrintedKernel, gpu: GpuModel) -> Iterator[PrintedVariant]:
    yield PrintedVariant(group, OWN, own)
    width = 4 if "f32" in (plan.a.dtype, plan.b.dtype) else 2
    for rows, columns, depth, warps, stages in itertools.product(SIDES, SIDES, DEPTHS, WARPS, STAGES):
        fits = rows <= power_of_two(plan.m) and columns <= power_of_two(plan.n)
        held = rows * columns // (32 * warps)
        shared = (stages - 1) * (rows + columns) * depth * width
        if fits and 16 <= held <= MAX_ACCUMULATORS and shared <= gpu.shared_bytes and depth <= plan.k:
            made = product_kernel(plan, gpu.device.units, (rows, columns, depth, warps)).kernels[0]
            choice = f"{rows}x{columns}x{depth} w{warps} s{stages}"
            yield PrintedVariant(group, choice, _staged(made, stages))


def _staged(kernel: PrintedKernel, stages: int) -> PrintedKernel:
    """The kernel with another number of tiles that are loaded at once; Triton's own is three."""
    if stages == 3:
        return kernel
    body, count = _LOOP.subn(rf"in tl.range(\1, num_stages={stages}):", kernel.body)
    assert count == 1, kernel.body
    return dataclasses.replace(kernel, body=body)


def _of_attention(plan: AttentionPlan, name: str, known: set[str]) -> Iterator[PrintedVariant]:
    own = attention_kernels(plan).kernels
    labels = [f"{name} kernel {k}" for k in range(len(own))]
    fresh = [k for k, kernel in enumerate(own) if kernel.name not in known]
    known.update(kernel.name for kernel in own)
    for k in fresh:
        yield PrintedVariant(labels[k], OWN, own[k])
    for sizes in itertools.product((64, 128), (32, 64, 128), WARPS, (2, 3)):
        made = attention_kernels(plan, sizes).kernels if fresh else ()
        for k in fresh:
            outer, inner, warps, stages = sizes
            yield PrintedVariant(labels[k], f"{outer}x{inner} w{warps} s{stages}", made[k])


def _of_plan(plan: KernelPlan, name: str, programs: int, known: set[str]) -> Iterator[PrintedVariant]:
    own = plan_kernels(plan, programs).kernels
    if not own or own[0].name in known:
        return
    known.add(own[0].name)
    group = f"{plan.kind} {name}"
    yield PrintedVariant(group, OWN, own[0])
    for share, warps in itertools.product((0.5, 1, 2, 4), (0.5, 1, 2)):
        made = plan_kernels(plan, max(1, int(programs * share))).kernels[0]
        count = max(1, min(32, int(made.warps * warps)))
        changed = dataclasses.replace(made, warps=count)
        yield PrintedVariant(group, f"{made.grid} programs w{count}", changed)
