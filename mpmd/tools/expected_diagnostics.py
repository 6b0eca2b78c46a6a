"""Findings of a run of `mpmd-opt`, and the comments in a file that say which ones are expected.

    // expected-error@+1 {{words that the message contains}}

The kinds are `error`, `warning`, `remark` and `note`.  With `-re` after the kind, the text in an inner `{{}}`
is a regular expression, in which `.` matches ends of lines too.  The place is the comment's own line, or
`@+N`, `@-N`, `@above`, `@below` (the nearest line that holds no expectation), or `@unknown`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

_EXPECTATION = re.compile(
    r"expected-(error|warning|remark|note)(-re)?\s*(@(?:[+-]\d+|above|below|unknown))?\s*\{\{(.*?)\}\}\s*(?=$|//)"
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One message at one place of a file.  `line` and `column` count from 1; None where they are unknown."""

    kind: str
    message: str
    line: int | None = None
    column: int | None = None

    def as_text(self, file: str) -> str:
        place = file if self.line is None else f"{file}:{self.line}:{self.column}"
        return f"{place}: {self.kind}: {self.message}"


@dataclasses.dataclass(frozen=True)
class Expectation:
    """One `expected-` comment; `written` is the line of the comment itself."""

    kind: str
    words: str
    is_regex: bool
    line: int | None
    written: int

    def admits(self, finding: Finding) -> bool:
        """Whether the finding matches the expectation."""
        if self.kind != finding.kind or self.line != finding.line:
            return False
        if self.is_regex:
            return re.search(_as_regex(self.words), finding.message, re.DOTALL) is not None
        return self.words in finding.message


def _as_regex(words: str) -> str:
    """Text in inner `{{}}` is a regular expression, all other text is literal."""
    parts = re.split(r"\{\{(.*?)\}\}", words)
    return "".join(f"(?:{part})" if i % 2 else re.escape(part) for i, part in enumerate(parts))


def expectations(text: str) -> list[Expectation]:
    """The expectations of a text, in order."""
    lines = text.split("\n")
    found = [(number, match) for number, line in enumerate(lines, 1) for match in _EXPECTATION.finditer(line)]
    holding = {number for number, _ in found}
    return [
        Expectation(match[1], match[4], match[2] is not None, _line_meant(match[3], number, holding), number)
        for number, match in found
    ]


def _line_meant(place: str | None, written: int, holding: set[int]) -> int | None:
    if place is None:
        return written
    if place == "@unknown":
        return None
    if place in ("@above", "@below"):
        step = -1 if place == "@above" else 1
        line = written + step
        while line in holding:
            line += step
        return line
    return written + int(place[1:])


def mismatches(
    expected: Sequence[Expectation], findings: Iterable[Finding], only_expected: bool = False
) -> Iterator[Finding]:
    """An error for each finding that was not expected, then for each expectation that was not met.

    An expectation may match several findings, as in MLIR; those that have none yet come first.  Notes need
    not be expected; with `only_expected` unexpected findings are ignored.
    """
    open_ = list(expected)
    for finding in findings:
        match = next((e for e in [*open_, *expected] if e.admits(finding)), None)
        if match in open_:
            open_.remove(match)
        elif match is None and finding.kind != "note" and not only_expected:
            yield Finding(
                "error", f"unexpected {finding.kind}: {finding.message}", finding.line, finding.column
            )
    for e in open_:
        yield Finding("error", f'expected {e.kind} "{e.words}" was not produced', e.written, 1)
