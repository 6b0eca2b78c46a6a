"""The division of a chain of operations into stages, by their costs."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from mpmd.cost.device import Device
from mpmd.jax_compat import inner_jaxprs
from mpmd.tracing.stages.items import Item, numbers
from mpmd.tracing.stages.select.placement import size
from mpmd.tracing.stages.select.stage_report import equation_flops

_TRANSCENDENTAL = frozenset(
    ("acos", "asin", "atan", "atan2", "cbrt", "cos", "cosh", "digamma", "erf", "erf_inv", "erfc", "exp")
    + ("exp2", "expm1", "lgamma", "log", "log1p", "logistic", "pow", "sin", "sinh", "tan", "tanh")
)
_TRANSCENDENTAL_OPERATIONS = 16
"""Multiply-adds of the polynomial of a transcendental function."""

_FUSED_BYTES = 0.25
"""The part of elementwise results that reaches memory: a fused kernel keeps the others in registers."""

_GRADIENT_TRAFFIC = 3
"""Passes over the bytes of a gradient for each microbatch: it is written, and added to the sum so far."""

FORWARD_AND_BACKWARD = 3.0
"""Work of forward and backward in units of the forward: the gradient of a product is two products."""

REMATERIALISED = 4.0
"""Likewise under `jax.checkpoint`, which computes the forward again."""


def item_seconds(item: Item, device: Device) -> float:
    """Seconds of the forward of an item, all iterations of a loop included."""
    return equation_seconds(item.equation, device)


def equation_seconds(equation: Any, device: Device) -> float:
    """Seconds of an equation by the roofline: the slower of arithmetic and memory."""
    name = equation.primitive.name
    results = sum(size(v.aval) for v in equation.outvars)
    if name in ("dot_general", "conv_general_dilated"):
        moved = results + sum(size(v.aval) for v in equation.invars)
        flops = device.products_seconds(equation_flops(equation), _dtype_of_product(equation))
        return max(flops, moved / device.bandwidth)
    inner = [sum(equation_seconds(e, device) for e in jaxpr.eqns) for jaxpr in inner_jaxprs(equation)]
    if inner:
        return max(inner) * _iterations(equation)
    elements = sum(math.prod(getattr(v.aval, "shape", ())) for v in equation.outvars)
    if name.startswith(("reduce_", "arg", "cum", "sort")):
        elements = max(math.prod(getattr(v.aval, "shape", ())) for v in equation.invars)
    operations = _TRANSCENDENTAL_OPERATIONS if name in _TRANSCENDENTAL else 1
    return max(elements * operations / device.element_rate, results * _FUSED_BYTES / device.bandwidth)


def _dtype_of_product(equation: Any) -> Any:
    """The dtype at whose rate a product runs: its wider factor's, whatever the sums are kept in."""
    return max((v.aval.dtype for v in equation.invars[:2]), key=lambda dtype: dtype.itemsize)


def products_work(equations: Sequence[Any], device: Device) -> tuple[float, float]:
    """(operations, seconds of arithmetic) of the products in equations, loops and calls included."""
    flops = seconds = 0.0
    for equation in equations:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            own = equation_flops(equation)
            flops += own
            seconds += device.products_seconds(own, _dtype_of_product(equation))
        for jaxpr in inner_jaxprs(equation):
            of_inner = products_work(jaxpr.eqns, device)
            flops, seconds = flops + of_inner[0], seconds + of_inner[1]
    return flops, seconds


def _iterations(equation: Any) -> int:
    return int(equation.params.get("length", 1)) if equation.primitive.name == "scan" else 1


def work_factor(item: Item) -> float:
    """Forward and backward of an item in units of its forward."""
    return REMATERIALISED if item.checkpoints else FORWARD_AND_BACKWARD


def gradient_seconds(nbytes: float, device: Device) -> float:
    """Seconds to write the gradient of a parameter of that size and to add it, for each microbatch."""
    return _GRADIENT_TRAFFIC * nbytes / device.bandwidth


def saved_bytes(item: Item, avals: Any, constant: set[int]) -> int:
    """Bytes of an item's inputs that its backward reads, without parameters, which are there anyway.

    Linear operations save nothing; products save their operands, and other functions an array as large as
    their results.
    """
    name = item.equation.primitive.name
    if name in _LINEAR or item.checkpoints:
        return 0
    if name in ("dot_general", "conv_general_dilated", "mul", "gather"):
        return sum(size(avals[v]) for v in numbers(item.inputs) if v not in constant)
    inner = inner_jaxprs(item.equation)
    if inner:
        own = sum(_saved_in(e) for e in inner[0].eqns)
        return own * _iterations(item.equation)
    return sum(size(avals[v]) for v in item.outputs)


def _saved_in(equation: Any) -> int:
    """Bytes that one run of an equation inside of a loop or a call saves."""
    name = equation.primitive.name
    if name in _LINEAR or name in ("checkpoint", "remat", "remat2"):
        return 0
    inner = inner_jaxprs(equation)
    if inner:
        return sum(_saved_in(e) for e in inner[0].eqns) * _iterations(equation)
    return sum(size(v.aval) for v in equation.outvars)


_LINEAR = frozenset(
    ("add", "add_any", "sub", "neg", "reduce_sum", "reshape", "transpose", "broadcast_in_dim", "slice")
    + ("squeeze", "concatenate", "pad", "convert_element_type", "copy", "iota", "rev", "stop_gradient")
    + ("dynamic_slice", "dynamic_update_slice", "select_n", "eq", "ne", "lt", "le", "gt", "ge", "and", "or")
    + ("not", "argmax", "argmin", "sign", "floor", "ceil", "round", "expand_dims", "split")
)
"""Operations whose backward reads none of their values, but for masks, which are small."""


_NARROW = 1.1
"""Bytes at a candidate, in units of the fewest nearby."""

_BALANCED = 1.02
"""Work of the heaviest stage, in units of the smallest possible, for which fewer bytes may be sent."""

_WINDOWS = (0.5, 0.125, 0.0)
"""How far around a candidate bytes are compared, in units of a stage's work, one after the other."""

_SHORTER = 0.9
"""Seconds of the slowest stage with its messages, in units of those where fewer bytes cross."""

_MAX_PLACES = 300

MAX_IMBALANCE = 1.5
"""Work of a mesh, or of a stage, in units of the mean of all, beyond which loops are divided that share
parameters, and the user is warned."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """Units of work in the order of the program: operations, and iterations of scans.

    Attributes:
        seconds: forward and backward of each unit on one device, for one microbatch.
        crossing: bytes of the values that are computed before each unit, and read by it or later ones.
        residuals: bytes that each unit keeps for its backward.
        parameters: for each parameter its bytes, the seconds of its gradient, and the units that read it.
        fused: units that belong into one kernel with the unit before.
        forward: seconds of the forward of each unit.
        within: units of loops whose iterations share parameters: stages that begin there hold these, too.
    """

    seconds: Sequence[float]
    crossing: Sequence[int]
    residuals: Sequence[int]
    parameters: Sequence[tuple[int, float, Sequence[int]]]
    fused: frozenset[int] = frozenset()
    forward: Sequence[float] = ()
    within: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.seconds)


@dataclasses.dataclass(frozen=True)
class StageDivision:
    """A chain in stages.

    Attributes:
        starts: the first unit of every stage but the first.
        seconds: work of each stage for one microbatch on its devices.
        crossing: bytes that cross before each of them.
    """

    starts: tuple[int, ...]
    seconds: tuple[float, ...]
    crossing: tuple[int, ...]

    @property
    def heaviest(self) -> float:
        """Seconds of the stage with the most work."""
        return max(self.seconds)


@dataclasses.dataclass(frozen=True)
class Meshes:
    """Where the stages run.

    Attributes:
        devices: how many devices share the work of each stage.
        wire_s: seconds for each byte that crosses, both ways.
        limit: bytes that each stage may hold; None without a limit.
        state: bytes held for each byte of parameters: with gradients and the state of the optimizer.
    """

    devices: tuple[int, ...]
    wire_s: float = 0.0
    limit: int | None = None
    state: float = 4.0


class Segments:
    """Seconds and bytes of every range of units."""

    def __init__(self, chain: Chain, meshes: Meshes) -> None:
        self.chain, self.meshes = chain, meshes
        self._work = [0.0, *itertools.accumulate(chain.seconds)]
        self._kept = [0, *itertools.accumulate(chain.residuals)]
        self._owned: dict[int, tuple[list[int], list[float], list[float]]] = {}

    def owned(self, begin: int, end: int) -> tuple[float, float]:
        """Bytes of the parameters that the units from `begin` to `end` read, and their gradients' seconds."""
        if begin not in self._owned:
            first = sorted(
                (readers[at], nbytes, seconds)
                for nbytes, seconds, readers in self.chain.parameters
                if (at := bisect.bisect_left(readers, begin)) < len(readers)
            )
            self._owned[begin] = (
                [f[0] for f in first],
                [0.0, *itertools.accumulate(float(f[1]) for f in first)],
                [0.0, *itertools.accumulate(f[2] for f in first)],
            )
        readers_of, bytes_up_to, seconds_up_to = self._owned[begin]
        count = bisect.bisect_left(readers_of, end)
        return bytes_up_to[count], seconds_up_to[count]

    def seconds(self, stage: int, begin: int, end: int) -> float:
        """Work of a stage of these units; messages are sent meanwhile."""
        work = self._work[end] - self._work[begin] + self.owned(begin, end)[1]
        return work / self.meshes.devices[stage]

    def held(self, stage: int, begin: int, end: int) -> float:
        """Bytes that each device of a stage holds: state, and what microbatches under way keep."""
        waiting = len(self.meshes.devices) - stage
        kept = (self._kept[end] - self._kept[begin]) * waiting
        return (self.owned(begin, end)[0] * self.meshes.state + kept) / self.meshes.devices[stage]

    def fits(self, stage: int, begin: int, end: int) -> bool:
        """Whether a stage of these units is within the limit."""
        return self.meshes.limit is None or self.held(stage, begin, end) <= self.meshes.limit

    def busy_s(self, division: StageDivision) -> float:
        """Seconds of a microbatch on the slowest mesh, if it waits for its messages."""
        sent = (*division.crossing, 0)
        return max(s + nbytes * self.meshes.wire_s for s, nbytes in zip(division.seconds, sent, strict=True))

    def total_s(self) -> float:
        """Work of all units."""
        return self._work[-1] + self.owned(0, len(self.chain))[1]


def choose(segments: Segments, stages: int) -> tuple[StageDivision | None, list[int]]:
    """The best division, and the candidates that it was chosen from; None if nothing is within the limit.

    Loops whose iterations share parameters are divided only if the stages are not balanced otherwise.
    """
    within = segments.chain.within
    whole, places = _chosen(segments, stages, within)
    if not within or (whole is not None and whole.heaviest * stages <= MAX_IMBALANCE * sum(whole.seconds)):
        return whole, places
    divided, inner_places = _chosen(segments, stages, frozenset())
    if divided is None or (whole is not None and divided.heaviest >= whole.heaviest):
        return whole, places
    return divided, inner_places


def _chosen(
    segments: Segments, stages: int, besides: frozenset[int]
) -> tuple[StageDivision | None, list[int]]:
    best, best_places = None, list[int]()
    for window in _WINDOWS:
        places = candidates(segments, stages, window, besides)
        if len(places) < stages - 1 or places == best_places:
            continue
        division = best_division(segments, stages, places)
        if division is not None and (
            best is None or segments.busy_s(division) < _SHORTER * segments.busy_s(best)
        ):
            best, best_places = division, places
        if best is None:
            best_places = places
    return best, best_places


def candidates(
    segments: Segments, stages: int, window: float, besides: frozenset[int] = frozenset()
) -> list[int]:
    """The places to divide at: few bytes cross there, compared with places nearby.

    A place within one kernel, and one of `besides`, is only a candidate if there are too few others.

    Args:
        segments: of the chain.
        stages: how many.
        window: how far around a place, in units of a stage's work.
        besides: units at which no stage should start.
    """
    chain, count = segments.chain, len(segments.chain)
    ends = [0.0, *itertools.accumulate(chain.seconds)]
    near = ends[-1] / stages * window
    least = _RangeMinimum(chain.crossing)
    free = [k for k in range(1, count) if k not in chain.fused and k not in besides]
    narrow = []
    for k in free if len(free) >= stages - 1 else range(1, count):
        low = max(1, bisect.bisect_left(ends, ends[k] - near))
        high = min(count, bisect.bisect_right(ends, ends[k] + near))
        if not window or chain.crossing[k] <= _NARROW * least(low, high):
            narrow.append(k)
    if len(narrow) > _MAX_PLACES:
        # Of places where as many bytes cross, those in the order of their reversed bits are spread evenly.
        by_bytes = sorted(narrow, key=lambda k: (chain.crossing[k], f"{k:032b}"[::-1]))
        narrow = sorted(by_bytes[:_MAX_PLACES])
    return narrow


class _RangeMinimum:
    """Smallest value of a range, from a table of ranges whose lengths are powers of two."""

    def __init__(self, values: Sequence[int]) -> None:
        self._rows = [list(values)]
        width = 1
        while 2 * width <= len(values):
            row = self._rows[-1]
            self._rows.append([min(row[i], row[i + width]) for i in range(len(row) - width)])
            width *= 2

    def __call__(self, begin: int, end: int) -> int:
        power = (end - begin).bit_length() - 1
        row = self._rows[power]
        return min(row[begin], row[end - (1 << power)])


def best_division(segments: Segments, stages: int, places: Sequence[int]) -> StageDivision | None:
    """The best division; None if no division is within the limit of bytes.

    Args:
        segments: of the chain.
        stages: how many.
        places: candidates, in order.
    """
    ends = [0, *places, len(segments.chain)]
    weights = _DivisionTable(segments, stages, ends)
    heaviest = weights.smallest_maximum()
    if math.isinf(heaviest):
        return None
    starts = weights.fewest_bytes(heaviest * _BALANCED)
    return divided_at(segments, starts)


def divided_at(segments: Segments, starts: Sequence[int]) -> StageDivision:
    ends = [0, *starts, len(segments.chain)]
    seconds = [segments.seconds(s, a, b) for s, (a, b) in enumerate(itertools.pairwise(ends))]
    return StageDivision(
        tuple(starts), tuple(seconds), tuple(segments.chain.crossing[start] for start in starts)
    )


class _DivisionTable:
    """Dynamic programming over (stage, end of the stage)."""

    def __init__(self, segments: Segments, stages: int, ends: Sequence[int]) -> None:
        self.segments, self.stages, self.ends = segments, stages, ends
        self._cost: dict[tuple[int, int, int], float] = {}

    def cost(self, stage: int, begin: int, end: int) -> float:
        """Seconds of a stage between two places, by their numbers; infinite if it does not fit."""
        key = stage, begin, end
        if key not in self._cost:
            a, b = self.ends[begin], self.ends[end]
            fits = self.segments.fits(stage, a, b)
            self._cost[key] = self.segments.seconds(stage, a, b) if fits else math.inf
        return self._cost[key]

    def _reach(self, stage: int) -> range:
        """The numbers of places at which a stage may end."""
        last = len(self.ends) - 1
        return range(last, last + 1) if stage == self.stages - 1 else range(stage + 1, last)

    def smallest_maximum(self) -> float:
        """The work of the heaviest stage, as small as it gets."""
        best = {0: 0.0}
        for stage in range(self.stages):
            following = {}
            for end in self._reach(stage):
                smallest = math.inf
                for begin in range(end - 1, -1, -1):
                    if begin not in best:
                        continue
                    own = self.cost(stage, begin, end)
                    smallest = min(smallest, max(own, best[begin]))
                    if own >= smallest or math.isinf(own):
                        break  # earlier begins have more work, and hold more
                if not math.isinf(smallest):
                    following[end] = smallest
            best = following
        return best.get(len(self.ends) - 1, math.inf)

    def fewest_bytes(self, heaviest: float) -> list[int]:
        """Where stages start if the fewest bytes cross and no stage has more work than that."""
        best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
        for stage in range(self.stages):
            following = {}
            for end in self._reach(stage):
                place = self.ends[end]
                sent = 0 if place == len(self.segments.chain) else self.segments.chain.crossing[place]
                options = []
                for begin in range(end - 1, -1, -1):
                    own = self.cost(stage, begin, end)
                    if own > heaviest:
                        break
                    if begin in best:
                        so_far, most, starts = best[begin]
                        options.append((so_far + sent, max(most, own), (*starts, place)))
                if options:
                    following[end] = min(options)
            best = following
        return list(best[len(self.ends) - 1][2][:-1])
