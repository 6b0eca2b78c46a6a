"""Matrix products as descriptors of the library's, and as kernels where it has none for their strides.

A descriptor has what cuBLASLt needs: sizes, element types, and for each matrix its pitch, whether it is
stored transposed, and its distance from one batch index to the next.  The library adds two arrays to the sums
before it rounds them: another matrix, as a residual, and a vector to each row, as a bias.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from mpmd.compile.backends.native_gpu.triton import products as triton_products
from mpmd.compile.kernels.index import Index, constant, dim, linear, strides_of
from mpmd.compile.kernels.kernel_plan import Apply, KernelPlan, Load, Node
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.kernels.product_plans import MatmulPlan, View

LIBRARY_DTYPES = {"f16": ("f16", "f32"), "bf16": ("bf16", "f32"), "f32": ("f32",), "f64": ("f64",)}
"""Types of factors → types of results."""
_NARROW = ("bf16", "f16")
_MAX_CALLS = 64
"""Calls of the library for one product, where one stride does not describe its batch."""


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix in memory, or one per batch index.

    Attributes:
        dtype: of its elements.
        pitch: elements from one stored row to the next.
        transposed: its columns are contiguous, not its rows.
        stride: elements from one batch index to the next.
    """

    dtype: str
    pitch: int
    transposed: bool
    stride: int

    def __str__(self) -> str:
        return f"{self.dtype}[{self.stride}:{self.pitch}]{'ᵀ' if self.transposed else ''}"


@dataclass(frozen=True)
class ProductDescriptor:
    """d[b, m, n] = sum over k of a[b, m, k] · b[b, k, n].

    Attributes:
        batch, m, n, k: sizes.
        a, b, d: the matrices.
        sums: the type in which products are added; `tf32` multiplies factors of f32 rounded to 11 digits.
        adds: a matrix that is stored as d is added, of d's type.
        shifts: a vector of n elements of d's type is added to each row.
    """

    batch: int
    m: int
    n: int
    k: int
    a: StoredMatrix
    b: StoredMatrix
    d: StoredMatrix
    sums: str
    adds: bool = False
    shifts: bool = False

    def __str__(self) -> str:
        added = " + matrix" * self.adds + " + vector" * self.shifts
        return (
            f"{self.batch}x{self.m}x{self.n}x{self.k} {self.a} · {self.b}{added} -> {self.d} in {self.sums}"
        )


@dataclass(frozen=True)
class ProductCall:
    """A call of the library: a descriptor, and where its matrices begin, in elements."""

    descriptor: ProductDescriptor
    a: int
    b: int
    d: int


class StoredSums(NamedTuple):
    """A result that is the sums of a product, or those and arrays that the library adds.

    Attributes:
        operand: of the epilogue: the result.
        view: of it.
        added: the operand of a matrix that is added, or -1; its elements are where the result's are.
        shift: the operand of a vector that is added to each row, or -1.
    """

    operand: int
    view: View
    added: int = -1
    shift: int = -1


def library_calls(
    plan: MatmulPlan,
    result: View,
    without: Collection[ProductDescriptor] = (),
    *,
    adds: bool = False,
    shifts: bool = False,
) -> tuple[ProductCall, ...]:
    """The calls that compute a product; none if the library has none for its types or strides.

    Args:
        plan: the product; its epilogue and its own result are left out.
        result: where the sums go.
        without: products for which the library of a machine has no algorithm.
        adds: see `ProductDescriptor`; with it there is one matrix, and its rows are contiguous.
        shifts: likewise.
    """
    if plan.a.dtype != plan.b.dtype or result.dtype not in LIBRARY_DTYPES.get(plan.a.dtype, ()):
        return ()
    if not plan.m * plan.n * plan.k * math.prod(plan.batch):
        return ()
    single, many = _batch(plan, result)
    sums = {"f64": "f64", "f32": "f32" if plan.exact else "tf32"}.get(plan.a.dtype, "f32")
    matrices = [
        _matrix(plan.a, plan.m, plan.k, single),
        _matrix(plan.b, plan.k, plan.n, single),
        _matrix(result, plan.m, plan.n, single),
    ]
    a, b, d = matrices
    if a is None or b is None or d is None or math.prod(plan.batch[i] for i in many) > _MAX_CALLS:
        return ()
    count = math.prod(plan.batch[i] for i in range(len(plan.batch)) if i not in many)
    descriptor = ProductDescriptor(count, plan.m, plan.n, plan.k, a, b, d, sums, adds, shifts)
    if descriptor in without or ((adds or shifts) and (d.transposed or math.prod(plan.batch) > 1)):
        return ()
    calls = []
    for index in itertools.product(*(range(plan.batch[i]) for i in many)):
        a_at, b_at, d_at = (
            view.offset + sum(view.batch[i] * at for i, at in zip(many, index))
            for view in (plan.a, plan.b, result)
        )
        calls.append(ProductCall(descriptor, a_at, b_at, d_at))
    return tuple(calls)


def _batch(plan: MatmulPlan, result: View) -> tuple[int, tuple[int, ...]]:
    """The batch dim that a call strides over, or -1; and the dims that need calls of their own."""
    dims = [i for i, extent in enumerate(plan.batch) if extent > 1]
    views = (plan.a, plan.b, result)
    if not dims:
        return -1, ()
    last = dims[-1]
    pairs = [(v.batch[i], v.batch[j] * plan.batch[j]) for v in views for i, j in itertools.pairwise(dims)]
    if all(outer == inner for outer, inner in pairs):
        return last, ()
    largest = max(dims, key=lambda i: plan.batch[i])
    return largest, tuple(i for i in dims if i != largest)


def _matrix(view: View, rows: int, columns: int, batch: int) -> StoredMatrix | None:
    stride = view.batch[batch] if batch >= 0 else 0
    if (view.column == 1 or columns == 1) and (view.row >= columns or rows == 1):
        return StoredMatrix(view.dtype, max(view.row, columns) if rows > 1 else columns, False, stride)
    if (view.row == 1 or rows == 1) and (view.column >= rows or columns == 1):
        return StoredMatrix(view.dtype, max(view.column, rows) if columns > 1 else rows, True, stride)
    return None


def dense_sums(plan: MatmulPlan) -> View:
    """The sums of a product as a dense array, for its epilogue."""
    assert plan.epilogue is not None
    strides = strides_of((*plan.batch, plan.m, plan.n))
    return View(plan.epilogue.operands[plan.sums].dtype, 0, strides[-2], strides[-1], strides[:-2])


def stored_sums(plan: MatmulPlan, without: Collection[ProductDescriptor] = ()) -> StoredSums | None:
    """A result that is the sums themselves, or the sums as the library adds to them and converts them.

    None if the epilogue computes something else.
    """
    epilogue = plan.epilogue
    if epilogue is None:
        return StoredSums(0, plan.c)
    if len(epilogue.stores) != 1 or epilogue.extents != (*plan.batch, plan.m, plan.n):
        return None
    (store,), rank = epilogue.stores, epilogue.rank
    index, dtype = store.index, epilogue.operands[store.operand].dtype
    if store.combine or store.where >= 0 or any(atom.kind != "dim" for atom, _ in index.terms):
        return None
    if plan.a.dtype not in _NARROW and dtype not in LIBRARY_DTYPES.get(plan.a.dtype, ()):
        return None
    dense = linear([dim(d) for d in range(rank)], strides_of(epilogue.extents))
    sums = Load(epilogue.operands[plan.sums].dtype, plan.sums, dense)
    terms = _terms(epilogue, store.node, (sums.dtype, dtype))
    others = [term for term in terms if isinstance(term, Load) and term != sums]
    added = [term.operand for term in others if term == Load(dtype, term.operand, index)]
    shift = [term.operand for term in others if term == Load(dtype, term.operand, dim(rank - 1))]
    counts = (terms.count(sums), len(added), len(shift))
    if not counts[0] or max(counts) > 1 or sum(counts) != len(terms):
        return None
    factors = [index.factor(d) for d in range(rank)]
    view = View(dtype, index.constant, factors[-2], factors[-1], tuple(factors[:-2]))
    if others and dtype != plan.a.dtype:
        return None
    adds, shifts = bool(added), bool(shift)
    if others and not library_calls(plan, view, without, adds=adds, shifts=shifts):
        return None
    return StoredSums(store.operand, view, *(added or [-1]), *(shift or [-1]))


def _terms(epilogue: KernelPlan, number: int, dtypes: Collection[str]) -> list[Node]:
    """The values whose sum a value is; it may be rounded to some types on the way."""
    node = epilogue.nodes[number]
    if isinstance(node, Apply) and node.op == "convert" and node.dtype in dtypes:
        return _terms(epilogue, node.args[0], dtypes)
    if isinstance(node, Apply) and node.op == "add":
        return [term for a in node.args for term in _terms(epilogue, a, dtypes)]
    return [node]


def in_one_kernel(plan: MatmulPlan, without: Collection[ProductDescriptor] = ()) -> bool:
    """Whether a product and its epilogue are one kernel of ours, not a call of the library.

    A call takes a product whose epilogue at most adds a matrix and a vector, and converts.  Products of f32
    with another epilogue are a call and a kernel: without tensor cores the library's code is far better than
    Triton's.
    """
    stored = stored_sums(plan, without)
    if stored is not None and (stored.added >= 0 or stored.shift >= 0):
        return False
    calls = library_calls(plan, dense_sums(plan) if stored is None else stored.view, without)
    narrow = plan.a.dtype in _NARROW and plan.b.dtype in _NARROW
    if triton_products.refusal(plan):
        return False
    if not calls or not narrow:
        return not calls
    return stored is None or len(calls) > 1


def as_row_sums(plan: MatmulPlan, result: View) -> KernelPlan:
    """A product as a kernel: a row of k products for each element; its operands are a, b and the result."""
    batch = len(plan.batch)
    build = PlanBuilder(plan.name, (*plan.batch, plan.m, plan.n, plan.k), row_dims=1)
    m, n, k = batch, batch + 1, batch + 2
    wide = "f64" if plan.a.dtype == "f64" else "f32"
    factors = []
    for view, dims in ((plan.a, (m, k)), (plan.b, (k, n))):
        place, size = _place(view, plan, dims)
        factors.append(build.convert(build.load(build.operand("", view.dtype, size), place), wide))
    total = build.reduce_row("add", build.apply("multiply", *factors))
    place, size = _place(result, plan, (m, n))
    build.store(build.operand("", result.dtype, size), place, build.convert(total, result.dtype))
    return build.finish()


def _place(view: View, plan: MatmulPlan, dims: tuple[int, int]) -> tuple[Index, int]:
    """The position of an element over the dims of rows and columns, and the elements up to the last."""
    steps = [*enumerate(view.batch), (dims[0], view.row), (dims[1], view.column)]
    index = constant(view.offset)
    for number, step in steps:
        index = index + dim(number) * step
    return index, index.bounds((*plan.batch, plan.m, plan.n, plan.k))[1] + 1
