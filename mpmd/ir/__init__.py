"""The IR of mpmd: MLIR, through the bindings and the `mpmd` dialect in jaxlib.

    module = ir.parse(text)
    for f in ir.funcs(module):
        for fragment in ir.fragments(f):
            print(fragment.mesh, fragment.origins, fragment.inputs)

Passes read with what is in `query`, change with what is in `edit` and `fragments`, and never call MLIR's
own mutators: those crash the process when misused, ours raise.
"""

from jax.extend.mlir.dialects import sdy, stablehlo
from jax.extend.mlir.ir import (
    ArrayAttr,
    Attribute,
    Block,
    BoolAttr,
    DenseI64ArrayAttr,
    DictAttr,
    FlatSymbolRefAttr,
    InsertionPoint,
    IntegerAttr,
    IntegerType,
    Location,
    Module,
    RankedTensorType,
    StringAttr,
    Type,
    UnitAttr,
    Value,
)
from jax.extend.mlir.ir import OpView as Op

from mpmd.ir.context import context, op_text, to_text
from mpmd.ir.control import control_edges, control_edges_as_operands, put_control_edges
from mpmd.ir.counting import edits, forget_edits
from mpmd.ir.edit import (
    after,
    append_arg,
    at_end,
    at_start,
    before,
    clone,
    clone_body,
    clone_module,
    clone_with,
    create,
    delay,
    drop_attribute,
    erase,
    erase_args,
    erase_dead_ops,
    inline_body,
    keep_only,
    move_after,
    move_all_before,
    move_before,
    move_to_start,
    moving,
    op_behind,
    rebuild,
    reorder,
    replace,
    replace_uses,
    replace_uses_in,
    return_types_changed,
    set_operand,
    set_type,
    take_sdy_meshes,
    take_uses,
)
from mpmd.ir.fragment_info import FragmentInfo, FragmentMergeRule, FragmentScheduleRule
from mpmd.ir.fragments import (
    body_text,
    drop,
    filter_attributes,
    make_fragment,
    make_transfer,
    merge,
    merge_all,
    outline,
    remove_dead_code,
    split,
    take_body,
)
from mpmd.ir.ops import (
    Assign,
    Broadcast,
    Call,
    For,
    Fragment,
    FragmentCall,
    Func,
    FuncCall,
    NamedComputation,
    NamedTensor,
    Reduce,
    Return,
    Transfer,
    Unassign,
    attribute_dicts,
    entries_of,
    put,
    put_attribute_dicts,
)
from mpmd.ir.order import Dependencies
from mpmd.ir.passes import FunctionPass, MlirPass, ModulePass, mlir_pass
from mpmd.ir.query import (
    PURE,
    arg_index,
    block_users,
    first_of,
    first_user,
    fragments,
    funcs,
    in_block_order,
    is_constant,
    is_pure,
    is_unused,
    module_name,
    module_of,
    ops,
    ops_flowing_to,
    owner_of,
    parent,
    producer,
    read_by,
    result_index,
    returned_by,
    sdy_meshes,
    stands_before,
    symbol_table,
    top_down,
    users,
    walk,
)
from mpmd.ir.reading import Frame, frames_of, location_of, name_of, parse
from mpmd.ir.types import (
    MeshTensor,
    Origin,
    Topology,
    axes_by_dim,
    axes_of,
    axis_ref,
    axis_size,
    element_count,
    local_bytes,
    local_shape,
    mesh_order,
    on_sdy_mesh,
    string_array,
    string_list,
)
from mpmd.ir.verify import verify
