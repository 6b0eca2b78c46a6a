"""Import, from names to meshes: every value gets a mesh, every edge between meshes becomes a transfer."""

from __future__ import annotations

from mpmd.passes.import_ import infer_mesh
from mpmd.passes.import_.copy_topology_from_main import CopyTopologyFromMain
from mpmd.passes.import_.enforce_input_output_equisharding import EnforceInputOutputEquisharding
from mpmd.passes.import_.fold_constant_branches import FoldConstantBranches
from mpmd.passes.import_.generate_sdy_meshes_from_topology import GenerateSdyMeshesFromTopology
from mpmd.passes.import_.inline_nested_user_exposed_ops import InlineNestedUserExposedOps
from mpmd.passes.import_.insert_nameless_clone_of_negligible_ops import InsertNamelessCloneOfNegligibleOps
from mpmd.passes.import_.introduce_transfers import IntroduceTransfers
from mpmd.passes.import_.map_input_output_to_mesh import MapInputOutputToMesh
from mpmd.passes.import_.map_named_ops_to_mpmd_ops import MapNamedOpsToMpmdOps
from mpmd.passes.import_.simplify_named_computations import SimplifyNamedComputations
from mpmd.passes.import_.validate_named_ops_in_mpmd_func import ValidateNamedOpsInMpmdFunc
from mpmd.support.passes import passes_in

PASSES = passes_in(vars()) + infer_mesh.PASSES
