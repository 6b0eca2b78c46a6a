"""Kernel plans: the computation of one kernel, independent of any target, and its expected cost."""
