"""Times of work on a GPU: variants in turn, each round warm, medians over the rounds."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds per call of one variant."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Over the rounds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """The slowest round over the fastest."""
        return max(self.rounds) / min(self.rounds)

    def figures(self) -> dict[str, float]:
        """For the report: microseconds."""
        return {
            "median_us": round(1e6 * self.median, 3),
            "min_us": round(1e6 * min(self.rounds), 3),
            "spread": round(self.spread, 3),
        }


def interleaved(
    variants: Mapping[str, Callable[[], Any]], *, rounds: int = 5, seconds: float = 0.05
) -> dict[str, Times]:
    """Times variants one after the other, `rounds` times over.

    Args:
        variants: functions that start work and return what to wait for; calls of a round are issued without
            waiting in between, as a device works best, and the last is waited for.
        rounds: how often.
        seconds: about how long each round of a variant is.
    """
    import jax

    calls = {}
    for name, start in variants.items():
        jax.block_until_ready(start())
        once = time.perf_counter()
        jax.block_until_ready([start() for _ in range(3)][-1])
        each = (time.perf_counter() - once) / 3
        calls[name] = max(1, min(200, round(seconds / max(each, 1e-7))))
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, start in variants.items():
            begin, last = time.perf_counter(), None
            for _ in range(calls[name]):
                last = start()
            jax.block_until_ready(last)
            found[name].append((time.perf_counter() - begin) / calls[name])
    return {name: Times(tuple(values)) for name, values in found.items()}


def relative_error(found: Any, wanted: Any) -> float:
    """‖found - wanted‖ / ‖wanted‖ in f32; NaN if either holds one."""
    import jax.numpy as jnp

    found, wanted = jnp.asarray(found, jnp.float32), jnp.asarray(wanted, jnp.float32)
    return float(jnp.linalg.norm((found - wanted).ravel()) / jnp.linalg.norm(wanted.ravel()))


def busy(gpu: bool, seconds: float = 0.3) -> Callable[[], Any]:
    """A function that starts about `seconds` of work on the device and returns an array at once.

    It is a row of programs without loops: in a loop the host may wait for the device.
    """
    import jax
    import jax.numpy as jnp

    size, products = (8192, 8) if gpu else (512, 8)

    @jax.jit
    def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
        for _ in range(products):
            y = (y @ x) * jnp.asarray(2.0 / size, x.dtype)
        return y

    x = jax.random.uniform(jax.random.key(0), (size, size), jnp.bfloat16 if gpu else jnp.float32)

    def start(programs: int) -> jax.Array:
        y = x
        for _ in range(programs):
            y = multiply(x, y)
        return y

    jax.block_until_ready(start(1))
    begin = time.perf_counter()
    jax.block_until_ready(start(4))
    programs = max(1, min(30, round(4 * seconds / (time.perf_counter() - begin))))
    return lambda: start(programs)
