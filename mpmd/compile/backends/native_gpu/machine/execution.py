"""One program of a kernel: its time when a multiprocessor has no other, and what it takes of each pipe.

A warp starts an instruction when the control bits of the one before allow it and the barriers that it waits
for are free.  So the time of a warp by itself follows from the code and a latency for each kind of
instruction.  Of a loop a few iterations are followed; the last of them stands for the rest.

The constants of the model of machine code: all of them, one row for each generation of multiprocessors.

Rates of pipes are the vendor's; those marked as a fit are estimates until a measured call replaces them.

Source: the CUDA C++ programming guide, table of arithmetic throughput; for latencies "Benchmarking and
Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking" (Luo et al. 2024).
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from mpmd.compile.backends.native_gpu.machine.disassembly import (
    Instruction,
    MachineCode,
    MachineLoop,
    SourceCounts,
    machine_loops,
)


@dataclasses.dataclass(frozen=True)
class CodeRates:
    """One generation.

    Attributes:
        per_cycle: what a pipe of a multiprocessor does in a cycle: instructions of warps; of `shared` bytes
            that pass its memory, of `tensor` multiplications, each with an addition.
        warps, programs, registers, shared_bytes: that a multiprocessor holds at most.
        reserved_bytes: of shared memory that each program takes besides its own.
        latency: cycles until the result of an instruction is there, of those that take a varying time.
        read: cycles until the operands of such an instruction were read.
        barrier: cycles of a barrier of all warps of a program.
        clock: its share of the greatest clock while it works (fit).
        tensor: the share of the tensor cores' peak that power allows (fit).
        memory: the share of the memory's rate, as the device's description has it, that a copy reaches (fit).
        l2: bytes per second from the second level.
        launch: seconds from the end of a kernel to the begin of the next, in a graph (fit).
        ramp: seconds in which a kernel fills and empties the device (fit).
        exponent: how well different limits overlap: with `e`, two equal ones give 2^(1/e) times each (fit).
        unaligned: for rows of a product that begin at multiples of so many bytes, the share of the rate that
            the library reaches (fit).
        library: the share of the rate that it reaches otherwise (fit).
        library_start: cycles in which one of its programs fills its pipeline and stores (fit).
    """

    per_cycle: Mapping[str, float]
    warps: int
    programs: int
    registers: int
    shared_bytes: int
    reserved_bytes: int
    latency: Mapping[str, float]
    read: float
    barrier: float
    clock: float
    tensor: float
    memory: float
    l2: float
    launch: float
    ramp: float
    exponent: float
    unaligned: Mapping[int, float]
    library: float
    library_start: float


_LATENCY = {
    "LDG": 560.0, "LD": 560.0, "LDL": 240.0, "LDGSTS": 640.0, "ATOM": 700.0, "ATOMG": 700.0, "RED": 20.0,
    "LDS": 30.0, "LDSM": 33.0, "ATOMS": 80.0, "STS": 12.0, "STG": 12.0, "STL": 12.0, "SHFL": 24.0,
    "REDUX": 24.0, "MUFU": 24.0, "F2F": 24.0, "F2I": 24.0, "I2F": 24.0, "FRND": 24.0, "POPC": 20.0,
    "FLO": 20.0, "LDC": 30.0, "S2R": 24.0, "S2UR": 24.0, "R2UR": 12.0, "VOTEU": 12.0, "DADD": 16.0,
    "DMUL": 16.0, "DFMA": 16.0, "HMMA": 32.0, "IMMA": 32.0, "DMMA": 32.0,
}  # fmt: skip

_VOLTA_PIPES = {
    "issue": 4.0, "fma": 4.0, "alu": 2.0, "imad": 2.0, "xu": 0.5, "f64": 2.0, "uniform": 2.0, "lsu": 1.0,
    "shared": 128.0, "tensor": 1024.0,
}  # fmt: skip

RATES = {
    80: CodeRates(
        {**_VOLTA_PIPES, "f64": 1.0, "fma": 2.0},
        warps=64, programs=32, registers=65536, shared_bytes=164 << 10, reserved_bytes=1 << 10,
        latency={**_LATENCY, "LDG": 500.0, "LDGSTS": 560.0}, read=16.0, barrier=24.0, clock=0.95, tensor=0.9,
        memory=0.88, l2=4.0e12, launch=1.5e-6, ramp=1.5e-6, exponent=4.0,
        unaligned={8: 0.8, 4: 0.55, 2: 0.35}, library=0.92, library_start=1500.0,
    ),
    90: CodeRates(
        {**_VOLTA_PIPES, "tensor": 2048.0},
        warps=64, programs=32, registers=65536, shared_bytes=228 << 10, reserved_bytes=1 << 10,
        latency=_LATENCY, read=16.0, barrier=24.0, clock=0.886, tensor=0.84,
        memory=1.0, l2=7.0e12, launch=1.0e-6, ramp=1.5e-6, exponent=4.0,
        unaligned={8: 0.7, 4: 0.5, 2: 0.35}, library=0.92, library_start=1500.0,
    ),
}  # fmt: skip
"""Compute capability → constants; generations without a row have no model."""


_WARP, _MATRIX_WARPS = 32, 4
_FOLLOWED = 6
"""Iterations of a loop that are followed."""
_HALF_FACTORS = ("BF16", "F16")
_GROUPS = {
    "fma": ("FADD", "FMUL", "FFMA", "HADD2", "HMUL2", "HFMA2", "FSWZADD"),
    "imad": ("IMAD",),
    "xu": ("MUFU", "F2F", "F2I", "I2F", "FRND", "POPC", "FLO", "BREV"),
    "f64": ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX"),
    "lsu": ("LDG", "STG", "LD", "ST", "LDS", "STS", "LDSM", "LDL", "STL", "LDGSTS", "ATOM", "ATOMG", "ATOMS",
            "RED", "SHFL", "STSM"),
    "tensor": ("HGMMA", "QGMMA", "IGMMA", "HMMA", "IMMA", "DMMA"),
    "alu": ("IADD3", "LOP3", "SHF", "LEA", "ISETP", "FSETP", "FSEL", "SEL", "FMNMX", "PRMT", "VIMNMX",
            "IMNMX", "PLOP3", "P2R", "R2P", "SGXT", "MOV", "VIADD", "F2FP", "BMSK", "IABS", "I2FP",
            "CS2R", "FCHK", "HSETP2", "HMNMX2", "VIADDMNMX", "VIMNMX3", "LOP", "SHL", "SHR"),
}  # fmt: skip
_PIPE = {base: pipe for pipe, bases in _GROUPS.items() for base in bases}
_GLOBAL = ("LDG", "STG", "LD", "ST", "LDGSTS", "ATOM", "ATOMG", "RED")
_NEAR = ("LDS", "STS", "LDSM", "STSM", "ATOMS")
_SIZES = re.compile(r"\.(\d+)x(\d+)x(\d+)")
_PACKED = {
    "16816": (16, 8, 16),
    "1688": (16, 8, 8),
    "16832": (16, 8, 32),
    "884": (8, 8, 4),
    "16864": (16, 8, 64),
}


@dataclasses.dataclass(frozen=True)
class ProgramProfile:
    """What one program of a kernel does.

    Attributes:
        cycles: of each pipe of a multiprocessor that the program takes; averages over its parts.
        alone: cycles of the program if it has the multiprocessor to itself.
        global_bytes: that it moves to and from global memory.
        widths: bytes of a thread's access to global memory → how many of them a program has.
        loops: of its machine code.
        asynchronous, matrix: whether it copies asynchronously, and multiplies by `wgmma`.
        flops: multiplications and additions of its tensor cores.
    """

    cycles: dict[str, float]
    alone: float
    global_bytes: float
    widths: dict[int, float]
    loops: tuple[MachineLoop, ...]
    asynchronous: bool
    matrix: bool
    flops: float


def tensor_flops(each: Instruction) -> float:
    """Multiplications and additions of a warp's instruction of the tensor cores."""
    if match := _SIZES.search(each.opcode):
        m, n, k = (int(size) for size in match.groups())
        return 2.0 * m * n * k / _MATRIX_WARPS  # four warps do one together
    words = each.opcode.split(".")
    m, n, k = next((_PACKED[word] for word in words if word in _PACKED), (0, 0, 0))
    return 2.0 * m * n * k


def _near_bytes(each: Instruction) -> float:
    """Bytes that a warp's instruction moves in and out of the memory of its multiprocessor."""
    if each.base in _NEAR or each.base in _GLOBAL:
        return float(_WARP * each.width)
    match = _SIZES.search(each.opcode)
    if match is None:
        return 0.0
    m, n, k = (int(size) for size in match.groups())
    bytes_each = (
        2
        if any(word in _HALF_FACTORS for word in each.opcode.split("."))
        else 4
        if "TF32" in each.opcode
        else 1
    )
    left = m * k if re.match(r"R\d+, gdesc", each.operands) else 0  # else it is in registers
    return bytes_each * (left + n * k) / _MATRIX_WARPS


def profile(code: MachineCode, counts: SourceCounts, warps: int, rates: CodeRates) -> ProgramProfile:
    loops = machine_loops(code, counts)
    asked = collections.defaultdict[str, float](float)
    for each, times in _executed(code, counts, loops, warps):
        pipe = _pipe(each)
        asked["issue"] += times
        asked["shared"] += times * _near_bytes(each)
        asked[pipe] += times * (tensor_flops(each) / 2 if pipe == "tensor" else 1.0) if pipe else 0.0
    widths = global_accesses(code, counts, warps)
    opcodes = {each.base for each in code.instructions}
    return ProgramProfile(
        cycles={pipe: count / rates.per_cycle[pipe] for pipe, count in asked.items() if count},
        alone=_Warp(code, counts, loops, rates).cycles(),
        global_bytes=float(sum(width * count for width, count in widths.items())),
        widths=widths,
        loops=loops,
        asynchronous=bool(opcodes & {"LDGSTS", "UBLKCP", "UTMALDG"}),
        matrix=bool(opcodes & {"HGMMA", "QGMMA", "IGMMA"}),
        flops=2 * asked["tensor"],
    )


def global_accesses(code: MachineCode, counts: SourceCounts, warps: int) -> dict[int, float]:
    """Bytes of a thread's access to global memory → how many of them a program of some warps has."""
    accesses = collections.defaultdict[int, float](float)
    for each, times in _executed(code, counts, machine_loops(code, counts), warps):
        if each.base in _GLOBAL:
            accesses[each.width] += times * _WARP
    return dict(sorted(accesses.items()))


def _executed(
    code: MachineCode, counts: SourceCounts, loops: Sequence[MachineLoop], warps: int
) -> Iterator[tuple[Instruction, float]]:
    """Each instruction with how often the warps of a program execute it."""
    for place, each in enumerate(code.instructions):
        times = counts.share(each.line) * warps
        for loop in loops:
            times *= loop.times if loop.first <= place <= loop.last else 1.0
        yield each, times


def _pipe(each: Instruction) -> str:
    """The pipe of an instruction, beside the one that starts all; "" if it has none of its own."""
    pipe = _PIPE.get(each.base, "")
    return "uniform" if not pipe and (each.base[0] == "U" or each.base in ("R2UR", "S2UR")) else pipe


class _Warp:
    """A warp that goes through its code; the others of its program do the same at the same time."""

    def __init__(
        self, code: MachineCode, counts: SourceCounts, loops: tuple[MachineLoop, ...], rates: CodeRates
    ) -> None:
        self.code, self.counts, self.rates = code, counts, rates
        self.loops = {loop.first: loop for loop in reversed(loops)}
        self.now = 0.0
        self.free = [0.0] * 6
        self.tensor = 0.0
        """When the tensor cores are done."""
        self.products: list[float] = []
        self.copies: list[float] = []
        """Ends of the groups of products, and of copies, that can be waited for."""
        self.copying = 0.0

    def cycles(self) -> float:
        self._run(0, len(self.code.instructions))
        return max(self.now, self.tensor)

    def _run(self, first: int, last: int, inside: frozenset[int] = frozenset()) -> None:
        place = first
        while place < last:
            loop = self.loops.get(place)
            if loop is None or place in inside:
                self._step(self.code.instructions[place])
                place += 1
            else:
                self._repeat(loop, inside | {place})
                place = loop.last + 1

    def _repeat(self, loop: MachineLoop, inside: frozenset[int]) -> None:
        began = took = 0.0
        followed = min(_FOLLOWED, max(0, round(loop.times)))
        for _ in range(followed):
            began = self.now
            self._run(loop.first, loop.last + 1, inside)
            took = self.now - began
        self._pass(max(0.0, loop.times - followed) * took)

    def _pass(self, cycles: float) -> None:
        self.now += cycles
        self.tensor += cycles
        self.copying += cycles
        self.free = [each + cycles for each in self.free]
        self.products = [each + cycles for each in self.products]
        self.copies = [each + cycles for each in self.copies]

    def _step(self, each: Instruction) -> None:
        for barrier in range(6):
            if each.waits >> barrier & 1:
                self.now = max(self.now, self.free[barrier])
        share = self.counts.share(each.line)
        if share < 1.0:  # others execute the rest of the parts
            self.now += share * self._by_itself(each)
            return
        self._wait(each)
        done = self.now + self._latency(each)
        if each.base in ("LDGSTS", "UBLKCP", "UTMALDG"):
            self.copying = max(self.copying, done)
        if each.base in _GROUPS["tensor"]:
            self._multiply(each)
        ends = (done, self.now + min(self.rates.read, done - self.now))
        for barrier, end in zip(each.sets, ends):
            if barrier >= 0:
                self.free[barrier] = max(self.free[barrier], end)
        self.now += max(1, each.stall)

    def _by_itself(self, each: Instruction) -> float:
        waits = each.base in ("LDG", "LDS", "ATOMG", "BAR")
        return max(1, each.stall) + (self._latency(each) / _WARP if waits else 0.0)

    def _wait(self, each: Instruction) -> None:
        if each.base == "BAR":
            self.now += self.rates.barrier
        elif each.base == "LDGDEPBAR":
            self.copies.append(self.copying)
        elif each.base == "DEPBAR" and "LE" in each.opcode:
            self._until(self.copies, each)
        elif each.base == "WARPGROUP" and "DEPBAR" in each.opcode:
            self._until(self.products, each)

    def _until(self, groups: list[float], each: Instruction) -> None:
        """Waits until at most some groups are not finished."""
        left = int(each.operands.rpartition("0x")[2] or "0", 16)
        if len(groups) > left:
            self.now = max(self.now, groups[len(groups) - left - 1])
        del groups[: max(0, len(groups) - left)]

    def _multiply(self, each: Instruction) -> None:
        cycles = _MATRIX_WARPS * tensor_flops(each) / 2 / self.rates.per_cycle["tensor"]
        self.tensor = max(self.tensor, self.now) + cycles
        if "gsb" in each.operands:
            self.products.append(self.tensor + 32)

    def _latency(self, each: Instruction) -> float:
        return _latency_of(each.base, self.rates)


def _latency_of(base: str, rates: CodeRates) -> float:
    return rates.latency.get(base, 6.0)
