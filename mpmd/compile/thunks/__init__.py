"""Thunks: what a program does, one after the other, each with what it reads and writes."""
