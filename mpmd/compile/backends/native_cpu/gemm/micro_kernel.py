"""Micro-kernels: one register tile of a matrix product, over a run of K, for any strides.

    D[rows, width] = A[rows, depth] @ B[depth, width]  (+ S[rows, width] if accumulate)

The tile's accumulators stay in registers; a step of the K loop loads one row of B (`vectors` registers),
and multiplies it with each row's broadcast element of A.  Sizes and strides other than the tile's are
arguments, so that one compiled micro-kernel serves every product of a process.

bf16 comes in pairs: two neighbours along K are one 32-bit lane, and one instruction multiplies the pairs of a
lane and adds both products to an f32 accumulator.

A tile takes thousands of cycles and reads from L1 and L2; memory behind L2 is idle meanwhile.  So the caller
of micro-kernels passes a *fetch* to them in memory, whose lines they bring into L2 for later tiles: runs of
adjacent lines, equally spaced, such as the rows of the strip that is packed next.  Every few steps of K a
micro-kernel prefetches a line and stores the position for the next tile.  Past the end, the last line is
prefetched again, which is cached by then.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.llvm.cpu import LINE_BYTES
from mpmd.compile.llvm.function_builder import FunctionBuilder, Index, Module
from mpmd.compile.llvm.llvm_types import Value, constant, lanes_of, vector

_POSITION, _LEFT, _RUN, _JUMP, _END = range(5)  # fields, each of 8 bytes


class Fetch:
    """A fetch in memory, as its owner sees it.

    Args:
        f: the function that calls micro-kernels.
    """

    def __init__(self, f: FunctionBuilder) -> None:
        self.f = f
        self.place = f.stack("i64", 8)

    def runs(self, start: Value, count: Index, distance: Index, size: Index) -> None:
        """Prefetch runs of bytes.

        Args:
            start: the first byte.
            count: how many runs, at least one.
            distance: bytes from a run to the next.
            size: bytes of a run, at least one.
        """
        # A fetch counts up from minus its length to zero: its end is known by the sign, and a position past
        # it is clamped to the last line without a branch.
        f = self.f
        # a run of so many bytes may begin within a line
        lines = f.idiv(f.iadd(size, 2 * LINE_BYTES - 2), LINE_BYTES)
        if (
            isinstance(size, int)
            and isinstance(distance, int)
            and size % LINE_BYTES == distance % LINE_BYTES == 0
        ):
            lines = size // LINE_BYTES
        reach = f.isub(f.iadd(f.imul(f.isub(count, 1), distance), size), 1)
        jump = f.isub(distance, f.imul(f.isub(lines, 1), LINE_BYTES))
        self._set(f.isub(0, reach), lines, jump, f.offset(start, reach))

    def nothing(self, near: Value) -> None:
        self._set(0, 1, 0, near)

    def is_done(self) -> Value:
        """I1, whether every line has been prefetched."""
        position = self.f.load(self.place, "i64", _POSITION)
        return self.f.compare("sge", position, constant(0, "i64"))

    def _set(self, position: Index, run: Index, jump: Index, end: Value) -> None:
        f = self.f
        for field, value in ((_POSITION, position), (_LEFT, run), (_RUN, run), (_JUMP, jump)):
            f.store(f.index(value), self.place, field)
        f.store(end, self.place, _END)


class Fetching:
    """A fetch as the micro-kernel that continues it sees it.

    What goes round its loops is a list of `STATE` values: bytes from the fetch's end to its next line, and
    the lines that are left of the run.

    Args:
        f: the micro-kernel.
        place: the fetch.
    """

    STATE = 2

    def __init__(self, f: FunctionBuilder, place: Value) -> None:
        self.f = f
        self.place = place
        self.start = [f.load(place, "i64", _POSITION), f.load(place, "i64", _LEFT)]
        self._run, self._jump = f.load(place, "i64", _RUN), f.load(place, "i64", _JUMP)
        self._end = f.load(place, "ptr", _END)

    def line(self, state: list[Value]) -> list[Value]:
        """Prefetch a line; returns the state after it."""
        # Locality 2 is the second level: what comes next must not evict the tile's own operands from L1.
        f, (position, left) = self.f, state
        f.prefetch(f.offset(self._end, f.imin(position, 0)), locality=2)
        fewer = f.index(f.isub(left, 1))
        # at the end of a run the next line is the next run's first: `jump` leads there from the run's last
        done = f.compare("eq", fewer, constant(0, "i64"))
        position = f.index(f.iadd(position, f.select(done, self._jump, constant(LINE_BYTES, "i64"))))
        return [position, f.select(done, self._run, fewer)]

    def leave(self, state: list[Value]) -> None:
        for field, value in zip((_POSITION, _LEFT), state, strict=True):
            self.f.store(value, self.place, field)


# Unrolling where every row has an address of its own makes LLVM load far ahead and spill.
_UNROLL = {"rows": 4, "steps": 1}
_STEPS_PER_LINE = 2  # at most, of what comes next
_STEPS_PER_ROW = 2  # at most, while rows of the result are fetched
_ROWS_PER_BASE = 3  # base + {0, 1, 2}·stride are single addresses on x86 and cheap everywhere


@dataclass(frozen=True)
class MicroKernel:
    """The recipe of a micro-kernel.

    Attributes:
        step: what one step along K multiplies: `f32`, `f64`, or `bf16x2` (a pair of bf16).
        rows: rows of the tile.
        vectors: vector registers in a row of the tile.
        adjacent: the contiguous dim of A: `rows` (packed, or stored transposed; the stride is between steps
            of K) or `steps` (stored as is; the stride is between rows).
    """

    step: str
    rows: int
    vectors: int
    adjacent: str

    @property
    def name(self) -> str:
        return f"mpmd_gemm_{self.step}_{self.rows}x{self.vectors}_{self.adjacent}"

    @property
    def accumulator(self) -> str:
        return "double" if self.step == "f64" else "float"

    @property
    def step_bytes(self) -> int:
        """Bytes of A that one row consumes in a step."""
        return 8 if self.step == "f64" else 4

    def emit(self, module: Module) -> None:
        """Add the function `name` with `ARGUMENTS` to a module."""
        with FunctionBuilder(module, self.name, ARGUMENTS) as f:
            _Tile(f, self).emit()

    def call(
        self,
        f: FunctionBuilder,
        a: Rows,
        b: Rows,
        fetch: Value,
        depth: Index,
        s: Rows,
        d: Rows,
        near: tuple[Value, Index, int],
        accumulate: Index = 0,
    ) -> None:
        """Call the function; the arguments are those of `ARGUMENTS`, in their order but for the last."""
        f.call(self.name, *map(f.index, (*a, *b, fetch, depth, *s, *d, accumulate, *near)))


ARGUMENTS = (
    ("a", "ptr"),
    ("a_stride", "i64"),  # bytes
    ("b", "ptr"),
    ("b_stride", "i64"),  # bytes between steps of K
    ("fetch", "ptr"),  # lines to bring into L2 meanwhile, see `Fetch`
    ("depth", "i64"),  # steps of K
    ("s", "ptr"),
    ("s_stride", "i64"),  # bytes between rows
    ("d", "ptr"),
    ("d_stride", "i64"),  # bytes between rows
    ("accumulate", "i64"),  # 1 if S is added, else 0
    ("near", "ptr"),  # the tile that is read or written afterwards, to be fetched into L1
    ("near_stride", "i64"),  # bytes between its rows
    ("near_line", "i64"),  # bytes between the lines of a row; zero if it has one
)


Rows = tuple[Value, Index]
"""An address, and the bytes from one row, column or step of it to the next."""


def multiply_add(f: FunctionBuilder, a: Value, b: Value, sums: Value, *, pairs: bool) -> Value:
    """`a * b + sums`; of pairs of bf16 both products are added to the f32 sum of their lane."""
    if not pairs:
        return f.fma(a, b, sums)
    type_ = vector("bfloat", 2 * lanes_of(sums.type))
    a, b = f.cast("bitcast", a, type_), f.cast("bitcast", b, type_)
    return f.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", sums.type, sums, a, b)


class _Tile:
    def __init__(self, f: FunctionBuilder, kernel: MicroKernel) -> None:
        self.f = f
        self.kernel = kernel
        self.lanes = f.target.lanes(kernel.accumulator)
        self.vector = vector(kernel.accumulator, self.lanes)
        self.vector_bytes = self.lanes * kernel.step_bytes

    def emit(self) -> None:
        f, k, distances = self.f, self.kernel, self.f.target.prefetch
        # Three loops over K. The first multiplies, and fetches the factors that come next. The second also
        # fetches a row of the result every one or two steps, late enough that it still is in L1 when the
        # sums are stored. The third has the steps that are left over.
        depth, unroll = f.arguments["depth"], _UNROLL[k.adjacent]
        self.fetching = Fetching(f, f.arguments["fetch"])
        bases = self._a_bases(f.arguments["a"])
        self.ahead = f.imul(f.arguments["a_stride"], distances.factor_steps)
        self.bases, zero = len(bases), constant(0.0, self.vector)
        state = [*bases, f.arguments["b"], *self.fetching.start, *([zero] * (k.rows * k.vectors))]
        before = f.index(f.floor_to(f.imax(f.isub(depth, distances.result_steps), 0), unroll))
        state = self._run(0, before, unroll, state)
        spread = min(unroll, _STEPS_PER_ROW)
        rows = f.imin(f.idiv(f.isub(depth, before), spread), k.rows)
        after = f.index(f.iadd(before, f.imul(rows, spread)))
        with f.loop(before, after, spread, carried=[f.arguments["near"], *state]) as loop:
            row = loop.carried[0]
            for line in range(-(-k.vectors * self.vector_bytes // LINE_BYTES)):
                f.prefetch(f.offset(row, f.imul(line, f.arguments["near_line"])), write=True)
            loop.carry([f.offset(row, f.arguments["near_stride"]), *self._steps(loop.carried[1:], spread)])
        state = self._run(after, depth, 1, loop.carried[1:])
        rest = state[self.bases + 1 :]
        self.fetching.leave(rest[: Fetching.STATE])
        self._finish(rest[Fetching.STATE :])

    def _run(self, lo: Index, hi: Index, unroll: int, state: list[Value]) -> list[Value]:
        with self.f.loop(lo, hi, unroll, carried=state) as loop:
            loop.carry(self._steps(loop.carried, unroll))
        return loop.carried

    def _a_bases(self, a: Value) -> list[Value]:
        if self.kernel.adjacent == "rows":
            return [a]
        f, stride = self.f, self.f.arguments["a_stride"]
        return [f.offset(a, f.imul(row, stride)) for row in range(0, self.kernel.rows, _ROWS_PER_BASE)]

    def _steps(self, state: list[Value], count: int) -> list[Value]:
        """`count` steps along K: A's and B's addresses, the fetch and the accumulators after them."""
        f, k, at_b = self.f, self.kernel, self.bases
        pointers, b, rest = state[:at_b], state[at_b], state[at_b + 1 :]
        fetch, accumulators = rest[: Fetching.STATE], rest[Fetching.STATE :]
        for _ in range(0, count, _STEPS_PER_LINE):
            fetch = self.fetching.line(fetch)
        b_stride, a_stride = f.arguments["b_stride"], f.arguments["a_stride"]
        for step in range(count):
            # All of B's row first: its registers are shared by all rows of the tile, which then need one
            # broadcast each. The order of the accumulators is row-major, as the tile is stored.
            b_row = [f.load(f.offset(b, v * self.vector_bytes), self.vector) for v in range(k.vectors)]
            for row in range(k.rows):
                scalar = self._a_element(pointers, row, step)
                for v in range(k.vectors):
                    at = row * k.vectors + v
                    accumulators[at] = multiply_add(
                        f, scalar, b_row[v], accumulators[at], pairs=k.step == "bf16x2"
                    )
            b = f.offset(b, b_stride)
            if k.adjacent == "rows":
                ahead = f.offset(pointers[0], self.ahead)
                f.prefetch(ahead)  # where A lies transposed each step has lines of its own, often two
                f.prefetch(f.offset(ahead, (k.rows - 1) * k.step_bytes))
                pointers = [f.offset(pointers[0], a_stride)]
        if k.adjacent == "steps":
            pointers = [f.offset(p, count * k.step_bytes) for p in pointers]
        return [*pointers, b, *fetch, *accumulators]

    def _a_element(self, pointers: list[Value], row: int, step: int) -> Value:
        f, k = self.f, self.kernel
        if k.adjacent == "rows":
            at = f.offset(pointers[0], row * k.step_bytes)
        else:
            base, within = divmod(row, _ROWS_PER_BASE)
            # row `within` of its base is at base + within · stride: one address, without an addition
            at = f.offset(pointers[base], f.imul(within, f.arguments["a_stride"]))
            at = f.offset(at, step * k.step_bytes)
        return f.splat(f.load(at, k.accumulator, align=2 if k.step == "bf16x2" else 0), self.lanes)

    def _finish(self, accumulators: list[Value]) -> None:
        f = self.f
        with f.loop(0, f.arguments["accumulate"], carried=accumulators) as once:
            # one round or none: S is not read, and need not exist, unless it is added
            before = [f.load(self._place("s", at), self.vector) for at in range(len(accumulators))]
            once.carry([f.add(sums, s) for sums, s in zip(once.carried, before, strict=True)])
        accumulators = once.carried
        for at, sums in enumerate(accumulators):
            f.store(sums, self._place("d", at))

    def _place(self, side: str, at: int) -> Value:
        f, (row, v) = self.f, divmod(at, self.kernel.vectors)
        start = f.offset(f.arguments[side], f.imul(row, f.arguments[f"{side}_stride"]))
        return f.offset(start, v * self.vector_bytes)
