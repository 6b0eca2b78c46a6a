"""What the stages of a step have of `jax.stages`, and reasons for what they lack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import jax

from mpmd.errors import NotPicklableError
from mpmd.jax_compat import ShapedArray

if TYPE_CHECKING:
    from mpmd.api.aot import Traced

S = TypeVar("S")

OF_JAX_ALONE = "it is of JAX's own compiler; jax_traced is the step as JAX traced it"
"""The reason for what only JAX's own lowering uses."""

NO_EXPORT = (
    "a step for several meshes cannot be exported: it is a program for each mesh, with messages between, and "
    "jax.export writes one program"
    "\n  jax.export.export(jax.jit(step.__wrapped__)) exports the step for one device"
    "\n  for another process pickle the configuration, and call mpmd.jit there"
)
"""The error of `jax.export`."""


class Unpicklable:
    """An object of this process: a deep copy is itself, as a function's is, and it is not pickled.

    Attributes:
        pickle_instead: the end of the error of `pickle`: what to do.
    """

    pickle_instead: ClassVar[str]

    def __copy__(self: S) -> S:
        return self

    def __deepcopy__(self: S, memo: Any) -> S:
        return self

    def __reduce__(self) -> str:
        raise NotPicklableError(
            f"{type(self).__name__} of mpmd cannot be pickled: it is of the devices and threads of this "
            f"process\n  {self.pickle_instead}"
        )


class StepStage(Unpicklable):
    """A stage of a step, with the properties of `jax.stages.Stage`.

    Attributes:
        lacks: names of the same class of `jax.stages` that it does not have, each with the reason.
    """

    lacks: ClassVar[Mapping[str, str]] = {}
    pickle_instead = (
        "pickle the configuration (mpmd.make_config), and trace, lower and compile there; "
        "native code is kept between processes by mpmd_compile_cache_dir, XLA's by jax_compilation_cache_dir"
    )

    @property
    def _of(self) -> Traced:
        """The step as it was traced."""
        raise AttributeError("a stage of a step")

    @property
    def in_tree(self) -> Any:
        """The pytree of `(positional, keywords)`, without static arguments."""
        return self._of.arguments.tree

    @property
    def in_avals(self) -> Any:
        """The shape and dtype of each argument, as JAX's types."""
        return jax.tree.unflatten(self.in_tree, self._avals())

    @property
    def args_info(self) -> Any:
        """For each argument a `jax.stages.ArgInfo`: shape, dtype, and whether it may be donated."""
        donated = set(self.donate_argnums)
        infos = [jax.stages.ArgInfo(aval, k in donated) for k, aval in enumerate(self._avals())]
        return jax.tree.unflatten(self.in_tree, infos)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The flat arguments that a call may consume."""
        return self._of.arguments.donated

    @property
    def out_tree(self) -> Any:
        """The pytree of the results."""
        return jax.tree.structure(self._of.jax_traced.out_info)

    @property
    def out_info(self) -> Any:
        """The results as `jax.ShapeDtypeStruct`s."""
        return self._of.jax_traced.out_info

    def _avals(self) -> list[Any]:
        return [
            ShapedArray(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
            for leaf in self._of.arguments.leaves
        ]

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Says why a name of `jax.stages` is not here."""
            if name in self.lacks:
                raise AttributeError(f"mpmd's {type(self).__name__} has no {name}: {self.lacks[name]}")
            return object.__getattribute__(self, name)  # fails again, with its own words
