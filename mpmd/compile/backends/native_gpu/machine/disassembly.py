"""A kernel's machine code as instructions.

The disassembler is a part of the toolchain that may be missing: Triton's package has it beside its assembler.
Each word of 128 bits also says for how many cycles the next one of the warp must wait, which of six barriers
an instruction sets and which it waits for; the disassembler prints the word.

Source: "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking" (Jia et al. 2018), section 2, for
the control bits, which are the same from Volta to Blackwell.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path

from mpmd.errors import CompileError

_ROW = re.compile(
    r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;?\s+/\* 0x([0-9a-f]{16}) \*/"
)
_REST = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/")
_PLACE = re.compile(r'\s*//## File "(.*?)", line (\d+)')
_LABEL = re.compile(r"(\.L_x_\w+):")
_RESOURCE = re.compile(r"\b(REG|STACK|LOCAL):(\d+)")
_NO_BARRIER = 7


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a warp.

    Attributes:
        address: bytes from the begin of the function.
        opcode: with its modifiers: `LDG.E.128`.
        operands: their text.
        predicate: the condition under which it is executed, or "".
        line: of the kernel's source that it was made from; 0 if of another text.
        stall: cycles before the next of the warp may start.
        sets: the barriers that are set until its result is there, and until its operands were read, or -1.
        waits: the barriers that it waits for, as bits.
    """

    address: int
    opcode: str
    operands: str
    predicate: str
    line: int
    stall: int
    sets: tuple[int, int]
    waits: int

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def width(self) -> int:
        """Bytes that each thread moves, of an access to memory."""
        words = self.opcode.split(".")
        if self.base == "LDSM":
            return 4 * int(words[-1]) if words[-1].isdigit() else 4
        for word, size in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1)):
            if word in words:
                return size
        return 4


@dataclasses.dataclass(frozen=True)
class MachineCode:
    """The machine code of one kernel.

    Attributes:
        instructions: in order, up to the last end of the program: not the subroutines behind it.
        loops: first and last instruction of each, by position; inner ones behind those that hold them.
        registers: of a thread.
        stack: bytes of memory of a thread, for values that have no register.
    """

    instructions: tuple[Instruction, ...]
    loops: tuple[tuple[int, int], ...]
    registers: int
    stack: int


@functools.cache
def toolchain_folder() -> Path | None:
    """Where Triton's package keeps NVIDIA's tools; None without Triton."""
    found = importlib.util.find_spec("triton")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "backends" / "nvidia" / "bin"


def disassembler_problem() -> str:
    """Why machine code cannot be read here, or ""."""
    folder = toolchain_folder()
    if folder is None:
        return "Triton is not installed"
    missing = [tool for tool in ("nvdisasm", "cuobjdump") if not (folder / tool).exists()]
    return f"there is no {' and no '.join(missing)} in {folder}" if missing else ""


@functools.lru_cache(maxsize=1024)
def machine_code(cubin: bytes) -> MachineCode:
    """The machine code in a cubin that has one kernel.

    Raises:
        CompileError: the disassembler is missing, or does not read the file.
    """
    if why := disassembler_problem():
        raise CompileError(f"machine code cannot be read: {why}")
    folder = toolchain_folder()
    assert folder is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _said(str(folder / "nvdisasm"), "-c", "-g", "-hex", file.name)
        use = _said(str(folder / "cuobjdump"), "--dump-resource-usage", file.name)
    used = {name: int(number) for name, number in _RESOURCE.findall(use)}
    instructions, labels = parsed(text)
    if not instructions or "REG" not in used:
        raise CompileError("the disassembler finds no kernel")
    return MachineCode(instructions, _loops(instructions, labels), used["REG"], used["STACK"] + used["LOCAL"])


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"machine code cannot be read: {error}") from error


def parsed(text: str) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    """The instructions of a listing, and the position of each label."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    row: re.Match[str] | None = None
    file, line = "", 0
    own = ""
    for each in text.splitlines():
        if row is not None:
            rest = _REST.match(each)
            if rest is not None:
                found.append(_instruction(row, int(rest[1], 16), line if file == own else 0))
            row = None
        elif match := _LABEL.match(each):
            labels[match[1]] = len(found)
        elif match := _PLACE.match(each):
            file, line = match[1], int(match[2])
            own = own or file  # a program begins with its own first line
        else:
            row = _ROW.match(each)
    ends = [k for k, each in enumerate(found) if each.base == "EXIT"]
    return tuple(found[: ends[-1] + 1] if ends else found), labels


def _instruction(row: re.Match[str], high: int, line: int) -> Instruction:
    address, predicate, opcode, operands = row[1], row[2] or "", row[3], row[4]
    control = high >> 41
    barriers = tuple(-1 if b == _NO_BARRIER else b for b in (control >> 5 & 7, control >> 8 & 7))
    return Instruction(
        int(address, 16),
        opcode,
        operands,
        predicate,
        line,
        control & 15,
        (barriers[0], barriers[1]),
        control >> 11 & 63,
    )


def _loops(instructions: tuple[Instruction, ...], labels: dict[str, int]) -> tuple[tuple[int, int], ...]:
    """Branches to an instruction before them."""
    found: dict[int, int] = {}
    for k, each in enumerate(instructions):
        target = re.search(r"\((\.L_x_\w+)\)", each.operands) if each.base == "BRA" else None
        if target is not None and labels.get(target[1], k) < k:
            found[labels[target[1]]] = k
    return tuple(sorted(found.items(), key=lambda loop: (loop[0], -loop[1])))
