"""The dialect's own passes, as jaxlib has them built in, and random programs to compare with."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from mpmd import ir
from mpmd.sharding.shardings import axes_of

TENSOR = "tensor<8x8xf32>"
AXES = [("x", 2), ("y", 2)]


def partitioner() -> Any:
    """jaxlib's MPMD partitioner; skips the test where it cannot be imported."""
    import jaxlib._jax

    sys.modules.setdefault("jax.jaxlib._jax", jaxlib._jax)
    return pytest.importorskip("jaxlib._sdy_mpmd")


def run_phase(text: str, phase: str, options: dict[str, Any] | None = None) -> str:
    """The text of a program after `OPTIMIZE` or `PARTITION`, as the dialect's own passes do it."""
    tool = partitioner()
    module = ir.parse(text)
    f = ir.symbol_table(module)["main"]
    meshes = [(name, list(axes_of(mesh).items())) for name, mesh in f.topology.items()]
    no_meshes = [None] * len(f.args), [None] * len(f.returned)
    phases = getattr(tool.PartitioningPhase, phase)
    with ir.context():
        result = tool.apply_mpmd_partitioning(
            module, "main", meshes, {}, *no_meshes, [], partitioning_options=options or {},
            fragment_merge_rules=[], fragment_schedule_rules=[], phases=phases,
        )  # fmt: skip
    return ir.to_text(ir.parse(str(result.mpmd_module)))


def mesh_tensor(mesh: int) -> str:
    """The type of every value on a mesh."""
    return f'!mpmd.mesh_tensor<"m{mesh}", {TENSOR}>'


def topology(count: int) -> str:
    """Equal meshes m0, m1, …"""
    axes = ", ".join(f'"{name}"={size}' for name, size in AXES)
    meshes = ", ".join(f'<"m{m}" : <[{axes}]>>' for m in range(count))
    return f"#mpmd.topology<{meshes}>"


def fragment(result: str, mesh: int, origin: str, inputs: list[str], body: list[str], returned: list[str],
             attributes: str = "", stage: int | None = None) -> str:  # fmt: skip
    """A fragment whose arguments are %p0, %p1, …"""
    args = ", ".join(f"%p{i}: {TENSOR}" for i in range(len(inputs)))
    at_stage = "" if stage is None else f", stage={stage}"
    many = "" if len(returned) == 1 else f":{len(returned)}"
    return (
        f'{result}{many} = mpmd.fragment<mesh="m{mesh}", origin=[{origin}]{at_stage}> ({", ".join(inputs)}) '
        f"{{{attributes}}} ({args}) {{\n" + "\n".join(body) + f"\nmpmd.return {', '.join(returned)} : "
        f"{', '.join([TENSOR] * len(returned))}\n}} : ({', '.join([mesh_tensor(mesh)] * len(inputs))}) -> "
        f"({', '.join([mesh_tensor(mesh)] * len(returned))})"
    )


def function(arguments: list[str], results: list[str], lines: list[str], values: list[tuple[str, int]],
             meshes: int) -> str:  # fmt: skip
    """A module around the lines of @main."""
    names = ", ".join(name for name, _ in values)
    types = ", ".join(mesh_tensor(m) for _, m in values)
    return (
        f'module @jit_step {{\nsdy.mesh @mesh = <["x"=2, "y"=2]>\n'
        f"func.func public @main({', '.join(arguments)}) -> ({', '.join(results)}) "
        f"attributes {{topology = {topology(meshes)}}} {{\n"
        + "\n".join(lines)
        + f"\nreturn {names} : {types}\n}}\n}}"
    )


def pipelined(rng: random.Random, staged: bool, split: bool) -> str:
    """A forward and a backward per mesh and microbatch, in a random order that data flow allows."""
    meshes, microbatches, dense = rng.randint(1, 4), rng.randint(1, 6), rng.choice([0.0, 0.5, 0.9, 1.0])
    tasks: dict[tuple[str, int, int], list[tuple[str, int, int]]] = {}
    back = "A" if split else "B"
    for i in range(microbatches):
        for m in range(meshes):
            tasks["F", m, i] = [("F", m - 1, i)] if m and rng.random() < dense else []
        for m in reversed(range(meshes)):
            needed = [("F", m, i), (back, m + 1, i)]
            tasks[back, m, i] = [t for t in needed if t in tasks and rng.random() < dense]
            if split:
                tasks["W", m, i] = [("A", m, i)] if rng.random() < dense else []
    names = list(tasks)
    for _ in range(rng.choice([0, 0, 3])):  # against any schedule
        a, b = sorted(rng.sample(range(len(names)), 2))
        tasks[names[b]].append(names[a])
    left, lines, made = list(tasks), [], {}
    while left:
        task = rng.choice([t for t in left if all(s in made for s in tasks[t])])
        left.remove(task)
        phase, mesh, i = task
        inputs = []
        for source in tasks[task]:
            inputs.append(made[source])
            if source[1] != mesh:
                inputs[-1] = f"%t{len(lines)}"
                types = f"({mesh_tensor(source[1])}) -> {mesh_tensor(mesh)}"
                lines.append(f"{inputs[-1]} = mpmd.transfer {made[source]} : {types}")
        made[task] = f"%v{len(lines)}"
        mark = {"A": ", split_keep_transferred", "W": ", split_drop_transferred"}.get(phase, "")
        origin, stage = '"f"' if phase == "F" else '"f"(1)', mesh if staged else None
        body = [f"%z = stablehlo.negate %p0 : {TENSOR}"]
        attributes = f"call_counter = {i} : ui32{mark}"
        inputs = inputs or [f"%a{mesh}"]
        lines.append(fragment(made[task], mesh, origin, inputs, body, ["%z"], attributes, stage))
    values = [(name, task[1]) for task, name in made.items()]
    arguments = [f"%a{m}: {mesh_tensor(m)}" for m in range(meshes)]
    return function(arguments, [mesh_tensor(m) for _, m in values], lines, values, meshes)


def sharded(rng: random.Random, rich: bool = False) -> str:
    """Fragments of a few ops and transfers, with shardings and donation on arguments and results.

    `rich` programs also have constants, constraints and layouts.
    """
    meshes = rng.randint(1, 3)
    values = [(f"%a{i}", rng.randrange(meshes)) for i in range(rng.randint(1, 4))]
    arguments, lines, read = list(values), [], set()
    for n in range(rng.randint(1, 8)):
        value, mesh = rng.choice(values)
        if rng.random() < 0.3 and meshes > 1:
            to = rng.choice([m for m in range(meshes) if m != mesh])
            lines.append(f"%v{n} = mpmd.transfer {value} : ({mesh_tensor(mesh)}) -> {mesh_tensor(to)}")
            read.add(value)
            values.append((f"%v{n}", to))
            continue
        here = [v for v, m in values if m == mesh]
        inputs = list(dict.fromkeys(rng.choice(here) for _ in range(rng.randint(1, 3))))
        read.update(inputs)
        body, inner = _body(rng, len(inputs), rich)
        returned = [rng.choice(inner) for _ in range(rng.randint(1, 2))]
        origin = rng.choice(['"f"', '"g"', '"f"(1)', '"blk_1"', '"blk_1", "blk_2"'])
        counter = f"call_counter = {n} : ui32" if rng.random() < 0.5 else ""
        lines.append(fragment(f"%v{n}", mesh, origin, inputs, body, returned, counter))
        many = len(returned) > 1
        values += [(f"%v{n}#{k}" if many else f"%v{n}", mesh) for k in range(len(returned))]
    results = [v for v in values if v[0] not in read] + [rng.choice(values)]
    rng.shuffle(results)
    given = []
    for name, mesh in arguments:
        notes = _sharding(rng, 0.6)
        if rng.random() < 0.3:
            notes.append("jax.buffer_donor = true")
        elif rng.random() < 0.3:
            notes.append(f"tf.aliasing_output = {rng.randrange(len(results))} : i32")
        if rich and rng.random() < 0.3:
            notes.append(f"mhlo.layout_mode = {rng.choice(LAYOUTS)}")
        given.append(f"{name}: {mesh_tensor(mesh)}{_dictionary(notes)}")
    types = [mesh_tensor(m) + _dictionary(_sharding(rng, 0.3)) for _, m in results]
    return function(given, types, lines, results, meshes)


LAYOUTS = ('"auto"', '"{0, 1}"', '"default"')


def _body(rng: random.Random, inputs: int, rich: bool) -> tuple[list[str], list[str]]:
    """Some ops, and what may be returned."""
    known, body = [f"%p{i}" for i in range(inputs)], []
    for k in range(rng.randint(1, 4)):
        a, b = rng.choice(known), rng.choice(known)
        known.append(f"%z{k}")
        if rich and rng.random() < 0.4:
            sharding = _sharding(rng, 1.0)[0].rpartition("#sdy.sharding")[2]
            number = rng.randint(0, 2)
            body += rng.choice(
                [
                    [f"%z{k} = stablehlo.constant dense<{number}.0> : {TENSOR}"],
                    [f"%z{k} = sdy.sharding_constraint {a} {sharding} : {TENSOR}"],
                ]
            )
            continue
        body.append(
            rng.choice(
                [
                    f"%z{k} = stablehlo.add {a}, {b} : {TENSOR}",
                    f"%z{k} = stablehlo.dot_general {a}, {b}, contracting_dims = [1] x [0] : "
                    f"({TENSOR}, {TENSOR}) -> {TENSOR}",
                    f"%z{k} = stablehlo.transpose {a}, dims = [1, 0] : ({TENSOR}) -> {TENSOR}",
                    f"%z{k} = stablehlo.tanh {a} : {TENSOR}",
                ]
            )
        )
    return body, known[inputs:]


def _sharding(rng: random.Random, likely: float) -> list[str]:
    if rng.random() > likely:
        return []
    dims: list[list[str]] = [[], []]
    for axis, _ in AXES:
        dim = rng.randint(0, 2)
        if dim < 2:
            dims[dim].append(f'"{axis}"')
    text = ", ".join(f"{{{', '.join(dim)}}}" for dim in dims)
    return [f"sdy.sharding = #sdy.sharding<@mesh, [{text}]>"]


def _dictionary(notes: list[str]) -> str:
    return f" {{{', '.join(notes)}}}" if notes else ""
