"""`mpmd-run`: one script in several processes of this machine.

    mpmd-run -n 4 train.py --steps 100
    mpmd-run -n 2 --devices 2 -m package.train
    mpmd-run --dry-run -n 64 --devices H100:8 train.py

Every process runs the script; `mpmd.make_topology` then takes the devices of all.  Lines of output begin
with the index of the process; longer ones than 64 KiB are divided.  If one fails, the others have some
seconds to report it, and are then ended; the exit code comes from the first that failed.  A signal that ends
this program (SIGTERM, SIGINT, SIGHUP) ends them by SIGTERM, after the same seconds by force, and a second one
at once; SIGUSR1 and SIGUSR2 are passed on, and SIGTSTP stops them too.  If the output is not read any more,
they are ended, and the exit code is 141.  The coordinator of `jax.distributed` runs in this program and
listens on loopback only.

The script finds two environment variables: `MPMD_RUN_ID` is another for each `mpmd-run`, and
`MPMD_RESTART_COUNT` counts how often all processes were started again because one failed.

    mpmd-run -n 4 --max-restarts 2 --min-processes 2 train.py

goes on with three processes once four have failed for the third time, and then with two.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mpmd import jax_distributed
from mpmd.cost.device import Device, bytes_of
from mpmd.errors import ConfigError
from mpmd.tools.command_line import version_text
from mpmd.tools.joined import HEARTBEAT_SECONDS
from mpmd.tools.output import Printer, Reader, open_standard_files, wait_for_output

_POLL_SECONDS = 0.05
_END_SECONDS = 3.0
_CHILD = """
import ctypes, os, runpy, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit(1)
runpy.run_module("mpmd.tools.joined", run_name="__main__", alter_sys=True)
"""
"""A process ends with the launcher, however that ends: Linux kills it then (PR_SET_PDEATHSIG).  It must ask
for that before it imports anything that takes long."""


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """What to start.

    Attributes:
        processes: how many.
        devices: CPU devices of each.
        grace: seconds that the others have to end after one has failed.
        restarts: how often all processes are started again after a failure, with each number of them.
        at_least: how many processes the job may go on with, once these restarts are used up.
        pin: give each process cores of its own, if there are as many cores as processes.
        command: `[script, *arguments]` or `["-m", module, *arguments]`.
        kind: of the devices: a name that the compiler describes, if nothing runs.
        dry_run: nothing runs; the first step is forecast.
        memory: bytes of a device; 0 for those of the description.
        out: a folder for the forecast; "" for none.
    """

    processes: int
    devices: int
    grace: float
    restarts: int
    at_least: int
    pin: bool
    command: tuple[str, ...]
    kind: str = "host"
    dry_run: bool = False
    memory: int = 0
    out: str = ""


def parse(arguments: Sequence[str]) -> LaunchOptions:
    """The command line; ends the program with a usage message if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="mpmd-run", description="Runs one script in several processes of this machine."
    )
    parser.add_argument("--version", action="version", version=version_text("mpmd-run"))
    parser.add_argument("-n", dest="processes", type=int, required=True, help="how many processes")
    parser.add_argument(
        "--devices",
        default="1",
        help="CPU devices of each process (default: 1); in a dry run also others, such as H100:8",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="run nothing: forecast the time and memory of the first step"
    )
    parser.add_argument("--memory", default="", help="of a device in a dry run, such as 72GiB")
    parser.add_argument("--out", default="", help="a folder for the forecast of a dry run, with its pictures")
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
    parser.add_argument(
        "--min-processes",
        type=int,
        help="go on with fewer processes, down to so many, when these restarts are used up (default: never)",
    )
    parser.add_argument("--no-pin", action="store_true", help="let every process run on all cores")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="script.py [arguments]")
    parsed = parser.parse_args(list(arguments))
    if not parsed.command:
        parser.error("no script was given, such as: mpmd-run -n 2 train.py")
    kind, devices = _devices(parser, parsed.devices)
    for name, count in (("-n", parsed.processes), ("--devices", devices)):
        if count < 1:
            parser.error(f"{name} must be at least 1")
    for name, value in (("a kind of device", kind), ("--memory", parsed.memory), ("--out", parsed.out)):
        if value and not parsed.dry_run:
            parser.error(f"{name} is of a dry run only: add --dry-run")
    at_least = parsed.processes if parsed.min_processes is None else parsed.min_processes
    if not 1 <= at_least <= parsed.processes:
        parser.error(f"--min-processes is {at_least}; it must be from 1 to the {parsed.processes} of -n")
    if not parsed.module and not os.path.exists(parsed.command[0]):
        parser.error(f"there is no file {parsed.command[0]!r}")
    command = (*(["-m"] if parsed.module else []), *parsed.command)
    return LaunchOptions(
        parsed.processes, devices, parsed.grace, parsed.max_restarts, at_least, not parsed.no_pin, command,
        kind or "host", parsed.dry_run, _bytes(parser, parsed.memory), parsed.out,
    )  # fmt: skip


def _devices(parser: argparse.ArgumentParser, text: str) -> tuple[str, int]:
    """`H100:8` as a kind and a number; the kind of `8` is ""."""
    kind, _, count = text.rpartition(":")
    if not count.isdecimal():
        parser.error(
            f"--devices is {text!r}; it must be a number, or in a dry run a kind and a number: H100:8"
        )
    try:
        return (Device.parse(kind).name if kind else ""), int(count)
    except ConfigError as error:
        parser.error(f"--devices is {text!r}: {error}")


def _bytes(parser: argparse.ArgumentParser, text: str) -> int:
    try:
        return (bytes_of(text, "--memory") or 0) if text else 0
    except ConfigError as error:
        parser.error(str(error))


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

    def __init__(self, printer: Printer) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._printer = printer
        self._readers: list[Reader] = []

    def start(self, launch: LaunchOptions, address: str, environment: Mapping[str, str]) -> None:
        """Starts all of them, with what they need to join each other."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        of_each: list[Sequence[int]] = [cores] * launch.processes
        own = dict[str, str]()
        if launch.pin and cores:
            of_each = shares(launch.processes, cores)
            own["NPROC"] = str(threads(launch.processes, len(cores)))  # read by XLA
        for index in range(launch.processes):
            place = (address, str(launch.processes), str(index), str(launch.devices))
            chosen = ",".join(map(str, of_each[index]))
            child = subprocess.Popen(
                [sys.executable, "-u", "-c", _CHILD, str(os.getpid()), *place, chosen, *launch.command],
                env={**own, **os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            self.processes.append(child)
            for source, target in ((child.stdout, 1), (child.stderr, 2)):
                assert source is not None
                self._readers.append(Reader(source, target, index, self._printer))
                self._readers[-1].start()

    def wait(self, grace: float, signals: Signals) -> int:
        """Waits for all; after a failure at most `grace` seconds.

        Returns:
            The exit code of the first that failed; a signal's, if this program got one, or if its
            output is not read any more.
        """
        first, until = 0, float("inf")
        while True:
            if signals.received:
                return 128 + signals.received[0]
            if self._printer.failure is not None:
                return _code_of(self._printer.failure)
            codes = [child.poll() for child in self.processes]
            failed = [code for code in codes if code]
            if failed and not first:
                first, until = failed[0], time.monotonic() + grace
            if None not in codes or time.monotonic() > until:
                return 128 - first if first < 0 else first
            time.sleep(_POLL_SECONDS)

    def send(self, number: int) -> None:
        for child in self.processes:
            child.send_signal(number)

    def end(self, signals: Signals, grace: float) -> None:
        """Ends those that still run, by their process ids, and prints the rest of their output.

        Args:
            signals: a signal that comes meanwhile ends them at once.
            grace: seconds that they have to end by themselves.
        """
        known = len(signals.received)
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, _END_SECONDS)):
            self.send(number)
            self.send(signal.SIGCONT)  # one that was stopped ends, too
            until = time.monotonic() + seconds
            while any(child.poll() is None for child in self.processes) and time.monotonic() < until:
                if number == signal.SIGTERM and len(signals.received) > known:
                    break
                time.sleep(_POLL_SECONDS)
        wait_for_output(self._readers, lambda: len(signals.received) > known)


def _code_of(failure: OSError) -> int:
    """The exit code of a program whose output cannot be written."""
    if failure.errno == errno.EPIPE:
        return 128 + signal.SIGPIPE
    with contextlib.suppress(OSError):
        os.write(2, f"mpmd-run: the output cannot be written: {failure.strerror}\n".encode())
    return 1


class Signals:
    """What this program does with signals; those that it was started to ignore stay ignored.

    A handler only takes notes, so that it may come at any moment; the program looks at them all the time.

    Attributes:
        received: the signals that ask it to end.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.children: _Children | None = None
        self._handle((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), self._end)
        self._handle((signal.SIGUSR1, signal.SIGUSR2), self._forward)
        self._handle((signal.SIGTSTP,), self._pause)

    def _handle(self, numbers: Sequence[int], handler: Callable[[int, Any], None]) -> None:
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)

    def _end(self, number: int, frame: Any) -> None:
        self.received.append(number)

    def _forward(self, number: int, frame: Any) -> None:
        if self.children is not None:
            self.children.send(number)

    def _pause(self, number: int, frame: Any) -> None:
        """The processes stop with the coordinator, which is in this one, and go on with it."""
        if self.children is not None:
            self.children.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        if self.children is not None:
            self.children.send(signal.SIGCONT)


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


def launch_once(
    launch: LaunchOptions, environment: Mapping[str, str], signals: Signals, printer: Printer
) -> int:
    """Starts all processes and waits for them; the exit code."""
    with _coordinator(launch.processes) as address:
        signals.children = children = _Children(printer)
        try:
            children.start(launch, address, environment)
            return children.wait(launch.grace, signals)
        finally:
            children.end(signals, launch.grace if signals.received else _END_SECONDS)


def _dry_run(launch: LaunchOptions) -> int:
    """Runs the script in one process that stands for all."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {"NPROC": str(threads(launch.processes, cores)), **os.environ, "JAX_PLATFORMS": "cpu"}
    world = (launch.processes, launch.devices, launch.kind, launch.memory, launch.out)
    command = [sys.executable, "-u", "-m", "mpmd.tools.dry_run", *map(str, world), *launch.command]
    return subprocess.call(command, env=environment)


def main(arguments: Sequence[str]) -> int:
    launch = parse(arguments)
    if launch.dry_run:
        return _dry_run(launch)
    signals, printer = Signals(), Printer()
    run_id, starts, left = uuid.uuid4().hex, 0, launch.restarts
    while True:
        environment = {"MPMD_RUN_ID": run_id, "MPMD_RESTART_COUNT": str(starts)}
        code = launch_once(launch, environment, signals, printer)
        if code == 0 or signals.received or printer.failure is not None:
            return code
        if left > 0:
            then = f"starting again, {left} left"
            left -= 1
        elif launch.processes > launch.at_least:
            launch, left = dataclasses.replace(launch, processes=launch.processes - 1), launch.restarts
            then = f"going on with {launch.processes} process{'es' if launch.processes > 1 else ''}"
        else:
            return code
        starts += 1
        printer.print(f"mpmd-run: exit code {code}; {then}\n".encode(), 2)


def run() -> None:
    open_standard_files()
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
