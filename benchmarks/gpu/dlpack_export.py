"""Does handing an array out by DLPack wait for it to be computed?

Method: about 0.3 s of work is started; while it runs the array is handed out, in each of the ways there are,
and taken in by JAX again (and by PyTorch where it is installed).  Each is timed, and the array asked whether
it is ready.

What the answer means: a way that `waited` cannot be used in a running program without stopping it; one that
did not needs its consumer to order itself after the producer's stream.  Without a GPU the same is tried on
CPU.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.experiment import Experiment, run_experiment


def measure(run: Experiment) -> None:
    """Finds it out."""
    import jax

    from benchmarks.gpu.timing import busy

    start_work = busy(run.gpu)
    begin = time.perf_counter()
    jax.block_until_ready(start_work())
    run.figure("work_ms", 1e3 * (time.perf_counter() - begin), "ms")
    ways: dict[str, Callable[[Any], Any]] = {
        "__dlpack__": lambda array: array.__dlpack__(),
        "__dlpack_device__": lambda array: array.__dlpack_device__(),
        "from_dlpack of jax": jax.dlpack.from_dlpack,
        "unsafe_buffer_pointer": lambda array: array.unsafe_buffer_pointer(),
    }
    if run.gpu:
        # The legacy default stream, and none: the consumer says that it needs no ordering.
        ways["__dlpack__ stream 1"] = lambda array: array.__dlpack__(stream=1)
        ways["__dlpack__ stream -1"] = lambda array: array.__dlpack__(stream=-1)
        ways["__cuda_array_interface__"] = lambda array: array.__cuda_array_interface__
    if importlib.util.find_spec("torch"):
        import torch

        ways["from_dlpack of torch"] = torch.from_dlpack
    for name, way in ways.items():
        with run.part(name):
            _try(run, name, start_work, way)
    if run.gpu and importlib.util.find_spec("torch"):
        with run.part("from torch to jax"):
            _from_torch(run)


def _try(run: Experiment, name: str, start_work: Callable[[], Any], way: Callable[[Any], Any]) -> None:
    import jax

    way(jax.block_until_ready(start_work()))  # the first call is slower
    array = start_work()
    begin = time.perf_counter()
    made = way(array)
    taken = time.perf_counter() - begin
    waited = array.is_ready()
    jax.block_until_ready(array)
    rest = time.perf_counter() - begin - taken
    key = name.replace(" ", "_").replace("-", "minus_")
    run.figure(f"{key}.us", 1e6 * taken, "us")
    run.figure(f"{key}.waited", bool(waited))
    run.figure(f"{key}.rest_of_the_work_ms", 1e3 * rest, "ms")
    del made


def _from_torch(run: Experiment) -> None:
    import jax
    import torch

    x = torch.rand((4096, 4096), device="cuda")
    torch.cuda.synchronize()
    y = x
    begin = time.perf_counter()
    for _ in range(100):
        y = (y @ x) * (1.0 / 2048)
    array = jax.dlpack.from_dlpack(y)
    run.figure("from_torch.us", 1e6 * (time.perf_counter() - begin), "us")
    total = float(array.sum())
    torch.cuda.synchronize()
    run.figure("from_torch.work_ms", 1e3 * (time.perf_counter() - begin), "ms")
    wanted = float(y.double().sum())
    ordered = abs(total - wanted) <= 1e-3 * abs(wanted)
    run.check("jax reads what torch was still computing", ordered, f"{total} against {wanted}")


if __name__ == "__main__":
    run_experiment("dlpack_export", __doc__, measure)
