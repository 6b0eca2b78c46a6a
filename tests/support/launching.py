"""Programs of `tests.support` in several processes of this machine, by `mpmd-run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.repo.tree import ROOT


def launch(
    processes: int, module: str, *arguments: str, seconds: float = 120, devices: int = 1
) -> tuple[int, list[Any]]:
    """The exit code, and the JSON lines that the processes printed; all end after some seconds."""
    count = ["-n", str(processes), "--devices", str(devices)]
    command = [sys.executable, "-m", "mpmd.tools.run", *count, "-m", module, *arguments]
    done = output(command, seconds)
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    return done.returncode, [json.loads(line) for line in lines if line.startswith("{")]


def output(command: list[str], seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs a command in the root of the project, with one device for each process."""
    kept = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment = {**kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        try:
            out, err = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.terminate()  # it ends the processes that it started
            raise
        return subprocess.CompletedProcess(command, child.returncode, out, err)
