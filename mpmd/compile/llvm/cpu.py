"""The CPU that code is generated for: its instruction set, vector width, registers and caches.

A target is data.  Everything that emits code asks it for widths and counts and never asks the machine, so
that one process can emit for AVX2, AVX-512 and NEON alike, and so that a target can be part of a cache key.
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from pathlib import Path

import llvmlite.binding as binding

from mpmd.compile.buffers.offsets import DeviceMemory
from mpmd.errors import ConfigError

LINE_BYTES = 64
"""Bytes of a cache line, of every CPU that code is generated for."""

MEMORY = DeviceMemory(alignment=LINE_BYTES, spaces=(0,))
"""A CPU has one memory; large arrays begin at a cache line, which is as wide as the widest vectors."""

ELEMENT_BYTES = {
    "i1": 1,
    "i8": 1,
    "i16": 2,
    "i32": 4,
    "i64": 8,
    "half": 2,
    "bfloat": 2,
    "float": 4,
    "double": 8,
}


@dataclass(frozen=True)
class PrefetchDistances:
    """How long before its use memory is prefetched: longer than the cache or memory that has it takes.

    Attributes:
        result_steps: steps along K before the end of a product at which fetching its result begins.
        factor_steps: steps along K by which rows of the first factor are prefetched into L1.
    """

    result_steps: int = 96
    factor_steps: int = 24


@dataclass(frozen=True)
class CpuTarget:
    """What code generation knows of a CPU.

    Attributes:
        triple: LLVM's target triple.
        cpu: LLVM's name of the processor.
        features: LLVM's feature string, `+avx2,-avx512f,...`.
        vector_bytes: width of one vector register in bytes.
        vector_registers: number of vector registers.
        mask_registers: whether vector masks have registers of their own (AVX-512), so that a masked load or
            store costs what a plain one costs.
        bf16_dot: whether two bf16 products are added to an f32 accumulator by one instruction.
        prefetch: its distances of prefetches.
        l1_bytes, l2_bytes, l3_bytes: data cache sizes; the first two per core, the last shared.
    """

    triple: str
    cpu: str
    features: str
    vector_bytes: int
    vector_registers: int
    mask_registers: bool = False
    bf16_dot: bool = False
    prefetch: PrefetchDistances = PrefetchDistances()
    l1_bytes: int = 32 << 10
    l2_bytes: int = 1 << 20
    l3_bytes: int = 16 << 20

    def lanes(self, element: str = "float") -> int:
        """How many elements of an LLVM element type fill one vector register."""
        return max(1, self.vector_bytes // ELEMENT_BYTES[element])

    @property
    def is_x86(self) -> bool:
        """Whether x86 intrinsics may be used."""
        return self.triple.startswith(("x86_64", "i686"))

    def key(self) -> str:
        """Text that differs whenever code for two targets may differ; part of cache keys."""
        caches = f"{self.l1_bytes}/{self.l2_bytes}/{self.l3_bytes}"
        vectors = f"v{self.vector_bytes}x{self.vector_registers}"
        distances = "/".join(map(str, astuple(self.prefetch)))
        return f"{self.triple}|{self.cpu}|{self.features}|{vectors}|{caches}|{distances}"


_AVX2 = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+movbe,+sse4.2,+cx16,+sahf"
_AVX512 = _AVX2 + ",+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
_WIDE = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


@dataclass(frozen=True)
class Microarchitecture:
    """A kind of core: a row of the table from which every target is made.

    Attributes:
        needs: LLVM's features that a core of this kind has.
        cpu: LLVM's name of a generic one.
        features: LLVM's feature string of that.
        vector_bytes, vector_registers, mask_registers, bf16_dot, prefetch: see `CpuTarget`.
    """

    needs: tuple[str, ...]
    cpu: str
    features: str
    vector_bytes: int
    vector_registers: int
    mask_registers: bool = False
    bf16_dot: bool = False
    prefetch: PrefetchDistances = PrefetchDistances()

    def target(self, triple: str, cpu: str = "", features: str = "") -> CpuTarget:
        """A CPU of this kind: a generic one, unless it is named; with usual caches."""
        vectors = (self.vector_bytes, self.vector_registers, self.mask_registers, self.bf16_dot)
        return CpuTarget(triple, cpu or self.cpu, features or self.features, *vectors, self.prefetch)


MICROARCHITECTURES = {
    # Zen 4 and later, Sapphire Rapids and later
    "avx512_bf16": Microarchitecture(
        (*_WIDE, "avx512bf16"), "x86-64-v4", _AVX512 + ",+avx512bf16", 64, 32, True, True
    ),
    "avx512": Microarchitecture(_WIDE, "x86-64-v4", _AVX512, 64, 32, True),
    "avx2": Microarchitecture(("avx2", "fma"), "x86-64-v3", _AVX2, 32, 16),
    "neon": Microarchitecture(("neon",), "generic", "+neon,+fp-armv8", 16, 32),
}
"""By the vector extension, the widest first.  Distances of prefetches were measured on Zen 4 alone."""


def named_target(name: str) -> CpuTarget:
    """A generic target by the name of its vector extension, for tests and for compiling ahead of time.

    Args:
        name: of a row of `MICROARCHITECTURES`.

    Raises:
        ConfigError: no such name.
    """
    if name not in MICROARCHITECTURES:
        raise ConfigError(f"no CPU target is named {name!r}; the names are {', '.join(MICROARCHITECTURES)}")
    system = "apple-darwin" if os.uname().sysname == "Darwin" else "unknown-linux-gnu"
    return MICROARCHITECTURES[name].target(f"{'aarch64' if name == 'neon' else 'x86_64'}-{system}")


@lru_cache(maxsize=1)
def host_target() -> CpuTarget:
    """The CPU of this process, with everything LLVM can use of it.

    Raises:
        ConfigError: the machine has no vector extension that code generation knows.
    """
    triple, cpu = binding.get_process_triple(), binding.get_host_cpu_name()
    have = dict(binding.get_host_cpu_features())
    if triple.startswith(("aarch64", "arm64")):
        have["neon"] = True  # part of the architecture
    features = ",".join(f"{'+' if on else '-'}{name}" for name, on in sorted(have.items()))
    for kind in MICROARCHITECTURES.values():
        if all(have.get(name, False) for name in kind.needs):
            l1, l2, l3 = _cache_bytes()
            return replace(kind.target(triple, cpu, features), l1_bytes=l1, l2_bytes=l2, l3_bytes=l3)
    raise ConfigError(
        f"the native backend needs AVX2 with FMA, AVX-512 or NEON; this machine is {cpu} ({triple}).\n"
        "Use the `xla` backend on it."
    )


def _cache_bytes() -> tuple[int, int, int]:
    """Sizes of the first core's data caches as Linux reports them, or usual sizes where it does not."""
    sizes = {1: 32 << 10, 2: 1 << 20, 3: 16 << 20}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index[0-9]*")):
        try:
            kind, level, size = ((index / part).read_text().strip() for part in ("type", "level", "size"))
        except OSError:
            continue
        if kind != "Instruction" and size[:-1].isdigit():
            sizes[int(level)] = int(size[:-1]) << {"K": 10, "M": 20, "G": 30}[size[-1]]
    return sizes[1], sizes[2], sizes[3]
