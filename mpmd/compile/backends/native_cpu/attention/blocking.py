"""The tiling of an attention kernel: register tiles, blocks of queries, and a thread's workspace."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.gemm.tiling import register_tile
from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.kernels.in_place import may_share
from mpmd.compile.kernels.index import dim
from mpmd.compile.kernels.kernel_plan import Apply, KernelPlan, Load, Store
from mpmd.compile.kernels.product_plans import KEYS, AttentionPlan
from mpmd.compile.llvm.cpu import LINE_BYTES, CpuTarget

_MAX_TILES = 4  # register tiles in a block of queries


@dataclass(frozen=True)
class Tile:
    """The register tile of one product.

    Attributes:
        step: what micro-kernels multiply per step: `f32` or `bf16x2`.
        rows: rows of it.
        vectors: vector registers in a row.
        width: columns of it.
    """

    step: str
    rows: int
    vectors: int
    width: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a step of a packed strip."""
        return 4 * self.width

    def steps(self, depth: int) -> int:
        return -(-depth // 2) if self.step == "bf16x2" else depth


class Blocking:
    """The numbers of the kernel of a plan on a CPU."""

    def __init__(self, plan: AttentionPlan, target: CpuTarget) -> None:
        self.plan = plan
        self.target = target
        self.lanes = target.lanes()
        self.rows, self._vectors = register_tile(target)
        self.padded_keys = self.scores[0].width * -(-plan.keys // self.scores[0].width)
        # Behind the last key, factors are padded with whole registers and tiles of zeros
        # (`BlockRows._pad`).
        self.line = self.padded_keys + max(self.lanes, self.rows) + LINE_BYTES // 4
        self.block = self._block()

    def _tile(self, width: int, step: str) -> Tile:
        vectors = 1 if width <= self.lanes else self._vectors
        return Tile(step, self.rows, vectors, vectors * self.lanes)

    @cached_property
    def scores(self) -> list[Tile]:
        """The tiles of the products before the rows."""
        return [
            self._tile(self.plan.keys, "bf16x2" if self._pairs(s.a.dtype, s.b.dtype) else "f32")
            for s in self.plan.scores
        ]

    @cached_property
    def mixtures(self) -> list[Tile]:
        """The tiles of the products after the rows."""
        return [
            self._tile(m.width, "bf16x2" if self.is_paired(m.factor) else "f32") for m in self.plan.mixtures
        ]

    def _pairs(self, *dtypes: str) -> bool:
        return self.target.bf16_dot and all(d == "bf16" for d in dtypes)

    def is_paired(self, factor: int) -> bool:
        """Whether a factor is kept in bf16, so that pairs of it are multiplied at once."""
        others = [m.w.dtype for m in self.plan.mixtures if m.factor == factor]
        return self._pairs(self.plan.rows.operands[factor].dtype, *others)

    @cached_property
    def shared(self) -> dict[int, int]:
        """Factor → the sums in whose place it is written."""
        free, places = {s.sums for s in self.plan.scores}, {}
        for factor in sorted({m.factor for m in self.plan.mixtures}):
            for sums in sorted(free):
                # A factor may lie over sums if none is read after it was overwritten (`may_share`); pairs
                # of bf16 have another size.
                if not self.is_paired(factor) and may_share(self.local_rows, sums, factor, row=True):
                    places[factor] = sums
                    free.discard(sums)
                    break
        return places

    @cached_property
    def local_rows(self) -> KernelPlan:
        """The rows' plan with the inner operands as single rows, in the dtype in which they are kept."""
        plan, rows, inner = self.plan, self.plan.rows, self.plan.inner
        key = dim(rows.rank - 1)
        widened = {
            m.factor
            for m in plan.mixtures
            if rows.operands[m.factor].dtype == "bf16" and not self.is_paired(m.factor)
        }
        operands = [
            dataclasses.replace(o, size=plan.keys, dtype="f32" if k in widened else o.dtype)
            if k in inner
            else o
            for k, o in enumerate(rows.operands)
        ]
        nodes = [
            dataclasses.replace(n, index=key) if isinstance(n, Load) and n.operand in inner else n
            for n in rows.nodes
        ]
        stores: list[Store] = []
        for store in rows.stores:
            node = store.node
            # Rounded to bf16 as the plan says, but kept as f32, which micro-kernels multiply without pairs.
            if store.operand in widened:
                nodes.append(Apply("f32", "convert", (node,)))
                node = len(nodes) - 1
            index = key if store.operand in inner else store.index
            stores.append(dataclasses.replace(store, index=index, node=node))
        return dataclasses.replace(rows, operands=tuple(operands), nodes=tuple(nodes), stores=tuple(stores))

    def _block(self) -> int:
        """Queries of a block: what keeps their scores in L2, and is enough for the products."""
        # Scores and factors of a block are read and written by several passes: they fill half of L2 at
        # most, but a block has two tiles at least, so that strips of keys are read for more than one.
        kept = len(self.plan.inner) - len(self.shared)
        fitting = self.target.l2_bytes // 2 // (4 * self.line * kept) // self.rows
        most = -(-self.plan.queries // self.rows)
        tiles = max(1, min(most, max(2, min(_MAX_TILES, fitting))))
        return self.rows * tiles

    @property
    def blocks(self) -> int:
        return -(-self.plan.queries // self.block)

    @property
    def is_divided(self) -> bool:
        """Whether blocks are independent: nothing is summed over queries."""
        return all(m.over == KEYS for m in self.plan.mixtures)

    @property
    def padded_rows(self) -> int:
        return -(-self.plan.keys // self.rows) * self.rows

    def panels(self, tile: Tile, columns: int) -> int:
        return -(-columns // tile.width)

    @cached_property
    def places(self) -> dict[str, int]:
        """Byte offset of each part of the workspace, and `size`."""
        plan, sizes = self.plan, {}
        for k, (score, tile) in enumerate(zip(plan.scores, self.scores)):
            sizes[f"b{k}"] = self.panels(tile, plan.keys) * tile.steps(score.depth) * tile.row_bytes
            sizes[f"a{k}"] = self.block * tile.steps(score.depth) * 4
            sizes[f"p{score.sums}"] = self.block * self.line * 4
        for factor in sorted({m.factor for m in plan.mixtures} - self.shared.keys()):
            sizes[f"p{factor}"] = self.block * self.line * BYTES[self.local_rows.operands[factor].dtype]
        for k, (mixture, tile) in enumerate(zip(plan.mixtures, self.mixtures)):
            panels = self.panels(tile, mixture.width)
            depth = plan.keys if mixture.over == KEYS else self.block
            sizes[f"w{k}"] = panels * tile.steps(depth) * tile.row_bytes
            if mixture.over == KEYS:
                sizes[f"t{k}"] = tile.rows * tile.row_bytes
            else:
                sizes[f"t{k}"] = panels * self.padded_rows * tile.row_bytes
                sizes[f"x{k}"] = tile.rows * tile.steps(self.block) * 4
        return _offsets(sizes)


def _offsets(sizes: dict[str, int]) -> dict[str, int]:
    """Where each part begins; packing writes whole registers, one beyond the end at most."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-(size + LINE_BYTES) // LINE_BYTES) * LINE_BYTES
    offsets["size"] = end
    return offsets
