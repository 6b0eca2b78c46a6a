"""The result of a search for a plan: a ranked table, pictures, and configurations."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpmd.brief import as_html, bytes_text, counted, few_lines, seconds_text
from mpmd.config.config import Config, make_config
from mpmd.config.topology import Topology, make_topology
from mpmd.options import current_options
from mpmd.planning.candidates import PlanCandidate, PlanCandidates, PlanChoice
from mpmd.scheduling.render_svg import render_svg
from mpmd.tracing.stages.select.automatic import by_cost

_SHOWN = 10
_REASONS = 6


@dataclasses.dataclass(frozen=True)
class Plan:
    """Ways to run a step, the best first; made by `plan`.

    Attributes:
        candidates: those that can be used, best first.
        refused: those that cannot, each with the reason.
        bind: the step with a number of microbatches.
        options: of `make_config`: shardings.
        seconds: how long the search took.
    """

    candidates: PlanCandidates
    refused: PlanCandidates
    bind: Callable[[int], Callable[..., Any]] = dataclasses.field(repr=False)
    options: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    seconds: float = dataclasses.field(default=0.0, compare=False)

    def __repr__(self) -> str:
        counts = f"{counted(len(self.candidates), 'candidate')}, {len(self.refused):,} refused"
        return few_lines([f"Plan of {counts}", *(f"  {k}. {c!r}" for k, c in enumerate(self.candidates, 1))])

    def _repr_html_(self) -> str:
        """The table above the predicted timelines of the first ones, for notebooks."""
        return as_html(str(self), self.as_svg())

    @property
    def best(self) -> PlanCandidate:
        """The fastest that fits."""
        return self.candidates[0]

    @functools.cached_property
    def config(self) -> Config:
        """The configuration of the best, for `mpmd.jit`."""
        return self.config_of(0)

    @property
    def step(self) -> Callable[..., Any]:
        """The step with the number of microbatches of the best."""
        return self.step_of(0)

    def config_of(self, rank: int) -> Config:
        """The configuration of a candidate, from 0.

        Raises:
            ConfigError: its devices are not on this machine.
        """
        return config_for(self.candidates[rank].choice, self.options)

    def step_of(self, rank: int) -> Callable[..., Any]:
        """The step with the number of microbatches of a candidate."""
        return self.bind(self.candidates[rank].choice.microbatches)

    def __str__(self) -> str:
        rows = [_HEADINGS, *(_row(k, c) for k, c in enumerate(self.candidates[:_SHOWN], 1))]
        widths = [max(len(row[k]) for row in rows) for k in range(len(_HEADINGS))]
        lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
        more = len(self.candidates) - _SHOWN
        lines += [f"and {more} slower"] if more > 0 else []
        return "\n".join([*lines, *self._reasons()])

    def _reasons(self) -> list[str]:
        """Why others were refused, the fastest of each reason first."""
        if not self.refused:
            return []
        lines = [f"{len(self.refused)} refused:"]
        shown: dict[str, str] = {}
        for candidate in sorted(self.refused, key=lambda c: c.order):
            shown.setdefault(candidate.refused, candidate.choice.text)
        lines += [f"  {what}: {reason}" for reason, what in itertools.islice(shown.items(), _REASONS)]
        return [*lines, *([f"  and {len(shown) - _REASONS} more"] if len(shown) > _REASONS else [])]

    def as_svg(self, count: int = 3) -> str:
        """A picture of the predicted timelines of the first ones."""
        timelines = [
            dataclasses.replace(c.timeline, title=f"{rank}. {c.choice.text}")
            for rank, c in enumerate(self.candidates[:count], 1)
            if c.timeline is not None
        ]
        return render_svg(*timelines)

    def write_svg(self, path: str | Path, count: int = 3) -> None:
        """Writes the picture to a file."""
        Path(path).write_text(self.as_svg(count), encoding="utf-8")


_HEADINGS = (
    "", "step", "bubble", "microbatches", "meshes", "stages", "schedule", "remat",
    "peak per device", "held there", "sent", "by", "exchanges",
)  # fmt: skip


def _row(rank: int, candidate: PlanCandidate) -> tuple[str, ...]:
    choice = candidate.choice
    mesh = candidate.peak_bytes.index(max(candidate.peak_bytes))
    held = sorted(candidate.held[mesh].items(), key=lambda kind: (-kind[1], kind[0]))
    total = sum(size for _, size in held) or 1
    what = " ".join(f"{name} {size / total:.0%}" for name, size in held[:2] if size)
    return (
        str(rank),
        seconds_text(candidate.step_s) + ("" if candidate.is_measured else " est."),
        f"{candidate.bubble:.0%}",
        str(choice.microbatches),
        choice.meshes_text,
        str(len(choice.placement)),
        choice.schedule,
        "yes" if choice.rematerialise else "no",
        f"{bytes_text(max(candidate.peak_bytes))} on m{mesh}",
        what,
        bytes_text(candidate.sent_bytes),
        "program" if candidate.is_partitioned or candidate.is_measured else "estimate",
        _exchanges(choice),
    )


def _exchanges(choice: PlanChoice) -> str:
    """How the devices of a mesh exchange gradients and weights."""
    if choice.devices == 1:
        return "none"
    return ", ".join(f"{name}={value}" for name, value in choice.exchanges) or "once"


def config_for(choice: PlanChoice, options: dict[str, Any], topology: Topology | None = None) -> Config:
    """The configuration of a choice.

    Args:
        choice: of meshes, stages and schedule.
        options: of `make_config`.
        topology: by default of devices of this machine.

    Raises:
        ConfigError: its devices are not on this machine.
    """
    sizes = dict(choice.axes)
    if topology is None:
        topology = make_topology({f"m{mesh}": sizes for mesh in range(choice.meshes)})
    if choice.exchanges:
        chosen: dict[str, Any] = dict(choice.exchanges)
        options = {**options, "options": dataclasses.replace(current_options(), **chosen)}
    stages = dataclasses.replace(
        by_cost(over=[f"m{mesh}" for mesh in choice.placement], rematerialise=choice.rematerialise),
        starts=choice.starts,
    )
    schedule = choice.schedule if choice.meshes > 1 else None
    return make_config(topology, stages=stages, schedule=schedule, **options)
