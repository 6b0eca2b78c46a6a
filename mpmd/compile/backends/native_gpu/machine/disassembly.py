"""How often a program executes each instruction: from the loops of its text and of its machine code.

    for c0 in range(0, 50257, 4096):           13 times
    for c0 in range(0, end, 64):  # 8.5 times  as the text says, where its bounds are not known
    if (pid >= 4) & (pid < 12): loop_part(...) the share of the programs

A loop of the machine code is the one from whose lines it was made.  It may do several iterations at once:
then its counter grows by a multiple of the text's step.

A kernel's machine code as instructions.

The disassembler is a part of the toolchain that may be missing: Triton's package has it beside its assembler.
Each word of 128 bits also says for how many cycles the next one of the warp must wait, which of six barriers
an instruction sets and which it waits for; the disassembler prints the word.

Source: "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking" (Jia et al. 2018), section 2, for
the control bits, which are the same from Volta to Blackwell.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import importlib.util
import math
import re
import subprocess
import tempfile
import threading
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
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "backends" / "nvidia" / "bin"


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
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    row: re.Match[str] | None = None
    file, line = "", 0
    own = ""
    for each in text.splitlines():
        if row is not None:
            rest = _REST.match(each)
            if rest is not None:
                instructions.append(_instruction(row, int(rest[1], 16), line if file == own else 0))
            row = None
        elif match := _LABEL.match(each):
            labels[match[1]] = len(instructions)
        elif match := _PLACE.match(each):
            file, line = match[1], int(match[2])
            own = own or file  # a program begins with its own first line
        else:
            row = _ROW.match(each)
    ends = [k for k, each in enumerate(instructions) if each.base == "EXIT"]
    return tuple(instructions[: ends[-1] + 1] if ends else instructions), labels


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
    ends: dict[int, int] = {}
    for k, each in enumerate(instructions):
        target = re.search(r"\((\.L_x_\w+)\)", each.operands) if each.base == "BRA" else None
        if target is not None and labels.get(target[1], k) < k:
            ends[labels[target[1]]] = k
    return tuple(sorted(ends.items(), key=lambda loop: (loop[0], -loop[1])))


_TIMES = re.compile(r"#\s*([0-9.]+(?:e-?\d+)?) times\s*$")
_ADDITION = re.compile(r"(U?R\d+), (?:U?P\w+, )*(U?R\d+)(?:\.reuse)?, (0x[0-9a-f]+)")
_ADDS = ("IADD3", "UIADD3", "VIADD")
_ONE_AT_A_TIME = threading.Lock()
"""Python 3.11 counts the depth of all threads' trees as one, and then finds it wrong."""
_MAX_AT_ONCE = 64
"""Iterations of the text in one of the machine code."""


@dataclasses.dataclass(frozen=True)
class SourceLoop:
    """A loop of a kernel's text.

    Attributes:
        first, last: its lines.
        times: iterations of one program, on average; None if the text does not say.
        step: by which its counter grows.
    """

    first: int
    last: int
    times: float | None
    step: int


@dataclasses.dataclass(frozen=True)
class SourceCounts:
    """What a kernel's text says about how often its lines are executed.

    Attributes:
        loops: its loops.
        parts: first and last line of a function, and the share of the programs that call it.
    """

    loops: tuple[SourceLoop, ...]
    parts: tuple[tuple[int, int, float], ...]

    def share(self, line: int) -> float:
        return next((share for first, last, share in self.parts if first <= line <= last), 1.0)


@functools.lru_cache(maxsize=1024)
def source_counts(source: str, grid: int) -> SourceCounts:
    """The loops and parts of a kernel's text; `grid` programs run it."""
    lines = source.splitlines()
    with _ONE_AT_A_TIME:
        tree = ast.parse(source)
    loops = [_loop(node, lines) for node in ast.walk(tree) if isinstance(node, ast.For)]
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    shares = collections.defaultdict[str, float](float)
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            _add_share(node, functions, grid, shares)
    parts = [(functions[n].lineno, functions[n].end_lineno or 0, share) for n, share in shares.items()]
    return SourceCounts(tuple(loops), tuple(parts))


def _loop(node: ast.For, lines: list[str]) -> SourceLoop:
    assert isinstance(node.iter, ast.Call)
    numbers = [a.value if isinstance(a, ast.Constant) else None for a in node.iter.args]
    begin, end, step = (numbers if len(numbers) == 3 else [0, *numbers[-1:], 1])[:3]
    times = None
    if said := _TIMES.search(lines[node.lineno - 1]):
        times = float(said[1])
    elif isinstance(begin, int) and isinstance(end, int) and isinstance(step, int):
        times = float(max(0, math.ceil((end - begin) / step)))
    return SourceLoop(
        node.lineno, node.end_lineno or node.lineno, times, step if isinstance(step, int) else 1
    )


def _add_share(
    node: ast.If, functions: dict[str, ast.FunctionDef], grid: int, shares: dict[str, float]
) -> None:
    """Adds the programs that a condition `(pid >= a) & (pid < b)` lets through to the function they call."""
    bounds = [c.comparators[0] for c in ast.walk(node.test) if isinstance(c, ast.Compare)]
    numbers = [b.value for b in bounds if isinstance(b, ast.Constant) and isinstance(b.value, int)]
    called = [
        c.func.id
        for s in node.body
        for c in ast.walk(s)
        if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)
    ]
    for name in called:
        if name in functions and len(numbers) == 2 and grid:
            shares[name] += (numbers[1] - numbers[0]) / grid


@dataclasses.dataclass(frozen=True)
class MachineLoop:
    """A loop of the machine code: its first and last instruction, and its iterations in one program.

    Attributes:
        first, last: positions of instructions.
        times: iterations, on average.
        known: whether they are known; else one is assumed.
    """

    first: int
    last: int
    times: float
    known: bool


def machine_loops(code: MachineCode, counts: SourceCounts) -> tuple[MachineLoop, ...]:
    loops = []
    for first, last in code.loops:
        inner = [(a, b) for a, b in code.loops if (a, b) != (first, last) and first <= a and b <= last]
        body = [
            i
            for k, i in enumerate(code.instructions[first : last + 1], first)
            if not any(a <= k <= b for a, b in inner)
        ]
        source = _source_of(body, counts.loops)
        if source is None or source.times is None:
            loops.append(MachineLoop(first, last, 1.0, False))
        else:
            loops.append(MachineLoop(first, last, source.times / _at_once(body, source), True))
    return tuple(loops)


def _source_of(body: list[Instruction], loops: tuple[SourceLoop, ...]) -> SourceLoop | None:
    """The loop of the text that most instructions are from."""
    votes = collections.Counter[SourceLoop]()
    for each in body:
        around = [loop for loop in loops if loop.first <= each.line <= loop.last]
        if around:
            votes[max(around, key=lambda loop: loop.first)] += 1
    return votes.most_common(1)[0][0] if votes else None


def _at_once(body: list[Instruction], source: SourceLoop) -> int:
    """Iterations of the text in one of the machine code: the step of its condition's counter."""
    added = [match for each in body if each.base in _ADDS and (match := _ADDITION.match(each.operands))]
    compared = set(_compared(body))
    sums = [(int(match[3], 16), match[1] == match[2]) for match in added if match[1] in compared]
    if source.step in [number for number, _ in sums]:  # it may be in another register than before
        return 1
    grown = {number for number, own in sums if own}
    multiples = [number // source.step for number in grown if number % source.step == 0]
    fit = [m for m in multiples if 1 < m <= min(_MAX_AT_ONCE, source.times or 1)]
    return min(fit) if fit else 1


def _compared(body: list[Instruction]) -> list[str]:
    """Registers that the condition of a loop's last branch compares, also by way of another predicate."""
    conditions = {body[-1].predicate.lstrip("!")}
    for each in reversed(body):
        if each.base == "PLOP3" and each.operands.partition(",")[0] in conditions:
            conditions |= set(re.findall(r"\bU?P\d", each.operands))
    compares = [
        i for i in body if i.base in ("ISETP", "UISETP") and i.operands.partition(",")[0] in conditions
    ]
    return [register for each in compares for register in re.findall(r"\bU?R\d+", each.operands)]
