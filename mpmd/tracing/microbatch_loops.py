"""Loops over microbatches: traced once, whatever their number of iterations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mpmd.errors import SignatureError
from mpmd.jax_compat import explicit_sharding, is_key, struct_of
from mpmd.tracing.loss_checks import check_differentiable, loss_beside, warn_of_loss
from mpmd.tracing.names import MICROBATCHES, carrier
from mpmd.tracing.stages.staged import staged

P = ParamSpec("P")


T = TypeVar("T")

_MAX_REPORTED = 8
"""How many leaves that cannot be split are named in an error."""


def fori_loop(num_iterations: int, body: Callable[[jax.Array, T], T], init: T) -> T:
    """`body(i, x)` applied `num_iterations` times, as `jax.lax.fori_loop`, with names allowed inside.

    Under `mpmd.jit` each iteration is one microbatch.

    Raises:
        SignatureError: `num_iterations` is not a whole number, or negative.
    """
    if not _is_count(num_iterations) or num_iterations < 0:
        raise SignatureError(f"num_iterations must be a whole number from 0, got {num_iterations!r}")
    work = one_microbatch(body)

    def step(carry: Any, i: jax.Array) -> tuple[Any, None]:
        return work(i, carry), None

    final, _ = jax.lax.scan(step, init, jnp.arange(num_iterations, dtype=jnp.int32))
    return final


def microbatch_loop(
    body: Callable[..., tuple[T, Any]], init: T, *batches: Any, num_microbatches: int, axis: int = 0
) -> tuple[T, Any]:
    """Runs `body(carry, *microbatches) -> (carry, out)` over the microbatches of a batch, in order.

    The general loop beneath `accumulate_gradients`: reductions go through the carry, results for each
    microbatch through `out`.

    Args:
        body: work on one microbatch.
        init: the first carry, a pytree of arrays.
        *batches: pytrees of arrays, whose dim `axis` is split into `num_microbatches` equal pieces.
        num_microbatches: how many pieces.
        axis: the batch dim.

    Returns:
        The last carry, and the `out`s stacked along a new first dim of size `num_microbatches`.

    Raises:
        SignatureError: a dim is not divisible, or leaves have different lengths; names them by their paths.
    """
    _check_split(num_microbatches, axis)
    pieces = _pieces([("batch", batches)], num_microbatches, axis, False)[0]
    work = one_microbatch(body)

    def step(carry: Any, microbatch: Any) -> tuple[Any, Any]:
        return work(carry, *microbatch)

    return jax.lax.scan(step, init, pieces)


def one_microbatch(body: Callable[..., Any]) -> Callable[..., Any]:
    """`body` as a call that remains one through lowering; JAX 0.11 inlines the bodies of scans."""
    return carrier(body, "callee", "microbatch")


def split_microbatches(batches: T, num_microbatches: int, axis: int = 0, *, strided: bool = False) -> T:
    """The leaves with dim `axis` of size `m * n` reshaped so that a first dim counts the `m` microbatches.

    Microbatch `k` has the rows from `k * n` to `k * n + n - 1`; with `strided`, the rows `k`, `k + m`,
    `k + 2 m` and so on.

    Raises:
        SignatureError: `num_microbatches` is not positive, or a leaf cannot be split so.
    """
    _check_split(num_microbatches, axis)
    return _split([("batch", batches)], num_microbatches, axis, strided)[0]


def _pieces(batches: Sequence[tuple[str, Any]], num_microbatches: int, axis: int, strided: bool) -> list[Any]:
    """`_split` for a loop over the microbatches.

    Raises:
        SignatureError: as `_split`, and if there are no arrays.
    """
    pieces = _split(batches, num_microbatches, axis, strided)
    if not jax.tree.leaves(pieces):
        raise SignatureError(
            f"there is no batch to split into {num_microbatches} microbatches\n  pass its arrays as "
            "arguments: an array that the function closes over is whole in every microbatch\n  "
            "mpmd.fori_loop runs a body without a batch"
        )
    return pieces


def _split(batches: Sequence[tuple[str, Any]], num_microbatches: int, axis: int, strided: bool) -> list[Any]:
    """`split_microbatches` of each of several batches, each with its name for the user.

    Raises:
        SignatureError: leaves that cannot be split, all of them; or leaves of different lengths.
    """
    problems: list[str] = []
    advice: dict[str, None] = {}
    lengths: dict[int, str] = {}
    for name, batch in batches:
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            where = f"{name}{jax.tree_util.keystr(path)}"
            try:
                kind = jax.typeof(leaf)
            except TypeError:
                problems.append(f"{where} is {leaf!r}, which is not an array")
                advice["let the function close over other arguments"] = None
                continue
            said = str(kind).removeprefix("~")
            fits = kind.ndim > axis and kind.shape[axis] % num_microbatches == 0
            if not fits and (is_key(kind.dtype) or (kind.shape, kind.dtype) == ((2,), np.uint32)):
                problems.append(f"{where} is {said}: one random key")
                advice[f"give a key for each microbatch: jax.random.split({where}, {num_microbatches})"] = (
                    None
                )
            elif kind.ndim <= axis:
                problems.append(f"{where} is {said}: it has no dim {axis}")
                advice["let the function close over other arguments"] = None
            elif not fits:
                problems.append(f"{where} is {said}: dim {axis} has {kind.shape[axis]} rows")
                advice["use a batch size that is a multiple of num_microbatches"] = None
            elif kind.shape[axis] != num_microbatches:  # which is one row for each, such as a random key
                lengths.setdefault(
                    kind.shape[axis], f"{where} is {said}: dim {axis} has {kind.shape[axis]} rows"
                )
    if problems:
        more = [f"and {len(problems) - _MAX_REPORTED} more"] if len(problems) > _MAX_REPORTED else []
        raise SignatureError(
            f"a batch cannot be split into {num_microbatches} equal microbatches:\n  "
            + "\n  ".join([*problems[:_MAX_REPORTED], *more, *advice])
        )
    if len(lengths) > 1:
        raise SignatureError(
            "the batches of one call have different lengths:\n  "
            + "\n  ".join(list(lengths.values())[:_MAX_REPORTED])
            + "\n  all arrays are split into the same microbatches: they need as many rows, or one for each"
            f" of the {num_microbatches} microbatches; let the function close over other arguments"
        )

    def split(leaf: jax.Array) -> jax.Array:
        shape = jnp.shape(leaf)
        rows = shape[axis] // num_microbatches
        if strided:
            apart = _with_new_dim(leaf, (*shape[:axis], rows, num_microbatches, *shape[axis + 1 :]), axis + 1)
            return jnp.moveaxis(apart, axis + 1, 0)
        inner = (*shape[:axis], num_microbatches, rows, *shape[axis + 1 :])
        named = carrier(lambda x: _with_new_dim(x, inner, axis), MICROBATCHES, str(axis))
        return jnp.moveaxis(named(leaf), axis, 0)

    return [jax.tree.map(split, batch) for _, batch in batches]


def _with_new_dim(x: jax.Array, shape: Sequence[int], new: int) -> jax.Array:
    """`x` reshaped so that a dim is split in two, of which `new` is split over no device."""
    sharding = explicit_sharding(jax.typeof(x))
    if sharding is None:
        return jnp.reshape(x, shape)
    dims = [*sharding.spec.partitions, *[None] * (jnp.ndim(x) - len(sharding.spec))]
    return jax.lax.reshape(x, shape, out_sharding=PartitionSpec(*dims[:new], None, *dims[new:]))


def _zeros_of(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of a shape, a dtype and an explicit sharding."""
    zeros, sharding = jnp.zeros(struct.shape, struct.dtype), explicit_sharding(struct)
    return zeros if sharding is None else jax.reshard(zeros, sharding.spec)


def _is_count(number: Any) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def _check_split(num_microbatches: Any, axis: Any) -> None:
    if not _is_count(num_microbatches) or num_microbatches < 1:
        raise SignatureError(f"num_microbatches must be at least 1, a whole number, got {num_microbatches!r}")
    if not _is_count(axis) or axis < 0:
        raise SignatureError(f"axis must be the number of a dim, from 0, got {axis!r}")


def accumulate_gradients(
    loss_fn: Callable[P, Any],
    num_microbatches: int,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis: int = 0,
    strided: bool = False,
    weighted: bool = False,
) -> Callable[P, Any]:
    """Mean loss and mean gradients over microbatches: `jax.value_and_grad(loss_fn)` in pieces.

    `accumulate_gradients(f, M)(params, *batch, **more)` splits every array of the arguments that are not
    differentiated, keywords included, into `M` microbatches, adds up loss and gradients in the order of the
    microbatches, and divides by `M`, or by the sum of their weights with `weighted`.  Under `mpmd.jit` each
    gradient is accumulated on the mesh that computes it.  In flax's collection `_overwrite_with_gradient`, of
    fp8, it returns maxima, as one microbatch of all rows would.

    Args:
        loss_fn: `loss_fn(params, *microbatch, **more) -> f32[]`, or `(f32[], aux)` with `has_aux`.
        num_microbatches: `M`.
        argnums: the arguments to differentiate by, from the end if negative; all others are batches.
        has_aux: whether `loss_fn` also returns something for each microbatch.
        axis: the batch dim.
        strided: microbatch `k` has every `M`-th row of the batch, from row `k`.  Rows that are split over
            the devices of a mesh then stay where they are; otherwise they are exchanged once a step, as the
            `k`-th piece of a batch lies on one part of the devices.
        weighted: `loss_fn` returns `(total, weight)` instead of a loss, such as a sum over tokens and how
            many tokens count.  Totals and their gradients are added up, and divided once by the sum of all
            weights, as for the whole batch.  A weight is a constant for the gradient.

    Returns:
        A function that returns `(loss, grads)`, or `((loss, aux), grads)` where every leaf of `aux` has a
        new first dim of size `M`.

    Raises:
        SignatureError: `loss_fn` is not a function, `num_microbatches` or `argnums` are out of range; when
            called with a batch that is not divisible, batches of different lengths, without an argument
            to differentiate by or with one that has no gradient; or `loss_fn` does not return a scalar.
    """
    if not callable(loss_fn):
        raise SignatureError(f"accumulate_gradients takes a function, got {loss_fn!r}")
    _check_split(num_microbatches, axis)
    given = _positions(argnums)
    value_and_grad = jax.value_and_grad(
        loss_beside(staged(loss_fn, argnums=given), has_aux, weighted),
        argnums=given[0] if _is_count(argnums) else given,
        has_aux=True,
    )

    def loss_and_grads(*args: Any, **more: Any) -> Any:
        wanted = _wanted(given, len(args))
        check_differentiable({_parameter(loss_fn, i): args[i] for i in sorted(wanted)})
        own = [(_parameter(loss_fn, i), arg) for i, arg in enumerate(args) if i not in wanted]

        def of_microbatch(microbatch: Sequence[Any]) -> Any:
            rest = iter(microbatch)
            full = [arg if i in wanted else next(rest) for i, arg in enumerate(args)]
            return value_and_grad(*full, **dict(zip(more, rest, strict=True)))

        pieces = _pieces([*own, *more.items()], num_microbatches, axis, strided)
        one = jax.tree.map(_one, pieces)
        traced = jax.jit(of_microbatch).trace(one)
        if num_microbatches > 1:
            warn_of_loss(loss_fn, traced.jaxpr.jaxpr, of_microbatch, one, axis, num_microbatches, weighted)
        (loss, weight, grads), aux = _summed(of_microbatch, traced.out_info, pieces)
        loss, grads = _divided((loss, grads), weight if weighted else num_microbatches)
        return ((loss, aux), grads) if has_aux else (loss, grads)

    return loss_and_grads


def _summed(of_microbatch: Callable[[Any], Any], shapes: Any, pieces: Any) -> tuple[Any, Any]:
    """Sums of losses, weights and gradients over microbatches; each `aux`.

    Args:
        of_microbatch: results in `(loss, (weight, aux)), grads`.
        shapes: of these results.
        pieces: of the batches, with a first dim for the microbatches.
    """

    def body(carry: Any, microbatch: Any) -> tuple[Any, Any]:
        (loss, (weight, aux)), grads = of_microbatch(microbatch)
        return _accumulated(carry, (loss, weight, grads)), aux

    (loss, (weight, _)), grads = shapes
    zeros = jax.tree.map(_zeros_of, (loss, weight, grads))
    return jax.lax.scan(one_microbatch(body), zeros, pieces)


_OVERWRITE = "_overwrite_with_gradient"
"""The collection of flax whose gradients are new values: scales and histories of maxima of fp8."""


def _is_overwritten(path: Sequence[Any]) -> bool:
    return any(getattr(entry, "key", None) == _OVERWRITE for entry in path)


def _accumulated(carry: Any, terms: Any) -> Any:
    """Sums; maxima of what gradients overwrite."""
    return jax.tree_util.tree_map_with_path(
        lambda path, a, b: jnp.maximum(a, b) if _is_overwritten(path) else jnp.add(a, b), carry, terms
    )


def _divided(totals: T, by: Any) -> T:
    """Totals divided by a number or a scalar, in their own dtypes; not what gradients overwrite."""
    return jax.tree_util.tree_map_with_path(
        lambda path, total: total if _is_overwritten(path) else (total / by).astype(total.dtype), totals
    )


def _positions(argnums: Any) -> tuple[int, ...]:
    """One position or several as several.

    Raises:
        SignatureError: they are not positions.
    """
    several = tuple(argnums) if isinstance(argnums, (list, tuple)) else (argnums,)
    if not all(map(_is_count, several)):
        raise SignatureError(f"argnums is {argnums!r}; it must be the position of an argument, or several")
    return tuple(map(int, several))


def _wanted(argnums: tuple[int, ...], count: int) -> set[int]:
    """The positions of `count` arguments to differentiate by.

    Raises:
        SignatureError: there are not so many, or one is named twice.
    """
    if not all(-count <= i < count for i in argnums):
        raise SignatureError(
            f"accumulate_gradients differentiates by the arguments {list(argnums)}, but got {count}\n"
            "  argnums are numbers of its arguments, from 0, or from the end, from -1"
        )
    wanted = {i % count for i in argnums}
    if len(wanted) < len(argnums):
        raise SignatureError(f"argnums is {argnums}, which names one of {count} arguments twice")
    return wanted


def _parameter(fn: Callable[..., Any], number: int) -> str:
    """The function's name of its positional argument of that number."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())[: number + 1]
    except (TypeError, ValueError):
        return f"argument {number}"
    single = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = len(parameters) > number and all(p.kind in single for p in parameters)
    return parameters[number].name if named else f"argument {number}"


def _one(stacked: Any) -> jax.ShapeDtypeStruct:
    whole = struct_of(jax.typeof(stacked))
    sharding = whole.sharding
    if sharding is not None:
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec.partitions[1:]))
    return whole.update(shape=whole.shape[1:], weak_type=False, sharding=sharding)
