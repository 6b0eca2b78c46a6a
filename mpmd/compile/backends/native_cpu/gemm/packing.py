"""Packing: a strip of a matrix copied into the order in which a micro-kernel reads it.

    destination[step][lane] = source[lane·lane_stride + step·step_stride],   lane < width

A strip of B is `width` columns (lanes) by some steps of K, a strip of A `width` rows.  Lanes past the
matrix's edge are zero, so that edge tiles need no code of their own.  Narrow floats widen to f32 on the
way, or pair up along K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.storage import BYTES, MEMORY, widen
from mpmd.compile.llvm.cpu import CpuTarget
from mpmd.compile.llvm.function_builder import FunctionBuilder, Index, Module
from mpmd.compile.llvm.llvm_types import Value, constant, vector
from mpmd.compile.llvm.squares import transpose

ARGUMENTS = (
    ("source", "ptr"),
    ("lane_stride", "i64"),  # bytes between lanes
    ("step_stride", "i64"),  # bytes between elements along K
    ("depth", "i64"),  # elements along K
    ("valid", "i64"),  # lanes that exist; beyond the width, the next strips' (`Pack.many_strips`)
    ("destination", "ptr"),
)


@dataclass(frozen=True)
class Pack:
    """The recipe of a packing function.

    Attributes:
        dtype: of the matrix.
        step: the operands of a micro-kernel's step (`MicroKernel.step`).
        width: lanes of the strip.
        adjacent: which neighbours are adjacent in memory: `lanes`, `steps`, or `none`.
    """

    dtype: str
    step: str
    width: int
    adjacent: str

    @property
    def name(self) -> str:
        return f"mpmd_pack_{self.dtype}_{self.step}_{self.width}_{self.adjacent}"

    @property
    def pairs(self) -> bool:
        """Whether a step takes two elements along K."""
        return self.step == "bf16x2"

    def many_strips(self, target: CpuTarget) -> bool:
        """Whether one call copies several strips, one after the other in the destination.

        Lanes of a strip that does not fill a register share their lines with its neighbours' lanes; and the
        lanes of two steps, one step's after the other's, fill one.
        """
        lanes = target.lanes("double" if self.step == "f64" else "float")
        fills = self.width < lanes <= self.width + math.gcd(self.width, lanes)
        return self.adjacent == "lanes" and fills

    def emit(self, module: Module) -> None:
        """Add the function `name` with `ARGUMENTS` to a module."""
        with FunctionBuilder(module, self.name, ARGUMENTS) as f:
            strip = _Strip(f, self)
            if self.adjacent == "none":
                strip.copy_one_by_one()
                return
            whole = f.compare("eq", f.arguments["valid"], constant(self.width, "i64"))
            if self.adjacent == "steps":
                strip.transpose(whole)
                return
            if self.many_strips(module.target):
                strip.copy_strips()
                return
            with f.when(whole, returns=True):
                strip.copy_lanes(edge=False)
            strip.copy_lanes(edge=True)


class _Strip:
    """Emission of one packing function.

    A packed lane is 32 bits (f32 or a pair of bf16) or 64 (f64); `lanes` of them fill a register.
    """

    def __init__(self, f: FunctionBuilder, pack: Pack) -> None:
        self.f = f
        self.pack = pack
        self.packed = "double" if pack.step == "f64" else "float"
        self.lanes = f.target.lanes(self.packed)
        self.bytes = 8 if pack.step == "f64" else 4
        self.groups = -(-pack.width // self.lanes)  # registers that hold the strip's width
        self.args = f.arguments

    # -- shared ------------------------------------------------------------------------------------------
    def _below(self, count: Index, lanes: int) -> Value:
        """The lanes whose number is below a count that may be negative or large."""
        f = self.f
        few = f.imax(f.imin(count, lanes), 0)
        bound = f.splat(f.cast("trunc", f.index(few), "i32"), lanes)
        return f.compare("slt", f.lane_numbers(lanes), bound)

    def _widen(self, value: Value) -> Value:
        return widen(self.f, value, self.pack.dtype)

    def _put(self, value: Value, step: Index, group: Index) -> None:
        """Store a register of packed lanes; past the width it runs into the next step, written later."""
        f = self.f
        at = f.iadd(f.imul(step, self.pack.width), f.imul(group, self.lanes))
        f.store(value, self.args["destination"], at)

    # -- lanes adjacent: rows are copied -----------------------------------------------------------------
    def copy_lanes(self, *, edge: bool) -> None:
        """One step after the other; a pair takes two steps and interleaves them."""
        f, args = self.f, self.args
        masks: list[Value | None] = []
        # The same row of the next strip lies behind: it is packed next, and is fetched into L2 meanwhile.
        self.ahead = self.pack.width * BYTES[self.pack.dtype]
        for group in range(self.groups):
            left = f.isub(args["valid"] if edge else self.pack.width, group * self.lanes)
            partial = edge or (isinstance(left, int) and left < self.lanes)
            masks.append(self._below(left, self.lanes) if partial else None)
        if not self.pack.pairs:
            with f.loop(0, args["depth"]) as step:
                row = f.offset(args["source"], f.imul(step.i, args["step_stride"]))
                f.prefetch(f.offset(row, self.ahead), locality=2)
                for group, mask in enumerate(masks):
                    self._put(self._widen(self._row_part(row, group, mask)), step.i, group)
            return
        whole = f.idiv(args["depth"], 2)
        with f.loop(0, whole) as pair:
            self._pair_of_rows(pair.i, masks, second=True)
        odd = f.compare("ne", f.index(f.irem(args["depth"], 2)), constant(0, "i64"))
        with f.when(odd):
            self._pair_of_rows(f.index(whole), masks, second=False)

    def _row_part(self, row: Value, group: int, mask: Value | None) -> Value:
        type_ = vector(MEMORY[self.pack.dtype], self.lanes)
        if mask is None:
            return self.f.load(row, type_, group * self.lanes)
        return self.f.masked_load(row, type_, mask, group * self.lanes)

    def _pair_of_rows(self, pair: Value, masks: list[Value | None], *, second: bool) -> None:
        f, args = self.f, self.args
        first_row = f.offset(args["source"], f.imul(f.imul(pair, 2), args["step_stride"]))
        second_row = f.offset(first_row, args["step_stride"])
        f.prefetch(f.offset(first_row, self.ahead), locality=2)
        f.prefetch(f.offset(second_row, self.ahead), locality=2)
        for group, mask in enumerate(masks):
            # Two rows interleave to pairs: lane k of the first and of the second become one 32-bit lane.
            # Behind an odd depth the second row is zero, which adds nothing to the sums.
            low = self._row_part(first_row, group, mask)
            high = self._row_part(second_row, group, mask) if second else constant(0, low.type)
            order = [lane // 2 + (self.lanes if lane % 2 else 0) for lane in range(2 * self.lanes)]
            both = f.shuffle(low, high, order)
            self._put(f.cast("bitcast", both, vector("float", self.lanes)), pair, group)

    # -- lanes adjacent, strips narrower than registers: several strips ----------------------------------
    def copy_strips(self) -> None:
        """So many steps at a time that each strip's part is whole registers, strip after strip."""
        f, args, width = self.f, self.args, self.pack.width
        per_step = 2 if self.pack.pairs else 1
        # The lanes of so many steps fill whole registers, so that no store runs into the next strip; the
        # steps left over are stored with masks.
        together = self.lanes // math.gcd(width, self.lanes)
        steps = f.index(f.idiv(f.iadd(args["depth"], per_step - 1), per_step))
        strip_bytes = f.imul(steps, width * self.bytes)
        full = f.index(f.floor_to(f.idiv(args["depth"], per_step), together))
        strips = f.index(f.idiv(args["valid"], width))
        partial = f.compare("ne", f.index(f.irem(args["valid"], width)), constant(0, "i64"))
        usual, edge = self._below(width, self.lanes), self._below(f.irem(args["valid"], width), self.lanes)
        with f.loop(0, full, together) as group:
            with f.loop(0, strips) as strip:
                self._strip_part(group.i, strip.i, strip_bytes, usual, together)
            with f.when(partial):
                self._strip_part(group.i, strips, strip_bytes, edge, together)
        odd = f.irem(args["depth"], per_step)
        with f.loop(full, steps) as rest:
            # The last pair of an odd depth has one row; lanes are masked, as the strip at the edge has
            # fewer.
            both = None if per_step == 1 else f.compare("slt", f.index(f.iadd(rest.i, odd)), steps)
            with f.loop(0, f.iadd(strips, f.cast("zext", partial, "i64"))) as strip:
                mask = self._below(f.isub(args["valid"], f.imul(strip.i, width)), self.lanes)
                mask = f.and_(mask, usual)
                value = self._lanes_of_step(rest.i, strip.i, mask, both)
                place = f.offset(args["destination"], f.imul(strip.i, strip_bytes))
                f.masked_store(value, f.offset(place, f.imul(rest.i, width * self.bytes)), usual)

    def _strip_part(self, step: Value, strip: Value, strip_bytes: Index, mask: Value, count: int) -> None:
        """Some steps of one strip: their lanes, one step's after the other's, fill registers."""
        f, width, lanes = self.f, self.pack.width, self.lanes
        steps = [f.index(f.iadd(step, k)) for k in range(count)]
        parts = [self._lanes_of_step(at, strip, mask, None, count) for at in steps]
        place = f.offset(self.args["destination"], f.imul(strip, strip_bytes))
        place = f.offset(place, f.imul(step, width * self.bytes))
        for register in range(width * count // lanes):
            first = register * lanes // width
            # element e of the concatenated steps is lane e % width of step e / width: at most two registers
            # of steps give one register of the destination
            order = [divmod(register * lanes + lane, width) for lane in range(lanes)]
            low, high = parts[first], parts[min(first + 1, count - 1)]
            value = f.shuffle(low, high, [(k - first) * lanes + lane for k, lane in order])
            f.store(value, place, register * lanes)

    def _lanes_of_step(
        self, step: Value, strip: Value, mask: Value, both: Value | None, ahead: int = 0
    ) -> Value:
        """A register of one step of one strip; `both` says whether the second row of a pair exists."""
        f, args, pack = self.f, self.args, self.pack
        rows = []
        type_ = vector(MEMORY[pack.dtype], self.lanes)
        for part in range(2 if pack.pairs else 1):
            k = f.iadd(f.imul(step, 2), part) if pack.pairs else step
            row = f.offset(args["source"], f.imul(k, args["step_stride"]))
            row = f.offset(row, f.imul(strip, pack.width * BYTES[pack.dtype]))
            if ahead:
                distance = f.imul(args["step_stride"], ahead * (2 if pack.pairs else 1))
                f.prefetch(f.offset(row, distance))
            if part and both is not None:
                mask = f.select(both, mask, constant(0, mask.type))
            rows.append(f.masked_load(row, type_, mask))
        if not pack.pairs:
            return self._widen(rows[0])
        order = [lane // 2 + (self.lanes if lane % 2 else 0) for lane in range(2 * self.lanes)]
        return f.cast("bitcast", f.shuffle(rows[0], rows[1], order), vector("float", self.lanes))

    # -- steps adjacent: in-register transposes ----------------------------------------------------------
    def transpose(self, whole: Value) -> None:
        """A transpose tile of `lanes` lanes by `lanes` packed steps at a time.

        Whole tiles come first, all others after them, by code that masks each lane and step: the code of a
        tile is long, so each of the two is emitted once.
        """
        f, args = self.f, self.args
        per_step = 2 if self.pack.pairs else 1
        steps = f.idiv(f.iadd(args["depth"], per_step - 1), per_step)
        # Tiles without masks only if all lanes of the strip exist: a strip at the edge is masked as a
        # whole.
        full = f.floor_to(f.idiv(args["depth"], per_step), self.lanes)
        full = f.select(whole, f.index(full), constant(0, "i64"))
        with f.loop(0, full, self.lanes) as square:
            self._tiles(square.i, None)
        with f.loop(full, steps, self.lanes) as square:
            left = f.isub(args["depth"], f.imul(square.i, per_step))
            mask = self._below(left, self.lanes * per_step)
            self._tiles(square.i, (mask, f.isub(steps, square.i)))

    def _tiles(self, step: Value, edge: tuple[Value, Index] | None) -> None:
        """The tiles of some steps; at an edge only the masked elements and so many steps exist."""
        if self.pack.width % self.lanes:  # elements beyond one step are overwritten by the next: all at once
            self._transpose_groups(step, range(self.groups), edge)
        else:
            with self.f.loop(0, self.groups) as group:
                self._transpose_groups(step, [group.i], edge)

    def _transpose_groups(
        self, step: Value, groups: Sequence[Index], edge: tuple[Value, Index] | None
    ) -> None:
        f, squares = self.f, []
        for group in groups:
            start = f.imul(group, self.lanes)
            columns = self.lanes if isinstance(start, Value) else min(self.lanes, self.pack.width - start)
            rows = [self._lane_run(step, f.iadd(start, c), edge) for c in range(columns)]
            rows += [rows[-1]] * (self.lanes - columns)  # land past the width
            squares.append(transpose(f, rows))
        for k, values in enumerate(zip(*squares)):
            if edge is None:
                self._put_step(values, groups, f.iadd(step, k))
                continue
            with f.when(f.compare("sgt", f.index(edge[1]), constant(k, "i64"))):
                self._put_step(values, groups, f.iadd(step, k))

    def _put_step(self, values: Sequence[Value], groups: Sequence[Index], step: Index) -> None:
        """The registers of one step, in order: elements beyond it are overwritten by the next step."""
        for group, value in zip(groups, values, strict=True):
            self._put(value, step, group)

    def _lane_run(self, step: Value, lane: Index, edge: tuple[Value, Index] | None) -> Value:
        """`lanes` packed steps of one lane, zero past the depth; lanes past the edge repeat the last one."""
        f, args, pack = self.f, self.args, self.pack
        # Lanes past the edge read the last one, whose memory exists, and are zeroed afterwards.
        number = lane if edge is None else f.imin(lane, f.isub(args["valid"], 1))
        run = f.offset(args["source"], f.imul(number, args["lane_stride"]))
        per_step = 2 if pack.pairs else 1
        type_ = vector(MEMORY[pack.dtype], self.lanes * per_step)
        at = f.imul(step, per_step)
        value = f.load(run, type_, at) if edge is None else f.masked_load(run, type_, edge[0], at)
        if pack.pairs:
            value = f.cast("bitcast", value, vector("float", self.lanes))
        else:
            value = self._widen(value)
        if edge is None:
            return value
        exists = f.compare("slt", f.index(lane), args["valid"])
        return f.select(exists, value, constant(0, value.type))

    # -- nothing adjacent --------------------------------------------------------------------------------
    def copy_one_by_one(self) -> None:
        """Element by element; for operands that should have been copied before."""
        f, args, pack = self.f, self.args, self.pack
        per_step = 2 if pack.pairs else 1
        steps = f.idiv(f.iadd(args["depth"], per_step - 1), per_step)
        out = "i16" if pack.pairs else self.packed
        with f.loop(0, steps) as step, f.loop(0, pack.width) as lane:
            for part in range(per_step):
                k = f.iadd(f.imul(step.i, per_step), part)
                inside = f.and_(
                    f.compare("slt", lane.i, args["valid"]), f.compare("slt", f.index(k), args["depth"])
                )
                with f.branch_value(inside, constant(0, out)) as branch:
                    at = f.iadd(f.imul(lane.i, args["lane_stride"]), f.imul(k, args["step_stride"]))
                    element = f.load(f.offset(args["source"], at), MEMORY[pack.dtype])
                    branch.value = element if pack.pairs else self._widen(element)
                place = f.iadd(f.imul(step.i, pack.width), lane.i)
                place = f.iadd(f.imul(place, per_step), part)
                f.store(branch.result(), args["destination"], place)
