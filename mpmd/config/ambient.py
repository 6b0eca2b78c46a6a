"""Around a step: meshes that the user has set, transformations and traces of JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpmd.errors import SignatureError
from mpmd.jax_compat import is_staging

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


def _refuse(what: str, instead: str) -> NoReturn:
    raise SignatureError(
        f"the step is called inside of {what}\n  a step for several meshes runs by itself: {instead}\n"
        "  the function without mpmd.jit is its __wrapped__"
    )


def _refuse_lowering(*_: Any, **__: Any) -> NoReturn:
    _refuse(
        "jax.jit, a loop of jax.lax or another step",
        "leave the jax.jit around it out; call it in a loop of Python: a call returns before it is done",
    )


def _refuse_gradient(*_: Any, **__: Any) -> NoReturn:
    _refuse(
        "jax.grad or another derivative of JAX",
        "take gradients in it, with mpmd.accumulate_gradients(loss, M) or jax.grad(mpmd.staged(loss))",
    )


def _refuse_batching(*_: Any, **__: Any) -> NoReturn:
    _refuse("jax.vmap", "vectorize the function in it, mpmd.jit(jax.vmap(fn), config)")


def refuse_tracer(value: jax.core.Tracer) -> NoReturn:
    """Raises for an argument of a step that has no value, since JAX transforms what calls the step.

    Raises:
        SignatureError: always.
    """
    kind = type(value).__name__
    if kind == "BatchTracer":
        _refuse_batching()
    if kind in ("JVPTracer", "LinearizeTracer"):
        _refuse_gradient()
    _refuse_lowering()


step_p.def_impl(_refuse_lowering)
mlir.register_lowering(step_p, _refuse_lowering)
ad.primitive_jvps[step_p] = _refuse_gradient
batching.primitive_batchers[step_p] = _refuse_batching


_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_ambient_mesh(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """`fn`, called as if outside of every `jax.set_mesh`.

    Under a `jax.set_mesh`, JAX refuses fragments and placements on other devices than those of that mesh.
    """

    @functools.wraps(fn)
    def alone(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if jax.sharding.get_abstract_mesh().empty:
            return fn(*args, **kwargs)
        if is_staging():  # no mesh of devices is set
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return fn(*args, **kwargs)
        with jax.set_mesh(None):
            return fn(*args, **kwargs)

    return alone


def refuse_within_jit() -> None:
    """Raises if the step would become part of another program instead of running.

    Raises:
        SignatureError: JAX is tracing a function that calls the step.
    """
    if is_staging():
        _refuse_lowering()
