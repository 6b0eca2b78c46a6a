"""Mesh inference: every op and value without a name gets a mesh from its uses and operands.

`pipeline.infer_mesh_pipeline` has their order; between the first and the last no pass may remove dead code,
as the analysis lives in attributes and in unused assigns.
"""

from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)
