"""What a user has set around a step: the step has meshes of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

from mpmd.api.staging import refuse
from mpmd.jax_compat import is_staging

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
        refuse("jax.jit, a loop of jax.lax or another step")
