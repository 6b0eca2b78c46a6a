"""Import, from names to meshes: every value gets a mesh, every edge between meshes becomes a transfer."""

from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)
