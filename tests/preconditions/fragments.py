"""Passes over fragments: import, calls, splitting, schedules, shardings, and what is written at fragments."""

from __future__ import annotations

from tests.preconditions import RowsOf

_TEXT = "tests/text/test_text.py::test_file"
_import = RowsOf("mpmd/passes/import_", _TEXT)
_merge = RowsOf("mpmd/passes/merge", _TEXT)
_calls = RowsOf("mpmd/passes/calls", _TEXT)
_split = RowsOf("mpmd/passes", _TEXT)
_schedule = RowsOf("mpmd/passes/schedule", _TEXT)
_shardings = RowsOf("mpmd/passes/propagation", _TEXT)
_export = RowsOf("mpmd/passes/export", _TEXT)

_UNITS = "merge_named.py:"
_MERGED = "merge/merge-user-fragments-into-scheduling-units-0"
_SIBLINGS = "merge/merge-user-fragments-into-scheduling-units-siblings-0"
_RESHARDS = "propagation/extract-reshards-from-inter-mesh-transfers-0"
_LAYOUTS = "export/mark-input-output-with-layouts-0"
_OFFLOADED = "export/mark-offloaded-input-output-0"
_RESIDUALS = "export/offload-residuals-0"

_IMPORTED = (
    _import(
        "meshes.py:EnforceInputOutputEquisharding.rewrite_function",
        "A result has the type of its argument only if it has its shape.",
        "if value.type.tensor != wanted.tensor:",
        "if False:",
        "import_/enforce-input-output-equisharding-0",
    ),
    _import(
        "meshes.py:_checked",
        "The program has an argument or result of that number.",
        "if item.index >= count:",
        "if False:",
        "import_/map-input-output-to-mesh-errors-0",
    ),
    _import(
        "meshes.py:_checked",
        "The topology has the mesh.",
        "elif item.place.mesh not in meshes:",
        "elif False:",
        "import_/map-input-output-to-mesh-errors-0",
    ),
    _import(
        "meshes.py:_checked",
        "A position is assigned once.",
        "elif by_index.setdefault(item.index, item.place) != item.place:",
        "elif by_index.setdefault(item.index, item.place) is None:",
        "import_/map-input-output-to-mesh-conflicts-0",
    ),
    _import(
        "meshes.py:_can_be_assigned",
        "An assigned value is a plain tensor.",
        "if assigning.is_tensor(kind):",
        "if True:",
        "import_/map-input-output-to-mesh-conflicts-0",
    ),
    _import(
        "named.py:MapNamedOpsToMpmdOps.rewrite_function",
        "A name is in a function or a loop over microbatches, in no other region.",
        "if not isinstance(op.operation.parent.opview, (ir.Func, ir.For)):",
        "if False:",
        "import_/map-named-ops-to-mpmd-ops-0",
    ),
    _import(
        "named.py:_can_be_mapped",
        "The assignment has the name of a computation.",
        "if name not in places:",
        "if False:",
        "import_/map-named-ops-to-mpmd-ops-errors-0",
    ),
    _import(
        "named.py:_mesh_exists",
        "The topology has the mesh.",
        "if place.mesh in meshes:",
        "if True:",
        "import_/map-named-ops-to-mpmd-ops-errors-0",
    ),
    _import(
        "infer_mesh/assign.py:_mesh_of_pair",
        "The user assigned neither of both to another mesh.",
        "if assigning.is_mesh_tensor(arg.type) and arg.type.mesh != wanted:",
        "if False:",
        "import_/infer-mesh-assign-using-input-output-constraints-errors-0",
    ),
    _import(
        "infer_mesh/assign.py:_mesh_of_pair",
        "The mesh is one where the result can be.",
        "(of_input if possible is None else of_input & possible).best()",
        "of_input.best()",
        "import_/infer-mesh-assign-using-input-output-constraints-0",
    ),
    _import(
        "infer_mesh/rewrite_using_analysis.py:InferMeshFinalize._rewrite_assign",
        "Only arguments are transferred without a word of the user.",
        "elif of_argument or self.infer_transfers:",
        "elif True:",
        "import_/infer-mesh-finalize-errors-0",
    ),
    _import(
        "infer_mesh/rewrite_using_analysis.py:_assign_arguments",
        "All users of an argument want it in one memory.",
        "if len(kinds) > 1:",
        "if False:",
        "import_/infer-mesh-finalize-errors-0",
    ),
    _import(
        "infer_mesh/rewrite_using_analysis.py:_calls_strangers",
        "Callees have meshes.",
        "if symbols[name] not in functions",
        "if False",
        "import_/infer-mesh-rewrite-using-analysis-errors-0",
    ),
    _import(
        "infer_mesh/rewrite_using_analysis.py:_rewrite_call",
        "A user gets a result on its mesh.",
        "by_mesh.get(user.result.type.mesh, results[i])",
        "results[i]",
        "import_/infer-mesh-rewrite-using-analysis-0",
    ),
)
_JOINED = (
    _merge(
        _UNITS + "MergeUserFragmentsIntoSchedulingUnits.allows",
        "Both are named.",
        "if not (producer.is_user and consumer.is_user):",
        "if False:",
        _MERGED,
    ),
    _merge(
        _UNITS + "MergeUserFragmentsIntoSchedulingUnits.allows",
        "Both are of one phase.",
        "\n            and producer.transpose_count == consumer.transpose_count",
        "",
        _MERGED,
    ),
    _merge(
        _UNITS + "MergeUserFragmentsIntoSchedulingUnits.allows",
        "Both are of one microbatch.",
        "\n            and _agree(producer.call_counter, consumer.call_counter)",
        "",
        _MERGED,
    ),
    _merge(
        _UNITS + "MergeUserFragmentsIntoSchedulingUnits.allows",
        "Both are of one stage.",
        "\n            and _agree(producer.stage, consumer.stage)",
        "",
        _MERGED,
    ),
    _merge(
        _UNITS + "_is_sibling",
        "Siblings are of one phase.",
        "\n        and phase == b.transpose_count",
        "",
        _SIBLINGS,
    ),
    _merge(
        _UNITS + "_is_sibling",
        "Siblings are of one microbatch.",
        "\n        and a.call_counter == b.call_counter",
        "",
        _SIBLINGS,
    ),
    _merge(
        _UNITS + "_is_sibling",
        "Siblings are of one stage.",
        "\n        and a.stage == b.stage",
        "",
        _SIBLINGS,
    ),
    _calls(
        "bodies.py:_not_inlinable",
        "The callee has a body.",
        "if name not in symbols or symbols[name].is_external:",
        "if name not in symbols:",
        "calls/call-inline-errors-0",
    ),
    _calls(
        "bodies.py:_not_inlinable",
        "The callee calls nothing itself.",
        "if name in calling:",
        "if False:",
        "calls/call-inline-errors-0",
    ),
    _calls(
        "bodies.py:Inline.rewrite",
        "The callee does not call itself, by others or not.",
        "ready not in reached_from([ready], called) and ",
        "",
        "calls/inline-0",
    ),
    _calls(
        "bodies.py:Inline.rewrite",
        "The callee has a body, of one block.",
        " and len(blocks) == 1",
        "",
        "calls/inline-0",
    ),
    _split(
        "split.py:_values_from",
        "Values that are computed from a transferred one wait for it, too.",
        "if _reads(op, reached):",
        "if False:",
        "split/split-and-prioritize-transfer-independent-computations-0",
    ),
    _split(
        "split.py:SplitAndPrioritizeTransferIndependentComputations.rewrite_function",
        "Results of the first half are not computed from transferred values.",
        "if value not in waiting",
        "if True",
        "split/split-and-prioritize-transfer-independent-computations-0",
    ),
    _split(
        "split.py:SplitBwdFragments.rewrite_function",
        "Only backward work is split.",
        "not fragment.is_backward or ",
        "",
        "split/split-bwd-fragments-0",
    ),
    _split(
        "split.py:SplitBwdFragments.rewrite_function",
        "Something is waited for, and results are left for the second half.",
        "if not 0 < len(sent) < len(fragment.results):",
        "if len(sent) == len(fragment.results):",
        "split/split-bwd-fragments-0",
    ),
)
_ORDERED = (
    _schedule(
        "reorder.py:OrderByTasks.rewrite_function",
        "The topology has the meshes of the order.",
        "if mesh not in topology:",
        "if False:",
        "schedule/order-by-tasks-errors-2",
    ),
    _schedule(
        "reorder.py:OrderByTasks.rewrite_function",
        "The order does not contradict the data flow.",
        "if cycle:",
        "if False:",
        "schedule/order-by-tasks-errors-0",
    ),
    _schedule(
        "combine_tasks.py:_cycle",
        "Neither of two tasks that become one program needs the other, through other meshes either.",
        "needs[of] |= needs[second]",
        "pass",
        "schedule/combine-tasks-0",
    ),
    _schedule(
        "combine_tasks.py:_cycle",
        "Nor does the order of another mesh make one wait for the other.",
        "Dependencies(f, _in_order(_groups(f, pairs)))",
        "Dependencies(f)",
        "schedule/combine-tasks-0",
    ),
    _schedule(
        "pipeline_scheduler.py:_forward_only_problems",
        "A schedule of forward passes has no backward work.",
        "if unit.is_backward:",
        "if False:",
        "schedule/pipeline-scheduler-errors-0",
    ),
    _schedule(
        "pipeline_scheduler.py:_forward_only_problems",
        "It has one unit for each mesh and microbatch.",
        "elif unit.counter in seen:",
        "elif False:",
        "schedule/pipeline-scheduler-errors-0",
    ),
    _schedule(
        "reorder.py:_fragments_by_info",
        "A rule names one fragment alone.",
        "if info in known:",
        "if False:",
        "schedule/rule-based-schedule-errors-0",
    ),
)
_SHARDED = (
    _shardings(
        "sdy_ops.py:_check",
        "A transfer does not change a sharding.",
        "if not shardings.is_same(source, target):",
        "if False:",
        "propagation/convert-sdy-shardings-to-mpmd-types-0",
    ),
    _shardings(
        "sdy_ops.py:EnforceUserShardings.rewrite_function",
        "A fragment reads an argument as the user shards it.",
        "inputs |= {i: of_argument[v] for i, v in enumerate(op.inputs) if v in of_argument}",
        "pass",
        "propagation/enforce-user-shardings-0",
    ),
    _shardings(
        "extract_reshards_from_inter_mesh_transfers.py:"
        "ExtractReshardsFromInterMeshTransfers.rewrite_function",
        "The meshes are equal: shards of one are shards of the other.",
        "if len({_shape_of(mesh) for mesh in topology.values()}) > 1:",
        "if False:",
        _RESHARDS,
    ),
    _shardings(
        "extract_reshards_from_inter_mesh_transfers.py:"
        "ExtractReshardsFromInterMeshTransfers.rewrite_function",
        "One end is on a device.",
        "if from_host and to_host:",
        "if False:",
        _RESHARDS,
    ),
    _shardings(
        "extract_reshards_from_inter_mesh_transfers.py:_reshard_before",
        "Other readers of the value follow when its sharding changes.",
        "_read_as(f, user, value, new)",
        "pass",
        _RESHARDS,
    ),
    _shardings(
        "extract_reshards_from_inter_mesh_transfers.py:_reshard_after",
        "Readers of the value follow when its sharding stays.",
        "_read_as(f, user, value, old)",
        "pass",
        _RESHARDS,
    ),
    _shardings(
        "prepare_shardings.py:ForgetEmptyComputations.rewrite_function",
        "The fragment computes nothing, and has no effect.",
        "not ir.ops(fragment.body)",
        "all(ir.producer(value) is None for value in fragment.returned)",
        "propagation/forget-empty-computations-0",
    ),
    _shardings(
        "prepare_shardings.py:_forget",
        "The sharding shards nothing, and the value is not a term of a sum.",
        "same = shardings.is_same(kind.sharding, None)",
        "same = True",
        "propagation/forget-empty-shardings-0",
    ),
    _shardings(
        "sdy_ops.py:PopulateUnreducedOutSharding.rewrite_function",
        "The returned value is a term of a sum.",
        " and constraint.unreduced_axes",
        "",
        "propagation/populate-unreduced-out-sharding-0",
    ),
    _shardings(
        "sdy_ops.py:PopulateUnreducedOutSharding.rewrite_function",
        "The shardings of the other results stay.",
        'shardings.read(fragment, "out_shardings") or ',
        "",
        "propagation/populate-unreduced-out-sharding-0",
    ),
)
_MARKED = (
    _export(
        "mark_input_output_with_layouts.py:_choose",
        "The layout of an argument is open only if one fragment reads it.",
        "len(_inner_users(arg)) > 1",
        "False",
        _LAYOUTS,
    ),
    _export(
        "mark_input_output_with_layouts.py:_choose",
        "The layout of a result is open only if no fragment reads it.",
        "if layout == AUTO and inner:",
        "if False:",
        _LAYOUTS,
    ),
    _export(
        "mark_input_output_with_layouts.py:_returned_layout",
        "A value that is returned twice has one layout.",
        "if layout not in (AUTO, other):",
        "if False:",
        _LAYOUTS,
    ),
    _export(
        "mark_input_output_with_layouts.py:_returned_layout",
        "An argument that is returned has one layout.",
        "if own not in (AUTO, layout):",
        "if False:",
        _LAYOUTS,
    ),
    _export(
        "mark_input_output_with_layouts.py:_for_transfers",
        "A value for a host has the default layout.",
        'if not any(isinstance(u, ir.Transfer) and u.result.type.mesh.endswith("/cpu") for u in users):',
        "if True:",
        _LAYOUTS,
    ),
    _export(
        "donation.py:MemoryTrace._origin",
        "A reshape leads to where its operand is only if the order of elements is the same.",
        "op.operands[0] if _only_adds_or_drops_ones(op) else None",
        "op.operands[0]",
        _OFFLOADED,
    ),
    _export(
        "donation.py:_check",
        "All users of an argument want it in one memory.",
        "others = [kind for kind in kinds if not _agree(kinds[0], kind)]",
        "others = []",
        _OFFLOADED,
    ),
    _export(
        "donation.py:_check",
        "A result is where the function says.",
        "if not _agree(of_result.get(MEMORY_KIND), kind_of_maker):",
        "if False:",
        _OFFLOADED,
    ),
    _export(
        "offload.py:OffloadResiduals.rewrite_function",
        "Nothing is computed on the host, perhaps from the value.",
        " or mentions(module, COMPUTE_TYPE)",
        "",
        _RESIDUALS,
    ),
    _export(
        "offload.py:OffloadResiduals.rewrite_function",
        "Something runs while the value is on the host.",
        "> place[fragment] + 2",
        "> place[fragment]",
        _RESIDUALS,
    ),
    _export(
        "offload.py:_all_read_it",
        "Only fragments of the mesh read the value.",
        "all(isinstance(user, ir.Fragment) and user.mesh == mesh for user in users)",
        "True",
        _RESIDUALS,
    ),
    _export(
        "moved_ops.py:_thread_returned_tokens",
        "A token that is returned comes from an argument.",
        "if not tokens:",
        "if False:",
        "export/sink-create-token-into-fragments-0",
    ),
)

ROWS = (*_IMPORTED, *_JOINED, *_ORDERED, *_SHARDED, *_MARKED)

_REPORTS = "it reports, and changes nothing"
_PASSES = "mpmd/passes/"
ALWAYS = {
    _PASSES + "import_/meshes.py:CopyTopologyFromMain": (
        "callees get the meshes of their caller; no op changes"
    ),
    _PASSES + "import_/named.py:InsertNamelessCloneOfNegligibleOps": (
        "a copy has the value of the op; `is_negligible` of `structure.py` has the condition, and a row"
    ),
    _PASSES + "import_/named.py:ValidateNamedOpsInMpmdFunc": _REPORTS,
    _PASSES
    + "import_/infer_mesh/populate.py:InferMeshPopulateSrcSet": "it writes what it found into attributes",
    _PASSES
    + "import_/infer_mesh/populate.py:InferMeshPopulateUseSet": "it writes what it found into attributes",
    _PASSES + "import_/infer_mesh/mesh_checks.py:InferMeshValidateNoAdditionalTransfersNeeded": _REPORTS,
    _PASSES + "import_/infer_mesh/mesh_checks.py:InferMeshValidateSrcSetNotEmpty": _REPORTS,
    _PASSES + "calls/unroll.py:FromUnrollToCallCounter": "an attribute of calls has another name",
    _PASSES + "propagation/prepare_shardings.py:DropSubAxes": (
        "a sharding says where elements are, not which: the producer and all readers lose the same axes"
    ),
    _PASSES + "propagation/sdy_ops.py:ReshardsToConstraints": "both give the value of their operand",
    _PASSES + "propagation/prepare_shardings.py:SimplifyProgram": "`cleanup/fragments.py` checks each value",
    _PASSES + "export/donation.py:MarkFragmentReservedMemory": "it writes a number of bytes at fragments",
    _PASSES + "export/export_checks.py:ValidateNoBackwardDeps": _REPORTS,
    _PASSES + "export/export_checks.py:ValidateNoInferredFragments": _REPORTS,
    _PASSES + "export/export_checks.py:ValidateNoParamTransfers": _REPORTS,
    _PASSES + "export/export_checks.py:ValidateNoReshards": _REPORTS,
    _PASSES + "schedule_checks.py:SchedulingUnitsVerifier": _REPORTS,
    _PASSES + "schedule_checks.py:VerifyStageMerging": _REPORTS,
}
