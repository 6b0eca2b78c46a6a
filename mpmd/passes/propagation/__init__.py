"""Sharding propagation: Shardy's shardings become part of the types of values on meshes."""

from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)
