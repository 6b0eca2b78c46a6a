"""Freed memory stays with the process when it is asked to."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from mpmd.runtime.host_memory import keep_freed_memory

def faults():
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(32):
        np.empty(2**26, np.uint8).fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start

kept = keep_freed_memory() if sys.argv[1] == "keep" else False
faults()
print(kept, faults())
"""


def _run(mode: str) -> tuple[str, int]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    return kept, int(faults)


def test_blocks_that_were_freed_are_used_again_without_page_faults() -> None:
    kept, faults = _run("keep")
    if kept == "False":
        pytest.skip("this C library has no mallopt")
    _, faults_without = _run("default")
    assert faults < faults_without / 4  # of 4 KiB or of 2 MiB each, as the system likes
