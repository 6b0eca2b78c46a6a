"""Single operations whose operands and results are sharded in any ways, whether these fit each other or not.

What Shardy does not write is in it, too: a rule gives the local part of an operation only where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from mpmd.compile.lowering import lower
from mpmd.compile.lowering.lower import lower_program
from mpmd.compile.lowering.reader import named_axes, parse_program, read_program, shape_of
from mpmd.compile.lowering.spmd.localise import localise
from tests.support.hlo_meaning import evaluate
from tests.support.meshes import evaluated, part
from tests.support.random_hlo.draft import small_integers

AXES = {"x": 2}
ROWS, COLUMNS, WHOLE = "x -", "- x", "- -"
SQUARE, LINE = "4x4xf32", "4xf32"


@dataclass(frozen=True)
class ShardedType:
    """A type, and for each dim the axis that cuts it.

    Attributes:
        type: as in `tensor<4x4xf32>`.
        axes: an axis or `-` for each dim.
    """

    type: str
    axes: str = ""

    @property
    def spec(self) -> list[list[str]]:
        return [[] if word == "-" else [word] for word in self.axes.split()]

    @property
    def text(self) -> str:
        """The sharding, as Shardy writes it."""
        return f"<@m, [{', '.join('{' + ', '.join(map(repr, n)) + '}' for n in self.spec)}]>".replace(
            "'", '"'
        )


@dataclass(frozen=True)
class Example:
    """An operation of `%a`, `%b`, ...; `@S` is where its sharding stands.

    Attributes:
        line: the operation.
        given: its operands.
        wanted: its result.
        joined: how the result is sharded after the sum of partial results; "" if it is none.
        start: the constant `%z`.
    """

    line: str
    given: tuple[ShardedType, ...]
    wanted: ShardedType
    joined: str = ""
    start: str = "0."


def text_of(example: Example, is_cut: bool) -> str:
    """A module with the operation."""
    names = []
    for letter, cut in zip("abcd", example.given):
        own = f" {{sdy.sharding = #sdy.sharding{cut.text}}}" if is_cut else ""
        names.append(f"%{letter}: tensor<{cut.type}>{own}")
    result = f"tensor<{example.wanted.type}>"
    mark = f"{{sdy.sharding = #sdy.sharding_per_value<[{example.wanted.text}]>}}" if is_cut else ""
    zero = f"%z = stablehlo.constant dense<{example.start}> : tensor<f32>"
    lines = [f"%r = {example.line.replace('@S', mark)}", f"return %r : {result}"]
    if is_cut and example.joined:
        joined = ShardedType(example.wanted.type, example.joined).text
        lines[1:] = [
            f'%s = sdy.all_reduce {{"x"}} %r out_sharding={joined} : {result}',
            f"return %s : {result}",
        ]
    body = "\n  ".join((zero, *lines))
    mesh = 'sdy.mesh @m = <["x"=2]>\n' if is_cut else ""
    return f"{mesh}func.func public @main({', '.join(names)}) -> {result} {{\n  {body}\n}}"


def reduction(opcode: str) -> str:
    return (
        "({ ^bb0(%p: tensor<f32>, %q: tensor<f32>): %t = stablehlo." + opcode + " %p, %q : tensor<f32> "
        '"stablehlo.return"(%t) : (tensor<f32>) -> () })'
    )


def moved(line: str, before: str, after: str, types: str = f"{SQUARE} {SQUARE}") -> Example:
    """An operation of one array."""
    given, wanted = types.split()
    line = f"stablehlo.{line} @S : (tensor<{given}>) -> tensor<{wanted}>"
    return Example(line, (ShardedType(given, before),), ShardedType(wanted, after))


NUMBERS = "dense<[[0., 1., 2., 3.], [4., 5., 6., 7.], [8., 9., 10., 11.], [12., 13., 14., 15.]]>"
DOT = "stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] @S : (tensor<4x4xf32>, tensor<4x4xf32>) -> "
PAD = (
    "stablehlo.pad %a, %b, low = [1, 0], high = [1, 0], interior = [0, 0] @S "
    ": (tensor<4x4xf32>, tensor<f32>) -> "
)
SORT = (
    '"stablehlo.sort"(%a) <{dimension = 1 : i64, is_stable = true}> '
    "({ ^bb0(%p: tensor<f32>, %q: tensor<f32>): "
    "%t = stablehlo.compare LT, %p, %q : (tensor<f32>, tensor<f32>) -> tensor<i1> "
    '"stablehlo.return"(%t) : (tensor<i1>) -> () }) @S : (tensor<4x4xf32>) -> tensor<4x4xf32>'
)
WINDOW = (
    '"stablehlo.reduce_window"(%a, %b) '
    "<{window_dimensions = array<i64: 1, 2>, window_strides = array<i64: 1, 1>}> "
    + reduction("add")
    + " @S : (tensor<4x4xf32>, tensor<f32>) -> tensor<4x3xf32>"
)
UPDATE = (
    "stablehlo.dynamic_update_slice %a, %b, %c, %d @S "
    ": (tensor<4x4xf32>, tensor<{}xf32>, tensor<i32>, tensor<i32>)"
)
GATHER = (
    '"stablehlo.gather"(%a, %b) <{dimension_numbers = #stablehlo.gather<offset_dims = [1], '
    "collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, "
    "slice_sizes = array<i64: 1, SIZE>}> @S : (tensor<4x4xf32>, tensor<4xi32>) -> tensor<4xSIZExf32>"
)
SCATTER = (
    '"stablehlo.scatter"(%a, %b, %c) '
    "<{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], "
    "inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> REGION @S "
    ": (tensor<4x4xf32>, tensor<4xi32>, tensor<4x4xf32>) -> tensor<4x4xf32>"
)
ZERO = ShardedType("f32")


def reduced(before: str, after: str, opcode: str = "add", joined: str = "", start: str = "0.") -> Example:
    """A reduction of the rows of a square."""
    line = f'"stablehlo.reduce"(%a, %z) <{{dimensions = array<i64: 0>}}> {reduction(opcode)} @S '
    types = "(tensor<4x4xf32>, tensor<f32>) -> tensor<4xf32>"
    return Example(
        f"{line}: {types}", (ShardedType(SQUARE, before),), ShardedType(LINE, after), joined, start
    )


def convolved(image: str, kernel: str, result: str, groups: int = 1) -> Example:
    """A convolution of images `[batch, 4, features]` with a kernel of one element."""
    line = (
        '"stablehlo.convolution"(%a, %b) <{batch_group_count = 1 : i64, feature_group_count = '
        f"{groups} : i64, dimension_numbers = #stablehlo.conv<[b, 0, f]x[0, i, o]->[b, 0, f]>}}> @S "
        f": (tensor<4x4x4xf32>, tensor<1x{4 // groups}x4xf32>) -> tensor<4x4x4xf32>"
    )
    given = (ShardedType("4x4x4xf32", image), ShardedType(f"1x{4 // groups}x4xf32", kernel))
    return Example(line, given, ShardedType("4x4x4xf32", result))


def updated(size: str, cuts: tuple[str, str, str]) -> Example:
    first, second, third = cuts
    given = (
        ShardedType(SQUARE, first),
        ShardedType(f"{size}xf32", second),
        ShardedType("i32"),
        ShardedType("i32"),
    )
    return Example(UPDATE.format(size) + " -> tensor<4x4xf32>", given, ShardedType(SQUARE, third))


def gathered(table: str, indices: str, result: str, size: int = 4, joined: str = "") -> Example:
    given = (ShardedType(SQUARE, table), ShardedType("4xi32", indices))
    return Example(GATHER.replace("SIZE", str(size)), given, ShardedType(f"4x{size}xf32", result), joined)


def scattered(
    table: str, indices: str, updates: str, result: str, opcode: str = "add", joined: str = ""
) -> Example:
    given = (ShardedType(SQUARE, table), ShardedType("4xi32", indices), ShardedType(SQUARE, updates))
    return Example(SCATTER.replace("REGION", reduction(opcode)), given, ShardedType(SQUARE, result), joined)


EXAMPLES = {
    "a constant of several numbers": Example(
        f"stablehlo.constant @S {NUMBERS} : tensor<{SQUARE}>", (), ShardedType(SQUARE, ROWS)
    ),
    "a count along a sharded dim": Example(
        f"stablehlo.iota dim = 0 @S : tensor<{SQUARE}>", (), ShardedType(SQUARE, ROWS)
    ),
    "a broadcast along a sharded dim": moved(
        "broadcast_in_dim %a, dims = [1]", "-", COLUMNS, f"{LINE} {SQUARE}"
    ),
    "a broadcast of a dim of one": moved(
        "broadcast_in_dim %a, dims = [0, 1]", ROWS, ROWS, f"4x1xf32 {SQUARE}"
    ),
    "a transpose whose sharding stays": moved("transpose %a, dims = [1, 0]", ROWS, ROWS),
    "a reshape of other parts": moved("reshape %a", ROWS, COLUMNS, "4x2xf32 2x4xf32"),
    "bits of other parts": moved("bitcast_convert %a", ROWS, COLUMNS, "4x4xf32 4x4xi32"),
    "bits that are spread over the parts": moved("bitcast_convert %a", "-", COLUMNS, "4xf32 4x4xi8"),
    "rows joined along a sharded dim": Example(
        "stablehlo.concatenate %a, %b, dim = 0 @S : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>",
        (ShardedType(SQUARE, ROWS),) * 2,
        ShardedType("8x4xf32", ROWS),
    ),
    "joined rows, some of them whole": Example(
        "stablehlo.concatenate %a, %b, dim = 0 @S : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>",
        (ShardedType(SQUARE, COLUMNS), ShardedType(SQUARE, WHOLE)),
        ShardedType("8x4xf32", WHOLE),
    ),
    "a reverse of a sharded dim": Example(
        f"stablehlo.reverse %a, dims = [0] @S : tensor<{SQUARE}>",
        (ShardedType(SQUARE, ROWS),),
        ShardedType(SQUARE, ROWS),
    ),
    "a reverse into other parts": Example(
        f"stablehlo.reverse %a, dims = [0] @S : tensor<{SQUARE}>",
        (ShardedType(SQUARE, WHOLE),),
        ShardedType(SQUARE, COLUMNS),
    ),
    "a sharded dim padded": Example(
        f"{PAD}tensor<6x4xf32>", (ShardedType(SQUARE, ROWS), ZERO), ShardedType("6x4xf32", ROWS)
    ),
    "a pad into other parts": Example(
        f"{PAD}tensor<6x4xf32>", (ShardedType(SQUARE, WHOLE), ZERO), ShardedType("6x4xf32", COLUMNS)
    ),
    "a part of a sharded dim": moved("slice %a [2:4, 0:4]", ROWS, ROWS, f"{SQUARE} 2x4xf32"),
    "a slice into other parts": moved("slice %a [0:4, 0:4]", WHOLE, COLUMNS),
    "a part of a sharded dim, that begins somewhere": Example(
        "stablehlo.dynamic_slice %a, %b, %c, sizes = [2, 4] @S "
        ": (tensor<4x4xf32>, tensor<i32>, tensor<i32>) -> tensor<2x4xf32>",
        (ShardedType(SQUARE, ROWS), ShardedType("i32"), ShardedType("i32")),
        ShardedType("2x4xf32", ROWS),
    ),
    "a part that goes to other devices": Example(
        "stablehlo.dynamic_slice %a, %b, %c, sizes = [2, 4] @S "
        ": (tensor<4x4xf32>, tensor<i32>, tensor<i32>) -> tensor<2x4xf32>",
        (ShardedType(SQUARE, WHOLE), ShardedType("i32"), ShardedType("i32")),
        ShardedType("2x4xf32", COLUMNS),
    ),
    "a part of a sharded dim changed": updated("2x4", (ROWS, ROWS, ROWS)),
    "a change that lies elsewhere": updated("2x4", (COLUMNS, WHOLE, COLUMNS)),
    "a sum of arrays in other parts": Example(
        f"stablehlo.subtract %a, %b @S : tensor<{SQUARE}>",
        (ShardedType(SQUARE, ROWS), ShardedType(SQUARE, COLUMNS)),
        ShardedType(SQUARE, ROWS),
    ),
    "a barrier before other parts": Example(
        f"stablehlo.optimization_barrier @S %a : tensor<{SQUARE}>",
        (ShardedType(SQUARE, ROWS),),
        ShardedType(SQUARE, COLUMNS),
    ),
    "a product whose sums lie elsewhere": Example(
        f"{DOT}tensor<{SQUARE}>",
        (ShardedType(SQUARE, COLUMNS), ShardedType(SQUARE, WHOLE)),
        ShardedType(SQUARE, WHOLE),
    ),
    "a product in other parts": Example(
        f"{DOT}tensor<{SQUARE}>",
        (ShardedType(SQUARE, ROWS), ShardedType(SQUARE, WHOLE)),
        ShardedType(SQUARE, COLUMNS),
    ),
    "a product of parts": Example(
        f"{DOT}tensor<{SQUARE}>",
        (ShardedType(SQUARE, COLUMNS), ShardedType(SQUARE, ROWS)),
        ShardedType(SQUARE, WHOLE),
        WHOLE,
    ),
    "a reduction into other parts": reduced(WHOLE, "x"),
    "a sum of parts": reduced(ROWS, "-", joined="-"),
    "a sum of parts, from a number": reduced(ROWS, "-", joined="-", start="2."),
    "a product of parts of rows, from a number": reduced(ROWS, "-", "multiply", joined="-", start="2."),
    "a maximum of parts": reduced(ROWS, "-", "maximum", joined="-", start="1."),
    "a convolution of some images": convolved("x - -", "- - -", "x - -"),
    "an image whose features are sharded": convolved("- - x", "- x -", "- - -"),
    "images in other parts": convolved("x - -", "- - -", "- - x"),
    "features in groups": convolved("- - -", "- - x", "- - x", groups=2),
    "a sort along a sharded dim": Example(
        SORT, (ShardedType(SQUARE, COLUMNS),), ShardedType(SQUARE, COLUMNS)
    ),
    "a sort of rows": Example(SORT, (ShardedType(SQUARE, ROWS),), ShardedType(SQUARE, ROWS)),
    "windows along a sharded dim": Example(
        WINDOW, (ShardedType(SQUARE, COLUMNS), ZERO), ShardedType("4x3xf32", WHOLE)
    ),
    "rows of a table": gathered(ROWS, "-", WHOLE, joined=WHOLE),
    "rows of a table, by sharded indices": gathered(WHOLE, "x", ROWS),
    "rows in other parts than their indices": gathered(WHOLE, "x", WHOLE),
    "parts of the rows of a table": gathered(COLUMNS, "-", COLUMNS, size=2),
    "rows that lie elsewhere": gathered(COLUMNS, "-", WHOLE),
    "updates of a table": scattered(ROWS, "-", WHOLE, ROWS),
    "updates of a table, each by one device": scattered(WHOLE, "x", ROWS, WHOLE, joined=WHOLE),
    "updates of a table that lies elsewhere": scattered(ROWS, "-", WHOLE, WHOLE),
    "updates that no sum joins": scattered(WHOLE, "x", ROWS, WHOLE, opcode="divide", joined=WHOLE),
    "products of updates that nothing joins": scattered(WHOLE, "x", ROWS, WHOLE, opcode="multiply"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_device_has_its_part(name):
    example = EXAMPLES[name]
    cut = ShardedType(example.wanted.type, example.joined) if example.joined else example.wanted
    program = read_program(parse_program(text_of(example, is_cut=True)))
    module = lower_program(localise(program, 2, [tuple(named_axes(n, AXES) for n in cut.spec)]))
    rng = np.random.default_rng(7)
    shapes = [shape_of(f"tensor<{c.type}>") for c in example.given]
    arguments = [small_integers(rng, s.dtype, s.dims) for s in shapes]
    whole = np.asarray(evaluate(lower(text_of(example, is_cut=False)), arguments))
    found = evaluated(module, arguments, AXES, [c.spec for c in example.given])
    for device, (got,) in enumerate(found):
        np.testing.assert_array_equal(got, part(whole, cut.spec, AXES, device))
