"""A step whose stacked arguments and results are in parts, from one over whole arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from mpmd.tracing.stages.interpreter import PartwiseInterpreter
from mpmd.tracing.stages.part_rules import FROM_ARRAYS, RULES
from mpmd.tracing.stages.stacked import in_parts, is_stacked
from mpmd.tracing.stages.staged import StagePlan

Dynamic = tuple[list[Any], dict[str, Any]]
"""Positional and keyword arguments that are not static."""


def over_parts(
    fn: Callable[..., Any], plan: StagePlan, given: Dynamic, whole_call: Callable[[Dynamic], Any]
) -> tuple[Callable[[Dynamic], Any], Dynamic]:
    """A function over the parts of its stacked arguments, and such arguments.

    Args:
        fn: the user's, for messages.
        plan: is the current one; gets what the losses in the function divide, and warnings.
        given: shapes and dtypes of arguments: whole arrays or `Stacked`.
        whole_call: the function, of whole arrays.
    """
    wholes = jax.tree.map(lambda v: v.whole() if is_stacked(v) else v, given, is_leaf=is_stacked)
    flat, tree = tree_flatten_with_path(wholes)
    closed, shapes = jax.make_jaxpr(
        lambda *leaves: whole_call(jax.tree.unflatten(tree, leaves)), return_shape=True
    )(*[leaf for _, leaf in flat])
    if not plan.divisions:
        return whole_call, wholes
    lengths = [plan.lengths_of(keystr(path, simple=True, separator="/"), leaf.shape) for path, leaf in flat]
    plan.warn_of_whole_stacks(getattr(fn, "__name__", "the step"))
    interpreter = PartwiseInterpreter(RULES, FROM_ARRAYS, list(plan.divisions.values()))

    def of_parts(parts: Dynamic) -> Any:
        leaves = jax.tree.leaves(parts, is_leaf=is_stacked)
        made = interpreter.run(closed.jaxpr, closed.consts, leaves)
        plan.warnings.update(interpreter.joined)
        return jax.tree.unflatten(jax.tree.structure(shapes), made)

    parts = [leaf if of is None else in_parts(leaf, of) for (_, leaf), of in zip(flat, lengths, strict=True)]
    return of_parts, jax.tree.unflatten(tree, parts)
