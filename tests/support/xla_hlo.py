"""XLA:CPU as an oracle for HLO text, in a child process: XLA aborts on some inputs.

    with XlaWorker() as xla:
        outputs = xla.run(text, [array, ...])      # list of arrays: the leaves of the result
        xla.parse(text)                            # XLA's own print of the text

These are private entry points of jaxlib, used by tests alone.
"""

from __future__ import annotations

import pickle
import select
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


class XlaError(Exception):
    """XLA refused the text, aborted or did not finish."""


class XlaWorker:
    """A child process with two devices that runs HLO; restarted after each abort.

    Args:
        seconds: limit of one answer.
        optimized: as for users; otherwise XLA leaves out most of its optimizations.
    """

    def __init__(self, seconds: float = 120.0, *, optimized: bool = True) -> None:
        self.seconds = seconds
        self.optimized = optimized
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> XlaWorker:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None

    def run(self, text: str, arguments: list) -> list[np.ndarray]:
        """Leaves of the result."""
        return self._ask(("run", text, arguments))

    def run_stablehlo(self, text: str, arguments: list) -> list[np.ndarray]:
        """Leaves of the result of a StableHLO module."""
        return self._ask(("run_stablehlo", text, arguments))

    def run_devices(self, text: str, arguments: list[list]) -> list[list[np.ndarray]]:
        """Leaves of the result of each replica."""
        return self._ask(("run_devices", text, arguments))

    def parse(self, text: str) -> str:
        """XLA's print of what it read."""
        return self._ask(("parse", text))

    def _ask(self, question: tuple):
        if self._process is None:
            command = [sys.executable, "-m", "tests.support.xla_hlo", *(() if self.optimized else ("plain",))]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
            )
        data = pickle.dumps(question)
        try:
            self._process.stdin.write(struct.pack("<q", len(data)) + data)
            self._process.stdin.flush()
            (size,) = struct.unpack("<q", self._read(8))
            ok, answer = pickle.loads(self._read(size))
        except (OSError, EOFError) as error:
            self.close()
            raise XlaError(f"XLA aborted or hung: {error}") from None
        if not ok:
            raise XlaError(answer)
        return answer

    def _read(self, size: int) -> bytes:
        out = b""
        while len(out) < size:
            ready, _, _ = select.select([self._process.stdout], [], [], self.seconds)
            if not ready:
                raise EOFError(f"no answer within {self.seconds} s")
            part = self._process.stdout.read1(size - len(out))
            if not part:
                raise EOFError("the process ended")
            out += part
        return out


# -- the child process ------------------------------------------------------------------------------


def _leaves(value) -> list:
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def _compile(text: str, devices: int):
    import jax
    from jaxlib import _hlo, _jax

    proto = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    mlir = _jax.mlir.xla_computation_to_mlir_module(_hlo.XlaComputation(proto))
    options = _jax.CompileOptions()
    if devices > 1:
        options.num_replicas = devices
        options.executable_build_options.num_replicas = devices
        assignment = _jax.DeviceAssignment.create(np.arange(devices).reshape(devices, 1))
        options.device_assignment = options.executable_build_options.device_assignment = assignment
    chosen = _jax.DeviceList(tuple(jax.devices()[:devices]))
    return jax.devices()[0].client.compile_and_load(mlir, chosen, options)


def _run(text: str, arguments: list) -> list[np.ndarray]:
    import jax

    device = jax.devices()[0]
    buffers = [jax.device_put(a, device) for a in _leaves(tuple(arguments))]
    results = _compile(text, 1).execute_sharded(buffers)
    return [np.asarray(o[0]) for o in results.disassemble_into_single_device_arrays()]


def _run_stablehlo(text: str, arguments: list) -> list[np.ndarray]:
    import jax
    from jax.extend.mlir import ir
    from jax.interpreters import mlir
    from jaxlib import _jax

    device = jax.devices()[0]
    with mlir.make_ir_context(), ir.Location.unknown():
        module = str(ir.Module.parse(text))
    loaded = device.client.compile_and_load(module, _jax.DeviceList((device,)), _jax.CompileOptions())
    results = loaded.execute_sharded([jax.device_put(a, device) for a in arguments])
    return [np.asarray(o[0]) for o in results.disassemble_into_single_device_arrays()]


def _run_devices(text: str, arguments: list[list]) -> list[list[np.ndarray]]:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = jax.devices()[: len(arguments)]
    sharding = NamedSharding(Mesh(np.array(devices), ("d",)), PartitionSpec("d"))
    inputs = []
    for column in zip(*arguments):
        parts = [jax.device_put(np.atleast_1d(a), d) for a, d in zip(column, devices)]
        first = parts[0].shape
        inputs.append(
            jax.make_array_from_single_device_arrays((first[0] * len(parts), *first[1:]), sharding, parts)
        )
    results = _compile(text, len(devices)).execute_sharded(inputs)
    outputs = results.disassemble_into_single_device_arrays()
    return [[np.asarray(o[k]) for o in outputs] for k in range(len(devices))]


def _parse(text: str) -> str:
    from jaxlib import _hlo

    options = _hlo.HloPrintOptions()
    options.print_large_constants, options.print_metadata = True, False
    return _hlo.hlo_module_from_text(text).to_string(options)


PLAIN = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")
"""What `jax_disable_most_optimizations` means."""


def _serve(plain: bool) -> None:
    import os

    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = " ".join(
        ("--xla_force_host_platform_device_count=2", *(PLAIN if plain else ()))
    )
    import jax
    from jaxlib.cpu import _lapack

    _lapack.initialize()
    jax.config.update("jax_enable_x64", True)
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    calls = {"run": _run, "run_devices": _run_devices, "run_stablehlo": _run_stablehlo, "parse": _parse}
    while True:
        head = source.read(8)
        if len(head) < 8:
            return
        name, *rest = pickle.loads(source.read(struct.unpack("<q", head)[0]))
        try:
            answer = (True, calls[name](*rest))
        except (RuntimeError, ValueError, TypeError) as error:
            answer = (False, f"{type(error).__name__}: {error}")
        data = pickle.dumps(answer)
        sink.write(struct.pack("<q", len(data)) + data)
        sink.flush()


if __name__ == "__main__":
    _serve(plain=len(sys.argv) > 1)
