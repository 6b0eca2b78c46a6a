"""Calls that all processes must make alike; one process makes one differently.

    python -m tests.support.differing_calls 100 [--first 0] [--at-once 2]

Each trial is a world of two processes and a sequence of calls: steps, saves, restores, fetches,
initializations, compilations, timelines.  At a random place one process gives another argument, leaves the
call out, makes one more, or makes another.  All must then raise an error of this package in bounded time; in
a trial without a difference none may.  The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import mpmd
from mpmd.errors import MpmdError
from tests.support.forked_world import POLL_SECONDS, WORLD_POLLS, ForkedWorld

ARGUMENTS = {
    "step": ("shape",),
    "save": ("step", "keep", "leaf", "dtype", "no step", "no extra", "no leaf"),
    "restore": ("step", "leaf", "shape", "no step", "folder"),
    "fetch": ("leaf", "order", "fewer", "number"),
    "init": ("key", "program", "structure", "raises"),
    "load": ("value", "raises", "dtype"),
    "compile": ("precision", "prng", "x64", "threefry", "program", "version"),
    "timeline": (),
    "costs": (),
    "live_bytes": (),
}
"""For each call the arguments in which a process can differ."""
WAYS = ("argument", "argument", "argument", "left out", "added", "another")
LIMIT_SECONDS = 15.0
SAYS = ("process 0", "process 1")


@dataclasses.dataclass(frozen=True)
class DifferingCalls:
    """A sequence of calls, and where and how a process differs: `way` is "" for a control.

    Attributes:
        spanning: whether the mesh is over both processes; else each has one.
        calls: in order.
        process, at: which process differs, and at which call.
        way: how; `what` is the argument, or the call that is made instead or as well.
    """

    spanning: bool
    calls: tuple[str, ...]
    process: int
    at: int
    way: str
    what: str

    def __str__(self) -> str:
        where = f"process {self.process}, call {self.at} of {' '.join(self.calls)}"
        return f"{self.way or 'alike'} {self.what} in {where}{', one mesh' * self.spanning}"


def plan_of(seed: int) -> DifferingCalls:
    """The plan of a seed; every eighth is a control."""
    draw = random.Random(seed)
    calls = [draw.choice(list(ARGUMENTS)) for _ in range(draw.randint(3, 7))]
    at, process, way = draw.randrange(len(calls)), draw.randrange(2), draw.choice(WAYS)
    if seed % 8 == 7:
        way = ""
    if way == "argument" and not ARGUMENTS[calls[at]]:
        calls[at] = draw.choice([name for name in ARGUMENTS if ARGUMENTS[name]])
    spanning = draw.random() < 0.3
    what = draw.choice(ARGUMENTS[calls[at]]) if way == "argument" else ""
    if (calls[at], what) == ("load", "value"):  # else each process reads leaves of its own
        spanning = True
    if way == "added":
        what = draw.choice(list(ARGUMENTS))
    elif way == "another":
        what = draw.choice([name for name in ARGUMENTS if name != calls[at]])
    return DifferingCalls(spanning, tuple(calls), process, at, way, what)


def init(key: Any) -> dict[str, Any]:
    keys = jax.random.split(key, 3)
    made = {name: jax.random.normal(k, (4, 4)) / 4 for name, k in zip("abc", keys, strict=True)}
    return {**made, "count": jnp.zeros(())}


def loss(params: Any, x: Any) -> Any:
    x = mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name="f")(params["a"], x)
    return mpmd.named_computation(lambda b, c, x: jnp.mean((x @ b @ c) ** 2), name="g")(
        params["b"], params["c"], x
    )


def train(params: Any, x: Any) -> Any:
    value, grads = mpmd.accumulate_gradients(loss, 2)(params, x)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return {**new, "count": params["count"] + 1}, value


class Caller:
    """One process: its step, its state, and every call with each of its arguments."""

    def __init__(self, plan: DifferingCalls, folder: Path) -> None:
        topology = mpmd.make_topology({"m0": 2} if plan.spanning else {"m0": 1, "m1": 1})
        last = "m0" if plan.spanning else "m1"
        shardings = {"in_shardings": (None, PartitionSpec("data")), "backend": "xla"} if plan.spanning else {}
        self.assignment = {"f": "m0", "g": last}
        self.config = mpmd.make_config(topology, self.assignment, **shardings)
        self.x, self.folder, self.number = np.ones((8, 4), np.float32), folder / "checkpoints", 2
        self.jitted = mpmd.jit(train, self.config)
        self.compiled = self.jitted.compiled(jax.eval_shape(init, jax.random.key(0)), self.x)
        self.state = self.compiled.init(init, jax.random.key(0))
        self.state, self.loss = self.compiled(self.state, self.x)
        for number in (1, 2):
            mpmd.checkpoint.save(self.folder, number, self.state)

    def call(self, name: str, how: str = "") -> None:
        getattr(self, f"_{name}")(how)

    def _step(self, how: str) -> None:
        x = np.ones((16, 4), np.float32) if how == "shape" else self.x
        self.state, self.loss = self.jitted(self.state, x)
        assert np.isfinite(float(self.loss))

    def _save(self, how: str) -> None:
        self.number += 1
        state = dict(self.state)
        if how == "leaf":
            del state["c"]
        if how == "dtype":
            state["count"] = np.int32(1)
        if how == "no leaf":
            state["a"] = "text"
        step = {"step": self.number + 7, "no step": -1}.get(how, self.number)
        extra = {1: 1} if how == "no extra" else {"loss": float(self.loss)}
        mpmd.checkpoint.save(self.folder, step, state, extra, keep=3 if how == "keep" else 2)
        assert mpmd.checkpoint.steps(self.folder)[-1] == step

    def _restore(self, how: str) -> None:
        like = dict(self.compiled.abstract_args[0])
        if how == "leaf":
            del like["c"]
        if how == "shape":
            like["b"] = jax.ShapeDtypeStruct((4, 5), jnp.float32)
        step = {"step": self.number - 1, "no step": 2.5}.get(how)
        folder = self.folder / "another" if how == "folder" else self.folder
        self.state = mpmd.checkpoint.restore(folder, like, step).state

    def _fetch(self, how: str) -> None:
        b, c = self.state["b"], self.state["c"]
        tree = {"order": [c, b], "leaf": [self.state["a"], c], "fewer": [b], "number": [b, 1.0]}
        found = mpmd.fetch(tree.get(how, [b, c]))
        assert all(np.isfinite(np.asarray(leaf)).all() for leaf in found)

    def _init(self, how: str) -> None:
        def other(key: Any) -> Any:
            made = init(key)
            if how == "raises":
                raise ValueError("no such file")
            if how == "structure":
                del made["b"]
            return jax.tree.map(lambda leaf: leaf * 2, made) if how == "program" else made

        self.state = self.compiled.init(other, jax.random.key(int(how == "key")))

    def _load(self, how: str) -> None:
        def reader(path: str, leaf: Any, index: Any) -> Any:
            if how == "raises":
                raise FileNotFoundError(path)
            value = np.zeros(leaf.shape, np.float64 if how == "dtype" else leaf.dtype)[index]
            return value + 1 if how == "value" else value

        self.state = self.compiled.load(reader)

    def _compile(self, how: str) -> None:
        if how == "version":
            mpmd.runtime.processes.exchange.__version__ = "0.0.1"
        if how in ("prng", "threefry"):
            name, value = {
                "prng": ("jax_default_prng_impl", "rbg"),
                "threefry": ("jax_threefry_partitionable", False),
            }[how]
            jax.config.update(name, value)
        rate = 0.5 if how == "program" else 0.25
        f = mpmd.named_computation(lambda x: x * rate, name="f")
        g = mpmd.named_computation(jnp.sum, name="g")
        precision = "high" if how == "precision" else None
        with jax.enable_x64(how == "x64"), jax.default_matmul_precision(precision):
            other = mpmd.make_config(self.config.topology, self.assignment)
            mpmd.jit(other)(lambda x: g(f(x))).compiled(jax.ShapeDtypeStruct((8, 4), jnp.float32))

    def _timeline(self, how: str) -> None:
        (self.state, self.loss), timeline = self.compiled.timeline(self.state, self.x)
        assert timeline.spans

    def _costs(self, how: str) -> None:
        (self.state, self.loss), costs = self.compiled.costs(self.state, self.x)
        assert costs.fragments

    def _live_bytes(self, how: str) -> None:
        (self.state, self.loss), found = self.compiled.live_bytes(self.state, self.x)
        assert set(found) == set(self.config.topology)


class CallTrial(ForkedWorld):
    """One world that follows a plan."""

    def __init__(self, seed: int) -> None:
        self.seed, self.plan, self._ready = seed, plan_of(seed), 0
        super().__init__(2)

    def member(self, index: int) -> None:
        caller, began = Caller(self.plan, self.folder), 0.0
        (self.folder / f"ready-{index}").touch()
        try:
            for at, name in enumerate(self.plan.calls):
                began = began or time.time() * (at == self.plan.at)
                differs = index == self.plan.process and at == self.plan.at
                self._make(caller, name, self.plan.way if differs else "")
        except BaseException as error:
            self._write(index, type(error).__name__, isinstance(error, MpmdError), str(error), began)
            raise
        self._write(index, "", True, "", began)

    def too_late(self) -> bool:
        """Whether the calls have taken longer than any may; a busy machine compiles slowly before them."""
        self._ready += all((self.folder / f"ready-{index}").exists() for index in range(2))
        return self._ready > WORLD_POLLS or self._polls > 10 * WORLD_POLLS

    def _make(self, caller: Caller, name: str, way: str) -> None:
        what = self.plan.what
        if way == "argument":
            caller.call(name, what)
        elif way == "another":
            caller.call(what)
        elif way != "left out":
            if way == "added":
                caller.call(what)
            caller.call(name)

    def _write(self, index: int, kind: str, expected: bool, text: str, began: float) -> None:
        found = {
            "kind": kind,
            "ours": expected,
            "text": text,
            "seconds": time.time() - began if began else 0.0,
        }
        (self.folder / f"process-{index}").write_text(json.dumps(found))

    def problems(self) -> list[str]:
        """What is wrong with the processes' errors."""
        found, quiet = [], list[int]()
        for index in range(2):
            path = self.folder / f"process-{index}"
            if not path.exists():
                found.append(f"process {index} wrote nothing")
                continue
            of = json.loads(path.read_text())
            if not self.plan.way:
                found += [f"process {index} raised {of['kind']}: {of['text']}"] if of["kind"] else []
            elif not of["kind"]:
                quiet.append(index)
            elif not (of["ours"] or index == self.plan.process):
                found.append(f"process {index} raised {of['kind']}: {of['text']}")
            elif index != self.plan.process and not any(name in of["text"] for name in SAYS):
                found.append(f"process {index} names no process: {of['text']}")
            if of["seconds"] > LIMIT_SECONDS:
                found.append(f"process {index} took {of['seconds']:.1f} s")
        # a process that has made all of its calls has ended, perhaps before another one misses it
        if len(quiet) == 2 or (quiet and self.plan.way == "argument"):
            found.append(f"noticed nothing: {quiet}")
        return found


def campaign(seeds: list[int], at_once: int, said: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs plans, some worlds at a time; the figures."""
    waiting, running = list(reversed(seeds)), list[CallTrial]()
    hangs, wrong, differing = 0, list[str](), 0
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(CallTrial(waiting.pop()))
            time.sleep(POLL_SECONDS)
            for trial in list(running):
                if trial.ended() or trial.too_late():
                    running.remove(trial)
                    hung = bool(trial.running)
                    trial.end()
                    problems = [*(["it hung"] if hung else []), *trial.problems()]
                    hangs += hung
                    differing += bool(trial.plan.way)
                    text = f"{trial.seed}: {trial.plan}: {'; '.join(problems) or 'right'}"
                    wrong += [f"{text}, see {trial.folder}"] if problems else []
                    said(text)
    finally:
        for trial in running:
            trial.end()
    return {"trials": len(seeds), "differing": differing, "hangs": hangs, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2)
    args = parser.parse_args()
    seeds = list(range(args.first, args.first + args.count))
    print(json.dumps(campaign(seeds, args.at_once, lambda text: print(text, flush=True))))


if __name__ == "__main__":
    main()
