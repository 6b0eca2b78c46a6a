"""Options of XLA for compiling fragments, and which of them a fragment has."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

OptionValue = bool | int | float | str
CompilerOptions = Mapping[str, OptionValue | Mapping[str, OptionValue]]
"""As a user gives them: for all fragments, and by mesh or name for some."""
FragmentOptions = tuple[tuple[str, OptionValue], ...]
"""Name and value of each option of a fragment, by name."""


@dataclasses.dataclass(frozen=True)
class OptionsRow:
    """Options of all fragments, of a mesh's fragments, or of a name's.

    Attributes:
        options: names and values.
        mesh: of the fragments; "" for any.
        name: of a computation that the fragments hold; "" for any.
        unless: options that these would undo: the row does not count where another row gives one.
    """

    options: FragmentOptions
    mesh: str = ""
    name: str = ""
    unless: tuple[str, ...] = ()

    def fits(self, mesh: str, names: Collection[str]) -> bool:
        """Whether it is for fragments of a mesh that hold computations of these names."""
        return self.mesh in ("", mesh) and (not self.name or self.name in names)


def options_of(rows: Iterable[OptionsRow], mesh: str, names: Collection[str]) -> FragmentOptions:
    """The options of a fragment; of an option in several rows the last value."""
    fitting = [row for row in rows if row.fits(mesh, names)]
    given = {name for row in fitting for name, _ in row.options}
    merged = dict(pair for row in fitting if given.isdisjoint(row.unless) for pair in row.options)
    return tuple(sorted(merged.items()))


def contradictions(rows: Sequence[OptionsRow], names: Collection[str]) -> list[str]:
    """Options that two of the names of one fragment give different values, one sentence each."""
    first: dict[str, tuple[str, str]] = {}
    found = []
    for row in (row for row in rows if row.name and row.name in names):
        for option, value in row.options:
            pair = option_pair(option, value)
            before, name = first.setdefault(option, (pair, row.name))
            if before != pair:
                found.append(f"{before} for {name!r}, {pair} for {row.name!r}")
    return found


def with_options(options: FragmentOptions, more: Mapping[str, OptionValue]) -> FragmentOptions:
    return tuple(sorted((dict(options) | dict(more)).items()))


def titled(fragment: str, options: FragmentOptions) -> str:
    """The line above a text of a fragment: its name, and the options with which it was compiled."""
    return " ".join([f"// {fragment}", *(option_pair(name, value) for name, value in options)])


def option_pair(name: str, value: OptionValue) -> str:
    """An option as text: `xla_gpu_enable_command_buffer=''`."""
    return f"{name}={value!r}"
