"""Writes the page, or runs mutants: see the docstring of the package."""

import os
import sys

from tests.preconditions import rows
from tests.preconditions.forks import unnoticed
from tests.preconditions.page import PAGE, page

if len(sys.argv) == 1:
    PAGE.write_text(page(), encoding="utf-8")
else:
    room, *numbers = sys.argv[1:]
    chosen = [int(n) for n in numbers] or range(len(rows(room)))
    with os.fdopen(os.dup(1), "w") as out:  # pytest takes 1 while it runs
        alive = unnoticed(room, chosen, lambda line: print(line, file=out, flush=True))
        print(f"{len(chosen) - len(alive)} of {len(chosen)} are noticed", file=out)
    sys.exit(bool(alive))
