"""How a benchmark ends that is run as a script."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

READER_GONE = 141
"""What shells say of a program that wrote to a closed pipe: 128 and the number of SIGPIPE."""


def run(main: Callable[[], None]) -> None:
    """Runs a script; it ends without a word where who reads its output has read enough, as `head` does."""
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes the output when it ends, and would report the closed pipe once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(READER_GONE)
