"""Writes the page, or runs mutants: see the docstring of the package."""

import sys

from tests.preconditions import rows
from tests.preconditions.mutant import survives
from tests.preconditions.page import PAGE, page

if len(sys.argv) == 1:
    PAGE.write_text(page(), encoding="utf-8")
else:
    room, *numbers = sys.argv[1:]
    chosen = [int(n) for n in numbers] or range(len(rows(room)))
    alive = 0
    for number in chosen:
        problem = survives(room, number)
        alive += bool(problem)
        print(
            f"{number} {rows(room)[number].rewrite}: {'SURVIVES ' + problem if problem else 'noticed'}",
            flush=True,
        )
    print(f"{len(chosen) - alive} of {len(chosen)} are noticed")
    sys.exit(bool(alive))
