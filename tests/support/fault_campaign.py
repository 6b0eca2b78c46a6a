"""Faults in small worlds of processes: each other process must raise the right error soon, and none may hang.

    python -m tests.support.fault_campaign 200 [--first 0] [--at-once 3] [--kinds kill,stop] [--done FILE]

A fault counts only with a trace of it: the signal that ended a process, or the injected text in the error of
the process where it was injected.

Each fault prints a line; the last line is one JSON object.  With `--done` each result is added to a file as
well, and those in the file are not run again.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mpmd
from examples.workloads.models import chain, dense, dense_params, regression_batch
from examples.workloads.sleeping import OUT_OF_MEMORY, sleep
from mpmd.runtime.channels import remote
from mpmd.runtime.channels.links import MESSAGE_BITS, STEP_BITS, Links
from tests.support.forked_world import POLL_SECONDS, ForkedWorld

STEPS, MICROBATCHES = 4, 4
STOPPED_SECONDS = 5.0
INTERRUPTED_SECONDS = 0.5
"""How long a fragment goes on after an interrupt, so that it is noticed within the step."""
IN_A_FRAGMENT = ("kill", "stop", "fragment", "interrupt")
INJECTED = {
    "fragment": "the fault of a fragment",
    "memory": "injected: the device has no memory",
    "script": "the fault of a script",
    "unsent": "the fault of a message",
}
SAYS = {
    "kill": ("has ended, or does not answer",),
    "stop": ("has not answered for 8 s",),
    "fragment": ("failed in step {step}:",),
    "memory": ("failed in step {step}:",),
    "script": ("ended with ValueError: the fault of a script",),
    "unsent": ("failed in step {step}:",),
    "interrupt": ("failed in step {step}:",),
    "exit": ("has ended, and another process waits for it",),
    "program": ("runs another program than process",),
    "epoch": ("began step {next} of program 0", "began step {step} of program 0"),
    "order": ("began fetch 0", "began step {step} of program 0"),
    "coordinator": ("does not answer",),
    "busy": ("does not answer",),
}
OF_COORDINATOR = ("coordinator", "busy")
BUSY_SECONDS = 15.0
"""How long a process that has killed the coordinator looks at nothing, as if it compiled."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens: the kind, in which of how many processes, in which step and microbatch.

    Of messages that are not sent, microbatch 0 is the last one of a step, and 1 that before it.
    """

    kind: str
    processes: int
    process: int
    step: int
    microbatch: int = 0

    def __str__(self) -> str:
        place = f"process {self.process} of {self.processes}"
        return f"{self.kind} in {place}, step {self.step}, microbatch {self.microbatch}"


class SkippedNumber:
    """In place of `itertools`: counters that leave out one number, as after a step that was lost."""

    def __init__(self, left_out: int, happen: Callable[[], None]) -> None:
        self.left_out, self.happen = left_out, happen

    def count(self) -> Iterator[int]:
        for number in itertools.count():
            if number == self.left_out:
                self.happen()
            else:
                yield number


def faults() -> Iterator[Fault]:
    """All kinds in all places and steps, every prefix has many of each: 200, then again."""
    places = [(count, process) for count in (2, 3) for process in range(count)]
    for turn in itertools.count():
        for shift, kind in enumerate(SAYS):
            count, process = places[(turn + shift) % len(places)]
            step = (turn // len(places) + shift) % STEPS
            step = step or STEPS - 1 if kind == "unsent" else step
            yield Fault(kind, count, process, step, (turn // 2 + shift) % MICROBATCHES)


def train(fault: Fault, happen: Callable[[], None]) -> None:
    """Steps in which the fault happens."""
    here = jax.process_index() == fault.process
    now = {"step": 0, "calls": 0}

    def check(x: Any) -> Any:
        now["calls"] += 1
        if fault.kind in IN_A_FRAGMENT and here and now["step"] == fault.step:
            late = now["calls"] - fault.microbatch
            if late == 1 or (late > 1 and fault.kind != "interrupt"):  # one interrupt is handled at a time
                happen()
        return np.asarray(x)

    @jax.custom_vjp
    def checked(x: Any) -> Any:
        return jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    checked.defvjp(lambda x: (checked(x), None), lambda _, g: (g,))

    def layer(p: Any, x: Any) -> Any:
        return dense(p, checked(x)) + sleep(*map(jax.lax.stop_gradient, (p["pause"], x)))

    loss = chain(fault.processes, layer)
    rate = 0.25 if fault.kind == "program" and here else 0.125

    def step(params: Any, x: Any, y: Any) -> Any:
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, x, y)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), value

    topology = mpmd.make_topology({f"m{m}": 1 for m in range(fault.processes)})
    assignment = {f"stage{s}": f"m{s}" for s in range(fault.processes)}
    jitted = mpmd.jit(step, mpmd.make_config(topology, assignment, schedule="1f1b"))
    params = {f"s{s}": {**dense_params(s), "pause": np.float32(0)} for s in range(fault.processes)}
    if fault.kind == "program":
        happen()
    if fault.kind == "interrupt":  # a shell ignores it in what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if fault.kind == "epoch" and here:
        remote.itertools = SkippedNumber(fault.step, happen)
    if fault.kind == "unsent" and here:
        refuse_message(fault.step, fault.microbatch, happen)
    for number in range(STEPS):
        now.update(step=number, calls=0)
        if here and number == fault.step:
            if fault.kind in ("script", "exit", *OF_COORDINATOR):
                happen()
            elif fault.kind == "order":
                happen()
                mpmd.fetch(params)
        if fault.kind == "memory" and number == fault.step:
            if here:
                happen()
            # in every process: another one may hold the leaf, and send it to the mesh of the fragment
            params[f"s{fault.process}"]["pause"] = np.float32(OUT_OF_MEMORY)
        params, value = jitted(params, *regression_batch())
        float(value)
    mpmd.fetch(params)


def refuse_message(step: int, after: int, happen: Callable[[], None]) -> None:
    """Calls `happen` in place of offering a message of this process in a step, so many before the last one.

    The first step shows how many there are.
    """
    offer, counts = Links.offer, collections.Counter[int]()

    def refusing(links: Links, number: int, arrays: Any) -> None:
        of_program, at = divmod(number >> MESSAGE_BITS, 1 << STEP_BITS)
        if of_program == 0:
            counts[at] += 1
            if at == step and counts[at] == counts[0] - after:
                happen()
        offer(links, number, arrays)

    Links.offer = refusing  # type: ignore[method-assign]


def happening(fault: Fault, folder: Path, coordinator: int) -> Callable[[], None]:
    """The fault itself; writes when it happened."""

    def happen() -> None:
        (folder / "time").write_text(str(time.time()))
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(INTERRUPTED_SECONDS)
        elif fault.kind == "exit":
            sys.exit(0)
        elif fault.kind in OF_COORDINATOR:
            os.kill(coordinator, signal.SIGKILL)
            time.sleep(BUSY_SECONDS * (fault.kind == "busy"))
        elif fault.kind in ("fragment", "script", "unsent"):
            raise ValueError(INJECTED[fault.kind])

    return happen


def _last_step(index: int, done: int) -> str:
    """What an error says of the last step that its process has completed, after some."""
    last = f"step {done - 1} is the last one" if done else "no step is"
    return f"  {last} that process {index} has completed"


class FaultTrial(ForkedWorld):
    """One world with a fault."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(fault.processes)

    def member(self, index: int) -> None:
        try:
            train(self.fault, happening(self.fault, self.folder, self.coordinator))
        except Exception as error:
            began = self.folder / "time"
            seconds = time.time() - float(began.read_text()) if began.exists() else 0.0
            found = {"error": type(error).__name__, "text": str(error), "seconds": seconds}
            (self.folder / f"process-{index}").write_text(json.dumps(found))
            raise

    def ended(self) -> bool:
        """Whether all processes have ended but one that was stopped; one poll."""
        stopped = [self.members[self.fault.process]] if self.fault.kind == "stop" else []
        return super().ended() or self.running == stopped

    def end(self) -> None:
        """Notes which processes are stopped, and ends those that are left."""
        self.stopped = [pid for pid in self.running if _state(pid) == "T"]
        super().end()

    def happened(self) -> bool:
        """Whether the fault left its trace."""
        kind, pid = self.fault.kind, self.members[self.fault.process]
        if not (self.folder / "time").exists():
            return False
        if kind in INJECTED:
            own = self.folder / f"process-{self.fault.process}"
            return own.exists() and INJECTED[kind] in json.loads(own.read_text())["text"]
        if kind == "stop":
            return pid in self.stopped
        ended = {"kill": pid, **dict.fromkeys(OF_COORDINATOR, self.coordinator)}.get(kind)
        return ended is None or self.ended_by.get(ended) == signal.SIGKILL

    def problems(self) -> list[str]:
        """What is wrong with the errors of the processes."""
        fault = self.fault
        found = [] if self.happened() else ["the fault did not happen"]
        everyone = fault.kind in ("program", "epoch", "order", *OF_COORDINATOR)
        for index in range(fault.processes):
            error = self._error(index)
            if error is None:
                if everyone or index != fault.process:
                    found.append(f"process {index} raised nothing")
                continue
            if index == fault.process and not everyone:
                continue
            text = error["text"].splitlines()
            said = [says.format(step=fault.step, next=fault.step + 1) for says in SAYS[fault.kind]]
            if error["error"] != "PeerError" or not any(says in text[0] for says in said):
                found.append(f"process {index} raised {error['error']}: {text[0]}")
            elif INJECTED.get(fault.kind, "") not in error["text"]:
                found.append(f"process {index} does not know the cause: {text}")
            elif not everyone and not text[0].startswith(f"process {fault.process} (host "):
                found.append(f"process {index} blames another: {text[0]}")
            elif not everyone and f"mesh 'm{fault.process}'" not in text[0]:
                found.append(f"process {index} names no mesh: {text[0]}")
            if fault.kind not in ("program", *OF_COORDINATOR):
                # one may be in the step before, or be done with its own part of the one that failed
                done = range(max(0, fault.step - 1), fault.step + 2)
                if not any(_last_step(index, steps) in text for steps in done):
                    found.append(f"process {index} has completed another step: {text[1:2]}")
            if error["seconds"] > 10:
                found.append(f"process {index} raised it after {error['seconds']:.1f} s")
        return found

    def _error(self, index: int) -> dict[str, Any] | None:
        """What a process raised, or what the watching thread of a busy one printed; None if nothing."""
        path = self.folder / f"process-{index}"
        if path.exists():
            return dict[str, Any](json.loads(path.read_text()))
        log = self.folder / f"log-{self.members[index]}"
        _, said, text = log.read_text().rpartition("mpmd.errors.PeerError: ")
        if not said or "which was busy" not in text or not self.happened():
            return None
        began = float((self.folder / "time").read_text())
        return {"error": "PeerError", "text": text, "seconds": log.stat().st_mtime - began}

    def result(self) -> dict[str, Any]:
        """Ends the world; what happened in it."""
        hung = bool(self.running) and self.too_late()
        self.end()
        problems = [*(["it hung"] if hung else []), *self.problems()]
        if problems:
            problems.append(f"see {self.folder}")
        return {
            "fault": str(self.fault),
            "happened": self.happened(),
            "hung": hung,
            "seconds": self.seconds(),
            "problems": problems,
        }

    def seconds(self) -> float:
        """The longest time from the fault to the error of another process."""
        others = [k for k in range(self.fault.processes) if k != self.fault.process]
        return max((error["seconds"] for k in others if (error := self._error(k)) is not None), default=0.0)


def _state(pid: int) -> str:
    """The state of a process: T if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def campaign(chosen: list[Fault], at_once: int, log: Path | None = None) -> dict[str, Any]:
    """Runs faults, some worlds at a time; the figures.  Faults whose results `log` has are not run."""
    results = {}
    if log is not None and log.exists():
        known = [json.loads(line) for line in log.read_text().splitlines()]
        names = {str(fault) for fault in chosen}
        results = {result["fault"]: result for result in known if result["fault"] in names}
    waiting = [fault for fault in reversed(chosen) if str(fault) not in results]
    running = list[FaultTrial]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(FaultTrial(waiting.pop()))
            before = time.monotonic()
            time.sleep(POLL_SECONDS)
            if time.monotonic() - before > STOPPED_SECONDS:  # so were the processes: they begin again
                for trial in running:
                    trial.end()
                    waiting.append(trial.fault)
                running.clear()
            for trial in list(running):
                if trial.ended() or trial.too_late():
                    running.remove(trial)
                    results[str(trial.fault)] = result = trial.result()
                    if log is not None:
                        with log.open("a") as file:
                            file.write(json.dumps(result) + "\n")
                    said = "; ".join(result["problems"]) or "right"
                    print(f"{trial.fault}: {result['seconds']:.2f} s {said}", flush=True)
    finally:
        for trial in running:
            trial.end()
    return {
        "faults": sum(result["happened"] for result in results.values()),
        "hangs": sum(result["hung"] for result in results.values()),
        "detect_s": round(max((result["seconds"] for result in results.values()), default=0.0), 2),
        "wrong": [f"{r['fault']}: {problem}" for r in results.values() for problem in r["problems"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(SAYS))
    parser.add_argument("--done", type=Path, default=None)
    args = parser.parse_args()
    of_kinds = (fault for fault in faults() if fault.kind in args.kinds.split(","))
    chosen = list(itertools.islice(of_kinds, args.first, args.first + args.count))
    print(json.dumps(campaign(chosen, args.at_once, args.done)))


if __name__ == "__main__":
    main()
