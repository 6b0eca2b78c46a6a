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
_planned = RowsOf("mpmd/compile/kernels/planning")
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
        "online.py:RowReductions._subtracted",
        "exponentials of an online sum are at most 1, also of rows that have seen nothing yet",
        "fits and self._is_below(value, reduced.arg, where)",
        "fits",
        f"{_ATTENTION}::test_exponentials_of_online_sums_are_at_most_1[-200.0-False]",
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
        "kernels.py:_long_rows",
        "all threads have read the label's element before one stores",
        'write.line("tl.debug_barrier()")',
        "pass",
        f"{_PRINTED}::test_a_long_loss_is_two_iterations_over_its_row",
    ),
    _plans(
        "decisions.py:_compared",
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
    _program(
        "target.py:GpuTarget._fits",
        "a tile's values have registers",
        "not cubin.stack_bytes and",
        "",
        f"{_GPU}/test_tiles.py::test_the_largest_tile_that_fits_is_taken",
    ),
    _program(
        "target.py:GpuTarget._fits",
        "a program of it has the shared memory that it needs",
        "cubin.shared_bytes <= self.gpu.shared_bytes",
        "True",
        f"{_GPU}/test_tiles.py::test_the_largest_tile_that_fits_is_taken",
    ),
    _program(
        "launches.py:with_smaller_tiles",
        "more programs, as many times as the tile became smaller",
        "step.grid * made.grid // kernel.grid",
        "made.grid",
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
        "capture.py:_CaptureEmitter._capture",
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
        "driver.py:GpuDriver.kernel",
        "a kernel is loaded before its first launch",
        'self.call("cuFuncGetAttribute", ctypes.byref(ctypes.c_int()), _REGISTERS, found, what=what)',
        "pass",
        f"{_GPU}/test_backend.py::test_every_call_of_loading_fails_once",
    ),
    _program(
        "backend.py:NativeGpuBackend.compile",
        "a product that the library lacks is a kernel, and not a reason to leave the fragment to XLA",
        "except OtherTargetError as error",
        "except ZeroDivisionError as error",
        f"{_GPU}/test_backend.py::test_a_product_that_the_library_lacks_is_a_kernel",
    ),
)
ROWS = _KERNELS + _ATTENTION_LOOPS + _ROWS_OF_LABELS + _PRODUCTS + _PROGRAMS
ALWAYS: dict[str, str] = {}
