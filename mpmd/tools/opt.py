"""mpmd-opt: runs passes over MLIR text, with the conventions of `mlir-opt`.

    mpmd-opt FILE -mpmd-fragment-dce -mpmd-merge-inferred-fragments='merge-sideways=true' -cse

Passes and pipelines run in the order in which they are given; text after `=`, or in `{}`, are
their options.  Those of MLIR and Shardy that jaxlib registers (`-canonicalize`, `-cse`, `-symbol-dce`,
`-inline`, `-sdy-...`) follow the same rule.  The module goes to stdout, findings go to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from jax.extend.mlir import ir as mlir

from mpmd import ir
from mpmd.errors import ConfigError, IRError, MpmdError, PassError, close_to, collect
from mpmd.partition import pipeline
from mpmd.passes import PASSES, make_pass
from mpmd.passes.bases import MlirPass, mlir_pass
from mpmd.passes.fragments.dependencies import control_edges, control_edges_as_operands
from mpmd.passes.verify import violations
from mpmd.support import diagnostics
from mpmd.support.diagnostics import Severity
from mpmd.support.passes import (
    Pass,
    Timing,
    Watch,
    name_of,
    run_pipeline,
    split_options,
    split_outside_brackets,
)
from mpmd.support.user_code import location_of
from mpmd.tools.command_line import (
    SWITCHES,
    Described,
    Finding,
    Result,
    TextCommand,
    expectations,
    mismatches,
    read_arguments,
    run_pieces,
    run_script,
    run_tool,
    set_switch,
)
from mpmd.tools.explorer import PassRecorder, PipelinePass

USAGE = """\
usage: mpmd-opt [FILE] [-PASS[='OPTION=VALUE ...'] | -PIPELINE[='OPTION=VALUE ...'] | SWITCH] ...

  FILE                        MLIR text; "-" or nothing: standard input
  -o FILE                     where the module goes (default: standard output)
  -pass-pipeline=TEXT         builtin.module(PASS{OPTION=VALUE ...},func.func(PASS,...),...)
  -split-input-file           take each part between lines of "// -----" for a file of its own
  -verify-diagnostics         compare findings with the expected-error, -warning, -remark comments;
                              "=only-expected": allow findings that no comment requests
  -allow-unregistered-dialect accept ops of unknown dialects
  -verify-each=false          verify only the last module
  -check-changed              fail if a pass changes the text and says that it did not, or the other way round
  -mlir-print-ir-after-all    print the module after each pass, to standard error
  -mlir-print-ir-after-change likewise, but only after passes that changed it
  -mlir-print-ir-after=NAMES  likewise, but only after these passes; names with commas between them
  -mlir-print-ir-before-all   likewise, before each pass; -mlir-print-ir-before=NAMES: before these
  -mlir-print-debuginfo       print locations; -mlir-pretty-debuginfo: in a form that is easier to read
  -mlir-print-op-generic      print ops in their generic form
  -mlir-print-local-scope     print types and attributes where they are used, without aliases
  -mlir-print-assume-verified print without verifying first; -mlir-print-skip-regions: without regions
  -mlir-use-nameloc-as-prefix name values after the names in their locations
  -mlir-elide-elementsattrs-if-larger=N   leave out constants of more than N elements
  -mlir-elide-resource-strings-if-larger=N   leave out resources of more than N characters
  -mlir-diagnostic-verbosity-level=LEVEL   report errors, or warnings too, or remarks too (default)
  -mlir-disable-diagnostic-notes   leave out notes
  -html=FILE                  write a page that steps through the passes: changes, and a graph by mesh
  -timing                     print the seconds of each pass, to standard error
  -list-passes                print the names of all passes and pipelines, each with a summary
  -PASS -help                 print what a pass does, and its options
  -version                    print the versions of this program, JAX and Python
  -help                       print this
"""
_SWITCHES = {
    **SWITCHES,
    "allow-unregistered-dialect": "allow_unregistered",
    "mlir-print-ir-after-all": "print_after_all",
    "mlir-print-ir-before-all": "print_before_all",
    "mlir-print-ir-after-change": "print_after_change",
    "mlir-print-debuginfo": "locations",
    "mlir-pretty-debuginfo": "pretty_locations",
    "mlir-print-op-generic": "generic",
    "mlir-print-local-scope": "local_scope",
    "mlir-print-assume-verified": "assume_verified",
    "mlir-print-skip-regions": "skip_regions",
    "mlir-use-nameloc-as-prefix": "names_from_locations",
    "mlir-disable-diagnostic-notes": "without_notes",
    "mlir-timing": "timing",
}
_LIMITS = {
    "mlir-elide-elementsattrs-if-larger": "elements_limit",
    "mlir-elide-resource-strings-if-larger": "resource_limit",
}
_VERBOSITY = {
    "errors": frozenset({"error"}),
    "warnings": frozenset({"error", "warning"}),
    "remarks": frozenset({"error", "warning", "remark"}),
}
_TRUE_HERE = ("mlir-disable-threading", "mlir-print-ir-module-scope", "no-implicit-module")
"""Flags of mlir-opt whose behaviour is the default here."""
OF_MLIR_OPT = {
    "mlir-generate-reproducer",
    "mlir-output-format",
    "mlir-pass-pipeline-crash-reproducer",
    "mlir-pass-pipeline-local-reproducer",
    "mlir-pass-statistics",
    "mlir-pass-statistics-display",
    "mlir-print-elementsattrs-with-hex-if-larger",
    "mlir-print-ir-after-failure",
    "mlir-print-ir-tree-dir",
    "mlir-print-op-on-diagnostic",
    "mlir-print-stacktrace-on-diagnostic",
    "mlir-print-unique-ssa-ids",
    "mlir-print-value-users",
    "mlir-timing-display",
    "mlir-very-unsafe-disable-verifier-on-parsing",
}
"""Flags of mlir-opt that are accepted and have no effect."""
FLAGS = (*_SWITCHES, *_LIMITS, "mlir-diagnostic-verbosity-level", *_TRUE_HERE)
"""The known flags, for suggestions."""
_STANDS_FOR = {  # passes of StableHLO that jaxlib lacks, and our equivalents
    "stablehlo-aggressive-simplification": "mpmd-simplify-stablehlo",
    "stablehlo-target-independent-optimization": "mpmd-simplify-stablehlo",
}


@dataclasses.dataclass
class Command(TextCommand):
    """A parsed command line."""

    html: str = ""
    steps: list[PipelinePass] = dataclasses.field(default_factory=list)
    only_expected: bool = False
    allow_unregistered: bool = False
    print_before_all: bool = False
    print_after: frozenset[str] = frozenset()
    print_before: frozenset[str] = frozenset()
    locations: bool = False
    pretty_locations: bool = False
    generic: bool = False
    local_scope: bool = False
    assume_verified: bool = False
    skip_regions: bool = False
    names_from_locations: bool = False
    elements_limit: int | None = None
    resource_limit: int | None = None
    reported: frozenset[str] = _VERBOSITY["remarks"]
    without_notes: bool = False
    ignored: list[str] = dataclasses.field(default_factory=list)


def read_command(argv: Sequence[str]) -> Command:
    """The parsed arguments.

    Raises:
        ConfigError: an argument that is not a file, switch, pass or pipeline; names similar ones.

    Flags of mlir-opt that begin with `mlir-` and are unknown here are accepted, and listed in `ignored`.
    """
    command = Command()

    def take(name: str, value: str, following: Iterator[str]) -> None:
        if name == "html":
            command.html = value or next(following, "")
        elif name in ("pass-pipeline", "p"):
            command.steps += steps_of_pipeline(value or next(following, ""))
        elif not _read_switch(command, name, value):
            command.named.append(name)
            command.steps += steps_named(name, value)

    read_arguments(argv, command, take)
    return command


def _read_switch(command: Command, name: str, value: str) -> bool:
    """Records a switch; False if there is none of this name."""
    if name == "verify-diagnostics" and value in ("all", "only-expected"):
        command.verify_diagnostics, command.only_expected = True, value == "only-expected"
    elif set_switch(command, _SWITCHES, name, value):
        return True
    elif name == "mlir-print-ir-after":
        command.print_after |= set(value.split(","))
    elif name == "mlir-print-ir-before":
        command.print_before |= set(value.split(","))
    elif name in _LIMITS:
        if not value.isdigit():
            raise ConfigError(f"-{name}: {value!r} is not a number\n  such as -{name}=16")
        setattr(command, _LIMITS[name], int(value))
    elif name == "mlir-diagnostic-verbosity-level":
        if value not in _VERBOSITY:
            raise ConfigError(f"-{name}: {value!r} is not one of {', '.join(_VERBOSITY)}")
        command.reported = _VERBOSITY[value]
    elif name.startswith("mlir-") and name not in _TRUE_HERE:
        command.ignored.append(name)
    else:
        return name in _TRUE_HERE
    return True


def steps_named(name: str, options: str) -> list[PipelinePass]:
    """The passes of a flag.

    Raises:
        ConfigError: no such pass, pipeline or option.
    """
    if name in pipeline.PIPELINES:
        steps = pipeline.steps_of(name, split_options(options))
        return [PipelinePass(step.pass_, name, step.why) for step in steps]
    if name in PASSES:
        return [PipelinePass(make_pass(name, options))]
    if name in _STANDS_FOR:
        return [PipelinePass(make_pass(_STANDS_FOR[name]))]
    if name == "inline":
        return [PipelinePass(make_pass("mpmd-inline")), PipelinePass(mlir_pass(name, options))]
    if name.startswith("mpmd-"):
        raise ConfigError(f"unknown pass {name!r}{close_to(name, [*PASSES, *pipeline.PIPELINES], 3)}")
    return [PipelinePass(mlir_pass(name, options))]


def steps_of_pipeline(text: str) -> list[PipelinePass]:
    """The passes of `builtin.module(a{x=1 y=2},func.func(b,c),d)`.

    Raises:
        ConfigError: no such pass, pipeline or option; or brackets that do not close.
    """
    return list(_steps_in(text, on_functions=False))


_NESTED = re.compile(r"(builtin\.module|func\.func|any)\s*\((.*)\)", re.DOTALL)


def _steps_in(text: str, on_functions: bool) -> Iterator[PipelinePass]:
    """The passes of one level of a pipeline: of the module's, or of the functions'."""
    for part in map(str.strip, split_outside_brackets(text, ",")):
        inner = _NESTED.fullmatch(part)
        if inner is not None:
            yield from _steps_in(inner[2], inner[1] == "func.func")
            continue
        name, _, options = part.partition("{")
        name, options = name.strip(), options.removesuffix("}")
        if not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(
                f"cannot read {part!r} as a pass of a pipeline\n"
                "  expected: names with commas between them, options in braces: 'cse,inline{max-depth=1}'"
            )
        for step in steps_named(name, options):
            yield _on_functions(step) if on_functions else step


def _on_functions(step: PipelinePass) -> PipelinePass:
    """A pass of MLIR for one function after the other; our passes iterate over functions themselves."""
    pass_ = step.pass_
    if not isinstance(pass_, MlirPass) or pass_.pipeline.startswith("func.func("):
        return step
    pipeline_text = f"func.func({pass_.pipeline})"
    if ir.mlir_problem(pipeline_text):
        raise ConfigError(
            f"the pass {pass_.pipeline!r} does not run on functions\n  name it outside of func.func(...)"
        )
    return dataclasses.replace(step, pass_=MlirPass(pipeline_text))


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
    with _mlir_findings(findings), diagnostics.collecting() as reports:
        printed, failure = _run_passes(text, command, timing, recorder)
    findings += [_finding(d) for d in reports if d.severity is not Severity.NOTICE]
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
