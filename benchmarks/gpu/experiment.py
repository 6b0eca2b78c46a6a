"""What an experiment is: a question, figures and checks, kept on disk as they come.

An experiment is a module with a docstring (question, method, what the answer means) and a function that is
given an `Experiment`.  It runs in a process of its own:

    python -m benchmarks.gpu.<name> --lines FILE [--pack FOLDER] [--seconds N]
        [--no_gpu | --stand-in MODULE:CLASS]

Each finding is a line of JSON, written at once, so that a crash or a time limit loses nothing that was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# What a check can say.  The first is of a run on a GPU, the next two of one without.
PASSED, COMPILED, RECORDED, FAILED, SKIPPED = "passed", "compiled", "recorded", "failed", "skipped"


class Experiment:
    """The findings of one experiment, each a line of JSON, and how much time it has.

    Args:
        lines: the file to which lines are added.

    Attributes:
        gpu: whether there is a GPU; without one everything up to the launch is done.
        simulated: `MODULE:CLASS` of a stand-in that computes on the CPU and takes its place; "" if none does.
        pack: the folder that was prepared for it, if there is one.
        failures: names of the checks that failed and the parts that broke off.
        after: how many items a process before this one has finished; see `restart`.
    """

    def __init__(
        self,
        name: str,
        question: str,
        lines: Path,
        gpu: bool,
        seconds: float,
        simulated: str = "",
        pack: Path = Path("out/gpu_pack"),
        after: int = 0,
    ) -> None:
        self.name, self.gpu, self.simulated, self.pack = name, gpu, simulated, pack
        self.failures, self.after = list[str](), after
        self._lines, self._start, self._seconds = lines, time.monotonic(), seconds
        self._write("begin", "experiment", question=question, gpu=gpu)

    @property
    def done(self) -> str:
        """What a check says that got as far as it can here."""
        return PASSED if self.gpu else RECORDED

    def seconds_left(self) -> float:
        """Until the time limit, less a margin to end in order."""
        return self._seconds - (time.monotonic() - self._start) - 3.0

    def figure(self, name: str, value: Any, unit: str = "") -> None:
        """Keeps and prints something measured."""
        self.say(f"{name} = {_short(value)} {unit}".rstrip())
        self._write("figure", name, value=value, unit=unit)

    def check(self, name: str, holds: bool, note: str = "", state: str = "") -> bool:
        """Keeps and prints whether something holds; `state` says how far it was tried if it does."""
        found = (state or self.done) if holds else FAILED
        if not holds:
            self.failures.append(name)
        self.say(f"{name}: {found}{f' ({note})' if note else ''}")
        self._write("check", name, state=found, note=note)
        return holds

    def skip(self, name: str, why: str) -> None:
        """Says that something was not tried."""
        self.say(f"{name}: {SKIPPED} ({why})")
        self._write("check", name, state=SKIPPED, note=why)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part that may fail alone: what it raises is kept, and the next part runs."""
        self.say(f"-- {name}")
        start = time.monotonic()
        try:
            yield
        except Exception as error:  # whatever it is, it is a finding, and the other parts must run
            text = "".join(traceback.format_exception(error))
            self.failures.append(name)
            self._write("error", name, error=f"{type(error).__name__}: {error}"[:2000], trace=text[-4000:])
            self.say(f"{name} broke off: {type(error).__name__}: {str(error)[:600]}")
        self._write("part", name, seconds=round(time.monotonic() - start, 2))

    def has_time(self, name: str, seconds: float) -> bool:
        """Whether about `seconds` are left; says that `name` was skipped if not."""
        if self.seconds_left() >= seconds:
            return True
        self.skip(name, f"needs {seconds:.0f} s, {max(0.0, self.seconds_left()):.0f} s are left")
        return False

    def restart(self, after: int) -> None:
        """Goes on in a new process behind so many items: after an error a GPU's context runs nothing more."""
        flags = ["--stand-in", self.simulated] if self.simulated else [] if self.gpu else ["--no_gpu"]
        given = {"lines": self._lines, "pack": self.pack, "seconds": self.seconds_left(), "after": after}
        values = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        module: Any = sys.modules["__main__"]
        os.execv(sys.executable, [sys.executable, "-m", module.__spec__.name, *values, *flags])

    def say(self, text: str) -> None:
        """Progress."""
        print(f"   [{time.monotonic() - self._start:5.1f} s] {text}", flush=True)

    def _write(self, line: str, name: str, **rest: Any) -> None:
        seconds = round(time.monotonic() - self._start, 3)
        write_line(self._lines, {"experiment": self.name, "at": seconds, "line": line, "name": name, **rest})


def write_line(path: Path, content: dict[str, Any]) -> None:
    """Adds a line of JSON to a file, in one write: several processes may add theirs."""
    data = (json.dumps(content, default=str) + "\n").encode()
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, data)
    finally:
        os.close(file)


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """Experiment → its `figures`, `checks` and `errors` by name, and what else its lines say.

    A line that a process did not finish is left out.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        kept = found.setdefault(line["experiment"], {"figures": {}, "checks": {}, "errors": {}})
        kind, name = line["line"], line["name"]
        if kind == "figure":
            kept["figures"][name] = line["value"]
        elif kind in ("check", "error"):
            kept[f"{kind}s"][name] = line
        elif kind in ("begin", "end"):
            kept.update(line)
    return found


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:300]


def run_experiment(name: str, document: str | None, measure: Callable[[Experiment], None]) -> None:
    """The main function of an experiment's module; ends with 1 if something failed."""
    question = " ".join((document or "").split("\n\n")[0].split())
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--lines", type=Path, required=True, help="file to which lines of JSON are added")
    parser.add_argument("--pack", type=Path, default=Path("out/gpu_pack"), help="what prepare.py made")
    parser.add_argument("--after", type=int, default=0, help="items that are finished")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit")
    parser.add_argument("--no_gpu", action="store_true", help="do everything up to the launch")
    parser.add_argument("--stand-in", dest="simulated", default="", help="MODULE:CLASS of a stand-in GPU")
    args = parser.parse_args()
    gpu = not (args.no_gpu or args.simulated)
    run = Experiment(name, question, args.lines, gpu, args.seconds, args.simulated, args.pack, args.after)
    with run.part("experiment"):
        measure(run)
    sys.exit(1 if run.failures else 0)
