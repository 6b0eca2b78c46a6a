"""Mesh inference."""
PASSES = ()
