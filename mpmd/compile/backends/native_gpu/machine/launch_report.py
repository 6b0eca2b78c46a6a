"""What a program's launches cost: at their limits and by their machine code; and the faults of kernels."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from mpmd.compile.backends.native_gpu.gpu_devices import GpuModel
from mpmd.compile.backends.native_gpu.launches import (
    BranchLaunch,
    CopyLaunch,
    FillLaunch,
    KernelLaunch,
    LaunchProgram,
    LoopLaunch,
    ProductLaunch,
    SimpleStep,
    Step,
)
from mpmd.compile.backends.native_gpu.machine.disassembly import machine_code, source_counts
from mpmd.compile.backends.native_gpu.machine.execution import global_accesses
from mpmd.compile.backends.native_gpu.machine.times import (
    KernelModel,
    LaunchTime,
    alignment_of,
    kernel_model,
    kernel_time,
    limit_seconds,
    product_time,
    rates_of,
    transfer_time,
)
from mpmd.compile.backends.native_gpu.products import ProductDescriptor
from mpmd.compile.backends.native_gpu.triton.compile_kernels import Cubin, shared_workers
from mpmd.compile.kernels.operations import DTYPE_BYTES

_NARROW = 2
"""Bytes of an access to global memory that should be wider."""
_NARROW_SHARE = 0.05
"""Of a kernel's accesses: with fewer narrow ones it is not worth a word."""


@dataclasses.dataclass(frozen=True)
class LaunchWork:
    """What a launch moves and multiplies.

    Attributes:
        name: of what it computes.
        kind: of the launch.
        bytes: of its distinct operands and its results, whole arrays.
        flops: of its matrix products.
        dtype: of their factors.
    """

    name: str
    kind: str
    bytes: int
    flops: float = 0.0
    dtype: str = "f32"


def launch_work(step: SimpleStep, program: LaunchProgram) -> LaunchWork:
    if isinstance(step, KernelLaunch):
        kernel, moved = program.kernels[step.kernel], 0
        for numbers in (kernel.reads, kernel.writes):
            used = [k for k, number in enumerate(kernel.operands) if number in numbers]
            places = {(step.arguments[k].allocation, step.arguments[k].offset): step.sizes[k] for k in used}
            moved += sum(places.values())
        return LaunchWork(step.name, kernel.kind, moved, kernel.flops, kernel.factors)
    if isinstance(step, ProductLaunch):
        return LaunchWork(step.name, "product", *_of_product(step.descriptor))
    if isinstance(step, CopyLaunch):
        return LaunchWork(step.name, "copy", 2 * step.source.size)
    assert isinstance(step, FillLaunch)
    return LaunchWork(step.name, "fill", step.target.size)


def _of_product(this: ProductDescriptor) -> tuple[int, float, str]:
    sizes = [(this.a, this.m * this.k), (this.b, this.k * this.n), (this.d, this.m * this.n)]
    sizes += [(this.d, this.m * this.n)] * this.adds
    moved = sum(
        DTYPE_BYTES[matrix.dtype] * count * (this.batch if matrix.stride else 1) for matrix, count in sizes
    )
    return int(moved), 2.0 * this.batch * this.m * this.n * this.k, this.a.dtype


@dataclasses.dataclass(frozen=True)
class PricedLaunch:
    """A launch with its price.

    Attributes:
        key: equal for launches that cost the same.
        work: what it does.
        time: of one.
        limit: of one.
        times: how often it runs.
    """

    key: str
    work: LaunchWork
    time: LaunchTime
    limit: float
    times: int = 1


@dataclasses.dataclass(frozen=True)
class ProgramTimes:
    """Prices of all launches of a program on a GPU; of branches all are listed.

    Attributes:
        gpu: its name.
        launches: in order.
        models: kernel → its machine code.
    """

    gpu: str
    launches: tuple[PricedLaunch, ...]
    models: Mapping[str, KernelModel]

    @property
    def seconds(self) -> float:
        return sum(launch.times * launch.time.seconds for launch in self.launches)

    @property
    def limit(self) -> float:
        """Seconds of all launches at their limits."""
        return sum(launch.times * launch.limit for launch in self.launches)

    @property
    def narrow(self) -> tuple[str, ...]:
        """The kernels with accesses of two bytes or one to global memory that are not a few."""
        return tuple(name for name, model in self.models.items() if is_narrow(model.program.widths))

    @property
    def spilling(self) -> tuple[str, ...]:
        return tuple(name for name, model in self.models.items() if model.code.stack)

    @property
    def lonely(self) -> tuple[str, ...]:
        return tuple(name for name, model in self.models.items() if model.together == 1)

    def text(self) -> str:
        """Launches of a kind in a line, those that take the longest first; then findings."""
        total = f"{1e3 * self.seconds:.3f} ms by machine code, {1e3 * self.limit:.3f} ms at the limits"
        lines = [f"{self.gpu}: {sum(launch.times for launch in self.launches)} launches, {total}"]
        lines.append(f"{'each, us':>10} {'limit':>10} {'times':>6} {'MB':>9} {'bound':>8}  kernel")
        for group in _grouped(self.launches):
            first, count = group[0], sum(launch.times for launch in group)
            mean, limit, moved = (
                sum(launch.times * each for launch, each in zip(group, values)) / count
                for values in (
                    [launch.time.seconds for launch in group],
                    [launch.limit for launch in group],
                    [launch.work.bytes for launch in group],
                )
            )
            lines.append(
                f"{1e6 * mean:10.1f} {1e6 * limit:10.1f} {count:6} {moved / 1e6:9.2f} {first.time.bound:>8}  "
                f"{first.key}{self._facts(first.key)}"
            )
        for what, names in (
            ("values in memory (spills)", self.spilling),
            ("narrow accesses to global memory", self.narrow),
            ("one program a multiprocessor", self.lonely),
        ):
            if names:
                lines.append(f"{what}: {', '.join(names)}")
        return "\n".join(lines) + "\n"

    def _facts(self, key: str) -> str:
        model = self.models.get(key.partition(" ")[0])
        if model is None:
            return ""
        loops = ", ".join(
            f"{loop.last - loop.first + 1} instructions x{loop.times:g}{'' if loop.known else '?'}"
            for loop in model.program.loops
            if loop.times
        )
        return (
            f": {model.code.registers} registers, {model.shared_bytes} bytes, {model.together} together"
            f"{'; ' + loops if loops else ''}"
        )


def _grouped(launches: Sequence[PricedLaunch]) -> list[list[PricedLaunch]]:
    groups = collections.defaultdict[str, list[PricedLaunch]](list)
    for launch in launches:
        groups[launch.key].append(launch)
    return sorted(groups.values(), key=lambda group: -sum(each.times * each.time.seconds for each in group))


def is_narrow(widths: Mapping[int, float]) -> bool:
    """Whether many accesses are of two bytes or one; `widths`: bytes of an access → accesses."""
    narrow = sum(count for width, count in widths.items() if width <= _NARROW)
    return narrow > _NARROW_SHARE * sum(widths.values())


def narrow_kernels(program: LaunchProgram, cubins: Mapping[str, Cubin]) -> tuple[str, ...]:
    """The kernels of `ProgramTimes.narrow`, also for a GPU without a model.

    Raises:
        CompileError: machine code cannot be read here.
    """

    def is_one(name: str) -> bool:
        kernel, cubin = program.kernels[name], cubins[name]
        counts = source_counts(kernel.source, kernel.grid)
        return is_narrow(global_accesses(machine_code(cubin.code), counts, kernel.warps))

    with ThreadPoolExecutor(shared_workers().count) as pool:
        return tuple(name for name, narrow in zip(cubins, pool.map(is_one, cubins)) if narrow)


def program_times(
    program: LaunchProgram,
    cubins: Mapping[str, Cubin],
    gpu: GpuModel,
    trips: Mapping[str, int] | None = None,
) -> ProgramTimes:
    """Prices the launches of a program.

    Args:
        program: the launches.
        cubins: the machine code of its kernels.
        gpu: the GPU that it is for.
        trips: how often loops run, by their names; others run once.

    Raises:
        CompileError: machine code cannot be read here, or there is no model of the GPU.
    """
    rates = rates_of(gpu)
    with ThreadPoolExecutor(shared_workers().count) as pool:
        read = {n: pool.submit(kernel_model, k, cubins[n], rates) for n, k in program.kernels.items()}
        models = {name: future.result() for name, future in read.items()}
    launches = []
    for step, times in repeated_launches(program.steps, trips or {}):
        work = launch_work(step, program)
        if isinstance(step, KernelLaunch):
            key = f"{step.kernel} x{step.grid}"
            time = kernel_time(models[step.kernel], step.grid, work.bytes, gpu, rates)
        elif isinstance(step, ProductLaunch):
            key = f"library {step.descriptor}"
            offsets = (step.a.offset, step.b.offset, step.d.offset)
            time = product_time(
                step.descriptor, work.bytes, alignment_of(step.descriptor, offsets), gpu, rates
            )
        else:
            key, time = work.kind, transfer_time(work.bytes, gpu, rates)
        limit = limit_seconds(work.bytes, work.flops, work.dtype, gpu, rates)
        launches.append(PricedLaunch(key, work, time, limit, times))
    return ProgramTimes(gpu.device.name, tuple(launches), models)


def repeated_launches(
    steps: Sequence[Step], trips: Mapping[str, int], times: int = 1
) -> Iterator[tuple[SimpleStep, int]]:
    """Each launch of some steps with how often it runs.

    Args:
        steps: the steps.
        trips: how often loops run, by their names; others run once.
        times: how often the steps run.
    """
    for step in steps:
        if isinstance(step, LoopLaunch):
            count = trips.get(step.name)
            asked = 1 if count is None else count + 1
            yield from repeated_launches(step.condition, trips, times * asked)
            yield from repeated_launches(step.body, trips, times * (1 if count is None else count))
        elif isinstance(step, BranchLaunch):
            for branch in step.branches:
                yield from repeated_launches(branch, trips, times)
        else:
            yield step, times
