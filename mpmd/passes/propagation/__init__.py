"""Sharding propagation: what Shardy decided becomes part of the types of values on meshes."""

from __future__ import annotations

from mpmd.passes.propagation.convert_sdy_constants import ConvertSdyConstants
from mpmd.passes.propagation.convert_sdy_shardings_to_mpmd_types import ConvertSdyShardingsToMpmdTypes
from mpmd.passes.propagation.drop_sub_axes import DropSubAxes
from mpmd.passes.propagation.enforce_user_shardings import EnforceUserShardings
from mpmd.passes.propagation.extract_reshards_from_inter_mesh_transfers import (
    ExtractReshardsFromInterMeshTransfers,
)
from mpmd.passes.propagation.fit_shardings_to_meshes import FitShardingsToMeshes
from mpmd.passes.propagation.forget_empty_computations import ForgetEmptyComputations
from mpmd.passes.propagation.forget_empty_shardings import ForgetEmptyShardings
from mpmd.passes.propagation.populate_unreduced_out_sharding import PopulateUnreducedOutSharding
from mpmd.passes.propagation.propagate_shardings import PropagateShardings
from mpmd.passes.propagation.reshards_to_constraints import ReshardsToConstraints
from mpmd.passes.propagation.simplify_program import SimplifyProgram
from mpmd.support.passes import passes_in

PASSES = passes_in(vars())
