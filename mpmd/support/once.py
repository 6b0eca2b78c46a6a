"""Functions that must not run twice: registrations, and what a process has one of."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def once(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function run once for given arguments, however many threads call it first.

    `functools.cache` runs a function in every thread that calls it before the first one has finished.
    """
    running = threading.RLock()
    found: Callable[..., R] = functools.cache(function)

    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with running:
            return found(*args, **kwargs)

    # calls after the first take no lock
    return cast("Callable[P, R]", functools.cache(functools.wraps(function)(alone)))
