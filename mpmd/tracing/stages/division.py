"""Where to divide a chain of operations into stages: few bytes cross, and no stage has much more work.

Before each unit of the chain is a place.  The candidates are places where hardly more bytes cross than
anywhere within half a stage's work.  Dynamic programming over them finds the smallest possible work of the
heaviest stage; a second pass finds, among the divisions that are hardly worse than that, the one that sends
least.
Where few bytes cross only far from the middle, as in networks with skip connections, the same is done with
candidates that are compared with places closer by; the result is taken if the step is clearly shorter,
messages included.

Source: balance by dynamic programming over operations in order as in Alpa (Zheng et al., 2022), which bounds
the arithmetic and minimises the bytes sent.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence

_NARROW = 1.1
"""Bytes at a candidate, in units of the fewest nearby."""

_BALANCED = 1.02
"""Work of the heaviest stage, in units of the smallest possible, for which fewer bytes may be sent."""

_WINDOWS = (0.5, 0.125, 0.0)
"""How far around a candidate bytes are compared, in units of a stage's work, one after the other."""

_SHORTER = 0.9
"""Seconds of the slowest stage with its messages, in units of those where fewer bytes cross."""

_MAX_PLACES = 300


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
    """

    seconds: Sequence[float]
    crossing: Sequence[int]
    residuals: Sequence[int]
    parameters: Sequence[tuple[int, float, Sequence[int]]]
    fused: frozenset[int] = frozenset()
    forward: Sequence[float] = ()

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
    """The best division, and the candidates that it was chosen from; None if nothing is within the limit."""
    best, best_places = None, list[int]()
    for window in _WINDOWS:
        places = candidates(segments, stages, window)
        if len(places) < stages - 1 or places == best_places:
            continue
        found = best_division(segments, stages, places)
        if found is not None and (best is None or segments.busy_s(found) < _SHORTER * segments.busy_s(best)):
            best, best_places = found, places
        if best is None:
            best_places = places
    return best, best_places


def candidates(segments: Segments, stages: int, window: float) -> list[int]:
    """The places to divide at: few bytes cross there, compared with places nearby.

    A place within one kernel is only a candidate if there are too few others.

    Args:
        segments: of the chain.
        stages: how many.
        window: how far around a place, in units of a stage's work.
    """
    chain, count = segments.chain, len(segments.chain)
    ends = [0.0, *itertools.accumulate(chain.seconds)]
    near = ends[-1] / stages * window
    least = _RangeMinimum(chain.crossing)
    free = [k for k in range(1, count) if k not in chain.fused]
    narrow = []
    for k in free if len(free) >= stages - 1 else range(1, count):
        low = max(1, bisect.bisect_left(ends, ends[k] - near))
        high = min(count, bisect.bisect_right(ends, ends[k] + near))
        if not window or chain.crossing[k] <= _NARROW * least(low, high):
            narrow.append(k)
    if len(narrow) > _MAX_PLACES:
        by_bytes = sorted(narrow, key=lambda k: (chain.crossing[k], k))
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
    """The division at given places."""
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
                found = math.inf
                for begin in range(end - 1, -1, -1):
                    if begin not in best:
                        continue
                    own = self.cost(stage, begin, end)
                    found = min(found, max(own, best[begin]))
                    if own >= found or math.isinf(own):
                        break  # earlier begins have more work, and hold more
                if not math.isinf(found):
                    following[end] = found
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
