"""One program of a kernel: its time when a multiprocessor has no other, and what it takes of each pipe.

A warp starts an instruction when the control bits of the one before allow it and the barriers that it waits
for are free.  So the time of a warp by itself follows from the code and a latency for each kind of
instruction.  Of a loop a few iterations are followed; the last of them stands for the rest.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence

from mpmd.compile.backends.native_gpu.machine.disassembly import Instruction, MachineCode
from mpmd.compile.backends.native_gpu.machine.loops import MachineLoop, SourceCounts, machine_loops
from mpmd.compile.backends.native_gpu.machine.rates import CodeRates

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
    found = collections.defaultdict[int, float](float)
    for each, times in _executed(code, counts, machine_loops(code, counts), warps):
        if each.base in _GLOBAL:
            found[each.width] += times * _WARP
    return dict(sorted(found.items()))


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
    found = _PIPE.get(each.base, "")
    return "uniform" if not found and (each.base[0] == "U" or each.base in ("R2UR", "S2UR")) else found


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
