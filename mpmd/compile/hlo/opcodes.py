"""One table of all HLO opcodes: number of operands, attributes, category.

Everything that depends on the opcode alone is in this table: parser and printer use the attributes, the
verifier the arity, the passes categories, commutativity and side effects.  Names are XLA's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from mpmd.compile.hlo import codecs
from mpmd.compile.hlo.attributes import Attribute
from mpmd.compile.hlo.codecs import Codec
from mpmd.errors import close_to

if TYPE_CHECKING:
    from mpmd.compile.hlo.instruction import HloInstruction


class Category(Enum):
    """What kind of operation an opcode is."""

    INPUT = "input"
    UNARY = "elementwise unary"
    BINARY = "elementwise binary"
    TERNARY = "elementwise ternary"
    SHAPE = "data movement"
    REDUCTION = "reduction"
    PRODUCT = "product"
    INDEX = "indexed access"
    CONTROL = "control flow"
    TUPLE = "tuple"
    RANDOM = "random"
    COLLECTIVE = "collective"
    ASYNC = "asynchronous"
    EXTERNAL = "external"


ELEMENTWISE = frozenset({Category.UNARY, Category.BINARY, Category.TERNARY})


@dataclass(frozen=True)
class Spec:
    """One attribute of an opcode.

    Attributes:
        name: its key in `HloInstruction.attributes`.
        codec: its text form.
        required: the instruction is invalid without it.
        default: the value that is not written.
    """

    name: str
    codec: Codec
    required: bool = False
    default: Attribute = None


@dataclass(frozen=True)
class Opcode:
    """The properties of all instructions of one opcode.

    Attributes:
        name: as in HLO text.
        category: the kind of operation.
        least: minimum of operands.
        most: maximum of operands; None: any number.
        specs: its attributes.
        called: keys of the computations it calls, in order; conditional and custom-call vary.
        commutative: the operands of a binary operation may be exchanged.
        side_effect: must stay although it has no users.
        keyed: attribute names by the text keys they use; filled in.
    """

    name: str
    category: Category
    least: int
    most: int | None
    specs: tuple[Spec, ...] = ()
    called: tuple[str, ...] = ()
    commutative: bool = False
    side_effect: bool = False
    keyed: dict[str, Spec] = field(default_factory=dict, repr=False)


OPCODES: dict[str, Opcode] = {}


def _define(
    category: Category,
    names: str,
    arity: int | tuple[int, int | None],
    *specs: Spec,
    called: tuple[str, ...] = (),
    commutative: bool = False,
    side_effect: bool = False,
) -> None:
    least, most = arity if isinstance(arity, tuple) else (arity, arity)
    keyed = {key: spec for spec in specs for key in spec.codec.keys}
    for name in names.split():
        OPCODES[name] = Opcode(name, category, least, most, specs, called, commutative, side_effect, keyed)


def _must(name: str, codec: Codec) -> Spec:
    return Spec(name, codec, required=True)


def _may(name: str, codec: Codec, default: Attribute = None) -> Spec:
    return Spec(name, codec, default=default)


_DIMENSIONS = _must("dimensions", codecs.ints("dimensions"))
_PRECISION = _may("operand_precision", codecs.words("operand_precision"))
_SORTED = _may("indices_are_sorted", codecs.boolean("indices_are_sorted"), False)
_CHANNEL = _may("channel_id", codecs.integer("channel_id"))
_GROUPS = _may("replica_groups", codecs.GROUPS)
_GLOBAL_IDS = _may("use_global_device_ids", codecs.boolean("use_global_device_ids"), False)
_CONSTRAIN = _may("constrain_layout", codecs.boolean("constrain_layout"), False)
_THREAD = _may("async_execution_thread", codecs.string("async_execution_thread"))
_ALIASES = _may("output_to_operand_aliasing", codecs.OUTPUT_ALIASES)
_HOST = _may("is_host_transfer", codecs.boolean("is_host_transfer"), False)
_NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
_ACCURACY = _may(
    "result_accuracy",
    codecs.matching(
        "result_accuracy",
        rf"\{{\s*(mode=(default|highest)|tolerance=\{{\s*((ulps|[ra]tol)={_NUMBER}[\s,]*)*\}})\s*\}}",
        "{mode=highest} or {tolerance={atol=0.1,rtol=0.1,ulps=2}}",
    ),
)
_FEATURES = _may("feature_group_count", codecs.integer("feature_group_count"), 1)
_BATCHES = _may("batch_group_count", codecs.integer("batch_group_count"), 1)

API_VERSIONS = (
    "API_VERSION_ORIGINAL",
    "API_VERSION_STATUS_RETURNING",
    "API_VERSION_STATUS_RETURNING_UNIFIED",
    "API_VERSION_TYPED_FFI",
)
DIRECTIONS = ("EQ", "NE", "GE", "GT", "LE", "LT")
COMPARISONS = ("FLOAT", "TOTALORDER", "SIGNED", "UNSIGNED")


def _inputs() -> None:
    _define(Category.INPUT, "parameter", 0, _may("replication", codecs.verbatim("parameter_replication")))
    _define(Category.INPUT, "constant", 0)
    _define(Category.INPUT, "iota", 0, _may("iota_dimension", codecs.integer("iota_dimension"), None))
    _define(Category.INPUT, "partition-id replica-id", 0, _CHANNEL)


def _elementwise() -> None:
    _define(
        Category.UNARY,
        "abs ceil count-leading-zeros convert bitcast-convert copy floor imag is-finite negate not popcnt "
        "real round-nearest-afz round-nearest-even sign",
        1,
    )
    _define(
        Category.UNARY,
        "acos acosh asin asinh atanh cbrt cosine cosh erf exponential exponential-minus-one log log-plus-one "
        "logistic rsqrt sine sinh sqrt tan tanh",
        1,
        _ACCURACY,
    )
    _define(
        Category.UNARY,
        "reduce-precision",
        1,
        _must("exponent_bits", codecs.integer("exponent_bits")),
        _must("mantissa_bits", codecs.integer("mantissa_bits")),
    )
    _define(Category.BINARY, "add and maximum minimum mulhi multiply or xor", 2, commutative=True)
    _define(
        Category.BINARY,
        "atan2 complex divide power remainder shift-left shift-right-arithmetic shift-right-logical "
        "stochastic-convert subtract",
        2,
    )
    _define(
        Category.BINARY,
        "compare",
        2,
        _must("direction", codecs.word("direction", DIRECTIONS)),
        _may("comparison_type", codecs.word("type", COMPARISONS)),
    )
    _define(Category.TERNARY, "clamp select", 3)
    _define(
        Category.TERNARY,
        "map",
        (1, None),
        _must("dimensions", codecs.ints("dimensions")),
        called=("to_apply",),
    )


def _movement() -> None:
    _define(Category.SHAPE, "bitcast", 1)
    _define(Category.SHAPE, "reshape", 1, _may("inferred_dimension", codecs.integer("inferred_dimension")))
    _define(Category.SHAPE, "dynamic-reshape", (1, None))
    _define(Category.SHAPE, "broadcast", 1, _DIMENSIONS)
    _define(Category.SHAPE, "concatenate", (1, None), _DIMENSIONS)
    _define(Category.SHAPE, "reverse transpose", 1, _DIMENSIONS)
    _define(Category.SHAPE, "pad", 2, _must("padding", codecs.PADDING))
    _define(Category.SHAPE, "slice", 1, _must("slice", codecs.SLICE))
    _define(Category.SHAPE, "get-dimension-size", 1, _DIMENSIONS)
    _define(Category.SHAPE, "set-dimension-size", 2, _DIMENSIONS)


def _reductions() -> None:
    _define(Category.REDUCTION, "reduce", (2, None), _DIMENSIONS, called=("to_apply",))
    _define(
        Category.REDUCTION,
        "reduce-window",
        (2, None),
        _may("window", codecs.WINDOW),
        called=("to_apply",),
    )
    _define(
        Category.REDUCTION,
        "select-and-scatter",
        3,
        _may("window", codecs.WINDOW),
        called=("select", "scatter"),
    )
    _define(
        Category.REDUCTION,
        "sort",
        (1, None),
        _DIMENSIONS,
        _may("is_stable", codecs.boolean("is_stable"), False),
        called=("to_apply",),
    )
    _define(
        Category.REDUCTION,
        "topk",
        1,
        _must("k", codecs.integer("k")),
        _must("largest", codecs.boolean("largest")),
        _may("is_stable", codecs.boolean("is_stable"), True),
    )
    _define(
        Category.REDUCTION,
        "scan",
        (1, None),
        _DIMENSIONS,
        _may("is_reverse", codecs.boolean("is_reverse"), False),
        _may("is_associative", codecs.verbatim("is_associative")),
        _may("num_carries", codecs.integer("num_carries")),
        called=("to_apply",),
    )
    norm = (
        _must("epsilon", codecs.real("epsilon")),
        _must("feature_index", codecs.integer("feature_index")),
    )
    _define(Category.REDUCTION, "batch-norm-training", 3, *norm)
    _define(Category.REDUCTION, "batch-norm-inference batch-norm-grad", 5, *norm)


def _products() -> None:
    _define(
        Category.PRODUCT,
        "dot",
        (2, None),
        _must("dot_dims", codecs.DOT),
        _PRECISION,
        _may("algorithm", codecs.matching("algorithm", r"dot_\w+|unset", "dot_bf16_bf16_f32")),
    )
    _define(Category.PRODUCT, "scaled-dot", (2, None), _must("dot_dims", codecs.DOT), _PRECISION)
    _define(
        Category.PRODUCT,
        "ragged-dot",
        3,
        _must("dot_dims", codecs.DOT),
        _must("lhs_ragged_dims", codecs.ints("lhs_ragged_dims")),
        _may("rhs_group_dims", codecs.ints("rhs_group_dims")),
        _PRECISION,
    )
    _define(
        Category.PRODUCT,
        "convolution",
        2,
        _may("window", codecs.WINDOW),
        _must("conv_dims", codecs.CONV),
        _FEATURES,
        _BATCHES,
        _PRECISION,
    )
    _define(Category.PRODUCT, "cholesky", 1, _may("lower", codecs.boolean("lower"), False))
    _define(
        Category.PRODUCT,
        "triangular-solve",
        2,
        _may("left_side", codecs.boolean("left_side"), False),
        _may("lower", codecs.boolean("lower"), False),
        _may("unit_diagonal", codecs.boolean("unit_diagonal"), False),
        _may("transpose_a", codecs.word("transpose_a", ("NO_TRANSPOSE", "TRANSPOSE", "ADJOINT"))),
    )
    _define(
        Category.PRODUCT,
        "fft",
        1,
        _must("fft_type", codecs.word("fft_type", ("FFT", "IFFT", "RFFT", "IRFFT"))),
        _must("fft_length", codecs.ints("fft_length")),
    )


def _indexed() -> None:
    _define(
        Category.INDEX,
        "gather",
        2,
        _must("gather_dims", codecs.GATHER),
        _must("slice_sizes", codecs.ints("slice_sizes")),
        _SORTED,
    )
    _define(
        Category.INDEX,
        "scatter",
        (3, None),
        _must("scatter_dims", codecs.SCATTER),
        _SORTED,
        _may("unique_indices", codecs.boolean("unique_indices"), False),
        called=("to_apply",),
    )
    _define(
        Category.INDEX, "dynamic-slice", (1, None), _must("slice_sizes", codecs.ints("dynamic_slice_sizes"))
    )
    _define(Category.INDEX, "dynamic-update-slice", (2, None))


def _control() -> None:
    _define(
        Category.CONTROL,
        "call",
        (0, None),
        _may("is_composite", codecs.boolean("is_composite"), False),
        called=("to_apply",),
    )
    _define(Category.CONTROL, "while", 1, called=("condition", "body"))
    _define(Category.CONTROL, "conditional", (1, None), called=("branch_computations",))
    _define(
        Category.CONTROL, "fusion", (0, None), _must("kind", codecs.word("kind")), _ALIASES, called=("calls",)
    )
    _define(Category.CONTROL, "opt-barrier", 1)
    _define(Category.CONTROL, "after-all", (0, None))
    _define(Category.CONTROL, "add-dependency", 2)
    _define(Category.CONTROL, "domain", 1, _may("domain", codecs.verbatim("domain")))
    _define(Category.TUPLE, "tuple", (0, None))
    _define(Category.TUPLE, "get-tuple-element", 1, _must("index", codecs.integer("index")))


def _random() -> None:
    _define(
        Category.RANDOM,
        "rng",
        (1, None),
        _must("distribution", codecs.word("distribution")),
        side_effect=True,
    )
    _define(Category.RANDOM, "rng-bit-generator", 1, _must("algorithm", codecs.word("algorithm")))
    _define(
        Category.RANDOM,
        "rng-get-and-update-state",
        0,
        _must("delta", codecs.integer("delta")),
        side_effect=True,
    )


def _collectives() -> None:
    dims = _may("dimensions", codecs.ints("dimensions"))
    reducing = (_CHANNEL, _GROUPS, _CONSTRAIN, _GLOBAL_IDS)
    _define(Category.COLLECTIVE, "all-reduce all-reduce-start", (1, None), *reducing, called=("to_apply",))
    _define(Category.COLLECTIVE, "reduce-scatter", (1, None), *reducing, _DIMENSIONS, called=("to_apply",))
    _define(Category.COLLECTIVE, "all-gather all-gather-start", (1, None), *reducing, _DIMENSIONS)
    _define(Category.COLLECTIVE, "all-to-all", (1, None), _CHANNEL, _GROUPS, _CONSTRAIN, dims)
    _define(Category.COLLECTIVE, "ragged-all-to-all", 6, _CHANNEL, _GROUPS, dims)
    _define(Category.COLLECTIVE, "collective-broadcast", (1, None), _CHANNEL, _GROUPS, _CONSTRAIN)
    pairs = _must("source_target_pairs", codecs.PAIRS)
    _define(
        Category.COLLECTIVE,
        "collective-permute collective-permute-start",
        (1, None),
        _CHANNEL,
        pairs,
        _may("slice_sizes", codecs.verbatim("slice_sizes")),
    )
    _define(Category.COLLECTIVE, "all-reduce-done all-gather-done collective-permute-done", 1)


def _asynchronous() -> None:
    _define(Category.ASYNC, "async-start", (0, None), _THREAD, called=("calls",))
    _define(Category.ASYNC, "async-update async-done", 1, _THREAD)
    prefetch = _may("cross_program_prefetch_index", codecs.integer("cross_program_prefetch_index"))
    _define(Category.ASYNC, "copy-start", 1, prefetch)
    _define(Category.ASYNC, "copy-done", 1)
    _define(Category.ASYNC, "send", (1, 2), _CHANNEL, _HOST, side_effect=True)
    _define(Category.ASYNC, "recv", (0, 1), _CHANNEL, _HOST, side_effect=True)
    _define(Category.ASYNC, "send-done recv-done", 1, _CHANNEL, _HOST, side_effect=True)


def _external() -> None:
    _define(
        Category.EXTERNAL,
        "custom-call",
        (0, None),
        _must("custom_call_target", codecs.string("custom_call_target")),
        _may("window", codecs.WINDOW),
        _may("conv_dims", codecs.CONV),
        _FEATURES,
        _BATCHES,
        _PRECISION,
        _may("operand_layout_constraints", codecs.verbatim("operand_layout_constraints")),
        _may("custom_call_has_side_effect", codecs.boolean("custom_call_has_side_effect"), False),
        _ALIASES,
        _may("padding_type", codecs.verbatim("padding_type")),
        _may("literal", codecs.verbatim("literal")),
        _may("schedule", codecs.word("schedule", ("SCHEDULE_NONE", "SCHEDULE_LATEST", "SCHEDULE_EARLIEST"))),
        _may("api_version", codecs.word("api_version", API_VERSIONS)),
        called=("called_computations",),
    )
    config = codecs.string
    _define(Category.EXTERNAL, "infeed", 1, _may("infeed_config", config("infeed_config")), side_effect=True)
    _define(
        Category.EXTERNAL,
        "outfeed",
        2,
        _may("outfeed_config", config("outfeed_config")),
        _may("outfeed_shape", codecs.verbatim("outfeed_shape")),
        side_effect=True,
    )


for _fill in (
    _inputs,
    _elementwise,
    _movement,
    _reductions,
    _products,
    _indexed,
    _control,
    _random,
    _collectives,
    _asynchronous,
    _external,
):
    _fill()


TRANSCENDENTAL = frozenset(name for name, info in OPCODES.items() if _ACCURACY in info.specs)
"""Functions of one float or complex number."""


def unknown_opcode(name: str) -> str:
    return f"unknown opcode {name!r}{close_to(name, OPCODES)}"


CARRIED = frozenset({"statistics", "origin", "parameter_replication"})
"""Keys of attributes that any instruction may have, and nothing here reads."""


def call_keys(instruction: HloInstruction) -> tuple[str, ...]:
    """Keys of the text whose values name the computations that an instruction calls, in order."""
    if instruction.opcode == "custom-call":
        return ("called_computations", "to_apply")
    if instruction.opcode == "conditional" and instruction.operands[0].shape.dtype == "pred":
        return ("true_computation", "false_computation")
    return OPCODES[instruction.opcode].called
