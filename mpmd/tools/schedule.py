"""``mpmd-schedule``: compares pipeline schedules on the command line, as a table and a chart.

mpmd-schedule --stages 8 --meshes 4 --microbatches 8
mpmd-schedule --stages 4 --microbatches 8 --schedules 1f1b,zb_h1,my.csv --chart --html out.html
mpmd-schedule --stages 4 --microbatches 8 --forward 7,10,12,9 --limit 4 --search
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpmd.errors import ScheduleError
from mpmd.scheduling.catalogue import SCHEDULES, PipelineSchedule, ScheduleTable, from_csv, get_schedule
from mpmd.scheduling.chrome_trace import chrome_trace
from mpmd.scheduling.definition import PipelineShape
from mpmd.scheduling.render import render_text, unit_of
from mpmd.scheduling.render_html import render_html
from mpmd.scheduling.render_svg import legible_width, render_svg
from mpmd.scheduling.search import SchedulingProblem, search
from mpmd.scheduling.simulate import peak_activations, simulate
from mpmd.scheduling.task_costs import Costs, Link, StageCosts
from mpmd.scheduling.timeline import Timeline
from mpmd.tools.command_line import run_script, version_text


@dataclass(frozen=True)
class _ComparedSchedule:
    name: str
    table: ScheduleTable
    timeline: Timeline


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the requested tables and files; returns 0, or 1 after an error."""
    options = _parser().parse_args(argv)
    try:
        if options.list:
            _list(options)
            return 0
        costs = _costs(options)
        link = Link(latency_s=options.latency)
        entries, problems = _compare(options, costs, link)
        if options.search:
            entries.append(_searched(options, costs, link))
    except ScheduleError as error:
        print(f"mpmd-schedule: {error}", file=sys.stderr)
        return 1
    _print_table(entries)
    for problem in problems:
        print(problem)
    if options.chart:
        for entry in entries:
            print()
            print(render_text(entry.timeline, options.width), end="")
    _write_files(options, entries)
    return 0 if entries else 1


def _list(options: argparse.Namespace) -> None:
    """A line for each schedule: idle time, activations and weights on the fullest mesh, and what it does.

    Both are in units of a mesh's part of the model, whether it has one stage or two.
    """
    meshes = options.meshes or options.stages
    if meshes < 1 or options.microbatches < 1:
        raise ScheduleError(
            f"{meshes} meshes and {options.microbatches} microbatches; expected at least one of each"
        )
    print(f"{meshes} meshes, {options.microbatches} microbatches; a backward takes as long as two forwards\n")
    print(f"{'schedule':<17}{'idle':>5}{'activations':>13}{'weights':>9}  what it does")
    for name in sorted(SCHEDULES):
        table = get_schedule(name).smallest_table(meshes, options.microbatches)
        summary = (SCHEDULES[name].__doc__ or "").strip().splitlines()[0].replace("``", "").rstrip(".")
        held, weights = max(peak_activations(table)) * meshes / table.num_stages, _copies_of_weights(table)
        idle = simulate(table).bubble_fraction()
        print(f"{name:<17}{idle:>5.0%}{held:>13.3g}{weights:>9.3g}  {summary}")


def _copies_of_weights(table: ScheduleTable) -> float:
    """Weights on the fullest mesh, in units of a mesh's part of the model."""
    held = collections.Counter(table.stage_to_mesh)
    if table.mirror is not None:
        held.update(table.mirror.stage_to_mesh)
    return max(held.values()) * table.num_meshes / table.num_stages


def run() -> None:
    run_script(main)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpmd-schedule",
        description="Compare pipeline schedules by prediction: step time, idle time, memory.",
    )
    parser.add_argument("--version", action="version", version=version_text("mpmd-schedule"))
    parser.add_argument("--list", action="store_true", help="list the schedules, and what each costs")
    parser.add_argument("--stages", type=int, default=4, help="stages of the program; by default 4")
    parser.add_argument("--meshes", type=int, help="meshes; by default as many as stages")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches of one step; by default 8")
    parser.add_argument(
        "--schedules", default="all", help="names and CSV files, with commas; by default all for training"
    )
    parser.add_argument("--placement", help="mesh of each stage, with commas, as in 0,1,1,0")
    parser.add_argument(
        "--forward", default="1", help="seconds of F: one for all stages, or one each, with commas"
    )
    parser.add_argument("--backward", help="seconds of B; by default twice F")
    parser.add_argument("--input_gradient", help="seconds of I; by default half of B")
    parser.add_argument("--weight_gradient", help="seconds of W; by default B less I")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds of a transfer")
    parser.add_argument("--residual_bytes", default="0", help="bytes a stage keeps for its backward")
    parser.add_argument("--limit", type=int, help="limit of stages' activations on a mesh, for --search")
    parser.add_argument("--search", action="store_true", help="look for a better schedule")
    parser.add_argument("--chart", action="store_true", help="draw every schedule as text")
    parser.add_argument("--width", type=int, default=150, help="columns of the chart")
    parser.add_argument("--svg", type=Path, help="write the fastest schedule as a picture")
    parser.add_argument("--html", type=Path, help="write the fastest schedule as a page")
    parser.add_argument("--trace", type=Path, help="write all schedules as a Perfetto trace")
    parser.add_argument("--csv", type=Path, help="write the fastest schedule as CSV")
    return parser


def _numbers(text: str, count: int, option: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ScheduleError(
            f"--{option}: {text!r} is not a list of numbers\n  expected: one, or several with commas: 1,2.5,3"
        ) from error
    if len(values) not in (1, count):
        raise ScheduleError(
            f"--{option} gives {len(values)} numbers\n  expected: one, or one for each of {count} stages"
        )
    return values * (count if len(values) == 1 else 1)


def _costs(options: argparse.Namespace) -> Costs:
    count = options.stages
    forward = _numbers(options.forward, count, "forward")
    backward = _numbers(options.backward, count, "backward") if options.backward else [2 * f for f in forward]
    if options.input_gradient:
        first = _numbers(options.input_gradient, count, "input_gradient")
    else:
        first = [b / 2 for b in backward]
    if options.weight_gradient:
        second = _numbers(options.weight_gradient, count, "weight_gradient")
    else:
        second = [max(0.0, b - i) for b, i in zip(backward, first, strict=True)]
    residuals = [int(r) for r in _numbers(options.residual_bytes, count, "residual_bytes")]
    return Costs(
        tuple(
            StageCosts(f, b, i, w, residual_bytes=r)
            for f, b, i, w, r in zip(forward, backward, first, second, residuals, strict=True)
        )
    )


def _placement(options: argparse.Namespace) -> tuple[int, ...] | None:
    if options.placement is None:
        return None
    return tuple(int(mesh) for mesh in _numbers(options.placement, options.stages, "placement"))


def _compare(
    options: argparse.Namespace, costs: Costs, link: Link
) -> tuple[list[_ComparedSchedule], list[str]]:
    """All schedules that can order the problem; why the others cannot, and remarks on those that can."""
    everything = options.schedules == "all"
    training = [name for name, kind in SCHEDULES.items() if kind.has_backward]
    names = training if everything else options.schedules.split(",")
    entries, problems = [], []
    for name in names:
        schedule: PipelineSchedule = from_csv(Path(name)) if name.endswith(".csv") else get_schedule(name)
        try:
            meshes = options.meshes or options.stages
            table = schedule.table(options.stages, meshes, options.microbatches, _placement(options))
        except ScheduleError as error:
            if not everything:
                raise
            problems.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        shape = PipelineShape(meshes, options.microbatches, table.stage_to_mesh)
        problems += [f"{name}: {remark.splitlines()[0]}" for remark in schedule.remarks(shape)]
        entries.append(_ComparedSchedule(name, table, simulate(table, costs, link, title=name)))
    return entries, problems


def _searched(options: argparse.Namespace, costs: Costs, link: Link) -> _ComparedSchedule:
    problem = SchedulingProblem(
        costs,
        options.meshes or options.stages,
        options.microbatches,
        link,
        stage_to_mesh=_placement(options),
        limit_activations=options.limit,
    )
    result = search(problem)
    print(result.report(), end="")
    weights = _copies_of_weights(result.table)
    print(f"weights on its fullest mesh: {weights:.3g} times a mesh's part of the model\n")
    return _ComparedSchedule(f"search ({result.origin})", result.table, result.timeline)


def _print_table(entries: Sequence[_ComparedSchedule]) -> None:
    wide = max([len(entry.name) for entry in entries] + [8])
    unit, unit_name = unit_of(entries[0].timeline) if entries else (1.0, "s")
    step = f"step, {unit_name}"
    head = f"{step:>12} {'idle':>7} {'activations':>12} {'weights':>8} {'residual bytes':>15}"
    print(f"{'schedule':<{wide}} {head}")
    for entry in sorted(entries, key=lambda e: e.timeline.makespan_s):
        line = entry.timeline
        most = max((memory.peak_bytes for memory in line.memory), default=0)
        weights = _copies_of_weights(entry.table)
        print(
            f"{entry.name:<{wide}} {line.makespan_s / unit:>12.6g} {line.bubble_fraction():>7.1%} "
            f"{max(peak_activations(entry.table)):>12} {weights:>8.3g} "
            f"{most:>15,}"
        )


def _write_files(options: argparse.Namespace, entries: Sequence[_ComparedSchedule]) -> None:
    if not entries:
        return
    fastest = min(entries, key=lambda entry: entry.timeline.makespan_s)
    contents: dict[Path | None, Callable[[], str]] = {
        options.svg: lambda: render_svg(fastest.timeline, width=legible_width(fastest.timeline)),
        options.html: lambda: render_html(fastest.timeline),
        options.csv: lambda: fastest.table.as_csv(),
        options.trace: lambda: chrome_trace(*(entry.timeline for entry in entries)),
    }
    for path, content in contents.items():
        if path is not None:
            path.write_text(content(), encoding="utf-8")


if __name__ == "__main__":
    run()
