"""One process of `mpmd-run`: joins the others, and runs the script."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import jax

from mpmd import jax_distributed
from mpmd.runtime.processes.world import Failure, world

HEARTBEAT_SECONDS = 3600
"""JAX ends a process without an exception once the coordinator has missed it for so long, as after the
machine was suspended.  Lost processes are noticed by `processes.monitor` long before."""


def main(arguments: list[str]) -> None:
    """Takes the address of the coordinator, the count, the index, devices, cores, and the command."""
    address, count, index, devices, cores, *command = arguments
    jax.config.update("jax_num_cpu_devices", int(devices))
    if int(count) > 1:
        jax_distributed.join_world(address, int(count), int(index), HEARTBEAT_SECONDS)
        joined = world()
        assert joined is not None
        joined.cores = tuple(int(core) for core in cores.split(",") if core)
    try:
        run_command(command)
    except SystemExit as ended:
        joined = world()
        if ended.code not in (None, 0) and joined is not None:
            joined.exit_code = ended.code if isinstance(ended.code, int) else 1
            joined.stop()
            joined.report(Failure(joined.index, f"ended with exit code {joined.exit_code}"))
        raise


def run_command(command: list[str]) -> None:
    """Runs the script or module as Python does."""
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
