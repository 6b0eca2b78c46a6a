"""The command line of `mpmd-opt`: file, passes, switches."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from mpmd import ir
from mpmd.errors import ConfigError, close_to
from mpmd.partition import pipeline
from mpmd.passes import PASSES, make_pass
from mpmd.passes.bases import MlirPass, mlir_pass
from mpmd.support.passes import split_options, split_outside_brackets
from mpmd.tools.command_line import SWITCHES, TextCommand, read_arguments, set_switch
from mpmd.tools.explorer import Planned

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
    steps: list[Planned] = dataclasses.field(default_factory=list)
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


def steps_named(name: str, options: str) -> list[Planned]:
    """The passes of a flag.

    Raises:
        ConfigError: no such pass, pipeline or option.
    """
    if name in pipeline.PIPELINES:
        steps = pipeline.steps_of(name, split_options(options))
        return [Planned(step.pass_, name, step.why) for step in steps]
    if name in PASSES:
        return [Planned(make_pass(name, options))]
    if name in _STANDS_FOR:
        return [Planned(make_pass(_STANDS_FOR[name]))]
    if name == "inline":
        return [Planned(make_pass("mpmd-inline")), Planned(mlir_pass(name, options))]
    if name.startswith("mpmd-"):
        raise ConfigError(f"unknown pass {name!r}{close_to(name, [*PASSES, *pipeline.PIPELINES], 3)}")
    return [Planned(mlir_pass(name, options))]


def steps_of_pipeline(text: str) -> list[Planned]:
    """The passes of `builtin.module(a{x=1 y=2},func.func(b,c),d)`.

    Raises:
        ConfigError: no such pass, pipeline or option; or brackets that do not close.
    """
    return list(_steps_in(text, on_functions=False))


_NESTED = re.compile(r"(builtin\.module|func\.func|any)\s*\((.*)\)", re.DOTALL)


def _steps_in(text: str, on_functions: bool) -> Iterator[Planned]:
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


def _on_functions(step: Planned) -> Planned:
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
