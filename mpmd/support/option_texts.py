"""Options of passes with a text form: placements, `f@m1/0`, `0@m1#pinned_host`, `0:1`, and XLA's options.

A fragment is compiled with the options of the rows that name it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from mpmd.errors import ConfigError, collect


@dataclasses.dataclass(frozen=True)
class NamePlacement:
    """A mesh, and perhaps a pipeline stage and a kind of memory on it."""

    mesh: str
    stage: int | None = None
    memory_kind: str | None = None

    @classmethod
    def parse(cls, text: str) -> NamePlacement:
        """The placement in `m1`, `m1/0`, `m1#pinned_host` or `m1#pinned_host/0`.

        Raises:
            ConfigError: there is no mesh name, or the memory kind is none of `device`, `pinned_host`.
        """
        match = re.fullmatch(r"([^#]+?)(?:#([^/]*))?(?:/(\d+))?", text)
        if match is None:
            raise ConfigError(
                f"cannot read the place {text!r}\n  expected: mesh, mesh/stage or mesh#memory_kind"
            )
        if match[2] not in (None, "device", "pinned_host"):
            raise ConfigError(f"unknown memory kind {match[2]!r} in {text!r}\n  known: device, pinned_host")
        return cls(match[1], None if match[3] is None else int(match[3]), match[2])

    def __str__(self) -> str:
        kind = "" if self.memory_kind is None else f"#{self.memory_kind}"
        return self.mesh + kind + ("" if self.stage is None else f"/{self.stage}")


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Name of a computation or tensor -> its place: `f@m1/0,g@m2#pinned_host`."""

    entries: tuple[tuple[str, NamePlacement], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Assignment:
        """The assignment in an option's text.

        Raises:
            ConfigError: an entry that is not `name@place`, or a name with two places; all of them.
        """
        return cls.of(_entry(part, text) for part in text.split(",") if part)

    @classmethod
    def of(cls, places: Mapping[str, NamePlacement] | Iterable[tuple[str, NamePlacement]]) -> Assignment:
        """The assignment with these names.

        Raises:
            ConfigError: a name has two different places.
        """
        entries = tuple(dict.fromkeys(places.items() if isinstance(places, Mapping) else places))
        seen: dict[str, NamePlacement] = {}
        problems = []
        for name, place in entries:
            if name in seen:
                problems.append(f"{name!r} is assigned to {seen[name]} and to {place}; choose one")
            seen.setdefault(name, place)
        if problems:
            raise collect(ConfigError, problems, "names with two places:")
        return cls(entries)

    def get(self, name: str) -> NamePlacement | None:
        """The placement of a name; None if it is not assigned."""
        return dict(self.entries).get(name)

    @property
    def places(self) -> dict[str, NamePlacement]:
        """Name -> place."""
        return dict(self.entries)

    def __str__(self) -> str:
        return ",".join(f"{name}@{place}" for name, place in self.entries)


NOTHING = Assignment()
"""No name is assigned."""


def _entry(part: str, text: str) -> tuple[str, NamePlacement]:
    name, at, place = part.rpartition("@")
    if not at or not name or not place:
        raise ConfigError(
            f"cannot read {part!r} in the assignment {text!r}\n  expected: name@mesh or name@mesh/stage"
        )
    return name, NamePlacement.parse(place)


@dataclasses.dataclass(frozen=True)
class IndexPlace:
    """The place of the argument or result with a flat index: `0@m1#pinned_host`."""

    index: int
    place: NamePlacement

    @classmethod
    def parse(cls, text: str) -> IndexPlace:
        """The placement in `0@m1`.

        Raises:
            ConfigError: it is not `index@place`.
        """
        index, at, place = text.partition("@")
        if not at or not index.isdecimal():
            raise ConfigError(f"cannot read {text!r}\n  expected: index@mesh or index@mesh#memory_kind")
        return cls(int(index), NamePlacement.parse(place))

    def __str__(self) -> str:
        return f"{self.index}@{self.place}"


@dataclasses.dataclass(frozen=True)
class Constraint:
    """Input `input` and output `output` of the entry function are to be on one mesh: `0:1`."""

    input: int
    output: int

    @classmethod
    def parse(cls, text: str) -> Constraint:
        """The constraint in `0:1`.

        Raises:
            ConfigError: it is not `input:output`.
        """
        match = re.fullmatch(r"(\d+):(\d+)", text)
        if match is None:
            raise ConfigError(f"cannot read the constraint {text!r}\n  expected: input:output, such as 0:1")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.input}:{self.output}"


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
    problems = []
    for row in (row for row in rows if row.name and row.name in names):
        for option, value in row.options:
            pair = option_pair(option, value)
            before, name = first.setdefault(option, (pair, row.name))
            if before != pair:
                problems.append(f"{before} for {name!r}, {pair} for {row.name!r}")
    return problems


def with_options(options: FragmentOptions, more: Mapping[str, OptionValue]) -> FragmentOptions:
    return tuple(sorted((dict(options) | dict(more)).items()))


def titled(fragment: str, options: FragmentOptions) -> str:
    """The line above a text of a fragment: its name, and the options with which it was compiled."""
    return " ".join([f"// {fragment}", *(option_pair(name, value) for name, value in options)])


def option_pair(name: str, value: OptionValue) -> str:
    """An option as text: `xla_gpu_enable_command_buffer=''`."""
    return f"{name}={value!r}"
