"""The tiling of a product: register tile, cache blocks, packed operands, the split between threads.

From the outside in:

for columns by nc:
  for k by kc:
    for rows by mc:                    A[mc, kc] stays in L2
      pack A[mc, kc]
      for each strip of B:
        pack B[kc, strip], if these are the first rows
        for each tile of A: micro-kernel

While they multiply, micro-kernels fetch the strip of B and the rows of A that come next, be it in the next
chunk, group of columns or product of a batch.

An operand is packed only if its elements do not lie as micro-kernels read them, or if it is read so often
that a copy in order pays.  Where A is packed, nc is as large as the last cache level allows, so that A is
packed once, and a row block takes a quarter of L2, as the rows do that come next.  Where A is not but B is,
nothing is lost if A is read again: then the strips of B stay in L2, in half of it, and A passes by in small
row blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.gemm.problem import Gemm, Matrix
from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.llvm.cpu import LINE_BYTES, CpuTarget

# Bytes of a row that one chunk of K takes.  Longer chunks read and write C less often; that a strip of B is
# then larger than L1 costs nothing that was measurable, as its lines come in order.
_MAX_CHUNK_BYTES = 4096
# The same where A is packed: a row block and the next one, as it lies, share L2.
_MAX_PACKED_CHUNK_BYTES = 2048
# Beyond so many rows of A a packed copy of B, whose pages are few, is read faster than it costs to make.
_MAX_ROWS_IN_PLACE = 1536
# With so few rows a copy of B is not read often enough to pay, even where its strips find no room in L2.
_MIN_ROWS_PACKED = 512
# Units of work for a fair share among many threads, and tiles that a unit has at least.
_MIN_UNITS, _MIN_TILES = 64, 8
_PAGE = 4096


@dataclass(frozen=True)
class Tiling:
    """The numbers of one loop nest.

    Attributes:
        step: what micro-kernels multiply per step of K: `f32`, `f64` or `bf16x2`.
        rows: rows of the register tile.
        vectors: vector registers in a row of it.
        width: columns of it.
        kc: elements of K per chunk, even.
        mc: rows per block, a multiple of `rows`.
        panels: strips of B that are done together.
        pack_a, pack_b: whether the operand is copied first; a strip of B at the edge always is.
        split: what threads divide between them: `columns` or `rows`.
        part_rows: rows of the parts into which strips of columns are divided for many threads, a multiple of
            `rows`; zero where they are not divided.
    """

    step: str
    rows: int
    vectors: int
    width: int
    kc: int
    mc: int
    panels: int
    pack_a: bool
    pack_b: bool
    split: str
    part_rows: int = 0


def register_tile(target: CpuTarget) -> tuple[int, int]:
    """(rows, vectors) that leave room for a row of B and one broadcast: 12x2 of 32 registers, 6x2 of 16."""
    if target.vector_registers >= 32:
        return (12, 2) if target.vector_bytes > 16 else (8, 3)
    return 6, 2


def adjacency(lanes: int, steps: int) -> str:
    """Which neighbours are adjacent, given the strides along the strip and along K."""
    return "lanes" if lanes == 1 else "steps" if steps == 1 else "none"


def choose_tiling(gemm: Gemm, target: CpuTarget) -> Tiling:
    """The loop nest for a product on a target, by rule."""
    step, rows, width, element = _steps(gemm, target)
    columns = -(-gemm.n // width) * width
    kc = _even_chunk(gemm.k, _MAX_CHUNK_BYTES // element)
    # Whether A is packed depends on the chunk, and a packed A wants shorter ones: its block shares L2 with
    # the rows that come next.
    pack_a = _packs_a(gemm, step, rows, columns, kc * element, target)
    if pack_a:
        kc = _even_chunk(gemm.k, _MAX_PACKED_CHUNK_BYTES // element)
    return _tiling(gemm, target, kc, pack_a, _packs_b(gemm, step, kc, width * element, target))


def _steps(gemm: Gemm, target: CpuTarget) -> tuple[str, int, int, int]:
    """What micro-kernels multiply per step of K, rows and columns of their tile, and bytes of an element."""
    paired = gemm.a.dtype == gemm.b.dtype == "bf16" and target.bf16_dot
    step = "f64" if gemm.accumulator == "f64" else "bf16x2" if paired else "f32"
    rows, vectors = register_tile(target)
    lanes = target.lanes("double" if step == "f64" else "float")
    width = lanes if gemm.n <= lanes else vectors * lanes
    return step, rows, width, {"f32": 4, "f64": 8, "bf16x2": 2}[step]


def _tiling(gemm: Gemm, target: CpuTarget, kc: int, pack_a: bool, pack_b: bool) -> Tiling:
    step, rows, width, element = _steps(gemm, target)
    vectors = width // target.lanes("double" if step == "f64" else "float")
    columns = -(-gemm.n // width)
    # Bytes of the strips of B that are done together, and of a block of rows.
    if pack_b and not pack_a:
        room, rows_room = target.l2_bytes // 2, target.l2_bytes // 8
    else:
        room, rows_room = target.l3_bytes // 4, target.l2_bytes // 4
    mc = _even_blocks(gemm.m, max(rows, min(40, rows_room // (kc * element) // rows) * rows), rows)
    panels = max(1, min(columns, room // (kc * width * element)))
    # By columns each thread packs strips of its own; by rows every thread would pack all of B, which is for
    # tall results of few strips.
    split = "columns" if columns * gemm.batch_size >= 8 or columns * width >= gemm.m else "rows"
    part_rows = 0
    if split == "columns" and not pack_a:  # each part would have to pack A again
        part_rows = _part_rows(gemm.m, rows, columns * gemm.batch_size)
    return Tiling(step, rows, vectors, width, kc, mc, panels, pack_a, pack_b, split, part_rows)


def _even_blocks(m: int, most: int, rows: int) -> int:
    """The row block, a multiple of `rows`, that needs no more blocks and leaves no small one."""
    each = -(-m // max(1, -(-m // most)))
    return max(rows, -(-each // rows) * rows)


def _part_rows(m: int, rows: int, strips: int) -> int:
    """How strips are divided, so that many threads have equal shares; zero if there are enough strips."""
    parts = min(-(-_MIN_UNITS // strips), m // (_MIN_TILES * rows))
    return -(-m // parts // rows) * rows if parts > 1 else 0


def _even_chunk(k: int, longest: int) -> int:
    """The chunk length, a multiple of 16, that splits K into as few and as equal chunks as possible."""
    chunks = max(1, -(-k // longest))
    each = -(-max(k, 1) // chunks)
    # whole lines of f32, and whole pairs of bf16
    return -(-each // 16) * 16


def _may_read_a(gemm: Gemm, step: str) -> bool:
    a = gemm.a
    if a.dtype != {"f32": "f32", "f64": "f64", "bf16x2": "bf16"}[step]:
        return False
    if a.row_stride == 1 and step != "bf16x2":
        return True
    # A pair is read as one word: the elements must be adjacent along K, and with an odd K the last word
    # would end in the next row's element.
    return a.column_stride == 1 and (step != "bf16x2" or gemm.k % 2 == 0)


def _may_read_b(b: Matrix, step: str) -> bool:
    return b.column_stride == 1 and b.dtype == step


def _packs_a(gemm: Gemm, step: str, rows: int, columns: int, chunk_bytes: int, target: CpuTarget) -> bool:
    a = gemm.a
    if not _may_read_a(gemm, step):
        return True
    # Each line of a transposed A comes once for every tile that has a part of it: that costs little from
    # L2, or for few strips of B.
    if a.row_stride == 1 and step != "bf16x2":  # a tile uses a part of each line
        return columns > 64 and gemm.m * chunk_bytes > target.l2_bytes // 2
    # Rows at such a stride lie in the same sets of L1, and evict each other within a tile.
    return columns > 96 and _collide(a.row_stride * BYTES[a.dtype], rows, target)


def _collide(stride: int, rows: int, target: CpuTarget) -> bool:
    """Whether lines at a distance are too many for their sets of L1, which covers a page with each way."""
    sets = Counter(row * stride // LINE_BYTES % (_PAGE // LINE_BYTES) for row in range(rows))
    return max(sets.values()) > max(1, target.l1_bytes // _PAGE - 2)


def _packs_b(gemm: Gemm, step: str, kc: int, row_bytes: int, target: CpuTarget) -> bool:
    """Strips of a row-major B can be used where they are, the next one being fetched meanwhile, if they find
    room in L2: rows a page apart have no more than their own lines of every page of it.
    """
    if not _may_read_b(gemm.b, step) or gemm.m > _MAX_ROWS_IN_PLACE:
        return True
    stride = gemm.b.row_stride * BYTES[gemm.b.dtype]
    places = _PAGE // math.gcd(stride, _PAGE)  # at which rows begin within a page
    # Rows begin at only so many offsets within a page, and reach only the sets of L2 at these offsets.
    room = target.l2_bytes // _PAGE * min(_PAGE, places * row_bytes)
    return gemm.m > _MIN_ROWS_PACKED and kc * row_bytes > room
