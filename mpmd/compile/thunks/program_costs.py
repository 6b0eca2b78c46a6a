"""Compute-bound and memory-bound time of a fragment, kernel by kernel.

Each kernel is priced twice for a device: at the speed of light, and as projected.  A kernel whose projection
is mostly arithmetic is compute-bound; everything else, starting kernels and the call itself included, is
memory-bound, as no faster arithmetic would shorten it.

Source: the split of a step into a compute-intensive and a memory-intensive part, as TAO draws it.

A picture of a fragment's time: a bar per kernel, coloured by its limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from mpmd.compile.cost.kernel_work import attention_workloads, plan_workload, product_workloads
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.kernels.operations import DTYPE_BYTES
from mpmd.compile.kernels.planner.collectives import CollectiveArray, CollectivePlan
from mpmd.compile.thunks.thunk import (
    AttentionThunk,
    CollectiveThunk,
    ConditionalThunk,
    CopyThunk,
    DeviceThunk,
    KernelThunk,
    MatmulThunk,
    SimpleThunk,
    Thunk,
    WhileThunk,
)
from mpmd.cost.device import Device
from mpmd.cost.roofline import Estimate, KernelWorkload, combined, projected, speed_of_light

COMPUTE, MEMORY = "compute", "memory"
_BAR = 24


@dataclass(frozen=True)
class KernelCost:
    """The cost of one kernel of a fragment in a call.

    Attributes:
        label: its description.
        times: how often a call runs it.
        flops: of all these runs, one per elementwise operation, two per multiply-add.
        bytes: lower bound of the bytes that all these runs move.
        light: at the speed of light, of one run.
        projection: as projected, of one run.
    """

    label: str
    times: int
    flops: float
    bytes: float
    light: Estimate
    projection: Estimate

    @property
    def seconds(self) -> float:
        return self.times * self.projection.seconds

    @property
    def limit(self) -> str:
        """`compute` or `memory`: its bound; starting it counts as memory."""
        return COMPUTE if self.projection.limiter == "compute" else MEMORY


@dataclass(frozen=True)
class FragmentCosts:
    """The costs of the kernels of a fragment.

    Attributes:
        device: the device model.
        kernels: in the order of their first runs.
    """

    device: Device
    kernels: tuple[KernelCost, ...]

    def seconds(self, limit: str) -> float:
        """Projected seconds of a call that one limit bounds, those of the call itself among `memory`."""
        overhead = self.device.call_seconds if limit == MEMORY else 0.0
        return sum(k.seconds for k in self.kernels if k.limit == limit) + overhead

    @property
    def all_seconds(self) -> float:
        """Projected seconds of a call."""
        return self.seconds(COMPUTE) + self.seconds(MEMORY)

    def totals(self) -> dict[str, float]:
        """For `cost_analysis`."""
        return {
            "compute-bound seconds": self.seconds(COMPUTE),
            "memory-bound seconds": self.seconds(MEMORY),
        }

    def text(self) -> str:
        """A table: the longest kernels first, then both sums, and a bar for the share of each."""
        whole = self.all_seconds
        lines = [_device_line(self.device), _HEAD]
        for k in sorted(self.kernels, key=lambda k: -k.seconds):
            lines.append(
                f"{k.seconds / whole:6.1%} {_us(k.seconds)} {_us(k.times * k.light.seconds)}  {k.limit:7} "
                f"{k.flops / 1e6:10.3f} {k.bytes / 1e6:9.3f} {k.times:5}  {_bar(k.seconds / whole)} {k.label}"
            )
        call = self.device.call_seconds
        share = f"{call / whole:6.1%} {_us(call)}"
        gap = " " * (len(_HEAD.partition("limit")[0]) - len(share))
        lines.append(f"{share}{gap}{MEMORY:7} {'':26}  {_bar(call / whole)} the call itself")
        for limit in (COMPUTE, MEMORY):
            part = self.seconds(limit)
            count = sum(k.limit == limit for k in self.kernels)
            lines.append(
                f"{part / whole:6.1%} {_us(part)}  {limit}-bound: {count} of {len(self.kernels)} kernels"
            )
        return "\n".join(lines) + "\n"


_HEAD = " share  projected us    light us  limit        MFLOP        MB  runs"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:11.2f}"


def _bar(share: float) -> str:
    return ("█" * round(share * _BAR)).ljust(_BAR, "·")


def _device_line(device: Device) -> str:
    rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {dtype}" for dtype, rate in device.matmul_flops)
    return f"on {device.name}: {rates}; {device.bandwidth / 1e9:.1f} GB/s"


def fragment_costs(thunks: Sequence[Thunk], module: HloModule, device: Device) -> FragmentCosts:
    """The costs of a sequence of thunks.

    Args:
        thunks: the work of a fragment.
        module: says how often loops run; where it does not say, they run once.
        device: what they are priced for: a description, so that they are always the same.
    """
    trips = trip_counts(module)
    by_kernel: dict[str, tuple[SimpleThunk, list[KernelWorkload], int, list[str]]] = {}
    for thunk, times in _runs(thunks, trips, 1):
        kind, text = _identity(thunk)
        known = by_kernel.get(text)
        if known is None:
            work = thunk_workloads(thunk)
            if work:
                by_kernel[text] = (thunk, work, times, [kind, thunk.name])
        else:
            first, work, before, names = known
            by_kernel[text] = (first, work, before + times, [*names, thunk.name])
    kernels = tuple(
        _priced(f"{names[0]} {_names(names[1:])}", work, times, device)
        for _, work, times, names in by_kernel.values()
    )
    return FragmentCosts(device, kernels)


def _priced(label: str, work: Sequence[KernelWorkload], times: int, device: Device) -> KernelCost:
    return KernelCost(
        label,
        times,
        times * sum(w.flops for w in work),
        times * sum(w.memory_bytes for w in work),
        combined([speed_of_light(w, device) for w in work], device),
        combined([projected(w, device) for w in work], device),
    )


def _names(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - 3} more" if len(distinct) > 3 else ""
    return ", ".join(distinct[:3]) + more


def trip_counts(module: HloModule) -> dict[str, int]:
    """Trip counts of loops, by their names, where known."""
    trips = {}
    for computation in module.call_order():
        for instruction in computation:
            if instruction.opcode == "while" and instruction.known_trip_count is not None:
                trips[instruction.name] = instruction.known_trip_count
    return trips


def _runs(thunks: Sequence[Thunk], trips: Mapping[str, int], times: int) -> Iterator[tuple[SimpleThunk, int]]:
    """Every kernel with how often it runs; of a conditional the branch with most kernels."""
    for thunk in thunks:
        if isinstance(thunk, WhileThunk):
            yield from _runs((*thunk.condition, *thunk.body), trips, times * trips.get(thunk.name, 1))
        elif isinstance(thunk, ConditionalThunk):
            yield from _runs(max(thunk.branches, key=len), trips, times)
        else:
            yield thunk, times


def _identity(thunk: SimpleThunk) -> tuple[str, str]:
    """A kernel in a few words, and text that is equal for thunks that run the same kernel."""
    if isinstance(thunk, KernelThunk):
        return f"{thunk.plan.kind} {'x'.join(map(str, thunk.plan.extents))}", thunk.plan.text()
    if isinstance(thunk, MatmulThunk):
        p = thunk.plan
        follows = " + epilogue" if p.epilogue is not None else ""
        return f"matmul {'x'.join(map(str, (*p.batch, p.m, p.n, p.k)))} {p.a.dtype}{follows}", p.text()
    if isinstance(thunk, AttentionThunk):
        return f"attention {'x'.join(map(str, thunk.plan.rows.extents))}", thunk.plan.text()
    if isinstance(thunk, CopyThunk):
        return f"copy of {thunk.source.size} bytes", f"copy {thunk.source.size}"
    return thunk.line().split()[0], f"{thunk.line().split()[0]} {thunk.name}"


def thunk_workloads(thunk: SimpleThunk) -> list[KernelWorkload]:
    """The work of one run of a kernel, its parts one after the other; empty if there is none."""
    if isinstance(thunk, KernelThunk):
        return [plan_workload(thunk.plan)]
    if isinstance(thunk, MatmulThunk):
        return product_workloads(thunk.plan)
    if isinstance(thunk, AttentionThunk):
        return attention_workloads(thunk.plan)
    if isinstance(thunk, CopyThunk):
        size = float(thunk.source.size)
        return [KernelWorkload("copy", 0.0, 0.0, size, 0.0, size, parts=max(1, thunk.source.size // 8192))]
    if isinstance(thunk, CollectiveThunk):
        return [_collective_workload(thunk.plan, a) for a in thunk.plan.arrays if a.size]
    assert isinstance(thunk, DeviceThunk)
    return []


def _collective_workload(plan: CollectivePlan, array: CollectiveArray) -> KernelWorkload:
    """The work of the device that gets most: to read all parts, and to write them or their reduction."""
    parts = max(map(len, plan.sources))
    part = float(array.rows * array.elements * DTYPE_BYTES[array.dtype])
    if array.reduction is None:
        return KernelWorkload("copy", 0.0, 0.0, parts * part, 0.0, parts * part, max(1, int(part) // 8192))
    pair = plan_workload(array.reduction)
    flops, vector_bytes = (parts - 1) * pair.flops, (parts - 1) * pair.vector_bytes
    return KernelWorkload("loop", flops, vector_bytes, parts * part, 0.0, part, pair.parts)


_WIDTH, _MARGIN, _ROW, _LABELS, _FIGURES = 960, 20, 18, 360, 150
_COLOURS = {COMPUTE: "#0072b2", MEMORY: "#d55e00"}  # of Okabe and Ito; no phase has these
_MAX_ROWS = 40
_LETTER, _LETTERS = 6.8, 50
"""Pixels of a letter; letters of a label, which ends before its bar."""


def cost_plot(costs: FragmentCosts) -> str:
    """An SVG: above, the compute-bound and memory-bound shares of a call; below, its kernels.

    Args:
        costs: of a fragment.  Of more than 40 kernels the fastest share one bar per limit.
    """
    rows = _rows(costs)
    height = 3 * _MARGIN + _ROW * (len(rows) + 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        *_division(costs),
    ]
    longest = max(seconds for _, seconds, _, _ in rows)
    scale = (_WIDTH - 2 * _MARGIN - _LABELS - _FIGURES) / longest
    whole = costs.all_seconds
    for number, (label, seconds, light, limit) in enumerate(rows):
        y = 2 * _MARGIN + _ROW * (number + 1)
        x = _MARGIN + _LABELS
        title = escape(f"{label}: {seconds * 1e6:.2f} µs, at the speed of light {light * 1e6:.2f} µs")
        short = escape(label if len(label) <= _LETTERS else label[: _LETTERS - 1] + "…")
        lines += [
            f'<text x="{_MARGIN}" y="{y + 12}">{short}</text>',
            f'<rect x="{x}" y="{y + 2}" width="{seconds * scale:.1f}" height="{_ROW - 4}" '
            f'fill="{_COLOURS[limit]}" fill-opacity="0.55"><title>{title}</title></rect>',
            f'<rect x="{x}" y="{y + 2}" width="{light * scale:.1f}" height="{_ROW - 4}" '
            f'fill="{_COLOURS[limit]}"><title>{title}</title></rect>',
            f'<text x="{x + seconds * scale + 4:.1f}" y="{y + 12}">{seconds * 1e6:.1f} us, '
            f"{seconds / whole:.1%}</text>",
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _division(costs: FragmentCosts) -> list[str]:
    whole, at, lines = costs.all_seconds, float(_MARGIN), []
    for limit in (COMPUTE, MEMORY):
        part = costs.seconds(limit)
        width = (_WIDTH - 2 * _MARGIN) * part / whole
        said = f"{limit}-bound {part * 1e6:.1f} µs, {part / whole:.0%}"
        lines.append(
            f'<rect x="{at:.1f}" y="{_MARGIN}" width="{width:.1f}" height="{_ROW}" '
            f'fill="{_COLOURS[limit]}"><title>{said}</title></rect>'
        )
        at += width
    x = float(_MARGIN)
    for limit in (COMPUTE, MEMORY):
        said = f"{limit}-bound {costs.seconds(limit) * 1e6:.1f} µs ({costs.seconds(limit) / whole:.0%})"
        lines.append(f'<rect x="{x:.1f}" y="5" width="10" height="10" fill="{_COLOURS[limit]}"/>')
        lines.append(f'<text x="{x + 14:.1f}" y="14">{said}</text>')
        x += 14 + _LETTER * len(said) + 16
    said = f"on {escape(costs.device.name)}; the full colour is the speed of light"
    return [*lines, f'<text x="{x:.1f}" y="14">{said}</text>']


def _rows(costs: FragmentCosts) -> list[tuple[str, float, float, str]]:
    """(label, projected seconds, those at the speed of light, limit) of each bar, longest first."""
    rows = [(k.label, k.seconds, k.times * k.light.seconds, k.limit) for k in costs.kernels]
    rows.sort(key=lambda row: -row[1])
    shown, rest = rows[:_MAX_ROWS], rows[_MAX_ROWS:]
    for limit in (COMPUTE, MEMORY):
        small = [row for row in rest if row[3] == limit]
        if small:
            seconds, light = sum(row[1] for row in small), sum(row[2] for row in small)
            shown.append((f"{len(small)} more kernels", seconds, light, limit))
    return [*shown, ("the call itself", costs.device.call_seconds, 0.0, MEMORY)]
