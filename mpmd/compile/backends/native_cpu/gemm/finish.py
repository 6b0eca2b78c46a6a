"""Finishing of a tile of sums: conversion, masking at the edge, epilogue, store.

A function per kernel, called with a tile that the micro-kernel has just left in L1.  It loops over the tile's
rows, so the epilogue's code is written once per register of a row and not once per register of the tile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpmd.compile.backends.native_cpu.gemm.problem import Epilogue, Gemm, Position
from mpmd.compile.backends.native_cpu.storage import BYTES, REGISTER, narrow
from mpmd.compile.llvm.cpu import CpuTarget
from mpmd.compile.llvm.function_builder import FunctionBuilder, Index, Module
from mpmd.compile.llvm.llvm_types import Value, lanes_of, vector, vector_constant, with_element


class StoreSums:
    """The epilogue of products without one: convert to C's dtype and store."""

    pointers: tuple[str, ...] = ("c",)

    def __init__(self, gemm: Gemm) -> None:
        self.gemm = gemm

    def vectors_at_once(self, target: CpuTarget) -> int:
        """Stores do not depend on anything."""
        return 1

    def emit(self, f: FunctionBuilder, parts: Sequence[tuple[Value, Position]]) -> None:
        for sums, at in parts:
            self._store(f, sums, at)

    def _store(self, f: FunctionBuilder, sums: Value, at: Position) -> None:
        c = self.gemm.c
        offset: Index = f.imul(at.row, c.row_stride)
        offset = f.iadd(offset, f.imul(at.column, c.column_stride))
        for index, stride in zip(at.batch, c.batch_strides):
            offset = f.iadd(offset, f.imul(index, stride))
        element = REGISTER[c.dtype]
        wider = element == "double" and self.gemm.accumulator == "f32"
        value = f.cast("fpext" if wider else "fptrunc", sums, with_element(sums.type, element))
        value = narrow(f, value, c.dtype)
        address = f.offset(f.arguments["c"], f.imul(offset, BYTES[c.dtype]))
        if c.column_stride == 1:
            if at.mask is None:
                f.store(value, address)
            else:
                f.masked_store(value, address, at.mask)
            return
        # a result with strided columns is written element by element; masked lanes do not exist in C
        for lane in range(lanes_of(value.type)):
            place = f.offset(address, lane * c.column_stride * BYTES[c.dtype])
            if at.mask is None:
                f.store(f.extract(value, lane), place)
            else:
                with f.when(f.extract(at.mask, lane)):
                    f.store(f.extract(value, lane), place)


class FinishTile:
    """The functions that finish full tiles and tiles at the right edge of one kernel.

    Args:
        kernel: its symbol.
        gemm: the product.
        width: columns of its tiles, whole vectors.
        epilogue: consumes the sums; None stores them.
    """

    def __init__(self, kernel: str, gemm: Gemm, width: int, epilogue: Epilogue | None) -> None:
        self.kernel = kernel
        self.gemm = gemm
        self.width = width
        self.epilogue: Epilogue = epilogue or StoreSums(gemm)

    def name(self, *, edge: bool) -> str:
        return f"{self.kernel}_finish{'_edge' if edge else ''}"

    def call(
        self,
        f: FunctionBuilder,
        tile: Value,
        rows: Index,
        row: Index,
        column: Index,
        batch: Index,
        results: Sequence[Value],
        *,
        edge: bool,
    ) -> None:
        """Call the function on some rows of a tile, which belong at a row and column of the result."""
        f.call(self.name(edge=edge), tile, *map(f.index, (rows, row, column, batch)), *results)

    def emit(self, module: Module, *, edge: bool) -> None:
        """Add `void name(ptr tile, i64 rows, i64 row, i64 column, i64 batch, ptr result...)`."""
        gemm = self.gemm
        element = "double" if gemm.accumulator == "f64" else "float"
        lanes = module.target.lanes(element)
        columns = gemm.n % self.width if edge else self.width
        arguments = [("tile", "ptr"), ("rows", "i64"), ("row", "i64"), ("column", "i64"), ("batch", "i64")]
        arguments += [(p, "ptr") for p in self.epilogue.pointers]
        with FunctionBuilder(module, self.name(edge=edge), arguments, internal=True) as f:
            batch = self._batch_indices(f, f.arguments["batch"])
            # Several rows at once: as many vectors as the epilogue computes side by side, to overlap their
            # latency.
            at_once = max(1, self.epilogue.vectors_at_once(module.target) // -(-columns // lanes))
            rows, whole = f.arguments["rows"], f.index(0)
            if at_once > 1:
                whole = f.index(f.floor_to(rows, at_once))
                with f.loop(0, whole, at_once) as group:
                    self._rows(f, batch, group.i, at_once, columns)
            with f.loop(whole, rows) as rest:
                self._rows(f, batch, rest.i, 1, columns)

    def _rows(
        self, f: FunctionBuilder, batch: tuple[Index, ...], first: Value, count: int, columns: int
    ) -> None:
        element = "double" if self.gemm.accumulator == "f64" else "float"
        lanes = f.target.lanes(element)
        parts = []
        for r in range(count):
            number = f.iadd(first, r)
            row = f.index(f.iadd(f.arguments["row"], number))
            for start in range(0, columns, lanes):
                at = f.iadd(f.imul(number, self.width), start)
                sums = f.load(f.arguments["tile"], vector(element, lanes), at)
                left, mask = columns - start, None
                if left < lanes:
                    mask = vector_constant([int(lane < left) for lane in range(lanes)], "i1")
                column = f.index(f.iadd(f.arguments["column"], start))
                parts.append((sums, Position(batch, row, column, mask)))
        self.epilogue.emit(f, parts)

    def _batch_indices(self, f: FunctionBuilder, batch: Value) -> tuple[Index, ...]:
        indices: list[Index] = []
        rest: Index = batch
        for size in reversed(self.gemm.batch):
            indices.append(f.irem(rest, size))
            rest = f.idiv(rest, size)
        return tuple(reversed(indices))


@dataclass(frozen=True)
class ProductKernel(ABC):
    """A product of matrices, ready to be emitted; see `CpuKernel`.

    Attributes:
        name: its symbol.
        gemm: what it computes.
        epilogue: what becomes of the sums; None stores them.
    """

    name: str
    gemm: Gemm
    epilogue: Epilogue | None = field(default=None, kw_only=True)

    @property
    @abstractmethod
    def width(self) -> int:
        """Columns of a tile of sums."""

    @property
    @abstractmethod
    def units_per_batch(self) -> int:
        """Units of one product."""

    @property
    def units(self) -> int:
        """Units of all products."""
        return self.units_per_batch * self.gemm.batch_size

    @property
    def finish(self) -> FinishTile:
        return FinishTile(self.name, self.gemm, self.width, self.epilogue)

    @property
    def pointers(self) -> tuple[str, ...]:
        """Names of the pointer arguments before the workspace."""
        return ("a", "b", *self.finish.epilogue.pointers)
