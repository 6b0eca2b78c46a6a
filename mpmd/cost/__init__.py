"""What work costs: one description of a device, and the ways from work to seconds on it.

* `device`: rates of products, vectors, memory and messages, for JAX's equations, fragments and whole steps.
* `roofline`: the work of a kernel, priced at two levels: `speed_of_light`, for searching plans, and
  `projected`, for choosing between ways to emit one plan.

Work is counted where a program is read: `tracing/stages/select` in equations, `compile/cost` in HLO and in
plans of kernels.
"""
