"""Random graphs of stages under every schedule: `jax.jit`'s numbers, or an error in the user's words.

A graph is a `RandomStep` with names that are called several times, meshes that a microbatch comes back to,
values that skip stages, and places with and without stage numbers.  It is traced once.  For every schedule
the program is partitioned, and what it computes is evaluated without being compiled.

    python -m tests.support.random_graphs FIRST END      reports on the graphs of these seeds
"""

from __future__ import annotations

import collections
import dataclasses
import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

import mpmd
from mpmd.errors import ScheduleError
from mpmd.scheduling.catalogue import SCHEDULES
from tests.support.comparing import copied, relative_difference
from tests.support.evaluate_mpmd import evaluate
from tests.support.random_steps import BINARY, CONSTRAINTS, INPUTS, UNARY, Expression, RandomStep, Statement

# Sums may be taken in another order; a rounding to bfloat16 in between may then fall the other way.
TOLERANCE = 2e-5

_EVERY_ROUNDING = {"xla_allow_excess_precision": False}
"""XLA leaves out roundings to bfloat16 between operations that it fuses, unless it is told not to."""

SLOW_SECONDS = 10.0
"""A graph that takes longer, under all schedules together, is shown."""

_NOT_FOR_USERS = re.compile(
    r"loc\(|Traceback|PassError|IRError|AssertionError|KeyError|IndexError|nullopt|#mpmd|#sdy|\bsdy\.\w"
    r"|mpmd\.(fragment|transfer|call|assign|unassign|return)\b|call_count|transpose_count|stage_id"
    r"|A valid program|the program is invalid|operation|tensor<|stablehlo|\bfunc\.|\b[A-Z]\w*Op\b|\b[Oo]p\b"
    r"|[Ii]nternal error|MeshTensor|mesh_tensor|NamedComputation|inferred_by|infer_mesh|@\w|%\w|_mirror\b"
)

_UNORDERED = re.compile(r"the order (does not contain|has tasks)")


class RandomGraph(Protocol):
    """A step, where it runs, and what it is run on."""

    def step(self) -> Callable[..., Any]:
        """What is run."""

    def jitted(self) -> Any:
        """The step under `mpmd.jit`."""

    def config(self, schedule: str) -> mpmd.Config:
        """Where it runs."""

    def arguments(self) -> tuple[Any, ...]:
        """Host arrays."""


@dataclasses.dataclass(frozen=True)
class GraphOutcome:
    """What became of a graph under a schedule.

    Attributes:
        schedule: its name.
        verdict: `equal`, `refused`, `wrong`, `crash`, `unreadable` (an error or a warning in words that are
            not the user's) or `unordered` (the schedule's order and the program do not have the same tasks).
        text: what was said, or how far off the numbers are.
    """

    schedule: str
    verdict: str
    text: str = ""

    @property
    def is_good(self) -> bool:
        """Whether a user is served."""
        return self.verdict in ("equal", "refused")


def draw_graph(seed: int) -> RandomStep:
    """The graph that a number stands for."""
    rng = random.Random(seed)
    of_meshes = meshes(rng)
    names = [f"f{i}" for i in range(rng.randint(1, 5))]
    statements, available = _statements(rng, names)
    tensors = [s.tensor for s in statements if s.tensor]
    assignment: dict[str, Any] = places(rng, names, list(of_meshes))
    assignment |= {name: rng.choice(list(of_meshes)) for name in tensors}
    alike = len({str(axes) for axes in of_meshes.values()}) == 1
    return RandomStep(
        seed=seed,
        meshes=of_meshes,
        assignment=assignment,
        statements=statements,
        loss=tuple(rng.sample(range(INPUTS, available), rng.randint(1, min(3, available - INPUTS)))),
        auxiliary=tuple(rng.choices(range(available), k=rng.choice([0, 1, 2, 3]))),
        kind=rng.choice(["forward", "grad", "eval", "carry", "twice", "train", "train", "train"]),
        microbatches=rng.choice([1, 1, 2, 3, 4]),
        schedule="gpipe",
        donate=rng.random() < 0.3,
        sharded=rng.random() < (0.2 if alike else 0.6),
        clip=rng.random() < 0.3,
    )


def meshes(rng: random.Random) -> dict[str, dict[str, int]]:
    """Meshes of one or two devices, alike or not."""
    count = rng.choice([1, 2, 2, 3, 3, 4])
    kind = rng.choice(["one", "one", "two", "sizes", "axes"])
    axes = {
        "one": lambda: {"x": 1},
        "two": lambda: {"x": 2},
        "sizes": lambda: {"x": rng.choice([1, 2])},
        "axes": lambda: rng.choice(
            [{"x": 1}, {"x": 2}, {"x": 1, "y": 2}, {"y": 2, "x": 1}, {"x": 2, "y": 1}]
        ),
    }[kind]
    return {f"m{i}": axes() for i in range(count)}


def _statements(rng: random.Random, names: Sequence[str]) -> tuple[tuple[Statement, ...], int]:
    """What a microbatch computes, and how many values there are then."""
    statements: list[Statement] = []
    available = INPUTS
    for number in range(rng.randint(2, 9)):
        named = number == 0 or rng.random() < 0.8
        operands = tuple(_operand(rng, available) for _ in range(rng.choice([1, 1, 2, 2, 3])))
        results = tuple(_expression(rng, len(operands)) for _ in range(rng.choice([1, 1, 1, 2])))
        statements.append(
            Statement(
                rng.choice(names) if named else None,
                operands,
                results,
                remat=rng.random() < 0.1,
                tensor=f"t{number}" if rng.random() < 0.05 else None,
            )
        )
        available += len(results)
    return tuple(statements), available


def _operand(rng: random.Random, available: int) -> int:
    """An earlier value; late ones are likelier, so that chains become long."""
    return rng.randrange(available) if rng.random() < 0.4 else rng.randrange(max(0, available - 2), available)


def _expression(rng: random.Random, operands: int) -> Expression:
    unary = rng.choices([*UNARY, *CONSTRAINTS], k=rng.choice([0, 0, 1, 2]))
    binary = rng.choices(list(BINARY), k=operands - 1 if operands > 1 else rng.randint(0, 1))
    return Expression(tuple(unary), tuple(binary))


def places(rng: random.Random, names: Sequence[str], of_meshes: Sequence[str]) -> dict[str, Any]:
    """Meshes for names: without stages, with stages on the meshes in turn, or with any stages."""
    kind = rng.choice(["none", "none", "of mesh", "in turn", "v", "own", "some"])
    if kind in ("in turn", "v"):
        turn = [*of_meshes, *of_meshes[::-1]] if kind == "v" else [*of_meshes, *of_meshes]
        stages = sorted(rng.randrange(len(turn)) for _ in names)
        return {name: (turn[stage], stage) for name, stage in zip(names, stages)}
    on = {name: rng.choice(of_meshes) for name in names}
    if kind == "of mesh":
        return {name: (mesh, of_meshes.index(mesh)) for name, mesh in on.items()}
    if kind == "own":  # a fourth name has none, whatever numbers are on its mesh
        return {name: mesh if stage == 3 else (mesh, stage) for stage, (name, mesh) in enumerate(on.items())}
    if kind == "some":
        return {n: (m, of_meshes.index(m)) if rng.random() < 0.5 else m for n, m in on.items()}
    return dict(on)


def outcomes(graph: RandomGraph, schedules: Sequence[str] = tuple(SCHEDULES)) -> Iterator[GraphOutcome]:
    """What becomes of a graph under each schedule."""
    arguments = graph.arguments()
    reference = jax.jit(graph.step()).lower(*copied(arguments)).compile(compiler_options=_EVERY_ROUNDING)
    want = jax.tree.leaves(reference(*copied(arguments)))
    flat = [np.asarray(leaf) for leaf in jax.tree.leaves(arguments)]
    known: dict[str, GraphOutcome] = {}
    traced = None
    for schedule in schedules:
        try:
            config = graph.config(schedule)
            with warnings.catch_warnings(action="ignore"):
                traced = traced or graph.jitted().trace(*arguments)
                lowered = dataclasses.replace(traced, config=config).lower()
        except mpmd.errors.MpmdError as error:
            yield refusal(schedule, error)
            continue
        except Exception as error:  # whatever else arises is what is looked for
            yield GraphOutcome(schedule, "crash", f"{type(error).__name__}: {error}")
            continue
        unreadable = [text for text in (*lowered.warnings, *lowered.notices) if _NOT_FOR_USERS.search(text)]
        if unreadable:
            yield GraphOutcome(schedule, "unreadable", unreadable[0])
            continue
        unordered = [text for text in lowered.notices if _UNORDERED.search(text)]
        if unordered:
            yield GraphOutcome(schedule, "unordered", unordered[0])
            continue
        text = lowered.as_text("mpmd")
        if text not in known:
            known[text] = _compared(evaluate(lowered.partitioned.module, flat), want)
        yield dataclasses.replace(known[text], schedule=schedule)


def refusal(schedule: str, error: mpmd.errors.MpmdError) -> GraphOutcome:
    """A graph that cannot be: the error has to be one for its reader.

    These graphs are legal programs, so that only a schedule may be impossible: what a pass finds wrong with
    one is a fault of the passes, however it is worded.
    """
    internal = not isinstance(error, ScheduleError) or _NOT_FOR_USERS.search(str(error))
    return GraphOutcome(schedule, "unreadable" if internal else "refused", f"{type(error).__name__}: {error}")


def _compared(got: Sequence[Any], want: Sequence[Any]) -> GraphOutcome:
    if len(got) != len(want):
        return GraphOutcome("", "wrong", f"{len(got)} results instead of {len(want)}")
    difference = relative_difference(list(got), list(want))
    return GraphOutcome("", "equal" if difference <= TOLERANCE else "wrong", f"{difference:.1e}")


def told(found: Mapping[int, Sequence[GraphOutcome]]) -> str:
    """What became of graphs, by seed: how many of each verdict, and the first lines of what was refused."""
    verdicts = collections.Counter(o.verdict for of_seed in found.values() for o in of_seed)
    lines = [f"{len(found)} graphs, {verdicts.total()} programs: {dict(verdicts.most_common())}"]
    kinds: dict[str, list[str]] = {}
    for seed, of_seed in found.items():
        for o in of_seed:
            if o.verdict != "equal":
                first = re.sub(r"\d+|'[^']*'|\"[^\"]*\"", "_", o.text.splitlines()[0])[:160]
                kinds.setdefault(f"{o.verdict}: {first}", []).append(f"{seed}/{o.schedule}")
    for kind, where in sorted(kinds.items(), key=lambda item: -len(item[1])):
        lines.append(f"  {len(where)} {kind}  ({', '.join(where[:4])})")
    return "\n".join(lines)


def report(
    seeds: Sequence[int], draw: Callable[[int], RandomGraph] = draw_graph
) -> tuple[str, list[GraphOutcome]]:
    """What became of the graphs of some seeds, as text, and the outcomes that no user must see."""
    found = {seed: list(outcomes(draw(seed))) for seed in seeds}
    return told(found), [o for of_seed in found.values() for o in of_seed if not o.is_good]


def main(first: int, end: int, draw: Callable[[int], RandomGraph] = draw_graph) -> None:
    """Prints what became of the graphs of these seeds: a line for each that is bad or slow, and a table."""
    found: dict[int, list[GraphOutcome]] = {}
    for seed in range(first, end):
        start = time.process_time()
        found[seed] = list(outcomes(draw(seed)))
        bad = {o.verdict: o.schedule for o in found[seed] if not o.is_good}
        seconds = time.process_time() - start
        if bad or seconds > SLOW_SECONDS:
            print(f"seed {seed}: {seconds:.1f} s, {bad}", flush=True)
    print(told(found), f"\n{time.process_time():.0f} s of CPU time")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)
    main(int(sys.argv[1]), int(sys.argv[2]))
