"""What a program on a GPU launches, by one rule for ours and XLA's.

A launch is whatever starts work on the device: a kernel, a call of a library, a copy, a fill.  Its bytes
are its distinct operands and its results, whole arrays.  Its time is the time of its bytes or of its
matrix products, whichever is longer, and the cost of starting it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from mpmd.compile.backends.native_gpu.launches import LaunchProgram
from mpmd.compile.backends.native_gpu.machine.launch_report import LaunchWork, launch_work
from mpmd.compile.kernels.operations import DTYPE_BYTES
from mpmd.cost.device import Device

_FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id",
    "replica-id", "copy-done", "async-done", "async-update", "add-dependency", "opt-barrier",
}  # fmt: skip
_CALLS = ("call", "while", "conditional", "async-start")


@dataclasses.dataclass(frozen=True)
class CountedLaunch(LaunchWork):
    """A launch with its time by one model for both."""

    def seconds(self, device: Device) -> float:
        """Its time on a device."""
        compute = self.flops / (device.matmul_rate(self.dtype) * device.matmul_efficiency)
        return device.start_seconds + max(compute, self.bytes / device.bandwidth)


def totals(launches: Sequence[CountedLaunch], device: Device) -> dict[str, float]:
    """The figures of a program."""
    return {
        "launches": len(launches),
        "bytes": sum(launch.bytes for launch in launches),
        "modelled_ms": round(1e3 * sum(launch.seconds(device) for launch in launches), 4),
    }


def own_launches(program: LaunchProgram) -> list[CountedLaunch]:
    """The launches of a program of ours; steps of loops and branches once."""
    works = [launch_work(step, program) for step in program.launches()]
    return [CountedLaunch(**vars(work)) for work in works]


# -- XLA's programs, from their text
@dataclasses.dataclass(frozen=True)
class _Line:
    """An instruction of a compiled program."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    text: str


def xla_launches(text: str) -> list[CountedLaunch]:
    """The launches in the text of a program that XLA compiled; in loops and branches once."""
    computations = _computations(text)
    return list(_launches(computations["ENTRY"], computations))


def _launches(lines: list[_Line], computations: dict[str, list[_Line]]) -> Iterator[CountedLaunch]:
    shapes = {line.name: line.shape for line in lines}
    for line in lines:
        if line.opcode in _FREE:
            continue
        if line.opcode in _CALLS:
            for name in _called(line.text):
                yield from _launches(computations[name], computations)
            continue
        moved = sum(_bytes(shapes.get(o, "")) for o in dict.fromkeys(line.operands))
        kind = line.opcode
        if kind == "copy-start":  # its result holds the operand once more
            yield CountedLaunch(line.name, kind, 2 * moved)
            continue
        if kind == "custom-call":
            kind = re.findall(r'custom_call_target="([^"]+)"', line.text)[0]
        flops, dtype = _products(line, shapes, computations)
        yield CountedLaunch(line.name, kind, moved + _bytes(line.shape), flops, dtype)


def _computations(text: str) -> dict[str, list[_Line]]:
    found: dict[str, list[_Line]] = {}
    lines: list[_Line] = []
    for row in text.splitlines():
        if row and not row[0].isspace() and row.rstrip().endswith("{"):
            name = "ENTRY" if row.startswith("ENTRY") else row.split()[0].lstrip("%")
            lines = found[name] = []
        elif match := re.match(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$", row):
            lines.append(_line(match[1], match[2]))
    return found


def _line(name: str, text: str) -> _Line:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].strip()
    opening = rest.index("(")
    operands = re.findall(r"%([\w.\-]+)", rest[opening : _closing(rest, opening)])
    return _Line(name, shape, rest[:opening], tuple(operands), rest)


def _closing(text: str, opening: int) -> int:
    depth = 0
    for at in range(opening, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if not depth:
            return at
    raise ValueError(f"a bracket is not closed: {text[:80]}")


def _called(text: str) -> list[str]:
    what = "to_apply|body|condition|calls|true_computation|false_computation"
    return re.findall(rf"(?:{what})=%([\w.\-]+)", text)


def _arrays(shape: str) -> list[tuple[str, list[int]]]:
    found = re.findall(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]", shape)
    return [(dtype, [int(e) for e in extents.split(",") if e]) for dtype, extents in found]


def _bytes(shape: str) -> int:
    return sum(int(DTYPE_BYTES.get(dtype, 1) * math.prod(dims)) for dtype, dims in _arrays(shape))


def _products(line: _Line, shapes: dict[str, str], computations: dict[str, list[_Line]]) -> tuple[float, str]:
    """Multiplications and additions of the matrix products of a launch, and the type of their factors."""
    if line.opcode == "dot" or "$gemm" in line.text or "$lt$matmul" in line.text:
        sums = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]"?([0-9]+)', line.text)
        dtype, dims = _arrays(shapes[line.operands[0]])[0]
        assert sums is not None, line.text
        return 2.0 * math.prod(_arrays(line.shape)[0][1]) * dims[int(sums[1])], dtype
    if line.opcode != "fusion":
        return 0.0, "f32"
    flops, dtype = 0.0, "f32"
    for name in _called(line.text):
        inside = computations[name]
        inner = {each.name: each.shape for each in inside}
        for each in inside:
            more, kind = _products(each, inner, computations)
            flops, dtype = flops + more, kind if more else dtype
    return flops, dtype
