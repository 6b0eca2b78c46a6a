"""What kernels cost: one workload and one device description, priced at two levels.

* `speed_of_light`: bytes and floating-point operations against the hardware's limits; for searching plans.
* `projected`: also vector width, caches, parallelism and start-up; for choosing between ways to emit one
plan.
"""
