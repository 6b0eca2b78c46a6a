"""Actions around each pass: dumps, if requested, and checks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from mpmd.compile.dump import Dump
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import HloModule, print_module, verify
from mpmd.compile.pipelines import watched
from mpmd.support.passes import Pass, Watch


def watch_of(fragment: FragmentModule, module: HloModule, dump: Dump | None) -> Watch:
    """The watch of a pipeline over a fragment; with a dump, writes the current module.

    Passes are verified in tests and with a dump, not in every compilation.
    """
    if dump is None:
        return Watch(verify=_unchecked, text=print_module)
    dump.write(fragment, "before_optimizations.txt", print_module(module))
    return Watch(
        verify=verify,
        text=print_module,
        dump_to=dump.folder_of(fragment),
        dump_passes=dump.passes,
        suffix=".txt",
    )


def dumping_inside(passes: Sequence[Pass], fragment: FragmentModule, dump: Dump | None) -> list[Pass]:
    """Passes of which those inside of groups write the module, too: `027.simplification.003.hlo-cse`."""
    return list(passes) if dump is None else watched(passes, _inner_dump(fragment, dump))


def _inner_dump(fragment: FragmentModule, dump: Dump) -> Callable[[str, Pass, HloModule], None]:
    """Writes the module after each pass of a group that changed it."""
    turns: dict[str, int] = {}

    def after(group: str, pass_: Pass, module: HloModule) -> None:
        turns[group] = turns.get(group, -1) + 1
        if re.search(dump.passes, pass_.name):
            dump.write(fragment, f"{group}.{turns[group]:03d}.{pass_.name}.txt", print_module(module))

    return after


def _unchecked(module: HloModule) -> None:
    pass
