"""Passes over fragments: cleaning up, recomputing, splitting, ordering, transfers, export, and schedules."""

from __future__ import annotations

from tests.preconditions import Precondition

_TEXT = "tests/text/test_text.py::test_file"
_PASSES = "mpmd/passes/"
_CLEANUP = "mpmd/passes/cleanup/"
_FRAGMENTS = "mpmd/passes/fragments/"
_EXPORT = "mpmd/passes/export/"
_TRANSFERS = "mpmd/passes/transfers/"
_SIMPLIFIED = f"{_TEXT}[cleanup/simplify-stablehlo-0]"
_DONATED = f"{_TEXT}[export/mark-aliasing-and-donation-0]"
_COMBINED = f"{_TEXT}[transfers/combine-before-transfer-0]"
_REMAT = f"{_TEXT}[schedule/remat-fragment-0]"
_DOTS = "within rounding: the backend chooses the order of the sums in any case"
_UNEVEN = (
    "tests/unit/scheduling/test_published_formulas.py"
    "::test_memory_is_as_published_where_the_stages_of_a_mesh_do_not_divide_into_equal_visits"
)

ROWS: tuple[Precondition, ...] = (
    Precondition(
        _PASSES + "schedule/remat_fragment.py:RematFragment.rewrite_function",
        "A forward fragment that is computed again may be done twice.",
        " and not ir.is_duplicable(forward)",
        " and False",
        _REMAT,
    ),
    Precondition(
        _PASSES + "schedule/remat_fragment.py:_belong_together",
        "Forward and backward are of one stage.",
        "\n        and forward.stage == backward.stage",
        "",
        _REMAT,
    ),
    Precondition(
        _PASSES + "schedule/remat_fragment.py:_belong_together",
        "Forward and backward are of one microbatch.",
        "\n        and forward.call_counter == backward.call_counter",
        "",
        _REMAT,
    ),
    Precondition(
        _FRAGMENTS + "splitting.py:split",
        "No token passes from one half to the other.",
        "if any(map(ir.is_token, residuals)):",
        "if False:",
        f"{_TEXT}[split/split-bwd-fragments-0]",
    ),
    Precondition(
        _FRAGMENTS + "splitting.py:split",
        "What has side effects and is not in the first half is in the second.",
        "op not in in_first and not ir.is_side_effect_free(op)",
        "False",
        "tests/property/test_directed_effects.py::test_effects_and_values[mpmd-split-bwd-fragments]",
    ),
    Precondition(
        _CLEANUP + "fragments.py:simplify",
        "A result that is an argument has its type: the same sharding and memory.",
        " and outside[value].type == result.type",
        "",
        f"{_TEXT}[propagation/simplify-program-0]",
    ),
    Precondition(
        _CLEANUP + "fragments.py:FragmentDedup.rewrite_function",
        "Equal results have one type: the same sharding and memory.",
        "first_result.setdefault((value, result.type), result)",
        "first_result.setdefault((value, None), result)",
        f"{_TEXT}[cleanup/fragment-dedup-0]",
    ),
    Precondition(
        _CLEANUP + "recompute.py:CopyConstants.rewrite_function",
        "Only a constant is done again in each reader.",
        "if ir.is_constant(constant):",
        "if constant is not None and not len(constant.operands):",
        "tests/property/test_directed_effects.py::test_effects_and_values[mpmd-copy-constants]",
    ),
    Precondition(
        _CLEANUP + "recompute.py:CopyCheapConstants._plan",
        "All that a value is computed from may be done again, and costs next to nothing.",
        "op is None or op.operation.name not in CHEAP or len(op.operation.regions)",
        "op is None",
        "tests/property/test_directed_effects.py::test_effects_and_values[mpmd-copy-cheap-constants]",
    ),
    Precondition(
        _CLEANUP + "recompute.py:_is_cheap",
        "Only data movement and arithmetic that is fused into its use is done again.",
        "op.operation.name in CHEAP and ",
        "",
        "tests/property/test_directed_effects.py::test_effects_and_values[mpmd-recompute-cheap-residuals]",
    ),
    Precondition(
        _CLEANUP + "recompute.py:RecomputeCheapResiduals._keep_source",
        "Nothing but the backward fragment reads the residual that its source takes the place of.",
        " or ir.users(value) != [fragment]",
        "",
        f"{_TEXT}[cleanup/recompute-cheap-residuals-0]",
    ),
    Precondition(
        _CLEANUP + "recompute.py:_function_of_one",
        "The source has the type of the residual, in whose place it is.",
        " if source.type == value.type else None",
        "",
        f"{_TEXT}[cleanup/recompute-cheap-residuals-0]",
    ),
    Precondition(
        _CLEANUP + "recompute.py:_is_of_rows",
        "Only products of rows, elementwise work and reductions are done again.",
        "return op.operation.name in _ROWS",
        "return True",
        "tests/property/test_directed_effects.py::test_effects_and_values[mpmd-recompute-attention]",
    ),
    Precondition(
        _CLEANUP + "simplify_stablehlo.py:_swaps",
        "Nothing but the transpose reads the product.",
        " or len(ir.users(dot)) > 1",
        "",
        f"{_TEXT}[cleanup/swap-transposed-dots-0]",
        _DOTS,
    ),
    Precondition(
        _CLEANUP + "simplify_stablehlo.py:_swaps",
        "The transpose exchanges the free dims of the factors, behind the batch dims.",
        'list(ir.DenseI64ArrayAttr(transpose.attributes["permutation"])) == wanted',
        "True",
        f"{_TEXT}[cleanup/swap-transposed-dots-0]",
        _DOTS,
    ),
    Precondition(
        _CLEANUP + "simplify_stablehlo.py:_rewrite",
        "An op with a sharding of its own stays.",
        'if "sdy.sharding" in op.attributes:',
        "if False:",
        _SIMPLIFIED,
    ),
    Precondition(
        _CLEANUP + "stablehlo_arithmetic.py:subtract_nothing",
        "Of floating point only +0 is nothing: -0 - -0 is 0.",
        "_number(text) == (0.0, 1.0)",
        "_number(text) is not None and _number(text)[0] == 0",
        _SIMPLIFIED,
    ),
    Precondition(
        _CLEANUP + "stablehlo_arithmetic.py:nothing_left",
        "Elements are integers: x - x may be NaN.",
        "if integer_kind(kind) is None:",
        "if False:",
        _SIMPLIFIED,
    ),
    Precondition(
        _CLEANUP + "stablehlo_arithmetic.py:broadcast",
        "A broadcast that is a reshape keeps the order of dims.",
        "dims == sorted(dims) and ",
        "",
        _SIMPLIFIED,
    ),
    Precondition(
        _CLEANUP + "stablehlo_slices.py:static_slice",
        "A start out of range is clamped.",
        "starts = clamped(starts, value.type.shape, sizes)",
        "pass",
        _SIMPLIFIED,
    ),
    Precondition(
        _CLEANUP + "stablehlo_slices.py:_unpadded",
        "Elements have no padding between them.",
        'any(numbers(source.attributes["interior_padding"]))',
        "False",
        _SIMPLIFIED,
    ),
    Precondition(
        _CLEANUP + "stablehlo_slices.py:_is_zero_padding",
        "The padding is zero.",
        " or facts.number(source.operands[1]) != 0",
        "",
        _SIMPLIFIED,
        "within rounding: as in XLA, x + 0 is x, and a zero keeps its sign",
    ),
    Precondition(
        _CLEANUP + "stablehlo_slices.py:_updated",
        "The range is in the update as a whole.",
        "if all(taken.starts[d] >= starts[d] and taken.last(d) < ends[d] for d in dims):",
        "if True:",
        _SIMPLIFIED,
    ),
    Precondition(
        _CLEANUP + "stablehlo_slices.py:_piece",
        "The range is in one operand of the concatenate.",
        " or taken.last(dim) >= offsets[index + 1]",
        "",
        "tests/property/test_simplify_stablehlo.py::test_same_values_and_no_larger",
    ),
    Precondition(
        _CLEANUP + "stablehlo_slices.py:concatenate_updates",
        "The updates cover the buffer.",
        " or covered != whole[dim]",
        "",
        _SIMPLIFIED,
    ),
    Precondition(
        _CLEANUP + "stablehlo_arithmetic.py:_is_defined",
        "Integers are divided by positive constants only.",
        "return number is not None and number > 0",
        "return True",
        f"{_TEXT}[cleanup/simplify-stablehlo-1]",
    ),
    Precondition(
        _TRANSFERS + "merge_transfers.py:CombineBeforeTransfer.rewrite_function",
        "A fragment that moves to another mesh may.",
        " and ir.is_movable(fragment)",
        "",
        _COMBINED,
    ),
    Precondition(
        _TRANSFERS + "merge_transfers.py:_better_mesh",
        "Nothing else reads the values that are sent.",
        "any(user != fragment for op in transfers for user in ir.users(op))",
        "False",
        _COMBINED,
    ),
    Precondition(
        _TRANSFERS + "merge_transfers.py:_better_mesh",
        "No operand and no result is in host memory.",
        "kind.on_host or ",
        "",
        _COMBINED,
    ),
    Precondition(
        _TRANSFERS + "merge_transfers.py:_better_mesh",
        "All operands come from one mesh.",
        "len(sources) != 1 or ",
        "",
        _COMBINED,
    ),
    Precondition(
        _TRANSFERS + "merge_transfers.py:is_eligible",
        "Joined values are in device memory.",
        " or kind.on_host",
        "",
        f"{_TEXT}[transfers/merge-transfers-0]",
    ),
    Precondition(
        _TRANSFERS + "merge_transfers.py:groups_of",
        "Joined values go to one kind of memory.",
        "(result.type.tensor, consumer, kind)",
        "(result.type.tensor, consumer, None)",
        f"{_TEXT}[transfers/merge-transfers-0]",
    ),
    Precondition(
        _TRANSFERS + "merge_transfers.py:value_that_comes_back",
        "The way does not lead through host memory.",
        "if value.type.on_host:",
        "if False:",
        f"{_TEXT}[transfers/remove-transfer-cycles-0]",
    ),
    Precondition(
        _TRANSFERS + "merge_transfers.py:value_that_comes_back",
        "The value has the type of the result: mesh, sharding and memory.",
        "if value.type == transfer.result.type:",
        "if value.type.mesh == transfer.result.type.mesh:",
        f"{_TEXT}[transfers/remove-transfer-cycles-0]",
    ),
    Precondition(
        _TRANSFERS + "carried.py:UniquifyCarriedValues.rewrite_function",
        "Unnamed work makes the start value, and something else reads it.",
        "if len(ir.users(first.inputs[position])) > 1:",
        "if True:",
        f"{_TEXT}[transfers/uniquify-carried-values-0]",
    ),
    Precondition(
        _EXPORT + "donation.py:_spent_operands",
        "No transfer reads the value: the copy could be under way.",
        "\n            and value not in transferred",
        "",
        _DONATED,
    ),
    Precondition(
        _EXPORT + "donation.py:_spent_operands",
        "An argument of the step is donated by the user.",
        "\n            and value not in kept",
        "",
        _DONATED,
    ),
    Precondition(
        _EXPORT + "donation.py:_spent_operands",
        "The value is not read later.",
        "last[value] == (place, i)",
        "last[value] >= (place, i)",
        _DONATED,
    ),
    Precondition(
        _EXPORT + "donation.py:_spent_operands",
        "The value is in device memory.",
        "not (says_host(dicts[i]) or in_host_memory(value.type))",
        "True",
        _DONATED,
    ),
    Precondition(
        _EXPORT + "donation.py:_Results._key",
        "Operand and result have one type and layout.",
        "value.type, attributes.get(LAYOUT)",
        "value.type.mesh, attributes.get(LAYOUT)",
        _DONATED,
    ),
    Precondition(
        _EXPORT + "donation.py:_donors_agree",
        "Fragments of one program donate what each of them may.",
        "spent[fragment] = sorted(common)",
        "pass",
        f"{_TEXT}[export/mark-aliasing-and-donation-keep-microbatches-equal-0]",
    ),
    Precondition(
        _EXPORT + "copy_scalar_results.py:CopyScalarResults._plan",
        "Values are integer scalars: processors round other numbers in different ways.",
        "not _is_integer_scalar(value.type) or ",
        "",
        f"{_TEXT}[export/copy-scalar-results-0]",
    ),
    Precondition(
        _EXPORT + "copy_scalar_results.py:CopyScalarResults._plan",
        "The ops are exact, and may be done again.",
        "op.operation.name not in _EXACT or ",
        "",
        "tests/property/test_directed_effects.py::test_effects_and_values[mpmd-copy-scalar-results]",
    ),
    Precondition(
        _EXPORT + "programs.py:programs",
        "Fragments that are one program are compiled with the same options.",
        ", options_of_fragment(fragment, rows)",
        "",
        f"{_TEXT}[export/lower-to-fragment-calls-0]",
    ),
    Precondition(
        _EXPORT + "programs.py:_lower_group",
        "A manual computation names the axes of the mesh of its fragment.",
        "shardings.point_to(ir.walk(computation), first.mesh)",
        "pass",
        f"{_TEXT}[export/lower-to-fragment-calls-0]",
    ),
    Precondition(
        _EXPORT + "moved_ops.py:DelayInferredFragments.rewrite_function",
        "A fragment moves no further than to its first user.",
        "in_block_order(ir.users(fragment))[0]",
        "in_block_order(ir.users(fragment))[-1]",
        f"{_TEXT}[export/delay-inferred-fragments-0]",
    ),
    Precondition(
        _EXPORT + "moved_ops.py:DelayTransfersFromCpu.rewrite_function",
        "A transfer moves no further than to its first user.",
        "in_block_order(ir.users(transfer))[0]",
        "in_block_order(ir.users(transfer))[-1]",
        "tests/property/test_directed_effects.py::test_effects_and_values[mpmd-delay-transfers-from-cpu]",
    ),
    Precondition(
        "mpmd/scheduling/workload.py:_sizes",
        "All stages of a chain count as its memory.",
        "len(chain.stages) for chain in chains",
        "1 for chain in chains",
        f"{_UNEVEN}[v_min-3]",
    ),
    Precondition(
        "mpmd/scheduling/workload.py:limits",
        "A mesh may hold a single microbatch.",
        "max(int(microbatches * count), count)",
        "int(microbatches * count) + 1",
        f"{_UNEVEN}[v_min-3]",
    ),
)

ALWAYS: dict[str, str] = {
    _FRAGMENTS + "residuals.py:recompute": "the caller has chosen ops that may be done again",
    _PASSES + "propagation/sdy_ops.py:_complex_constant": "a constant is replaced",
    _PASSES + "propagation/prepare_shardings.py:FitShardingsToMeshes": "only meshes that have no name",
    _PASSES + "propagation/propagate_shardings.py:PropagateShardings": (
        "a function is propagated as a copy, from which shardings alone are taken"
    ),
    _CLEANUP
    + "fragments.py:remove_dead_code": "unused results go; ops go as dead ops, which ask by themselves",
    _TRANSFERS + "merge_transfers.py:MoveTransfersToProducer.rewrite_function": (
        "a transfer has no effects, and its operand is defined right before it"
    ),
    _TRANSFERS + "carried.py:ForgetCarriedStarts.rewrite_function": ("a barrier gives its operands"),
    _TRANSFERS + "carried.py:_copy_by_transfers": "each copy is the value itself",
    _PASSES + "schedule/reorder.py:apply_edges": (
        "the order is one of data flow, tokens included; effects without a token have none"
    ),
}
