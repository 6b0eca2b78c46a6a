"""One thread of a kernel in PTX, for the few instructions of the kernel that writes times."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence

_INSTRUCTION = re.compile(r"(?:@(%\w+)\s+)?([\w.]+)\s*(.*);")
_WORD = (1 << 64) - 1


def run_ptx(
    text: str, parameters: Sequence[int], memory: Callable[[int, int], int], clock: Callable[[], int]
):
    """Runs the only kernel of a module.

    Args:
        text: of the module.
        parameters: of the kernel, of 64 bits.
        memory: gives the address of some bytes of the GPU, as this process reaches them.
        clock: `%globaltimer`.
    """
    header, _, body = text.rstrip("\0").partition("{")
    names = re.findall(r"\.param \.u64 (\w+)", header)
    given = dict(zip(names, parameters, strict=True))
    lines = [line.strip() for line in body.rpartition("}")[0].splitlines() if line.strip()]
    labels = {line[:-1]: k for k, line in enumerate(lines) if line.endswith(":")}
    registers: dict[str, int] = {}

    def value(operand: str) -> int:
        if operand == "%globaltimer":
            return clock()
        return registers[operand] if operand.startswith("%") else int(operand)

    def place(operand: str) -> tuple[str, int]:
        found = re.fullmatch(r"\[([%\w]+)(?:\+(\d+))?\]", operand)
        assert found, operand
        return found[1], int(found[2] or 0)

    def word(operand: str, size: int) -> ctypes.Array:
        register, offset = place(operand)
        at = registers[register] + offset
        assert at % size == 0, "an access is not aligned"
        return (ctypes.c_uint64 * (size // 8)).from_address(memory(at, size))

    at = 0
    while True:
        line = lines[at]
        at += 1
        if line.startswith(".reg") or line.endswith(":"):
            continue
        guard, name, rest = _INSTRUCTION.fullmatch(line).groups()
        if guard and not registers[guard]:
            continue
        operands = [o.strip("{} ") for o in re.findall(r"\[[^\]]*\]|\{[^}]*\}|[^,\s]+", rest)]
        if name == "ret":
            return
        if name == "bra":
            at = labels[operands[0]]
        elif name == "ld.param.u64":
            registers[operands[0]] = given[place(operands[1])[0]]
        elif name == "ld.global.u64":
            registers[operands[0]] = word(operands[1], 8)[0]
        elif name == "st.global.u64":
            word(operands[0], 8)[0] = value(operands[1])
        elif name == "st.global.v2.u64":
            word(operands[0], 16)[:] = [value(o.strip()) for o in operands[1].split(",")]
        elif name == "mov.u64":
            registers[operands[0]] = value(operands[1])
        elif name == "add.u64":
            registers[operands[0]] = value(operands[1]) + value(operands[2]) & _WORD
        elif name == "shl.b64":
            registers[operands[0]] = value(operands[1]) << value(operands[2]) & _WORD
        elif name == "setp.ge.u64":
            registers[operands[0]] = int(value(operands[1]) >= value(operands[2]))
        else:
            raise AssertionError(f"unknown instruction {line}")
