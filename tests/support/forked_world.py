"""Small worlds of processes that are forked from this one, which has imported everything and used no device.

A world costs a compilation only.  The coordinator is a process of its own, so that it can be killed.  Every
world is bounded in time, and its processes are ended by their ids.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

from mpmd import jax_distributed
from mpmd.runtime.processes.world import world
from mpmd.tools.joined import HEARTBEAT_SECONDS

POLL_SECONDS, WORLD_POLLS = 0.02, 3000


class ForkedWorld:
    """Processes that run `member(index)`, until all of them have ended.

    Attributes:
        folder: for what they write; `log-PID` has their output.
        running: the processes that have not ended.
        members: all of them, by index.
        coordinator: the process of the coordinator.
        ended_by: by process the signal that ended it; 0 for none.
    """

    def __init__(self, processes: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mpmd-world-"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._polls, self._processes = 0, processes
        self.coordinator = self._forked(self._coordinate)
        self.running = [self._forked(lambda k=k: self._join(k)) for k in range(processes)]
        self.members = list(self.running)
        self.ended_by: dict[int, int] = {}

    def member(self, index: int) -> None:
        """What a process does once it has joined the others."""
        raise NotImplementedError

    def _forked(self, run: Callable[[], None]) -> int:
        sys.stdout.flush()
        if pid := os.fork():
            return pid
        log = os.open(self.folder / f"log-{os.getpid()}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = 1
        try:
            run()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            atexit._run_exitfuncs()
            os._exit(code)

    def _coordinate(self) -> None:
        service = jax_distributed.coordination_service(self._address, self._processes, HEARTBEAT_SECONDS)
        assert service is not None
        signal.pause()

    def _join(self, index: int) -> None:
        jax.config.update("jax_num_cpu_devices", 1)
        jax_distributed.join_world(self._address, self._processes, index, HEARTBEAT_SECONDS)
        world()
        self.member(index)

    def ended(self) -> bool:
        """Whether all processes have ended; one poll."""
        self._polls += 1
        for pid in list(self.running):
            if self._has_ended(pid):
                self.running.remove(pid)
        return not self.running

    def _has_ended(self, pid: int) -> bool:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            self.ended_by[pid] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return found != 0

    def too_late(self) -> bool:
        """Whether it has taken longer than any world may."""
        return self._polls > WORLD_POLLS

    def end(self) -> None:
        """Ends the processes that are left."""
        if not self._has_ended(self.coordinator):
            self.running.append(self.coordinator)
        for pid in self.running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
