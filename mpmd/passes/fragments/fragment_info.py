"""The identity of a fragment in the user's rules, as a record with a text form."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from mpmd import ir
from mpmd.errors import ConfigError

SPLIT_TYPES = {"kKeepTransferred": "split_keep_transferred", "kDropTransferred": "split_drop_transferred"}


@dataclasses.dataclass(frozen=True, eq=False)
class FragmentInfo:
    """Origins and attributes of a fragment: everything by which rules distinguish fragments.

    Two infos are equal whatever the order of their origins.

        FragmentInfo(origins=["f","g"(1)],stage=0,call_counter=1,split_type=kDropTransferred,mesh_name="m1")

    Attributes:
        origins: in the order of the origins of a merged fragment.
        stage: its pipeline stage, if it has one.
        call_counter: its microbatch, if it has one.
        split_type: `"kKeepTransferred"` or `"kDropTransferred"`, if it is a half of a split fragment.
        mesh_name: its mesh; None only in rules without one.
    """

    origins: tuple[ir.Origin, ...]
    stage: int | None = None
    call_counter: int | None = None
    split_type: str | None = None
    mesh_name: str | None = None

    def __post_init__(self) -> None:
        if self.split_type is not None and self.split_type not in SPLIT_TYPES:
            raise ConfigError(
                f"{self.split_type!r} is not a kind of split fragment; there are {', '.join(SPLIT_TYPES)}"
            )

    def _key(self) -> tuple[object, ...]:
        return (tuple(sorted(self.origins)), self.stage, self.call_counter, self.split_type, self.mesh_name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FragmentInfo) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    @staticmethod
    def of(fragment: ir.Fragment) -> FragmentInfo:
        split = next((kind for kind, name in SPLIT_TYPES.items() if name in fragment.attributes), None)
        return FragmentInfo(
            tuple(fragment.origins), fragment.stage, fragment.call_counter, split, fragment.mesh
        )

    def put_on(self, fragment: ir.Fragment) -> None:
        """Sets the attributes of a fragment from the info; missing ones are removed, except the mesh."""
        fragment.origins = list(self.origins)
        fragment.stage, fragment.call_counter = self.stage, self.call_counter
        for kind, name in SPLIT_TYPES.items():
            setattr(fragment, name, self.split_type == kind)
        if self.mesh_name is not None:
            fragment.mesh = self.mesh_name

    @staticmethod
    def parse(text: str) -> FragmentInfo:
        """The info in a text; all fields but `origins` may be left out, in any order.

        Raises:
            ConfigError: the text is not an info; reports the position of the error.
        """
        reader = _TextReader(text)
        info = reader.info()
        reader.end()
        return info

    def __str__(self) -> str:
        parts = [f"origins=[{','.join(map(str, self.origins))}]"]
        parts += [f"stage={self.stage}"] if self.stage is not None else []
        parts += [f"call_counter={self.call_counter}"] if self.call_counter is not None else []
        parts += [f"split_type={self.split_type}"] if self.split_type is not None else []
        parts += [f'mesh_name="{self.mesh_name}"'] if self.mesh_name is not None else []
        return f"FragmentInfo({','.join(parts)})"


@dataclasses.dataclass(frozen=True)
class FragmentMergeRule:
    """`FragmentMergeRule(sources=[INFO,INFO],target=INFO)`: merge the sources into one that is the target."""

    sources: tuple[FragmentInfo, ...]
    target: FragmentInfo

    @staticmethod
    def parse(text: str) -> FragmentMergeRule:
        """The rule in a text.

        Raises:
            ConfigError: the text is not such a rule.
        """
        reader = _TextReader(text)
        reader.take(r"FragmentMergeRule\s*\(\s*sources\s*=", "FragmentMergeRule(sources=")
        sources = reader.infos(",")
        reader.take(r",\s*target\s*=", ",target=")
        target = reader.info()
        reader.take(r"\)", ")")
        reader.end()
        return FragmentMergeRule(sources, target)

    def __str__(self) -> str:
        return f"FragmentMergeRule(sources=[{','.join(map(str, self.sources))}],target={self.target})"


@dataclasses.dataclass(frozen=True)
class FragmentScheduleRule:
    """`FragmentScheduleRule(ordered_fragments=[INFO->INFO])`: run these fragments in this order."""

    ordered_fragments: tuple[FragmentInfo, ...]

    @staticmethod
    def parse(text: str) -> FragmentScheduleRule:
        """The rule in a text.

        Raises:
            ConfigError: the text is not such a rule.
        """
        reader = _TextReader(text)
        reader.take(
            r"FragmentScheduleRule\s*\(\s*ordered_fragments\s*=", "FragmentScheduleRule(ordered_fragments="
        )
        ordered = reader.infos("->")
        reader.take(r"\)", ")")
        reader.end()
        return FragmentScheduleRule(ordered)

    def __str__(self) -> str:
        return f"FragmentScheduleRule(ordered_fragments=[{'->'.join(map(str, self.ordered_fragments))}])"


class _TextReader:
    """Reads such texts from left to right; spaces between words do not count."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def take(self, pattern: str, expected: str) -> re.Match[str]:
        """The next word, which must match."""
        match = self.found(pattern)
        if match is None:
            raise ConfigError(
                f"cannot read a rule at {self.text[self.at : self.at + 40]!r}: expected {expected}\n"
                f"  in {self.text}"
            )
        return match

    def found(self, pattern: str) -> re.Match[str] | None:
        """The next word, if it matches."""
        match = re.compile(rf"\s*(?:{pattern})").match(self.text, self.at)
        if match is not None:
            self.at = match.end()
        return match

    def end(self) -> None:
        self.take(r"\Z", "nothing more")

    def infos(self, separator: str) -> tuple[FragmentInfo, ...]:
        """`[INFO,INFO]`, with that separator."""
        self.take(r"\[", "[")
        parsed = [self.info()]
        while self.found(separator):
            parsed.append(self.info())
        self.take(r"\]", f"{separator} or ]")
        return tuple(parsed)

    def info(self) -> FragmentInfo:
        """`FragmentInfo(...)`."""
        self.take(r"FragmentInfo\s*\(", "FragmentInfo(")
        origins: tuple[ir.Origin, ...] | None = None
        fields: dict[str, Any] = {}
        while True:
            name = self.take(_FIELDS, "one of origins, stage, call_counter, split_type, mesh_name")[1]
            if name == "origins":
                origins = self.origins()
            elif name in ("stage", "call_counter"):
                fields[name] = int(self.take(r"(-?\d+)", "a number")[1])
            elif name == "split_type":
                fields[name] = self.take(r"(\w+)", "kKeepTransferred or kDropTransferred")[1]
            else:
                fields[name] = self.string()
            if not self.found(","):
                break
        self.take(r"\)", ", or )")
        if origins is None:
            raise ConfigError(f"a FragmentInfo needs its origins\n  in {self.text}")
        return FragmentInfo(origins, **fields)

    def origins(self) -> tuple[ir.Origin, ...]:
        """`["f","g"(1)]`; there may be none."""
        self.take(r"\[", "[")
        parsed: list[ir.Origin] = []
        while not self.found(r"\]"):
            if parsed:
                self.take(",", ", or ]")
            name, count = self.string(), self.found(r"\((\d+)\)")
            parsed.append(ir.Origin(name, int(count[1]) if count else 0))
        return tuple(parsed)

    def string(self) -> str:
        return self.take(r'"((?:[^"\\]|\\.)*)"', 'a name in "quotes"')[1]


_FIELDS = r"(origins|stage|call_counter|split_type|mesh_name)\s*="
