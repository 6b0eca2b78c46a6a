"""Watches the other processes: who is alive, who has ended, and where a failure began.

Each process writes a beat several times a second.  Time is counted in polls of the watching process itself,
so that a machine that stops all processes for a while ends none.  There are four kinds of failures:

* a process reports one, with its cause;
* several report fragments that failed: the first in the order of the program is the cause, unless a process
  has ended or is silent, whose messages then failed in the others;
* a process is silent for long, or has ended while this one waits for it;
* processes began different steps or exchanges: each then waits for messages that are never sent.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence

from mpmd.errors import PeerError
from mpmd.runtime.processes.world import Failure, World

_POLL_SECONDS = 0.2
_SILENT_POLLS = 6
"""Polls without a beat after which a process is the likely cause of failures elsewhere."""
_END_POLLS = 4
"""Polls after which a process that has ended is missed by one that waits for it."""
_CAUSE_POLLS = 10
"""Polls that processes have to report failures after the first one."""
_RAISE_SECONDS = 1.5
"""How long a process that has lost the coordinator has to raise the error; JAX ends it a second later."""


class Monitor:
    """The thread that watches the others."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mpmd-processes", daemon=True)
        self._beats: dict[int, str] = {}
        self._silent: dict[int, int] = {}  # polls since the last beat
        self._begun: dict[int, tuple[int, tuple[str, ...]]] = {}
        self._since_failure = self._since_end = self._turn = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _watch(self) -> None:
        world = self._world
        world.watcher = threading.get_ident()
        while not self._ended.wait(_POLL_SECONDS):
            try:
                state = self.poll()
                self._read_beats(state)
                cause = self._cause(state)
                if cause is not None:
                    world.report(cause)
                    state = world.state()
                if "failure" in state:
                    world.fail(Failure(**json.loads(state["failure"])))
                    return
            except PeerError as lost:  # of the coordinator
                self._say(lost)
                return

    def _say(self, lost: PeerError) -> None:
        """Prints the loss of the coordinator if no other thread raises it: JAX aborts this process soon."""
        until = time.monotonic() + _RAISE_SECONDS
        while time.monotonic() < until:
            if self._world.raised.wait(_POLL_SECONDS) or self._ended.is_set():
                return
        text = "".join(traceback.format_exception_only(lost))
        print(f"{text}in {self._world.name()}, which was busy", file=sys.stderr, flush=True)

    def poll(self) -> dict[str, str]:
        """The shared state, once this process has written that it is alive."""
        self._turn += 1
        self._world.beat(f"poll {self._turn}")
        return self._world.state()

    def _read_beats(self, state: Mapping[str, str]) -> None:
        world = self._world
        for process in range(world.count):
            text = state.get(f"beat/{process}")
            if process == world.index or text is None:
                continue
            if text != self._beats.get(process):
                self._beats[process], self._silent[process] = text, 0
                beat = json.loads(text)
                world.hosts[process] = beat["host"]
                self._begun[process] = beat["begun"][0], tuple(beat["begun"][1])
            else:
                self._silent[process] += 1

    def _cause(self, state: Mapping[str, str]) -> Failure | None:
        """Where a failure began; None if there is none, or it is not known yet."""
        if "failure" in state:
            return None
        world = self._world
        ended = [process for process in range(world.count) if f"left/{process}" in state]
        running = {process: polls for process, polls in self._silent.items() if process not in ended}
        limit = world.peer_timeout / _POLL_SECONDS
        for process, polls in running.items():
            if polls >= limit:
                return Failure(process, f"has not answered for {world.peer_timeout:g} s", known=False)
        if (difference := first_difference({**self._begun, world.index: world.begun})) is not None:
            return difference
        early = [process for process in ended if int(state[f"left/{process}"]) <= world.turns]
        self._since_end = self._since_end + 1 if early and world.waits else 0
        if self._since_end >= _END_POLLS:
            return Failure(early[0], "has ended, and another process waits for it")
        failed = {p: state[f"failed/{p}"] for p in range(world.count) if f"failed/{p}" in state}
        if not failed:
            return None
        self._since_failure += 1
        first = json.loads(min(failed.values(), key=lambda text: json.loads(text)["order"]))
        reported = Failure(first["process"], first["text"], first["mesh"])
        if len(failed) == world.count:
            return reported
        lost = [p for p, polls in running.items() if polls >= _SILENT_POLLS and p not in failed]
        if lost:
            return Failure(lost[0], "has ended, or does not answer")
        if ended and self._since_failure >= _CAUSE_POLLS // 2:
            return Failure(ended[0], "has ended before the others")
        return reported if self._since_failure >= _CAUSE_POLLS else None


def first_difference(begun: Mapping[int, tuple[int, Sequence[str]]]) -> Failure | None:
    """The first process that began something else than the one of the lowest index.

    Args:
        begun: for each process the last steps and exchanges, and how many there were before them.
    """
    first = min(begun)
    start, reference = begun[first]
    for process, (before, last) in sorted(begun.items()):
        for at in range(max(before, start), min(before + len(last), start + len(reference))):
            ours, theirs = reference[at - start], last[at - before]
            if ours != theirs:
                text = f"began {theirs}, where process {first} began {ours}"
                return Failure(process, text, known=False)
    return None
