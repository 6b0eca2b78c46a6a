"""Python packages that the experiments need.

python benchmarks/gpu/packages.py      lists those that are here, and how to fetch the others
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys


@dataclasses.dataclass(frozen=True)
class Package:
    """A distribution.

    Attributes:
        least: the oldest version that will do.
        why: what it is for.
    """

    name: str
    least: tuple[int, ...]
    why: str

    def found(self) -> str | None:
        """The version that is here."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None

    @property
    def is_here(self) -> bool:
        """Whether a version that will do is here."""
        found = self.found()
        return found is not None and version_numbers(found) >= self.least


def version_numbers(text: str) -> tuple[int, ...]:
    """`3.6.0+cu13` -> (3, 6, 0)."""
    numbers = []
    for part in text.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


PACKAGES = {
    package.name: package
    for package in (
        Package("jax", (0, 10, 2), "everything"),
        Package("jaxlib", (0, 10, 2), "everything"),
        Package("jax-cuda13-plugin", (0, 10, 2), "JAX on the GPU"),
        Package("jax-cuda13-pjrt", (0, 10, 2), "JAX on the GPU"),
        Package("numpy", (2, 0), "everything"),
        Package("llvmlite", (0, 46), "handlers and kernels"),
        Package("absl-py", (2, 1), "the library's flags"),
        Package("triton", (3, 6), "kernels that are not prepared"),
        Package("flax", (0, 12), "the example"),
        Package("optax", (0, 2, 5), "the example"),
        Package("pytest", (8, 3), "version_drift runs tests"),
        Package("hypothesis", (6, 100), "version_drift runs tests"),
    )
}


def missing(gpu: bool) -> list[Package]:
    """Packages that are missing or too old."""
    return [p for p in PACKAGES.values() if not p.is_here and (gpu or "cuda" not in p.name)]


def main() -> None:
    """Prints installed packages; ends with 1 if one is missing."""
    for package in PACKAGES.values():
        found = package.found()
        state = "here" if package.is_here else "MISSING" if found is None else "TOO OLD"
        needed = ".".join(map(str, package.least))
        print(f"{state:8} {package.name:18} {found or '-':12} needs {needed:8} for {package.why}")
    gone = missing(gpu=True)
    if gone:
        names = " ".join(f"'{p.name}>={'.'.join(map(str, p.least))}'" for p in gone)
        print(f"\nwith a network:\n  python3 -m pip install {names}")
    sys.exit(1 if gone else 0)


if __name__ == "__main__":
    main()
