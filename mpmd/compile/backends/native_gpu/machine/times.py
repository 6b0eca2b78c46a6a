"""The time of a launch: programs over multiprocessors, and what bounds them.

    pipe      work of the busiest multiprocessor's programs on one pipe
    latency   programs one after another, each as long as it takes by itself
    memory    bytes that come from memory and go there
    l2        bytes that programs move to and from the second level

None hides the others entirely: the time is a norm of all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from mpmd.compile.backends.native_gpu.gpu_devices import GpuModel
from mpmd.compile.backends.native_gpu.machine.disassembly import MachineCode, machine_code, source_counts
from mpmd.compile.backends.native_gpu.machine.execution import RATES, CodeRates, ProgramProfile, profile
from mpmd.compile.backends.native_gpu.products import ProductDescriptor
from mpmd.compile.backends.native_gpu.triton.compile_kernels import Cubin
from mpmd.compile.backends.native_gpu.triton.triton_kernels import PrintedKernel
from mpmd.compile.kernels.operations import DTYPE_BYTES
from mpmd.errors import CompileError

_REGISTER_UNIT, _WARP = 256, 32
_LIBRARY_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
_LIBRARY_SPLITS = (1, 2, 4, 8)
"""Parts of a product's sums that programs of the library compute apart."""
_WIDE_ACCESS = 16


@dataclasses.dataclass(frozen=True)
class LaunchTime:
    """A predicted time.

    Attributes:
        seconds: in all.
        bound: by what most of it is: a pipe, `latency`, `memory`, `l2` or `start`.
        parts: seconds of each limit by itself.
    """

    seconds: float
    bound: str
    parts: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class KernelModel:
    """A kernel's machine code as the model sees it.

    Attributes:
        code: its machine code.
        program: what one program does.
        warps: of a program.
        together: programs that a multiprocessor has room for.
        shared_bytes: of a program.
    """

    code: MachineCode
    program: ProgramProfile
    warps: int
    together: int
    shared_bytes: int


def rates_of(gpu: GpuModel) -> CodeRates:
    """The constants for a GPU.

    Raises:
        CompileError: there are none for its generation.
    """
    if gpu.capability not in RATES:
        known = " and ".join(f"{c // 10}.{c % 10}" for c in RATES)
        raise CompileError(f"no model of the machine code of {gpu.device.name}: there are some of {known}")
    return RATES[gpu.capability]


def kernel_model(kernel: PrintedKernel, cubin: Cubin, rates: CodeRates) -> KernelModel:
    """Reads a kernel's machine code.

    Raises:
        CompileError: the disassembler is missing.
    """
    code, warps = machine_code(cubin.code), cubin.threads // _WARP
    program = profile(code, source_counts(kernel.source, kernel.grid), warps, rates)
    registers = -(-code.registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT * warps
    room = (
        rates.programs,
        rates.warps // warps,
        rates.registers // max(1, registers),
        rates.shared_bytes // (cubin.shared_bytes + rates.reserved_bytes),
    )
    return KernelModel(code, program, warps, max(1, min(room)), cubin.shared_bytes)


def kernel_time(model: KernelModel, grid: int, moved: float, gpu: GpuModel, rates: CodeRates) -> LaunchTime:
    """The time of a launch.

    Args:
        model: the kernel.
        grid: programs.
        moved: bytes of the arrays that it reads and writes.
        gpu: the GPU.
        rates: its constants.
    """
    units, program = gpu.device.units, model.program
    clock = gpu.device.cycles_per_second * rates.clock
    busiest = -(-grid // units)
    cycles = {name: used * busiest for name, used in program.cycles.items()}
    if "tensor" in cycles:
        cycles["tensor"] /= rates.tensor
    worst = max(cycles, key=lambda name: cycles[name])
    parts = {
        "latency": program.alone * -(-grid // (units * model.together)) / clock,
        "memory": min(moved, program.global_bytes * grid) / (gpu.device.bandwidth * rates.memory),
        "l2": program.global_bytes * grid / rates.l2,
        worst: cycles[worst] / clock,
    }
    if worst != "issue":
        parts["issue"] = cycles["issue"] / clock
    return _together(parts, rates)


def _together(parts: dict[str, float], rates: CodeRates) -> LaunchTime:
    whole = sum(seconds**rates.exponent for seconds in parts.values()) ** (1 / rates.exponent)
    parts["start"] = rates.launch + rates.ramp
    return LaunchTime(whole + parts["start"], max(parts, key=lambda name: parts[name]), parts)


def transfer_time(moved: float, gpu: GpuModel, rates: CodeRates) -> LaunchTime:
    """The time of a copy or a fill of some bytes."""
    return _together({"memory": moved / (gpu.device.bandwidth * rates.memory)}, rates)


def product_time(
    this: ProductDescriptor, moved: float, alignment: int, gpu: GpuModel, rates: CodeRates
) -> LaunchTime:
    """The time of a call of the library, whose kernels are not known: the best of common tiles.

    Args:
        this: the product.
        moved: bytes of its matrices.
        alignment: bytes at whose multiples the rows of all matrices begin, or fewer.
        gpu: the GPU.
        rates: its constants.
    """
    device, clock = gpu.device, gpu.device.cycles_per_second * rates.clock
    rate = rates.per_cycle["tensor"] * rates.tensor * rates.library
    if this.a.dtype == "f32":
        rate = rate / 2 if this.sums == "tf32" else rates.per_cycle["fma"] * _WARP * rates.library
    elif this.a.dtype == "f64":
        rate = device.matmul_rate("f64") / 2 / device.units / device.cycles_per_second
    rate *= rates.unaligned.get(alignment, 1.0)
    memory = device.bandwidth * rates.memory
    seconds = []
    for rows, columns in _LIBRARY_TILES:
        for splits in _LIBRARY_SPLITS:
            tiles = this.batch * -(-this.m // rows) * -(-this.n // columns) * splits
            depth = math.ceil(this.k / splits)
            near = _tile_bytes(rows, columns, DTYPE_BYTES[this.a.dtype]) / rates.per_cycle["shared"]
            each = depth * max(rows * columns / rate, near)
            again = 8.0 * this.batch * this.m * this.n * splits if splits > 1 else 0.0
            each += rates.library_start
            seconds.append(-(-tiles // device.units) * each / clock + again / memory)
    return _together({"tensor": min(seconds), "memory": moved / memory}, rates)


def _tile_bytes(rows: int, columns: int, size: float) -> float:
    """Bytes that a step of one through the sums moves in and out of a multiprocessor's memory, per tile."""
    groups = max(1, rows // 64)
    return size * (rows + columns + groups * (64 + columns)) / 2  # a group of warps reads what others do, too


def limit_seconds(moved: float, flops: float, dtype: str, gpu: GpuModel, rates: CodeRates) -> float:
    """What no kernel beats: bytes once, or its products at the rate that power allows."""
    peak = gpu.device.matmul_rate(dtype) * gpu.device.matmul_efficiency
    return max(moved / (gpu.device.bandwidth * rates.memory), flops / peak)


def alignment_of(this: ProductDescriptor, offsets: tuple[int, int, int]) -> int:
    """Bytes at whose multiples the rows of all matrices begin, at most 16."""
    alignment = _WIDE_ACCESS
    for matrix, offset in zip((this.a, this.b, this.d), offsets):
        for number in (
            matrix.pitch * DTYPE_BYTES[matrix.dtype],
            matrix.stride * DTYPE_BYTES[matrix.dtype],
            offset,
        ):
            alignment = math.gcd(alignment, int(number))
    return alignment
