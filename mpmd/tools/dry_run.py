"""`mpmd-run --dry-run`: a script in a world that need not be here, up to the first step that it compiles.

This process is process 0 of the world, and JAX has the devices of all.  The step is partitioned for all of
them, its forecast is printed, and the script ends there: with exit code 0, or 1 if the step does not fit.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mpmd import jax_distributed
from mpmd.api.aot import Lowered
from mpmd.compile.backends.targets import DESCRIBED
from mpmd.config.described import DescribedWorld, describe
from mpmd.cost.device import HOST, Device
from mpmd.planning.nearest_fit import nearest_fit
from mpmd.planning.step_forecast import forecast
from mpmd.tools.joined import run_command


def main(arguments: Sequence[str]) -> None:
    """Takes processes, devices of each, their kind, bytes of one or 0, a folder or "", and the command."""
    processes, devices, kind, memory, out, *command = arguments
    device = Device.parse(kind)
    jax_distributed.join_placeholders(int(processes), int(devices))
    began = time.perf_counter()

    def take(lowered: Lowered) -> NoReturn:
        found = forecast(lowered, world)
        found = dataclasses.replace(found, took_s=time.perf_counter() - began)
        if found.too_large:
            found = dataclasses.replace(found, nearest=nearest_fit(found))
        if out:
            found.write(Path(out))
        print(found, flush=True)
        raise SystemExit(1 if found.too_large else 0)

    world = DescribedWorld(
        int(processes),
        int(devices),
        device,
        target=device.name if device.name in DESCRIBED else "cpu",
        memory_bytes=int(memory) or device.memory_bytes,
        is_here=device is HOST,
        take=take,
    )
    describe(world)
    run_command(command)
    print("mpmd-run: the script ended without a step that mpmd.jit compiled", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
