"""Python packages that the experiments need, and the quick way to install missing ones.

    python benchmarks/gpu/prepare.py                                   says what is there
    python benchmarks/gpu/prepare.py --wheels DIR --target SITE      installs missing packages from wheels in
    DIR python benchmarks/gpu/prepare.py --network --target SITE           installs it from the package index

Then SITE goes to the front of PYTHONPATH.  Installing unpacks wheels and nothing else: no dependencies are
resolved, nothing is compiled to bytecode.  `run.py --wheels DIR` does all of this itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import subprocess
import sys
import time
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Package:
    """A distribution.

    Attributes:
        least: the oldest version that will do.
        wanted: what to install if there is none.
        why: what it is for.
    """

    name: str
    least: tuple[int, ...]
    wanted: str
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
        Package("jax", (0, 10, 2), "0.11.2", "everything"),
        Package("jaxlib", (0, 10, 2), "0.11.2", "everything"),
        Package("jax-cuda13-plugin", (0, 10, 2), "0.11.2", "JAX on the GPU"),
        Package("jax-cuda13-pjrt", (0, 10, 2), "0.11.2", "JAX on the GPU"),
        Package("numpy", (2, 0), "2.5.2", "everything"),
        Package("llvmlite", (0, 46), "0.50.0", "handlers and kernels"),
        Package("absl-py", (2, 1), "2.5.1", "the library's flags"),
        Package("triton", (3, 6), "3.6.0", "attention kernels"),
        Package("flax", (0, 12), "0.12.12", "the example"),
        Package("optax", (0, 2, 5), "0.2.8", "the example"),
        Package("pytest", (8, 3), "9.2.0", "version_drift runs tests"),
        Package("hypothesis", (6, 100), "6.170.15", "version_drift runs tests"),
    )
}


def missing(gpu: bool) -> list[Package]:
    """Packages that are missing or too old."""
    return [p for p in PACKAGES.values() if not p.is_here and (gpu or "cuda" not in p.name)]


def install(packages: list[Package], target: Path, wheels: Path | None) -> float:
    """Installs packages; seconds it took.

    Raises:
        RuntimeError: pip failed; with its last words.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-compile",
    ]
    command += ["--no-cache-dir", "--upgrade", "--target", str(target), "--no-deps"]
    if wheels is not None:
        command += ["--no-index", "--find-links", str(wheels)]
    command += [f"{p.name}=={p.wanted}" if wheels is None else p.name for p in packages]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(
            f"pip could not install {', '.join(p.name for p in packages)}:\n{done.stderr[-1500:]}"
        )
    return time.monotonic() - begin


def report(gpu: bool = True) -> None:
    """Prints installed and missing packages."""
    for package in PACKAGES.values():
        found = package.found()
        state = "here" if package.is_here else "MISSING" if found is None else "TOO OLD"
        needed = ".".join(map(str, package.least))
        print(f"{state:8} {package.name:18} {found or '-':12} needs {needed:8} for {package.why}")
    gone = missing(gpu)
    if gone:
        names = " ".join(f"{p.name}=={p.wanted}" for p in gone)
        print("\nwith a network, fetch wheels for Python 3.12:")
        print(f"  python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 -d DIR {names}")


def main() -> None:
    """Prints installed packages; installs missing ones on request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, help="folder with wheels")
    parser.add_argument("--network", action="store_true", help="take them from the package index")
    parser.add_argument("--target", type=Path, default=Path("/tmp/mpmd_gpu_site"), help="where they go")
    parser.add_argument("--no_gpu", action="store_true", help="without what only a GPU needs")
    args = parser.parse_args()
    gone = missing(not args.no_gpu)
    if gone and (args.wheels or args.network):
        seconds = install(gone, args.target, args.wheels)
        print(f"installed {', '.join(p.name for p in gone)} in {seconds:.1f} s; PYTHONPATH={args.target}")
        return
    report(not args.no_gpu)
    sys.exit(1 if gone else 0)


if __name__ == "__main__":
    main()
