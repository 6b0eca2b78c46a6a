"""Runs situations or writes their page: see the docstring of the package."""

import sys

import jax

from tests.support.situations import run, situations
from tests.support.situations.page import PAGE, page

jax.config.update("jax_num_cpu_devices", 2)

if sys.argv[1:] == ["--page"]:
    PAGE.write_text(page(), encoding="utf-8")
    sys.exit()
wanted, failed = sys.argv[1:], 0
for found in situations():
    if wanted and found.name not in wanted:
        continue
    try:
        outcome = run(found)
    except Exception as error:
        failed += 1
        outcome = f"FAILED: {type(error).__name__}: {error}"
    print(f"{found.name:28} {found.source:60} {outcome}", flush=True)
sys.exit(bool(failed))
