"""Eight virtual CPU devices for every test of this folder."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
