"""The MPMD pipelines: the order of the passes, with the reason for each position.

Read each from top to bottom.  A step that an option disables has a `when`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mpmd import ir
from mpmd.errors import ConfigError, close_to, collect
from mpmd.options import DIALECT_DEFAULTS, PipelineOptions, ways_to_reduce
from mpmd.passes import PASSES, make_pass
from mpmd.passes.bases import mlir_pass
from mpmd.scheduling.table import TaskOrders
from mpmd.support.passes import Pass, option_text, parsed_options


@dataclasses.dataclass(frozen=True)
class Step:
    """A pass, and the reason for its position."""

    pass_: Pass
    why: str


def import_pipeline(o: PipelineOptions) -> list[Step]:
    """From named computations to fragments and transfers: every value gets a mesh."""
    early = not o.merge_after_scheduling
    absorb_everywhere = o.absorb_inferred_fragments_on_entry_point_function
    return _flattened(
        _step("chlo-legalize-to-stablehlo", "one dialect less for all that follows"),
        _step("mpmd-inline", "ordinary calls vanish: names in them come to the top"),
        _step("symbol-dce", "the functions that were called are not needed any more"),
        _step("canonicalize", "otherwise cse could keep an op that inlining left unused"),
        _step("cse", "equal constants become one, which sinking into callees looks for"),
        _step("canonicalize", "constants fold, nested concatenates flatten: inference expects that"),
        _step("mpmd-copy-topology-from-main", "callees become MPMD functions"),
        _step(
            "mpmd-generate-sdy-meshes-from-topology",
            "one sdy mesh per mesh of the topology",
            when=o.heterogeneous_meshes,
        ),
        _step("mpmd-unroll-for-loops", "mesh inference knows no loops"),
        _step(
            "mpmd-fold-constant-branches",
            "counters of loops are constants now; names in branches move to the top level to be mapped",
        ),
        _step("canonicalize", "slices of stacked values of an unrolled loop fold away"),
        _step("mpmd-simplify-stablehlo", "smaller for inference; folds nothing that makes the text larger"),
        _step("mpmd-from-unroll-to-call-counter", "calls of unrolled loops are microbatches"),
        _step(
            "mpmd-carry-sums-through-calls",
            "as soon as microbatches are known; the terms of a sum need not all be kept then",
            when=o.carry_sums,
        ),
        _step(
            "mpmd-mirror-stages",
            "while microbatches still distinguish names; sums are carried by now",
            when=bool(o.mirrored_names),
            names=",".join(o.mirrored_names),
        ),
        _step("mpmd-sink-negligible-ops-into-call-op", "less for inference, and merges at once"),
        _step(
            "mpmd-insert-nameless-clone-of-negligible-ops",
            "before simplify-named-computations: leaves unused results behind",
        ),
        _step(
            "mpmd-simplify-named-computations",
            "a value that is only forwarded must not be tied to the computation's mesh",
        ),
        _step(
            "mpmd-map-input-output-to-mesh",
            "the user's meshes of arguments and results",
            input_assignment=o.input_assignment,
            output_assignment=o.output_assignment,
        ),
        _step(
            "mpmd-inline-nested-user-exposed-ops",
            "only names at the top are mapped",
            assignment=o.name_to_mesh_assignment,
        ),
        _step("mpmd-validate-named-ops-in-mpmd-func", "no name may be left inside of loops and branches"),
        _step(
            "mpmd-map-named-ops-to-mpmd-ops",
            "names become fragments, assigns and unassigns",
            assignment=o.name_to_mesh_assignment,
        ),
        _step(
            "mpmd-split-accumulators-by-mesh",
            "while sums over microbatches are still visible, and their terms have a mesh",
            when=o.split_accumulators,
        ),
        _step("mpmd-introduce-transfers", "assign of unassign becomes a transfer"),
        _step(
            "mpmd-erase-unused-callee-block-arguments",
            "inference cannot handle arguments that are only returned",
        ),
        infer_mesh_pipeline(o),
        _step(
            "mpmd-combine-before-transfer",
            "as long as every unnamed op is a fragment of its own",
            when=o.infer_transfers and not o.heterogeneous_meshes,
        ),
        _step(
            "mpmd-merge-inferred-by-round",
            "what surrounds the microbatches becomes fragments of its own, while calls mark where they are",
            when=early and o.keep_microbatches_equal,
        ),
        _step(
            "mpmd-absorb-inferred-fragments",
            "callees keep the shape that the user gave them",
            when=early,
            absorb_on_entry_point_function=absorb_everywhere,
        ),
        _step(
            "mpmd-merge-inferred-fragments",
            "while microbatches are still calls: any-consumer cannot tie them together",
            when=early,
            merge_any_consumer=True,
        ),
        _step(
            "mpmd-merge-inferred-fragments",
            "fragments without a suitable consumer merge with their neighbour",
            when=early,
            merge_sideways=True,
        ),
        _step(
            "mpmd-enforce-input-output-equisharding",
            "constrained arguments and results get one type",
            constraints=o.constraints,
        ),
        _step(
            "mpmd-swap-transposed-dots",
            "once per callee; every backend then reads the factors in their layout",
            when=o.swap_transposed_dots,
        ),
        _step(
            "mpmd-recompute-cheap-residuals",
            "once per callee, not per microbatch; leaves operands unused",
            when=o.recompute_cheap_residuals,
        ),
        _step(
            "mpmd-recompute-attention",
            "after it: masks and scales are recomputed already; native code then writes no scores at all",
            when=_stitches(o),
        ),
        _step("mpmd-fragment-dedup", "merging passes values twice"),
        _step("mpmd-fragment-dce", "drops what dedup left unused"),
        _step("mpmd-remove-transfer-cycles", "before inlining: once per callee, not per microbatch"),
        _step(
            "mpmd-call-inline",
            "microbatches are in one block from here on; splitting looks into their bodies",
            share_bodies=o.keep_microbatches_equal and not o.split_bwd_fragments,
        ),
        _step("symbol-dce", "callees are not needed any more"),
        _step(
            "mpmd-copy-cheap-constants",
            "work around the microbatches need not keep zeros for the end of the step",
            when=early and o.keep_microbatches_equal,
        ),
        _step(
            "mpmd-uniquify-carried-values",
            "before equal operands are joined: the first microbatch must look like the others",
            when=early and o.keep_microbatches_equal,
        ),
        _step(
            "mpmd-merge-inferred-fragments",
            "closest consumer only: now microbatches share a block",
            when=early,
            keep_microbatches_equal=o.keep_microbatches_equal,
        ),
        _step("mpmd-move-transfers-to-producer", "a transfer in between would keep units apart"),
        _step(
            "mpmd-merge-user-fragments-into-scheduling-units",
            "one forward and one backward fragment per mesh and microbatch",
            merge_siblings=True,
        ),
        _step(
            "mpmd-scheduling-units-verifier",
            "before splitting, which its counts do not consider",
            when=o.verify_schedule_units,
        ),
        _step(
            "mpmd-split-bwd-fragments",
            "results for other meshes and stages come first",
            when=o.split_bwd_fragments,
            between_stages=o.keep_microbatches_equal,
        ),
        _step(
            "canonicalize",
            "residuals that are only passed through vanish",
            when=o.split_bwd_fragments,
            region_simplify="disabled",
        ),
        _step("mpmd-fragment-dce", "drops operands that a half does not need", when=o.split_bwd_fragments),
    )


def infer_mesh_pipeline(o: PipelineOptions) -> list[Step]:
    """Gives a mesh to every op and value that no name covers.

    Until the end no pass may remove dead code: the analysis lives in attributes and in unused assigns.
    """
    return _flattened(
        _step("mpmd-infer-mesh-populate-use-set", "on which meshes is a value used?"),
        _step("mpmd-infer-mesh-populate-src-set", "on which meshes can it be without a new transfer?"),
        _step(
            "mpmd-infer-mesh-assign-using-input-output-constraints",
            "constrained arguments and results choose their mesh together, before either does alone",
            when=bool(o.constraints),
            constraints=o.constraints,
        ),
        _step(
            "mpmd-infer-mesh-convert-reduce-ops",
            "sums of values on several meshes become reductions across meshes",
            infer_cross_mesh_reductions=o.infer_cross_mesh_reductions or o.infer_transfers,
        ),
        _step(
            "mpmd-infer-mesh-validate-src-set-not-empty",
            "each op must be possible somewhere",
            when=not o.infer_transfers,
            error_limit=o.error_limit,
        ),
        _step(
            "mpmd-infer-mesh-assign-mesh-func-leaves",
            "unused values have no use to take a mesh from",
            infer_transfers=o.infer_transfers,
            error_limit=o.error_limit,
        ),
        _step("mpmd-infer-mesh-populate-use-set", "again, now that leaves have a mesh"),
        _step(
            "mpmd-infer-mesh-validate-no-additional-transfers-needed",
            "each op must be possible where it is used",
            when=not o.infer_transfers,
            error_limit=o.error_limit,
        ),
        _step(
            "mpmd-infer-mesh-rewrite-using-analysis",
            "ops go into the fragments that use them, or into fragments of their own",
            max_clones=o.max_clones,
            by_round=o.keep_microbatches_equal and not o.merge_after_scheduling,
        ),
        _step(
            "mpmd-infer-mesh-finalize",
            "assigns and unassigns become transfers or vanish",
            infer_transfers=o.infer_transfers,
        ),
    )


def optimize_pipeline(o: PipelineOptions, orders: TaskOrders | None = None) -> list[Step]:
    """Orders the fragments of every mesh, then merges as far as the order allows.

    Args:
        o: the options.
        orders: the tasks of each mesh in the order of a schedule; by default those of `o.task_orders`.
    """
    late = o.merge_after_scheduling
    orders = TaskOrders.parse(o.task_orders) if orders is None else orders
    return _flattened(
        _step(
            "mpmd-rule-based-schedule",
            "the user's order",
            when=bool(o.schedule_rules),
            rules=o.schedule_rules,
            remove_control_dependencies=not o.merge_rules,
        ),
        _step(
            "mpmd-pipeline-scheduler",
            "the schedule's order; merge rules still need to see it as dependencies",
            when=not o.schedule_rules and not orders.of_mesh,
            must_happen_before=o.pipeline_schedule,
            remove_control_dependencies=not o.merge_rules,
        ),
        _step(
            "mpmd-order-by-tasks",
            "the table of tasks that a schedule made",
            when=bool(orders.of_mesh) and not o.schedule_rules,
            orders=orders,
            fail_on_impossible_order=o.fail_on_impossible_order,
        ),
        _step(
            "mpmd-rule-based-merge",
            "before every other merge, which would change the origins that rules match",
            when=bool(o.merge_rules),
            rules=o.merge_rules,
            remove_control_dependencies=True,
        ),
        _step(
            "mpmd-remat-fragment",
            "after scheduling, so that clones need not be scheduled",
            when=o.fragment_remat,
            merge_remat_fragments=o.merge_remat_fragments,
        ),
        _step(
            "mpmd-verify-stage-merging",
            "each stage must be one program per microbatch and phase",
            when=o.one_fragment_per_task,
        ),
        _step(
            "mpmd-absorb-inferred-fragments",
            "unnamed work merges with named work, whose order is known now",
            when=late,
            absorb_on_entry_point_function=o.absorb_inferred_fragments_on_entry_point_function,
        ),
        _step("mpmd-merge-inferred-fragments", "those not absorbed", when=late, merge_any_consumer=True),
        _step("mpmd-merge-inferred-fragments", "those without a consumer", when=late, merge_sideways=True),
        _step(
            "mpmd-merge-forward-with-backward",
            "one program for both where they are adjacent",
            when=o.merge_forward_with_backward,
        ),
    )


def sharding_propagation_pipeline(o: PipelineOptions) -> list[Step]:
    """Decides how every value is split over the devices of its mesh, across fragments and transfers."""
    return _flattened(
        _step(
            "mpmd-uniquify-function-inputs-outputs",
            "results that share a value can then have shardings of their own",
            use_transfer_instead_of_fragment=True,
        ),
        _step(
            "mpmd-hoist-gathers",
            "weights that are whole where they are used do not decide how activations are split",
            when=o.gather_weights != "per_use",
        ),
        _step(
            "mpmd-defer-reductions",
            "how gradients are split is left to who reads the sums, and does not reach into microbatches",
            when=o.reduce_gradients != "per_microbatch",
            per_microbatch=tuple(axis for axis, way in ways_to_reduce(o).items() if way == "per_microbatch"),
        ),
        _step(
            "mpmd-propagate-shardings",
            "Shardy decides, and leaves things to tidy up: all of it once for all microbatches",
            share=o.keep_microbatches_equal,
            as_dialect=not o.jax_shardings,
        ),
        _step("mpmd-populate-unreduced-out-sharding", "propagation leaves unreduced axes at constraints"),
        _step(
            "mpmd-drop-sub-axes",
            "JAX has no arrays that are sharded over part of an axis",
            when=o.jax_shardings,
        ),
        _step("mpmd-enforce-user-shardings", "the user's shardings of arguments and results have priority"),
        _step(
            "mpmd-fit-shardings-to-meshes",
            "meshes that differ have been one mesh until here",
            when=o.jax_shardings,
        ),
        _step("mpmd-extract-reshards-from-inter-mesh-transfers", "transfers do not reshard"),
        _step("mpmd-convert-sdy-shardings-to-mpmd-types", "from here on shardings are part of types"),
        _step(
            "mpmd-forget-empty-shardings",
            "propagation distinguishes replicated values from those without a sharding",
            when=o.keep_microbatches_equal,
        ),
        _step("mpmd-simplify-program", "joins operands and results that have become equal"),
        _step("mpmd-forget-empty-computations", "a name with nothing left but a reshard names nothing"),
        _step(
            "mpmd-validate-no-repeated-collectives",
            "the user wants them once, and shardings are final",
            when="once" in (o.reduce_gradients, o.gather_weights),
            reductions=o.reduce_gradients == "once",
            gathers=o.gather_weights == "once",
        ),
    )


def export_pipeline(o: PipelineOptions, orders: TaskOrders | None = None) -> list[Step]:
    """From fragments to calls of one function per distinct fragment, with donation and memory marked.

    Args:
        o: the options.
        orders: whose pairs are combined; by default `o.task_orders`.
    """
    orders = TaskOrders.parse(o.task_orders) if orders is None else orders
    return _flattened(
        _step(
            "mpmd-combine-tasks",
            "until here each microbatch shows how its rows are split, and which sums are taken once",
            when=bool(orders.pairs) and not o.schedule_rules,
            orders=orders,
        ),
        _step("cse", "joins equal transfers and equal pure fragments too"),
        _step("mpmd-copy-constants", "before dead code goes, as it leaves some", when=o.copy_constants),
        _step("canonicalize", "removes values that fragments only pass through", region_simplify="disabled"),
        _step("mpmd-fragment-dedup", "joins operands that have become equal"),
        _step("mpmd-merge-transfers", "scalars travel together", when=o.merge_transfers),
        _step("mpmd-fragment-dedup", "joins values that were merged twice", when=o.merge_transfers),
        _step("cse", "joins transfers that have become equal", when=o.merge_transfers),
        _step("mpmd-fragment-dce", "drops all that the steps above left unused"),
        _step(
            "mpmd-uniquify-function-inputs-outputs",
            "each result gets a buffer; after the last dedup and canonicalize, which would undo it",
        ),
        _step(
            "mpmd-merge-inferred-fragments",
            "the copies move into the producing fragments",
            keep_microbatches_equal=o.keep_microbatches_equal,
        ),
        _step(
            "mpmd-lower-gathers",
            "when the shardings of the weights are final",
            when=o.gather_weights != "per_use",
        ),
        _step(
            "mpmd-lower-reductions",
            "when the shardings of the sums are final",
            when=o.reduce_gradients != "per_microbatch",
        ),
        _step(
            "mpmd-offload-residuals",
            "in the final order; nothing joins transfers any more, so that each reader has its own copy back",
        ),
        _step("mpmd-mark-offloaded-input-output", "which values live in host memory"),
        _step("mpmd-mark-input-output-with-layouts", "which values have a layout of their own"),
        _step("mpmd-delay-inferred-fragments", "before anything depends on program order"),
        _step(
            "mpmd-issue-reductions",
            "not all as late as possible: a mesh that waits can reduce",
            when=o.reduce_gradients != "per_microbatch",
        ),
        _step("mpmd-delay-transfers-from-cpu", "before anything depends on program order"),
        _step("mpmd-sink-create-token-into-fragments", "tokens do not cross programs"),
        _step(
            "mpmd-mark-aliasing-and-donation",
            "needs the final order and the host marks",
            keep_microbatches_equal=o.keep_microbatches_equal,
        ),
        _step("mpmd-mark-fragment-reserved-memory", "needs the donations"),
        _step(
            "mpmd-validate-no-param-transfers",
            "while values still have their names",
            fail_on_param_transfers=o.fail_on_param_transfers,
            param_pattern=o.param_transfer_pattern,
        ),
        _step(
            "mpmd-validate-no-inferred-fragments",
            "while fragments still know their origin; around microbatches they are expected",
            when=not o.keep_microbatches_equal,
            fail_on_inferred_fragments=o.fail_on_inferred_fragments,
        ),
        _step(
            "mpmd-forget-carried-starts",
            "equal results are not joined any more; identical stages become one program",
            when=o.keep_microbatches_equal,
        ),
        _step(
            "mpmd-copy-scalar-results",
            "the counts of a state need not be sent to the other processes",
            when=bool(o.copy_scalar_results),
            meshes=o.copy_scalar_results,
        ),
        _step(
            "mpmd-lower-to-fragment-calls",
            "one function per distinct fragment",
            verbose_logging=o.verbose_logging,
        ),
        _step(
            "mpmd-validate-no-reshards",
            "its name here shows that a program only reshards",
            fail_on_reshard_only_fragments=o.fail_on_reshard_only_fragments,
            ignore_copies=o.keep_microbatches_equal,
        ),
        _step(
            "mpmd-validate-no-backward-deps",
            "on the final calls and transfers; otherwise data may flow to any mesh",
            when=o.fail_on_backward_deps or not o.keep_microbatches_equal,
            fail_on_backward_deps=o.fail_on_backward_deps,
        ),
    )


Pipeline = Callable[[PipelineOptions], list[Step]]

PIPELINES: dict[str, Pipeline] = {
    "mpmd-import-pipeline": import_pipeline,
    "mpmd-infer-mesh-pipeline": infer_mesh_pipeline,
    "mpmd-optimize-pipeline": optimize_pipeline,
    "mpmd-sharding-propagation-pipeline": sharding_propagation_pipeline,
    "mpmd-export-pipeline": export_pipeline,
}

# On the command line, as the dialect's test files have it.
_DEFAULTS = {"mpmd-optimize-pipeline": {"pipeline_schedule": "1F1B"}}
_OTHER_NAMES = {"enable-heterogeneous-meshes": "heterogeneous-meshes"}


def steps_of(name: str, options: Sequence[tuple[str, str]]) -> list[Step]:
    """The steps of a pipeline by its name, with options as on the command line.

    Raises:
        ConfigError: no such pipeline or option.
    """
    if name not in PIPELINES:
        raise ConfigError(f"unknown pipeline {name!r}; there are {', '.join(PIPELINES)}")
    pairs = [(_OTHER_NAMES.get(key, key), value) for key, value in options]
    given = _DEFAULTS.get(name, {}) | parsed_options(PipelineOptions, pairs, name)
    return PIPELINES[name](dataclasses.replace(DIALECT_DEFAULTS, **given))


def check_options(o: PipelineOptions) -> None:
    """Checks the values of the options, and that the passes and options of passes that they name exist.

    Raises:
        ConfigError: there is no such folder or pass, or a pass has no such option; all problems at once.
    """
    problems = []
    if o.kernel_overrides and not Path(o.kernel_overrides).is_dir():
        problems.append(f"kernel_overrides is {o.kernel_overrides!r}: there is no such folder")
    for name in _not_of_hlo(o.disable_passes):
        if name not in PASSES and not _is_mlir(name):
            problems.append(f"disable_passes: there is no pass {name!r}{close_to(name, PASSES)}")
    for entry in _not_of_hlo(o.pass_options):
        name, _, options = entry.partition("{")
        if name not in PASSES:
            problems.append(f"pass_options: there is no pass {name!r}{close_to(name, PASSES)}")
            continue
        try:
            make_pass(name, options.removesuffix("}"))
        except ConfigError as e:
            problems.append(str(e))
    if problems:
        raise collect(ConfigError, problems, "the options cannot be used:")


def _not_of_hlo(entries: Iterable[str]) -> list[str]:
    """Entries other than those for HLO passes, which the compiler checks."""
    return [entry for entry in entries if not entry.startswith("hlo-")]


def _is_mlir(name: str) -> bool:
    """Whether MLIR has a pass of this name, for modules or for functions."""
    return any(not ir.mlir_problem(text) for text in (name, f"func.func({name})"))


def _stitches(o: PipelineOptions) -> bool:
    """Whether attention becomes one kernel, which reads scores and scales in any layout."""
    return o.attention_stitching == "auto" and o.backend != "xla"


def _step(name: str, why: str, when: bool = True, **options: Any) -> list[Step]:
    """One step, or none unless `when`.  An option `a_b` of a pass is `a-b` on its command line.

    An option that is a record is passed as it is; others are written as on a command line.
    """
    if not when:
        return []
    records = {key: value for key, value in options.items() if dataclasses.is_dataclass(value)}
    pairs = [(k.replace("_", "-"), option_text(v)) for k, v in options.items() if k not in records]
    if name.startswith("mpmd-"):
        return [Step(dataclasses.replace(make_pass(name, pairs), **records), why)]
    return [Step(mlir_pass(name, " ".join(f"{key}={value}" for key, value in pairs)), why)]


def _flattened(*parts: Iterable[Step]) -> list[Step]:
    return [step for part in parts for step in part]
