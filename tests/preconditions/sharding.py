"""Partial values, weights that are gathered once, and sums that are taken once."""

from __future__ import annotations

from tests.preconditions import Precondition

_UNIT = "tests/unit/sharding/test_"
_TEXT = "tests/text/test_text.py::test_file"
_ROUNDED = "within rounding: terms of microbatches are added first, then of devices"


def _partial(name: str, holds: str, code: str, dropped: str, test: str) -> Precondition:
    file = "partial_loops" if name == "_of_loop" else "partial"
    return Precondition(
        f"mpmd/sharding/partial.py:{name}", holds, code, dropped, f"{_UNIT}{file}.py::test_{test}", _ROUNDED
    )


def _whole(name: str, holds: str, code: str, dropped: str, test: str) -> Precondition:
    """A wrong answer costs an exchange and is right, too."""
    return Precondition(
        f"mpmd/sharding/gathers.py:{name}", holds, code, dropped, f"{_UNIT}gathers.py::test_{test}"
    )


def _shown(place: str, holds: str, code: str, dropped: str, file: str) -> Precondition:
    return Precondition(f"mpmd/passes/{place}", holds, code, dropped, f"{_TEXT}[{file}-0]", _ROUNDED)


_TERMS = (
    _partial(
        "PartialForms.of",
        "the elements are floats",
        " and _is_float(value.type)",
        "",
        "integers_have_no_terms",
    ),
    _partial(
        "is_zero",
        "every element is zero",
        "float(text) == 0",
        "True",
        "a_reduction_without_terms[another start]",
    ),
    _partial(
        "is_sum",
        "the region has an addition",
        'inner[0].operation.name != "stablehlo.add"',
        "False",
        "a_reduction_without_terms[no sum]",
    ),
    _partial(
        "is_sum",
        "and nothing else",
        "len(inner) != 2 or ",
        "",
        "a_reducer_that_does_not_add_both",
    ),
    _partial(
        "is_sum",
        "of both arguments",
        "set(inner[0].operands) == set(args)",
        "True",
        "a_reducer_that_does_not_add_both",
    ),
    _partial(
        "is_sum",
        "which it returns",
        "list(inner[1].operands) == [inner[0].results[0]]",
        "True",
        "a_reducer_that_does_not_add_both",
    ),
    _partial(
        "_known_axes",
        "each axis has terms once",
        "len(set(axes)) == len(axes) and ",
        "",
        "an_axis_of_two_contracted_dims",
    ),
    _partial(
        "_known_axes",
        "whole axes of the mesh split the dims",
        "all(axis in forms.sizes for axis in axes)",
        "True",
        "a_reduction_without_terms[a part of an axis]",
    ),
    _partial(
        "_known_axes",
        "there are several devices along them",
        " and forms.count(axes) > 1",
        "",
        "a_product_without_terms[one device]",
    ),
    _partial(
        "_dot_general",
        "both operands are split along the same axes",
        "any(a and b and a != b for a, b in zip(of_lhs, of_rhs))",
        "False",
        "a_product_without_terms[different axes]",
    ),
    _partial(
        "_dot_general",
        "devices have blocks of one size",
        " or not _divides(lhs, lhs_counts)",
        "",
        "dims_that_their_axes_do_not_divide",
    ),
    _partial("_reduce", "the reduction adds", "not is_sum(op) or ", "", "a_reduction_without_terms[no sum]"),
    _partial(
        "_reduce",
        "it starts with zero, which every device adds",
        " or not is_zero(op.operands[1])",
        "",
        "a_reduction_without_terms[another start]",
    ),
    _partial(
        "_reduce",
        "dims of a value with terms are whole",
        "inner is not None and not axes",
        "inner is not None",
        "a_sum_over_a_dim_that_is_split_has_terms_of_its_own",
    ),
    _partial(
        "_reduce",
        "devices have blocks of one size",
        "not _divides(value, counts)",
        "False",
        "dims_that_their_axes_do_not_divide",
    ),
    _partial("_scatter", "updates are added", "not is_sum(op) or ", "", "a_scatter_without_terms[no sum]"),
    _partial(
        "_scatter",
        "to zeros, which every device begins with",
        " or not is_zero(op.operands[0])",
        "",
        "a_scatter_without_terms[into an argument]",
    ),
    _partial(
        "_scatter",
        "one dim of updates is split",
        "len(split) != 1",
        "len(split) == 0",
        "a_scatter_with_two_split_dims_has_no_terms",
    ),
    _partial(
        "_scatter",
        "devices have as many updates",
        "not _divides(updates, {u: count})",
        "False",
        "a_scatter_without_terms[uneven]",
    ),
)
_PASSED = (
    _partial(
        "_add",
        "both values have terms along the same axes",
        "any(x.axes != axes and axes_without(x.axes, forms.per_microbatch) != axes for x in (a, b))",
        "False",
        "terms_along_different_axes_are_not_added",
    ),
    _partial(
        "_scaled",
        "the other factor is not a sum of terms",
        "of_operands[1 - at] is not None or ",
        "",
        "two_values_with_terms_are_not_multiplied",
    ),
    _partial(
        "_scaled",
        "the other factor is whole along the axes, which devices would gather",
        " or forms.mentions(other, inner.axes)",
        "",
        "a_factor_that_is_split_along_the_axis",
    ),
    _partial(
        "_scaled",
        "a quotient has terms above",
        'op.operation.name == "stablehlo.divide" and at == 1',
        "False",
        "what_is_not_linear_needs_the_value[inverse]",
    ),
    _partial(
        "_moved",
        "padding is zero",
        'op.operation.name == "stablehlo.pad" and not is_zero(op.operands[1])',
        "False",
        "what_is_not_linear_needs_the_value[other padding]",
    ),
    _partial(
        "_concatenate",
        "every part has terms",
        "any(form is None for form in terms) or ",
        "",
        "what_is_not_linear_needs_the_value[beside a constant]",
    ),
    _partial(
        "_concatenate",
        "along the same axes",
        "len({form.axes for form in terms if form is not None}) != 1",
        "False",
        "terms_along_different_axes_are_not_added",
    ),
    _partial(
        "_of_loop",
        "the loop begins with zeros",
        "not is_zero(op.operands[number]) or ",
        "",
        "a_loop_without_terms",
    ),
    _partial(
        "_of_loop",
        "its condition does not read the total",
        " or not ir.is_unused(condition.arguments[number])",
        "",
        "a_loop_without_terms",
    ),
    _partial(
        "_of_loop",
        "its body only adds to the total",
        "len(ir.uses(total)) != 1 or ",
        "",
        "a_loop_without_terms",
    ),
    _partial(
        "_of_loop",
        "and does not read the new one",
        " or len(ir.uses(step.results[0])) != 1",
        "",
        "a_loop_without_terms",
    ),
)
_GATHERS = (
    _whole(
        "axes_needed_whole",
        "rows are split along the axis",
        "axis in axes and ",
        "",
        "a_factor_of_a_product[another axis]",
    ),
    _whole(
        "_UsesAlong.use_needs",
        "the axis splits something else of the operation",
        " or not (self.is_split(operands[1 - position]) or self.is_split(op.results[0]))",
        "",
        "a_factor_of_a_product[nothing else is split]",
    ),
    _whole(
        "_UsesAlong.use_needs",
        "in another dim than the weight's",
        "not self.is_matched(op, position, dim)",
        "True",
        "a_factor_of_a_product[contracted with a dim split alike]",
    ),
    _whole(
        "_UsesAlong.makes_whole",
        "a constraint leaves no further axis open",
        "bool(of_dim.is_closed) and ",
        "",
        "a_constraint_that_makes_a_weight_whole_is_a_use[undecided]",
    ),
    _whole(
        "_UsesAlong.makes_whole",
        "a constraint does not split along the axis",
        " and self.axis not in names",
        "",
        "a_constraint_that_makes_a_weight_whole_is_a_use[as it is]",
    ),
    _whole(
        "_UsesAlong.use_needs", "elementwise work, too", "self.axis not in of_result[kept]", "True", "a_bias"
    ),
    _whole(
        "_UsesAlong.use_needs",
        "what keeps a value for later does not decide",
        "if name in _KEEPS:",
        "if False:",
        "residuals_do_not_decide",
    ),
    _whole(
        "_UsesAlong.loop_needs",
        "a loop does not change the value",
        "last.operands[position] != body.arguments[position]",
        "False",
        "a_stack_that_a_loop_changes",
    ),
    _whole(
        "_all_of",
        "no use reads the value as it is split",
        "False if False in distinct else ",
        "",
        "one_use_of_what_lies_split_keeps_it_so",
    ),
    _whole(
        "dim_after",
        "a slice has the whole dim",
        " and shape[dim] == after[dim]",
        "",
        "one_use_of_what_lies_split_keeps_it_so",
    ),
)


def _cast(name: str, holds: str, code: str, dropped: str, test: str) -> Precondition:
    return Precondition(
        f"mpmd/sharding/gathers.py:{name}", holds, code, dropped, f"{_UNIT}casts.py::test_{test}"
    )


_CASTS = (
    _cast(
        "cast_of",
        "all conversions are to one type",
        "len({kind.element_type for kind in kinds}) != 1",
        "not kinds",
        "a_body_that_reads_the_argument_itself[two types]",
    ),
    _cast(
        "cast_of",
        "which is smaller",
        " if smaller else None",
        "",
        "a_body_that_reads_the_argument_itself[a larger type]",
    ),
    _cast(
        "cast_of",
        "nothing else reads the argument",
        "return None\n            moved +=",
        "continue\n            moved +=",
        "a_body_that_reads_the_argument_itself[a norm]",
    ),
    _cast(
        "_moved",
        "a loop does not change the value",
        "if kept else None\n    if name",
        "if inside else None\n    if name",
        "a_body_that_reads_the_argument_itself[changed by a loop]",
    ),
    Precondition(
        "mpmd/passes/propagation/hoist_gathers.py:_common",
        "all fragments of the mesh that need the weight whole cast it alike",
        "len(types) == 1",
        "len(types) > 0",
        f"{_TEXT}[propagation/hoist-gathers-0]",
    ),
)
_DEFER, _LOWER = "propagation/defer_reductions.py", "export/exchange_programs.py"
_BY_AXIS = "propagation/defer-reductions-by-axis"
_DEFERRED, _LOWERED = "propagation/defer-reductions", "export/lower-reductions"
_PASSES = (
    _shown(
        "propagation/trial.py:kinds_of_work",
        "an operand of one microbatch alone may differ between fragments of a kind",
        " and len(microbatches[value]) > 1",
        "",
        _DEFERRED,
    ),
    Precondition(
        "mpmd/passes/propagation/trial.py:kinds_of_work",
        "a value that several microbatches read is not a row of the batch, wherever it is computed",
        "_is_from_outside(value)",
        "ir.producer(value) is None",
        "tests/unit/passes/propagation/test_trial.py::test_weights_of_equal_stages_are_no_rows",
    ),
    _shown(
        "propagation/hoist_gathers.py:_needed",
        "all uses need the weight whole",
        "if axes:",
        "if True:",
        "propagation/hoist-gathers",
    ),
    _shown(
        "export/exchange_programs.py:LowerGathers.rewrite_function",
        "the fragment only gathers",
        "if fragment.inferred_by == [GATHERING]:",
        "if True:",
        "export/lower-gathers",
    ),
    _shown(
        "export/exchange_programs.py:_lower",
        "each gathered axis splits its dim within those that stay",
        "set(inner) == gathered and ",
        "",
        "export/lower-gathers",
    ),
    _shown(
        f"{_DEFER}:_links",
        "the value is returned, once, and not read",
        " or len(ir.users(value)) > 1",
        "",
        _DEFERRED,
    ),
    _shown(
        f"{_DEFER}:_is_used_for",
        "an operand in partial form is only added to",
        "len(users) != 1 or ",
        "",
        f"{_DEFERRED}-terms",
    ),
    _shown(
        f"{_DEFER}:_totals",
        "nothing else reads a total between two microbatches",
        " and uses[value] == 1",
        "",
        _DEFERRED,
    ),
    _shown(
        f"{_DEFER}:_Total.is_worth",
        "a sum that each microbatch needs does not become a fragment of its own",
        " and not any(map(_is_of_microbatch, ir.users(self.end)))",
        "",
        f"{_DEFERRED}-terms",
    ),
    _shown(
        f"{_DEFER}:_Deferring._begin",
        "the start that is replaced is zero",
        " or not is_zero(maker.returned[position])",
        "",
        _DEFERRED,
    ),
    _shown(
        f"{_DEFER}:_Deferring._begin",
        "and nothing else reads it",
        "self.uses[start] == 1",
        "True",
        _DEFERRED,
    ),
    _shown(
        f"{_LOWER}:LowerReductions.rewrite_function",
        "the fragment has the sums of deferred reductions",
        "fragment.inferred_by == [REDUCTION]",
        "True",
        _LOWERED,
    ),
    _shown(
        f"{_LOWER}:_lower_at_end",
        "but for the axes of the terms the value is split as they are",
        " and tuple(rest) == without(split_of(kind.sharding, len(kind.shape)), axes)",
        "",
        _LOWERED,
    ),
    _shown(
        f"{_LOWER}:_lower_in_microbatches",
        "all values of a shared body are split in one way",
        "if len(alike) == 1:",
        "if True:",
        _LOWERED,
    ),
    _shown(
        f"{_LOWER}:_lower_in_microbatch",
        "but for the axes of the terms the total is split as they are",
        " and split[count:] == without(of_total[1:], axes)",
        "",
        _LOWERED,
    ),
    _shown(
        f"{_DEFER}:_deferred",
        "what microbatches would add can be split along their axes",
        "all(size % parts for size in value.shape)",
        "False",
        _BY_AXIS,
    ),
    _shown(
        "export/exchange_programs.py:IssueReductions.rewrite_function",
        "a reduction is behind all that it reads",
        "last_maker < place[other] < place[fragment]",
        "place[other] < place[fragment]",
        "export/issue-reductions",
    ),
)

ROWS = (*_TERMS, *_PASSED, *_GATHERS, *_CASTS, *_PASSES)

ALWAYS = {
    "mpmd/sharding/partial.py:_elementwise": "a change of sign and of type is linear",
    "mpmd/sharding/inside.py:_program_of": "the copy of a body is read and dropped",
    "mpmd/passes/propagation/trial.py:layouts": ("the copy of a module is read and dropped"),
    "mpmd/passes/propagation/validate_no_repeated_collectives.py:ValidateNoRepeatedCollectives": (
        "the copy of a module is read and dropped"
    ),
}
