"""Values of a plan's nodes as LLVM values, each computed where it is first complete.

A scope is a place in the code where some iteration dims have a known index: the function's start knows
none, the loop over rows knows the outer dims, the vector loop knows all.  A node that changes only along dims
a scope knows is computed in that scope, once, and splat into vectors there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mpmd.compile.backends.native_cpu.kernels.operations import emit_combine, emit_operation
from mpmd.compile.backends.native_cpu.kernels.places import Lanes, Places
from mpmd.compile.backends.native_cpu.storage import (
    BYTES,
    MEMORY,
    load,
    narrow,
    register_constant,
    store,
    widen,
)
from mpmd.compile.kernels.index import Index
from mpmd.compile.kernels.kernel_plan import (
    Apply,
    Constant,
    IndexValue,
    KernelPlan,
    Load,
    ReduceNode,
    Store,
    arguments,
)
from mpmd.compile.llvm.function_builder import FunctionBuilder
from mpmd.compile.llvm.function_builder import Index as Position
from mpmd.compile.llvm.llvm_types import Value, constant, lanes_of, suffix, vector


class Scope(Places):
    """The insertion point of code, and the facts that hold at it.

    Args:
        f: the function.
        plan: the plan.
        pointers: address of each operand.
        dims: index of each known dim.
        lanes: the vector dim, if it is known here.
        parent: the enclosing scope.
        streamed: numbers of the operands whose vectors are stored non-temporally.
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
        self.dims = {**(parent.dims if parent else {}), **(dims or {})}
        self.lanes = lanes
        self.parent = parent
        self.streamed: frozenset[int] = parent.streamed if parent else streamed
        self._known: dict[int, Value] = {}
        self._splats: dict[tuple[int, int], Value] = {}

    def inside(self, dims: Mapping[int, Position] | None = None, lanes: Lanes | None = None) -> Scope:
        return Scope(self.f, self.plan, self.pointers, dims=dims, lanes=lanes, parent=self)

    # -- values --------------------------------------------------------------------------------------------
    def define(self, node: int, value: Value) -> None:
        """Set a node's value (a finished reduction, a cached element)."""
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

    def _is_complete(self, number: int) -> bool:
        if self.known(number) is not None:
            return True
        node = self.plan.nodes[number]
        if isinstance(node, ReduceNode):
            return False
        own = node.index.dims() if isinstance(node, Load | IndexValue) else frozenset()
        return own <= self.dims.keys() and all(self._is_complete(a) for a in arguments(node))

    def _splat_of(self, number: int, lanes: int) -> Value | None:
        splat = self._splats.get((number, lanes))
        return splat if splat or not self.parent else self.parent._splat_of(number, lanes)

    def value(self, number: int) -> Value:
        """The node's value: a scalar, or a vector if it changes along the lanes."""
        known = self.known(number)
        if known is None:
            known = self._compute(number)
            self._known[number] = known
        return known

    def wide(self, number: int) -> Value:
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
            return self.index_value(node)
        if isinstance(node, Load):
            return self._load(node)
        assert isinstance(node, Apply), f"%{number} is a reduction that is not finished here"
        varies = any(lanes_of(self.value(a).type) > 1 for a in node.args)
        args = [self.wide(a) if varies else self.value(a) for a in node.args]
        return emit_operation(f, node.op, args, [self.plan.nodes[a].dtype for a in node.args], node.dtype)

    # -- memory --------------------------------------------------------------------------------------------
    def _load(self, node: Load) -> Value:
        f, pointer = self.f, self.pointers[node.operand]
        guard = self.value(node.where) if node.where >= 0 else None
        varies = self.varies(node.index) or (guard is not None and lanes_of(guard.type) > 1)
        if not varies:
            return self._load_scalar(node, guard)
        assert self.lanes is not None
        count, mask = self.lanes.count, self._mask(guard)
        step = self.steps_by(node.index)
        if count == 1:
            at = self.first(node.index)
            return load(f, pointer, node.dtype, 1, at, mask)
        if step == 1:
            return load(f, pointer, node.dtype, count, self._near(node, self.first(node.index)), mask)
        # A reversed vector is loaded forwards from its last lane's address, mask and all, and turned
        # around.
        if step == -1:
            backwards = list(range(count))[::-1]
            low = self._near(node, f.isub(self.first(node.index), count - 1))
            turned = f.shuffle(mask, mask, backwards) if mask else None
            value = load(f, pointer, node.dtype, count, low, turned)
            return f.shuffle(value, value, backwards)
        return self._gather(node, mask)

    def _near(self, node: Load, at: Position) -> Position:
        """The place of a vector, near the array even if a guard keeps all its lanes from being loaded.

        Where no memory is mapped, a masked load of no lane takes about 50 ns.
        """
        if node.where < 0:
            return at
        assert self.lanes is not None
        last = self.plan.operands[node.operand].size - 1
        return self.f.imin(self.f.imax(at, 1 - self.lanes.count), last)

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
        at = self.all_lanes(index)
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
        if self.varies(item.index) and self.steps_by(item.index) == 1:
            self._put(item, value, pointer, self.first(item.index), mask)
            return
        # Lanes that write one place, or may, are stored one after the other: the last must win, or all
        # count.
        if item.combine or not self.varies(item.index):
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
        """The value to be written: combined with the old one if the store says so."""
        if not item.combine:
            return value
        f, dtype = self.f, self.plan.operands[item.operand].dtype
        old = load(f, pointer, dtype, lanes_of(value.type), at, mask)
        return emit_combine(f, item.combine, old, value, dtype)

    def _put_lane_by_lane(self, item: Store, value: Value, pointer: Value, mask: Value | None) -> None:
        """One lane after the other: lanes may meet in the same place."""
        f = self.f
        places = self.all_lanes(item.index)
        for lane in range(lanes_of(value.type)):
            at, one = f.extract(places, lane), f.extract(value, lane)
            if mask is None:
                self._put(item, one, pointer, at, None)
                continue
            with f.when(f.extract(mask, lane)):
                self._put(item, one, pointer, at, None)
