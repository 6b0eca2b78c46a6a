"""Names that a traced step calls, and those on which its results depend."""

from __future__ import annotations

from typing import Any

from mpmd.jax_compat import inner_jaxprs, without_dead_code
from mpmd.tracing.names import decode

_KINDS = ("comp", "tensor")


def names_in(jaxpr: Any) -> set[str]:
    """The names of computations and tensors in a jaxpr, at any depth."""
    found: set[str] = set()
    todo, seen = [jaxpr], set[int]()
    while todo:
        current = todo.pop()
        if id(current) in seen:  # JAX shares the jaxprs of functions that are called several times
            continue
        seen.add(id(current))
        for equation in current.eqns:
            kind, name = decode(str(equation.params.get("name", ""))) or ("", "")
            if kind in _KINDS:
                found.add(name)
            todo += inner_jaxprs(equation)
    return found


def live_names(jaxpr: Any) -> set[str]:
    """The names that the results or the effects of a jaxpr depend on."""
    return names_in(without_dead_code(jaxpr))
