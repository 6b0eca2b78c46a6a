"""What does a pipelined step exchange between the devices of a stage, and what would be enough?

    python benchmarks/parallel_stages.py [--rounds 5] [--steps 2] [--only 'fsdp'] [--counts]

A GPT of 4 layers on two meshes of {data: 2}, {fsdp: 2}, {data: 2, model: 2} and {replica: 2, fsdp: 2}, where
rows lie over both axes, 8 microbatches, its stages named or divided from a scan over stacked layers, by both
backends.  Collectives are counted in the text of each program, times its calls in a step and the iterations
of loops around them.  For each variant one line:

`reductions`: of a weight's gradient, in a step.  `gathers`: of a weight.
`reduced_over_least`, `gathered_over_least`: bytes that a device sends for them, over the least possible: what
    an exchange in a ring sends for every weight once.
`step_over_before`: wall and CPU seconds of a step over those with one reduction per microbatch and a gather
    per use; `step_over_jit`: over `jax.jit` on the same devices, with microbatches in a scan; medians of
    interleaved rounds.
`difference`: the largest relative difference between the weights after one step and the weights by `jax.jit`.
`peak_over_predicted`: bytes of the step's arrays, as counted, over the prediction.

The last line is one JSON object with the worst of each.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mpmd
from benchmarks import script
from benchmarks.reference_gpt import Sizes, batch, run_blocks
from benchmarks.train_step import Variant
from examples.workloads.collectives import collectives
from mpmd.runtime.program.stream_memory import predict_memory
from mpmd.runtime.program.streams import Run

SIZES = Sizes(
    layers=4, stages=2, width=128, heads=4, sequence=64, vocabulary=512, microbatch=4, microbatches=8
)
MESHES = {
    "data": {"data": 2},
    "fsdp": {"fsdp": 2},
    "data+model": {"data": 2, "model": 2},
    "replica+fsdp": {"replica": 2, "fsdp": 2},
}


def row_axes(axes: dict[str, int]) -> tuple[str, ...]:
    """The axes that split the rows of a batch."""
    return tuple(axis for axis in axes if axis != "model")


def weights(sizes: Sizes, named: bool, seed: int = 0) -> dict[str, Any]:
    """Parameters: a list of layers, or layers stacked along dim 0."""
    rng = np.random.default_rng(seed)
    d = sizes.width

    def normal(*dims: int) -> np.ndarray:
        return (rng.normal(size=dims) / np.sqrt(dims[0])).astype(np.float32)

    layers = [
        {
            "qkv": normal(d, 3 * d),
            "out": normal(d, d),
            "up": normal(d, 4 * d),
            "down": normal(4 * d, d),
            "scale1": np.ones(d, np.float32),
            "scale2": np.ones(d, np.float32),
        }
        for _ in range(sizes.layers)
    ]
    return {
        "embed": normal(sizes.vocabulary, d),
        "layers": layers if named else jax.tree.map(lambda *a: np.stack(a), *layers),
        "head": normal(d, sizes.vocabulary),
    }


def specs(params: Any, way: str, named: bool) -> Any:
    """How weights are split: not at all, along their largest dim (FSDP), or as Megatron does."""

    def split(path: Any, leaf: np.ndarray) -> P:
        stacked = not named and path[0].key == "layers"
        shape = leaf.shape[1:] if stacked else leaf.shape
        dims: list[str | None] = [None] * len(shape)
        if way.endswith("fsdp"):
            dims[int(np.argmax(shape))] = "fsdp"
        elif way == "data+model" and path[-1].key in ("qkv", "up", "head"):
            dims[1] = "model"
        elif way == "data+model" and path[-1].key in ("out", "down"):
            dims[0] = "model"
        return P(None, *dims) if stacked else P(*dims)

    return jax.tree_util.tree_map_with_path(split, params)


def make_step(sizes: Sizes, named: bool, optimizer: Any) -> Any:
    """`step(params, opt_state, tokens, labels) -> (params, opt_state, loss)`."""

    def cross_entropy(head: Any, x: Any, labels: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(x @ head, labels).mean()

    def scanned(params: Any, tokens: Any, labels: Any) -> Any:
        def layer(x: Any, p: Any) -> Any:
            return run_blocks([p], x, sizes.heads), None

        x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
        return cross_entropy(params["head"], x, labels)

    def first(embed: Any, some: Any, tokens: Any) -> Any:
        return run_blocks(some, embed[tokens], sizes.heads)

    def second(head: Any, some: Any, x: Any, labels: Any) -> Any:
        return cross_entropy(head, run_blocks(some, x, sizes.heads), labels)

    def in_stages(params: Any, tokens: Any, labels: Any) -> Any:
        half = sizes.layers // 2
        of_first, of_second = params["layers"][:half], params["layers"][half:]
        x = mpmd.named_computation(first, name="stage0")(params["embed"], of_first, tokens)
        return mpmd.named_computation(second, name="stage1")(params["head"], of_second, x, labels)

    loss_fn = in_stages if named else scanned

    def step(params: Any, opt_state: Any, tokens: Any, labels: Any) -> Any:
        loss, grads = mpmd.accumulate_gradients(loss_fn, sizes.microbatches)(params, tokens, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


@dataclasses.dataclass
class Exchanged:
    """What a step exchanges along the axis that splits rows: of weights and gradients, and of others."""

    reductions: int = 0
    gathers: int = 0
    reduced: float = 0.0
    gathered: float = 0.0
    other: float = 0.0


def exchanged(compiled: Any, axes: dict[str, int], least: int) -> Exchanged:
    """The counts of one step; values smaller than any weight are not counted as one."""
    names = list(axes)
    ids = np.arange(math.prod(axes.values())).reshape(list(axes.values()))
    rows = row_axes(axes)
    along = set()
    for some in (*((axis,) for axis in rows), rows):
        groups = np.moveaxis(ids, [names.index(axis) for axis in some], range(-len(some), 0))
        groups = groups.reshape(-1, math.prod(axes[axis] for axis in some))
        along.add(frozenset(tuple(sorted(int(i) for i in group)) for group in groups))
    total = Exchanged()
    for stream in compiled.program.streams:
        calls = collections.Counter(op.executable for op in stream.instructions if isinstance(op, Run))
        reductions = gathers = 0
        for name, count in calls.items():
            found = collectives(compiled.executables[name].as_text("hlo"), ids.size)
            mine = [c for c in found if frozenset(tuple(sorted(g)) for g in c.groups) in along]
            reducing = [c for c in mine if c.kind in ("all-reduce", "reduce-scatter")]
            gathering = [c for c in mine if c.kind == "all-gather"]
            total.reduced += count * sum(c.sent for c in reducing)
            total.gathered += count * sum(c.sent for c in gathering)
            total.other += count * sum(c.sent for c in found if c not in reducing and c not in gathering)
            reductions += count * any(c.size >= least for c in reducing)
            gathers += count * any(c.size >= least for c in gathering)
        total.reductions = max(total.reductions, reductions)
        total.gathers = max(total.gathers, gathers)
    return total


def least_bytes(params: Any, split: Any, way: str, axes: dict[str, int]) -> tuple[float, float]:
    """Bytes that devices must send to reduce each gradient once, and to gather each weight once."""
    rows = row_axes(axes)
    reduced = gathered = 0.0
    for leaf, spec in zip(
        jax.tree.leaves(params), jax.tree.leaves(split, is_leaf=lambda s: isinstance(s, P))
    ):
        used = {axis for axis in spec if axis is not None}
        size = leaf.nbytes // math.prod(axes[axis] for axis in used.difference(rows))
        parts = math.prod(axes[axis] for axis in used.intersection(rows))
        others = math.prod(axes[axis] for axis in rows if axis not in used)
        gathered += (parts - 1) / parts * size
        reduced += (parts - 1) / parts * size + 2 * (others - 1) / others * size / parts
    return reduced, gathered


def whole(tree: Any) -> list[Any]:
    """The leaves of a tree; stacks of several meshes are one."""
    return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, mpmd.Stacked))


class Setting:
    """A model, its shardings, and the ways to run its step."""

    def __init__(self, way: str, named: bool, backend: str) -> None:
        self.way, self.named, self.backend = way, named, backend
        self.axes, optimizer = MESHES[way], optax.adam(1e-3)
        self.params, self.batch = weights(SIZES, named), batch(SIZES)
        self.step = make_step(SIZES, named, optimizer)
        self.split = specs(self.params, way, named)
        self.state = jax.tree.map(np.asarray, optimizer.init(self.params))
        of_state = optax.tree_map_params(
            optimizer, lambda _, spec: spec, self.state, self.split, transform_non_params=lambda _: P()
        )
        rows = P(row_axes(self.axes))
        self.shardings = (self.split, of_state, rows, rows)

    def pipelined(self, **options: Any) -> Any:
        """The step on two meshes."""
        config = mpmd.make_config(
            mpmd.make_topology({"m0": self.axes, "m1": self.axes}),
            {"stage0": "m0", "stage1": "m1"} if self.named else None,
            stages=None if self.named else mpmd.split("layers"),
            in_shardings=self.shardings,
            backend=self.backend,
            options=mpmd.PipelineOptions(**options),
        )
        return mpmd.jit(self.step, config)

    def on_one_mesh(self) -> tuple[Any, Any]:
        """The step by `jax.jit` on all devices of both, and how its arguments are placed."""
        counts = [2 * n if k == 0 else n for k, n in enumerate(self.axes.values())]
        devices = np.array(jax.devices()[: math.prod(counts)]).reshape(counts)
        mesh = jax.sharding.Mesh(devices, tuple(self.axes))
        placed = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), self.shardings, is_leaf=lambda s: isinstance(s, P)
        )
        results = (*placed[:2], NamedSharding(mesh, P()))
        return jax.jit(self.step, in_shardings=placed, out_shardings=results), placed


def difference(results: Any, expected: Any) -> float:
    """The largest, relative to the largest weight of each array."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(whole(results), whole(expected))]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def measure(way: str, named: bool, backend: str, args: argparse.Namespace) -> dict[str, Any]:
    """One variant."""
    s = Setting(way, named, backend)
    arguments = (s.params, s.state, *s.batch)
    once = s.pipelined()
    before = s.pipelined(reduce_gradients="per_microbatch", gather_weights="per_use")
    compiled = once.compiled(*arguments)
    smallest = min(leaf.nbytes for leaf in jax.tree.leaves(s.params) if leaf.ndim > 1) // 8
    found, old = (exchanged(c, s.axes, smallest) for c in (compiled, before.compiled(*arguments)))
    reduced, gathered = least_bytes(s.params, s.split, way, s.axes)
    reference, placed = s.on_one_mesh()
    expected = reference(*jax.device_put(arguments, placed))
    results = once(*arguments)
    (_, peaks) = compiled.live_bytes(*arguments)
    predicted = {m.mesh: m.peak_bytes for m in predict_memory(compiled.program)}
    line = {
        "mesh": way,
        "stages": "named" if named else "scanned",
        "backend": backend,
        "reductions": [found.reductions, old.reductions],
        "gathers": [found.gathers, old.gathers],
        "reduced_over_least": [round(x.reduced / reduced, 3) for x in (found, old)],
        "gathered_over_least": [round(x.gathered / gathered, 3) if gathered else None for x in (found, old)],
        "other_bytes": [round(found.other), round(old.other)],
        "loss_difference": abs(float(results[2]) - float(expected[2])),
        "difference": difference(results[0], expected[0]),
        "peak_over_predicted": round(max(peaks[m] / predicted[m] for m in peaks), 4),
        "fallbacks": compiled.cost_analysis()["fallbacks"],
    }
    if not args.counts:
        state = jax.device_put((s.params, s.state), placed[:2])
        runs = [
            Variant("once", once, arguments[:2], s.batch),
            Variant("before", before, arguments[:2], s.batch),
            Variant("jit", reference, state, jax.device_put(s.batch, placed[2:])),
        ]
        line |= times(runs, args)
    return line


def times(runs: list[Variant], args: argparse.Namespace) -> dict[str, list[float]]:
    """Wall and CPU time of the first over the others, interleaved."""
    for _ in range(args.rounds):
        for run in runs:
            run.measure(args.steps)
    wall, cpu = ([statistics.median(getattr(run, kind)) for run in runs] for kind in ("wall", "cpu"))
    names = ("step_over_before", "step_over_jit")
    return {n: [round(wall[0] / wall[k], 3), round(cpu[0] / cpu[k], 3)] for k, n in enumerate(names, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", default="", help="part of a variant's name: mesh, stages, backend")
    parser.add_argument("--counts", action="store_true", help="do not measure times")
    args = parser.parse_args()
    lines = []
    for way in MESHES:
        for named in (True, False):
            for backend in ("xla", "native"):
                name = f"{way} {'named' if named else 'scanned'} {backend}"
                if args.only in name:
                    lines.append(measure(way, named, backend, args))
                    print(json.dumps(lines[-1]), flush=True)
    gathering = [x for x in lines if x["mesh"].endswith("fsdp")]
    summary = {
        "gradient_reductions": max(x["reductions"][0] for x in lines),
        "gathers": max((x["gathers"][0] for x in gathering), default=0),
        "reduced_bytes_over_least": max(x["reduced_over_least"][0] for x in lines),
        "gathered_bytes_over_least": max((x["gathered_over_least"][0] for x in gathering), default=0.0),
        "equal": all(x["difference"] < 1e-3 and x["loss_difference"] < 1e-4 for x in lines),
        "peak_over_predicted": max(x["peak_over_predicted"] for x in lines),
    }
    if not args.counts:
        for k in ("step_over_before", "step_over_jit"):
            summary[k] = {
                "wall": [min(x[k][0] for x in lines), max(x[k][0] for x in lines)],
                "cpu": [min(x[k][1] for x in lines), max(x[k][1] for x in lines)],
            }
    print(json.dumps(summary))


if __name__ == "__main__":
    script.run(main)
