"""A step whose stages were selected from outside."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from mpmd.brief import brief
from mpmd.errors import ConfigError, collect
from mpmd.support.option_texts import NamePlacement
from mpmd.tracing.names import is_bound, keeping
from mpmd.tracing.stages.items import FlatFunction, Item, emit
from mpmd.tracing.stages.select.automatic import AutomaticSelector, DivisionChoice, choose_by_cost
from mpmd.tracing.stages.select.frozen_models import models_apart
from mpmd.tracing.stages.select.placement import (
    check_order,
    check_scopes,
    place,
    stages_by_paths,
    stages_by_scopes,
)
from mpmd.tracing.stages.select.selectors import Selector
from mpmd.tracing.stages.select.stage_report import describe_stages
from mpmd.tracing.stages.stacked.by_parts import PartwiseInterpreter
from mpmd.tracing.stages.stacked.closed_over_stacks import stacked_arguments
from mpmd.tracing.stages.stacked.part_rules import FROM_ARRAYS, RULES
from mpmd.tracing.stages.stacked.scan_ranges import divide_scans
from mpmd.tracing.stages.stacked.stacked import in_parts, is_stacked
from mpmd.tracing.stateful_modules import returning_what_it_changes
from mpmd.tracing.trace import names_run_by

Dynamic = tuple[list[Any], dict[str, Any]]
"""Positional and keyword arguments that are not static."""


def over_parts(
    fn: Callable[..., Any], stages: TracedStages, given: Dynamic, whole_call: Callable[[Dynamic], Any]
) -> tuple[Callable[[Dynamic], Any], Dynamic]:
    """A function over the parts of its stacked arguments, and such arguments.

    Args:
        fn: the user's, for messages.
        stages: the current one; losses in the function add what they divide, and warnings.
        given: shapes and dtypes of arguments: whole arrays or `Stacked`.
        whole_call: the function, of whole arrays.
    """
    wholes = jax.tree.map(lambda v: v.whole() if is_stacked(v) else v, given, is_leaf=is_stacked)
    flat, tree = tree_flatten_with_path(wholes)

    def of_leaves(*leaves: Any) -> Any:
        return whole_call(stages.of_step(jax.tree.unflatten(tree, leaves)))

    closed, shapes = jax.make_jaxpr(of_leaves, return_shape=True)(*[leaf for _, leaf in flat])
    if not stages.divisions:
        return whole_call, wholes
    closed_over = stacked_arguments(closed.jaxpr, stages.divisions.values())
    lengths = [
        stages.lengths_of(keystr(path, simple=True, separator="/"), leaf.shape) or closed_over.get(number)
        for number, (path, leaf) in enumerate(flat)
    ]
    stages.warn_of_whole_stacks(getattr(fn, "__name__", "the step"))
    interpreter = PartwiseInterpreter(RULES, FROM_ARRAYS, list(stages.divisions.values()))

    def of_parts(parts: Dynamic) -> Any:
        leaves = jax.tree.leaves(parts, is_leaf=is_stacked)
        results = interpreter.run(closed.jaxpr, closed.consts, leaves)
        stages.warnings.update(interpreter.joined)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    parts = [leaf if of is None else in_parts(leaf, of) for (_, leaf), of in zip(flat, lengths, strict=True)]
    return of_parts, jax.tree.unflatten(tree, parts)


P = ParamSpec("P")
R = TypeVar("R")

_LEAVE_OUT = (
    "\n  leave {!r} out of the assignment, and its work is divided like the rest; or leave out stages=, and "
    "assign all names"
)


class TracedStages:
    """The stages of one trace of a step: how they are selected, and which were found.

    Attributes:
        selector: the user's.
        assigned: the places of names, with those of the stages.
        texts: a description of the stages of each function that has some.
        divisions: path and rows of each stacked parameter of these functions → the lengths of its parts.
        warnings: for the user.
        choices: the divisions by cost, with their alternatives.
    """

    __repr__ = brief

    def __init__(self, selector: Selector, assigned: Mapping[str, NamePlacement] | None = None) -> None:
        self.selector = selector
        self.assigned = assigned or {}
        self.texts: dict[str, None] = {}
        self.divisions: dict[tuple[str, int], list[int]] = {}
        self.warnings: dict[str, None] = {}
        self.choices: list[DivisionChoice] = []
        self._found: set[str] = set()
        self._arguments: dict[int, tuple[Any, str]] = {}

    def of_step(self, given: Dynamic) -> Dynamic:
        """Notes the paths of the step's arguments, which functions with stages may close over."""
        for path, leaf in tree_flatten_with_path(given)[0]:
            if isinstance(leaf, jax.core.Tracer):
                self._arguments[id(leaf)] = leaf, keystr(path[2:], simple=True, separator="/")
        return given

    def path_closed_over(self, value: Any) -> str | None:
        """The path, in its argument of the step, of a value that a layer is of: such as a frozen weight."""
        noted, path = self._arguments.get(id(value), (None, ""))
        known = path and noted is value and not self.selector.scoped
        layer = known and (self.selector.matches(path) or self.selector.pinned(path) is not None)
        return path if layer else None

    @property
    def kept_names(self) -> frozenset[str]:
        """The names that the user assigned; others mean nothing in a function with stages."""
        return frozenset(self.assigned).difference(self.selector.names)

    def check_assigned(self, function: FlatFunction) -> None:
        """Checks that assigned names are in stages on their meshes.

        Raises:
            ConfigError: some are in others.
        """
        problems: dict[str, None] = {}
        for item in function.items:
            stage = "" if item.stage is None else self.selector.names[item.stage]
            if stage not in self.assigned:
                continue
            around = self.assigned[stage]
            for kind, name in sorted(names_run_by([item.equation])):
                own = self.assigned[name] if name in self.kept_names else around
                if own.mesh != around.mesh or (kind == "comp" and own.stage != around.stage):
                    got = f"{self.selector} puts it into {stage}, on {around}: {item.where}"
                    problems[f"{name!r} is assigned to {own}, but {got}{_LEAVE_OUT.format(name)}"] = None
        if problems:
            raise collect(ConfigError, list(problems), "the assignment does not fit the stages:")

    @property
    def found(self) -> Selector:
        """The selector; where it chooses by cost, with what it chose."""
        if not isinstance(self.selector, AutomaticSelector):
            return self.selector
        found = dict.fromkeys((c.key, len(c.units.chain), c.division.starts) for c in self.choices)
        return dataclasses.replace(self.selector, found=tuple(found), refine=False)

    def lengths_of(self, path: str, shape: Sequence[int]) -> list[int] | None:
        """The lengths of the parts of an argument of the step: a stacked parameter, or state shaped like one.

        Its path ends with the parameter's, as the paths of moments do.
        """
        found = None
        for (parameter, rows), lengths in self.divisions.items():
            if f"/{path}".endswith(f"/{parameter}") and tuple(shape[:1]) == (rows,):
                self._found.add(parameter)
                found = found or lengths
        return found

    def warn_of_whole_stacks(self, name: str) -> None:
        """Warns of stacked parameters that are not arguments of the step, and so are not in parts."""
        for parameter, _ in self.divisions:
            if parameter not in self._found:
                self.warnings[
                    f"no argument of {name} has a path that ends with {parameter}, a stacked parameter of "
                    "its loss: the whole stack is on one mesh, and rows of it are sent to the others"
                ] = None

    def check_used(self) -> None:
        """Checks that a function with stages was traced.

        Raises:
            ConfigError: none was.
        """
        if not self.texts:
            raise ConfigError(
                f"the configuration has stages={self.selector}, but no loss to divide is in the step\n"
                "  mpmd.accumulate_gradients(loss, ...) is one; for a gradient of your own differentiate "
                "mpmd.staged(loss), as in jax.value_and_grad(mpmd.staged(loss))"
            )


_stages = jax.make_user_context(None)
"""The stages of the step that is traced: a part of the key of JAX's caches."""


@contextlib.contextmanager
def dividing(stages: TracedStages | None) -> Iterator[None]:
    """Functions that are traced inside have these stages."""
    with _stages(stages):
        yield


def staged(fn: Callable[P, R], *, argnums: int | Sequence[int] = 0) -> Callable[P, R]:
    """A loss, or a model, with the stages that `stages=` of `mpmd.make_config` describes.

        loss, grads = jax.value_and_grad(mpmd.staged(loss_fn))(params, batch)

    It computes the same.  `mpmd.accumulate_gradients` does this by itself.  Without `stages=`, outside of
    `mpmd.jit`, and within another function with stages, it is `fn`.

    Args:
        fn: a function of pytrees.
        argnums: the positions of its parameters, whose paths the patterns match.
    """
    if getattr(fn, _MARK, None) is fn:
        return fn
    several = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        stages = _stages.value
        return fn(*args, **kwargs) if stages is None else _in_stages(stages, fn, several, args, kwargs)

    setattr(call, _MARK, call)
    return call


_MARK = "__mpmd_staged__"
"""Attribute of a function that `staged` returned: itself, because wrappers of it copy its attributes."""


def _in_stages(stages: TracedStages, fn: Callable[..., Any], argnums: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function, with its work in its stages."""
    flat, tree = tree_flatten_with_path((args, kwargs))
    arrays = [i for i, (_, leaf) in enumerate(flat) if not is_bound(leaf)]
    values = [flat[i][1] for i in arrays]

    def of_arrays(*given: Any) -> Any:
        leaves = [leaf for _, leaf in flat]
        for i, value in zip(arrays, given, strict=True):
            leaves[i] = value
        positional, keywords = jax.tree.unflatten(tree, leaves)
        with dividing(None), keeping(stages.kept_names):  # stages have no stages in them
            return checked(*positional, **keywords)

    checked = returning_what_it_changes(fn)
    closed, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*values)
    function = FlatFunction(closed)
    positions = {i % len(args) for i in argnums}
    paths = {
        value: keystr(flat[i][0][2:], simple=True, separator="/")
        for value, i in zip(function.inputs, arrays, strict=True)
        if flat[i][0][0].idx == 0 and flat[i][0][1].idx in positions
    }
    frozen = {value: stages.path_closed_over(array) for value, array in function.constants.items()}
    paths |= {value: path for value, path in frozen.items() if path is not None}
    name = getattr(fn, "__name__", "")
    _choose(stages, function, paths, name if name.isidentifier() else "the function")
    stages.check_assigned(function)
    return jax.tree.unflatten(jax.tree.structure(shapes), emit(function, values, stages.selector.names))


def _choose(stages: TracedStages, function: FlatFunction, paths: dict[int, str], name: str) -> None:
    """Gives the items of a function their stages.

    Args:
        stages: gets a description of them.
        function: its items have no stages.
        paths: the path of each value that is a parameter.
        name: of the function.
    """
    selector = stages.selector
    if isinstance(selector, AutomaticSelector):
        choice, division, text = choose_by_cost(function, paths, selector, name)
        stages.choices.append(choice)
        stages.divisions.update(division.lengths)
        stages.warnings.update(dict.fromkeys(choice.imbalance()) | division.joined)
        stages.texts[text] = None
        return
    scoped: dict[Item, int] = {}
    parts: dict[int, int] = {}
    if selector.stacked:
        division = divide_scans(function, paths, selector)
        stages.divisions.update(division.lengths)
        stages.warnings.update(division.joined)
        parts = division.stage_of
        chosen = [None if v in division.stacks else selector.pinned(path) for v, path in paths.items()]
    elif selector.scoped:
        scoped = stages_by_scopes(selector, function)
        selector.check_pinned(list(paths.values()))
        chosen = [selector.pinned(path) for path in paths.values()]
        for item, stage in scoped.items():
            item.stage = stage
    else:
        models = models_apart(function, paths, selector)
        together = {v: path for v, path in paths.items() if not any(v in model for model in models)}
        by_path = dict(zip(together, stages_by_paths(selector, list(together.values())), strict=True))
        for model in models:
            by_path |= zip(model, stages_by_paths(selector, list(model.values()), beside=True), strict=True)
        chosen = [by_path[v] for v in paths]
    stage_of = {value: stage for value, stage in zip(paths, chosen, strict=True) if stage is not None}
    place(function, [*paths, *parts], stage_of | parts, len(selector.over))
    check_order(function, stage_of, paths)
    check_scopes(scoped)
    stages.texts[describe_stages(function, paths, selector, name)] = None
