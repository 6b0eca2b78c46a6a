"""Attention kernels: products, rows and products over one block of queries at a time."""
