"""How often a program executes each instruction: from the loops of its text and of its machine code.

    for c0 in range(0, 50257, 4096):           13 times
    for c0 in range(0, end, 64):  # 8.5 times  as the text says, where its bounds are not known
    if (pid >= 4) & (pid < 12): loop_part(...) the share of the programs

A loop of the machine code is the one from whose lines it was made.  It may do several iterations at once:
then its counter grows by a multiple of the text's step.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import math
import re
import threading

from mpmd.compile.backends.native_gpu.machine.disassembly import Instruction, MachineCode

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
    found = []
    for first, last in code.loops:
        inner = [(a, b) for a, b in code.loops if (a, b) != (first, last) and first <= a and b <= last]
        body = [
            i
            for k, i in enumerate(code.instructions[first : last + 1], first)
            if not any(a <= k <= b for a, b in inner)
        ]
        source = _source_of(body, counts.loops)
        if source is None or source.times is None:
            found.append(MachineLoop(first, last, 1.0, False))
        else:
            found.append(MachineLoop(first, last, source.times / _at_once(body, source), True))
    return tuple(found)


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
    added = [found for each in body if each.base in _ADDS and (found := _ADDITION.match(each.operands))]
    compared = set(_compared(body))
    sums = [(int(found[3], 16), found[1] == found[2]) for found in added if found[1] in compared]
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
