"""Work of a step's loss for each microbatch, and the step's memory."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from mpmd.api.jit import jit
from mpmd.api.trace_step import under_fitting_mesh
from mpmd.config.config import Config
from mpmd.cost.device import Device
from mpmd.errors import ConfigError, SignatureError
from mpmd.jax_compat import inner_jaxprs
from mpmd.partition.prepare import axes_of_dims, flat_prefix
from mpmd.planning.candidates import PlanChoice, StepSizes
from mpmd.tracing.names import decode
from mpmd.tracing.stages.select.automatic import AutomaticSelector, DivisionChoice, by_cost
from mpmd.tracing.stages.staged import TracedStages, dividing

NUMBER = "num_microbatches"
"""The argument of a step that says how many microbatches it has."""


def binder(step: Callable[..., Any], microbatches: Sequence[int] | None) -> Callable[[int], Any]:
    """The step as a function of its number of microbatches; 0 for the number that it has.

    Raises:
        ConfigError: several numbers are to be tried, but the step has no such argument.
    """
    try:
        known = NUMBER in inspect.signature(step).parameters
    except (TypeError, ValueError):
        known = False
    if known:
        return lambda count: _named(functools.partial(step, **{NUMBER: count}), step) if count else step
    if microbatches is not None:
        name = getattr(step, "__name__", repr(step))
        raise ConfigError(
            f"microbatches={tuple(microbatches)!r} cannot be tried: {name} has no argument {NUMBER}\n"
            f"  write def {name}(..., *, {NUMBER}): and pass it on to mpmd.accumulate_gradients, or leave "
            "microbatches out for the number that the step has"
        )
    return lambda count: step


def _named(bound: Any, step: Callable[..., Any]) -> Any:
    bound.__name__ = getattr(step, "__name__", "step")
    return bound


class StepProbe:
    """A step that is traced, and never run.

    Args:
        args: positional arguments: arrays, or their shapes and dtypes.
        kwargs: keyword arguments.
        axes: names of the axes of a mesh.
    """

    def __init__(self, args: Any, kwargs: Any, axes: Sequence[str], in_shardings: Any) -> None:
        self.args, self.kwargs, self.axes = args, kwargs, axes
        self.leaves, tree = tree_flatten_with_path((args, kwargs))
        given = in_shardings
        if isinstance(given, (tuple, list)) and not isinstance(given, PartitionSpec):
            given = (tuple(given), None)
        self.specs = flat_prefix(given, tree, "in_shardings")

    def loss(self, step: Callable[..., Any], device: Device) -> tuple[DivisionChoice, int]:
        """The chain of the loss of a step for one microbatch, and how many microbatches the step has.

        Raises:
            ConfigError: the step divides no loss, or several.
        """
        selector = by_cost(1, over=()).on(["m0"])
        assert isinstance(selector, AutomaticSelector)

        def traced(_: AbstractMesh) -> tuple[TracedStages, Any]:
            stages = TracedStages(selector.on_devices({"m0": 1}, device))
            with dividing(stages):
                return stages, jax.make_jaxpr(step)(*self.args, **self.kwargs)

        mesh = AbstractMesh((1,) * len(self.axes), tuple(self.axes))
        stages, closed = under_fitting_mesh(mesh, traced)
        if not stages.choices:
            raise ConfigError(
                f"no loss to divide is in {getattr(step, '__name__', 'the step')}\n"
                "  mpmd.accumulate_gradients(loss, ...) is one; for a gradient of your own write "
                "jax.value_and_grad(mpmd.staged(loss))"
            )
        if len({len(choice.units.chain) for choice in stages.choices}) > 1:
            raise ConfigError(
                "the step divides several functions, and a plan can weigh only one\n"
                "  use make_config with stages='auto' for it"
            )
        return stages.choices[0], _microbatches(closed.jaxpr)

    def tracer(self, bind: Callable[[int], Any], loss: DivisionChoice) -> Callable[[PlanChoice, Config], Any]:
        """Traces the step of a choice under a configuration; arguments that hold the state are donated."""
        mine = self._state_of(loss)
        donated = {path[1].idx for path, _ in self.leaves if _text(path) in mine and path[0].idx == 0}

        def traced(choice: PlanChoice, config: Config) -> Any:
            step = jit(bind(choice.microbatches), config, donate_argnums=sorted(donated))
            return step.trace(*self.args, **self.kwargs)

        return traced

    def state(self, loss: DivisionChoice) -> float:
        """Bytes of parameters and of the optimizer's state, in units of the parameters."""
        total = sum(loss.parameters.values()) or 1
        mine = self._state_of(loss)
        held = sum(leaf.size * leaf.dtype.itemsize for path, leaf in self.leaves if _text(path) in mine)
        return max(1.0, held / total)

    def _state_of(self, loss: DivisionChoice) -> set[str]:
        """The paths of the parameters, and of the optimizer's state for them.

        They end with paths of parameters, and at least half of the parameters are together with them.
        """
        texts = {_text(path) for path, _ in self.leaves}
        prefixes = collections.Counter(
            text.removesuffix(f"/{name}")
            for name in loss.parameters
            for text in texts
            if text.endswith(f"/{name}")
        )
        whole = [prefix for prefix, count in prefixes.items() if 2 * count >= len(loss.parameters)]
        return texts & {f"{prefix}/{name}" for prefix in whole for name in loss.parameters}

    def sizes(
        self, loss: DivisionChoice, microbatches: Iterable[int], axes: dict[str, int]
    ) -> StepSizes | str:
        """The sizes on meshes with these axes, or why the step cannot be sharded so."""
        of_state, of_batch, mine = dict[str, set[str]](), set[str](), self._state_of(loss)
        for (path, leaf), spec in zip(self.leaves, self.specs, strict=True):
            dims = [] if spec is None else axes_of_dims(spec, leaf.ndim)
            is_state = _text(path) in mine
            for dim, names in enumerate(dims):
                parts = _product(axes, names)
                rows = leaf.shape[dim] if is_state else leaf.shape[dim] // max(microbatches)
                if rows % parts:
                    return f"{keystr(path[1:])} has {rows} rows in a microbatch, for {parts} devices"
                (of_state.setdefault(_text(path), set()) if is_state else of_batch).update(names)
        unused = [name for name in axes if axes[name] > 1 and name not in of_batch.union(*of_state.values())]
        if unused:
            devices = _product(axes, axes)
            return f"{devices} devices for each mesh, but no argument is sharded over {', '.join(unused)}"
        exchanging = frozenset(
            k
            for k, name in enumerate(loss.parameters)
            if any(
                _product(axes, names - of_batch) > 1
                for text, names in of_state.items()
                if text.endswith(f"/{name}")
            )
        )
        shards = max((_product(axes, names) for names in of_state.values()), default=1)
        return StepSizes(self.state(loss), shards, _product(axes, of_batch), exchanging)


def _product(axes: Mapping[str, int], names: Iterable[str]) -> int:
    return math.prod(axes.get(name, 1) for name in names)


def _text(path: Any) -> str:
    return "/" + keystr(path, simple=True, separator="/")


def _microbatches(jaxpr: Any) -> int:
    """How often the loop over microbatches runs; 1 without one."""
    for equation in jaxpr.eqns:
        inner = inner_jaxprs(equation)
        if equation.primitive.name == "scan" and any(_is_microbatch(e) for j in inner for e in j.eqns):
            return int(equation.params["length"])
        inside = max((_microbatches(j) for j in inner), default=1)
        if inside > 1:
            return inside
    return 1


def _is_microbatch(equation: Any) -> bool:
    decoded = decode(str(equation.params.get("name", "")))
    return decoded is not None and tuple(decoded[:2]) == ("callee", "microbatch")


def axes_for(devices: int, names: Sequence[str]) -> list[dict[str, int]]:
    if len(names) == 1:
        return [{names[0]: devices}]
    sizes = []
    for size in range(1, devices + 1):
        if devices % size == 0:
            sizes += [{names[0]: size, **rest} for rest in axes_for(devices // size, names[1:])]
    return sizes


def first_line(error: SignatureError | ConfigError) -> str:
    """The first line of an error."""
    return next(itertools.chain(str(error).splitlines(), [""]))
