"""Layers with a `jax.shard_map` over axes `e` and `d`, of two devices each.

Each takes `{"w": f32[8,8], "e": f32[2,8,8]}` and `x: f32[16,8]`, and returns an array like `x`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

AXES = {"e": 2, "d": 2}

Layer = Callable[[Any, jax.Array], jax.Array]


def _mapped(fn: Callable[..., Any], given: Any, wanted: Any, **more: Any) -> Callable[..., Any]:
    return jax.shard_map(fn, in_specs=given, out_specs=wanted, **more)


def experts(p: Any, x: jax.Array) -> jax.Array:
    """Rows go to the devices of their experts and back."""

    def local(w: jax.Array, x: jax.Array) -> jax.Array:
        sent = jax.lax.all_to_all(x.reshape(2, -1, x.shape[1]), "e", 0, 0, tiled=True)
        return jax.lax.all_to_all(jnp.tanh(sent @ w[0]), "e", 0, 0, tiled=True).reshape(x.shape)

    return _mapped(local, (P("e"), P("e")), P("e"))(p["e"], x)


def summed(p: Any, x: jax.Array) -> jax.Array:
    """A product over a split dim."""
    return _mapped(lambda a, b: jax.lax.psum(a @ b, "d"), (P(None, "d"), P("d")), P())(x, p["w"])


def shifted(p: Any, x: jax.Array) -> jax.Array:
    """Rows of the neighbour."""
    turned = lambda a: a + jax.lax.ppermute(jnp.sin(a), "d", [(0, 1), (1, 0)])  # noqa: E731
    return _mapped(turned, P("d"), P("d"))(x @ p["w"])


def gathered(p: Any, x: jax.Array) -> jax.Array:
    """A weight that is gathered where it is used."""
    whole = lambda a, b: a @ jax.lax.all_gather(b, "e", axis=0, tiled=True)  # noqa: E731
    return _mapped(whole, (P("e"), P("e")), P("e"), check_vma=False)(x, p["w"])


def scattered(p: Any, x: jax.Array) -> jax.Array:
    """Terms of a product, summed into the parts of the rows."""
    terms = lambda a, b: jax.lax.psum_scatter(a @ b, "d", scatter_dimension=0, tiled=True)  # noqa: E731
    return _mapped(terms, (P(None, "d"), P("d")), P("d"))(x, p["w"])


def ring_attention(p: Any, x: jax.Array) -> jax.Array:
    """Keys and values go round while rows of queries stay."""

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def visit(state: Any, _: None) -> tuple[Any, None]:
            k, v, most, total, mixed = state
            scores = q @ k.T
            new = jnp.maximum(most, scores.max(-1))
            weights, old = jnp.exp(scores - new[:, None]), jnp.exp(most - new)
            total, mixed = total * old + weights.sum(-1), mixed * old[:, None] + weights @ v
            k, v = (jax.lax.ppermute(part, "d", [(0, 1), (1, 0)]) for part in (k, v))
            return (k, v, new, total, mixed), None

        begin = (k, v, 0 * q[:, 0] - 1e9, 0 * q[:, 0], 0 * q)
        (_, _, _, total, mixed), _ = jax.lax.scan(visit, begin, None, length=2)
        return mixed / total[:, None]

    q = x @ p["w"]
    return _mapped(local, (P("d"), P("d"), P("d")), P("d"))(q, q / 2, x)


def in_scan(p: Any, x: jax.Array) -> jax.Array:
    """A region in the body of a loop."""
    turn = lambda c, scale: (experts({"e": p["e"] * scale}, summed(p, c)), None)  # noqa: E731
    return jax.lax.scan(turn, x, jnp.arange(1.0, 3.0))[0]


def scan_inside(p: Any, x: jax.Array) -> jax.Array:
    """A loop in a region, over an axis that is not mapped as well."""
    step = lambda b, c, _: (jnp.tanh(jax.lax.psum(c @ b, "d")), None)  # noqa: E731
    local = lambda a, b: jax.lax.scan(partial(step, b), a, None, length=2)[0]  # noqa: E731
    return _mapped(local, (P("e"), P()), P("e"), check_vma=False)(x, p["w"])


def in_cond(p: Any, x: jax.Array) -> jax.Array:
    """A region in each branch."""
    return jax.lax.cond(x.sum() > 0, partial(summed, p), partial(experts, p), x)


def cond_inside(p: Any, x: jax.Array) -> jax.Array:
    """Devices that take different branches."""

    def local(a: jax.Array, b: jax.Array) -> jax.Array:
        first = jax.lax.axis_index("d") == 0
        return jax.lax.psum(jax.lax.cond(first, lambda a: a @ b, lambda a: jnp.sin(a) @ b, a), "d")

    return _mapped(local, (P(None, "d"), P("d")), P(), check_vma=False)(x, p["w"])


def in_while(p: Any, x: jax.Array) -> jax.Array:
    """A region in a loop of unknown length, which has no gradient."""
    turn = lambda c: (c[0] + 1, jnp.tanh(summed(p, c[1])))  # noqa: E731
    return x + jax.lax.stop_gradient(jax.lax.while_loop(lambda c: c[0] < 3, turn, (0, x))[1])


def called_twice(p: Any, x: jax.Array) -> jax.Array:
    """One function with a region, called with its own result."""
    once = jax.jit(summed)
    return once(p, once(p, x))


def rematerialised(p: Any, x: jax.Array) -> jax.Array:
    """Regions that run again in the backward pass."""
    return jax.checkpoint(lambda p, x: experts(p, summed(p, x)))(p, x)


@jax.custom_vjp
def _own_gradient(p: Any, x: jax.Array) -> jax.Array:
    return summed(p, x)


_own_gradient.defvjp(
    lambda p, x: (_own_gradient(p, x), (p, x)), lambda saved, g: jax.vjp(summed, *saved)[1](2 * g)
)


def custom_gradient(p: Any, x: jax.Array) -> jax.Array:
    """A region in a rule of the user's, forward and backward."""
    return _own_gradient(p, x)


def partly_manual(p: Any, x: jax.Array) -> jax.Array:
    """A region over one axis; Shardy splits along the other, with a constraint inside."""

    def outer(a: jax.Array, b: jax.Array) -> jax.Array:
        wide = jax.lax.with_sharding_constraint(jnp.tanh(a @ b), P(None, "d"))
        return wide @ b.T + jax.lax.psum(wide, "e")

    return _mapped(outer, (P("e"), P()), P("e"), axis_names={"e"})(x, p["w"])


def one_after_another(p: Any, x: jax.Array) -> jax.Array:
    """Two regions, each over an axis of its own."""
    centred = _mapped(lambda a: a - jax.lax.pmean(a, "e"), P("e"), P("e"), axis_names={"e"})(x @ p["w"])
    return _mapped(lambda a: a + jax.lax.pmean(a, "d"), P("d"), P("d"), axis_names={"d"})(centred)


def nested(p: Any, x: jax.Array) -> jax.Array:
    """A region within another, over another axis; JAX itself does not lower its gradient."""
    inner = _mapped(lambda a, b: jax.lax.psum(a @ b, "d"), (P(None, "d"), P("d")), P(), axis_names={"d"})
    outer = lambda a, b: inner(a, b) + jax.lax.psum(inner(a, b), "e")  # noqa: E731
    return _mapped(outer, (P("e"), P()), P("e"), axis_names={"e"})(x, p["w"])


LAYERS: dict[str, Layer] = {
    layer.__name__: layer
    for layer in (
        experts, summed, shifted, gathered, scattered, ring_attention, in_scan, scan_inside, in_cond,
        cond_inside, in_while, called_twice, rematerialised, custom_gradient, partly_manual,
        one_after_another,
    )
}  # fmt: skip
"""Those with a gradient."""
