"""The rules of the algebraic simplifier."""

from __future__ import annotations

from tests.preconditions import Precondition, RowsOf

_ALGEBRA = "mpmd/compile/passes/simplify/algebra"
_RULES = "tests/unit/compile/passes/simplify/algebra/test_rules.py"
_CONVERSIONS = "tests/unit/compile/passes/simplify/algebra/test_conversions.py"
_DIRECTED = "tests/property/test_directed_rewrites.py::test_a_rule_keeps_the_numbers"
_ZERO = "within rounding: -0 + 0 becomes -0, as in XLA's simplifier"
_BEGINS = (
    "within rounding: a sum begins with 0, which takes the sign from -0; products of one term need no sum"
)


_row = RowsOf(_ALGEBRA, f"{_RULES}::test_no_rule_applies")


def _lossless(holds: str, code: str, dropped: str, source: str) -> Precondition:
    test = f"{_CONVERSIONS}::test_one_conversion_gives_what_two_do[{source}]"
    return Precondition(f"{_ALGEBRA}/elementwise.py:is_lossless", holds, code, dropped, test)


_ARITHMETIC = (
    Precondition(
        f"{_ALGEBRA}/elementwise.py",
        "operands change places only of operations that commute",
        '"subtract": (subtract_zero,)',
        '"subtract": (constant_to_the_right, subtract_zero)',
        f"{_RULES}::test_no_rule_applies[a constant less a value]",
    ),
    _row(
        "elementwise.py:add_zero",
        "the constant is 0 or -0",
        "is_splat(b, 0)",
        "is_splat(b, 1)",
        "one more",
        _ZERO,
    ),
    _row(
        "elementwise.py:subtract_zero",
        "the constant is 0",
        "is_splat(b, 0) and",
        "is_splat(b, 1) and",
        "one less",
    ),
    _row(
        "elementwise.py:subtract_zero",
        "the constant is not -0: -0 - -0 is 0",
        " and not is_negative_zero(b)",
        "",
        "less -0, which takes the sign from -0",
    ),
    _row(
        "elementwise.py:subtract_zero",
        "0 - x is -x of integers alone: 0 - 0 is 0",
        " and not is_number(a)",
        "",
        "0 less a float, which is 0 for 0",
    ),
    _row(
        "elementwise.py:multiply_one",
        "the constant is 1",
        "is_splat(b, 1)",
        "is_splat(b, 0)",
        "zero times infinity",
    ),
    _row(
        "elementwise.py:multiply_one",
        "numbers are real: a complex infinity times 1 has a part 0 * inf",
        'site.shape.info.kind == "complex"',
        "False",
        "a complex infinity times one",
    ),
    _row(
        "elementwise.py:divide_by_power_of_two",
        "numbers are floats: integers have no reciprocal",
        'site.shape.dtype not in ("f32", "f64", "bf16", "f16")',
        "False",
        "half of an integer",
    ),
    _row(
        "elementwise.py:divide_by_power_of_two",
        "the divisor is a power of two, whose reciprocal is exact",
        "mantissa != 0.5 or ",
        "value == 0 or ",
        "a third",
    ),
    _row(
        "elementwise.py:divide_by_power_of_two",
        "the divisor is not 0, and finite",
        "mantissa != 0.5",
        "mantissa not in (0.5, float('inf'))",
        "a division by infinity",
    ),
    _row(
        "elementwise.py:divide_by_power_of_two",
        "divisor and reciprocal are normal numbers",
        " or abs(exponent) > limit",
        "",
        "a division into denormals",
    ),
    _row(
        "elementwise.py:divide_by_power_of_two",
        "they are normal numbers of f16, too",
        '12 if site.shape.dtype == "f16" else 120',
        "120",
        "a division by 2**14 of f16",
    ),
    _row(
        "elementwise.py:power_of_simple_exponent",
        "the exponent is 0, 1, 2 or -1",
        "is_splat(exponent, 2)",
        "is_splat(exponent, 0.5)",
        "a root of a negative number",
        "within rounding: a product rounds once, a library's power may err by an ulp",
    ),
    _row(
        "elementwise.py:power_of_simple_exponent",
        "the exponent is -1 of floats alone: integers to it are 0, 1 or -1",
        'site.shape.info.kind == "float" and ',
        "",
        "one by an integer",
    ),
)
_LOGIC = (
    _row(
        "elementwise.py:neutral",
        "the constant is neutral for the operation and the type: -inf for a maximum of floats",
        "is_identity(site.at.opcode, b)",
        "is_identity('or', b)",
        "a maximum with zero",
    ),
    Precondition(
        f"{_ALGEBRA}/elementwise.py:compare_constant_to_the_right",
        "the direction of a comparison turns with its operands",
        "_FLIPPED[site.at.direction]",
        "site.at.direction",
        f"{_DIRECTED}[elementwise.compare_constant_to_the_right]",
    ),
    _row(
        "elementwise.py:select_constant",
        "the predicate is the same everywhere, and known",
        "None if value is None else a if value else b",
        "a if value else b",
        "a choice by an argument",
    ),
    Precondition(
        f"{_ALGEBRA}/elementwise.py:select_constant",
        "true selects the first operand",
        "a if value else b",
        "b if value else a",
        f"{_DIRECTED}[elementwise.select_constant]",
    ),
)
_CONVERTED = (
    _row(
        "elementwise.py:convert_twice",
        "the first conversion keeps every value",
        "not is_lossless(source.name, between.name)",
        "False",
        "rounding twice",
    ),
    _row(
        "elementwise.py:convert_twice",
        "no float is between an integer and one that cannot hold it: floats saturate, integers wrap",
        "wraps and not between.is_integral",
        "False",
        "integers that a float saturates",
    ),
    _row(
        "elementwise.py:convert_twice",
        "no complex number is between them either",
        "not between.is_integral",
        "between.is_floating",
        "integers that a real part saturates",
    ),
    _lossless("a type without a zero holds no truth value", 'target != "f8e8m0fnu"', "True", "pred"),
    _lossless("a signed type holds unsigned numbers of fewer bits", "a.bits < b.bits", "True", "u8"),
    _lossless("a type of the same sign has no fewer bits", "a.bits <= b.bits", "True", "s16"),
    _lossless("signed numbers have no unsigned type", 'a.kind == "unsigned" and ', "", "s8"),
    _lossless("the target has infinities", "target not in MANTISSA", "not b.is_floating", "f8e4m3"),
    _lossless(
        "the mantissa holds all digits of an integer", "digits <= _format(target)[0] + 1", "True", "s32"
    ),
    _lossless("the mantissa of the target is as long", "m <= wide and ", "", "f16"),
    _lossless("the largest exponent of the target is as large", "high <= highest and ", "", "f8e4m3fn"),
    _lossless("the least exponent of the target is as small", " and low >= lowest", "", "f8e4m3b11fnuz"),
    _row(
        "elementwise.py:copy_nothing",
        "a copy keeps the layout",
        "x.shape is site.shape",
        "x.shape.logical is site.shape.logical",
        "a copy to another layout",
    ),
)
_MOVED = (
    _row(
        "movement.py:reshape_nothing",
        "the dims are the same",
        "x.shape.logical is site.shape.logical",
        "x.shape.size == site.shape.size",
        "a reshape",
    ),
    _row(
        "movement.py:transpose_of_ones",
        "dims other than 1 keep their order",
        "not moves_only_ones(site.shape.dims, site.at.dimensions)",
        "False",
        "a transpose",
    ),
    Precondition(
        f"{_ALGEBRA}/movement.py:transpose_twice",
        "the first permutation is read at the places of the second",
        "inner.dimensions[d] for d in site.at.dimensions",
        "site.at.dimensions[d] for d in inner.dimensions",
        f"{_DIRECTED}[movement.transpose_twice]",
    ),
    _row(
        "movement.py:broadcast_nothing",
        "dims keep their order",
        "plain and ",
        "",
        "a broadcast of the same dims in another order",
    ),
    Precondition(
        f"{_ALGEBRA}/movement.py:broadcast_twice",
        "dims of the first broadcast are read at the places of the second",
        "site.at.dimensions[d] for d in inner.dimensions",
        "inner.dimensions",
        f"{_DIRECTED}[movement.broadcast_twice]",
    ),
    _row(
        "movement.py:sink",
        "all operands are broadcast along the same dims",
        "pattern not in (None, stretched)",
        "False",
        "broadcasts along different dims",
    ),
    _row(
        "movement.py:sink",
        "no operand is another array",
        'operand.opcode != "broadcast"',
        'operand.opcode not in ("broadcast", "parameter")',
        "a broadcast beside an array",
    ),
    _row(
        "movement.py:slice_nothing",
        "all of the array is taken",
        "x.shape.logical is site.shape.logical",
        "x.shape.dtype == site.shape.dtype",
        "a slice",
    ),
    _row(
        "movement.py:pad_nothing",
        "nothing is added or removed at the sides",
        "p.low == p.high == 0 and ",
        "",
        "a pad that moves",
    ),
    _row(
        "movement.py:pad_nothing",
        "nothing is added between elements; there may be only one",
        " and (not p.interior or n <= 1)",
        "",
        "a pad between elements",
    ),
    _row(
        "movement.py:_fixed",
        "each start is known, unless all of the dim is taken",
        "known is None",
        "False",
        "a slice at an argument",
    ),
    Precondition(
        f"{_ALGEBRA}/movement.py:_fixed",
        "a start is clamped so that the part is inside, also of narrow and unsigned types",
        "min(max(known, 0), n - size)",
        "known",
        f"{_DIRECTED}[movement.slice_at_constant]",
    ),
    _row(
        "movement.py:update_everything",
        "the update has all elements, or none",
        "update.shape.logical is x.shape.logical",
        "True",
        "an update of a part",
    ),
    _row(
        "movement.py:set_whole_size",
        "the size is the array's",
        "integer(size) == x.shape.dims[dim]",
        "integer(size) is not None",
        "a size that is less",
    ),
    _row(
        "movement.py:drop_mark",
        "the call returns its operand",
        "site.at.custom_call_target not in _MARKS",
        "False",
        "a call of another target",
    ),
    _row(
        "movement.py:drop_mark",
        "on several devices a mark says how the value is divided",
        "module.num_partitions > 1",
        "False",
        "a mark on several devices",
    ),
    _row(
        "movement.py:drop_mark",
        "the shape stays",
        "site.operands[0].shape.logical is site.shape.logical",
        "True",
        "a mark of another shape",
    ),
    _row(
        "movement.py:tuple_of_elements",
        "all elements are there",
        "source.shape is not site.shape",
        "False",
        "the first elements of a tuple",
    ),
    _row(
        "movement.py:tuple_of_elements",
        "they are in order",
        " or operand.tuple_index != i",
        "",
        "the elements of a tuple in another order",
    ),
    _row(
        "movement.py:tuple_of_elements",
        "they are of one tuple",
        " and operand.operands[0] is source",
        "",
        "elements of different tuples",
    ),
)
_SUMMED = (
    _row(
        "products.py:dot_of_nothing",
        "there is nothing to sum",
        "is_trivial(site.operands[0]) and ",
        "",
        "a product",
    ),
    _row(
        "products.py:dot_of_ones",
        "one term is summed",
        " or any(a.shape.dims[d] != 1 for d in dims.lhs_contracting)",
        "",
        "a product",
        _BEGINS,
    ),
    _row(
        "products.py:dot_of_ones",
        "the result's type holds the factors: they are rounded once",
        "not all(\n        is_lossless(o.shape.dtype, site.shape.dtype) for o in (a, b)\n    )",
        "False",
        "a product of ones that rounds its factors",
    ),
    _row(
        "products.py:dot_of_ones",
        "no algorithm rounds the factors",
        '"algorithm" in site.at.attributes or ',
        "",
        "a product of ones by an algorithm",
    ),
    _row(
        "products.py:transpose_of_dot",
        "the transpose exchanges all free dims of the sides",
        "site.at.dimensions != swapped",
        "False",
        "a product that is transposed in part",
        "within rounding: terms are summed in the order of the same contracted dims",
    ),
    _row(
        "products.py:transpose_of_dot",
        "nothing else reads the product, which would be computed twice",
        " or len(inner.users) != 1",
        "",
        "a product that is read twice",
    ),
    _row(
        "products.py:transpose_of_dot",
        "no algorithm treats the sides differently",
        '"algorithm" in inner.attributes',
        "False",
        "a transposed product by an algorithm",
    ),
    _row(
        "products.py:reduce_nothing",
        "each reduced dim has one element",
        " or any(x.shape.dims[d] != 1 for d in site.at.dimensions)",
        "",
        "a reduction of several elements",
        _BEGINS,
    ),
    Precondition(
        f"{_ALGEBRA}/products.py:_with_init",
        "an initial value that is not neutral takes part",
        "is_identity(opcode, init)",
        "True",
        f"{_DIRECTED}[products.reduce_nothing]",
    ),
    _row(
        "products.py:reduce_of_nothing",
        "the array is empty",
        " or not is_trivial(site.operands[0])",
        "",
        "a reduction of several elements",
    ),
    Precondition(
        "mpmd/compile/passes/rewriter.py:splat",
        "all elements are equal bit for bit",
        "first if data == data[: flat.itemsize] * flat.size else None",
        "first",
        f"{_RULES}::test_no_rule_applies[different numbers more]",
    ),
)

ROWS = (*_ARITHMETIC, *_LOGIC, *_CONVERTED, *_MOVED, *_SUMMED)

ALWAYS = {
    f"{_ALGEBRA}/elementwise.py:constant_to_the_right": "the table names it for commutative operations alone",
    f"{_ALGEBRA}/movement.py:reshape_twice": "reshapes keep the order of elements",
    f"{_ALGEBRA}/movement.py:bitcast_nothing": "bitcasts keep the bytes",
    f"{_ALGEBRA}/movement.py:known_size": "arrays with dims of unknown size are not rewritten",
    f"{_ALGEBRA}/movement.py:copy_of_tuple": "values are kept apart where memory is assigned",
    f"{_ALGEBRA}/movement.py:element_of_tuple": "a tuple's element is its operand",
    f"{_ALGEBRA}/movement.py:tuple_of_constants": "a constant tuple is the tuple of its constants",
}
