"""Reports of a run: lines of progress, the schedule chart, pictures, and one line of JSON at the end."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from examples.pipelined_transformer.config import TrainConfig
from mpmd.scheduling.chrome_trace import chrome_trace
from mpmd.scheduling.render import CURVE_COLOUR, render_text
from mpmd.scheduling.render_svg import legible_width, render_svg
from mpmd.scheduling.timeline import Timeline

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Prints a line now and then, and keeps the time of every step."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._last_line = -_SECONDS_BETWEEN_LINES
        self.step_seconds: list[float] = []

    def step_done(self, step: int, loss: float, seconds: float, note: str = "") -> None:
        """One more step is done.

        Args:
            step: how many there are now, those before a resume included.
            loss: of this step.
            seconds: what it took.
            note: more to say; a line with a note is always printed.
        """
        self.step_seconds.append(seconds)
        now = time.perf_counter()
        if note or step == self._config.steps or now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(self._line(step, loss) + (f"   {note}" if note else ""), flush=True)

    def _line(self, step: int, loss: float) -> str:
        seconds = statistics.median(self.step_seconds[-20:])
        left = round((self._config.steps - step) * seconds)
        width = len(str(self._config.steps))
        return (
            f"step {step:{width}}/{self._config.steps}   loss {loss:.4f}   "
            f"{self._config.tokens_per_step / seconds:8,.0f} tokens/s   {left // 60}:{left % 60:02} left"
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The figures of a run; the last line that it prints.

    Attributes:
        steps: trained so far, those before a resume included.
        loss_first, loss_last: of the first and of the last step, in nats per token.
        max_rel_diff: see `Check`; None without a check.
        check_steps: how many steps were compared.
        bubble_measured: the part of the last step in which a mesh computed nothing, over all meshes.
        bubble: the same for each mesh.
        step_ms, jit_step_ms: median time of a step here, and of a compared step under plain `jax.jit`.
        native_step_ms, xla_step_ms: medians of steps by each compile backend; None if they were not compared.
        fallbacks: clusters and fragments that XLA compiled because native code does not have them.
        tokens_per_s: at the median step time.
        peak_bytes: predicted for each mesh.
        programs: how many distinct fragments were compiled.
        compile_s: seconds to partition and compile.
        seconds: of the whole run.
    """

    steps: int
    loss_first: float
    loss_last: float
    max_rel_diff: float | None
    check_steps: int
    bubble_measured: float
    bubble: Mapping[str, float]
    step_ms: float
    jit_step_ms: float | None
    native_step_ms: float | None
    xla_step_ms: float | None
    fallbacks: int
    tokens_per_s: float
    peak_bytes: Mapping[str, int]
    programs: int
    schedule: str
    num_stages: int
    num_microbatches: int
    devices_per_mesh: int
    backend: str
    compile_s: float
    seconds: float

    def to_json(self) -> str:
        """One line of JSON; figures with as many digits as mean something."""
        return json.dumps({name: _rounded(value) for name, value in dataclasses.asdict(self).items()})


def summary(outcome: Outcome, timeline: Timeline, text: str) -> str:
    """The summary of a finished run, without the last line."""
    meshes = "\n".join(
        f"  {mesh}: bubble {outcome.bubble[mesh]:6.1%}   peak {peak / 2**20:7.1f} MiB"
        for mesh, peak in outcome.peak_bytes.items()
    )
    compared = (
        "not compared with plain jax.jit (--nocheck)"
        if outcome.max_rel_diff is None
        else _why_they_differ(outcome, timeline)
    )
    return (
        f"\nWhat ran where in the last step, timed fragment by fragment (F forward, B backward):\n\n"
        f"{render_text(timeline, 130)}\n{meshes}\n\n"
        f"loss {outcome.loss_first:.4f} -> {outcome.loss_last:.4f} in {outcome.steps} steps of "
        f"{outcome.step_ms:.0f} ms, {outcome.programs} programs\n{compared}\n{_backends(outcome)}\n"
        f"The model writes:\n\n{text}\n"
    )


def _why_they_differ(outcome: Outcome, timeline: Timeline) -> str:
    """What differs from the steps of plain `jax.jit`, in numbers and in time, and why."""
    busiest = max(timeline.meshes, key=timeline.busy_s)
    busy_ms, idle_ms = 1e3 * timeline.busy_s(busiest), 1e3 * timeline.idle_s(busiest)
    return (
        f"largest difference from plain jax.jit over {outcome.check_steps} steps: "
        f"{outcome.max_rel_diff:.2e}\n"
        "  gradients are summed microbatch by microbatch and fused by fragment, so their rounding differs,\n"
        "  which Adam enlarges where a gradient is almost zero\n"
        f"its step took {outcome.jit_step_ms:.0f} ms, as one program of XLA on all cores, "
        "which the meshes share\n"
        f"  in the timed step {busiest} computed {busy_ms:.0f} ms ({outcome.backend} code), "
        f"and waited {idle_ms:.0f} ms for other meshes"
    )


def _backends(outcome: Outcome) -> str:
    """A line with the step time of both backends, if they were compared."""
    native, xla = outcome.native_step_ms, outcome.xla_step_ms
    if native is None or xla is None:
        return ""
    return f"one step: native {native:.0f} ms, XLA {xla:.0f} ms: native is {xla / native:.2f} times as fast\n"


def write_pictures(folder: Path, losses: Sequence[float], timeline: Timeline) -> list[Path]:
    """Writes the loss curve, the timeline as a picture and as a trace for Perfetto; returns the files."""
    files = [write_losses(folder, losses), folder / "timeline.svg", folder / "trace.json"]
    files[1].write_text(render_svg(timeline, width=legible_width(timeline)))
    files[2].write_text(chrome_trace(timeline))
    return files


def write_losses(folder: Path, losses: Sequence[float]) -> Path:
    """Writes the loss curve as a picture; returns the file."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss, nats per token", title="Training loss")
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1, color=CURVE_COLOUR)
    axes.grid(alpha=0.3)
    figure.savefig(folder / "loss.png", dpi=120)
    return folder / "loss.png"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return value
