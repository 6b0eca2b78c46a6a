"""The constants of the model of machine code: all of them, one row for each generation of multiprocessors.

Rates of pipes are the vendor's; those marked as a fit are estimates until a measured call replaces them.

Source: the CUDA C++ programming guide, table of arithmetic throughput; for latencies "Benchmarking and
Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking" (Luo et al. 2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


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
