"""mpmd-opt: runs passes over MLIR text, with the conventions of `mlir-opt`.

    mpmd-opt FILE -mpmd-fragment-dce -mpmd-merge-inferred-fragments='merge-sideways=true' -cse

Passes and pipelines run in the order in which they are given; text after `=`, or in `{}`, are
their options.  Those of MLIR and Shardy that jaxlib registers (`-canonicalize`, `-cse`, `-symbol-dce`,
`-inline`, `-sdy-...`) follow the same rule.  The module goes to stdout, findings go to stderr.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from jax.extend.mlir import ir as mlir

from mpmd import ir, pipeline
from mpmd.errors import IRError, MpmdError, PassError, close_to, collect
from mpmd.passes import PASSES
from mpmd.passes.fragments.control_edges import control_edges, control_edges_as_operands
from mpmd.passes.verify import violations
from mpmd.support import diagnostics
from mpmd.support.diagnostics import Severity
from mpmd.support.passes import Pass
from mpmd.support.pipeline import Timing, Watch, name_of, run_pipeline
from mpmd.support.source import location_of
from mpmd.tools.command_line import Result, run_pieces, run_script, run_tool
from mpmd.tools.expected_diagnostics import Finding, expectations, mismatches
from mpmd.tools.explorer import PassRecorder
from mpmd.tools.opt_arguments import FLAGS, OF_MLIR_OPT, USAGE, Command, read_command
from mpmd.tools.pass_help import Described


def run() -> None:
    run_script(lambda: main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Runs the tool; 0 iff all went well, or with `-verify-diagnostics` iff all went as expected."""
    described: Described = {**PASSES, **pipeline.PIPELINES}
    return run_tool("mpmd-opt", USAGE, described, lambda: read_command(argv), _run_file)


def _run_file(command: Command, text: str) -> tuple[bool, str]:
    """Whether all of a file went well, and the output; writes the page if requested."""
    for name in command.ignored:
        meant = "" if name in OF_MLIR_OPT else close_to(name, FLAGS)
        sys.stderr.write(f"mpmd-opt: warning: -{name} has no effect here{meant}\n")
    recorder = PassRecorder() if command.html else None
    with _log_to_stderr(), _dialects(command.allow_unregistered):
        ok, printed, said = run_pieces(
            command, text, lambda t, timing: run_text(t, command, timing, recorder)
        )
    if recorder is not None:
        page = recorder.page(Path(command.file).name, said, command.timing)
        Path(command.html).write_text(page, encoding="utf-8")
    return ok, printed


@contextlib.contextmanager
def _dialects(allow_unregistered: bool) -> Iterator[None]:
    """Accepts ops of unknown dialects, or does not."""
    allowed = ir.context().allow_unregistered_dialects
    ir.context().allow_unregistered_dialects = allow_unregistered
    try:
        yield
    finally:
        ir.context().allow_unregistered_dialects = allowed


@contextlib.contextmanager
def _log_to_stderr() -> Iterator[None]:
    log, handler = logging.getLogger("mpmd.passes"), logging.StreamHandler(sys.stderr)
    level = log.level
    log.addHandler(handler)
    log.setLevel(min(level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def run_text(text: str, command: Command, timing: Timing, recorder: PassRecorder | None = None) -> Result:
    findings: list[Finding] = []
    with _mlir_findings(findings), diagnostics.collecting() as found:
        printed, failure = _run_passes(text, command, timing, recorder)
    findings += [_finding(d) for d in found if d.severity is not Severity.NOTICE]
    if failure is not None and not isinstance(failure, PassError):
        findings += _findings_of(failure)
    if command.verify_diagnostics:
        wrong = list(mismatches(expectations(text), findings, command.only_expected))
        return Result(not wrong, printed, wrong)
    return Result(printed is not None, printed, [f for f in findings if _is_reported(f, command)])


def _is_reported(finding: Finding, command: Command) -> bool:
    if finding.kind == "note":
        return not command.without_notes
    return finding.kind in command.reported


def _run_passes(
    text: str, command: Command, timing: Timing, recorder: PassRecorder | None
) -> tuple[str | None, Exception | None]:
    """The module's text after the passes, or None, and the error.

    An invalid module reaches no pass; a test that expects diagnostics of the passes skips this check.
    """
    try:
        module = ir.parse(text)
    except MpmdError as e:
        return None, e
    broken = list(violations(module))
    if broken and not command.verify_diagnostics:
        return None, collect(IRError, broken, "the program is invalid:")
    watch = Watch(
        verify=_verify,
        text=lambda m: _printed(m, command),
        verify_each=command.verify_each,
        check_changed=command.check_changed,
        after=_after(command, sys.stderr, recorder),
    )
    _show_before(command, 0, module, sys.stderr)
    if recorder is not None:
        recorder.start(module, command.steps)
    try:
        run_pipeline(module, [step.pass_ for step in command.steps], watch, timing)
    except PassError as e:
        if any(getattr(d, "severity", None) is Severity.ERROR for d in e.diagnostics) or not e.diagnostics:
            return None, e
        return _text(module, command), e
    except (MpmdError, mlir.MLIRError) as e:
        return None, e
    except (LookupError, TypeError, ValueError):
        if not broken:
            raise
        return None, collect(IRError, broken, "the program is invalid:")
    return _text(module, command), None


def _text(module: mlir.Module, command: Command) -> str:
    """The printed module: control edges are operands, as the dialect has them."""
    for f in ir.funcs(module):
        if control_edges(f):
            control_edges_as_operands(f)
    return _printed(module, command)


def _printed(module: mlir.Module, command: Command) -> str:
    text: str = module.operation.get_asm(
        enable_debug_info=command.locations,
        pretty_debug_info=command.pretty_locations,
        print_generic_op_form=command.generic,
        use_local_scope=command.local_scope,
        use_name_loc_as_prefix=command.names_from_locations,
        assume_verified=command.assume_verified,
        skip_regions=command.skip_regions,
        large_elements_limit=command.elements_limit,
        large_resource_limit=command.resource_limit,
    )
    return text


def _verify(module: mlir.Module) -> None:
    """MLIR's verifier alone: the dialect's own test files need not follow the other rules."""
    module.operation.verify()
    ir.free_erased()


def _after(
    command: Command, to: TextIO, recorder: PassRecorder | None
) -> Callable[[Pass, Any, bool, float], None] | None:
    """The action after each pass, or None."""
    shows = (command.print_after_all, command.print_after_change, command.print_after)
    if not (any(shows) or command.print_before_all or command.print_before or recorder):
        return None
    number = 0

    def after(pass_: Pass, module: mlir.Module, changed: bool, seconds: float) -> None:
        nonlocal number
        number += 1
        asked = command.print_after_all or name_of(pass_) in command.print_after
        if asked or (command.print_after_change and changed):
            to.write(f"// -----// IR Dump After {pass_} //----- //\n{_printed(module, command)}\n")
        if recorder is not None:
            recorder.pass_ended(pass_, module, changed, seconds)
        _show_before(command, number, module, to)

    return after


def _show_before(command: Command, number: int, module: mlir.Module, to: TextIO) -> None:
    """Prints the module before the pass of that number, if requested."""
    if number < len(command.steps):
        pass_ = command.steps[number].pass_
        if command.print_before_all or name_of(pass_) in command.print_before:
            to.write(f"// -----// IR Dump Before {pass_} //----- //\n{_printed(module, command)}\n")


@contextlib.contextmanager
def _mlir_findings(findings: list[Finding]) -> Iterator[None]:
    """Collects the diagnostics of MLIR's own passes and parsers, but for errors, which they raise."""

    def collect(d: mlir.Diagnostic) -> bool:
        findings.extend(_flattened(d))
        return True

    handler = ir.context().attach_diagnostic_handler(collect)
    try:
        yield
    finally:
        handler.detach()


def _flattened(d: Any) -> Iterator[Finding]:
    yield Finding(d.severity.name.lower(), d.message, *_line_and_column(d.location))
    for note in d.notes:
        if not note.message.startswith("see current operation"):
            yield from _flattened(note)


def _findings_of(e: BaseException) -> list[Finding]:
    """The text of an exception: MLIR's diagnostics if it holds any."""
    source = e if isinstance(e, mlir.MLIRError) else e.__cause__
    if isinstance(source, mlir.MLIRError):
        inner = [f for d in source.error_diagnostics for f in _flattened(d)]
        if inner:
            return inner
    return [Finding("error", str(e))]


def _finding(d: diagnostics.Diagnostic) -> Finding:
    kind = "error" if d.severity.is_error else d.severity.value
    return Finding(kind, d.message, *_line_and_column(d.location))


def _line_and_column(location: object) -> tuple[int | None, int | None]:
    """The place in the input; MLIR calls that file `-`."""
    place = None if location is None else location_of(location)
    if place is None or place[0] != "-":
        return None, None
    return place[1], place[2]


if __name__ == "__main__":
    run()
