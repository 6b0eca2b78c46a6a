"""Many random programs of leaves: `python -m tests.support.random_hlo.leaves --first 0 --count 2000`.

Prints each disagreement with its seed; the last line is JSON.  Exits with 1 if there was one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from tests.support.native_hlo import quick_code
from tests.support.random_hlo.leaves.agreement import IN_TWO, WHOLE, disagreement, one_way
from tests.support.xla_hlo import XlaWorker


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    parser.add_argument("--count", type=int, default=1000, help="number of programs")
    parser.add_argument("--xla-every", type=int, default=0, help="compare each n-th program with XLA, too")
    parser.add_argument(
        "--one-way",
        action="store_true",
        help="run programs of even seeds whole and the others cut in two, not each both ways",
    )
    asked = parser.parse_args()
    found, with_xla, told = 0, 0, time.monotonic()
    with XlaWorker() as xla, quick_code():
        for seed in range(asked.first, asked.first + asked.count):
            also = bool(asked.xla_every) and seed % asked.xla_every == 0
            ways = (one_way(seed),) if asked.one_way else (WHOLE, IN_TWO)
            problem = disagreement(seed, xla if also else None, ways)
            with_xla += also
            found += bool(problem)
            if problem:
                print(problem, flush=True)
            if time.monotonic() - told > 60:
                told = time.monotonic()
                print(f"{seed + 1 - asked.first} of {asked.count} programs, {found} differ", flush=True)
    counts = {"first": asked.first, "programs": asked.count, "with_xla": with_xla, "differ": found}
    print(json.dumps({**counts, "cpu_seconds": round(time.process_time(), 1)}))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
