"""Loops over microbatches: traced once, whatever their number of iterations.

Loss functions are checked first, since JAX's error for any result but a scalar speaks of gradients.
"""

from __future__ import annotations

import inspect
import reprlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mpmd.errors import SignatureError
from mpmd.jax_compat import explicit_sharding, struct_of
from mpmd.support.other_libraries import trainable_apart
from mpmd.support.user_code import warn_user
from mpmd.tracing.names import MICROBATCHES, carrier
from mpmd.tracing.repeated_draws import RepeatedDraw, repeated_draws
from mpmd.tracing.stages.staged import dividing, staged
from mpmd.tracing.stateful_modules import returning_what_it_changes
from mpmd.tracing.uneven_means import own_divisor

P = ParamSpec("P")


def scalar_loss(loss_fn: Callable[P, Any], has_aux: bool) -> Callable[P, Any]:
    """The loss function, checked to return a scalar, or a scalar and something else.

    Raises:
        SignatureError: when called, and it does not.
    """

    def checked(*args: P.args, **more: P.kwargs) -> Any:
        result = loss_fn(*args, **more)
        if has_aux and not _is_pair(result):
            raise SignatureError(
                f"with has_aux, the loss function must return (loss, aux), got {_shapes(result)}"
            )
        loss = result[0] if has_aux else result
        if _is_scalar(loss):
            return result
        hint = ""
        if _is_pair(result) and not has_aux and _is_scalar(result[0]):
            hint = (
                "\n  pass the loss function itself, not jax.value_and_grad of it; if it returns (loss, aux), "
                "give has_aux=True; if (total, weight), weighted=True"
            )
        raise SignatureError(
            f"the loss function of accumulate_gradients must return a scalar, got {_shapes(loss)}{hint}"
        )

    return checked


def loss_beside(loss_fn: Callable[P, Any], has_aux: bool, weighted: bool) -> Callable[P, Any]:
    """The loss function as `(loss, (weight, aux))`, checked; without `weighted` or `has_aux` they are None.

    Raises:
        SignatureError: when called, and it returns something else.
    """
    scalar = scalar_loss(loss_fn, has_aux)

    def beside(*args: P.args, **more: P.kwargs) -> Any:
        if not weighted:
            loss, aux = scalar(*args, **more) if has_aux else (scalar(*args, **more), None)
            return loss, (None, aux)
        result = loss_fn(*args, **more)
        form = "((total, weight), aux)" if has_aux else "(total, weight)"
        pair, aux = result if has_aux and _is_pair(result) else (result, None)
        if not (_is_pair(pair) and all(map(_is_scalar, pair)) and (not has_aux or _is_pair(result))):
            raise SignatureError(
                f"with weighted, the loss function must return {form}, total and weight scalars, "
                f"got {_shapes(result)}"
            )
        counts = jnp.issubdtype(jnp.result_type(pair[1]), jnp.bool_)
        return pair[0], (jnp.asarray(pair[1], jnp.int32) if counts else pair[1], aux)

    return beside


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _is_scalar(value: Any) -> bool:
    return jax.tree.structure(value) == jax.tree.structure(0) and np.shape(value) == ()


def _shapes(values: Any) -> str:
    """A pytree with the type and shape of each leaf."""

    def kind(leaf: Any) -> str:
        return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(np.shape(leaf))}"

    return str(jax.tree.map(kind, values)).replace("'", "")


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
    pieces = split_microbatches(batches, num_microbatches, axis)
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
            if kind.ndim <= axis:
                problems.append(f"{where} is {said}: it has no dim {axis}")
                advice["let the function close over other arguments"] = None
            elif kind.shape[axis] % num_microbatches:
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
            called with a batch that is not divisible, batches of different lengths, without one of the
            arguments to differentiate by, or with a leaf in them that has no gradient; or `loss_fn` does
            not return a scalar.
    """
    if not callable(loss_fn):
        raise SignatureError(f"accumulate_gradients takes a function, got {loss_fn!r}")
    _check_split(num_microbatches, axis)
    given = _positions(argnums)
    value_and_grad = jax.value_and_grad(
        loss_beside(returning_what_it_changes(staged(loss_fn, argnums=given)), has_aux, weighted),
        argnums=given[0] if _is_count(argnums) else given,
        has_aux=True,
    )

    def loss_and_grads(*args: Any, **more: Any) -> Any:
        wanted = _wanted(given, len(args))
        _check_differentiable({_parameter(loss_fn, i): args[i] for i in sorted(wanted)})
        numbers = [i for i in range(len(args)) if i not in wanted]
        batches = [*((_parameter(loss_fn, i), args[i]) for i in numbers), *more.items()]

        def of_microbatch(microbatch: Sequence[Any]) -> Any:
            full, rest = list(args), iter(microbatch)
            for i in numbers:
                full[i] = next(rest)
            return value_and_grad(*full, **dict(zip(more, rest, strict=True)))

        pieces = _split(batches, num_microbatches, axis, strided)
        traced = jax.jit(of_microbatch).trace(jax.tree.map(_one, pieces))
        if num_microbatches > 1 and not weighted:
            _warn_of_own_divisor(loss_fn, traced.jaxpr.jaxpr, pieces)
        if num_microbatches > 1:
            _warn_of_repeated_draws(loss_fn, traced.jaxpr.jaxpr, of_microbatch, pieces, axis)
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


def _warn_of_own_divisor(loss_fn: Callable[..., Any], jaxpr: Any, pieces: Any) -> None:
    place = own_divisor(jaxpr, len(jax.tree.leaves(pieces)))
    if place is None:
        return
    name = getattr(loss_fn, "__name__", "the loss")
    warn_user(
        [
            f"{name} divides by a sum over the rows of its own microbatch, at {place}\n  the mean over "
            "microbatches is not the mean of the whole batch, unless that sum is the same in each\n  return "
            "(total, weight) instead of total / weight, and give weighted=True"
        ]
    )


def _warn_of_repeated_draws(
    loss_fn: Callable[..., Any], jaxpr: Any, of_microbatch: Callable[[Any], Any], pieces: Any, axis: int
) -> None:
    """Warns of random numbers for rows that are equal in all microbatches.

    Numbers are for rows if there are more of them for twice as many rows: only a step that draws from such a
    key is traced for these.
    """
    flat = jax.tree.leaves(pieces)
    if not repeated_draws(jaxpr, len(flat)):
        return
    rows = max(piece.shape[axis + 1] for piece in flat)

    def draws(factor: int) -> list[RepeatedDraw]:
        def wider(piece: Any) -> jax.ShapeDtypeStruct:
            one = _one(piece)
            there = factor * rows if one.shape[axis] == rows else one.shape[axis]
            return one.update(shape=(*one.shape[:axis], there, *one.shape[axis + 1 :]))

        with dividing(None):  # operations in stages have no place in the loss
            traced = jax.jit(of_microbatch).trace(jax.tree.map(wider, pieces))
        return repeated_draws(traced.jaxpr.jaxpr, len(flat))

    try:
        pairs = list(zip(draws(1), draws(2)))
    except Exception:  # a loss for this number of rows only: which numbers are for rows is not known
        return
    place = next((one.place for one, twice in pairs if one.shape != twice.shape), None)
    if place is None:
        return
    name = getattr(loss_fn, "__name__", "the loss") + " draws random numbers for its rows"
    nnx = "; nnx.reseed(model, dropout=keys[0]) gives it to modules" if "flax.nnx" in sys.modules else ""
    warn_user(
        [
            f"{name} from a key that is the same in every microbatch{place and f', at {place}'}\n"
            "  all microbatches have one mask, or one noise\n  give each a key of its own: the batch "
            f"jax.random.split(key, {flat[0].shape[0]}), of which the loss takes keys[0]{nnx}"
        ]
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


def _check_differentiable(arguments: dict[str, Any]) -> None:
    """Checks that all leaves have gradients.

    Raises:
        SignatureError: some do not; names them by their paths.
    """
    problems: list[str] = []
    advice: dict[str, None] = {}
    for name, argument in arguments.items():
        before = len(problems)
        for path, leaf in jax.tree_util.tree_leaves_with_path(argument):
            try:
                kind = str(jax.typeof(leaf)).removeprefix("~")
                if jnp.issubdtype(jax.typeof(leaf).dtype, np.inexact):
                    continue
            except TypeError:
                kind = f"{reprlib.repr(leaf)}, which is not an array"
            problems.append(f"{name}{jax.tree_util.keystr(path)} is {kind}")
        if len(problems) > before:
            advice[trainable_apart(argument, name)] = None
    if not problems:
        return
    more = [f"and {len(problems) - _MAX_REPORTED} more"] if len(problems) > _MAX_REPORTED else []
    raise SignatureError(
        f"accumulate_gradients differentiates by {', '.join(arguments)}, but these have no gradients:\n  "
        + "\n  ".join([*problems[:_MAX_REPORTED], *more, *advice])
    )


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
