"""What an experiment is: a question, figures and checks, kept on disk as they come.

An experiment is a module with a docstring (question, method, what the answer means) and a function that is
given an `Experiment`.  It runs in a process of its own:

    python -m benchmarks.gpu.<name> --result FILE [--seconds N] [--no_gpu | --stand-in]

Its findings are written after each one, so that a crash or a time limit loses nothing that was found.
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
    """The findings of one experiment, and how much time it has.

    Attributes:
        gpu: whether there is a GPU; without one everything up to the launch is done.
        simulated: whether a stand-in that computes on the CPU takes its place.
    """

    def __init__(
        self, name: str, question: str, result: Path, gpu: bool, seconds: float, simulated: bool = False
    ) -> None:
        self.gpu, self.simulated = gpu, simulated
        self._result, self._start, self._seconds = result, time.monotonic(), seconds
        self._found: dict[str, Any] = {
            "experiment": name,
            "question": question,
            "gpu": gpu,
            "seconds": 0.0,
            "checks": {},
            "figures": {},
            "errors": {},
        }
        self._write()

    @property
    def done(self) -> str:
        """What a check says that got as far as it can here."""
        return PASSED if self.gpu else RECORDED

    @property
    def failures(self) -> list[str]:
        """Names of the checks that failed and the parts that broke off."""
        checks = [name for name, check in self._found["checks"].items() if check["state"] == FAILED]
        return checks + list(self._found["errors"])

    def seconds_left(self) -> float:
        """Until the time limit, less a margin to end in order."""
        return self._seconds - (time.monotonic() - self._start) - 3.0

    def figure(self, name: str, value: Any, unit: str = "") -> None:
        """Keeps and prints something measured; a name with dots is nested."""
        folder = self._found["figures"]
        *path, last = name.split(".")
        for part in path:
            folder = folder.setdefault(part, {})
        folder[last] = value
        self.say(f"{name} = {_short(value)} {unit}".rstrip())
        self._write()

    def check(self, name: str, holds: bool, note: str = "", state: str = "") -> bool:
        """Keeps and prints whether something holds; `state` says how far it was tried if it does."""
        found = (state or self.done) if holds else FAILED
        self._found["checks"][name] = {"state": found, "note": note}
        self.say(f"{name}: {found}{f' ({note})' if note else ''}")
        self._write()
        return holds

    def skip(self, name: str, why: str) -> None:
        """Says that something was not tried."""
        self._found["checks"][name] = {"state": SKIPPED, "note": why}
        self.say(f"{name}: {SKIPPED} ({why})")
        self._write()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part that may fail alone: what it raises is kept, and the next part runs."""
        self.say(f"-- {name}")
        start = time.monotonic()
        try:
            yield
        except Exception as error:  # whatever it is, it is a finding, and the other parts must run
            text = "".join(traceback.format_exception(error))
            self._found["errors"][name] = {
                "error": f"{type(error).__name__}: {error}"[:2000],
                "trace": text[-4000:],
            }
            self.say(f"{name} broke off: {type(error).__name__}: {str(error)[:600]}")
        self._found.setdefault("part_seconds", {})[name] = round(time.monotonic() - start, 2)
        self._write()

    def has_time(self, name: str, seconds: float) -> bool:
        """Whether about `seconds` are left; says that `name` was skipped if not."""
        if self.seconds_left() >= seconds:
            return True
        self.skip(name, f"needs {seconds:.0f} s, {max(0.0, self.seconds_left()):.0f} s are left")
        return False

    def say(self, text: str) -> None:
        """Progress."""
        print(f"   [{time.monotonic() - self._start:5.1f} s] {text}", flush=True)

    def _write(self) -> None:
        self._found["seconds"] = round(time.monotonic() - self._start, 2)
        beside = self._result.with_suffix(".part")
        beside.write_text(json.dumps(self._found, indent=1, default=str))
        os.replace(beside, self._result)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:300]


def run_experiment(name: str, document: str | None, measure: Callable[[Experiment], None]) -> None:
    """The main function of an experiment's module; ends with 1 if something failed."""
    question = " ".join((document or "").split("\n\n")[0].split())
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--result", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit")
    parser.add_argument("--no_gpu", action="store_true", help="do everything up to the launch")
    parser.add_argument("--stand-in", dest="simulated", action="store_true", help="use a stand-in GPU")
    args = parser.parse_args()
    gpu = not (args.no_gpu or args.simulated)
    run = Experiment(name, question, args.result, gpu, args.seconds, args.simulated)
    with run.part("experiment"):
        measure(run)
    sys.exit(1 if run.failures else 0)
