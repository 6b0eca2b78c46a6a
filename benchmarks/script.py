"""How a benchmark runs as a script, and how it ends."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable

READER_GONE = 141
"""What shells say of a program that wrote to a closed pipe: 128 and the number of SIGPIPE."""

COMPILER_FAULT = r"[\s\S]*please report this"
"""The warnings of a fault of the compiler, after which XLA takes over."""


def run(main: Callable[[], None]) -> None:
    """Runs a script; it ends without a word where who reads its output has read enough, as `head` does.

    A fault of the compiler is an error: the figures would be those of XLA.
    """
    warnings.filterwarnings("error", COMPILER_FAULT, UserWarning)
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes the output when it ends, and would report the closed pipe once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(READER_GONE)
