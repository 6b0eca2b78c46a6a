"""Attention kernels: products, an operation on rows, and products over one block of queries at a time."""
