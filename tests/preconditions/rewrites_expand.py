"""Expanders: operations that become others."""

from __future__ import annotations

from tests.preconditions import RowsOf

_EXPAND = "mpmd/compile/passes/expand"
_LEFT = "tests/unit/compile/passes/test_left_alone.py::test_a_pass_leaves_it_alone"
_DIRECTED = "tests/property/test_directed_rewrites.py::test_an_expander_keeps_the_numbers"
_SAYS = "tests/property/test_hlo_passes.py::test_an_expander_says_what_the_operation_means"
_NARROW = "tests/unit/compile/passes/test_narrow.py"
_NATIVE = "tests/differential/test_native_operations.py"
_ORDER = "within rounding: XLA leaves the order of sums open, too"
_row = RowsOf(_EXPAND, _LEFT)
_directed = RowsOf(_EXPAND, _DIRECTED)
_tested = RowsOf(_EXPAND)

_REDUCTIONS = (
    _row(
        "reductions.py:_is_better",
        "of equal values the smaller place counts",
        "place == min(k for",
        "place >= min(k for",
        "the last of equal values",
        "within rounding: of zeros of both signs, which are equal, the value may be the other one",
    ),
    _row(
        "reductions.py:_is",
        "a NaN is larger and smaller than all numbers",
        '*([np.nan] if value.info.kind == "float" else [])',
        "",
        "a maximum that knows no NaN",
    ),
    _row(
        "reductions.py:_only_compares",
        "values are not compared in total order, where zeros and NaN differ",
        "total or ",
        "",
        "a maximum in total order",
    ),
    _row(
        "reductions.py:_only_compares",
        "the reducer only compares: it is known by its results for each order",
        "instruction.opcode not in _ORDERS",
        "False",
        "the square of a maximum",
    ),
    _directed(
        "reductions.py:_rewrite",
        "the place of a NaN is found, which equals nothing",
        'x.shape.info.kind == "float"',
        "False",
        "places of maxima",
    ),
    _row(
        "windows.py:ReduceWindowRewriter._scan",
        "the initial value is neutral: it fills what moves in",
        "not is_identity(opcode, init) or ",
        "",
        "a running sum from one",
        _ORDER,
    ),
    _row(
        "windows.py:ReduceWindowRewriter._scan",
        "the operation is associative",
        "reducer(site.at.to_apply) if count == 1",
        "site.at.to_apply.root.opcode if count == 1",
        "a running double",
    ),
    _row(
        "windows.py:ReduceWindowRewriter._scan",
        "windows cover all elements before: the result has the dims of the operand",
        " or x.shape.logical is not site.shape.logical",
        "",
        "windows that are not all before",
    ),
    _row(
        "windows.py:_running_dim",
        "they are padded on one side",
        " or sides not in ((n - 1, 0), (0, n - 1))",
        "",
        "windows that reach to both sides",
    ),
    _row(
        "windows.py:_running_dim",
        "windows are at each element, which are not spread, and have no holes",
        "w.stride != 1 or w.lhs_dilation != 1 or w.rhs_dilation != 1",
        "False",
        "windows at every other place of spread elements",
    ),
    _row(
        "windows.py:_running_dim",
        "one dim is summed along",
        "running is not None or ",
        "",
        "running sums along two dims",
    ),
    _directed(
        "reductions.py:_joined",
        "neighbours are joined in their order: the computation need only be associative",
        "[*even, *odd]",
        "[*odd, *even]",
        "reductions of pairs",
        _ORDER,
    ),
    _directed(
        "reductions.py:_joined",
        "elements that wait for a neighbour come last",
        "[*last, *waiting]",
        "[*waiting, *last]",
        "reductions of pairs",
        _ORDER,
    ),
    _directed(
        "reductions.py:_expand",
        "the initial value takes part, first",
        "[*begin, *values]",
        "[*values, *begin]",
        "reductions of pairs",
    ),
    _directed(
        "windows.py:_Windowed._joined",
        "padding is ignored: it takes part in no combination",
        "both[k], a[k]",
        "both[k], both[k]",
        "windows of pairs",
        _ORDER,
    ),
    _directed(
        "windows.py:_Windowed.reduce",
        "a part of the window begins where those before it end",
        "done * window.rhs_dilation",
        "0",
        "windows of pairs",
    ),
    _directed(
        "windows.py:_expand",
        "a window over nothing but padding is the initial value",
        "windowed.there is not None",
        "False",
        "windows of pairs",
    ),
    _row(
        "windows.py:SelectAndScatterExpander._expand",
        "updates are added",
        ' or reducer(site.at.called[1]) != "add"',
        "",
        "a largest gradient of pooling",
        _ORDER,
    ),
    _row(
        "windows.py:SelectAndScatterExpander._expand",
        "windows have no holes",
        "w.lhs_dilation == w.rhs_dilation == 1",
        "w.lhs_dilation == 1",
        "the gradient of pooling with holes",
    ),
    _row(
        "windows.py:SelectAndScatterExpander._expand",
        "padding removes nothing from the sides",
        " and min(w.pad_low, w.pad_high) >= 0",
        "",
        "the gradient of pooling of a part",
    ),
    _directed(
        "windows.py:_winner",
        "padding wins nowhere",
        'build.full(True, "pred", counts) if inside is None else _seen(site, inside, offset)',
        'build.full(True, "pred", counts)',
        "gradients of pooling",
    ),
    _directed(
        "bit_patterns.py:_order",
        "floats are in total order: -0 before 0, NaN at the ends",
        '"TOTALORDER" if key.info.kind == "float" else None',
        "None",
        "largest elements",
    ),
    _directed(
        "bit_patterns.py:_decompose",
        "equal values keep their order",
        "build.iota(site.shape.elements[1].dtype, x.shape.dims, dim)",
        'build.add("negate", build.iota(site.shape.elements[1].dtype, x.shape.dims, dim))',
        "largest elements",
    ),
)
_INDICES = (
    _directed(
        "indexing.py:_wide_enough",
        "the type of the indices counts the positions of a batch",
        'largest < 1 << (info.bits - (info.kind == "signed"))',
        "True",
        "gathers",
    ),
    _tested(
        "indexing.py:as_list",
        "positions follow in the order of the batch's dims",
        "dim - (dim > vector_dim)",
        "0 * dim",
        f"{_SAYS}[hlo-scatter-simplifier]",
    ),
    _directed(
        "indexing.py:_normal_scatter",
        "updates keep the order of their index vectors",
        "site.build.transpose(update, order)",
        'site.build.add("reverse", site.build.transpose(update, order), dimensions=(0,))',
        "scatters",
    ),
    _tested(
        "indexing.py:_normal_gather",
        "dims of the slices go back to their places",
        "to.index(d) for d in range(site.shape.rank)",
        "to[d] for d in range(site.shape.rank)",
        f"{_SAYS}[hlo-gather-simplifier]",
    ),
)
_CONVOLUTIONS = (
    _row(
        "products.py:_as_dot_of_patches",
        "windows do not overlap",
        "not (_are_adjacent(w) or _are_interleaved(w, count))",
        "False",
        "windows of a convolution that overlap",
        _ORDER,
    ),
    _row(
        "products.py:_as_dot_of_patches",
        "nothing is padded in front",
        "w.pad_low or ",
        "",
        "a convolution of padding",
    ),
    _row(
        "products.py:_as_dot_of_patches",
        "nothing is padded behind",
        "w.pad_high > 0 or ",
        "",
        "a convolution of padding behind",
    ),
    _row(
        "products.py:_as_dot_of_patches",
        "elements of the image are not spread",
        "w.lhs_dilation != 1 or ",
        "",
        "a convolution of spread elements",
    ),
    _row(
        "products.py:_as_dot_of_patches",
        "the kernel is not reversed",
        " or w.reversed",
        "",
        "a convolution backwards",
    ),
    _row(
        "products.py:_has_no_groups",
        "features are in one group",
        'attributes.get("feature_group_count", 1) == ',
        "",
        "a convolution of groups",
    ),
    _row(
        "products.py:_has_no_groups",
        "the batch is in one group",
        'attributes.get("batch_group_count", 1) == 1',
        "1",
        "a convolution of groups of the batch",
    ),
    _directed(
        "products.py:_decompose",
        "both factors have their summed dims in the same order",
        "(*dims.rhs_batch, *dims.rhs_contracting, *free_b)",
        "(*dims.rhs_batch, *sorted(dims.rhs_contracting), *free_b)",
        "products",
        _ORDER,
    ),
)
ROWS = (*_REDUCTIONS, *_INDICES, *_CONVOLUTIONS)

ALWAYS: dict[str, str] = {}
