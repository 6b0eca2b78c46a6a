"""Named computations in haiku: its state and random keys change while a transformed function runs.

Haiku keeps parameters, state and a sequence of random keys in a frame outside of JAX.  A nested jit must
not change it, since the values would belong to the nested jit: here state and keys are arguments, and changed
ones are results.  Haiku is not imported; where its internals differ, functions are called directly and JAX
reports the leaked values.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import jax

_NEEDED = ("internal_state", "temporary_internal_state", "update_internal_state", "base")


def inside_transform() -> bool:
    """Whether a function that haiku transformed is running."""
    return _frame() is not None


def is_creating_parameters() -> bool:
    """Whether it runs to create its parameters, which must not be created inside of a nested jit."""
    frame = _frame()
    return frame is not None and not frame.params_frozen


def call_with_state(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    carried: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Any:
    """Calls a function under a nested jit, and changes haiku's state and random keys as the call does.

    Args:
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        carried: puts a function of arrays under the nested jit.
    """
    stateful = _stateful()

    def pure(before: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        inside = stateful.temporary_internal_state(before, share_python_state=True)
        with inside, stateful.base.push_jax_trace_level():
            made = fn(*args, **kwargs)
            return made, _changes(before, stateful.internal_state(params=False))

    before = stateful.internal_state(params=False)
    made, changed = carried(pure)(before, args, kwargs)
    stateful.update_internal_state(changed)
    return made


def _changes(before: Any, after: Any) -> Any:
    """The state and keys in `after` that are other objects than those in `before`, in haiku's form."""
    state = {
        module: {
            name: value
            for name, value in values.items()
            if _other(before.state.get(module, {}).get(name), value)
        }
        for module, values in after.state.items()
    }
    keys = after.rng if after.rng is not None and _other(before.rng, after.rng) else None
    return after._replace(state={module: values for module, values in state.items() if values}, rng=keys)


def _other(before: Any, after: Any) -> bool:
    """Whether two pairs of arrays (or of arrays and tuples) hold other objects."""
    old, new = jax.tree.leaves(before), jax.tree.leaves(after)
    return len(old) != len(new) or any(a is not b for a, b in zip(old, new))


def _frame() -> Any:
    """The frame of the transformed function that runs in this thread; None if none does."""
    base = sys.modules.get("haiku._src.base")
    frames = getattr(base, "frame_stack", None)
    if not frames or not all(hasattr(_stateful(), name) for name in _NEEDED):
        return None
    return frames.peek()


def _stateful() -> Any:
    return importlib.import_module("haiku._src.stateful")
