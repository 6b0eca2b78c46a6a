"""The first call on a GPU, by one command: at most four minutes.

    python benchmarks/gpu/run.py --out DIR [--pack DIR] [--budget 240] [--only a,b]
        [--no_gpu | --stand-in MODULE:CLASS]

Runs each experiment in a process of its own with a time limit, so that a failure, a crash or a hang of
one hides none of the others, the most useful first. DIR/gpu.jsonl gets a line for each finding as it is
found, and DIR/gpu.log all output. What the first call runs is compiled beforehand by `prepare.py`;
further experiments run where they are named. Without a GPU everything up to the launch is done; with a
stand-in, whose kernels NumPy and Triton's interpreter compute, those run that use our target. The README
beside this has what lines mean.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
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

from benchmarks.gpu import packages  # noqa: E402 - the root must be importable first
from benchmarks.gpu.driver import gpu_is_here  # noqa: E402
from benchmarks.gpu.experiment import read_lines, write_line  # noqa: E402
from benchmarks.gpu.pack import TravellingPack  # noqa: E402

MIN_SECONDS, MARGIN = 12, 10
"""For an experiment to begin; after its time limit, for the end of its process."""
_BASE = ("jax", "jaxlib", "numpy", "llvmlite")


@dataclasses.dataclass(frozen=True)
class ListedExperiment:
    """An experiment in the list.

    Attributes:
        name: of its module.
        seconds: its time limit.
        needs: packages besides the base.
        first: whether it is part of the first call; the others run where they are named.
        packed: whether it runs programs of the prepared folder.
        beside: on the CPU only; runs beside the others where there are cores for it.
        package: that its module is in.
        simulated: whether it runs on a stand-in.
    """

    name: str
    seconds: float
    needs: tuple[str, ...] = ()
    first: bool = False
    packed: bool = False
    beside: bool = False
    package: str = "benchmarks.gpu"
    simulated: bool = False


# The most useful first: the budget may end before the list does.
EXPERIMENTS = (
    ListedExperiment("environment", 35, first=True, simulated=True),
    ListedExperiment("smoke", 50, ("absl-py",), first=True, packed=True, simulated=True),
    ListedExperiment("step_launches", 45, first=True, packed=True, simulated=True),
    ListedExperiment("step_right", 60, first=True, packed=True, simulated=True),
    ListedExperiment("kernel_variants", 110, first=True, packed=True, simulated=True),
    ListedExperiment("whole_step", 280, packed=True, simulated=True),
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
    """On what experiments run."""

    GPU = enum.auto()
    NO_GPU = enum.auto()
    SIMULATED = enum.auto()


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
        out: Outputs,
        cores: set[int],
    ) -> None:
        self.entry, self.seconds, self._log = entry, seconds, out.log
        self._lines, self._begin = out.lines, time.monotonic()
        self._last: collections.deque[str] = collections.deque(maxlen=60)
        command = [
            sys.executable, "-m", f"{entry.package}.{entry.name}", "--lines", str(out.lines),
            "--pack", str(out.pack.folder), "--seconds", str(seconds), *out.flags(mode),
        ]  # fmt: skip
        variables = environment(mode is Mode.GPU and not entry.beside, out.folder, lazy=entry.packed)
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
        """Waits for it, or ends it at its time limit; how it ended."""
        late = False
        try:
            self._process.wait(max(0.1, self.seconds + 5 - (time.monotonic() - self._begin)))
        except subprocess.TimeoutExpired:
            late = True
            self._kill()
        self._reader.join(5)
        code, gpu = self._process.returncode, read_lines(self._lines).get(self.entry.name, {}).get("gpu")
        found: dict[str, Any] = {"status": "time limit" if late else _status(code, gpu)}
        if code != 0 or late:
            found["last_lines"] = list(self._last)
        return found | {"wall_seconds": round(time.monotonic() - self._begin, 1)}

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


def _status(code: int | None, gpu: bool | None) -> str:
    if code is None:
        return "could not be ended"
    if code < 0:
        return f"crashed ({signal.Signals(-code).name})"
    if code == 0:
        return "ok" if gpu else "compiled"
    return "failed"


def environment(gpu: bool, folder: Path, *, lazy: bool) -> dict[str, str]:
    """The variables of an experiment's process; `lazy` if modules are loaded as in users' processes."""
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


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Where experiments read and write: the lines, the log, the prepared folder, one for temporary files.

    `simulated` is `MODULE:CLASS` of the stand-in that they run on; "" if there is none.
    """

    lines: Path
    log: Log
    pack: TravellingPack
    folder: Path
    simulated: str = ""

    def flags(self, mode: Mode) -> list[str]:
        """Of an experiment's command line: on what it runs."""
        return {Mode.GPU: [], Mode.NO_GPU: ["--no_gpu"], Mode.SIMULATED: ["--stand-in", self.simulated]}[mode]


def run_all(entries: list[ListedExperiment], mode: Mode, budget: float, out: Outputs) -> None:
    """Runs the experiments; each adds its lines, and one that says how it ended."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    many = len(cores) >= 8
    apart = set(cores[-len(cores) // 3 :]) if many else set()

    def left() -> float:
        return budget - (time.monotonic() - out.log.start)

    def keep(entry: ListedExperiment, found: dict[str, Any]) -> None:
        at = round(time.monotonic() - out.log.start, 1)
        write_line(out.lines, {"experiment": entry.name, "at": at, "line": "end", "name": "run", **found})

    beside = list[Child]()
    first = [e for e in entries if e.beside and many]
    for entry in (*first, *(e for e in entries if e not in first)):
        why = _why_not(entry, mode, out.pack) or ("the budget is used up" if left() < MIN_SECONDS else "")
        if why:
            out.log.say(f"{entry.name:18} skipped: {why}")
            keep(entry, {"status": f"skipped: {why}"})
            continue
        out.log.say(f"{entry.name:18} begins ({left():.0f} s left)")
        mine = apart if entry in first else set(cores) - apart
        child = Child(entry, mode, min(entry.seconds, left() - MARGIN), out, mine)
        if entry in first:
            beside.append(child)
        else:
            keep(entry, child.end())
    for child in beside:
        keep(child.entry, child.end())


def _why_not(entry: ListedExperiment, mode: Mode, pack: TravellingPack) -> str:
    """Why an experiment does not run here, or ""."""
    lacking = [n for n in (*_BASE, *entry.needs) if not packages.PACKAGES[n].is_here]
    if mode is Mode.SIMULATED and not entry.simulated:
        return "it needs a GPU"
    if mode is Mode.NO_GPU and entry.simulated:
        return "it needs a GPU, or --stand-in"
    if entry.packed and not pack.is_here:
        return f"{pack.folder} was not prepared: benchmarks/gpu/prepare.py"
    if entry.packed and pack.facts["stand_in"] != (mode is Mode.SIMULATED):
        return f"{pack.folder} was prepared {'with' if pack.facts['stand_in'] else 'without'} --stand-in"
    return f"needs {', '.join(lacking)}" if lacking else ""


def summary(experiments: dict[str, dict[str, Any]]) -> str:
    """The table that the output ends with."""
    lines = [f"{'experiment':20} {'status':22} {'s':>6}  checks"]
    for name, found in experiments.items():
        checks = collections.Counter(check["state"] for check in found.get("checks", {}).values())
        listed = ", ".join(f"{count} {state}" for state, count in sorted(checks.items()))
        status = found.get("status", "did not end")
        lines.append(f"{name:20} {status[:60]:22} {found.get('wall_seconds', 0):6.1f}  {listed}")
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
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder for gpu.jsonl and gpu.log")
    parser.add_argument("--pack", type=Path, default=Path("out/gpu_pack"), help="what prepare.py made")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for everything")
    parser.add_argument("--only", default="", help="names, separated by commas; the first call by default")
    parser.add_argument("--no_gpu", action="store_true", help="do not use a GPU that is here")
    parser.add_argument("--stand-in", dest="simulated", default="", help="MODULE:CLASS of a stand-in GPU")
    args = parser.parse_args()
    known = {entry.name: entry for entry in EXPERIMENTS}
    names = [name for name in args.only.split(",") if name]
    names = names or [entry.name for entry in EXPERIMENTS if entry.first]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no experiment {', '.join(unknown)}; there are {', '.join(known)}")
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "gpu.log").open("w") as file, tempfile.TemporaryDirectory() as temporary:
        log = Log(file)
        unwanted = args.no_gpu or args.simulated
        here, what = (False, "not requested") if unwanted else gpu_is_here()
        mode = Mode.SIMULATED if args.simulated else Mode.GPU if here else Mode.NO_GPU
        log.say(f"GPU: {what}")
        gone = [p.name for p in packages.missing(here)]
        log.say(f"missing packages: {', '.join(gone) or 'none'}")
        out = Outputs(
            args.out / "gpu.jsonl", log, TravellingPack(args.pack.resolve()), Path(temporary), args.simulated
        )
        out.lines.unlink(missing_ok=True)
        run_all([known[name] for name in names], mode, args.budget, out)
        found = read_lines(out.lines)
        log.say("\n" + summary(found))
        log.say(f"wrote {out.lines} after {time.monotonic() - log.start:.1f} s")
    states = {each.get("status", "").partition(":")[0] for each in found.values()}
    sys.exit(0 if states <= {"ok", "compiled", "skipped"} else 1)


if __name__ == "__main__":
    main()
