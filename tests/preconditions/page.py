"""The table of preconditions as a page."""

from __future__ import annotations

from tests.preconditions import ROOT, always, rooms, rows

PAGE = ROOT / "docs" / "preconditions.md"
_HEAD = """\
<!-- made by `python -m tests.preconditions`: change the rows in tests/preconditions/ instead -->

# Preconditions

What each rewrite, planner and kernel requires before it applies, whether the result is the same bit for bit,
and the test that fails when the condition is dropped from the code. `make test-slow` drops each of them.
"""


def page() -> str:
    """Each room with its rows, and the rewrites that need none."""
    parts = [_HEAD]
    for room in rooms():
        parts.append(f"\n## {room.replace('_', ' ')}\n")
        if rows(room):
            parts.append("\n| in | must hold | result | test |\n|---|---|---|---|\n")
        for row in rows(room):
            parts.append(
                f"| {_where(row.rewrite)} | {_cell(row.holds)} | {_cell(row.exact)} | {_test(row.test)} |\n"
            )
        if always(room):
            parts.append("\n| always right | because |\n|---|---|\n")
            parts += [f"| {_where(rewrite)} | {_cell(why)} |\n" for rewrite, why in always(room).items()]
    return "".join(parts)


def _where(rewrite: str) -> str:
    file, _, name = rewrite.partition(":")
    return f"`{file.removeprefix('mpmd/')}` `{name}`" if name else f"`{file.removeprefix('mpmd/')}`"


def _test(test: str) -> str:
    file, _, name = test.partition("::")
    return f"`{file.removeprefix('tests/')}` `{name}`".replace("|", "\\|")


def _cell(text: str) -> str:
    for character in "<*[|":
        text = text.replace(character, "\\" + character)
    return text
