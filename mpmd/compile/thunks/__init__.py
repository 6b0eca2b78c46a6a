"""Thunks: the operations of a program at run time, in order, each with its reads and writes."""
