"""Eight virtual CPU devices for every test, asked for before JAX is used; a Ctrl-C that interrupts."""

import signal

import jax

jax.config.update("jax_num_cpu_devices", 8)

# A shell ignores Ctrl-C for what it runs in the background, and Python then leaves it ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
