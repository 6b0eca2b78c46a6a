"""Descriptions of devices, and what one of them does in a second."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from mpmd.brief import brief
from mpmd.errors import ConfigError, close_to

_SHORT_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}


@dataclass(frozen=True)
class KernelLimits:
    """Sizes up to which one kernel computes something on a device.

    Attributes:
        sort_prefix: first elements per row of a sort that are selected without sorting the others.
        attention_factor_bytes: a factor that stays in a cache from one block of queries to the next.
        attention_flops: products of one matrix from which several threads are useful, for which attention has
            work only if there are several matrices.
        attention_matrices: of large ones, what gives each thread some, where sums go over queries.
        attention_width: columns of the widest factor of attention.
        attention_keeps_rows: its gradients read from memory what its result's kernel knows of each row.
        mixed_row: elements of a row in a kernel that reduces rows and adds up columns.
        stores_last: kernels compute all finished values of a place before they store the first.
        repeats_functions: a function of an array, or of it and values of its rows, may be computed again
            instead of being kept.
    """

    sort_prefix: int = 128
    attention_factor_bytes: int = 4 << 20
    attention_flops: int = 10**8
    attention_matrices: int = 4
    attention_width: int = 1 << 30
    attention_keeps_rows: bool = False
    mixed_row: int = 1 << 60
    stores_last: bool = False
    repeats_functions: bool = False

    __repr__ = brief


@dataclass(frozen=True)
class DispatchRates:
    """By what programs are dispatched to threads: orders of magnitude, the same for every machine.

    Attributes:
        flops: per second and thread.
        transcendental_flops: operations that a transcendental function counts as.
        cache_bytes: per second and thread, from the shared caches.
        small_operations: operations on elements, or bytes of a copy, that take less than a microsecond.
        small_flops: the same of a product.
        wake_seconds: work of one thread from which waking others costs less than it saves.
        dispatch_seconds: work from which another thread than the issuing one runs it, where there are
            several meshes.
        dispatch_alone_seconds: the same where there is one: dispatching costs less than a twentieth.
    """

    flops: float = 1e11
    transcendental_flops: int = 10
    cache_bytes: float = 4e10
    small_operations: int = 1 << 14
    small_flops: int = 1 << 15
    wake_seconds: float = 1e-4
    dispatch_seconds: float = 5e-5
    dispatch_alone_seconds: float = 1e-3

    __repr__ = brief


@dataclass(frozen=True)
class Device:
    """What one device can do.

    Attributes:
        name: its name in reports and cache keys.
        units: processors that work at the same time: cores, or SMs.
        vector_bytes: width of a vector register, or of a warp's.
        registers: vector registers of a core, or registers of a thread.
        cycles_per_second: clock of a unit.
        vector_ops_per_cycle: vector instructions that a unit starts per cycle.
        matmul_flops: peak rate of matrix products of the whole device, by dtype.
        levels: (capacity in bytes, bytes per second) of each level of memory, innermost first; both are of
            the whole device, and the last level holds everything.
        line_bytes: smallest unit of a memory transfer.
        start_seconds: overhead of a kernel.
        call_seconds: overhead of a fragment.
        link_bandwidth: bytes per second from a device of one process to a device of another.
        near_bandwidth: bytes per second to another device of its process; None for `link_bandwidth`.
        host_bandwidth: bytes per second between its memory and its host's, in one direction.
        link_seconds: latency of a message between devices, or of a copy to or from the host.
        memory_bytes: of the whole device; None where that is not of the description.
        overlap: what part of the shorter of arithmetic and memory traffic hides behind the longer.
        matmul_efficiency: what part of the rates of products is reached.
        row_end_cycles: of combining the lanes of a reduced row.
        spill_cycles: of a value that has no register.
        product_units: products are computed by units of their own, while others compute something else.
    """

    name: str
    units: int
    vector_bytes: int
    registers: int
    cycles_per_second: float
    vector_ops_per_cycle: float
    matmul_flops: tuple[tuple[str, float], ...]
    levels: tuple[tuple[float, float], ...]
    line_bytes: int = 64
    start_seconds: float = 1e-6
    call_seconds: float = 1e-5
    link_bandwidth: float = 50e9
    near_bandwidth: float | None = None
    host_bandwidth: float = 50e9
    link_seconds: float = 1e-5
    memory_bytes: int | None = None
    overlap: float = 0.95
    matmul_efficiency: float = 0.92
    row_end_cycles: float = 40
    spill_cycles: float = 2
    product_units: bool = False
    limits: KernelLimits = KernelLimits()
    dispatch: DispatchRates = DispatchRates()

    __repr__ = brief

    @staticmethod
    def parse(name: str) -> Device:
        """A device by its name, as options of passes give it.

        Raises:
            ConfigError: there is none of that name.
        """
        if name not in DEVICES:
            raise ConfigError(f"there is no description of a device {name!r}{close_to(name, DEVICES, 3)}")
        return DEVICES[name]

    def __str__(self) -> str:
        return self.name

    def matmul_rate(self, dtype: str) -> float:
        """Peak rate of matrix products of a dtype, that of f32 for dtypes without their own."""
        rates = dict(self.matmul_flops)
        return rates.get(dtype, rates["f32"])

    @property
    def vector_rate(self) -> float:
        """Vector instructions per second of the whole device."""
        return self.units * self.cycles_per_second * self.vector_ops_per_cycle

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the outermost memory."""
        return self.levels[-1][1]

    @property
    def element_rate(self) -> float:
        """Elements of four bytes per second that vector instructions work on."""
        return self.vector_rate * (self.vector_bytes / 4)

    def products_seconds(self, flops: float, dtype: Any = "f32") -> float:
        """Seconds of the arithmetic of matrix products.

        Args:
            flops: a multiply-add counts two.
            dtype: of XLA, such as `bf16`, or of NumPy.
        """
        name = _SHORT_NAMES.get(str(dtype), str(dtype))
        return flops / (self.matmul_rate(name) * self.matmul_efficiency)

    def message_seconds(self, nbytes: float, messages: int = 1) -> float:
        """Seconds of messages to another device, one after the other, of so many bytes together."""
        return messages * self.link_seconds + nbytes / self.link_bandwidth

    def host_copy_seconds(self, nbytes: float) -> float:
        """Seconds of a copy of so many bytes between its memory and its host's."""
        return self.link_seconds + nbytes / self.host_bandwidth

    def exchange_seconds(self, nbytes: float, messages: int, neighbours: int, *, near: bool) -> float:
        """Seconds of a collective in which each device sends so many bytes in rings.

        Args:
            nbytes: that one device sends.
            messages: one after the other.
            neighbours: devices of each group in one process, each with a link of its own to other processes.
            near: whether each group is in one process.
        """
        nearby = self.near_bandwidth or self.link_bandwidth
        rate = nearby if near else min(nearby, neighbours * self.link_bandwidth)
        return messages * self.link_seconds + nbytes / rate

    def with_products(self, flops_per_second: float) -> Device:
        """The same device, on which products of every dtype reach this rate."""
        return dataclasses.replace(self, matmul_flops=(("f32", flops_per_second),), matmul_efficiency=1.0)

    def bandwidth_for(self, size: float) -> float:
        """Bytes per second of the innermost level that holds a working set."""
        return next((rate for held, rate in self.levels if size <= held), self.bandwidth)


def cpu_device(
    name: str,
    *,
    cores: int,
    vector_bytes: int,
    registers: int,
    f32_flops: float,
    bf16_flops: float,
    memory_bandwidth: float,
    caches: tuple[int, int, int],
) -> Device:
    """A CPU from measurements of it.

    Args:
        name: what to call it.
        cores: cores that work together.
        vector_bytes: width of a vector register.
        registers: vector registers.
        f32_flops: peak of one core in f32, a multiply-add counting two.
        bf16_flops: peak of one core in bf16 products.
        memory_bandwidth: bytes per second that one core copies, reads and writes counted.
        caches: sizes of L1 and L2 of a core, and of the shared last level.
    """
    lanes = vector_bytes // 4
    cycles = f32_flops / (2 * lanes)  # multiply-adds per second of one core
    l1, l2, l3 = caches
    return Device(
        name=name,
        units=cores,
        vector_bytes=vector_bytes,
        registers=registers,
        cycles_per_second=cycles,
        vector_ops_per_cycle=1.0,
        matmul_flops=(
            ("f32", f32_flops * cores),
            ("bf16", bf16_flops * cores),
            ("f64", f32_flops * cores / 2),
        ),
        levels=(
            (l1 * cores, cores * vector_bytes * cycles),
            (l2 * cores, cores * vector_bytes * cycles / 2),
            (float(l3), cores * memory_bandwidth * 1.5),
            (float("inf"), cores * memory_bandwidth),
        ),
        start_seconds=1e-6 if cores > 1 else 1e-7,
        link_bandwidth=8e9,
        host_bandwidth=cores * memory_bandwidth / 2,
        link_seconds=2e-5,
    )


# Programs read factors through L2, sum over queries by blocks of keys, and hold a factor's columns.
_GPU_LIMITS = KernelLimits(
    attention_factor_bytes=1 << 30,
    attention_flops=1 << 60,
    attention_matrices=1,
    attention_width=256,
    attention_keeps_rows=True,
    mixed_row=16384,
    stores_last=True,
    repeats_functions=True,
)


def gpu_device(
    name: str,
    *,
    units: int,
    clock: float,
    f32_flops: float,
    bf16_flops: float,
    f64_flops: float,
    shared_bytes: int,
    l2: tuple[int, float],
    memory_bandwidth: float,
    memory_bytes: int,
    near_bandwidth: float,
    host_bandwidth: float,
    matmul_efficiency: float = 0.92,
) -> Device:
    """A GPU of NVIDIA's.

    Args:
        name: what to call it.
        units: multiprocessors.
        clock: cycles per second of one.
        f32_flops: peak of products in f32.
        bf16_flops: in bf16 and f16, dense.
        f64_flops: in f64.
        shared_bytes: shared memory of a multiprocessor.
        l2: bytes of the second level, and bytes per second from it.
        memory_bandwidth: bytes per second.
        memory_bytes: of the module.
        near_bandwidth: bytes per second to another GPU of the host, over NVLink.
        host_bandwidth: bytes per second to or from the host's memory, over PCIe.
        matmul_efficiency: what part of the rates of products is reached.
    """
    return Device(
        name=name,
        units=units,
        matmul_efficiency=matmul_efficiency,
        vector_bytes=512,
        registers=255,
        cycles_per_second=clock,
        vector_ops_per_cycle=1.0,
        matmul_flops=(("f32", f32_flops), ("bf16", bf16_flops), ("f16", bf16_flops), ("f64", f64_flops)),
        levels=((units * shared_bytes, units * 128 * clock), l2, (float("inf"), memory_bandwidth)),
        line_bytes=32,
        start_seconds=1e-6,
        near_bandwidth=near_bandwidth,
        host_bandwidth=host_bandwidth,
        memory_bytes=memory_bytes,
        product_units=True,
        limits=_GPU_LIMITS,
    )


# NVIDIA's SXM modules.  Source: the vendor's data sheets and the CUDA programming guide; rates of L2 are
# estimates.  An H100's rates of bf16 and of memory are measured: 81 % and 90 % of its data sheet; an H200 has
# the same processors, and the same share of its memory's rate is assumed.  Between GPUs of a
# host four fifths of the data sheet's rate of NVLink in one direction are assumed, and 400 Gb/s to others; as
# much of the data sheet's rate of PCIe to the host: 32 GB/s in one direction for an A100, 64 GB/s for others.
A100 = gpu_device(
    "A100", units=108, clock=1.41e9, f32_flops=19.5e12, bf16_flops=312e12, f64_flops=19.5e12,
    shared_bytes=163 << 10, l2=(40 << 20, 5e12), memory_bandwidth=2.04e12,
    memory_bytes=79 << 30, near_bandwidth=240e9, host_bandwidth=25e9,
)  # fmt: skip
H100 = gpu_device(
    "H100", units=132, clock=1.98e9, f32_flops=62e12, bf16_flops=798e12, f64_flops=62e12, matmul_efficiency=1,
    shared_bytes=227 << 10, l2=(50 << 20, 10e12), memory_bandwidth=3.0e12,
    memory_bytes=79 << 30, near_bandwidth=360e9, host_bandwidth=50e9,
)  # fmt: skip
H200 = gpu_device(
    "H200", units=132, clock=1.98e9, f32_flops=62e12, bf16_flops=798e12, f64_flops=62e12, matmul_efficiency=1,
    shared_bytes=227 << 10, l2=(50 << 20, 10e12), memory_bandwidth=4.3e12,
    memory_bytes=139 << 30, near_bandwidth=360e9, host_bandwidth=50e9,
)  # fmt: skip
B200 = gpu_device(
    "B200", units=148, clock=1.97e9, f32_flops=75e12, bf16_flops=2250e12, f64_flops=37e12,
    shared_bytes=227 << 10, l2=(126 << 20, 20e12), memory_bandwidth=8e12,
    memory_bytes=178 << 30, near_bandwidth=720e9, host_bandwidth=50e9,
)  # fmt: skip

# A core of a server CPU with AVX-512, rounded: for choices that must be the same on every machine.
HOST = cpu_device(
    "host",
    cores=1,
    vector_bytes=64,
    registers=32,
    f32_flops=110e9,
    bf16_flops=220e9,
    memory_bandwidth=12e9,
    caches=(32 << 10, 1 << 20, 16 << 20),
)

DEVICES = {device.name: device for device in (HOST, A100, H100, H200, B200)}
"""Name → device."""

_OF_PLATFORM = {"cpu": HOST, "gpu": H200}


def device_of(platform: str) -> Device:
    """The device that fragments on a platform, as JAX names it, are priced for."""
    return _OF_PLATFORM.get(platform, HOST)


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def bytes_of(memory: Any, what: str) -> int | None:
    """Bytes from a number or a text such as `80GiB`; None for None.

    Args:
        memory: of a device.
        what: the name of the option, for the error.

    Raises:
        ConfigError: it is neither.
    """
    if memory is None or (isinstance(memory, int) and not isinstance(memory, bool) and memory > 0):
        return memory
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMG]i?|)B?\s*", str(memory)) if isinstance(memory, str) else None
    if not match:
        raise ConfigError(f"{what} is {memory!r}; it must be bytes, or a text such as '80GiB'")
    return int(float(match[1]) * _UNITS[match[2]])
