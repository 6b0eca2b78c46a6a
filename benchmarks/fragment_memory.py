"""How much memory fragments need: our temporaries against XLA:CPU's, and our packing against its bound.

Fragments of `fragments.py` at several sizes, of every model of the tests on several stages, and of the
example.

    python benchmarks/fragment_memory.py [--only=block] [--groups=gpt2,small,models,example] [--dtypes=f32]

One line per distinct fragment: bytes of temporaries (ours, of them scratch of kernels, and XLA's), the ratio,
and how far the packing is above the maximum live at once.  `private` are the bytes per thread in which
products pack their factors; XLA's products allocate theirs outside of what it reports, too.  The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import script

SIZES = {
    "gpt2": {"batch": 2, "tokens": 512, "width": 768, "heads": 12, "vocabulary": 8192},
    "small": {"batch": 4, "tokens": 64, "width": 128, "heads": 4, "vocabulary": 512},
}
GROUPS = (*SIZES, "models", "example")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of the fragments to look at")
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--dtypes", default="f32,bf16")
    return parser.parse_args()


def fragments(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """(name, fragment); distinct programs once."""
    groups = options.groups.split(",")
    for size in SIZES:
        if size in groups:
            yield from of_functions(size, options)
    if "models" in groups:
        yield from of_models(options)
    if "example" in groups:
        yield from of_the_example(options)


def of_functions(size: str, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    import jax

    from examples.workloads.fragments import cases
    from mpmd.compile.fragment import FragmentModule, ValueSpec

    kinds = {"float32": "f32", "bfloat16": "bf16", "int32": "i32"}

    def spec(value: Any) -> ValueSpec:
        return ValueSpec(tuple(value.shape), kinds[str(value.dtype)], ((),) * len(value.shape))

    for dtype in options.dtypes.split(","):
        for name, function, arrays in cases(SIZES[size], dtype):
            label = f"{size} {name} {dtype}"
            if options.only in label:
                lowered = jax.jit(function).lower(*arrays)
                results = tuple(spec(r) for r in jax.tree.leaves(lowered.out_info))
                given = tuple(map(spec, arrays))
                yield label, FragmentModule("fragment", "mesh", lowered.as_text(), given, results)


def of_models(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Of training steps with momentum, four microbatches, two and three stages."""
    from examples.workloads.flax_models import FLAX_MODELS
    from examples.workloads.models import MODELS
    from examples.workloads.steps import pipelined, sgd_momentum, training_step

    seen: set[str] = set()
    for name, model in (MODELS | FLAX_MODELS).items():
        for stages in (2, 3):
            if options.only in f"{name}/{stages}":
                params, loss, batch = model.build(stages)
                init, update = sgd_momentum()
                step = training_step(loss, 4, update)
                jitted = pipelined(step, stages, donate_argnums=0)
                yield from distinct(f"{name}/{stages}", jitted.lower(init(params), *batch).fragments, seen)


def of_the_example(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Of the example in its default configuration, and at the widths of GPT-2 small, one block per stage."""
    import jax
    import numpy as np

    from examples.pipelined_transformer.config import TrainConfig
    from examples.pipelined_transformer.train_step import make_state, make_train_step

    wide = {"d_model": 768, "heads": 12, "seq_len": 512, "batch_size": 8}
    seen: set[str] = set()
    for name, sizes in (("example", {}), ("example at gpt2", wide)):
        for dtype in ("float32", "bfloat16"):
            label = f"{name} {dtype}"
            if options.only in label:
                config = TrainConfig(dtype=dtype, **sizes)
                state = jax.eval_shape(lambda config=config: make_state(config))
                batch = jax.ShapeDtypeStruct((config.batch_size, config.seq_len + 1), np.int32)
                yield from distinct(label, make_train_step(config).lower(state, batch).fragments, seen)


def distinct(label: str, found: dict[str, Any], seen: set[str]) -> Iterator[tuple[str, Any]]:
    for name, fragment in found.items():
        if fragment.fingerprint not in seen:
            seen.add(fragment.fingerprint)
            yield f"{label} {name}", dataclasses.replace(fragment, token=False)


def measure(fragment: Any, xla_bytes: int) -> dict[str, Any]:
    """Our figures beside XLA's."""
    from mpmd.compile.backends.native_cpu.target import NativeCpu
    from mpmd.compile.driver import prepare_fragment

    made = prepare_fragment(fragment, NativeCpu())
    assignment, packing = made.assignment, made.assignment.packing
    ours = assignment.arena_bytes
    return {
        "ours": ours,
        "scratch": sum(place.size for place in assignment.scratch.values()),
        "xla": xla_bytes,
        "ratio": ours / xla_bytes if xla_bytes else float(ours > 0) + 1.0,
        "above_bound": packing.size / packing.lower_bound - 1 if packing.lower_bound else 0.0,
        "private": made.program.threaded.workspace_bytes,
    }


def xla_temporaries(fragment: Any) -> int:
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from mpmd.compile.backends.xla import XlaBackend

    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    return XlaBackend().compile(fragment, mesh).memory_analysis().temporaries


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are compared from version to version."""
    count = max(1, len(rows))
    worst = max(rows, key=lambda r: r["ratio"], default=None)
    loosest = max(rows, key=lambda r: r["above_bound"], default=None)
    return {
        "cases": len(rows),
        "share_not_above_xla": round(sum(r["ours"] <= r["xla"] for r in rows) / count, 4),
        "worst_ratio": worst and [worst["name"], round(worst["ratio"], 4)],
        "packing_within_1_percent": round(sum(r["above_bound"] <= 0.01 for r in rows) / count, 4),
        "packing_worst": loosest and [loosest["name"], round(loosest["above_bound"], 4)],
    }


def text_of(row: dict[str, Any]) -> str:
    return (
        f"{row['name']:60} {row['ours']:>11} (scratch {row['scratch']:>9})  XLA {row['xla']:>11}  "
        f"{row['ratio']:6.3f}  packing +{100 * row['above_bound']:.2f} %  private {row['private']}"
    )


def main() -> None:
    options = arguments()
    here = Path(__file__).resolve().parent
    sys.path[:0] = [str(here), str(here.parent)]
    rows = []
    for name, fragment in fragments(options):
        rows.append({"name": name, **measure(fragment, xla_temporaries(fragment))})
        print(text_of(rows[-1]), flush=True)
    print(json.dumps(summary(rows)))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "Some donated buffers were not usable")
    script.run(main)
