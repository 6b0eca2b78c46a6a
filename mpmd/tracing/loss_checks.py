"""Checks of loss functions, before JAX's errors, and of what differs between microbatches and a whole batch.

JAX's error for any result but a scalar, and for a leaf without a gradient, speaks of neither by its name.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.errors import SignatureError
from mpmd.support.user_code import warn_user
from mpmd.tracing.model_leaves import other_than_array, trainable_apart
from mpmd.tracing.repeated_draws import RepeatedDraw, repeated_draws
from mpmd.tracing.stages.staged import dividing
from mpmd.tracing.stateful_modules import returning_what_it_changes
from mpmd.tracing.uneven_means import own_divisor

log = logging.getLogger("mpmd.tracing")

P = ParamSpec("P")

_MAX_REPORTED = 8
"""How many leaves without gradients are named in an error."""


def _scalar_loss(loss_fn: Callable[P, Any], has_aux: bool) -> Callable[P, Any]:
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
    loss_fn = returning_what_it_changes(loss_fn)
    scalar = _scalar_loss(loss_fn, has_aux)

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


def check_differentiable(arguments: dict[str, Any]) -> None:
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
            except (TypeError, ValueError):
                kind = f"{other_than_array(leaf, argument)[0]}, which is not an array"
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


def warn_of_loss(
    loss_fn: Callable[..., Any],
    jaxpr: Any,
    of_microbatch: Callable[[Any], Any],
    one: Any,
    axis: int,
    count: int,
    weighted: bool,
) -> None:
    """Warns of results that differ between microbatches and a whole batch, and perhaps should not.

    Args:
        loss_fn: the user's.
        jaxpr: of one microbatch.
        of_microbatch: computes the loss and its gradients of one microbatch.
        one: shapes and dtypes of a microbatch.
        axis: its dim of rows.
        count: the number of microbatches.
        weighted: whether the loss returns its own divisor.
    """
    name, batches = getattr(loss_fn, "__name__", "the loss"), len(jax.tree.leaves(one))
    place = None if weighted else own_divisor(jaxpr, batches)
    texts = []
    if place is not None:
        texts.append(
            f"{name} divides by a sum over the rows of its own microbatch, at {place}\n  the mean over "
            "microbatches is not the mean of the whole batch, unless that sum is the same in each\n  return "
            "(total, weight) instead of total / weight, and give weighted=True"
        )
    place = _place_of_repeated_draw(jaxpr, of_microbatch, one, axis)
    if place is not None:
        reseed = "nnx.reseed(model, dropout=keys[0]), or default= for a model of nnx.Rngs(0)"
        nnx = f"; modules of nnx take it with {reseed}" if "flax.nnx" in sys.modules else ""
        texts.append(
            f"{name} draws random numbers for its rows from a key that is the same in every microbatch"
            f"{place and f', at {place}'}\n  all microbatches have one mask, or one noise\n  give each a key "
            f"of its own: the batch jax.random.split(key, {count}), and keys[0] in the loss{nnx}"
        )
    warn_user(texts)


def _place_of_repeated_draw(
    jaxpr: Any, of_microbatch: Callable[[Any], Any], one: Any, axis: int
) -> str | None:
    """Where random numbers for rows are drawn that are equal in all microbatches; None if none are.

    Numbers are for rows if there are more of them for twice as many rows: only a step that draws from such a
    key is traced for these.
    """
    flat = jax.tree.leaves(one)
    if not repeated_draws(jaxpr, len(flat)):
        return None
    rows = max(leaf.shape[axis] for leaf in flat)

    def draws(factor: int) -> list[RepeatedDraw]:
        def wider(leaf: Any) -> jax.ShapeDtypeStruct:
            there = factor * rows if leaf.shape[axis] == rows else leaf.shape[axis]
            return leaf.update(shape=(*leaf.shape[:axis], there, *leaf.shape[axis + 1 :]))

        with dividing(None):  # operations in stages have no place in the loss
            traced = jax.jit(of_microbatch).trace(jax.tree.map(wider, one))
        return repeated_draws(traced.jaxpr.jaxpr, len(flat))

    try:
        pairs = list(zip(draws(1), draws(2)))
    except Exception as error:  # a loss for this number of rows only
        log.debug("which random numbers of the loss are for rows is not known: %s", error)
        return None
    return next((small.place for small, large in pairs if small.shape != large.shape), None)
