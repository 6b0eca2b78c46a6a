"""Loss functions, checked: JAX's error for another result speaks of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec

import jax
import numpy as np

from mpmd.errors import SignatureError

P = ParamSpec("P")


def scalar_loss(loss_fn: Callable[P, Any], has_aux: bool) -> Callable[P, Any]:
    """The loss function, checked to return a scalar, or a scalar and something else.

    Raises:
        SignatureError: when called, and it does not.
    """

    def checked(*args: P.args, **more: P.kwargs) -> Any:
        result = loss_fn(*args, **more)
        is_pair = isinstance(result, (tuple, list)) and len(result) == 2
        if has_aux and not is_pair:
            raise SignatureError(
                f"with has_aux, the loss function must return (loss, aux), got {_shapes(result)}"
            )
        loss = result[0] if has_aux else result
        if _is_scalar(loss):
            return result
        hint = ""
        if is_pair and not has_aux and _is_scalar(result[0]):
            hint = (
                "\n  pass the loss function itself, not jax.value_and_grad of it; if it returns (loss, aux), "
                "give has_aux=True"
            )
        raise SignatureError(
            f"the loss function of accumulate_gradients must return a scalar, got {_shapes(loss)}{hint}"
        )

    return checked


def _is_scalar(value: Any) -> bool:
    return jax.tree.structure(value) == jax.tree.structure(0) and np.shape(value) == ()


def _shapes(values: Any) -> str:
    """A pytree with the type and shape of each leaf."""

    def kind(leaf: Any) -> str:
        return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(np.shape(leaf))}"

    return str(jax.tree.map(kind, values)).replace("'", "")
