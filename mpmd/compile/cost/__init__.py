"""The work of instructions, and of the plans of kernels, counted; `mpmd.cost` has its prices."""
