"""Some results of a function, or ranges of them, computed without the others.

An initialization function creates the whole state of a program; a mesh needs its own part.  `DemandedJaxpr`
finds out which operands of every equation are needed for wanted ranges of results.  A rule says how an
operation is computed for a range, and `random_bits` computes random numbers for one, in one loop without
temporaries.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from mpmd.jax_compat import place_of, rebind, scan_counts
from mpmd.tracing.stages.stacked.part_rules import ELEMENTWISE, REDUCTIONS


@dataclasses.dataclass(frozen=True)
class Range:
    """Indices from `start` to before `stop` along a dim; all of the others."""

    dim: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def along(self, dim: int) -> Range:
        return dataclasses.replace(self, dim=dim)


@dataclasses.dataclass(frozen=True)
class RangeComputation:
    """How a range of a result is computed.

    Attributes:
        operands: positions of the operands that it reads, each with the range that it reads; None for all.
        compute: the range, from these.
    """

    operands: tuple[tuple[int, Range | None], ...]
    compute: Callable[[Sequence[Any]], Any]


def sliced(value: Any, wanted: Range) -> Any:
    return jax.lax.slice_in_dim(value, wanted.start, wanted.stop, axis=wanted.dim)


def bytes_of(aval: Any) -> int:
    """Bytes of an array; those of a random key are not counted."""
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def random_bits(equation: Any, wanted: Range | None) -> RangeComputation | None:
    """A range of the keys, or of the first dim of the bits of each key; None for other dims and generators.

    Args:
        equation: of the primitive `random_bits`.
        wanted: the range; None for all bits.

    Source: `jax.random.bits` with `jax_threefry_partitionable`: element n of the flat array of a key is
    computed from the halves of n, 32 bits each.
    """
    keys, shape, bits = equation.invars[0].aval, equation.params["shape"], equation.params["bit_width"]
    rank, row = len(keys.shape), math.prod(shape[1:])
    known = jax.config.jax_threefry_partitionable and "fry" in str(keys.dtype)
    if not known or row >= 1 << 32 or bits not in (8, 16, 32):
        return None
    read, rows = wanted, Range(0, 0, shape[0] if shape else 1)
    if wanted is not None and wanted.dim >= rank:
        read, rows = None, wanted.along(0)
        if wanted.dim > rank:
            return None
    ends = np.arange(rows.start, rows.stop, dtype=np.uint64) * np.uint64(row)
    high, low = (ends >> np.uint64(32)).astype(np.uint32), ends.astype(np.uint32)

    def compute(given: Sequence[Any]) -> Any:
        data = jax.random.key_data(given[0])
        first, second = (data[..., k].reshape(*data.shape[:-1], 1, *[1] * len(shape[1:])) for k in range(2))
        of_row = (rows.size, *[1] * len(shape[1:]))
        within = jax.lax.iota(np.uint32, row).reshape(1, *shape[1:])
        lower = jnp.asarray(low).reshape(of_row) + within
        upper = jnp.asarray(high).reshape(of_row) + (lower < within).astype(np.uint32)
        one, other = _threefry(first, second, upper, lower)
        return (
            (one ^ other)
            .astype(f"uint{bits}")
            .reshape(*data.shape[:-1], *([rows.size] if shape else []), *shape[1:])
        )

    return RangeComputation(((0, read),), compute)


def _threefry(first: Any, second: Any, upper: Any, lower: Any) -> tuple[Any, Any]:
    """Two words of random bits for each word of a key, and of a position; `u32` arrays that are broadcast.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011: Threefry-2x32 with 20 rounds.
    """
    keys = first, second, first ^ second ^ _PARITY
    one, other = upper + keys[0], lower + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            one = one + other
            other = one ^ (other << np.uint32(distance) | other >> np.uint32(32 - distance))
        one = one + keys[(group + 1) % 3]
        other = other + keys[(group + 2) % 3] + np.uint32(group + 1)
    return one, other


Rule = Callable[[Any, Range], RangeComputation | None]
"""Of an equation with one result, and a range of it; None if it must be computed whole."""


def _again(equation: Any, operands: Sequence[Range | None], **changed: Any) -> RangeComputation:
    return RangeComputation(tuple(enumerate(operands)), lambda given: rebind(equation, given, **changed)[0])


def _resized(shape: Sequence[int], wanted: Range) -> tuple[int, ...]:
    return (*shape[: wanted.dim], wanted.size, *shape[wanted.dim + 1 :])


def _elementwise(equation: Any, wanted: Range) -> RangeComputation | None:
    """Operands of the shape of the result; scalars and dims of size 1 are repeated."""
    shape = equation.outvars[0].aval.shape
    operands: list[Range | None] = []
    for operand in equation.invars:
        own = operand.aval.shape
        if len(own) not in (0, len(shape)):
            return None
        operands.append(wanted if own and own[wanted.dim] == shape[wanted.dim] else None)
    return _again(equation, operands)


def _broadcast_in_dim(equation: Any, wanted: Range) -> RangeComputation | None:
    shape, dims = equation.params["shape"], equation.params["broadcast_dimensions"]
    own = equation.invars[0].aval.shape
    read = None
    if wanted.dim in dims:
        at = dims.index(wanted.dim)
        read = wanted.along(at) if own[at] == shape[wanted.dim] else None
    if len(equation.invars) != 1 or equation.params.get("sharding") is not None:
        return None
    return _again(equation, [read], shape=_resized(shape, wanted))


def _reshape(equation: Any, wanted: Range) -> RangeComputation | None:
    """A dim that stays: as many elements before it, and of the same size."""
    shape, own = equation.outvars[0].aval.shape, equation.invars[0].aval.shape
    if equation.params.get("dimensions") is not None or equation.params.get("sharding") is not None:
        return None
    before = math.prod(shape[: wanted.dim])
    for dim, size in enumerate(own):
        if math.prod(own[:dim]) == before and size == shape[wanted.dim]:
            return _again(equation, [wanted.along(dim)], new_sizes=_resized(shape, wanted))
    return None


def _squeeze(equation: Any, wanted: Range) -> RangeComputation | None:
    kept = [k for k in range(len(equation.invars[0].aval.shape)) if k not in equation.params["dimensions"]]
    return _again(equation, [wanted.along(kept[wanted.dim])])


def _transpose(equation: Any, wanted: Range) -> RangeComputation | None:
    return _again(equation, [wanted.along(equation.params["permutation"][wanted.dim])])


def _reduction(equation: Any, wanted: Range) -> RangeComputation | None:
    axes = equation.params["axes"]
    kept = [k for k in range(len(equation.invars[0].aval.shape)) if k not in axes]
    return _again(equation, [wanted.along(kept[wanted.dim])])


def _iota(equation: Any, wanted: Range) -> RangeComputation | None:
    dtype, shape, dim = (equation.params[k] for k in ("dtype", "shape", "dimension"))
    if equation.invars or equation.params.get("sharding") is not None:
        return None

    def compute(_: Sequence[Any]) -> Any:
        numbers = jax.lax.broadcasted_iota(dtype, _resized(shape, wanted), dim)
        return numbers + jax.numpy.asarray(wanted.start, dtype) if dim == wanted.dim else numbers

    return RangeComputation((), compute)


def _concatenate(equation: Any, wanted: Range) -> RangeComputation | None:
    along = equation.params["dimension"]
    if along != wanted.dim:
        return _again(equation, [wanted] * len(equation.invars))
    read: list[tuple[int, Range | None]] = []
    begin = 0
    for k, operand in enumerate(equation.invars):
        end = begin + operand.aval.shape[along]
        start, stop = max(begin, wanted.start), min(end, wanted.stop)
        if start < stop:
            read.append((k, Range(along, start - begin, stop - begin)))
        begin = end
    return RangeComputation(tuple(read), lambda given: jax.lax.concatenate(given, along))


def _slice(equation: Any, wanted: Range) -> RangeComputation | None:
    starts, limits, strides = (equation.params[k] for k in ("start_indices", "limit_indices", "strides"))
    dim = wanted.dim
    if strides is not None and strides[dim] != 1:
        return None
    read = Range(dim, starts[dim] + wanted.start, starts[dim] + wanted.stop)
    changed = {
        "start_indices": (*starts[:dim], 0, *starts[dim + 1 :]),
        "limit_indices": (*limits[:dim], wanted.size, *limits[dim + 1 :]),
    }
    return _again(equation, [read], **changed)


def _of_keys(equation: Any, wanted: Range) -> RangeComputation | None:
    """One computation for each random key: a range of keys gives a range of results."""
    keys = equation.invars[0].aval.shape
    return _again(equation, [wanted]) if wanted.dim < len(keys) else None


def _random_bits(equation: Any, wanted: Range) -> RangeComputation | None:
    return random_bits(equation, wanted) or _of_keys(equation, wanted)


RULES: dict[str, Rule] = {
    **dict.fromkeys((*ELEMENTWISE, "bitcast_convert_type", "random_clone", "random_fold_in"), _elementwise),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(("random_seed", "random_split", "random_wrap", "random_unwrap"), _of_keys),
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "iota": _iota,
    "concatenate": _concatenate,
    "slice": _slice,
    "random_bits": _random_bits,
}
"""Name of a primitive → its rule."""


Demand: TypeAlias = Range | None
"""A range of a value, or None for all of it."""

Given: TypeAlias = dict[Demand, Any]
"""A value, and ranges of it, as far as they are needed."""

CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint")


@dataclasses.dataclass(frozen=True)
class ComputedWhole:
    """A value that no rule divides although a range of it is wanted.

    Attributes:
        primitive: name of the operation that computes it.
        place: in the user's source.
        whole_bytes, range_bytes: sizes of the value and of the range.
    """

    primitive: str
    place: str
    whole_bytes: int
    range_bytes: int


class Values:
    """The values of the variables of a jaxpr, or of ranges of them."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, Demand], Any] = {}

    def put(self, variable: Any, demand: Demand, value: Any) -> None:
        self._known[variable, demand] = value

    def get(self, variable: Any, demand: Demand) -> Any:
        """A value; a range of one that is known whole is sliced."""
        if isinstance(variable, Literal):
            return variable.val
        if (variable, demand) not in self._known:
            assert demand is not None
            self.put(variable, demand, sliced(self._known[variable, None], demand))
        return self._known[variable, demand]


Step = Callable[[Values], None]


class DemandedJaxpr:
    """The equations of a jaxpr that wanted results need, each for the ranges that are needed.

    Attributes:
        inputs: for each argument the ranges that are needed; none for one that is not.
        constants: likewise for each constant.
        whole: operations that compute more than is wanted.
    """

    def __init__(self, jaxpr: Any, wanted: Sequence[Sequence[Demand]]) -> None:
        """Takes for each result the ranges that are wanted; none for one that is not."""
        self._jaxpr = jaxpr
        self._demands: dict[Any, dict[Demand, None]] = {}
        self._steps: list[Step] = []
        self.whole: list[ComputedWhole] = []
        for variable, demands in zip(jaxpr.outvars, wanted, strict=True):
            for demand in demands:
                self._need(variable, demand)
        self._wanted = wanted
        for equation in reversed(jaxpr.eqns):
            needed = [list(self._demands.get(v, ())) for v in equation.outvars]
            if any(needed):
                self._steps.append(self._step(equation, needed))
        self._steps.reverse()
        self.inputs = [list(self._demands.get(v, ())) for v in jaxpr.invars]
        self.constants = [list(self._demands.get(v, ())) for v in jaxpr.constvars]

    def run(self, constants: Sequence[Given], arguments: Sequence[Given]) -> list[Given]:
        """Computes the wanted results.

        Args:
            constants: for each constant its value, or its ranges' values.
            arguments: likewise for each argument.
        """
        values = Values()
        variables = (*self._jaxpr.constvars, *self._jaxpr.invars)
        for variable, given in zip(variables, (*constants, *arguments), strict=True):
            for demand, value in given.items():
                values.put(variable, demand, value)
        for step in self._steps:
            step(values)
        results = zip(self._jaxpr.outvars, self._wanted, strict=True)
        return [{demand: values.get(v, demand) for demand in demands} for v, demands in results]

    def _need(self, variable: Any, demand: Demand) -> None:
        if not isinstance(variable, Literal):
            self._demands.setdefault(variable, {})[demand] = None

    def _step(self, equation: Any, demands: list[list[Demand]]) -> Step:
        name = equation.primitive.name
        if name == "sharding_constraint":  # the shardings of the step decide
            return self._forwarding(equation, demands[0])
        if name in CALLS:
            return self._call(equation, demands)
        ranges = [demand for of_result in demands for demand in of_result]
        if None not in ranges:
            step = self._scan(equation, demands) if name == "scan" else self._in_ranges(equation, demands)
            if step is not None:
                return step
            self._note(equation, demands)
        for variable in equation.invars:
            self._need(variable, None)
        if name == "random_bits" and (bits := random_bits(equation, None)) is not None:
            return functools.partial(_whole_bits, equation, bits)
        return functools.partial(_whole, equation)

    def _forwarding(self, equation: Any, demands: list[Demand]) -> Step:
        (operand,), (result,) = equation.invars, equation.outvars
        for demand in demands:
            self._need(operand, demand)

        def step(values: Values) -> None:
            for demand in demands:
                values.put(result, demand, values.get(operand, demand))

        return step

    def _in_ranges(self, equation: Any, demands: list[list[Demand]]) -> Step | None:
        """One computation for each wanted range of the only result."""
        rule = RULES.get(equation.primitive.name)
        if rule is None or len(equation.outvars) != 1:
            return None
        ranges = [demand for demand in demands[0] if demand is not None]
        computations = [rule(equation, wanted) for wanted in ranges]
        if any(computation is None for computation in computations):
            return None
        computation = [one for one in computations if one is not None]
        for one in computation:
            for operand, demand in one.operands:
                self._need(equation.invars[operand], demand)

        def step(values: Values) -> None:
            for wanted, one in zip(ranges, computation, strict=True):
                given = [values.get(equation.invars[k], demand) for k, demand in one.operands]
                values.put(equation.outvars[0], wanted, one.compute(given))

        return step

    def _call(self, equation: Any, demands: list[list[Demand]]) -> Step:
        body = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        inner = DemandedJaxpr(getattr(body, "jaxpr", body), demands)
        constants: list[Given] = [{None: value} for value in getattr(body, "consts", ())]
        place = place_of(equation)
        self.whole += [note if note.place else dataclasses.replace(note, place=place) for note in inner.whole]
        for variable, needed in zip(equation.invars, inner.inputs, strict=True):
            for demand in needed:
                self._need(variable, demand)

        def step(values: Values) -> None:
            given = zip(equation.invars, inner.inputs, strict=True)
            arguments = [{demand: values.get(v, demand) for demand in needed} for v, needed in given]
            for variable, result in zip(equation.outvars, inner.run(constants, arguments), strict=True):
                for demand, value in result.items():
                    values.put(variable, demand, value)

        return step

    def _scan(self, equation: Any, demands: list[list[Demand]]) -> Step | None:
        """Iterations of a scan whose rows are wanted; those before only compute the carried values."""
        params = equation.params
        constants, carried = scan_counts(params)
        ranges = {demand for of_result in demands for demand in of_result if demand is not None}
        if any(demands[:carried]) or any(wanted.dim for wanted in ranges):
            return None
        rows = [k for k, of_result in enumerate(demands) if of_result]
        body = _ScanBody(params, constants, carried, rows)
        for k in (*body.constants, *body.carried):
            self._need(equation.invars[k], None)
        for k in body.scanned:
            for wanted in ranges:
                for demand in body.rows_needed(wanted):
                    self._need(equation.invars[k], demand)

        def step(values: Values) -> None:
            for wanted in ranges:
                for k, result in zip(rows, body.run(equation, values, wanted), strict=True):
                    if wanted in demands[k]:
                        values.put(equation.outvars[k], wanted, result)

        return step

    def _note(self, equation: Any, demands: list[list[Demand]]) -> None:
        for variable, ranges in zip(equation.outvars, demands, strict=True):
            whole = bytes_of(variable.aval)
            for wanted in ranges:
                if wanted is not None and variable.aval.shape:
                    share = wanted.size / max(1, variable.aval.shape[wanted.dim])
                    name, place = equation.primitive.name, place_of(equation)
                    self.whole.append(ComputedWhole(name, place, whole, math.ceil(whole * share)))


def _whole(equation: Any, values: Values) -> None:
    results = rebind(equation, [values.get(v, None) for v in equation.invars])
    for variable, value in zip(equation.outvars, results, strict=True):
        values.put(variable, None, value)


def _whole_bits(equation: Any, bits: RangeComputation, values: Values) -> None:
    values.put(equation.outvars[0], None, bits.compute([values.get(equation.invars[0], None)]))


class _ScanBody:
    """The part of a scan that computes some of its stacked results."""

    def __init__(self, params: dict[str, Any], constants: int, carried: int, rows: Sequence[int]) -> None:
        body = params["jaxpr"]
        self._length, self._reverse = params["length"], params["reverse"]
        self._first_carried, self._first_scanned = constants, constants + carried
        wanted = set(rows)
        while True:  # until the carried values need no further ones
            results = range(len(body.jaxpr.outvars))
            self._body = DemandedJaxpr(body.jaxpr, [[None] if k in wanted else [] for k in results])
            needed = [k for k, of_input in enumerate(self._body.inputs) if of_input]
            more = {k - constants for k in needed if constants <= k < constants + carried} - wanted
            if not more:
                break
            wanted |= more
        self._rows = list(rows)
        self.constants = [k for k in needed if k < constants]
        self.carried = [constants + k for k in sorted(wanted) if k < carried]
        self.scanned = [k for k in needed if k >= constants + carried]
        self._inputs = len(body.jaxpr.invars)
        self._body_constants: list[Given] = [{None: value} for value in body.consts]

    def rows_needed(self, wanted: Range) -> list[Demand]:
        """The ranges of scanned operands that a range of results needs."""
        before = self._before(wanted)
        return [wanted] if before is None or not self.carried else [wanted, before]

    def _before(self, wanted: Range) -> Range | None:
        """The iterations before a range; None if there are none."""
        start, stop = (wanted.stop, self._length) if self._reverse else (0, wanted.start)
        return Range(0, start, stop) if stop > start else None

    def run(self, equation: Any, values: Values, wanted: Range) -> list[Any]:
        state = [values.get(equation.invars[k], None) for k in self.carried]
        before = self._before(wanted)
        if self.carried and before is not None:
            state, _ = self._scan(equation, values, state, before, rows=False)
        return self._scan(equation, values, state, wanted, rows=True)[1]

    def _scan(
        self, equation: Any, values: Values, state: list[Any], of: Range, *, rows: bool
    ) -> tuple[list[Any], list[Any]]:
        fixed = {k: values.get(equation.invars[k], None) for k in self.constants}
        scanned = [values.get(equation.invars[k], of) for k in self.scanned]

        def iteration(now: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            given = {**fixed, **dict(zip(self.carried, now)), **dict(zip(self.scanned, row))}
            arguments: list[Given] = [{None: given[k]} if k in given else {} for k in range(self._inputs)]
            result = self._body.run(self._body_constants, arguments)
            after = [result[k - self._first_carried][None] for k in self.carried]
            return after, [result[k][None] for k in self._rows] if rows else []

        return jax.lax.scan(iteration, state, scanned, of.size, self._reverse)
