"""Tiles that are measured: the ways to compute what a program computes, and the fastest of each on a GPU."""
