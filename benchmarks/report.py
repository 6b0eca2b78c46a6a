"""Writes what result files say into README and `docs/benchmarks.md`.

    python benchmarks/report.py            # both pages, from the newest complete file of benchmarks/results
    python benchmarks/report.py --check    # exit status 1 if a page differs from the file

A row of the table is a sentence of `ROWS` with figures of one benchmark: medians over its runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import script  # noqa: E402
from benchmarks.compare import figures_of  # noqa: E402

MAX_IDLE_LOAD = 0.75
"""Runnable processes per core before a benchmark; above, others ran.  The benchmark before it counts, too."""
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- results: written by benchmarks/report.py -->\n", "<!-- end of results -->\n"


class ResultFigures:
    """The figures of one result file; `figures("train_step.mpmd.wall_s")` is the median of its runs."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.result: dict[str, Any] = json.loads(path.read_text())
        self._medians = {name: statistics.median(runs) for name, runs in figures_of(self.result).items()}

    def __call__(self, name: str) -> float:
        return self._medians[name]

    def command(self, benchmark: str) -> str:
        """How the figures of a benchmark were measured."""
        return str(self.result["benchmarks"][benchmark]["command"])

    @property
    def machine(self) -> str:
        """`AMD EPYC, 2 cores`."""
        machine = self.result["machine"]
        return f"{machine['cpu']}, {machine['cores']} cores"


def seconds(value: float) -> str:
    """`2.4 s`, `94 ms`, `5.1 µs`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size or unit == "µs":
            return f"{value / size:.{0 if value >= 100 * size else 2 if value < 10 * size else 1}f} {unit}"
    raise AssertionError


def times(value: float) -> str:
    """`1.49 times`."""
    return f"{value:.2f} times"


@dataclasses.dataclass(frozen=True)
class TableRow:
    """One row of the table.

    Attributes:
        what: was measured.
        benchmark: whose figures these are.
        ours: the cell with our figures.
        instead: the cell with alternatives measured in the same run; empty if there are none.
        key: the figure that the page follows over time, and the meaning of it.
    """

    what: str
    benchmark: str
    ours: Callable[[ResultFigures], str]
    instead: Callable[[ResultFigures], str]
    key: tuple[str, str]


def _train(f: ResultFigures, side: str) -> str:
    wall, cpu = (f(f"train_step.{side}.{kind}_s") for kind in ("wall", "cpu"))
    return f"{seconds(wall)}, {cpu:.2f} CPU-s"


def _partition(f: ResultFigures) -> str:
    return " and ".join(seconds(f(f"compile_time.partition_s_{count}")) for count in (8, 64))


def _peer(f: ResultFigures) -> str:
    return "Shardy's C++ passes: " + " and ".join(
        seconds(f(f"compile_time.rows.{row}.peer")) for row in (0, 1)
    )


def _bubbles(f: ResultFigures) -> str:
    return ", ".join(
        f"{name} {f(f'zero_bubble.{name}.measured_bubble'):.0%}" for name in ("zb_h1", "zb_h2", "zb_v")
    )


def _block(f: ResultFigures, side: str) -> str:
    return ", ".join(
        f"{dtype} {seconds(f(f'fragment_speed.block_{side}_ms.{dtype}') / 1e3)}" for dtype in ("f32", "bf16")
    )


ROWS = (
    TableRow(
        "a step of 8 transformer layers, 4 stages, 8 microbatches",
        "train_step",
        lambda f: _train(f, "mpmd"),
        lambda f: (
            f"`jax.jit` with `scan` on one device: {_train(f, 'jit_one_device')}; "
            f"data parallel: {_train(f, 'jit_data_parallel')}"
        ),
        ("train_step.wall_ratio", "the step over `jax.jit`'s"),
    ),
    TableRow(
        "partitioning 12 layers, 8 and 64 microbatches, after tracing",
        "compile_time",
        _partition,
        _peer,
        ("compile_time.over_peer_8", "CPU time of partitioning over Shardy's, 8 microbatches"),
    ),
    TableRow(
        "tracing, partitioning and compiling 12 layers of width 768, 4 stages, 8 microbatches",
        "compile_time",
        lambda f: seconds(f("compile_time.whole_s")),
        lambda f: f"`jax.jit`: {seconds(f('compile_time.whole_jit_s'))}",
        ("compile_time.whole_over_jit", "compiling over `jax.jit`"),
    ),
    TableRow(
        "issuing one instruction of a step's streams",
        "runtime_overhead",
        lambda f: seconds(f("runtime_overhead.us_per_instruction") * 1e-6),
        lambda f: "",
        ("runtime_overhead.us_per_instruction", "microseconds per instruction"),
    ),
    TableRow(
        "stages that sleep, under 1F1B: the step as measured over the step as predicted, and the part of it "
        "that ideal 1F1B takes",
        "schedule_efficiency",
        lambda f: (
            f"{times(f('schedule_efficiency.measured_over_simulated'))}, "
            f"{f('schedule_efficiency.efficiency'):.1%}"
        ),
        lambda f: "",
        ("schedule_efficiency.efficiency", "part of a sleeping step that ideal 1F1B takes"),
    ),
    TableRow(
        "four stages that sleep: idle part of a step with split backwards",
        "zero_bubble",
        _bubbles,
        lambda f: f"1F1B: {f('zero_bubble.1f1b.measured_bubble'):.0%}",
        ("zero_bubble.zb_h1.measured_bubble", "idle part under ZB-H1"),
    ),
    TableRow(
        "a step with stages by cost over that with stages by hand, ten small models, geometric mean",
        "plan_quality",
        lambda f: times(f("plan_quality.auto_over_hand")),
        lambda f: "",
        ("plan_quality.auto_over_hand", "stages by cost over stages by hand"),
    ),
    TableRow(
        "the first three plans of two models: predicted over measured, the worst",
        "plan_quality",
        lambda f: times(f("plan_quality.predicted_over_measured")),
        lambda f: "",
        ("plan_quality.predicted_over_measured", "plans: predicted over measured, the worst"),
    ),
    TableRow(
        "searching a plan for 48 layers on 8 described devices",
        "plan_quality",
        lambda f: seconds(f("plan_quality.search_s")),
        lambda f: "",
        ("plan_quality.search_s", "seconds of the search"),
    ),
    TableRow(
        "a transformer block of GPT-2's width, forward and backward, one thread",
        "fragment_speed",
        lambda f: _block(f, "native"),
        lambda f: "XLA: " + _block(f, "xla"),
        ("fragment_speed.block_f32", "speed of blocks over XLA's, f32, geometric mean of both sizes"),
    ),
    TableRow(
        "fragments of transformers, MLPs, ViTs, experts and Adam on one thread, geometric mean",
        "fragment_speed",
        lambda f: "",
        lambda f: (
            f"XLA takes {times(f('fragment_speed.geomean_f32'))} as long; "
            f"bf16 {times(f('fragment_speed.geomean_bf16'))}"
        ),
        ("fragment_speed.geomean_bf16", "speed over XLA's, bf16"),
    ),
    TableRow(
        "compiling these fragments, in CPU time",
        "fragment_speed",
        lambda f: "",
        lambda f: f"XLA takes {times(f('fragment_speed.compile'))} as long",
        ("fragment_speed.compile", "XLA's time to compile fragments over ours"),
    ),
    TableRow(
        "runs of fragments in recorded steps that take within 25 % of their median, by backend",
        "timeline_accuracy",
        lambda f: ", ".join(
            f"{name} {f(f'timeline_accuracy.backends.{name}.within_25_percent'):.1%}"
            for name in ("native", "xla")
        ),
        lambda f: "",
        ("timeline_accuracy.within_25_percent", "recorded fragments within 25 % of their median"),
    ),
    TableRow(
        "the peak of live bytes of a step, as predicted over as measured",
        "step_memory",
        lambda f: times(f("step_memory.predicted_over_live")),
        lambda f: "",
        ("step_memory.predicted_over_live", "predicted peak over live bytes"),
    ),
    TableRow(
        "four processes: the part of a sleeping step that ideal 1F1B takes (`eager_1f1b`, 16 microbatches); "
        "the example's step over that in one process",
        "processes",
        lambda f: f"{f('processes.efficiency_4'):.1%}; {times(f('processes.example_over_one_process'))}",
        lambda f: "",
        ("processes.example_over_one_process", "the example in four processes over one"),
    ),
)


def result_files() -> list[Path]:
    """Complete results in `benchmarks/results`, oldest first."""
    read = {path: json.loads(path.read_text()) for path in sorted(RESULTS.glob("[0-9]*.json"))}
    return sorted((path for path in read if read[path]["complete"]), key=lambda path: read[path]["time"])


def described(f: ResultFigures) -> str:
    """Date, machine and versions of the measurement."""
    result = f.result
    counts = sorted({len(entry["runs"]) for entry in result["benchmarks"].values()})
    runs = " or ".join(map(str, counts)) + f" run{'s' * (counts[-1] > 1)}"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    loads = [run["load_before"] for entry in result["benchmarks"].values() for run in entry["runs"]]
    busy = statistics.median(loads) > MAX_IDLE_LOAD * result["machine"]["cores"]
    load = "; **other programs ran beside them**" if busy else ""
    return (
        f"{f.machine}, {result['time'][:10]}, commit `{result['commit'][:12]}`; {versions}. Each figure is "
        f"the median of {runs}, in which both sides take turns{load}."
    )


def table(f: ResultFigures) -> str:
    """All rows, with the command of each."""
    lines = [f"| | ours | others, jax {f.result['versions']['jax']} | command |", "|---|---|---|---|"]
    lines += [
        f"| {row.what} | {row.ours(f)} | {row.instead(f)} | `{f.command(row.benchmark)}` |" for row in ROWS
    ]
    return "\n".join(lines) + "\n"


def over_time(files: list[ResultFigures]) -> str:
    """The figure of each row in each file, a table per machine."""
    parts = []
    for machine in sorted({f.machine for f in files}):
        own = [f for f in files if f.machine == machine][-6:]
        parts.append(f"\n### {machine}\n\n| | {' | '.join(f.result['time'][:10] for f in own)} |")
        parts.append("|---|" + "---|" * len(own))
        parts.append("| commit | " + " | ".join(f"`{f.result['commit'][:8]}`" for f in own) + " |")
        for row in ROWS:
            name, meaning = row.key
            parts.append(f"| {meaning} | " + " | ".join(f"{f(name):.3g}" for f in own) + " |")
    return "\n".join(parts) + "\n"


def readme(text: str, f: ResultFigures) -> str:
    """README with the table of a file."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert before and after, "README has no place for results"
    return f"{before}{BEGIN}\n{described(f)}\n\n{table(f)}\n{END}{after}"


PAGE = """<!-- written by benchmarks/report.py -->

# Benchmarks

`make bench` measures all of this anew, in at most 15 minutes on two idle cores, and writes a file in
`benchmarks/results`; `make bench ARGS="--only train_step"` measures a part.
`python benchmarks/compare.py A.json B.json` says which figures of two files differ by more than their noise,
and `python benchmarks/suite.py --beside CHECKOUT` measures two checkouts in turns. The figures of others are
measured in the same runs, with the versions that are named here, on this machine; they are not quoted.

## Newest results

{described}

File `{name}`.

{table}
## Over time

The newest six files of each machine.
{over_time}"""


def page(files: list[ResultFigures]) -> str:
    """The whole of `docs/benchmarks.md`."""
    newest = files[-1]
    return PAGE.format(
        described=described(newest), name=newest.name, table=table(newest), over_time=over_time(files)
    )


def pages() -> dict[Path, str]:
    """What README and the page should be."""
    files = [ResultFigures(path) for path in result_files()]
    path = ROOT / "README.md"
    return {path: readme(path.read_text(), files[-1]), ROOT / "docs" / "benchmarks.md": page(files)}


def stale() -> list[Path]:
    """Pages that differ from the newest file."""
    return [path for path, text in pages().items() if not path.exists() or path.read_text() != text]


def write_pages() -> None:
    """Writes both pages."""
    for path, text in pages().items():
        path.write_text(text)


def main() -> None:
    """Writes or checks the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        write_pages()
    elif stale():
        sys.exit(f"differs from the newest result file: {', '.join(path.name for path in stale())}")


if __name__ == "__main__":
    script.run(main)
