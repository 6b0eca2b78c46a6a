"""Mesh inference: every op and value without a name gets a mesh from its uses and operands.

`pipeline.infer_mesh_pipeline` has their order; between the first and the last no pass may remove dead code,
as the analysis lives in attributes and in unused assigns.
"""

from __future__ import annotations

from mpmd.passes.import_.infer_mesh.assign_mesh_func_leaves import InferMeshAssignMeshFuncLeaves
from mpmd.passes.import_.infer_mesh.assign_using_input_output_constraints import (
    InferMeshAssignUsingInputOutputConstraints,
)
from mpmd.passes.import_.infer_mesh.convert_reduce_ops import InferMeshConvertReduceOps
from mpmd.passes.import_.infer_mesh.finalize import InferMeshFinalize
from mpmd.passes.import_.infer_mesh.populate_src_set import InferMeshPopulateSrcSet
from mpmd.passes.import_.infer_mesh.populate_use_set import InferMeshPopulateUseSet
from mpmd.passes.import_.infer_mesh.rewrite_using_analysis import InferMeshRewriteUsingAnalysis
from mpmd.passes.import_.infer_mesh.validate_no_additional_transfers_needed import (
    InferMeshValidateNoAdditionalTransfersNeeded,
)
from mpmd.passes.import_.infer_mesh.validate_src_set_not_empty import InferMeshValidateSrcSetNotEmpty
from mpmd.support.passes import passes_in

PASSES = passes_in(vars())
