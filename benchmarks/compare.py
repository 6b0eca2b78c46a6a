"""Which figures differ between two result files by more than their noise?

    python benchmarks/compare.py A.json B.json [--all]

Files of `suite.py` hold each benchmark several times, minutes apart.  A figure has changed if its runs in A
and its runs in B do not overlap, and if its medians differ by more than the runs of either file do among
themselves.  With one run in a file the noise is unknown, and nothing is reported as changed.
Two checkouts are best measured in turns, by `suite.py --beside`: runs of different hours differ by more.

Prints what differs in the machine, versions and commands, each changed figure with both medians, and the
figures that only one file has; `--all` prints every figure.  Exit status 1 if a figure has changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import script

MIN_CHANGE = 0.01
"""Differences below this part are not reported, however equal the runs are."""


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """(path, number) of all numbers in a JSON value; truth values count as 0 and 1."""
    if isinstance(value, int | float):
        yield path, float(value)
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(inner, f"{path}.{key}" if path else str(key))


def figures_of(result: dict[str, Any]) -> dict[str, list[float]]:
    """Path of each figure → its value in each run that succeeded."""
    found: dict[str, list[float]] = {}
    for name, benchmark in result["benchmarks"].items():
        for run in benchmark["runs"]:
            for path, number in numbers(run.get("figures", {}), name):
                found.setdefault(path, []).append(number)
    return found


@dataclasses.dataclass(frozen=True)
class FigureChange:
    """One figure in two files.

    Attributes:
        before, after: medians.
        noise: the larger spread of the two files, as a part of the median.
    """

    path: str
    before: float
    after: float
    noise: float
    changed: bool

    def __str__(self) -> str:
        part = f"{self.after / self.before - 1:+.1%}" if self.before else "from 0"
        return f"{self.path}: {self.before:.5g} → {self.after:.5g} ({part}, noise {self.noise:.1%})"


def change_of(path: str, a: list[float], b: list[float]) -> FigureChange:
    """Compares the runs of one figure."""
    before, after = statistics.median(a), statistics.median(b)
    scale = abs(before) or abs(after) or 1.0
    noise = max(max(a) - min(a), max(b) - min(b)) / scale
    apart = max(a) < min(b) or max(b) < min(a)
    beyond = abs(after - before) / scale > max(noise, MIN_CHANGE)
    return FigureChange(path, before, after, noise, apart and beyond and min(len(a), len(b)) > 1)


def described(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """What else differs: machine, versions, commits, commands."""
    for part in ("machine", "versions"):
        for key in sorted(a[part] | b[part]):
            if a[part].get(key) != b[part].get(key):
                yield f"{key}: {a[part].get(key)} → {b[part].get(key)}"
    if a["commit"] != b["commit"]:
        yield f"commit: {a['commit'][:12]} → {b['commit'][:12]}"
    for name in sorted(a["benchmarks"].keys() & b["benchmarks"].keys()):
        one, other = (result["benchmarks"][name]["command"] for result in (a, b))
        if one != other:
            yield f"{name}: {one} → {other}"


def compare(a: dict[str, Any], b: dict[str, Any]) -> tuple[list[FigureChange], list[str]]:
    """The figures of both files, and the paths that only one of them has."""
    ours, theirs = figures_of(a), figures_of(b)
    both = [change_of(path, ours[path], theirs[path]) for path in ours if path in theirs]
    return both, sorted(ours.keys() ^ theirs.keys())


def main() -> None:
    """Prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--all", action="store_true", help="print figures that did not change, too")
    options = parser.parse_args()
    a, b = (json.loads(path.read_text()) for path in (options.a, options.b))
    both, single = compare(a, b)
    changed = [change for change in both if change.changed]
    for line in described(a, b):
        print(line)
    for change in both if options.all else changed:
        print(change)
    for path in single:
        print(f"{path}: in one file only")
    print(f"{len(changed)} of {len(both)} figures changed by more than their noise")
    sys.exit(1 if changed else 0)


if __name__ == "__main__":
    script.run(main)
