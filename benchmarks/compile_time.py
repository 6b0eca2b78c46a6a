"""How long does it take to partition a step, and how does that grow with the number of microbatches?

    python benchmarks/compile_time.py [--microbatches 8 16 32 64 128 256] [--layers 12] [--stages 4]
                                      [--repeats 3] [--schedule 1f1b] [--passes 10] [--whole 3]

The step is `reference_gpt.py`'s under `accumulate_gradients`.  Nothing is compiled or run, and no array
exists: only the program counts.  Every number of microbatches has a process of its own, which partitions the
step `--repeats` times; the best time of each phase is in the table, and `first` is the first time:

    trace      JAX's tracing and lowering; does not depend on the number of microbatches
    names      from JAX's module to one in our dialect
    order      the order of tasks by the schedule
    import, optimize, sharding, export    the pipelines of `mpmd/partition/pipeline.py`
    linearize  the instruction streams, verified
    partition  all of it after tracing

All are wall seconds; `cpu` is partition in CPU seconds.  `parse` is MLIR's parser on the text of the module
before import.  `peer` is what jaxlib's C++ MPMD passes take for that module, all phases, in CPU seconds, and
`peer import` its import; both are 0 where jaxlib does not have them.  They run after each repeat, in the same
process.  `peak` is the most memory that the process held, in MiB, `growth` what of it came with tracing and
partitioning.  The last line is one JSON object: `partition_s_8`, `partition_s_64` ..., the ratio of `cpu` to
`peer` as `over_peer_8` ..., or to `parse` as `over_parse_8` ... where there is no peer, the slope of
log(partition) over log(microbatches) by least squares as `exponent`, the same of the growth of memory as
`memory_exponent`, and all rows.

Then the whole way to machine code: tracing, partitioning, generating code, of a step of width 768 with 8
microbatches, against `jax.jit` of the same step, each `--whole` times in turn, in a new process without a
compile cache.  `whole_s` and `whole_jit_s` are the best wall seconds, `whole_over_jit` is their ratio.
Modules are imported from bytecode, like an installed package's: the first process writes it.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import script  # noqa: E402 - the root must be importable first

PHASES = ("trace", "names", "import", "order", "optimize", "sharding", "export", "linearize")
COLUMNS = (*PHASES, "partition", "cpu", "first", "parse", "peer")


def slope(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """The exponent `b` of the least-squares fit `log y = a + b log x`; None for fewer than two points."""
    if len(xs) < 2:
        return None
    u, v = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    covariance = sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v))
    return covariance / sum((a - mean_u) ** 2 for a in u)


def peak_mib() -> float:
    """The most memory that this process held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class _Before:
    """Keeps the text of the module before import; an observer of lowering."""

    text = ""

    def begins(self, module: Any) -> None:
        """The module before import."""
        from mpmd import ir

        self.text = ir.to_text(module)

    def phase_begins(self, phase: str, steps: Any) -> None:
        """Nothing to do."""

    def pass_ended(self, pass_: Any, module: Any, changed: bool, seconds: float) -> None:
        """Nothing to do."""


def make_step(sizes: Any, schedule: str, jit: str = "mpmd") -> tuple[Any, tuple[Any, ...]]:
    """The step under `mpmd.jit`, or under `jax.jit`, and its arguments without arrays."""
    import jax

    import mpmd
    from benchmarks import reference_gpt as gpt

    def abstract(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    step, optimizer = gpt.make_step(sizes)
    params = abstract(gpt.init(sizes))
    arguments = (params, jax.eval_shape(optimizer.init, params), *abstract(gpt.batch(sizes)))
    if jit == "jax":
        return jax.jit(step, donate_argnums=(0, 1)), arguments
    topology = mpmd.make_topology({f"m{s}": 1 for s in range(sizes.stages)})
    assignment = {f"stage{s}": f"m{s}" for s in range(sizes.stages)}
    config = mpmd.make_config(topology, assignment, schedule=schedule)
    return mpmd.jit(step, config, donate_argnums=(0, 1)), arguments


def partition_once(sizes: Any, schedule: str) -> tuple[dict[str, float], Any]:
    """Seconds per phase, and the step partitioned."""
    step, arguments = make_step(sizes, schedule)
    gc.collect()
    start = time.perf_counter()
    traced = step.trace(*arguments)
    jax_lowered = traced.jax_traced.lower(lowering_platforms=("cpu",))
    seconds = {"trace": time.perf_counter() - start}
    start, cpu = time.perf_counter(), time.process_time()
    made = traced.partition(jax_lowered)
    seconds["partition"], seconds["cpu"] = time.perf_counter() - start, time.process_time() - cpu
    seconds |= {"names": made.seconds["trace"], **{name: made.seconds[name] for name in PHASES[2:]}}
    return seconds, made


def text_before_import(sizes: Any, schedule: str) -> str:
    """The module that the import pipeline starts with."""
    step, arguments = make_step(sizes, schedule)
    before = _Before()
    step.trace(*arguments).lower(before)
    return before.text


def peer_once(text: str, sizes: Any) -> dict[str, float]:
    """CPU seconds that MLIR takes to parse the module, and jaxlib's MPMD passes for it; 0 without them."""
    from mpmd import ir

    start = time.process_time()
    ir.parse(text)
    seconds = {"parse": time.process_time() - start, "peer import": 0.0, "peer": 0.0}
    try:
        import jaxlib._jax

        sys.modules.setdefault("jax.jaxlib._jax", jaxlib._jax)  # where the extension looks for it
        import jaxlib._sdy_mpmd as peer
    except ImportError:
        return seconds
    for name, phase in (("peer import", "IMPORT"), ("peer", "ALL")):
        module = ir.parse(text)
        main = ir.symbol_table(module)["main"]
        donors = ("jax.buffer_donor", "tf.aliasing_output")
        donated = [i for i in range(len(main.args)) if any(main.arg_attribute(i, name) for name in donors)]
        wanted = ("infer_transfers", "infer_cross_mesh_reductions")
        start = time.process_time()
        with ir.context():
            peer.apply_mpmd_partitioning(
                module, "main", [(f"m{s}", [("x", 1)]) for s in range(sizes.stages)],
                {f"stage{s}": f"m{s}" for s in range(sizes.stages)},
                [None] * len(main.args), [None] * len(main.returned), donated,
                partitioning_options={f"mpmd_{option}": True for option in wanted}
                | {"mpmd_pipeline_schedule": "1F1B"},
                fragment_merge_rules=[], fragment_schedule_rules=[],
                phases=getattr(peer.PartitioningPhase, phase),
            )  # fmt: skip
        seconds[name] = time.process_time() - start
    return seconds


def measure(args: argparse.Namespace, microbatches: int) -> dict[str, Any]:
    """One row of the table: the step with so many microbatches."""
    import jax

    from benchmarks import reference_gpt as gpt

    jax.config.update("jax_num_cpu_devices", args.stages)
    sizes = gpt.Sizes(layers=args.layers, stages=args.stages, microbatches=microbatches)
    before = peak_mib()
    runs: list[dict[str, float]] = []
    for _ in range(args.repeats):
        jax.clear_caches()
        seconds, partitioned = partition_once(sizes, args.schedule)
        if not runs:
            peak = peak_mib()
            text = text_before_import(sizes, args.schedule)
            slowest = _by_pass(partitioned.pass_seconds).most_common(args.passes)
        instructions = partitioned.program.num_instructions
        del partitioned
        runs.append(seconds | peer_once(text, sizes))
    row: dict[str, Any] = {"microbatches": microbatches, "instructions": instructions}
    row |= {name: min(run[name] for run in runs) for name in runs[0]}
    row |= {"first": runs[0]["partition"], "peak_mib": peak, "growth_mib": peak - before}
    return row | {"passes": dict(slowest)}


def compile_whole(args: argparse.Namespace, jit: str) -> float:
    """Seconds from the function to machine code, in a process that has compiled nothing."""
    import jax

    from benchmarks import reference_gpt as gpt

    jax.config.update("jax_num_cpu_devices", args.stages)
    jax.config.update("jax_enable_compilation_cache", False)
    sizes = gpt.Sizes(layers=args.layers, width=768, heads=12, stages=args.stages)
    step, arguments = make_step(sizes, args.schedule, jit)
    jax.block_until_ready(jax.numpy.zeros(1))  # the backend is there
    start = time.perf_counter()
    step.trace(*arguments).lower().compile()
    return time.perf_counter() - start


def _by_pass(pass_seconds: list[tuple[str, float]]) -> collections.Counter[str]:
    """Seconds of every pass, all its runs together."""
    found: collections.Counter[str] = collections.Counter()
    for name, seconds in pass_seconds:
        found[name.partition("{")[0]] += seconds
    return found


def in_a_process_of_its_own(*one: str) -> Any:
    """What this script measures when it is called with these arguments."""
    command = [sys.executable, __file__, *sys.argv[1:], *one]
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1"}  # the peer logs every fragment
    quiet.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode, as JAX has
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=quiet)
    return json.loads(done.stdout.splitlines()[-1])


def whole(repeats: int) -> dict[str, float]:
    """The best seconds of both sides, which take turns, and their ratio."""
    runs = [[in_a_process_of_its_own("--one-whole", jit) for jit in ("mpmd", "jax")] for _ in range(repeats)]
    ours, theirs = (min(column) for column in zip(*runs))
    print(f"whole: {ours:.2f} s, jax.jit {theirs:.2f} s, {ours / theirs:.2f} times as long")
    return {"whole_s": ours, "whole_jit_s": theirs, "whole_over_jit": ours / theirs}


def over(row: dict[str, Any]) -> tuple[str, float]:
    """The row's reference, and how many times as long partitioning takes."""
    against = "peer" if row["peer"] else "parse"
    return f"over_{against}", row["cpu"] / row[against]


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of the last line."""
    counts = [row["microbatches"] for row in rows]
    figures: dict[str, Any] = {f"partition_s_{row['microbatches']}": row["partition"] for row in rows}
    figures |= {f"{against}_{row['microbatches']}": ratio for row in rows for against, ratio in [over(row)]}
    figures["exponent"] = slope(counts, [row["partition"] for row in rows])
    figures["cpu_exponent"] = slope(counts, [row["cpu"] for row in rows])
    figures["trace_exponent"] = slope(counts, [row["trace"] for row in rows])
    figures["memory_exponent"] = slope(counts, [max(row["growth_mib"], 1.0) for row in rows])
    return figures | {"rows": rows}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument(
        "--passes", type=int, default=0, help="list so many of the slowest passes of the first run"
    )
    parser.add_argument("--one", type=int, help="measure this number only, in this process")
    parser.add_argument("--whole", type=int, default=3, help="compile so many times, and as often by jax.jit")
    parser.add_argument("--one-whole", choices=("mpmd", "jax"), help="compile once, in this process")
    args = parser.parse_args()
    if args.one_whole:
        print(compile_whole(args, args.one_whole))
        return
    if args.one:
        print(json.dumps(measure(args, args.one)))
        return
    print(f"{'microbatches':>12} " + " ".join(f"{name:>9}" for name in (*COLUMNS, "peak", "growth")))
    rows = []
    for microbatches in args.microbatches:
        row = in_a_process_of_its_own("--one", str(microbatches))
        rows.append(row)
        cells = [f"{row[name]:9.3f}" for name in COLUMNS]
        cells += [f"{row[name]:9.0f}" for name in ("peak_mib", "growth_mib")]
        print(f"{microbatches:12} " + " ".join(cells), flush=True)
        for name, seconds in row["passes"].items():
            print(f"{'':12} {seconds * 1e3:9.1f} ms  {name}")
    print(json.dumps(report(rows) | (whole(args.whole) if args.whole else {})))


if __name__ == "__main__":
    script.run(main)
