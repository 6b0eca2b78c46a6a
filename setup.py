"""The description on the package index: README with links that lead to the repository."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
RELATIVE_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


def description() -> str:
    """README.md, whose relative links become links below `Source` of `[project.urls]`."""
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]

    def absolute(link: re.Match[str]) -> str:
        page = "raw" if link[1] else "blob"  # a picture is a file, not the page about it
        return f"{link[1]}[{link[2]}]({source}/{page}/main/{link[3]})"

    return RELATIVE_LINK.sub(absolute, (ROOT / "README.md").read_text())


setup(long_description=description(), long_description_content_type="text/markdown")
