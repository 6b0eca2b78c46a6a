"""What kernels cost: one workload and one device description, priced at three levels.

* `speed_of_light`: bytes and floating-point operations against the hardware's limits; for searching plans.
* `projected`: also vector width, caches, parallelism and start-up; for choosing between ways to emit one
plan. * `ProfiledCosts`: measured, kept on disk; calibrates the other two.
"""
