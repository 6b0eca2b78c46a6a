"""The IR of mpmd: MLIR, through the bindings and the `mpmd` dialect in jaxlib.

    module = ir.parse(text)
    for f in ir.funcs(module):
        for fragment in ir.fragments(f):
            print(fragment.mesh, fragment.origins, fragment.inputs)

Passes read with the functions of `query`, change with those of `edit`, and never call MLIR's
own mutators: those crash the process when misused, these raise.
"""

# fmt: off
# isort: off
from jax.extend.mlir.dialects import sdy, stablehlo
from jax.extend.mlir.ir import (
    ArrayAttr, Attribute, Block, BoolAttr, ComplexType, DenseI64ArrayAttr, DictAttr, FlatSymbolRefAttr,
    FloatAttr, FunctionType, InsertionPoint, IntegerAttr, IntegerType, Location, MLIRError, Module,
    RankedTensorType, StringAttr, Type, TypeAttr, UnitAttr, Value,
)
from jax.extend.mlir.ir import OpView as Op

from mpmd.ir.context import context, line_locations, op_text, to_text
from mpmd.ir.query import edits, forget_edits
from mpmd.ir.edit import (
    after, append_arg, at_end, at_start, before, change_args, clone, clone_body, clone_with, create, erase,
    erase_args, make_fragment, make_transfer, move_after, move_before, move_body, move_to_start, rebuild,
    reorder, replace, replace_uses, replace_uses_in, return_types_changed, set_operand, set_type, take_bodies,
)
from mpmd.ir.effects import (
    EFFECT_MARKS, effect_marks, is_duplicable, is_movable, is_ordered, is_side_effect_free, is_token,
    is_trivially_dead,
)
from mpmd.ir.context import free_erased
from mpmd.ir.edit import mlir_problem, run_mlir, run_mlir_alone
from mpmd.ir.ops import (
    Assign, Broadcast, Call, For, Fragment, FragmentCall, Func, FuncCall, NamedComputation, NamedTensor,
    Reduce, Return, Transfer, Unassign, attribute_dicts, entries_of, i64, put, put_attribute_dicts,
)
from mpmd.ir.query import (
    arg_index, fragments, funcs, is_constant, is_unused, module_of, ops, producer,
    read_by, result_index, comes_before, symbol_table, users, uses, walk,
)
from mpmd.ir.query import name_of, parse
from mpmd.ir.types import MeshTensor, Origin, TopologyAttr
