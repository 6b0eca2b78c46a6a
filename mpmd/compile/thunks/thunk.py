"""Kinds of thunks.  Each lists the slices it reads and writes; order and concurrency follow from that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.buffers.assignment import Slice
from mpmd.compile.kernels.kernel_plan import KernelPlan
from mpmd.compile.kernels.planner.collectives import CollectivePlan
from mpmd.compile.kernels.product_plans import AttentionPlan, MatmulPlan


@dataclass(frozen=True)
class KernelThunk:
    """A kernel of a plan.

    Attributes:
        name: of the instruction that it computes.
        plan: its computation.
        operands: the slice of each operand of the plan.
        scratch: memory that it uses while it runs; None if it needs none.
    """

    name: str
    plan: KernelPlan
    operands: tuple[Slice, ...]
    scratch: Slice | None = None

    @cached_property
    def writes(self) -> tuple[Slice, ...]:
        scratch = (self.scratch,) if self.scratch is not None else ()
        return tuple(self.operands[k] for k in self.plan.results) + scratch

    @cached_property
    def reads(self) -> tuple[Slice, ...]:
        combined = {s.operand for s in self.plan.stores if s.combine}
        kept = [s for k, s in enumerate(self.operands) if k not in self.plan.results or k in combined]
        return tuple(kept)

    def line(self) -> str:
        arrays = ", ".join(map(str, self.operands))
        scratch = f" scratch {self.scratch}" if self.scratch is not None else ""
        extents = "x".join(map(str, self.plan.extents))
        return f"kernel {self.name} {self.plan.kind} {extents} ({arrays}){scratch}"


@dataclass(frozen=True)
class MatmulThunk:
    """A matrix product.

    Attributes:
        name: of the instruction that it computes.
        plan: its computation.
        a, b: slices of the factors' arrays.
        operands: by number of the epilogue's operand; without an epilogue 0 is the result.
        scratch: memory for the sums, where the epilogue is a kernel of its own; None if it is not.
    """

    name: str
    plan: MatmulPlan
    a: Slice
    b: Slice
    operands: Mapping[int, Slice]
    scratch: Slice | None = None

    @property
    def writes(self) -> tuple[Slice, ...]:
        if self.plan.epilogue is None:
            return tuple(self.operands.values())
        scratch = (self.scratch,) if self.scratch is not None else ()
        return tuple(self.operands[k] for k in self.plan.epilogue.results) + scratch

    @property
    def reads(self) -> tuple[Slice, ...]:
        results = self.plan.epilogue.results if self.plan.epilogue is not None else tuple(self.operands)
        return (self.a, self.b, *(s for k, s in self.operands.items() if k not in results))

    def line(self) -> str:
        p = self.plan
        sizes = "x".join(map(str, (*p.batch, p.m, p.n, p.k)))
        follows = " with epilogue" if p.epilogue is not None else ""
        arrays = ", ".join(map(str, (self.a, self.b, *self.operands.values())))
        return f"matmul {self.name} {sizes} {p.a.dtype}{follows} ({arrays})"


@dataclass(frozen=True)
class AttentionThunk:
    """Attention: products, an operation on rows, and products.

    Attributes:
        name: of the instruction that it computes.
        plan: its computation.
        inputs: slices of the arrays: factors `a0`, `b0` ... of the scores, `w0` ... of the mixtures, `p0` ...
            of the rows.
        outputs: likewise for `c0` ... of the mixtures, and the results of the rows.
        scratch: memory that it uses while it runs; None if it needs none.
    """

    name: str
    plan: AttentionPlan
    inputs: Mapping[str, Slice]
    outputs: Mapping[str, Slice]
    scratch: Slice | None = None

    @property
    def writes(self) -> tuple[Slice, ...]:
        return (*self.outputs.values(), *((self.scratch,) if self.scratch is not None else ()))

    @property
    def reads(self) -> tuple[Slice, ...]:
        return tuple(self.inputs.values())

    def line(self) -> str:
        sizes = "x".join(map(str, self.plan.rows.extents))
        arrays = ", ".join(map(str, (*self.reads, *self.writes)))
        return f"attention {self.name} {sizes} ({arrays})"


@dataclass(frozen=True)
class CopyThunk:
    """Bytes from one slice to another."""

    name: str
    source: Slice
    target: Slice

    @property
    def writes(self) -> tuple[Slice, ...]:
        return (self.target,)

    @property
    def reads(self) -> tuple[Slice, ...]:
        return (self.source,)

    def line(self) -> str:
        return f"copy {self.name} ({self.source}, {self.target})"


@dataclass(frozen=True)
class CollectiveThunk:
    """Devices that exchange parts of their arrays.

    Attributes:
        name: of the instruction that it computes.
        plan: what each device gets.
        arrays: slices of this device's operands and results.
    """

    name: str
    plan: CollectivePlan
    arrays: tuple[Slice, ...]

    @property
    def writes(self) -> tuple[Slice, ...]:
        return self.arrays[len(self.plan.arrays) :]

    @property
    def reads(self) -> tuple[Slice, ...]:
        return self.arrays[: len(self.plan.arrays)]

    def line(self) -> str:
        groups = "".join("{" + ",".join(map(str, g)) + "}" for g in self.plan.groups)
        return f"{self.plan.opcode} {self.name} {groups} ({', '.join(map(str, self.arrays))})"


@dataclass(frozen=True)
class DeviceThunk:
    """The number of the device that runs the program, as an `u32`."""

    name: str
    target: Slice

    @property
    def writes(self) -> tuple[Slice, ...]:
        return (self.target,)

    @property
    def reads(self) -> tuple[Slice, ...]:
        return ()

    def line(self) -> str:
        return f"device {self.name} ({self.target})"


@dataclass(frozen=True)
class WhileThunk:
    """Thunks repeated while a flag is set.

    Attributes:
        name: of the loop.
        condition: computes the flag.
        flag: a byte.
        body: the repeated thunks.
        trips: how often they run, if that is known: the condition need not be computed.
    """

    name: str
    condition: tuple[Thunk, ...]
    flag: Slice
    body: tuple[Thunk, ...]
    trips: int | None = None

    @cached_property
    def writes(self) -> tuple[Slice, ...]:
        return tuple(s for t in (*self.condition, *self.body) for s in t.writes)

    @cached_property
    def reads(self) -> tuple[Slice, ...]:
        return (self.flag, *(s for t in (*self.condition, *self.body) for s in t.reads))

    def line(self) -> str:
        return f"while {self.name} ({self.flag})"


@dataclass(frozen=True)
class ConditionalThunk:
    """One of several sequences.

    Attributes:
        name: of the conditional.
        selector: an `s32`; a number outside means the last.
        branches: the sequences.
    """

    name: str
    selector: Slice
    branches: tuple[tuple[Thunk, ...], ...]

    @cached_property
    def writes(self) -> tuple[Slice, ...]:
        return tuple(s for branch in self.branches for t in branch for s in t.writes)

    @cached_property
    def reads(self) -> tuple[Slice, ...]:
        return (self.selector, *(s for branch in self.branches for t in branch for s in t.reads))

    def line(self) -> str:
        return f"conditional {self.name} ({self.selector})"


SimpleThunk = KernelThunk | MatmulThunk | AttentionThunk | CopyThunk | CollectiveThunk | DeviceThunk
Thunk = SimpleThunk | WhileThunk | ConditionalThunk


def conflict(a: Thunk, b: Thunk) -> bool:
    """Whether two thunks must keep their order: one writes what the other reads or writes."""
    return any(x.overlaps(y) for x in a.writes for y in (*b.reads, *b.writes)) or any(
        x.overlaps(y) for x in a.reads for y in b.writes
    )


def listing(thunks: Sequence[Thunk], indent: str = "") -> str:
    """A sequence as text, one line per thunk."""
    lines = []
    for thunk in thunks:
        lines.append(indent + thunk.line())
        if isinstance(thunk, WhileThunk):
            lines += [f"{indent} condition:", listing(thunk.condition, indent + "  ")]
            lines += [f"{indent} body:", listing(thunk.body, indent + "  ")]
        elif isinstance(thunk, ConditionalThunk):
            for number, branch in enumerate(thunk.branches):
                lines += [f"{indent} branch {number}:", listing(branch, indent + "  ")]
    return "\n".join(line for line in lines if line)


def kernels_text(thunks: Sequence[Thunk]) -> str:
    """The distinct kernels of a sequence, each with the instructions that it computes."""
    users: dict[str, list[str]] = {}
    for thunk in kernel_thunks(thunks):
        users.setdefault(thunk.plan.text(), []).append(thunk.name)
    return "\n".join(f"// {', '.join(names)}\n{text}" for text, names in users.items())


def kernel_thunks(thunks: Sequence[Thunk]) -> list[KernelThunk | MatmulThunk | AttentionThunk]:
    kernels: list[KernelThunk | MatmulThunk | AttentionThunk] = []
    for thunk in thunks:
        if isinstance(thunk, KernelThunk | MatmulThunk | AttentionThunk):
            kernels.append(thunk)
        elif isinstance(thunk, WhileThunk):
            kernels += kernel_thunks((*thunk.condition, *thunk.body))
        elif isinstance(thunk, ConditionalThunk):
            kernels += [t for branch in thunk.branches for t in kernel_thunks(branch)]
    return kernels
