"""Passes over fragments: effects, import, calls and merges."""

from __future__ import annotations

from tests.preconditions import Precondition

_EFFECTS = "mpmd/ir/effects.py:"
_OP = "tests/unit/ir/test_effects.py::test_what_may_be_done_to_an_op"
_USED = (
    "tests/unit/ir/test_effects.py"
    "::test_a_used_op_is_not_dead_and_a_constraint_only_where_nothing_else_uses_its_operand"
)
_TEXT = "tests/text/test_text.py::test_file"
_PASSES = "mpmd/passes/"
_INFER = "mpmd/passes/import_/infer_mesh/"
_CALLS = "mpmd/passes/calls/"
_MERGE = "mpmd/passes/merge/"
_SUMS = "within rounding: sums have the same terms, added in another order, as XLA may too"

ROWS: tuple[Precondition, ...] = (
    Precondition(
        _EFFECTS + "_computes_only",
        "A custom call without side effects says so.",
        "effect is None or not ir.BoolAttr(effect).value",
        "True",
        f"{_OP}[calls back]",
    ),
    Precondition(
        _EFFECTS + "_computes_only",
        "What draws without a key, sends or receives is not free of side effects.",
        "operation.name not in _ONCE and ",
        "",
        f"{_OP}[draws without a key]",
    ),
    Precondition(
        _EFFECTS + "_computes_only",
        "Annotations and collectives are not dropped.",
        "operation.name not in _KEPT and ",
        "",
        f"{_OP}[groups shardings]",
    ),
    Precondition(
        _EFFECTS + "_computes_only",
        "MLIR knows the op.",
        " and _is_known(operation.name)",
        "",
        f"{_OP}[is not known]",
    ),
    Precondition(
        _EFFECTS + "_holds",
        "What holds for an op holds for all ops in its regions.",
        " and all(_holds(inner, allowed, *marks) for inner in _inside(operation))",
        "",
        f"{_OP}[in a branch]",
    ),
    Precondition(
        _EFFECTS + "_is_kept",
        "Of custom calls with side effects only annotations may be done twice.",
        " in _ANNOTATIONS",
        ' != ""',
        f"{_OP}[calls back]",
    ),
    Precondition(
        _EFFECTS + "is_trivially_dead",
        "A dead op is unused.",
        "not is_unused(op) or ",
        "",
        _USED,
    ),
    Precondition(
        _EFFECTS + "is_trivially_dead",
        "A sharding constraint is dead only if nothing else uses its operand.",
        'op.operation.name != "sdy.sharding_constraint" or all(u == op for u in users(op.operands[0]))',
        "True",
        _USED,
    ),
    Precondition(
        _EFFECTS + "is_movable",
        "What passes a token keeps its place among the ops that pass it.",
        " and not is_ordered(op)",
        "",
        f"{_OP}[creates a token]",
    ),
    Precondition(
        _INFER + "absorb.py:Absorber._may_clone",
        "An op that several fragments read is cloned into each only if it may be done twice.",
        " and ir.is_duplicable(op)",
        "",
        f"{_TEXT}[import_/infer-mesh-rewrite-using-analysis-0]",
    ),
    Precondition(
        _INFER + "absorb.py:Absorber._meshes",
        "An op that several meshes read is done on each only if it may be done twice.",
        "if len(meshes) < 2 or ir.is_duplicable(op):",
        "if True:",
        "tests/differential/test_effects.py::test_a_value_from_outside_that_two_meshes_read_is_one_value",
    ),
    Precondition(
        _INFER + "absorb.py:Absorber._wrap",
        "If an op is done on one mesh, users on all meshes read that result.",
        "functools.partial(_is_on, mesh) if len(meshes) > 1 else _is_any",
        "functools.partial(_is_on, mesh)",
        f"{_TEXT}[import_/infer-mesh-rewrite-using-analysis-0]",
    ),
    Precondition(
        _INFER + "assign.py:_Leaves._wrap_resultless",
        "Of ops without results, those are done on every mesh that may be done twice.",
        " or not ir.is_duplicable(op)",
        "",
        f"{_TEXT}[import_/infer-mesh-assign-mesh-func-leaves-0]",
    ),
    Precondition(
        _INFER + "absorb.py:RoundGroups._free_ops",
        "An op moves into the group of a mesh and round only if it may be done there and then.",
        "ir.is_movable(op) and ",
        "",
        f"{_TEXT}[import_/infer-mesh-rewrite-using-analysis-by-round-0]",
    ),
    Precondition(
        _INFER + "absorb.py:RoundGroups._free_ops",
        "No named fragment reads the op: it would then be absorbed there.",
        " and all(j in free or self._reads_plain(j) for j in readers)",
        "",
        f"{_TEXT}[import_/infer-mesh-rewrite-using-analysis-by-round-0]",
    ),
    Precondition(
        _PASSES + "structure.py:is_negligible",
        "A negligible op may be done twice.",
        " and ir.is_duplicable(op)",
        "",
        "tests/property/test_directed_effects.py"
        "::test_effects_and_values[mpmd-insert-nameless-clone-of-negligible-ops]",
    ),
    Precondition(
        _PASSES + "import_/assigning.py:_push_unassigns_in",
        "All calls give the argument a value of one mesh and memory.",
        " or len({s.tensor.type for s in sources}) > 1",
        "",
        f"{_TEXT}[import_/introduce-transfers-0]",
    ),
    Precondition(
        _PASSES + "import_/assigning.py:_is_sum_of_unassigns",
        "A partial sum that is done elsewhere has no other use.",
        " or len(ir.users(add.results[0])) != 1",
        "",
        f"{_TEXT}[import_/introduce-transfers-0]",
    ),
    Precondition(
        _PASSES + "import_/fold_constant_branches.py:_branch",
        "An index out of range takes the last branch.",
        "index if 0 <= index < count else count - 1",
        "min(max(index, 0), count - 1)",
        f"{_TEXT}[import_/fold-constant-branches-0]",
    ),
    Precondition(
        _PASSES + "constant_evaluation.py:_convert",
        "Floating point is not converted to integers: rounding and range are the platform's.",
        'x.dtype.kind == "f" and np.dtype(dtype).kind != "f"',
        "False",
        "tests/unit/passes/test_constant_evaluation.py::test_what_depends_on_arguments_or_on_rounding_is_unknown",
    ),
    Precondition(
        _PASSES + "constant_evaluation.py:_whole",
        "Arithmetic is evaluated for integers and booleans only.",
        'any(array.dtype.kind == "f" for array in arrays)',
        "False",
        "tests/unit/passes/test_constant_evaluation.py::test_what_depends_on_arguments_or_on_rounding_is_unknown",
    ),
    Precondition(
        _CALLS + "carried_sums.py:_accumulators",
        "The argument is read by its sum alone, and is one term of it.",
        " and len(ir.users(v)) == 1",
        "",
        f"{_TEXT}[calls/split-accumulators-by-mesh-0]",
        _SUMS,
    ),
    Precondition(
        _CALLS + "carried_sums.py:_split_calls",
        "Parts go on with their own accumulator alone.",
        "if arg == acc.arg else",
        "if parts else",
        f"{_TEXT}[calls/split-accumulators-by-mesh-0]",
    ),
    Precondition(
        _CALLS + "carried_sums.py:_use_sum_elsewhere",
        "Another accumulator takes the whole sum.",
        " and number == arg",
        "",
        f"{_TEXT}[calls/split-accumulators-by-mesh-0]",
    ),
    Precondition(
        _CALLS + "carried_sums.py:_carried_sums",
        "Nothing but the next microbatch reads a total of the second half, which lacks the first.",
        " and all(len(ir.uses(call.results[k])) == 1 for call in second[:-1])",
        "",
        f"{_TEXT}[calls/mirror-stages-0]",
        _SUMS,
    ),
    Precondition(
        _CALLS + "carried_sums.py:_carried_sums",
        "The callee reads the argument for its sum alone.",
        " and len(ir.users(leaf)) == 1",
        "",
        f"{_TEXT}[calls/mirror-stages-0]",
    ),
    Precondition(
        _CALLS + "carried_sums.py:_call_behind",
        "A term has no other use.",
        " and len(ir.users(value)) == 1",
        "",
        f"{_TEXT}[calls/carry-sums-through-calls-0]",
        "within rounding: -0 becomes 0 where the sum began with a term",
    ),
    Precondition(
        _CALLS + "carried_sums.py:_is_possible",
        "Every call of the callee is a term of the sum.",
        " or not terms.issuperset(calls[name])",
        "",
        f"{_TEXT}[calls/carry-sums-through-calls-0]",
    ),
    Precondition(
        _CALLS + "carried_sums.py:_is_possible",
        "The sum's initial value is defined before the first call.",
        "maker is None or ir.comes_before(maker, candidate.calls[0])",
        "True",
        f"{_TEXT}[calls/carry-sums-through-calls-0]",
    ),
    Precondition(
        _CALLS + "signatures.py:_erase_unused",
        "A callee that is not called any more has no side effects.",
        " and all(map(ir.is_side_effect_free, ir.ops(f)))",
        "",
        f"{_TEXT}[calls/erase-unused-callee-block-arguments-0]",
    ),
    Precondition(
        _CALLS + "signatures.py:_sink",
        "All calls are given one and the same op.",
        "if len(values) == 1 else None",
        "if values else None",
        f"{_TEXT}[calls/sink-negligible-ops-into-call-op-0]",
    ),
    Precondition(
        _CALLS + "bodies.py:_function",
        "A call of a shared body has the effects of the body.",
        "marks = ir.effect_marks(copy)",
        'marks = {"mpmd.pure": ir.UnitAttr.get()}',
        "tests/unit/passes/calls/test_shared_bodies.py::test_a_body_with_effects_is_not_pure",
    ),
    Precondition(
        _MERGE + "visit.py:MergePass.rewrite_function",
        "A fragment that is dropped has no side effects.",
        "ir.is_trivially_dead(fragment)",
        "ir.is_unused(fragment)",
        f"{_TEXT}[merge/merge-inferred-fragments-0]",
    ),
    Precondition(
        _MERGE + "visit.py:bring_together",
        "A consumer moves up only past what defines none of its operands.",
        "if all(m is None or m == producer or ir.comes_before(m, producer) for m in makers):",
        "if True:",
        f"{_TEXT}[merge/merge-inferred-fragments-0]",
    ),
    Precondition(
        _MERGE + "visit.py:bring_together",
        "A producer moves down only if nothing reads it before the consumer.",
        "not any(ir.comes_before(user, consumer) for user in block_users(producer))",
        "True",
        f"{_TEXT}[merge/merge-inferred-fragments-0]",
    ),
    Precondition(
        _MERGE + "merge_inferred.py:_is_cheap",
        "A fragment cloned for each consumer may be done twice.",
        " and ir.is_duplicable(fragment)",
        "",
        f"{_TEXT}[merge/merge-inferred-fragments-cloned-0]",
    ),
    Precondition(
        _MERGE + "merge_inferred.py:MergeInferredFragments.allows",
        "The halves of a split fragment stay apart.",
        "not (producer.split_keep_transferred and consumer.split_drop_transferred)",
        "True",
        f"{_TEXT}[merge/merge-inferred-fragments-0]",
    ),
    Precondition(
        _MERGE + "merge_named.py:_erase_dead_but_sources",
        "A fragment that is dropped has no side effects.",
        "ir.is_trivially_dead(op) and ",
        "ir.is_unused(op) and ",
        f"{_TEXT}[merge/rule-based-merge-0]",
    ),
    Precondition(
        _MERGE + "merge_inferred.py:inferred_producer",
        "Nothing reads the producer before the root.",
        "all(user == root or ir.comes_before(root, user) for user in block_users(producer))",
        "True",
        f"{_TEXT}[merge/absorb-inferred-fragments-0]",
    ),
    Precondition(
        _MERGE + "merge_inferred.py:inferred_consumer",
        "All other operands of the consumer are defined before the root.",
        "all(m is None or m == root or ir.comes_before(m, root) for m in makers)",
        "True",
        f"{_TEXT}[merge/absorb-inferred-fragments-0]",
    ),
    Precondition(
        _MERGE + "merge_named.py:MergeForwardWithBackward.candidate",
        "No other fragment of the mesh is between the two.",
        " and closest == next(following, None)",
        "",
        f"{_TEXT}[merge/merge-forward-with-backward-0]",
    ),
)

ALWAYS: dict[str, str] = {
    _CALLS + "signatures.py:drop_from_call": "the call is replaced by one with fewer operands and results",
    _PASSES + "fragments/splitting.py:outline": "the terminator is replaced",
    _PASSES + "fragments/editing.py:drop": "the fragment is replaced; the caller chooses what nothing uses",
    _PASSES + "fragments/editing.py:erase_dead_ops": "each op is asked about",
    _PASSES + "import_/named.py:SimplifyNamedComputations.rewrite_function": ("each op is asked about"),
    _PASSES + "import_/assigning.py:wrap": "one copy; the caller says for which users, and erases the op",
    _PASSES + "import_/assigning.py:remove_dead_ops": "each op is asked about",
    _PASSES + "import_/meshes.py:_exchange": "only meshes that nothing names any more",
    _PASSES + "import_/named.py:InlineNestedUserExposedOps.rewrite_function": (
        "the ops of a name take its place"
    ),
    _INFER + "assign.py:_convert": (
        "a sum that is part of another one goes if nothing else reads it; it has no effects"
    ),
    _INFER + "mesh_sets.py:LoopAssignment._rebuild": "the loop is replaced",
    _CALLS + "bodies.py:inline_call": "the call is replaced by one copy of the body, and is erased",
    _CALLS + "unroll.py:_unroll": "each iteration is one copy, and the loop is erased",
    _CALLS + "carried_sums.py:MirrorStages._copy": "each call calls one of the two copies",
    _CALLS + "bodies.py:_call_instead": "the fragment is replaced; constants alone are copied",
    _CALLS + "bodies.py:narrow_calls": "the call is replaced; ops that leave the body are dead",
    _PASSES
    + "import_/fold_constant_branches.py:_fold": "the conditional is replaced by the branch that is taken",
    _PASSES + "merge/merge_inferred.py:MergeInferredByRound.rewrite_function": (
        "a fragment reads earlier rounds alone, so that merged ones form no cycle"
    ),
    _PASSES + "fragments/editing.py:merge": "ops move, in their order; the caller has compared positions",
}
