"""Prints `NAME==LOWEST` for each lower bound of pyproject.toml that users meet: `make test JAX=lowest`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

USERS = "example", "plot"
"""Extras whose lower bounds are a promise; those of development are not."""

BOUND = re.compile(r"^([\w-]+)>=([\d.]+)")


def lowest_versions() -> list[str]:
    """One requirement for each dependency."""
    path = Path(__file__).resolve().parents[2] / "pyproject.toml"
    project = tomllib.loads(path.read_text())["project"]
    extras = project["optional-dependencies"]
    given = [*project["dependencies"], *(line for extra in USERS for line in extras[extra])]
    bounds = [BOUND.match(line) for line in given]
    assert all(bounds), "a dependency has no lower bound"
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound]


if __name__ == "__main__":
    print(*lowest_versions())
