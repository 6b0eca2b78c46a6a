"""A step inside of a function that JAX traces: one equation, with the shapes of its results.

`jax.eval_shape` and `jax.make_jaxpr` trace a function and never run it; they see the step as one `mpmd_step`
equation that holds the jaxpr of the step.  Transformations that make it part of another program are errors:
lowering (`jax.jit`, loops), differentiating and batching.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpmd.errors import SignatureError

step_p = Primitive("mpmd_step")
step_p.multiple_results = True


def bind_step(leaves: Sequence[Any], jaxpr: Any) -> list[Any]:
    """Writes a step into the jaxpr that JAX is tracing.

    Args:
        leaves: the flat arguments, tracers among them.
        jaxpr: the closed jaxpr of the step, in which random keys are keys.

    Returns:
        The flat results, as tracers.
    """
    return list(step_p.bind(*leaves, jaxpr=jaxpr))


@step_p.def_abstract_eval
def _shapes(*_: Any, jaxpr: Any) -> list[Any]:
    return list(jaxpr.out_avals)


def refuse(what: str) -> NoReturn:
    """Raises where a step would become a part of another program instead of running by itself.

    Raises:
        SignatureError: always.
    """
    raise SignatureError(
        f"the step is called inside of {what}\n"
        "  a step for several meshes runs by itself: call it from outside, or use its __wrapped__"
    )


def _refuse_lowering(*_: Any, **__: Any) -> NoReturn:
    refuse("jax.jit, a loop of jax.lax or another step")


def _refuse_gradient(*_: Any, **__: Any) -> NoReturn:
    refuse("jax.grad or another derivative of JAX")


def _refuse_batching(*_: Any, **__: Any) -> NoReturn:
    refuse("jax.vmap")


step_p.def_impl(_refuse_lowering)
mlir.register_lowering(step_p, _refuse_lowering)
ad.primitive_jvps[step_p] = _refuse_gradient
batching.primitive_batchers[step_p] = _refuse_batching
