"""Running passes in order: verified, timed, dumped, and named when they fail."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpmd.support import diagnostics
from mpmd.support.passes import Pass

log = logging.getLogger("mpmd.passes")


@dataclasses.dataclass(frozen=True)
class Watch:
    """Actions around each pass.

    Attributes:
        verify: called with the module after each pass; raises if it is invalid.
        text: prints a module; needed for dumps and for checking the changed bit.
        verify_each: whether to verify after every pass rather than once at the end.
        check_changed: whether to compare the result of a pass with its change of the text.
        disabled: names of passes to leave out.
        dump_to: folder for one file per pass that changed the module.
        dump_passes: regular expression on names of passes to dump.
        after: called with each pass, the module after it, whether that changed, and the seconds it took; for
            tools that show a pipeline.
        suffix: extension of dumped files.
    """

    verify: Callable[[Any], None]
    text: Callable[[Any], str]
    verify_each: bool = False
    check_changed: bool = False
    disabled: frozenset[str] = frozenset()
    dump_to: Path | None = None
    dump_passes: str = ".*"
    after: Callable[[Pass, Any, bool, float], None] | None = None
    suffix: str = ".mlir"


@dataclasses.dataclass
class Timing:
    """Seconds per pass, in the order in which they ran."""

    seconds: list[tuple[str, float]] = dataclasses.field(default_factory=list)

    def as_text(self) -> str:
        """A table, slowest first."""
        rows = sorted(self.seconds, key=lambda row: -row[1])
        return "\n".join(f"{seconds * 1e3:9.2f} ms  {name}" for name, seconds in rows)


def run_pipeline(
    module: Any, passes: Sequence[Pass], watch: Watch, timing: Timing | None = None, first: int = 0
) -> diagnostics.Diagnostics:
    """Runs the passes on `module`, in place; dumps are numbered from `first`.

    Returns:
        Warnings and notices of all passes.

    Raises:
        PassError: with all errors that the first failing pass reported, and all late errors before it.
    """
    timing = timing if timing is not None else Timing()
    with diagnostics.collecting() as found:
        for number, pass_ in enumerate(passes, first):
            if name_of(pass_) in watch.disabled:
                continue
            try:
                changed = _run_one(number, pass_, module, watch, timing)
            except Exception:
                found.raise_if_errors()  # a late error explains what follows from it
                raise
            if found.of(diagnostics.Severity.ERROR):
                found.raise_if_errors()
            _look_at(number, pass_, module, watch, changed, timing)
        if not watch.verify_each and not found.errors:
            watch.verify(module)
    found.raise_if_errors()
    return found


def _run_one(number: int, pass_: Pass, module: Any, watch: Watch, timing: Timing) -> bool:
    """Runs one pass; whether it changed the module, exactly if that is needed."""
    looks = watch.after is not None or watch.dump_to is not None
    compares = watch.check_changed or (looks and not pass_.reports_changes)
    before = watch.text(module) if compares else ""
    start = time.perf_counter()
    try:
        changed = pass_.run(module)
    except Exception as e:
        e.add_note(f"while running pass {number}: {pass_}")
        raise
    timing.seconds.append((str(pass_), time.perf_counter() - start))
    log.debug("%-50s %s %.2f ms", pass_, "changed" if changed else "-", timing.seconds[-1][1] * 1e3)
    if not compares:
        return changed
    differs = before != watch.text(module)
    if pass_.reports_changes and changed != differs:
        raise AssertionError(f"{pass_.name} says changed={changed}, its text says otherwise")
    return differs


def _look_at(number: int, pass_: Pass, module: Any, watch: Watch, changed: bool, timing: Timing) -> None:
    """Verifies, compares and dumps the module after a pass without errors."""
    if watch.verify_each and changed:
        try:
            watch.verify(module)
        except Exception as e:
            e.add_note(f"after pass {number}: {pass_}")
            raise
    if watch.after is not None:
        watch.after(pass_, module, changed, timing.seconds[-1][1])
    if watch.dump_to is not None and changed and re.search(watch.dump_passes, name_of(pass_)):
        watch.dump_to.mkdir(parents=True, exist_ok=True)
        (watch.dump_to / f"{number:03d}.{name_of(pass_)}{watch.suffix}").write_text(watch.text(module))


def name_of(pass_: Pass) -> str:
    """The name of a pass, MLIR's included: without options, and without its pipeline."""
    found = re.match(r"(?:[\w.]+\()?([\w-]+)", str(pass_))
    return found[1] if found else pass_.name
