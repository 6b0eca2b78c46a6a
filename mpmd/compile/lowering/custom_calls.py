"""Lowering of custom calls and of random numbers.

Calls that only mark a value are dropped, those with an HLO operation are replaced, others stay.  JAX's
threefry arrives as integer operations, so only other generators are lowered here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from mpmd.compile.hlo.attributes import OutputAlias, Verbatim
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape, tuple_of
from mpmd.compile.hlo.text import quote, unquote
from mpmd.compile.lowering.site import LoweringSite, Rule

_VERSIONS = {
    2: "API_VERSION_STATUS_RETURNING",
    3: "API_VERSION_STATUS_RETURNING_UNIFIED",
    4: "API_VERSION_TYPED_FFI",
}
_MARKS = frozenset({"Sharding", "xla.sdy.FuncResultSharding", "xla.sdy.PropagationBarrier"})


def mark(site: LoweringSite) -> Sequence[HloInstruction]:
    if any(o.shape.logical is not s.logical for o, s in zip(site.operands, site.operation.shapes)):
        raise site.error("a marker for the partitioner changes the shape; partition the program first")
    return site.operands


def top_k(site: LoweringSite) -> Sequence[HloInstruction]:
    """The k largest or smallest values of the last dim and their positions."""
    options: dict[str, Any] = site.attribute("mhlo.attributes") or {}
    k = site.operation.shapes[0].dims[-1]
    largest = bool(options.get("largest", True))
    return site.parts(site.build.add("topk", site.operands[0], k=k, largest=largest))


def approximate_top_k(site: LoweringSite) -> Sequence[HloInstruction]:
    """The best values of a dim with their payloads: computed exactly, as a special case of approximately."""
    count = len(site.operands) // 2
    match = re.search(r"reduction_dim = (\d+)", str(site.attribute("mhlo.backend_config")))
    if match is None:
        raise site.error("an approximate top-k has no dim")
    (name,) = site.attribute("called_computations")
    sorted_rows = site.build.add(
        "sort",
        *site.operands[:count],
        dimensions=(int(match[1]),),
        is_stable=True,
        called=(site.lowering.function(name),),
    )
    return [
        site.build.slice(part, (0,) * shape.rank, shape.dims)
        for part, shape in zip(site.parts(sorted_rows), site.operation.shapes)
    ]


def erf(site: LoweringSite) -> HloInstruction:
    """The error function."""
    return site.build.add("erf", site.operands[0])


TARGETS: dict[str, Callable[[LoweringSite], HloInstruction | Sequence[HloInstruction]]] = {
    **dict.fromkeys(_MARKS, mark),
    "ApproxTopK": approximate_top_k,
    "mhlo.erf": erf,
    "mhlo.topk": top_k,
}


def custom_call(site: LoweringSite) -> HloInstruction | Sequence[HloInstruction]:
    target = site.required("call_target_name")
    if target in TARGETS:
        return TARGETS[target](site)
    shapes = _with_layouts(site.operation.shapes, site.attribute("result_layouts"))
    inputs = [o.shape for o in site.operands]
    operand_layouts = site.attribute("operand_layouts")
    constraints = None
    if operand_layouts:
        listed = ", ".join(str(s) for s in _with_layouts(inputs, operand_layouts))
        constraints = Verbatim("{" + listed + "}")
    single = len(shapes) == 1
    typed = site.attribute("mhlo.backend_config") is not None  # JAX's form of calls of the typed interface
    version = 4 if typed else int(site.attribute("api_version", 1))
    call = site.build.add(
        "custom-call",
        *site.operands,
        shape=shapes[0] if single else tuple_of(shapes),
        custom_call_target=target,
        operand_layout_constraints=constraints,
        custom_call_has_side_effect=bool(site.attribute("has_side_effect", False)),
        output_to_operand_aliasing=_aliases(site),
        api_version=_VERSIONS.get(version),
        called=[site.lowering.function(name) for name in site.attribute("called_computations") or ()],
    )
    call.backend_config = _backend_config(site)
    return site.parts(call)


def _with_layouts(shapes: Sequence[Shape], layouts: Any) -> list[Shape]:
    """Shapes in the stated layouts (minor to major), row-major by default."""
    if not layouts:
        return [s.filled() for s in shapes]
    return [s.with_layout([int(d) for d in order.reshape(-1)]) for s, order in zip(shapes, layouts)]


def _aliases(site: LoweringSite) -> tuple[OutputAlias, ...] | None:
    listed = site.attribute("output_operand_aliases") or ()
    return tuple(OutputAlias(output, operand, index) for output, operand, index in listed) or None


def _backend_config(site: LoweringSite) -> str:
    """The configuration as written: a dictionary of typed values, or a string."""
    for name in ("mhlo.backend_config", "backend_config"):
        text = site.attribute(name, "")
        if text.startswith("{"):
            return text
    return "" if text in ("", '""') else quote(unquote(text))


_ALGORITHMS = {"DEFAULT": "rng_default", "THREE_FRY": "rng_three_fry", "PHILOX": "rng_philox"}
_DISTRIBUTIONS = {"UNIFORM": "rng_uniform", "NORMAL": "rng_normal"}


def rng_bit_generator(site: LoweringSite) -> Sequence[HloInstruction]:
    """Random bits and the state after them."""
    generator = site.build.add(
        "rng-bit-generator",
        site.operands[0],
        shape=tuple_of(site.operation.shapes),
        algorithm=_ALGORITHMS[site.required("rng_algorithm")],
    )
    return site.parts(generator)


def rng(site: LoweringSite) -> HloInstruction:
    """Random numbers without a state: any of the distribution; the shape operand is known from the result."""
    a, b, _ = site.operands
    distribution = _DISTRIBUTIONS[site.required("rng_distribution")]
    return site.build.add("rng", a, b, shape=site.shape, distribution=distribution)


RULES: dict[str, Rule] = {
    "stablehlo.custom_call": custom_call,
    "stablehlo.rng": rng,
    "stablehlo.rng_bit_generator": rng_bit_generator,
}
