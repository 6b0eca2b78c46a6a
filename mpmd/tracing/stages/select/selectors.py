"""What a user says about stages from outside of the model: patterns on paths of parameters, or on scopes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from mpmd.brief import brief
from mpmd.errors import ConfigError, close_to

_SHOWN = 6
"""How many parameters or scopes an error shows."""


@dataclasses.dataclass(frozen=True)
class Selector:
    """Stages by the parameters that they read or by scopes; made by `by_parameters`, `by_scopes` or `split`.

    Attributes:
        patterns: regular expressions, searched in paths of parameters, such as `layers/0/w`, or in scopes.
        over: the mesh of each stage; empty for the meshes of the topology, in order.
        lengths: how many layers each stage has; empty for equal lengths.
        first: patterns of parameters that are read in the first stage.
        last: those that are read in the last stage.
        stacked: whether the layers are stacked along dim 0 of their parameters, and a scan runs them.
        scoped: whether the patterns are of scopes.
    """

    patterns: tuple[str, ...]
    over: tuple[str, ...]
    lengths: tuple[int, ...]
    first: tuple[str, ...]
    last: tuple[str, ...]
    stacked: bool = False
    scoped: bool = False

    __repr__ = brief

    @property
    def names(self) -> list[str]:
        """The names of the stages."""
        return [f"stage{s}" for s in range(len(self.over))]

    @property
    def places(self) -> dict[str, str | tuple[str, int]]:
        """The assignment of the names: with numbers of stages if a mesh has several."""
        numbered = len(set(self.over)) < len(self.over)
        return {
            name: (mesh, stage) if numbered else mesh
            for stage, (name, mesh) in enumerate(zip(self.names, self.over))
        }

    def on(self, meshes: Sequence[str]) -> Selector:
        """The same with a mesh for each stage.

        Raises:
            ConfigError: there are not as many lengths as stages.
        """
        selector = self if self.over else dataclasses.replace(self, over=tuple(meshes))
        if selector.lengths and len(selector.lengths) != len(selector.over):
            raise ConfigError(
                f"{self} has {len(selector.lengths)} lengths, for {len(selector.over)} stages over "
                f"{', '.join(selector.over)}"
            )
        return selector

    def stages_of(self, count: int) -> list[int]:
        """The stage of each of `count` layers, in the order in which they run.

        Raises:
            ConfigError: there are fewer layers than stages, or the lengths are for another number.
        """
        stages = len(self.over)
        if self.lengths and sum(self.lengths) != count:
            raise ConfigError(
                f"{self} has lengths {list(self.lengths)}, {sum(self.lengths)} in all, but the model has "
                f"{count} layers"
            )
        if count < stages:
            raise ConfigError(
                f"{self} finds {count} layers for {stages} stages\n  leave meshes out of over=, or mend the "
                "pattern"
            )
        if self.lengths:
            return [stage for stage, length in enumerate(self.lengths) for _ in range(length)]
        return [layer * stages // count for layer in range(count)]

    def stages_beside(self, count: int) -> list[int]:
        """The stage of each of `count` layers of another model, such as a teacher; a stage may have none."""
        if self.lengths and sum(self.lengths) == count:
            return self.stages_of(count)
        return [layer * len(self.over) // count for layer in range(count)]

    def pinned(self, path: str) -> int | None:
        """The stage of a parameter that `first` or `last` names."""
        for patterns, stage in ((self.first, 0), (self.last, len(self.over) - 1)):
            if any(re.search(pattern, path) for pattern in patterns):
                return stage
        return None

    def matches(self, path: str) -> bool:
        """Whether a parameter is one of a layer."""
        return any(re.search(pattern, path) for pattern in self.patterns)

    def check_matches(self, texts: Sequence[str]) -> None:
        """Checks that every pattern matches a parameter, or a scope.

        Args:
            texts: the paths of the parameters, or the scopes.

        Raises:
            ConfigError: one does not; shows the nearest of them.
        """
        _check_each_matches(self.patterns, texts, "scope" if self.scoped else "parameter")
        if not self.scoped:
            self.check_pinned(texts)

    def check_pinned(self, paths: Sequence[str]) -> None:
        """Checks that the patterns of `first` and `last` match parameters.

        Raises:
            ConfigError: one does not; shows the nearest paths.
        """
        _check_each_matches((*self.first, *self.last), paths, "parameter")

    def __str__(self) -> str:
        function = "split" if self.stacked else "by_scopes" if self.scoped else "by_parameters"
        return f"mpmd.{function}({', '.join(map(_literal, self.patterns))})"


def _check_each_matches(patterns: Sequence[str], texts: Sequence[str], what: str) -> None:
    for pattern in patterns:
        if any(re.search(pattern, text) for text in texts):
            continue
        near = close_to(re.sub(r"\\d\+|[\\()\[\]^$?*+]", "", pattern), texts, 3)
        more = f"\n  and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
        shown = f"\n  {what}s of the loss:\n  " + "\n  ".join(texts[:_SHOWN]) + more if texts else ""
        raise ConfigError(f"no {what} matches {_literal(pattern)}{near}{shown or _NONE[what]}")


_NONE = {
    "parameter": "\n  the loss has no parameters",
    "scope": "\n  the loss has no scopes: modules of nnx and equinox leave none; use mpmd.by_parameters",
}
"""The end of the message if there are no parameters or scopes at all."""


def by_parameters(
    *patterns: str,
    over: Sequence[str] = (),
    lengths: Sequence[int] = (),
    first: str | Sequence[str] = (),
    last: str | Sequence[str] = (),
) -> Selector:
    r"""Stages of a model with separate layers, by the paths of their parameters.

        mpmd.make_config(topology, stages=mpmd.by_parameters(r"layers/(\d+)"))

    The model is not changed: the loss that `mpmd.accumulate_gradients` or `mpmd.staged` gets is traced, and
    everything that reads the parameters of a layer, at any depth of jits and checkpoints, is computed in its
    stage.  The rest follows from what it reads: embeddings are in the first stage, heads in the last.
    Between two stages the division is where the fewest bytes cross.

    Args:
        *patterns: regular expressions, searched in the paths of parameters, keys separated by `/`.  A layer
            is one value of the groups of a pattern (numbers in their order), or one pattern without groups.
            Layers of several patterns follow one another.
        over: the mesh of each stage, in order; a mesh may have several stages.  By default each mesh of the
            topology has one.
        lengths: how many layers each stage has; by default they differ by at most 1.
        first: a pattern, or several, of other parameters that are read in the first stage.
        last: likewise in the last stage.

    Raises:
        ConfigError: a pattern is not a regular expression, or the lengths are not one for each stage.
    """
    return _selector(patterns, over, lengths, first, last)


def by_scopes(
    *patterns: str,
    over: Sequence[str] = (),
    lengths: Sequence[int] = (),
    first: str | Sequence[str] = (),
    last: str | Sequence[str] = (),
) -> Selector:
    r"""Stages of a model with separate layers, by the scopes that its code runs in.

        mpmd.make_config(topology, stages=mpmd.by_scopes(r"layer_(\d+)"))

    For models whose parameters have no telling paths, such as the variables of a keras model, a list.
    Modules of linen, haiku and keras are scopes, such as `Net/layer_0/Dense_0`, and so is
    `jax.named_scope`; modules of nnx and equinox leave none.

    Args:
        *patterns: regular expressions, searched in scopes, names separated by `/`.  A layer is one value of
            the groups of a pattern (numbers in their order), or one pattern without groups.
        over: the mesh of each stage, in order, as of `by_parameters`.
        lengths: how many layers each stage has; by default they differ by at most 1.
        first: a pattern, or several, of the paths of parameters that are read in the first stage.
        last: likewise in the last stage.

    Raises:
        ConfigError: a pattern is not a regular expression, or the lengths are not one for each stage.
    """
    return _selector(patterns, over, lengths, first, last, scoped=True)


def split(
    *patterns: str,
    over: Sequence[str] = (),
    lengths: Sequence[int] = (),
    first: str | Sequence[str] = (),
    last: str | Sequence[str] = (),
) -> Selector:
    """Stages of a model whose layers are stacked, and are run by a scan.

        mpmd.make_config(topology, stages=mpmd.split("layers"))

    A `jax.lax.scan` over parameters such as `f32[8,16,64]`, as `nn.scan` of linen and nnx writes, becomes a
    scan per stage over its own layers.  Each mesh holds only its own part of the parameters, their gradients
    and the state of the optimizer, which the step returns as `mpmd.Stacked`.  It takes whole arrays too.

    Args:
        *patterns: regular expressions, searched in the paths of parameters, keys separated by `/`.
        over: the mesh of each stage, in order; a mesh may have several stages.  By default each mesh of the
            topology has one.
        lengths: how many layers each stage has, in the order in which they run; by default they differ by at
            most 1.
        first: a pattern, or several, of other parameters that are read in the first stage.
        last: likewise in the last stage.

    Raises:
        ConfigError: a pattern is not a regular expression, or the lengths are not one for each stage.
    """
    return _selector(patterns, over, lengths, first, last, stacked=True)


def _selector(
    patterns: Sequence[Any], over: Any, lengths: Any, first: Any, last: Any, **kind: bool
) -> Selector:
    selector = Selector(
        _several(patterns), _several(over), _several(lengths), _several(first), _several(last), **kind
    )
    if not selector.patterns:
        of = "scopes" if selector.scoped else "the paths of parameters"
        raise ConfigError(f"stages need a pattern of {of}, such as r'layers/(\\d+)'")
    for pattern in (*selector.patterns, *selector.first, *selector.last):
        if not isinstance(pattern, str):
            raise ConfigError(f"{pattern!r} is not a pattern: write a text such as r'layers/(\\d+)'")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"the pattern {pattern!r} cannot be read: {error}") from None
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in selector.lengths):
        raise ConfigError(f"lengths is {lengths!r}; it must have a whole number from 1 for each stage")
    return selector


def _literal(pattern: str) -> str:
    return f"r'{pattern}'" if "\\" in pattern else repr(pattern)


def _several(given: Any) -> tuple[Any, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
