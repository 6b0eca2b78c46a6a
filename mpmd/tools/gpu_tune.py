"""``mpmd-gpu-tune``: measures the tiles of a program's kernels on this GPU, and keeps the fastest.

python train.py --mpmd_backend=native --mpmd_dump_to=out/dump     what the program compiles
mpmd-gpu-tune out/dump --mpmd_compile_cache_dir=out/cache         once on each kind of GPU
python train.py --mpmd_backend=native --mpmd_compile_cache_dir=out/cache
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpmd.compile import hlo
from mpmd.errors import ConfigError, MpmdError
from mpmd.tools.command_line import run_script, version_text
from mpmd.tools.hlo_opt import fragment_of

_BEFORE = "before_optimizations.txt"
"""In a dump, the module of a fragment before any pass."""


def main(argv: Sequence[str] | None = None) -> int:
    """Fills the table; returns 0, or 1 after an error."""
    given = _parser().parse_args(argv)
    try:
        files = list(dict.fromkeys(_files(given.paths)))
        texts = dict.fromkeys(path.read_text() for path in files)
        modules = [hlo.parse_module(text, "input") for text in texts]
        from mpmd.compile.backends.targets import TUNERS, TuningTask  # a third of a second to import

        task = TuningTask([(fragment_of(m), m) for m in modules], given.folder, given.seconds, given.again)
        TUNERS["gpu"](task, functools.partial(print, flush=True))
    except (MpmdError, OSError, UnicodeDecodeError) as error:
        print(f"mpmd-gpu-tune: {error}", file=sys.stderr)
        return 1
    return 0


def run() -> None:
    run_script(main)


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    """The files that are given, and the modules in folders.

    Raises:
        ConfigError: a folder has none.
    """
    for path in paths:
        files = sorted(path.rglob(_BEFORE)) if path.is_dir() else [path]
        if not files:
            raise ConfigError(
                f"{path} has no modules of fragments\n"
                f"  expected files {_BEFORE}, which --mpmd_dump_to={path} writes"
            )
        yield from files


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpmd-gpu-tune",
        description="Measures tiles of GPU kernels on the first GPU of this machine. The table is kept in "
        "the folder of the compile cache, and counts for programs that are compiled with that folder.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="HLO text, or a dump's folder")
    parser.add_argument(
        "--mpmd_compile_cache_dir", dest="folder", type=Path, required=True, help="of the compile cache"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no kernel is begun (600)")
    parser.add_argument("--again", action="store_true", help="measure kernels again that are in the table")
    parser.add_argument("--version", action="version", version=version_text("mpmd-gpu-tune"))
    return parser


if __name__ == "__main__":
    run()
