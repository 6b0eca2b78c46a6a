"""Values of a plan's nodes as LLVM values, each computed where it is first complete.

A scope is a place in the code where some iteration dims have a known index: the function's start knows
none, the loop over rows knows the outer dims, the vector loop knows all.  A node that changes only along dims
a scope knows is computed in that scope, once, and splat into vectors there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mpmd.compile.backends.native_cpu.emit.operations import emit_combine, emit_operation
from mpmd.compile.backends.native_cpu.emit.quotient import Inverse, divide_by, invert
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.types import (
    Value,
    constant,
    element_of,
    lanes_of,
    suffix,
    vector,
    vector_constant,
)
from mpmd.compile.backends.native_cpu.storage import (
    BYTES,
    MEMORY,
    REGISTER,
    load,
    narrow,
    register_constant,
    round_to,
    store,
    store_pair,
    widen,
)
from mpmd.compile.kernels.index import Atom, Index
from mpmd.compile.kernels.plan import (
    Apply,
    Constant,
    IndexValue,
    KernelPlan,
    Load,
    Reduce,
    Store,
    arguments,
)

_WIDEST_STEP = 4  # elements from lane to lane up to which whole vectors are loaded, and not each lane alone


@dataclass(frozen=True)
class Lanes:
    """The dim that runs along the lanes of vectors.

    Attributes:
        dim: its number.
        start: index of the first lane.
        count: lanes; 1 makes everything scalar.
        mask: lanes inside of the iteration space, or None if all are.
        half: 0 or 1 if these are the even or the odd ones of twice as many lanes, -1 if they are adjacent.
    """

    dim: int
    start: Position
    count: int
    mask: Value | None = None
    half: int = -1

    def halves(self) -> tuple[Lanes, Lanes]:
        """The even and the odd lanes of these and of as many that follow them."""
        return replace(self, half=0), replace(self, half=1)


class Scope:
    """Where code is being written, and what is known there.

    Args:
        f: the function.
        plan: the plan.
        pointers: address of each operand.
        dims: index of each known dim.
        lanes: the vector dim, if it is known here.
        parent: the enclosing scope.
        streamed: numbers of the operands whose vectors are stored past the caches.
    """

    def __init__(
        self,
        f: FunctionBuilder,
        plan: KernelPlan,
        pointers: Mapping[int, Value],
        *,
        dims: Mapping[int, Position] | None = None,
        lanes: Lanes | None = None,
        parent: Scope | None = None,
        streamed: frozenset[int] = frozenset(),
    ) -> None:
        self.f = f
        self.plan = plan
        self.pointers = pointers
        self.dims: dict[int, Position] = {**(parent.dims if parent else {}), **(dims or {})}
        self.lanes = lanes
        self.parent = parent
        self.streamed: frozenset[int] = parent.streamed if parent else streamed
        self._known: dict[int, Value] = {}
        self._splats: dict[tuple[int, int], Value] = {}
        self._inverses: dict[int, Inverse] = {}

    def inside(self, dims: Mapping[int, Position] | None = None, lanes: Lanes | None = None) -> Scope:
        """A scope within this one that knows more dims."""
        return Scope(self.f, self.plan, self.pointers, dims=dims, lanes=lanes, parent=self)

    # -- values --------------------------------------------------------------------------------------------
    def define(self, node: int, value: Value) -> None:
        """Say what a node's value is here (a finished reduction, a cached element)."""
        self._known[node] = value

    def known(self, node: int) -> Value | None:
        """The node's value if this scope or one around it has it."""
        if node in self._known:
            return self._known[node]
        return self.parent.known(node) if self.parent else None

    def hoist(self, nodes: Iterable[int], lanes: int) -> None:
        """Compute here every given node that changes along no other dims, and splat it for vectors."""
        for number in sorted(nodes):
            if self.known(number) is None and self._is_complete(number):
                self.value(number)
            if lanes > 1 and number in self._known and lanes_of(self._known[number].type) == 1:
                self._splats[number, lanes] = self.f.splat(self._known[number], lanes)

    def hoist_inverses(self, nodes: Iterable[int], lanes: int) -> None:
        """Invert here the floats by which any of the given nodes divide vectors."""
        for number in nodes:
            node = self.plan.nodes[number]
            if not isinstance(node, Apply) or node.op != "divide" or lanes == 1:
                continue
            top, bottom = node.args
            divisor = self.known(bottom)
            if self.known(top) is None and divisor is not None and divisor.type == "float":
                if self._inverse_of(bottom) is None:
                    self._inverses[bottom] = invert(self.f, divisor, lanes)

    def _inverse_of(self, number: int) -> Inverse | None:
        found = self._inverses.get(number)
        return found if found or not self.parent else self.parent._inverse_of(number)

    def _is_complete(self, number: int) -> bool:
        """Whether a node can be computed with the dims and reductions known here."""
        if self.known(number) is not None:
            return True
        node = self.plan.nodes[number]
        if isinstance(node, Reduce):
            return False
        own = node.index.dims() if isinstance(node, Load | IndexValue) else frozenset()
        return own <= self.dims.keys() and all(self._is_complete(a) for a in arguments(node))

    def _splat_of(self, number: int, lanes: int) -> Value | None:
        found = self._splats.get((number, lanes))
        return found if found or not self.parent else self.parent._splat_of(number, lanes)

    def value(self, number: int) -> Value:
        """The node's value: a scalar, or a vector if it changes along the lanes."""
        known = self.known(number)
        if known is None:
            known = self._compute(number)
            self._known[number] = known
        return known

    def wide(self, number: int) -> Value:
        """The node's value in every lane."""
        count = self.lanes.count if self.lanes else 1
        value = self.value(number)
        if lanes_of(value.type) == count:
            return value
        splat = self._splat_of(number, count)
        if splat is None:
            splat = self.f.splat(value, count)
            self._splats[number, count] = splat
        return splat

    def _compute(self, number: int) -> Value:
        node, f = self.plan.nodes[number], self.f
        if isinstance(node, Constant):
            return register_constant(node.value, node.dtype)
        if isinstance(node, IndexValue):
            return self._index_value(node)
        if isinstance(node, Load):
            return self._load(node)
        assert isinstance(node, Apply), f"%{number} is a reduction that is not finished here"
        varies = any(lanes_of(self.value(a).type) > 1 for a in node.args)
        args = [self.wide(a) if varies else self.value(a) for a in node.args]
        if node.op == "divide" and args[0].type == vector("float", f.target.lanes()):
            inverse = self._inverse_of(node.args[1])
            if inverse is not None:
                return round_to(f, divide_by(f, args[0], args[1], inverse), node.dtype)
        return emit_operation(f, node.op, args, [self.plan.nodes[a].dtype for a in node.args], node.dtype)

    # -- positions -----------------------------------------------------------------------------------------
    def position(self, index: Index) -> Position:
        """An index that does not change along the lanes, as one number."""
        f = self.f
        total: Position = index.constant
        for atom, factor in index.terms:
            total = f.iadd(total, f.imul(self._atom(atom), factor))
        return total

    def _atom(self, atom: Atom) -> Position:
        f = self.f
        if atom.kind == "dim":
            return self.dims[atom.number]
        if atom.kind == "value":
            return self._integer(self.value(atom.number), self.plan.nodes[atom.number].dtype)
        assert atom.inner is not None
        inner = self.position(atom.inner)
        if self._may_be_negative(atom.inner):
            return self._floor(atom, f.index(inner))
        return f.idiv(inner, atom.number) if atom.kind == "div" else f.irem(inner, atom.number)

    def _may_be_negative(self, index: Index) -> bool:
        """Whether an index is not known to be above zero: what the program computes may count down in it."""
        return bool(index.values()) or index.bounds(self.plan.extents)[0] < 0

    def _floor(self, atom: Atom, inner: Value) -> Value:
        """The floor quotient, or the remainder that is never negative."""
        f, divisor, zero = self.f, constant(atom.number, inner.type), constant(0, inner.type)
        rest = f.binary("srem", inner, divisor)
        below = f.compare("slt", rest, zero)
        if atom.kind == "mod":
            return f.select(below, f.add(rest, divisor), rest)
        quotient = f.binary("sdiv", inner, divisor)
        return f.select(below, f.sub(quotient, constant(1, inner.type)), quotient)

    def _integer(self, value: Value, dtype: str) -> Value:
        wide = vector("i64", lanes_of(value.type))
        return self.f.cast("zext" if dtype.startswith("u") else "sext", value, wide)

    def _varies(self, index: Index) -> bool:
        """Whether an index changes along the lanes."""
        if self.lanes is None:
            return False
        if self.lanes.dim in index.dims():
            return True
        return any(lanes_of(self.value(n).type) > 1 for n in index.values())

    def _steps_by(self, index: Index) -> int | None:
        """By how much an index grows from lane to lane, or None if that is not the same everywhere."""
        assert self.lanes is not None
        if not index.is_linear_in(self.lanes.dim):
            return None
        if any(lanes_of(self.value(n).type) > 1 for n in index.values()):
            return None
        return index.factor(self.lanes.dim)

    def first(self, index: Index) -> Position:
        """An index at the first lane."""
        assert self.lanes is not None
        at_lane = Scope(self.f, self.plan, self.pointers, parent=self)
        at_lane.dims[self.lanes.dim] = self.lanes.start
        return at_lane.position(index)

    def _all_lanes(self, index: Index, element: str = "i64") -> Value:
        """An index at every lane, as a vector; what is the same for all lanes is computed once."""
        assert self.lanes is not None
        f, count = self.f, self.lanes.count
        varying = [term for term in index.terms if self._varies(Index((term,)))]
        fixed = self.position(Index(tuple(t for t in index.terms if t not in varying), index.constant))
        total = None if fixed == 0 else f.splat(f.cast("trunc", f.index(fixed), element), count)
        for atom, factor in varying:
            part = self._atom_lanes(atom, element)
            part = f.mul(part, constant(factor, part.type)) if factor != 1 else part
            total = part if total is None else f.add(total, part)
        return constant(0, vector(element, count)) if total is None else total

    def _atom_lanes(self, atom: Atom, element: str) -> Value:
        """An atom that changes along the lanes, at every lane."""
        assert self.lanes is not None
        f, count = self.f, self.lanes.count
        if atom.kind == "dim":
            start = f.cast("trunc", f.index(self.lanes.start), element)
            return f.add(f.splat(start, count), f.lane_numbers(count, element))
        if atom.kind == "value":
            return self._integer(self.value(atom.number), self.plan.nodes[atom.number].dtype)
        assert atom.inner is not None
        # vectors are divided by constants through products of twice their width: cheap up to 32 bits
        narrow = "i32" if self._is_small(atom.inner) else element
        inner = self._all_lanes(atom.inner, narrow)
        if self._may_be_negative(atom.inner):
            return self._floor(atom, inner)
        operation = "udiv" if atom.kind == "div" else "urem"
        return f.cast(
            "zext", f.binary(operation, inner, constant(atom.number, inner.type)), vector(element, count)
        )

    def _is_small(self, index: Index) -> bool:
        """Whether an index fits into 32 bits, also at lanes a vector beyond its end."""
        if index.values():
            return False
        low, high = index.bounds(self.plan.extents)
        return low >= 0 and high < 1 << 30

    def _index_value(self, node: IndexValue) -> Value:
        f, element = self.f, REGISTER[node.dtype]
        if self._varies(node.index):
            assert self.lanes is not None
            position = self._lane_positions(node.index)
        else:
            position = f.index(self.position(node.index))
        type_ = vector(element, lanes_of(position.type))
        if element in ("float", "double"):
            return f.cast("sitofp", position, type_)
        same = element_of(position.type) == element
        narrower = BYTES[node.dtype] < (8 if element_of(position.type) == "i64" else 4)
        return position if same else f.cast("trunc" if narrower else "sext", position, type_)

    def _lane_positions(self, index: Index) -> Value:
        """An index at every lane, in 32 bits if it fits and grows evenly: iotas are compared often."""
        assert self.lanes is not None
        f, step = self.f, self._steps_by(index)
        small = not index.values() and max(map(abs, index.bounds(self.plan.extents))) < 1 << 31
        if step is None or not small:
            return self._all_lanes(index)
        count = self.lanes.count
        first = f.cast("trunc", f.index(self.first(index)), "i32")
        numbers = [lane * step for lane in range(count)]
        return f.add(f.splat(first, count), vector_constant(numbers, "i32"))

    # -- memory --------------------------------------------------------------------------------------------
    def _load(self, node: Load) -> Value:
        f, pointer = self.f, self.pointers[node.operand]
        guard = self.value(node.where) if node.where >= 0 else None
        varies = self._varies(node.index) or (guard is not None and lanes_of(guard.type) > 1)
        if not varies:
            return self._load_scalar(node, guard)
        assert self.lanes is not None
        if self.lanes.half >= 0:
            return self._load_half(node)
        count, mask = self.lanes.count, self._mask(guard)
        step = self._steps_by(node.index)
        if count == 1:
            at = self.first(node.index)
            return load(f, pointer, node.dtype, 1, at, mask)
        if step == 1:
            return load(f, pointer, node.dtype, count, self.first(node.index), mask)
        if step == -1:
            backwards = list(range(count))[::-1]
            low = f.isub(self.first(node.index), count - 1)
            turned = f.shuffle(mask, mask, backwards) if mask else None
            value = load(f, pointer, node.dtype, count, low, turned)
            return f.shuffle(value, value, backwards)
        if step is not None and 1 < step <= _WIDEST_STEP and mask is None:
            return self._load_every(node, step)
        return self._gather(node, mask)

    def _load_half(self, node: Load | Store) -> Value:
        """Every second of adjacent bf16: pairs are loaded as 32 bits, of which these are the halves."""
        assert self.lanes is not None
        f, at = self.f, self.f.offset(self.pointers[node.operand], self.first(node.index), "i16")
        pairs = f.load(at, vector("i32", self.lanes.count), align=BYTES["bf16"])
        if self.lanes.half == 0:
            return f.from_bits(f.shl(pairs, 16), "float")
        return f.from_bits(f.and_(pairs, constant(-1 << 16, pairs.type)), "float")

    def _load_every(self, node: Load, step: int) -> Value:
        """Every second, third ... element: whole vectors, from which the wanted lanes are picked."""
        assert self.lanes is not None
        f, count, first = self.f, self.lanes.count, self.first(node.index)
        type_, pointer = vector(MEMORY[node.dtype], count), self.pointers[node.operand]
        picked, have = constant(0, type_), 0
        for number in range(step):
            at = f.iadd(first, number * count)
            if number < step - 1:
                part = f.load(pointer, type_, at)
            else:  # not one element beyond the last one that is wanted
                inside = vector_constant([int(lane <= count - step) for lane in range(count)], "i1")
                part = f.masked_load(pointer, type_, inside, at)
            end = -(-(number + 1) * count // step)  # of the result's lanes that lie up to here
            lanes = list(range(count))
            for lane in range(have, end):
                lanes[lane] = count + lane * step - number * count
            picked, have = f.shuffle(picked, part, lanes), end
        return widen(f, picked, node.dtype)

    def _load_scalar(self, node: Load, guard: Value | None) -> Value:
        f, pointer = self.f, self.pointers[node.operand]
        return load(f, pointer, node.dtype, 1, self.position(node.index), guard)

    def _mask(self, guard: Value | None) -> Value | None:
        """Lanes that are inside of the space and allowed by a guard."""
        assert self.lanes is not None
        mask = self.lanes.mask
        if guard is None:
            return mask
        if lanes_of(guard.type) == 1 and self.lanes.count > 1:
            guard = self.f.splat(guard, self.lanes.count)
        return guard if mask is None else self.f.and_(mask, guard)

    def _addresses(self, pointer: Value, index: Index, element: str) -> Value:
        assert self.lanes is not None
        count = self.lanes.count
        at = self._all_lanes(index)
        return self.f.op(f"getelementptr inbounds {element}, ptr {pointer}, {at.typed}", f"<{count} x ptr>")

    def _gather(self, node: Load, mask: Value | None) -> Value:
        assert self.lanes is not None
        f, count = self.f, self.lanes.count
        element = MEMORY[node.dtype]
        type_ = vector(element, count)
        addresses = self._addresses(self.pointers[node.operand], node.index, element)
        mask = mask or constant(1, vector("i1", count))
        name = f"llvm.masked.gather.{suffix(type_)}.v{count}p0"
        align = Value(str(BYTES[node.dtype]), "i32")
        raw = f.intrinsic(name, type_, addresses, align, mask, constant(0, type_))
        return widen(f, raw, node.dtype)

    def store(self, item: Store) -> None:
        """Write one of the plan's stores for the current point or lanes."""
        f, operand = self.f, self.plan.operands[item.operand]
        pointer = self.pointers[item.operand]
        guard = self.value(item.where) if item.where >= 0 else None
        if self.lanes is None or self.lanes.count == 1:
            mask = self._mask(guard) if self.lanes else guard
            at = self.first(item.index) if self.lanes else self.position(item.index)
            self._put(item, self.value(item.node), pointer, at, mask)
            return
        mask, value = self._mask(guard), self.wide(item.node)
        if self._varies(item.index) and self._steps_by(item.index) == 1:
            self._put(item, value, pointer, self.first(item.index), mask)
            return
        if item.combine or not self._varies(item.index):
            self._put_lane_by_lane(item, value, pointer, mask)
            return
        element, count = MEMORY[operand.dtype], self.lanes.count
        addresses = self._addresses(pointer, item.index, element)
        raw = narrow(f, value, operand.dtype)
        name = f"llvm.masked.scatter.{suffix(raw.type)}.v{count}p0"
        mask = mask or constant(1, vector("i1", count))
        f.module.declare(name, "void", (raw.type, addresses.type, "i32", mask.type))
        align = BYTES[operand.dtype]
        f.emit(f"call void @{name}({raw.typed}, {addresses.typed}, i32 {align}, {mask.typed})")

    def _put(self, item: Store, value: Value, pointer: Value, at: Position, mask: Value | None) -> None:
        f, dtype = self.f, self.plan.operands[item.operand].dtype
        value = self._combined(item, value, pointer, at, mask)
        streams = item.operand in self.streamed and lanes_of(value.type) >= f.target.lanes()
        store(f, value, pointer, dtype, at, mask, streams=streams)

    def _combined(self, item: Store, value: Value, pointer: Value, at: Position, mask: Value | None) -> Value:
        """What a store writes: its value, or that and what is there."""
        if not item.combine:
            return value
        f, dtype = self.f, self.plan.operands[item.operand].dtype
        if self.lanes is not None and self.lanes.half >= 0:
            return emit_combine(f, item.combine, self._load_half(item), value, dtype)
        old = load(f, pointer, dtype, lanes_of(value.type), at, mask)
        return emit_combine(f, item.combine, old, value, dtype)

    def rounded_when_stored(self, item: Store) -> tuple[Value, Position] | None:
        """A whole vector that a store has yet to round to bf16, and its place; None if the store differs."""
        f, lanes = self.f, self.lanes
        if not f.target.bf16_dot or self.plan.operands[item.operand].dtype != "bf16" or lanes is None:
            return None
        whole = lanes.mask is None and item.where < 0 and lanes.count == f.target.lanes()
        if not whole or not self._varies(item.index) or self._steps_by(item.index) != 1:
            return None
        at, pointer = self.first(item.index), self.pointers[item.operand]
        value = self._combined(item, self.wide(item.node), pointer, at, None)
        if f.narrow_of(value) is None:
            return value, at
        source = f.unrounded(value)  # without one it was loaded as it is
        return None if source is None else (source, at)

    def _put_lane_by_lane(self, item: Store, value: Value, pointer: Value, mask: Value | None) -> None:
        """One lane after the other: lanes may meet in the same place."""
        f = self.f
        places = self._all_lanes(item.index)
        for lane in range(lanes_of(value.type)):
            at, one = f.extract(places, lane), f.extract(value, lane)
            if mask is None:
                self._put(item, one, pointer, at, None)
                continue
            with f.when(f.extract(mask, lane)):
                self._put(item, one, pointer, at, None)


def store_run(scopes: Sequence[Scope], item: Store) -> None:
    """Write one of the plan's stores for vectors that follow each other along the last dim.

    Two vectors are rounded to bf16 by one instruction, and written by one.
    """
    left = list(scopes)
    streams = bool(left) and item.operand in left[0].streamed
    while len(left) > 1 and not (streams and len(scopes) % 2):  # by an odd number lines would be torn
        low, high = left[:2]
        first, second = low.rounded_when_stored(item), high.rounded_when_stored(item)
        if first is None or second is None:
            break
        apart = low.lanes is not None and low.lanes.half == 0
        pointer = low.pointers[item.operand]
        store_pair(low.f, first[0], second[0], pointer, first[1], apart=apart, streams=streams)
        left = left[2:]
    for scope in left:
        assert scope.lanes is None or scope.lanes.half < 0, "half of the elements of a store"
        scope.store(item)
