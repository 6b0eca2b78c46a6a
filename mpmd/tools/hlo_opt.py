"""mpmd-hlo-opt: runs passes over HLO text, with the conventions of `mpmd-opt`.

    mpmd-hlo-opt FILE -hlo-algebraic-simplifier='layout-sensitive=true' -hlo-dce

Passes and groups of passes run in the order in which they are given; text after `=`, or in `{}`,
are their options.  The module goes to stdout, findings go to stderr.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mpmd.compile import hlo
from mpmd.compile.backends.jax_function import value_spec
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.passes import PASSES, make_pass
from mpmd.compile.pipelines import GROUPS
from mpmd.compile.target import Target
from mpmd.errors import ConfigError, MpmdError, close_to
from mpmd.support import diagnostics
from mpmd.support.diagnostics import Severity
from mpmd.support.pass_pipeline import Timing, Watch, run_pipeline
from mpmd.support.passes import Pass, split_outside_brackets
from mpmd.tools.command_line import (
    SWITCHES,
    Result,
    TextCommand,
    read_arguments,
    run_pieces,
    run_script,
    run_tool,
    set_switch,
)
from mpmd.tools.expected_diagnostics import Finding, expectations, mismatches

USAGE = """\
usage: mpmd-hlo-opt [FILE] [-PASS[='OPTION=VALUE ...'] | -GROUP | SWITCH] ...

  FILE                        HLO text; "-" or nothing: standard input
  -o FILE                     where the module goes (default: standard output)
  -pass-pipeline=TEXT         PASS{OPTION=VALUE ...},PASS,...
  -split-input-file           take each part between lines of "// -----" for a file of its own
  -verify-diagnostics         compare findings with the expected-error and -warning comments
  -verify-each=false          verify only the last module
  -check-changed              fail if a pass changes the text and says that it did not, or the other way round
  -print-ir-after-all         print the module after each pass, to standard error
  -print-ir-after-change      likewise, but only after passes that changed it
  -metadata                   print the metadata of instructions
  -target=DEVICE              compile the module, after the passes, for cpu, A100, H100, H200, B200, sm_80,
                              sm_90 or sm_100, which need not be here, and print a text of it
  -text=WHAT                  which: costs (the default), hlo, kernels, buffers, thunks, memory, bars; for a
                              CPU llvm, assembly; for a GPU launches, triton, ptx, llvm, which need Triton
  -timing                     print the seconds of each pass, to standard error
  -list-passes                print the names of all passes and groups, each with a summary
  -PASS -help                 print what a pass does, and its options
  -version                    print the versions of this program, JAX and Python
  -help                       print this
"""
_SWITCHES = {
    **SWITCHES,
    "print-ir-after-all": "print_after_all",
    "print-ir-after-change": "print_after_change",
    "metadata": "metadata",
}
_PLACE = re.compile(r"input:(\d+):(\d+): (.*)", re.DOTALL)


@dataclasses.dataclass
class HloCommand(TextCommand):
    """A parsed command line."""

    passes: list[Pass] = dataclasses.field(default_factory=list)
    metadata: bool = False
    target: str = ""
    what: str = "costs"


def run() -> None:
    run_script(lambda: main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Runs the tool; 0 iff all went well, or with `-verify-diagnostics` iff all went as expected."""

    def work(command: HloCommand, text: str) -> tuple[bool, str]:
        ok, printed, _ = run_pieces(command, text, lambda t, timing: run_text(t, command, timing))
        return ok, printed

    return run_tool("mpmd-hlo-opt", USAGE, {**PASSES, **GROUPS}, lambda: read_command(argv), work)


def read_command(argv: Sequence[str]) -> HloCommand:
    """The parsed arguments.

    Raises:
        ConfigError: an argument that is not a file, switch, pass or group; names similar ones.
    """
    command = HloCommand()

    def take(name: str, value: str, following: Iterator[str]) -> None:
        if name == "pass-pipeline":
            for part in split_outside_brackets(value or next(following, ""), ", \n\t"):
                stem, _, options = part.partition("{")
                command.passes += passes_named(stem, options.removesuffix("}"))
        elif name == "target":
            if value not in (known := _targets()):
                raise ConfigError(f"unknown target {value!r}\n  there are {', '.join(known)}")
            command.target = value
        elif name == "text":
            command.what = value
        elif not set_switch(command, _SWITCHES, name, value):
            command.named.append(name)
            command.passes += passes_named(name, value)

    read_arguments(argv, command, take)
    return command


def passes_named(name: str, options: str) -> list[Pass]:
    """The passes of a flag.

    Raises:
        ConfigError: no such pass, group or option.
    """
    if name in GROUPS:
        if options:
            raise ConfigError(f"the group {name} has no options, got {options!r}")
        return list(GROUPS[name]())
    if name not in PASSES:
        raise ConfigError(f"unknown pass {name!r}{close_to(name, [*PASSES, *GROUPS], 3)}")
    return [make_pass(name, options)]


def run_text(text: str, command: HloCommand, timing: Timing) -> Result:
    printed: str | None = None
    findings: list[Finding] = []
    with diagnostics.collecting() as found:
        try:
            printed = _run_passes(text, command, timing)
        except MpmdError as e:
            findings.append(_finding(str(e)))
    reported = [d for d in found if d.severity is not Severity.NOTICE]
    if any(d.severity.is_error for d in reported):
        findings.clear()
    findings += [_finding(d.message, "error" if d.severity.is_error else d.severity.value) for d in reported]
    if command.verify_diagnostics:
        wrong = list(mismatches(expectations(text), findings))
        return Result(not wrong, printed, wrong)
    return Result(printed is not None, printed, findings)


def _run_passes(text: str, command: HloCommand, timing: Timing) -> str:
    """The module's text after the passes."""
    module = hlo.parse_module(text, "input")
    hlo.verify(module)
    module.source = None  # passes change it
    printed = functools.partial(hlo.print_module, metadata=command.metadata)
    watch = Watch(
        verify=hlo.verify,
        text=printed,
        verify_each=command.verify_each,
        check_changed=command.check_changed,
        after=_after(command, printed),
        suffix=".hlo",
    )
    run_pipeline(module, command.passes, watch, timing)
    return text_for(module, command.target, command.what) if command.target else printed(module)


def text_for(module: hlo.HloModule, target: str, what: str) -> str:
    """A module compiled for a kind of device, as one of the texts of `Executable.as_text`.

    Raises:
        CompileError: something in it has no code there, or there is no such text.
    """
    return prepare_fragment(fragment_of(module), _targets()[target](), module=module).text(what)


def fragment_of(module: hlo.HloModule) -> FragmentModule:
    arguments = [s for p in module.entry.parameters for _, s in p.shape.leaves()]
    results = [s for _, s in module.entry.root.shape.leaves()]
    return FragmentModule(
        name=module.name,
        mesh="mesh",
        text=hlo.print_module(module),
        arguments=tuple(value_spec(shape) for shape in arguments),
        results=tuple(value_spec(shape) for shape in results),
    )


def _targets() -> Mapping[str, Callable[[], Target]]:
    """The targets by name; their code generators take a third of a second to import: on first use."""
    from mpmd.compile.backends.targets import DESCRIBED

    return DESCRIBED


def _after(
    command: HloCommand, printed: Callable[[Any], str]
) -> Callable[[Pass, Any, bool, float], None] | None:
    """The action after each pass, or None."""
    if not (command.print_after_all or command.print_after_change):
        return None

    def after(pass_: Pass, module: hlo.HloModule, changed: bool, seconds: float) -> None:
        if command.print_after_all or changed:
            sys.stderr.write(f"// HLO after {pass_}\n{printed(module)}\n")

    return after


def _finding(message: str, kind: str = "error") -> Finding:
    """The message of an error, with its place if it begins with one."""
    place = _PLACE.match(message)
    if place is None:
        return Finding(kind, message)
    return Finding(kind, place[3], int(place[1]), int(place[2]))


if __name__ == "__main__":
    run()
