"""The text of one kernel: values of a plan on a tile, each a tensor `[height | 1, width | 1]`.

A value has extent 1 along a side that it does not depend on; Triton broadcasts.  All values of a tile are
computed before the first store, since a result may be in the memory of an operand.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mpmd.compile.backends.native_gpu.triton import conversions, operations
from mpmd.compile.backends.native_gpu.triton.conversions import (
    REGISTER,
    constant,
    from_memory,
    literal,
    rounded,
    to_memory,
)
from mpmd.compile.backends.native_gpu.triton.tiling import PlanTiling, TileSteps
from mpmd.compile.kernels.index import Index
from mpmd.compile.kernels.kernel_plan import (
    COLUMN,
    ELEMENT,
    ROW,
    Apply,
    Constant,
    IndexValue,
    KernelPlan,
    Load,
    Node,
    ReduceNode,
    Store,
    store_arguments,
    store_level,
)
from mpmd.compile.kernels.operations import REDUCTIONS

_FIRST = "(cb == tl.full([1, 1], 0, tl.int32))"
"""Whether the program is the first along a row, which writes what all of them have."""
_NAME = re.compile(r"v\d+")


class TileWriter:
    """Writes a kernel, line by line.

    Args:
        tiling: its tiles.

    Attributes:
        reads, writes: numbers of the operands that the kernel reads and writes so far.
        decided: conditions that are known for the tiles that are written now.
    """

    def __init__(self, tiling: PlanTiling) -> None:
        self.tiling = tiling
        self.plan: KernelPlan = tiling.plan
        self.reads: set[int] = set()
        self.writes: set[int] = set()
        self.decided: Mapping[int, bool] = {}
        self._lines: list[str] = []
        self._depth = 1
        self._known: dict[int, str] = {}
        self._masks = ["", ""]

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def line(self, text: str) -> None:
        self._lines.append("    " * self._depth + text)

    @contextlib.contextmanager
    def repeated(self, head: str, times: float | None = None) -> Iterator[None]:
        """The body of a loop; values computed in it are not known after it.

        Args:
            head: its line.
            times: its iterations on average over programs, for the model of machine code, which reads them in
                the line, where its bounds are not numbers.
        """
        self.line(head if times is None else f"{head}  # {times:g} times")
        self._depth += 1
        known = dict(self._known)
        yield
        self._known = known
        self._depth -= 1

    # -- the position of the tile
    def rows(self, number: str) -> None:
        self._rows(f"{number} * {self.tiling.height}")

    def columns(self, number: str) -> None:
        self._columns(f"{number} * {self.tiling.width}" if self.tiling.column_steps.tiles > 1 else "")

    @contextlib.contextmanager
    def row_tiles(self, program: str) -> Iterator[None]:
        """A loop over the rows of a program, of those that share them.

        Where each tile is reduced, which warps wait for, the next two are loaded meanwhile.
        """
        steps = self.tiling.row_steps
        first, end = steps.bounds(program)
        times = None if steps.even else steps.tiles / steps.sharing
        head, rest = ("tl.range", ", num_stages=3") if self.plan.kind == "mixed" else ("range", "")
        with self.repeated(f"for r0 in {head}(0, {end}, {steps.side}{rest}):", times):
            self._rows("r0" if first == "0" else f"{first} + r0")
            yield
        self._masks[0] = ""  # what follows happens once

    @contextlib.contextmanager
    def column_tiles(
        self,
        first: str = "0",
        end: str = "",
        times: float | None = None,
        stages: int = 3,
        *,
        whole: bool = False,
    ) -> Iterator[None]:
        """A loop over columns: from the tile with a number to an end that is no more than the columns are.

        Args:
            first: number of the first tile.
            end: the first column that is none of them.
            times: see `repeated`.
            stages: tiles that are loaded while others are computed, and the one that is.
            whole: all points of these tiles exist.
        """
        steps = self.tiling.column_steps
        begin = str(int(first) * steps.side) if first.isdigit() else f"{first} * {steps.side}"
        head, rest = ("range", "") if stages == 3 else ("tl.range", f", num_stages={stages}")
        with self.repeated(f"for c0 in {head}({begin}, {end or steps.points}, {steps.side}{rest}):", times):
            self._columns("c0", whole=whole)
            yield

    def _rows(self, start: str) -> None:
        self._masks[0] = self._positions("r", start, self.tiling.row_steps, "[:, None]")
        self._dims("r", self.tiling.rows)

    def _columns(self, start: str, *, whole: bool = False) -> None:
        self._masks[1] = self._positions("c", start, self.tiling.column_steps, "[None, :]", whole)
        self._dims("c", self.tiling.columns)

    def _positions(self, name: str, start: str, steps: TileSteps, shape: str, whole: bool = False) -> str:
        """Writes the positions of a tile; the name of their mask, empty if all exist."""
        self.line(f"{name} = {start + ' + ' if start else ''}tl.arange(0, {steps.side}){shape}")
        if whole or steps.fill:
            return ""
        self.line(f"{name}m = {name} < {steps.points}")
        return f"{name}m"

    def batch(self, number: str) -> None:
        if self.tiling.batch:
            self.line(f"b = {number} + tl.full([1, 1], 0, tl.{self.tiling.index_type})")
            self._dims("b", self.tiling.batch)

    @property
    def masks(self) -> tuple[str, str]:
        """The names of the conditions that rows and columns of the tile exist; empty where all do."""
        return self._masks[0], self._masks[1]

    def _dims(self, name: str, dims: tuple[int, ...]) -> None:
        rest = name
        for d in reversed(dims):
            if d == dims[0]:
                self.line(f"d{d} = {rest}")
            else:
                self.line(f"d{d} = {rest} % {self.plan.extents[d]}")
                self.line(f"q{d} = {rest} // {self.plan.extents[d]}")
                rest = f"q{d}"

    def _inside(self, dims: Iterable[int], *more: str) -> str:
        """The condition that a point over some dims is in the space, and others; empty if there are none."""
        groups = zip(self._masks, (self.tiling.rows, self.tiling.columns))
        own = [mask for mask, group in groups if set(dims) & set(group)]
        return " & ".join(filter(None, [*own, *more]))

    # -- index expressions
    def index(self, index: Index, integers: str = "") -> str:
        integers = integers or ("int64" if index.values() else self.tiling.index_type)
        parts = []
        for atom, factor in index.terms:
            if atom.kind == "dim":
                text = f"d{atom.number}" + (f".to(tl.{integers})" if integers != "int32" else "")
            elif atom.inner is None:
                text = f"{self.value(atom.number)}.to(tl.{integers})"
            else:
                text = self._quotient(atom.kind, atom.inner, atom.number, integers)
            parts.append(text if factor == 1 else f"{text} * {factor}")
        if not parts:
            return f"tl.full([1, 1], {index.constant}, tl.{integers})"
        return " + ".join([*parts, str(index.constant)] if index.constant else parts)

    def _quotient(self, kind: str, inner: Index, divisor: int, integers: str) -> str:
        """A floor quotient or its remainder; Triton's division is towards zero."""
        text = f"({self.index(inner, integers)})"
        if not inner.values() and inner.bounds(self.plan.extents)[0] >= 0:
            return f"({text} {'//' if kind == 'div' else '%'} {divisor})"
        remainder = f"(({text} % {divisor} + {divisor}) % {divisor})"
        return remainder if kind == "mod" else f"(({text} - {remainder}) // {divisor})"

    # -- values
    def value(self, number: int) -> str:
        """The name of a value, which is computed first if it is not known."""
        if number not in self._known:
            text = self._value(number, self.plan.nodes[number])
            if _NAME.fullmatch(text):
                self._known[number] = text
            else:
                self.define(number, text)
        return self._known[number]

    def is_known(self, number: int) -> bool:
        """Whether a value is computed already."""
        return number in self._known

    def forget(self, numbers: Iterable[int]) -> None:
        """Values change: those that depend on some are computed anew where they are used."""
        changed = set(numbers)
        for number, used in enumerate(self.plan.uses):
            if number in changed or changed.intersection(used):
                changed.add(number)
                self._known.pop(number, None)

    def define(self, number: int, text: str) -> None:
        self.line(f"v{number} = {text}")
        self._known[number] = f"v{number}"

    def _value(self, number: int, node: Node) -> str:
        if isinstance(node, Constant):
            return constant(node.value, node.dtype)
        if isinstance(node, IndexValue):
            source = "s64" if node.index.values() or self.tiling.index_type == "int64" else "s32"
            return conversions.convert(f"({self.index(node.index)})", source, node.dtype)
        if isinstance(node, Load):
            return self._load(number, node)
        if isinstance(node, ReduceNode):
            return self.reduced(node, self.accumulated(node), 1)
        if node.op == "select" and node.args[0] in self.decided:
            return self.value(node.args[1 if self.decided[node.args[0]] else 2])
        names = [self.value(a) for a in node.args]
        source = self.plan.nodes[node.args[-1]].dtype
        if node.op == "convert":
            return conversions.convert(names[0], source, node.dtype)
        if node.op == "bitcast-convert":
            return conversions.bitcast(names[0], source, node.dtype)
        text = self._quotient_of(node, names[0]) or operations.apply(node.op, source, names)
        return text if node.op in ("select", "negate", "abs") else rounded(text, node.dtype)

    def _quotient_of(self, node: Apply, text: str) -> str:
        """A value over a constant, if it needs no division; else empty."""
        over = self.plan.nodes[node.args[-1]]
        if node.op != "divide" or not isinstance(over, Constant):
            return ""
        return operations.divided(text, node.dtype, float(over.value))

    def _load(self, number: int, node: Load) -> str:
        self.reads.add(node.operand)
        dims = self.plan.depends[number]
        shape = self.tiling.shape(dims)
        where = self.value(node.where) if node.where >= 0 else ""
        mask = self._inside(dims, where)
        pointer = f"p{node.operand} + ({self.index(node.index)})"
        if where or shape != self.tiling.shape(node.index.dims()):
            pointer = f"tl.broadcast_to({pointer}, {list(shape)})"
        rest = f", mask={mask}, other=0" if mask else ""
        return from_memory(f"tl.load({pointer}{rest})", node.dtype)

    # -- reductions
    def _reduced_dims(self, node: ReduceNode) -> frozenset[int]:
        """The dims of the tile over which a value is combined."""
        along = self.tiling.columns if node.axis == ROW else self.tiling.rows
        return self.plan.depends[node.arg] | set(along)

    def accumulated(self, node: ReduceNode) -> str:
        """The argument of a reduction as it is combined, the identity outside of the space."""
        kind, dims = operations.accumulator_type(node.dtype), self._reduced_dims(node)
        text = f"tl.broadcast_to({self.value(node.arg)}, {list(self.tiling.shape(dims))})"
        if kind != REGISTER[node.dtype]:
            text = f"{text}.to(tl.{kind})"
        mask = self._inside(dims)
        return f"tl.where({mask}, {text}, {identity(node)})" if mask else text

    def accumulator(self, number: int) -> None:
        """A tile `a<number>` that begins as the identity of a reduction."""
        node = self.plan.nodes[number]
        assert isinstance(node, ReduceNode)
        shape = list(self.tiling.shape(self._reduced_dims(node)))
        kind = operations.accumulator_type(node.dtype)
        self.line(f"a{number} = tl.full({shape}, {identity(node)}, tl.{kind})")

    def accumulate(self, number: int) -> None:
        """Combines the tile of a reduction's argument with its accumulator."""
        node = self.plan.nodes[number]
        assert isinstance(node, ReduceNode)
        tile = self.accumulated(node)
        self.line(f"a{number} = {operations.combine(node.op, node.dtype, f'a{number}', tile)}")

    def reduced(self, node: ReduceNode, text: str, axis: int) -> str:
        """A tile combined along an axis: a value of registers."""
        combined = operations.reduce(node.op, node.dtype, text, axis)
        return f"({combined} != 0)" if node.dtype == "pred" else rounded(combined, node.dtype)

    # -- stores
    def prepare(self, stores: Iterable[Store]) -> None:
        for store in stores:
            for number in store_arguments(store):
                self.value(number)

    def stores(self, stores: Sequence[Store]) -> None:
        """Writes results; all values first."""
        self.prepare(stores)
        for store in stores:
            self._store(store)

    def partial(self, number: int, node: ReduceNode, operand: int) -> None:
        """Writes the sum of a chunk to scratch memory: `[batch, chunks, columns]`, or without columns."""
        self.writes.add(operand)
        tiling, wide = self.tiling, bool(self.plan.depends[node.arg] & set(self.tiling.columns))
        place = f"{'b' if tiling.batch else '0'} * {tiling.chunks} + chunk"
        place = f"({place}) * {tiling.size(tiling.columns)} + c" if wide else place
        shape = [1, tiling.width if wide else 1]
        once = _FIRST if tiling.column_blocks > 1 and not wide else ""
        mask = self._inside(tiling.columns if wide else (), once)
        value = operations.reduce(node.op, node.dtype, f"a{number}", 0)
        value = f"{value}.to(tl.uint8)" if node.dtype == "pred" else value
        rest = f", mask={mask}" if mask else ""
        self.line(f"tl.store(tl.broadcast_to(p{operand} + {place}, {shape}), {value}{rest})")

    def _store(self, store: Store) -> None:
        self.writes.add(store.operand)
        if store.combine:
            self.reads.add(store.operand)
        dims = stored_dims(self.plan, store)
        shape = self.tiling.shape(dims)
        where = self.value(store.where) if store.where >= 0 else ""
        once = _FIRST if self.tiling.column_blocks > 1 and not dims & set(self.tiling.columns) else ""
        mask = self._inside(dims, where, once)
        pointer = f"tl.broadcast_to(p{store.operand} + ({self.index(store.index)}), {list(shape)})"
        dtype = self.plan.operands[store.operand].dtype
        value = self.value(store.node)
        rest = f", mask={mask}" if mask else ""
        if store.combine and not is_injective(self.plan, store.index, dims):
            value = f"tl.broadcast_to({to_memory(value, dtype)}, {list(shape)})"
            self.line(f"at = {pointer}")
            self.line(operations.atomic(store.combine, dtype, "at", value, mask, shape))
            return
        if store.combine:
            self.line(f"at = {pointer}")
            pointer, old = "at", from_memory(f"tl.load(at{rest})", dtype)
            value = rounded(operations.apply(store.combine, dtype, [old, value]), dtype)
        self.line(f"tl.store({pointer}, {to_memory(value, dtype)}{rest})")


def identity(node: ReduceNode) -> str:
    """The identity of a reduction, in the type in which values are combined."""
    number = REDUCTIONS[node.op].identity(node.dtype)
    if node.dtype[0] == "u" and int(number) < 0:
        number = (1 << int(node.dtype[1:])) - 1
    return literal(number, node.dtype)


def stored_dims(plan: KernelPlan, store: Store) -> set[int]:
    """The dims over which a store happens: each point of them writes once."""
    level = store_level(plan, store)
    dims = set(range(plan.batch_dims))
    dims |= set(plan.outer) if level in (ELEMENT, ROW) else set()
    return dims | (set(plan.row) if level in (ELEMENT, COLUMN) else set())


def is_injective(plan: KernelPlan, index: Index, dims: Iterable[int]) -> bool:
    """Whether different points over some dims have different positions, by the strides of a linear index."""
    dims = {d for d in dims if plan.extents[d] > 1}
    if index.values() or not all(index.is_linear_in(d) for d in dims):
        return False
    reach = 1
    for step, d in sorted((abs(index.factor(d)), d) for d in dims):
        if step < reach:
            return False
        reach = step * plan.extents[d]
    return True


def unsupported(plan: KernelPlan) -> str:
    """Why a plan has no kernel, or ""."""
    for store in plan.stores:
        dtype = plan.operands[store.operand].dtype
        apart = not store.combine or is_injective(plan, store.index, stored_dims(plan, store))
        if not apart and not operations.has_atomic(store.combine, dtype):
            return f"GPUs do not combine values of {dtype} by {store.combine} at one place"
    for node in plan.nodes:
        if isinstance(node, Apply) and not operations.has_cell(node.op, plan.nodes[node.args[-1]].dtype):
            return f"there is no {node.op} of {plan.nodes[node.args[-1]].dtype} on GPUs"
    return ""
