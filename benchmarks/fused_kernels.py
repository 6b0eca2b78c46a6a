"""The fused kernels that `kernel_speed.py` measures: as plans of ours, and in JAX as a user writes them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from mpmd.compile.kernels.index import constant, dim, value
from mpmd.compile.kernels.kernel_plan import KernelPlan, Load
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.llvm.cpu import host_target


def layer_norm(rows: int, width: int, dtype: str) -> KernelPlan:
    b = PlanBuilder("layer_norm", (rows, width), row_dims=1)
    op, inverse = b.apply, b.constant(1 / width, "f32")
    x = b.convert(b.load_dense(b.operand("x", dtype, rows * width)), "f32")
    gain, shift = (b.convert(b.load_dense(b.operand(n, dtype, width), (1,)), "f32") for n in "gb")
    centred = op("subtract", x, op("multiply", b.reduce_row("add", x), inverse))
    variance = op("multiply", b.reduce_row("add", op("multiply", centred, centred)), inverse)
    scale = op("rsqrt", op("add", variance, b.constant(1e-5, "f32")))
    y = op("add", op("multiply", op("multiply", centred, scale), gain), shift)
    b.store_dense(b.operand("y", dtype, rows * width), b.convert(y, dtype))
    return b.finish()


def softmax(rows: int, width: int, dtype: str) -> KernelPlan:
    b = PlanBuilder("softmax", (rows, width), row_dims=1)
    x = b.convert(b.load_dense(b.operand("x", dtype, rows * width)), "f32")
    e = b.apply("exponential", b.apply("subtract", x, b.reduce_row("maximum", x)))
    y = b.apply("divide", e, b.reduce_row("add", e))
    b.store_dense(b.operand("y", dtype, rows * width), b.convert(y, dtype))
    return b.finish()


def gelu(size: int, dtype: str) -> KernelPlan:
    b = PlanBuilder("gelu", (size,))
    op = b.apply

    def number(value: float) -> int:
        return b.constant(value, "f32")

    x = b.convert(b.load_dense(b.operand("x", dtype, size)), "f32")
    cubic = op("add", op("multiply", op("multiply", x, x), number(0.044715)), number(1.0))
    inner = op("multiply", op("multiply", x, number(math.sqrt(2 / math.pi))), cubic)
    y = op("multiply", op("multiply", x, number(0.5)), op("add", op("tanh", inner), number(1.0)))
    b.store_dense(b.operand("y", dtype, size), b.convert(y, dtype))
    return b.finish()


def adam(size: int, dtype: str) -> KernelPlan:
    b = PlanBuilder("adam", (size,))
    op = b.apply

    def number(value: float) -> int:
        return b.constant(value, "f32")

    p, g = b.operand("p", dtype, size), b.operand("g", dtype, size)
    mu, nu = b.operand("mu", "f32", size), b.operand("nu", "f32", size)
    gradient = b.convert(b.load_dense(g), "f32")
    first = op("add", op("multiply", b.load_dense(mu), number(0.9)), op("multiply", gradient, number(0.1)))
    square = op("multiply", gradient, gradient)
    second = op("add", op("multiply", b.load_dense(nu), number(0.999)), op("multiply", square, number(0.001)))
    root = op("sqrt", op("multiply", second, number(1 / (1 - 0.999**10))))
    update = op("divide", op("multiply", first, number(1 / (1 - 0.9**10))), op("add", root, number(1e-8)))
    moved = op("subtract", b.convert(b.load_dense(p), "f32"), op("multiply", update, number(1e-3)))
    b.store_dense(mu, first)
    b.store_dense(nu, second)
    b.store_dense(p, b.convert(moved, dtype))
    return b.finish()


def column_sums(rows: int, width: int, dtype: str) -> KernelPlan:
    b = PlanBuilder("column_sums", (rows, width), row_dims=1)
    x = b.convert(b.load_dense(b.operand("x", dtype, rows * width)), "f32")
    b.store_dense(b.operand("y", dtype, width), b.convert(b.reduce_column("add", x), dtype), (1,))
    return b.finish()


def square_sum(rows: int, width: int, dtype: str) -> KernelPlan:
    b = PlanBuilder("square_sum", (rows, width), row_dims=1)
    x = b.convert(b.load_dense(b.operand("x", dtype, rows * width)), "f32")
    total = b.reduce_column("add", b.reduce_row("add", b.apply("multiply", x, x)))
    b.store(b.operand("y", "f32", 1), constant(0), total)
    return b.finish()


def transpose(rows: int, width: int, dtype: str) -> KernelPlan:
    b = PlanBuilder("transpose", (width, rows))
    x = b.load(b.operand("x", dtype, rows * width), dim(1) * width + dim(0))
    b.store_dense(b.operand("y", dtype, rows * width), x)
    return b.finish()


def residual(rows: int, width: int, dtype: str) -> KernelPlan:
    b = PlanBuilder("residual", (rows, width))
    x, y = (b.load_dense(b.operand(name, dtype, rows * width)) for name in "xy")
    b.store_dense(b.operand("z", dtype, rows * width), b.apply("add", x, y))
    return b.finish()


def norm_gradient(rows: int, width: int, dtype: str) -> KernelPlan:
    """The gradient of a normalised x, given it, its gradient and each row's inverse deviation."""
    b = PlanBuilder("norm_gradient", (rows, width), row_dims=1)
    op, inverse = b.apply, b.constant(1 / width, "f32")
    x, g = (b.convert(b.load_dense(b.operand(n, dtype, rows * width)), "f32") for n in "xg")
    scale = b.load(b.operand("s", "f32", rows), dim(0))
    mean = op("multiply", b.reduce_row("add", g), inverse)
    along = op("multiply", b.reduce_row("add", op("multiply", g, x)), inverse)
    y = op("multiply", op("subtract", op("subtract", g, mean), op("multiply", x, along)), scale)
    b.store_dense(b.operand("y", dtype, rows * width), b.convert(y, dtype))
    return b.finish()


def log_sums(rows: int, width: int, dtype: str) -> KernelPlan:
    """The first half of a cross entropy: log(sum(exp(x))) of every row."""
    b = PlanBuilder("log_sums", (rows, width), row_dims=1)
    x = b.convert(b.load_dense(b.operand("x", dtype, rows * width)), "f32")
    most = b.reduce_row("maximum", x)
    total = b.reduce_row("add", b.apply("exponential", b.apply("subtract", x, most)))
    b.store_dense(b.operand("y", "f32", rows), b.apply("add", b.apply("log", total), most), (0,))
    return b.finish()


def gather(rows: int, width: int, dtype: str) -> KernelPlan:
    b = PlanBuilder("gather", (rows, width))
    place = b.load(b.operand("places", "s32", rows), dim(0))
    x = b.load(b.operand("table", dtype, rows * width), value(place) * width + dim(1))
    b.store_dense(b.operand("y", dtype, rows * width), x)
    return b.finish()


def scatter(rows: int, width: int, dtype: str) -> KernelPlan:
    b = PlanBuilder("scatter", (rows, width))
    place = b.load(b.operand("places", "s32", rows), dim(0))
    x = b.load_dense(b.operand("x", dtype, rows * width))
    b.store(b.operand("y", dtype, rows * width), value(place) * width + dim(1), x, combine="add")
    return b.finish()


def jax_functions() -> dict[str, Callable]:
    """The same kernels as a user writes them."""
    import jax
    import jax.numpy as jnp

    f32 = jnp.float32

    def norm(x, g, b):
        wide = x.astype(f32)
        mean = wide.mean(-1, keepdims=True)
        variance = ((wide - mean) ** 2).mean(-1, keepdims=True)
        return ((wide - mean) * jax.lax.rsqrt(variance + 1e-5) * g.astype(f32) + b.astype(f32)).astype(
            x.dtype
        )

    def step(p, g, mu, nu):
        wide = g.astype(f32)
        mu, nu = 0.9 * mu + 0.1 * wide, 0.999 * nu + 0.001 * wide * wide
        update = mu / (1 - 0.9**10) / (jnp.sqrt(nu / (1 - 0.999**10)) + 1e-8)
        return (p.astype(f32) - 1e-3 * update).astype(p.dtype), mu, nu

    return {
        "layer_norm": norm,
        "softmax": lambda x: jax.nn.softmax(x.astype(f32), -1).astype(x.dtype),
        "gelu": lambda x: jax.nn.gelu(x.astype(f32)).astype(x.dtype),
        "adam": step,
        "column_sums": lambda x: x.astype(f32).sum(0).astype(x.dtype),
        "square_sum": lambda x: (x.astype(f32) ** 2).sum(),
        "transpose": lambda x: x.T + 0,
        "residual": lambda x, y: x + y,
        "norm_gradient": lambda x, g, s: (
            (g.astype(f32) - g.astype(f32).mean(-1, keepdims=True)
             - x.astype(f32) * (g.astype(f32) * x.astype(f32)).mean(-1, keepdims=True)) * s[:, None]
        ).astype(x.dtype),
        "log_sums": lambda x: jax.nn.logsumexp(x.astype(f32), -1),
        "gather": lambda places, table: table[places],
        "scatter": lambda places, x: jnp.zeros_like(x).at[places].add(x),
    }  # fmt: skip


# The shapes of GPT-2-small's fragments; their rows (or elements) grow for arrays beyond every cache.
FUSED = {
    "layer_norm": (layer_norm, (1024, 768)),
    "softmax": (softmax, (6144, 512)),
    "gelu": (gelu, (1024 * 3072,)),
    "adam": (adam, (768 * 3072,)),
    "column_sums": (column_sums, (1024, 3072)),
    "square_sum": (square_sum, (768, 4096)),
    "transpose": (transpose, (1024, 768)),
    "residual": (residual, (1024, 768)),
    "norm_gradient": (norm_gradient, (1024, 768)),
    "log_sums": (log_sums, (1024, 8192)),
    "gather": (gather, (1024, 768)),
    "scatter": (scatter, (1024, 768)),
}

BEYOND_CACHE = 4  # STREAM's rule: this many times the last cache


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that a kernel moves.

    Attributes:
        read: from memory.  What it changes it reads, too: Adam's state, and the rows that a scatter adds to.
        written: to memory.
    """

    read: int
    written: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.read + self.written

    def limit(self, copy: float, read: float) -> float:
        """The seconds that the machine needs: as much is copied as can be, and the rest is read.

        Args:
            copy: seconds of a copy that moves the total.
            read: seconds of a loop that reads the total.
        """
        alone = max(0, self.read - self.written)
        return (copy * (self.total - alone) + read * alone) / self.total


def traffic_of(plan: KernelPlan) -> Traffic:
    """What a kernel reads and writes."""
    read = {n.operand for n in plan.nodes if isinstance(n, Load)}
    read |= {s.operand for s in plan.stores if s.combine}
    return Traffic(
        sum(plan.operands[k].bytes for k in read), sum(plan.operands[k].bytes for k in plan.results)
    )


def fused_plan(name: str, dtype: str, size: str) -> tuple[KernelPlan, tuple[int, ...]]:
    """A kernel's plan and shape; `size` is `model`, `turns` or `memory`."""
    make, shape = FUSED[name]
    plan = make(*shape, dtype)
    if size == "memory":
        times = -(-BEYOND_CACHE * host_target().l3_bytes // traffic_of(plan).total)
        shape = (shape[0] * times, *shape[1:])
        plan = make(*shape, dtype)
    return plan, shape
