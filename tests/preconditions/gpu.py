"""Kernels, products and programs of GPUs."""

from __future__ import annotations

from tests.preconditions import RowsOf

_GPU = "tests/unit/compile/backends/native_gpu"
_BOUNDS = f"{_GPU}/triton/test_bounds.py"
_ATTENTION = f"{_GPU}/triton/test_attention.py"
_PRINTED = f"{_GPU}/triton/test_kernels.py"
_PICKING = "tests/unit/compile/kernels/test_picking.py"
_plans = RowsOf("mpmd/compile/kernels")
_kernel = RowsOf("mpmd/compile/backends/native_gpu/triton")
_program = RowsOf("mpmd/compile/backends/native_gpu")
_call = RowsOf("mpmd/compile/backends")
_MESHES = f"{_GPU}/test_meshes.py"
_CLUSTERS = "tests/unit/compile/backends/mixed/test_clusters.py"
_planned = RowsOf("mpmd/compile/kernels/planner")
_DIGITS = (
    "within rounding: sums of products have no order, and factors have the digits that the program requires"
)

_KERNELS = (
    _kernel(
        "tiling.py:TileSteps.fill",
        "without a mask all points of all tiles exist",
        "self.points > 0 and not self.points % self.side",
        "True",
        f"{_BOUNDS}::test_tiles_of_programs_that_share_points_have_each_point_once",
    ),
    _kernel(
        "tiling.py:TileSteps.bounds",
        "the tiles of the last program end with the points",
        'if self.even else f"tl.minimum({self.part}, {self.points} - {begin})"',
        "",
        f"{_BOUNDS}::test_tiles_of_programs_that_share_points_have_each_point_once",
    ),
    _kernel(
        "tiling.py:PlanTiling.index_type",
        "positions have room for factors, which the plan does not list",
        "self.span, plan.size",
        "plan.size",
        f"{_BOUNDS}::test_positions_in_large_arrays_are_wide[a long cache]",
    ),
    _kernel(
        "matrices.py:MatrixWriter.element",
        "a position is wide before it is multiplied",
        '".to(tl.int64)" if self.tiling.index_type == "int64" else ""',
        '""',
        f"{_BOUNDS}::test_a_row_of_a_large_factor_is_far_from_the_first",
    ),
    _kernel(
        "matrices.py:MatrixWriter.pieces",
        "a piece has columns, and values, of its own",
        "self._known = known",
        "pass",
        f"{_GPU}/test_products.py::test_pieces_of_a_tile_are_written_over_what_they_read",
    ),
    _kernel(
        "online.py:RowReductions._subtracted",
        "exponentials of an online sum are at most 1, also of rows that have seen nothing yet",
        "fits and self._is_below(value, reduced.arg, where)",
        "fits",
        f"{_ATTENTION}::test_exponentials_of_online_sums_are_at_most_1[-200.0-False]",
    ),
    _kernel(
        "online.py:RowReductions._is_weight",
        "a maximum is replaced only where it is not finite, or a total's reciprocal may be infinite",
        "finite and shift.args[1] == top",
        "shift.args[1] == top",
        f"{_GPU}/triton/test_totals.py::test_a_maximum_is_replaced_only_where_it_is_not_finite[above-0]",
    ),
    _kernel(
        "online.py:RowReductions._subtracted",
        "they subtract what grows with the maximum",
        "below and self._grows_with(shift, top)",
        "below",
        f"{_ATTENTION}::test_what_falls_as_the_maximum_grows_is_not_subtracted_before_the_last_key",
    ),
    _kernel(
        "attention.py:_QueryKernel._check_guards",
        "a filler is a number of the kernel's language",
        'literal(number, "f32") for',
        "repr(number) for",
        f"{_ATTENTION}::test_fillers_are_numbers_of_the_kernel_s_language",
    ),
)
_SEEN = f"{_ATTENTION}::test_blocks_without_a_mask_are_seen_by_all_queries[96-96-0]"
_ATTENTION_LOOPS = (
    _kernel(
        "attention.py:_QueryKernel.kernel",
        "keys without a mask are seen by the first query of the block",
        "{first} + {offset + 1}",
        "{first} + {offset + self.blocks.outer}",
        _SEEN,
    ),
    _kernel(
        "attention.py:_KeyKernel._first",
        "queries without a mask see the last key of the block",
        "{outer - 1 - triangle.offset}",
        "{-triangle.offset}",
        _SEEN,
    ),
    _kernel(
        "attention_writer.py:AttentionWriter.inner_tiles",
        "masks are known where all queries of the program see all keys, or the other way round",
        "self.this.seen if part.seen else {}",
        "self.this.seen",
        _SEEN,
    ),
    _kernel(
        "attention_writer.py:AttentionWriter._tile",
        "a tile that is there is of the same array",
        "self.this.plan.array_of(name), ",
        "",
        f"{_ATTENTION}::test_one_iteration_serves_each_kernel",
    ),
)
_ROWS_OF_LABELS = (
    _plans(
        "picking.py:_Picking.place",
        "a sum of one element is zero at the others",
        "not self._is_zero(other)",
        "False",
        f"{_PICKING}::test_other_sums_stay[not zero]",
    ),
    _plans(
        "picking.py:_Picking._equal_to",
        "one place of a row is equal to the label",
        'node.op not in ("and", "compare-eq")',
        'node.op not in ("and", "or", "compare-eq", "compare-lt")',
        f"{_PICKING}::test_other_sums_stay[less]",
    ),
    _plans(
        "picking.py:_Picking._is_position",
        "the type of the positions holds all of them",
        "self.plan.extents[self.along] - 1 <= integer_range(node.dtype)[1]",
        "True",
        f"{_PICKING}::test_positions_that_wrap_are_met_twice",
    ),
    _plans(
        "picking.py:with_picked_elements",
        "a reduction lies between the reading of an element and what may take its memory",
        "places and others",
        "places",
        f"{_PICKING}::test_an_element_is_read_before_others_store_only_if_a_reduction_is_between",
    ),
    _plans(
        "picking.py:_Picking._picked",
        "a label outside of the row picks nothing",
        'build.apply("and", *inside)',
        "inside[0]",
        f"{_PICKING}::test_a_sum_of_one_element_is_that_element[select]",
    ),
    _kernel(
        "triton_kernels.py:_long_rows",
        "all threads have read the label's element before one stores",
        'write.line("tl.debug_barrier()")',
        "pass",
        f"{_PRINTED}::test_a_long_loss_is_two_iterations_over_its_row",
    ),
    _plans(
        "picking.py:_compared",
        "no position wraps in its type",
        "low < smallest or largest < high",
        "False",
        "tests/unit/compile/kernels/test_decisions.py::test_positions_that_wrap_are_on_both_sides",
    ),
)
_PRODUCTS = (
    _planned(
        "dots.py:_is_exact",
        "an algorithm decides before the precision does",
        'algorithm != "unset"',
        "False",
        f"{_GPU}/test_launches.py::test_products_of_f32_have_the_digits_that_were_asked_for",
        _DIGITS,
    ),
    _program(
        "products.py:library_calls",
        "the library has the type of the result for the type of the factors",
        "result.dtype not in LIBRARY_DTYPES.get(plan.a.dtype, ())",
        "False",
        f"{_GPU}/test_products.py::test_products_of_f64_that_are_stored_as_f32_are_a_call_and_a_kernel",
    ),
    _program(
        "products.py:library_calls",
        "the library has an algorithm",
        "descriptor in without",
        "False",
        f"{_GPU}/test_products.py::test_a_product_that_the_library_lacks_is_a_kernel_of_ours",
    ),
    _kernel(
        "products.py:with_long_rows",
        "the right factor is the same along the dim that becomes the rows",
        "if not step]",
        "if True]",
        f"{_GPU}/test_products.py::test_tokens_are_the_rows_of_heads_that_share_their_keys",
    ),
    _kernel(
        "products.py:_with_dims_exchanged",
        "the sums of the epilogue are those of the product's new order",
        "isinstance(node, Load) and node.operand == sums",
        "False",
        f"{_GPU}/test_products.py::test_products_with_other_rows_have_the_same_results",
    ),
    _program(
        "products.py:library_calls",
        "it adds to one matrix, whose rows are contiguous",
        "(adds or shifts) and (d.transposed or math.prod(plan.batch) > 1)",
        "False",
        f"{_GPU}/test_products.py::test_the_library_adds_to_rows_of_one_matrix_alone",
        _DIGITS,
    ),
    _program(
        "products.py:stored_sums",
        "one matrix and one vector are added, and nothing else",
        "if not counts[0] or max(counts) > 1 or sum(counts) != len(terms):",
        "if not counts[0]:",
        f"{_GPU}/test_products.py::test_other_additions_are_kernels[kinds0]",
        _DIGITS,
    ),
    _program(
        "handler.py:_HandlerEmitter._multiply_and_shift",
        "no other thread changes the vector's address before the call",
        'leave_if(f.compare("eq", f.atomic_exchange(lock, 1), free))',
        'leave_if(f.compare("ne", f.atomic_exchange(lock, 1), constant(2, "i64")))',
        f"{_GPU}/test_handler.py::test_a_product_s_vector_is_its_own_until_it_was_called",
    ),
    _program(
        "tuning/tune.py:_Tuning.times",
        "a way that is taken has the results of the kernel by rules",
        "and not alike(run.results(choice), own)",
        "and False",
        f"{_GPU}/tuning/test_tune.py::test_a_way_with_other_results_is_left_out",
    ),
    _program(
        "target.py:GpuTarget.fits",
        "a tile's values have registers",
        "not cubin.stack_bytes and",
        "",
        f"{_GPU}/test_tiles.py::test_the_largest_tile_that_fits_is_taken",
    ),
    _program(
        "target.py:GpuTarget.fits",
        "a program of it has the shared memory that it needs",
        "cubin.shared_bytes <= self.gpu.shared_bytes",
        "True",
        f"{_GPU}/test_tiles.py::test_the_largest_tile_that_fits_is_taken",
    ),
    _program(
        "launches.py:with_smaller_tiles",
        "more programs, as many times as the tile became smaller",
        "step.grid * small.grid // kernel.grid",
        "small.grid",
        f"{_GPU}/test_tiles.py::test_launches_of_one_kernel_have_programs_by_their_own_batch",
    ),
    _kernel(
        "products.py:_tiles_of",
        "programs of the widest tile are as many as there are processors",
        "below * wider >= units and",
        "",
        f"{_GPU}/test_tiles.py::test_the_first_tile_keeps_the_device_busy_and_adds_no_columns",
    ),
    _kernel(
        "products.py:_tiles_of",
        "it adds no columns of nothing",
        "and 2 * wider <= -(-plan.n // 128)",
        "",
        f"{_GPU}/test_tiles.py::test_the_first_tile_keeps_the_device_busy_and_adds_no_columns",
    ),
    _program(
        "loading.py:_alignment",
        "parameters and results begin at 16 bytes alone",
        '("parameter", "result")',
        "()",
        f"{_GPU}/test_backend.py::test_parameters_are_promised_to_begin_at_16_bytes",
    ),
)
_PROGRAMS = (
    _program(
        "calls.py:_CaptureEmitter._capture",
        "a stream that captures has no work of others",
        'self.calls.word(f, "capturing")',
        'f.arguments["stream"]',
        f"{_GPU}/test_handler.py::test_what_others_enqueue_while_a_call_is_captured_is_not_captured",
    ),
    _program(
        "loading.py:LoadedGpuProgram.__init__",
        "a finalizer does not wait for the GPU",
        "gpu.driver.leave, self._undo",
        "self._undo.close",
        f"{_GPU}/test_handler.py::test_a_call_is_captured_when_its_addresses_come_again",
    ),
    _program(
        "cuda_driver.py:GpuDriver.kernel",
        "a kernel is loaded before its first launch",
        'self.call("cuFuncGetAttribute", ctypes.byref(ctypes.c_int()), _REGISTERS, function, what=what)',
        "pass",
        f"{_GPU}/test_backend.py::test_every_call_of_loading_fails_once",
    ),
    _program(
        "launches.py:_LaunchLowering.steps",
        "a flag is left out only if it is known how often the body runs",
        "() if thunk.trips is not None else",
        "() if True else",
        f"{_GPU}/test_launches.py::test_loops_and_branches_keep_their_steps",
    ),
    _program(
        "launches.py:LaunchProgram.is_capturable",
        "no step waits for a number on the device",
        "count is not None and ",
        "",
        f"{_GPU}/test_launches.py::test_programs_that_wait_for_a_flag_are_no_graph",
    ),
    _program(
        "backend.py:NativeGpuBackend.compile",
        "a product that the library lacks is a kernel, and not a reason to leave the fragment to XLA",
        "except OtherTargetError as error",
        "except ZeroDivisionError as error",
        f"{_GPU}/test_backend.py::test_a_product_that_the_library_lacks_is_a_kernel",
    ),
)
_DEVICES = (
    _call(
        "ffi/custom_call.py:_emit_by_device",
        "a call enters the handler of its device, whose state no other has",
        "{frame.device()}",
        "0",
        f"{_MESHES}::test_a_program_knows_the_number_of_its_device_in_the_mesh",
    ),
    _call(
        "ffi/custom_call.py:_emit_by_device",
        "the device has loaded the program",
        'frame.fail_if(missing, "mpmd_device",',
        "str(",
        f"{_MESHES}::test_a_program_is_not_called_on_a_device_that_has_not_loaded_it",
    ),
    _program(
        "loading.py:LoadedGpuProgram.__init__",
        "a program computes with the number of its device in the mesh, as arrays are sharded",
        '"device": device',
        '"device": 0',
        f"{_MESHES}::test_a_program_knows_the_number_of_its_device_in_the_mesh",
    ),
    _program(
        "backend.py:NativeGpuBackend.of",
        "one machine code runs on all GPUs of a mesh",
        "all(other == first for other in others)",
        "True",
        f"{_MESHES}::test_the_gpus_of_a_mesh_are_of_one_kind",
    ),
    _program(
        "backend.py:NativeGpuBackend.register",
        "the arena has room for the workspace of each device",
        "max(p.arena_bytes for p in loaded.values())",
        "loaded[ordinals[0]].arena_bytes",
        f"{_MESHES}::test_the_arena_has_room_for_the_workspace_of_each_device",
    ),
    _call(
        "mixed/backend.py:MixedBackend.relocate",
        "machine code moves to GPUs of its kind alone",
        "executable.target != self.native.target",
        "False",
        f"{_MESHES}::test_a_program_is_compiled_again_for_a_mesh_of_another_kind",
    ),
    _call(
        "mixed/backend.py:prepared",
        "XLA is given collectives of one array",
        "combined=False",
        "combined=True",
        f"{_MESHES}::test_collectives_of_several_arrays_are_combined_by_xla_alone",
    ),
    _call(
        "mixed/levels.py:levels_of",
        "the first state of a loop is arrays, also where it is filled with a constant",
        "[*results, *states]",
        "results",
        f"{_MESHES}::test_a_loop_with_a_collective_is_xla_s_and_its_body_is_ours",
    ),
    _call(
        "mixed/clusters.py:divide",
        "XLA sees how its loop counts, or it would wait for a flag in every iteration",
        "counter is not None",
        "False",
        f"{_MESHES}::test_a_loop_with_a_collective_is_xla_s_and_its_body_is_ours",
    ),
    _call(
        "mixed/levels.py:_copied",
        "parts make again only instructions that have native code",
        "*refused, ",
        "",
        f"{_CLUSTERS}::test_refused_instructions_are_in_no_native_part",
    ),
    _call(
        "mixed/levels.py:_sink",
        "what moves to a later part is not needed before",
        "min(later) - min(later)",
        "max(later) - max(later)",
        f"{_CLUSTERS}::test_native_work_waits_for_its_first_reader_if_it_then_reads_no_more",
    ),
    _call(
        "mixed/levels.py:_beside_collectives",
        "what a collective waits for is before it, with all that it needs",
        "needed.update(producer for producer, _ in reads[instruction])",
        "pass",
        f"{_CLUSTERS}::test_products_that_a_collective_does_not_wait_for_are_a_part_of_their_own[all-reduce]",
    ),
    _call(
        "jax_function.py:traced_call",
        "native parts get one element a byte",
        "map(_unpacked, arrays)",
        "arrays",
        f"{_CLUSTERS}::test_elements_of_less_than_a_byte_pass_between_parts",
    ),
    _call(
        "native_cpu/backend.py:NativeCpuBackend.may_split",
        "parts that wait for other devices run in one order on all",
        "mesh.size == 1",
        "True",
        "tests/unit/compile/test_refusals.py::test_parts_that_wait_for_other_devices_are_not_split",
    ),
)
ROWS = _KERNELS + _ATTENTION_LOOPS + _ROWS_OF_LABELS + _PRODUCTS + _PROGRAMS + _DEVICES
ALWAYS: dict[str, str] = {}
