"""Eight virtual CPU devices for every test, asked for before anything else uses JAX."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
