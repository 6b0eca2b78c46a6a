"""What the calls of LAPACK mean that JAX writes into programs for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpmd.compile.hlo.evaluator.values import Array, Rule, Value, exact, narrow
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.lapack_calls import options_of

if TYPE_CHECKING:
    from mpmd.compile.hlo.evaluator.engine import Evaluator


def _transposed(matrix: Array) -> Array:
    return np.conj(np.swapaxes(matrix, -1, -2))


def _each(function: Callable[..., tuple[Array, ...]], *stacks: Array) -> list[Array]:
    """The results of a function on each matrix of a stack, stacked again."""
    batch = stacks[0].shape[:-2]
    flat = [s.reshape(-1, *s.shape[len(batch) :]) for s in stacks]
    results = [function(*parts) for parts in zip(*flat)]
    stacked = [np.stack([np.asarray(r[i]) for r in results]) for i in range(len(results[0]))]
    return [column.reshape((*batch, *column.shape[1:])) for column in stacked]


def _as_stated(instruction: HloInstruction, parts: Sequence[Array]) -> Value:
    """Rounded to the element types and dims of the result."""
    shapes = instruction.shape.elements or (instruction.shape,)
    made = tuple(narrow(p.reshape(s.dims), s.dtype) for p, s in zip(parts, shapes))
    return made if instruction.shape.is_tuple else made[0]


def _cholesky(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    """The factor in one half, the operand's other half, and 1 where the matrix is not positive definite."""
    lower = options_of(instruction).get("uplo", "L") == "L"

    def factor(a: Array) -> tuple[Array, Array]:
        half = np.tril(a) if lower else _transposed(np.triu(a))
        full = half + _transposed(np.tril(half, -1))
        try:
            made, info = np.linalg.cholesky(full), 0
        except np.linalg.LinAlgError:
            made, info = np.full_like(full, np.nan), 1
        joined = np.tril(made) + np.triu(a, 1) if lower else np.triu(_transposed(made)) + np.tril(a, -1)
        return joined, np.asarray(info)

    return _as_stated(instruction, _each(factor, exact(operands[0], instruction.operands[0].shape.dtype)))


def _triangular_solve(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    options = options_of(instruction)
    dtype = instruction.operands[0].shape.dtype

    def solve(a: Array, b: Array) -> tuple[Array]:
        half = np.tril(a) if options["uplo"] == "L" else np.triu(a)
        if options["diag"] == "U":
            half = half - np.diag(np.diag(half)) + np.eye(len(half))
        half = {"N": half, "T": half.T, "C": np.conj(half.T)}[options["trans_x"]]
        left = options["side"] == "L"
        return (np.linalg.solve(half, b) if left else np.linalg.solve(half.T, b.T).T,)

    return _as_stated(instruction, _each(solve, *(exact(v, dtype) for v in operands[:2])))


def _lu(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    """L and U in one matrix, the row exchanged with each row (from 1), and the first zero pivot (from 1)."""

    def factor(a: Array) -> tuple[Array, Array, Array]:
        lu, info = a.copy(), 0
        pivots = np.zeros(min(a.shape), np.int64)
        for k in range(min(a.shape)):
            best = k + int(np.argmax(np.abs(lu[k:, k])))
            pivots[k] = best + 1
            lu[[k, best]] = lu[[best, k]]
            if lu[k, k] == 0:
                info = info or k + 1
                continue
            lu[k + 1 :, k] /= lu[k, k]
            lu[k + 1 :, k + 1 :] -= np.outer(lu[k + 1 :, k], lu[k, k + 1 :])
        return lu, pivots, np.asarray(info)

    return _as_stated(instruction, _each(factor, exact(operands[0], instruction.operands[0].shape.dtype)))


def _qr(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    """R above Householder's vectors, and their factors."""

    def factor(a: Array) -> tuple[Array, Array]:
        packed, factors = np.linalg.qr(a, mode="raw")
        return packed.T, factors

    return _as_stated(instruction, _each(factor, exact(operands[0], instruction.operands[0].shape.dtype)))


def _orthogonal(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    """The first columns of the product of Householder's reflections."""
    packed, factors = (exact(v, instruction.operands[0].shape.dtype) for v in operands)
    rows, columns = packed.shape[-2:]

    def build(stack: Array, taus: Array) -> Array:
        made = np.eye(rows, columns, dtype=stack.dtype)
        for k in reversed(range(len(taus))):
            vector = np.concatenate([np.zeros(k), [1], stack[k + 1 :, k]])
            made = made - taus[k] * np.outer(vector, np.conj(vector) @ made)
        return made

    flat = packed.reshape(-1, rows, columns)
    parts = [build(a, t) for a, t in zip(flat, factors.reshape(len(flat), -1))]
    return _as_stated(instruction, [np.stack(parts)])


def _eigen(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    """Eigenvectors, eigenvalues in rising order, and whether it failed."""
    half = options_of(instruction).get("uplo", "L")

    def solve(a: Array) -> tuple[Array, Array, Array]:
        values, vectors = np.linalg.eigh(a, "L" if half == "L" else "U")
        return vectors, values, np.asarray(0)

    return _as_stated(instruction, _each(solve, exact(operands[0], instruction.operands[0].shape.dtype)))


def _svd(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    """The overwritten operand, singular values, left and right vectors, and whether it failed."""
    full = options_of(instruction).get("mode", "A") == "A"

    def solve(a: Array) -> tuple[Array, Array, Array, Array, Array]:
        left, values, right = np.linalg.svd(a, full_matrices=full)
        return a, values, left, right, np.asarray(0)

    return _as_stated(instruction, _each(solve, exact(operands[0], instruction.operands[0].shape.dtype)))


_FUNCTIONS: dict[str, tuple[str, Rule]] = {
    "potrf": ("sdcz", _cholesky),
    "trsm": ("sdcz", _triangular_solve),
    "getrf": ("sdcz", _lu),
    "geqrf": ("sdcz", _qr),
    "orgqr": ("sd", _orthogonal),
    "ungqr": ("cz", _orthogonal),
    "syevd": ("sd", _eigen),
    "heevd": ("cz", _eigen),
    "gesdd": ("sdcz", _svd),
}

TARGETS: dict[str, Rule] = {
    f"lapack_{letter}{name}_ffi": rule for name, (letters, rule) in _FUNCTIONS.items() for letter in letters
}
