"""Lowering of random numbers, but for JAX's threefry, which arrives as integer operations."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import tuple_of
from mpmd.compile.lowering.site import LoweringSite, Rule

_ALGORITHMS = {"DEFAULT": "rng_default", "THREE_FRY": "rng_three_fry", "PHILOX": "rng_philox"}
_DISTRIBUTIONS = {"UNIFORM": "rng_uniform", "NORMAL": "rng_normal"}


def rng_bit_generator(site: LoweringSite) -> Sequence[HloInstruction]:
    """Random bits and the state after them."""
    made = site.build.add(
        "rng-bit-generator",
        site.operands[0],
        shape=tuple_of(site.operation.shapes),
        algorithm=_ALGORITHMS[site.required("rng_algorithm")],
    )
    return site.parts(made)


def rng(site: LoweringSite) -> HloInstruction:
    """Random numbers without a state: any of the distribution; the shape operand is known from the result."""
    a, b, _ = site.operands
    distribution = _DISTRIBUTIONS[site.required("rng_distribution")]
    return site.build.add("rng", a, b, shape=site.shape, distribution=distribution)


RULES: dict[str, Rule] = {
    "stablehlo.rng": rng,
    "stablehlo.rng_bit_generator": rng_bit_generator,
}
