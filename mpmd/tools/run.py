"""`mpmd-run`: one script in several processes of this machine.

    mpmd-run -n 4 train.py --steps 100
    mpmd-run -n 2 --devices 2 -m package.train

Every process runs the script; `mpmd.make_topology` then takes the devices of all.  Lines of output begin
with the index of the process.  If one fails, the others have some seconds to report it, and are then ended;
the exit code is that of the first that failed.  The coordinator of `jax.distributed` runs in this program
and listens on loopback only.

The script finds two environment variables: `MPMD_RUN_ID` is another for each `mpmd-run`, and
`MPMD_RESTART_COUNT` counts how often all processes were started again because one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from mpmd import jax_distributed
from mpmd.tools.command_line import version_text
from mpmd.tools.joined import HEARTBEAT_SECONDS

_POLL_SECONDS = 0.05
_END_SECONDS = 3.0
_NOISE = re.compile(r"\[Gloo\] Rank \d+ is connected")
_PRINTING = threading.Lock()


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """What to start.

    Attributes:
        processes: how many.
        devices: CPU devices of each.
        grace: seconds that the others have to end after one has failed.
        restarts: how often all processes are started again after a failure.
        pin: give each process cores of its own, if there are as many cores as processes.
        command: `[script, *arguments]` or `["-m", module, *arguments]`.
    """

    processes: int
    devices: int
    grace: float
    restarts: int
    pin: bool
    command: tuple[str, ...]


def parse(arguments: Sequence[str]) -> LaunchPlan:
    """The command line; ends the program with a usage message if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="mpmd-run", description="Runs one script in several processes of this machine."
    )
    parser.add_argument("--version", action="version", version=version_text("mpmd-run"))
    parser.add_argument("-n", dest="processes", type=int, required=True, help="how many processes")
    parser.add_argument("--devices", type=int, default=1, help="CPU devices of each process (default: 1)")
    parser.add_argument(
        "--grace",
        type=float,
        default=15.0,
        help="seconds that the others have after one failed (default: 15)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        help="how often all are started again after a failure (default: 0)",
    )
    parser.add_argument("--no-pin", action="store_true", help="let every process run on all cores")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="script.py [arguments]")
    found = parser.parse_args(list(arguments))
    if not found.command:
        parser.error("no script was given, such as: mpmd-run -n 2 train.py")
    for name in ("processes", "devices"):
        if getattr(found, name) < 1:
            parser.error(f"{'-n' if name == 'processes' else '--devices'} must be at least 1")
    if not found.module and not os.path.exists(found.command[0]):
        parser.error(f"there is no file {found.command[0]!r}")
    command = (*(["-m"] if found.module else []), *found.command)
    pin = not found.no_pin
    return LaunchPlan(found.processes, found.devices, found.grace, found.max_restarts, pin, command)


def threads(processes: int, cores: int) -> int:
    """How many threads JAX's client of each process has, if processes are kept on their shares of the cores.

    A process with cores of its own has two at least: a collective may hold one.  Processes that share a core
    have one each: of two, the second runs while another process could.
    """
    size = cores // processes
    return max(2, size) if size else 1


def shares(processes: int, cores: Sequence[int]) -> list[Sequence[int]]:
    """The cores of each process: contiguous runs of equal length, or all cores if there are too few."""
    size = len(cores) // processes
    return [cores[k * size : (k + 1) * size] if size else cores for k in range(processes)]


class _Children:
    """The processes of one start."""

    def __init__(self, launch: LaunchPlan, address: str, environment: Mapping[str, str]) -> None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        of_each: list[Sequence[int]] = [cores] * launch.processes
        own = dict[str, str]()
        if launch.pin and cores:
            of_each = shares(launch.processes, cores)
            own["NPROC"] = str(threads(launch.processes, len(cores)))  # read by XLA
        self.processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        for index in range(launch.processes):
            place = (address, str(launch.processes), str(index), str(launch.devices))
            chosen = ",".join(map(str, of_each[index]))
            child = subprocess.Popen(
                [sys.executable, "-u", "-m", "mpmd.tools.joined", *place, chosen, *launch.command],
                env={**own, **os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            self.processes.append(child)
            for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
                reader = threading.Thread(target=_pass_on, args=(source, target, index), daemon=True)
                reader.start()
                self._readers.append(reader)

    def wait(self, grace: float) -> int:
        """Waits for all; after a failure at most `grace` seconds.  The exit code of the first that failed."""
        first, until = 0, float("inf")
        while True:
            codes = [child.poll() for child in self.processes]
            failed = [code for code in codes if code]
            if failed and not first:
                first, until = failed[0], time.monotonic() + grace
            if None not in codes or time.monotonic() > until:
                return 128 - first if first < 0 else first
            time.sleep(_POLL_SECONDS)

    def end(self) -> None:
        """Ends those that still run, by their process ids, and prints the rest of their output."""
        for send in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for child in self.processes:
                if child.poll() is None:
                    send(child)
                    child.send_signal(signal.SIGCONT)  # one that was stopped ends, too
            until = time.monotonic() + _END_SECONDS
            while any(child.poll() is None for child in self.processes) and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
        for reader in self._readers:
            reader.join(1.0)


def _pass_on(source: IO[str], target: IO[str], index: int) -> None:
    for line in source:
        if not _NOISE.match(line):
            with _PRINTING:
                target.write(f"[{index}] {line}" if line.endswith("\n") else f"[{index}] {line}\n")
                target.flush()


@contextlib.contextmanager
def _coordinator(processes: int) -> Iterator[str]:
    """The address of a coordinator on loopback, which runs in this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    service: Any = jax_distributed.coordination_service(address, processes, HEARTBEAT_SECONDS)
    if service is None:
        raise SystemExit("mpmd-run: this version of jaxlib cannot start a coordinator")
    try:
        yield address
    finally:
        service.shutdown()


def launch_once(launch: LaunchPlan, environment: Mapping[str, str]) -> int:
    """Starts all processes and waits for them; the exit code."""
    with _coordinator(launch.processes) as address:
        children = _Children(launch, address, environment)
        try:
            return children.wait(launch.grace)
        finally:
            children.end()


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; the exit code."""
    launch = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run_id = uuid.uuid4().hex
    try:
        for left in range(launch.restarts, -1, -1):
            count = str(launch.restarts - left)
            code = launch_once(launch, {"MPMD_RUN_ID": run_id, "MPMD_RESTART_COUNT": count})
            if code == 0 or left == 0:
                return code
            print(f"mpmd-run: exit code {code}; starting again, {left} left", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return 130
    return code


def run() -> None:
    """The console script."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
