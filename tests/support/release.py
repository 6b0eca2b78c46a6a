"""Whether all files agree on a release, before its tag: `python -m tests.support.release v1.2.3`."""

from __future__ import annotations

import re
import sys

from mpmd.version import __version__
from tests.repo.tree import ROOT


def disagreements(tag: str, version: str, changelog: str, citation: str) -> list[str]:
    """What keeps a tag from being published; a line each."""
    found = []
    if tag != f"v{version}" or not re.fullmatch(r"\d+\.\d+\.\d+", version):
        found.append(f"the tag is {tag!r}, mpmd/version.py has {version!r}: expected 1.2.3 and v1.2.3")
    release = tag.removeprefix("v")
    newest = re.search(r"^## (.*)$", changelog, re.MULTILINE)
    if newest is None or not re.fullmatch(rf"{re.escape(release)} \(\d{{4}}-\d\d-\d\d\)", newest[1]):
        found.append(
            f"CHANGELOG.md begins with {newest and newest[1]!r}: expected {release} and a date, (2026-01-31)"
        )
    if f"\nversion: {release}\n" not in citation:
        found.append(f"CITATION.cff has another version than {release}")
    return found


if __name__ == "__main__":
    sys.exit(
        "\n".join(
            disagreements(
                sys.argv[1] if len(sys.argv) > 1 else "",
                __version__,
                (ROOT / "CHANGELOG.md").read_text(),
                (ROOT / "CITATION.cff").read_text(),
            )
        )
    )
