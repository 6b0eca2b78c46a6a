"""Programs of several devices: the part of each, and what devices exchange."""

from __future__ import annotations

from tests.preconditions import RowsOf

_SPMD = "mpmd/compile/lowering/spmd"
_UNIT = "tests/unit/compile/lowering/spmd"
_CUT = "tests/unit/compile/passes/collectives/test_spmd_partitioner.py"
_PASSES = "mpmd/compile/passes"
_SUMS = "within rounding: sums over devices have the same terms, added in another order, as XLA may too"
_local = RowsOf(_SPMD, f"{_UNIT}/test_local_parts.py::test_each_device_has_its_part")
_tested = RowsOf(_SPMD)
_REFUSED = f"{_CUT}::test_what_cannot_be_partitioned_is_refused"
_cut = RowsOf(f"{_PASSES}/collectives")
_cut_refused = RowsOf(f"{_PASSES}/collectives", _REFUSED)

_MOVEMENT = (
    _local(
        "local_parts.py:constant",
        "a constant that is one number everywhere has no other",
        "value.size > 1 and any(value.strides)",
        "False",
        "a constant of several numbers",
    ),
    _local(
        "local_parts.py:iota",
        "a count begins anew only along dims that are whole",
        "if not sharding[dim]:",
        "if True:",
        "a count along a sharded dim",
    ),
    _tested(
        "local_parts.py:iota",
        "numbers are added as integers: a narrow float would be rounded twice",
        'shape.dtype if shape.info.is_integral else "s32"',
        "shape.dtype",
        f"{_UNIT}/test_spmd.py::test_a_count_is_rounded_once_to_a_narrow_type",
    ),
    _local(
        "local_parts.py:broadcast",
        "a dim of the operand is sharded as the result's",
        "c == result[d] if",
        "True if",
        "a broadcast along a sharded dim",
    ),
    _local(
        "local_parts.py:transpose",
        "shardings move with their dims",
        'tuple(sharding[d] for d in site.required("permutation")) == result',
        "True",
        "a transpose whose sharding stays",
    ),
    _local(
        "local_parts.py:reshape",
        "each axis shardeds the same elements before and after",
        "before == _places(spread.whole.shapes[0], spread.results[0])",
        "True",
        "a reshape of other parts",
    ),
    _local(
        "local_parts.py:bitcast_convert",
        "the dims that both have are sharded alike",
        "sharding[:rank] == result[:rank] and ",
        "",
        "bits of other parts",
    ),
    _local(
        "local_parts.py:bitcast_convert",
        "the dim that only one has is whole",
        " and not any((*sharding[rank:], *result[rank:]))",
        "",
        "bits that are spread over the parts",
    ),
    _local(
        "local_parts.py:concatenate",
        "the joined dim is whole",
        ' and not spread.results[0][site.required("dimension")]',
        "",
        "rows joined along a sharded dim",
    ),
    _local(
        "local_parts.py:concatenate",
        "operands and result are sharded alike",
        "alike and ",
        "",
        "joined rows, some of them whole",
    ),
    _local(
        "local_parts.py:reverse",
        "reversed dims are whole",
        ' and not any(sharding[d] for d in site.required("dimensions"))',
        "",
        "a reverse of a sharded dim",
    ),
    _local(
        "local_parts.py:reverse",
        "operand and result are sharded alike",
        "sharding == result and ",
        "",
        "a reverse into other parts",
    ),
    _local(
        "local_parts.py:pad",
        "padded dims are whole",
        " and not any(c and ch for c, ch in zip(sharding, changed))",
        "",
        "a sharded dim padded",
    ),
    _local(
        "local_parts.py:pad",
        "operand and result are sharded alike",
        "sharding == spread.results[0] and ",
        "",
        "a pad into other parts",
    ),
    _local(
        "local_parts.py:slice_locally",
        "dims that are sliced are whole",
        "if (starts[d], limits[d], strides[d]) != (0, sizes[d], 1):",
        "if False:",
        "a part of a sharded dim",
    ),
    _local(
        "local_parts.py:slice_locally",
        "operand and result are sharded alike",
        "spread.operands[0] != result",
        "False",
        "a slice into other parts",
    ),
    _local(
        "local_parts.py:dynamic_slice",
        "dims that are sliced are whole",
        "if sizes[d] != spread.shapes[0].dims[d]:",
        "if False:",
        "a part of a sharded dim, that begins somewhere",
    ),
    _local(
        "local_parts.py:dynamic_slice",
        "operand and result are sharded alike",
        "sharding != spread.results[0]",
        "False",
        "a part that goes to other devices",
    ),
    _local(
        "local_parts.py:dynamic_update_slice",
        "dims that are updated in part are whole",
        "any(axes and n != m for axes, n, m in sizes)",
        "False",
        "a part of a sharded dim changed",
    ),
    _local(
        "local_parts.py:dynamic_update_slice",
        "array, update and result are sharded alike",
        "if not value == update == spread.results[0]:",
        "if False:",
        "a change that lies elsewhere",
    ),
)
_SUMMED = (
    _local(
        "spmd_rules.py:spread_rule",
        "a collective joins the partial results of the devices",
        " or _stays_partial(site)",
        "",
        "products of updates that nothing joins",
    ),
    _local(
        "spmd_rules.py:of_elements",
        "operands and results are sharded alike",
        "if len(shardings) == 1 else None",
        "",
        "a sum of arrays in other parts",
    ),
    _local(
        "spmd_rules.py:of_values",
        "a result is sharded as its operand is",
        " if spread.operands == spread.results else None",
        "",
        "a barrier before other parts",
    ),
    _local(
        "spmd_rules.py:dot",
        "contracted and batch dims of both factors are sharded alike",
        "if any(a[i] != b[j] for i, j in pairs):",
        "if False:",
        "a product whose sums lie elsewhere",
    ),
    _local(
        "spmd_rules.py:dot",
        "the result is sharded as the free dims of the factors",
        "if tuple(expected) != spread.results[0]:",
        "if False:",
        "a product in other parts",
    ),
    _local(
        "spmd_rules.py:dot",
        "sums over a sharded dim are partial",
        "if any(a[i] for i in dims.lhs_contracting):",
        "if False:",
        "a product of parts",
        _SUMS,
    ),
    _local(
        "spmd_rules.py:reduce",
        "the result is sharded as the dims that stay",
        " or any(r != kept for r in spread.results)",
        "",
        "a reduction into other parts",
    ),
    _local(
        "spmd_rules.py:reduce",
        "a reduction of a sharded dim is partial",
        "if not any(sharding[d] for d in dims):",
        "if True:",
        "a sum of parts",
        _SUMS,
    ),
    _local(
        "spmd_rules.py:reduces_to",
        "each device begins with a number that the reduction takes for nothing",
        "return opcode if np.all(np.asarray(literal) == neutral) else None",
        "return opcode",
        "a sum of parts, from a number",
    ),
    _local(
        "spmd_rules.py:reduces_to",
        "or it takes a value twice for a value once",
        "opcode in _IDEMPOTENT",
        'opcode in (*_IDEMPOTENT, "multiply")',
        "a product of parts of rows, from a number",
    ),
    _local(
        "spmd_rules.py:along_other_dims",
        "the dims along which it acts are whole",
        "if any(sharding[d] for d in dims):",
        "if False:",
        "a sort along a sharded dim",
    ),
    _local(
        "spmd_rules.py:_window_dims",
        "dims with a window of more than an element are among them",
        "return [d for d in range(rank) if not plain_dim[d]]",
        "return []",
        "windows along a sharded dim",
    ),
    _local(
        "spmd_rules.py:convolution",
        "only images and features of the result are sharded",
        " or any(others)",
        "",
        "an image whose features are sharded",
    ),
    _local(
        "spmd_rules.py:convolution",
        "the result is sharded as they are",
        " or tuple(wanted) != result",
        "",
        "images in other parts",
    ),
    _local(
        "spmd_rules.py:convolution",
        "features are not in groups",
        "grouped or ",
        "",
        "features in groups",
    ),
)
_INDEXED = (
    _local(
        "local_parts.py:gather",
        "an index of a row of another device reads nothing",
        "build.select(mask, gathered, nothing)",
        "gathered",
        "rows of a table",
    ),
    _local(
        "local_parts.py:_Indexed.fits",
        "windows lie as their indices do",
        "counted == [self.index_sharding[d] for d in self.index_dims]",
        "True",
        "rows in other parts than their indices",
    ),
    _local(
        "local_parts.py:_Indexed.fits",
        "a sharded dim is read as a whole",
        " or (axes and self.sizes[d] != self.table[d])",
        "",
        "parts of the rows of a table",
    ),
    _local(
        "local_parts.py:_Indexed.fits",
        "windows are sharded as the dims of the table",
        "of_windows[d] != axes or ",
        "",
        "rows that lie elsewhere",
    ),
    _tested(
        "local_parts.py:_signed",
        "an unsigned index that is out of range stays so",
        'if indices.shape.dtype == f"u{dtype[1:]}":',
        "if False:",
        f"{_UNIT}/test_spmd.py"
        "::test_an_index_out_of_range_means_the_row_that_is_nearest_in_its_own_type[uint32]",
    ),
    _tested(
        "local_parts.py:_neutral",
        "a zero keeps its sign where nothing is added to it",
        'if opcode == "add" and value.shape.info.kind == "float":',
        "if False:",
        f"{_UNIT}/test_spmd.py::test_a_zero_keeps_its_sign_where_a_row_is_read_or_added_to[rows]",
    ),
    _local(
        "local_parts.py:_own_indices",
        "an index of the table is counted from the first row of the device",
        'build.add("subtract", indices, spread_out(low))',
        "indices",
        "updates of a table",
    ),
    _local(
        "local_parts.py:_once",
        "the table's values count once, not once for each device",
        'if opcode not in ("add", "multiply"):',
        "if True:",
        "updates of a table, each by one device",
    ),
    _local(
        "local_parts.py:scatter",
        "the result is sharded as the table",
        " or spread.results[0] != spread.operands[0]",
        "",
        "updates of a table that lies elsewhere",
    ),
    _local(
        "local_parts.py:scatter",
        "the update is a reduction that also joins devices' results",
        "if opcode is None or ",
        'opcode = opcode or "add"\n        if ',
        "updates that no sum joins",
    ),
)
_RESHARDED = (
    _tested(
        "moves.py:_next_move",
        "a dim gets axes only when it has given up its own",
        " and to not in waiting",
        " and to != dim",
        "tests/property/test_directed_devices.py::test_each_device_gets_its_part",
    ),
    _tested(
        "moves.py:_permuted",
        "each part is as large as before",
        "if [parts(a) for a in source] != [parts(a) for a in target]:",
        "if False:",
        "tests/property/test_directed_devices.py::test_each_device_gets_its_part",
    ),
    _tested(
        "moves.py:_rest",
        "axes before the first one that differs stay where they are",
        "axes[common] == others[common]",
        "axes[common] in others",
        "tests/property/test_directed_devices.py::test_each_device_gets_its_part",
    ),
    _tested(
        "moves.py:even",
        "axes divide the dim",
        "() if size % parts(axes) else axes",
        "axes",
        f"{_UNIT}/test_spmd.py::test_dims_that_do_not_divide_stay_whole",
    ),
    _tested(
        "moves.py:groups",
        "devices are in the order of their parts",
        "sorted(group, key=lambda d: place(axes, d))",
        "group",
        f"{_UNIT}/test_spmd.py::test_groups_are_in_the_order_of_the_parts",
    ),
    _tested(
        "shardy.py:_mesh_of",
        "values are on the mesh of the fragment",
        "list(axes_of(mesh).items()) == list(axes.items()) and ",
        "",
        f"{_UNIT}/test_spmd.py::test_a_program_of_another_mesh_is_refused",
    ),
    _tested(
        "spmd_rules.py:all_reduce",
        "a sum over devices follows partial results",
        "if opcode is None:",
        'opcode = opcode or "add"\n    if False:',
        f"{_UNIT}/test_spmd.py::test_a_sum_of_nothing_partial_is_refused",
    ),
    _tested(
        "localise.py:_Localising.manual",
        "a value that is a part of several has a name for each",
        "if value in self.sharding:",
        "if False:",
        f"{_UNIT}/test_spmd.py::test_a_shard_map_returns_what_it_is_given_in_other_parts",
    ),
)
_HLO = (
    _cut_refused(
        "spmd_partitioner.py:parse_sharding",
        "a value is on all devices",
        "if match is None:\n",
        "if match is None:\n        return ()\n    if match is None:\n",
        "a single device",
    ),
    _cut_refused(
        "spmd_partitioner.py:parse_sharding",
        "its sharding names the devices of the program",
        "sorted(ids.reshape(-1).tolist()) != list(range(devices)) or ",
        "",
        "other devices",
    ),
    _cut_refused(
        "spmd_partitioner.py:_strides",
        "the device number grows by strides along each dim",
        "if rebuilt != numbers or any(s.step <= 0 for s in strides):",
        "if False:",
        "no steps",
    ),
    _cut(
        "spmd_partitioner.py:common_mesh",
        "all shardings are of one mesh",
        "if large % small:",
        "if False:",
        f"{_CUT}::test_one_mesh_has_the_axes_of_all_shardings",
    ),
)

ROWS = (*_MOVEMENT, *_SUMMED, *_INDEXED, *_RESHARDED, *_HLO)

ALWAYS: dict[str, str] = {}
