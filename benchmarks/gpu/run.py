"""Everything that is to be learnt from a GPU, by one command:

    python benchmarks/gpu/run.py --out DIR [--budget 460] [--only a,b] [--wheels DIR] [--no_gpu | --stand-in]

Runs each experiment in a process of its own with a time limit, so that a failure or a crash of one hides none
of the others, and writes DIR/gpu.json after each one and DIR/gpu.log as it goes.  Without a GPU everything up
to the launch is done; with a stand-in, whose kernels NumPy and Triton's interpreter compute, those run that
use our target.  The README beside this says what the figures mean.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import prepare  # noqa: E402 - the root must be importable first
from benchmarks.gpu.driver import gpu_is_here  # noqa: E402

MIN_SECONDS = 12
_BASE = ("jax", "jaxlib", "numpy", "llvmlite")


@dataclasses.dataclass(frozen=True)
class ListedExperiment:
    """An experiment in the list.

    Attributes:
        name: of its module.
        seconds: its time limit.
        needs: packages besides the base.
        beside: on the CPU only; runs beside the others where there are cores for it.
        package: that its module is in.
        simulated: whether it runs on a stand-in.
    """

    name: str
    seconds: float
    needs: tuple[str, ...] = ()
    beside: bool = False
    package: str = "benchmarks.gpu"
    simulated: bool = False


# The most useful first: the budget may end before the list does.
EXPERIMENTS = (
    ListedExperiment("environment", 60),
    ListedExperiment("target_launches", 60, ("triton",), simulated=True),
    ListedExperiment("target_models", 120, ("triton", "absl-py"), simulated=True),
    ListedExperiment("target_gpt2", 150, ("triton",), simulated=True),
    ListedExperiment("target_kernels", 60, ("triton",), simulated=True),
    ListedExperiment("target_example", 120, ("triton", "absl-py", "flax", "optax"), simulated=True),
    ListedExperiment("cublaslt_epilogues", 60),
    ListedExperiment("flash_attention", 100, ("triton",)),
    ListedExperiment("shared_device", 50, ("absl-py",)),
    ListedExperiment("example", 100, ("absl-py", "flax", "optax")),
    ListedExperiment("dlpack_export", 50),
    ListedExperiment("version_drift", 300, ("absl-py",), beside=True),
)


class Mode(enum.Enum):
    """On what experiments run, and the flags that say so to them."""

    GPU = ()
    NO_GPU = ("--no_gpu",)
    SIMULATED = ("--stand-in",)

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the experiment's command line."""
        return self.value


class Log:
    """Lines to the screen and to a file, from several threads."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._lock, self.start = file, threading.Lock(), time.monotonic()

    def say(self, text: str) -> None:
        """One line."""
        with self._lock:
            print(text, flush=True)
            self._file.write(text + "\n")
            self._file.flush()


class Child:
    """An experiment that runs."""

    def __init__(
        self,
        entry: ListedExperiment,
        mode: Mode,
        seconds: float,
        folder: Path,
        log: Log,
        cores: set[int],
    ) -> None:
        self.entry, self.seconds, self._log = entry, seconds, log
        self.result, self._begin = folder / f"{entry.name}.json", time.monotonic()
        self._last: collections.deque[str] = collections.deque(maxlen=60)
        command = [
            sys.executable, "-m", f"{entry.package}.{entry.name}", "--result", str(self.result),
            "--seconds", str(seconds), *mode.flags,
        ]  # fmt: skip
        variables = environment(mode is Mode.GPU and not entry.beside, folder, entry.name)
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self._process.pid, cores)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last.append(line.rstrip())
            self._log.say(f"{self.entry.name:18} {line.rstrip()}")

    def end(self) -> dict[str, Any]:
        """Waits for it, or ends it at its time limit; what it found, and how it ended."""
        late = False
        try:
            self._process.wait(max(0.1, self.seconds + 5 - (time.monotonic() - self._begin)))
        except subprocess.TimeoutExpired:
            late = True
            self._kill()
        self._reader.join(5)
        found: dict[str, Any] = {"experiment": self.entry.name}
        if self.result.exists():
            found = json.loads(self.result.read_text())
        code = self._process.returncode
        found["status"] = "time limit" if late else _status(code, found)
        found["wall_seconds"] = round(time.monotonic() - self._begin, 1)
        if code != 0 or late:
            found["last_lines"] = list(self._last)
        return found

    def _kill(self) -> None:
        """Ends the experiment's own group of processes: it began a session of its own."""
        for how, timeout in ((signal.SIGTERM, 3), (signal.SIGKILL, 10)):
            try:
                os.killpg(self._process.pid, how)
                self._process.wait(timeout)
                return
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue


def _status(code: int | None, found: dict[str, Any]) -> str:
    if code is None:
        return "could not be ended"
    if code < 0:
        return f"crashed ({signal.Signals(-code).name})"
    if code == 0:
        return "ok" if found.get("gpu") else "compiled"
    return "failed"


def environment(gpu: bool, folder: Path, name: str) -> dict[str, str]:
    """The variables of an experiment's process: those of our target load modules as users' processes do."""
    lazy = name.startswith("target")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "JAX_PLATFORMS": "cuda,cpu" if gpu else "cpu",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        # a module that loads at its first launch would disturb the captures of the other experiments
        "CUDA_MODULE_LOADING": "LAZY" if lazy else "EAGER",
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }


def run_all(
    entries: list[ListedExperiment], mode: Mode, budget: float, out: Path, log: Log, findings: dict[str, Any]
) -> None:
    """Runs the experiments; `findings` is written after each."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    many = len(cores) >= 8
    apart = set(cores[-len(cores) // 3 :]) if many else set()

    def left() -> float:
        return budget - (time.monotonic() - log.start)

    def keep(found: dict[str, Any]) -> None:
        findings["experiments"][found["experiment"]] = found
        findings["seconds"] = round(time.monotonic() - log.start, 1)
        part = out / "gpu.json.part"
        part.write_text(json.dumps(findings, indent=1, default=str))
        os.replace(part, out / "gpu.json")

    with tempfile.TemporaryDirectory() as temporary:
        folder, beside = Path(temporary), list[Child]()
        first = [e for e in entries if e.beside and many]
        for entry in (*first, *(e for e in entries if e not in first)):
            lacking = [n for n in (*_BASE, *entry.needs) if not prepare.PACKAGES[n].is_here]
            why = f"needs {', '.join(lacking)}" if lacking else ""
            if mode is Mode.SIMULATED and not entry.simulated:
                why = "it needs a GPU"
            if mode is Mode.NO_GPU and entry.simulated:
                why = "it needs a GPU, or --stand-in"
            if left() < MIN_SECONDS:
                why = "the budget is used up"
            if why:
                log.say(f"{entry.name:18} skipped: {why}")
                keep({"experiment": entry.name, "status": f"skipped: {why}"})
                continue
            log.say(f"{entry.name:18} begins ({left():.0f} s left)")
            mine = apart if entry in first else set(cores) - apart
            child = Child(entry, mode, min(entry.seconds, left()), folder, log, mine)
            if entry in first:
                beside.append(child)
            else:
                keep(child.end())
        for child in beside:
            keep(child.end())


def summary(findings: dict[str, Any]) -> str:
    """The table that the output ends with."""
    lines = [f"{'experiment':20} {'status':22} {'s':>6}  checks"]
    for name, found in findings["experiments"].items():
        checks = collections.Counter(check["state"] for check in found.get("checks", {}).values())
        listed = ", ".join(f"{count} {state}" for state, count in sorted(checks.items()))
        lines.append(f"{name:20} {found['status'][:60]:22} {found.get('wall_seconds', 0):6.1f}  {listed}")
        for check, state in found.get("checks", {}).items():
            if state["state"] == "failed":
                lines.append(f"    failed: {check} ({state['note'][:160]})")
        for part, error in found.get("errors", {}).items():
            lines.append(f"    broke off: {part}: {error['error'][:200]}")
    return "\n".join(lines)


def main() -> None:
    """Runs the requested experiments; ends with 1 if an experiment failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder for gpu.json and gpu.log")
    parser.add_argument("--budget", type=float, default=460.0, help="seconds for everything")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--wheels", type=Path, help="folder with wheels of packages that are missing")
    parser.add_argument("--no_gpu", action="store_true", help="do not use a GPU that is here")
    parser.add_argument("--stand-in", dest="simulated", action="store_true", help="use a stand-in GPU")
    args = parser.parse_args()
    known = {entry.name: entry for entry in EXPERIMENTS}
    names = [name for name in args.only.split(",") if name] or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no experiment {', '.join(unknown)}; there are {', '.join(known)}")
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "gpu.log").open("w") as file:
        log = Log(file)
        unwanted = args.no_gpu or args.simulated
        here, what = (False, "not requested") if unwanted else gpu_is_here()
        mode = Mode.SIMULATED if args.simulated else Mode.GPU if here else Mode.NO_GPU
        log.say(f"GPU: {what}")
        findings: dict[str, Any] = {
            "gpu": what if here else None,
            "without_gpu_because": None if here else what,
        }
        findings["installed"] = _install(args.wheels, here, log)
        findings["experiments"] = {}
        run_all([known[name] for name in names], mode, args.budget, args.out, log, findings)
        log.say("\n" + summary(findings))
        log.say(f"wrote {args.out / 'gpu.json'} after {findings['seconds']} s")
    states = {found["status"].partition(":")[0] for found in findings["experiments"].values()}
    sys.exit(0 if states <= {"ok", "compiled", "skipped"} else 1)


def _install(wheels: Path | None, gpu: bool, log: Log) -> dict[str, Any]:
    """Installs missing packages if there are wheels; lists those still missing."""
    gone, made = prepare.missing(gpu), {}
    if gone and wheels is not None:
        target = Path(tempfile.mkdtemp(prefix="mpmd_gpu_site_"))
        try:
            made = {
                "seconds": round(prepare.install(gone, target, wheels), 1),
                "packages": [p.name for p in gone],
            }
            os.environ["PYTHONPATH"] = os.pathsep.join(
                filter(None, (str(target), os.environ.get("PYTHONPATH")))
            )
            sys.path.insert(0, str(target))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            made = {"error": str(error)}
        log.say(f"installing: {made}")
    still = [p.name for p in prepare.missing(gpu)]
    log.say(f"missing packages: {', '.join(still) or 'none'}")
    return {**made, "missing": still}


if __name__ == "__main__":
    main()
