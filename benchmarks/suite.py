"""Runs the benchmarks whose figures are kept, and writes them to one file.

    python benchmarks/suite.py [--only train_step,zero_bubble] [--rounds 3] [--minutes 15] [--quick]
                               [--beside CHECKOUT] [--out benchmarks/results]

Every round runs each benchmark once, as the command that the file shows, so that two runs of the same one
are minutes apart: their difference is the noise that `compare.py` allows for.  After the first round only
those run that would end within `--minutes`.  `--beside` is another checkout of this repository, whose
benchmarks take turns with these; it gets a file with its commit in the name.

The file `DATE-MACHINE.json` has the versions of Python, JAX and XLA, the CPU, the commit, and of each
benchmark its command, and for each round its seconds, the load of the machine before it, and its last line.
Benchmarks that run again at the same commit on the same day replace their entries in it; at another commit
they get a file with the commit in its name.  Once all of them are in a file, the table in README and
`docs/benchmarks.md` are written from it.  `--quick` runs with small sizes, to see whether the benchmarks
work; its figures mean nothing, and its file is not for the pages.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import report, script  # noqa: E402

TIMEOUT_S = 600
"""Seconds after which a benchmark has failed."""
PACKAGES = ("jax", "jaxlib", "numpy", "llvmlite", "flax", "optax")


@dataclasses.dataclass(frozen=True)
class SuiteEntry:
    """A benchmark of the suite.

    Attributes:
        name: of its file in `benchmarks/`.
        arguments: with which its figures are kept.
        quick: with which it only shows that it works.
    """

    name: str
    arguments: str
    quick: str

    def command(self, quick: bool) -> str:
        """What a reader types in the root of the repository."""
        return f"python benchmarks/{self.name}.py {self.quick if quick else self.arguments}".strip()


SUITE = (
    SuiteEntry("train_step", "--rounds 3", "--rounds 1 --steps 1 --stages 2"),
    SuiteEntry(
        "compile_time",
        "--microbatches 8 64 --repeats 2 --whole 2",
        "--microbatches 2 4 --layers 4 --stages 2 --repeats 1 --whole 0",
    ),
    SuiteEntry("runtime_overhead", "", "--meshes 2 --microbatches 4 --repeats 3"),
    SuiteEntry("schedule_efficiency", "--rounds 3", "--rounds 1 --steps 1 --microbatches 2"),
    SuiteEntry("zero_bubble", "--rounds 3 --svg docs/zero_bubble.svg", "--rounds 1"),
    SuiteEntry("plan_quality", "--rounds 6", "--rounds 1 --models separate --plans none --search 0"),
    SuiteEntry("fragment_speed", "--threads=1", "--threads=1 --sizes=small --only=mlp --rounds=1"),
    SuiteEntry("timeline_accuracy", "--steps 5", "--steps 2 --d_model 64 --batch_size 16"),
    SuiteEntry("step_memory", "--steps 2", "--layers 4 --width 64 --vocabulary 64 --stages 2 --steps 1"),
    SuiteEntry("processes", "--only efficiency,example --steps 5 --rounds 1", "--only efficiency --steps 1"),
)


def run_once(command: str, checkout: Path) -> dict[str, Any]:
    """Its last line, seconds and load; or the end of what it said, if it failed."""
    load = os.getloadavg()[0]
    start = time.perf_counter()
    arguments = [sys.executable, *shlex.split(command)[1:]]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    try:
        done = subprocess.run(
            arguments, cwd=checkout, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {TIMEOUT_S} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"failed": done.stderr[-2000:]}
    seconds = round(time.perf_counter() - start, 1)
    return {"seconds": seconds, "load_before": round(load, 2), "figures": json.loads(lines[-1])}


def run_suite(
    entries: list[SuiteEntry], checkouts: list[Path], rounds: int, minutes: float, quick: bool
) -> list[dict[str, Any]]:
    """For each checkout the results of all benchmarks, by name; checkouts take turns."""
    found = [{e.name: {"command": e.command(quick), "runs": []} for e in entries} for _ in checkouts]
    end, took = time.perf_counter() + 60 * minutes, dict[str, float]()
    for number in range(rounds):
        for entry in entries:
            start = time.perf_counter()
            if number and start + took[entry.name] > end:
                continue
            for checkout, results in zip(checkouts, found, strict=True):
                result = run_once(entry.command(quick), checkout)
                results[entry.name]["runs"].append(result)
                said = result.get("failed") or f"{result['seconds']:.0f} s"
                print(f"round {number + 1}, {checkout.name}, {entry.name}: {said}", flush=True)
            took[entry.name] = time.perf_counter() - start
    return found


def cpu_model() -> str:
    """As the system names it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.M) if info.exists() else []
    return names[0].strip() if names else platform.machine()


def machine() -> dict[str, Any]:
    """What the figures depend on, besides the code."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = len(os.sched_getaffinity(0))
    return {
        "cpu": cpu_model(),
        "cores": cores,
        "memory_GiB": round(pages / 2**30),
        "system": platform.system(),
    }


def versions() -> dict[str, str]:
    """Of Python, and of the packages whose code runs; jaxlib is XLA, of its build number."""
    from jaxlib import xla_client

    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **found, "xla": f"of jaxlib, client {xla_client._version}"}


def commit(checkout: Path) -> str:
    """Its commit, with `+` if files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    measured = ("mpmd", "benchmarks/*.py", "examples")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *measured)
    return git("rev-parse", "HEAD") + ("+" if changed else "")


def slug() -> str:
    """`amd-epyc-2-cores`."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"\(\w+\)|@.*", "", cpu_model().lower()))
    return f"{'-'.join(words)}-{machine()['cores']}-cores"


def is_complete(results: dict[str, Any]) -> bool:
    """Whether every benchmark of the suite ran as its figures are kept, and none failed."""
    return all(
        entry.name in results
        and results[entry.name]["command"] == entry.command(quick=False)
        and not any("failed" in run for run in results[entry.name]["runs"])
        for entry in SUITE
    )


def write(folder: Path, checkout: Path, results: dict[str, Any], now: datetime.datetime) -> dict[str, Any]:
    """Writes or completes the file of a commit; returns what it says."""
    at, date = commit(checkout), now.date().isoformat()
    path = folder / f"{date}-{slug()}.json"
    if path.exists() and json.loads(path.read_text())["commit"] != at:
        path = path.with_stem(f"{path.stem}-{at[:8]}")
    before = json.loads(path.read_text())["benchmarks"] if path.exists() else {}
    everything = {**before, **results}
    ordered = {entry.name: everything[entry.name] for entry in SUITE if entry.name in everything}
    result = {
        "time": now.isoformat(timespec="minutes"),
        "machine": machine(),
        "versions": versions(),
        "commit": at,
        "complete": is_complete(ordered),
        "benchmarks": ordered,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)
    return result


def main() -> None:
    """Runs the suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="names with commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    known = {entry.name: entry for entry in SUITE}
    chosen = options.only.split(",") if options.only else list(known)
    if unknown := sorted(set(chosen) - set(known)):
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    checkouts = [ROOT, *([options.beside.resolve()] if options.beside else [])]
    found = run_suite(
        [known[name] for name in chosen], checkouts, options.rounds, options.minutes, options.quick
    )
    now = datetime.datetime.now(datetime.UTC)
    written = [write(options.out, *pair, now) for pair in zip(checkouts, found, strict=True)]
    if options.out == report.RESULTS and any(result["complete"] for result in written):
        report.write_pages()
    if any("failed" in run for results in found for entry in results.values() for run in entry["runs"]):
        sys.exit(1)


if __name__ == "__main__":
    script.run(main)
