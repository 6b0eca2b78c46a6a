"""Does code built against other versions of JAX and llvmlite work with the installed ones?

Method, all on CPU: the layout of XLA's FFI structs against jaxlib's header; a fragment compiled by the native
backend against XLA; then the project's own tests of code generation and of the runtime, in processes of their
own.

What the answer means: names of tests that fail here and pass elsewhere are what a new version changed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path

from benchmarks.gpu.experiment import Experiment, run_experiment

ROOT = Path(__file__).resolve().parents[2]
SUITES = (
    "tests/benchmarks/gpu",
    "tests/unit/compile",
    "tests/unit/runtime",
    "tests/unit/api",
)
TESTED = {"jax": "0.10.2, 0.11.2", "llvmlite": "0.50.0", "triton": "3.6.0"}


def measure(run: Experiment) -> None:
    """Finds it out."""
    for name, tested in TESTED.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "missing"
        run.figure(f"versions.{name}", {"here": found, "tested": tested})
    with run.part("interface"):
        _interface(run)
    with run.part("native fragment"):
        _native(run)
    if importlib.util.find_spec("pytest") is None:
        run.skip("tests", "pytest is not installed")
        return
    for suite in SUITES:
        if (ROOT / suite).is_dir() and run.has_time(suite, 15):
            with run.part(suite):
                _tests(run, suite)


def _interface(run: Experiment) -> None:
    import jax

    from mpmd.compile.backends.ffi import frame

    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    run.figure("xla_ffi", f"{found['MAJOR']}.{found['MINOR']}")
    frame.check_version()
    run.check("XLA's FFI has the layout that we were written for", True)


def _native(run: Experiment) -> None:
    import jax
    import numpy as np

    import mpmd

    jax.config.update("jax_platforms", "cpu")
    topology = mpmd.make_topology({"m0": 1})

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        layer = mpmd.named_computation(lambda w, x: jax.nn.gelu(x @ w).sum(0), name="layer")
        return layer(w, x)

    w, x = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float32)
    config = mpmd.make_config(topology, {"layer": "m0"}, backend="native")
    compiled = mpmd.jit(step, config).lower(w, x).compile()
    distance = float(np.abs(np.asarray(compiled(w, x)) - np.asarray(jax.jit(step)(w, x))).max())
    fallbacks = compiled.cost_analysis()["fallbacks"]
    note = f"largest difference {distance:.1e}, {fallbacks:.0f} fallbacks"
    run.check("a native fragment equals XLA's", distance < 1e-3 and not fallbacks, note)
    compiled.close()


def _tests(run: Experiment, suite: str) -> None:
    """Runs a folder of tests; what failed by name, and the first line of why."""
    parallel = ["-n", str(min(8, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            sys.executable, "-m", "pytest", suite, "-m", "not slow", "-p", "no:cacheprovider",
            f"--junitxml={report}", *parallel,
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
                timeout=max(10.0, run.seconds_left()), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            run.skip(suite, "the time was up")
            return
        if not report.exists():
            run.check(suite, False, (done.stdout + done.stderr)[-1500:])
            return
        cases = list(xml.parse(report).getroot().iter("testcase"))
    bad = {}
    for case in cases:
        for what in (*case.findall("failure"), *case.findall("error")):
            name = f"{case.get('classname')}::{case.get('name')}"
            bad[name] = (what.get("message") or "").partition("\n")[0][:300]
    run.figure(f"tests.{suite}", {"run": len(cases), "failed": dict(list(bad.items())[:30])})
    run.check(suite, bool(cases) and not bad, f"{len(bad)} of {len(cases)} fail")


if __name__ == "__main__":
    run_experiment("version_drift", __doc__, measure)
