"""Do meshes that share one GPU keep their arrays apart, and move them without waiting?

Method: an array is copied to the device it is on, and to host memory and back, as a program's `send` and
`copy` do; once while what it holds is still being computed.  Then a training step over two meshes on the one
device, with a weight that both use and that the caller gives away, against `jax.jit`.

What the answer means: a copy that shares memory, or one that waits for its source, makes pipelines on shared
devices wrong or serial; without a GPU the same is tried on one CPU device.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

from benchmarks.gpu.experiment import Experiment, run_experiment


def measure(run: Experiment) -> None:
    """Finds it out."""
    with run.part("copies"):
        _copies(run)
    with run.part("waiting"):
        _waiting(run)
    with run.part("training"):
        _training(run)


def _copies(run: Experiment) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import SingleDeviceSharding

    from mpmd.jax_calls import array_copier

    device = jax.devices()[0]
    here = SingleDeviceSharding(device)
    x = jax.device_put(jnp.arange(1 << 20, dtype=jnp.float32), here)
    copy = array_copier(here)(x)
    apart = copy.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
    run.check("a copy on one device has memory of its own", apart)
    run.check("a copy on one device is equal", bool((copy == x).all()))
    kinds = [memory.kind for memory in device.addressable_memories()]
    run.figure("memories", kinds)
    if "pinned_host" in kinds:
        parked = array_copier(SingleDeviceSharding(device, memory_kind="pinned_host"))(x)
        back = array_copier(here)(parked)
        equal = bool((np.asarray(back) == np.asarray(x)).all())
        run.check("an array comes back from host memory", equal, parked.sharding.memory_kind or "")


def _waiting(run: Experiment) -> None:
    import jax
    from jax.sharding import SingleDeviceSharding

    from benchmarks.gpu.timing import busy
    from mpmd.jax_calls import array_copier

    device = jax.devices()[0]
    start_work = busy(run.gpu)
    targets = {"same_device": SingleDeviceSharding(device)}
    if any(memory.kind == "pinned_host" for memory in device.addressable_memories()):
        targets["pinned_host"] = SingleDeviceSharding(device, memory_kind="pinned_host")
    for name, sharding in targets.items():
        copy = array_copier(sharding)
        jax.block_until_ready(copy(jax.block_until_ready(start_work())))
        source = start_work()
        begin = time.perf_counter()
        copied = copy(source)
        issued = time.perf_counter() - begin
        early = not source.is_ready()
        jax.block_until_ready(copied)
        whole = time.perf_counter() - begin
        run.figure(f"copy_of_a_pending_array.{name}.issue_us", 1e6 * issued, "us")
        run.check(
            f"a copy to {name} does not wait for its source", early, f"all of it took {1e3 * whole:.1f} ms"
        )


def _training(run: Experiment) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import mpmd

    device = jax.devices()[0]

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            first = mpmd.named_computation(lambda p, x: jnp.tanh(x @ p["tied"]), name="first")
            last = mpmd.named_computation(
                lambda p, y: jnp.mean((jnp.tanh(y @ p["own"]) @ p["tied"]) ** 2), name="last"
            )
            return last(params, first(params, x))

        value, grads = mpmd.accumulate_gradients(loss, num_microbatches=4)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        topology = mpmd.make_topology({"m0": [device], "m1": [device]})
    run.check("sharing is warned about", any("share" in str(w.message) for w in caught))
    config = mpmd.make_config(topology, {"first": "m0", "last": "m1"}, backend="xla")
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((64, 64)).astype(np.float32) / 8 for name in ("tied", "own")}
    x = rng.standard_normal((32, 64)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        ours, plain = mpmd.jit(step, config, donate_argnums=0), jax.jit(step)
        found = jax.device_put(weights, device)
        wanted = jax.device_put(weights, device)
        for _ in range(5):
            found, value = ours(found, x)
            wanted, expected = plain(wanted, x)
    distance = max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for a, b in zip(jax.tree.leaves((found, value)), jax.tree.leaves((wanted, expected)))
    )
    run.check(
        "two meshes on one device train as jax.jit does",
        distance < 1e-5,
        f"largest difference {distance:.1e}",
    )


if __name__ == "__main__":
    run_experiment("shared_device", __doc__, measure)
