"""A step computed twice, fragment by fragment with the same inputs: by its own code, and by XLA.

Every fragment of the step runs as always.  Before it does, XLA's program of the same fragment runs on the
same arrays, without consuming them, and the results are compared.  Where they differ beyond rounding, the
fragment is narrowed to an operation and a pass once the step is over (`compile/comparison/`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mpmd import ir
from mpmd.brief import begin_of_text
from mpmd.compile.comparison.narrowing import Compilers, Divergence, Opinions, host_copy, opinions_of
from mpmd.compile.comparison.rounding import Difference
from mpmd.compile.compiler import compile_fragments
from mpmd.compile.executable import Executable
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.options import CompileOptions
from mpmd.errors import MpmdError
from mpmd.runtime.program.streams import task_text
from mpmd.runtime.run.interpreter import BoundCall, Observer, StepState
from mpmd.support.user_code import frames_of, warn_user


@dataclasses.dataclass(frozen=True)
class ResultDifference:
    """A result of a fragment that differs beyond rounding.

    Attributes:
        number: of the result, from 0.
        place: where the model computes it, `file:line, in function`; "" if that is not known.
        difference: of the element that differs most.
        exact: that element in f64; None if the fragment cannot be computed so.
        wrong: the backend's name, since rounding does not explain its error; `"unknown"` without `exact`.
    """

    number: int
    place: str
    difference: Difference
    exact: Any
    wrong: str

    __repr__ = begin_of_text

    def __str__(self) -> str:
        lines = [f"result {self.number}" + (f", computed at {self.place}" if self.place else "")]
        lines.append(f"  {self.difference}")
        if self.exact is not None:
            lines.append(f"  in f64 {self.exact}: {self.wrong} is wrong")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class FragmentDifference:
    """A fragment with results that differ beyond rounding.

    Attributes:
        fragment, mesh: what runs where.
        task: stage, microbatch and phase of the first call that differs, in words.
        calls: how many calls differ.
        results: those that differ in the first of these calls.
        divergence: the operation at which the difference begins; None if it vanishes where values are kept.
        place: where the model has that operation.
        note: further findings.
    """

    fragment: str
    mesh: str
    task: str
    calls: int
    results: tuple[ResultDifference, ...]
    divergence: Divergence | None
    place: str
    note: str

    __repr__ = begin_of_text

    def __str__(self) -> str:
        task = f", {self.task}" if self.task else ""
        again = f", and {self.calls - 1} more of its calls" if self.calls > 1 else ""
        parts = [f"fragment {self.fragment} on mesh {self.mesh}{task}{again}", *map(str, self.results)]
        if self.divergence is not None:
            parts.append(f"begins at {self.place or 'an operation whose place is not known'}")
            parts.append(f"  {self.divergence.operation}\n  {self.divergence.difference}")
            parts += [f"  in {self.divergence.kernel}"] if self.divergence.kernel else []
        parts += [self.note] if self.note else []
        return "\n".join(parts).replace("\n", "\n  ")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What a step's own code and XLA make of the same inputs; true if they agree.

    Attributes:
        differences: each fragment that differs beyond rounding.
        fragments, calls: how many distinct fragments were compared, and how often.
        largest: the largest difference in the calls that agree, and its fragment.
        less_exact: fragments in which XLA alone is further from f64 than rounding explains.
        skipped: fragment → why it was not compared.
        results: of the step.
    """

    differences: tuple[FragmentDifference, ...]
    fragments: int
    calls: int
    largest: tuple[Difference, str]
    less_exact: tuple[str, ...]
    skipped: Mapping[str, str]
    results: Any = dataclasses.field(repr=False, default=None)

    __repr__ = begin_of_text

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        difference, where = self.largest
        largest = f": largest difference {difference.ulps:.3g} ulps, in {where}" if where else ""
        if not self.fragments:
            lines = ["nothing was compared"]
        elif self:
            lines = [f"all {self.fragments} fragments agree with XLA, in {self.calls} calls{largest}"]
        else:
            wrong = f"{len(self.differences)} of {self.fragments} fragments"
            lines = [f"{wrong} differ from XLA beyond rounding", *map(str, self.differences)]
        if self.less_exact:
            lines.append(f"XLA is less exact, by f64, in {', '.join(self.less_exact)}")
        reasons: dict[str, list[str]] = {}
        for fragment, reason in self.skipped.items():
            reasons.setdefault(reason, []).append(fragment)
        lines += [f"not compared, since {reason}: {', '.join(of)}" for reason, of in reasons.items()]
        return "\n".join(lines)


def kept(leaves: Sequence[Any], donated: Sequence[int]) -> list[Any]:
    """Flat arguments with copies of those that a step consumes."""
    copied = list(leaves)
    for i in donated:
        if isinstance(copied[i], jax.Array) and copied[i].sharding.has_addressable_devices:
            copied[i] = copied[i].copy()
    return copied


def reported(comparison: Comparison) -> Comparison:
    """Reports a comparison that an option requires: a warning where something differs, else a line."""
    if comparison:
        print(comparison, file=sys.stderr)
    else:
        warn_user([str(comparison)])
    return comparison


@dataclasses.dataclass
class _DifferingFragment:
    """The first call of a fragment that differs, and how many do."""

    task: str
    inputs: list[np.ndarray]
    opinions: Opinions
    calls: int = 1


class FragmentComparison(Observer):
    """Runs XLA's program of every fragment before the step's own, and compares their results."""

    def __init__(
        self, executables: Mapping[str, Executable], meshes: Mapping[str, Any], options: CompileOptions
    ) -> None:
        """Takes the executables of the step and its meshes by name, and the options of its compiler."""
        self._executables, self._meshes, self._options = executables, meshes, options
        reasons = {name: _not_compared(e, meshes[e.fragment.mesh]) for name, e in executables.items()}
        self._skipped = {name: reason for name, reason in reasons.items() if reason}
        compared = {
            name: dataclasses.replace(executable.fragment, donated=(), token=False)
            for name, executable in executables.items()
            if name not in self._skipped
        }
        self._others = compile_fragments(compared, meshes, "xla", options)
        self._calls = 0
        self._largest = Difference(), ""
        self._differing: dict[str, _DifferingFragment] = {}
        self._less_exact: dict[str, None] = {}
        self._expected: list[np.ndarray] = []
        self._consumed: dict[int, np.ndarray] = {}

    def calling(self, call: BoundCall, frame: StepState) -> None:
        """Runs XLA's program, and copies what the call will consume."""
        other = self._others.get(call.op.executable)
        if other is not None:
            self._expected = [host_copy(array) for array in other(*[frame.slots[i] for i in call.inputs])]
            self._consumed = {i: host_copy(frame.slots[i]) for i in call.consumed}

    def ran(self, call: BoundCall, frame: StepState, issued: float) -> None:
        """Compares the results of a call."""
        name = call.op.executable
        if name not in self._others:
            return
        got = [host_copy(frame.slots[i]) for i in call.outputs]
        inputs = _Inputs(call, frame, self._consumed)
        fragment = self._others[name].fragment
        opinions = opinions_of(fragment, self._meshes[fragment.mesh], got, self._expected, inputs)
        self._calls += 1
        if opinions.wrong and name in self._differing:
            self._differing[name].calls += 1
        elif opinions.wrong:
            self._differing[name] = _DifferingFragment(task_text(call.op), inputs(), opinions)
        elif opinions.less_exact:
            self._less_exact[name] = None
        else:
            self._largest = max(self._largest, (opinions.largest(), name), key=lambda entry: entry[0].ulps)
        self._expected, self._consumed = [], {}

    def report(self, module: ir.Module, results: Any) -> Comparison:
        """The differences, narrowed.

        Args:
            module: the exported one, which knows the places in the model.
            results: of the step.
        """
        differences = [self._narrowed(name, first, module) for name, first in self._differing.items()]
        return Comparison(
            tuple(differences), len(self._others), self._calls, self._largest,
            tuple(name for name in self._less_exact if name not in self._differing), self._skipped, results,
        )  # fmt: skip

    def _narrowed(self, name: str, first: _DifferingFragment, module: ir.Module) -> FragmentDifference:
        backend, fragment = self._executables[name].backend, self._others[name].fragment
        places, opinions = _ModelPlaces(module, name), first.opinions
        results = []
        for k in opinions.wrong:
            numbers, verdict = opinions.difference(k), opinions.verdict(k)
            exact = None if opinions.exact is None else opinions.exact[k][numbers.index].item()
            wrong = backend if verdict == "got" else verdict
            results.append(ResultDifference(k, places.of_result(k), numbers, exact, wrong))
        chosen = "native" if backend == "mixed" else backend
        compilers = Compilers(self._meshes[fragment.mesh], chosen, self._options)
        divergence, note = _divergence(compilers, fragment, first.inputs)
        place = "" if divergence is None else places.of_operation(divergence.number)
        return FragmentDifference(
            name, fragment.mesh, first.task, first.calls, tuple(results), divergence, place, note
        )


class _Inputs:
    """The arguments of a call that was made, as far as they are needed."""

    def __init__(self, call: BoundCall, frame: StepState, consumed: Mapping[int, np.ndarray]) -> None:
        self._of: Callable[[int], np.ndarray] = lambda i: (
            consumed[i] if i in consumed else host_copy(frame.slots[i])
        )
        self._slots = call.inputs
        self._copied: list[np.ndarray] | None = None

    def __call__(self) -> list[np.ndarray]:
        if self._copied is None:
            self._copied = [self._of(i) for i in self._slots]
        return self._copied


def _divergence(
    compilers: Compilers, fragment: FragmentModule, inputs: Sequence[np.ndarray]
) -> tuple[Divergence | None, str]:
    """Where a difference begins, and a note on its cause."""
    try:
        divergence = compilers.divergence(fragment, inputs)
        without = compilers.guilty_pass(fragment, inputs) if divergence is None else divergence.without
    except MpmdError as error:
        return None, f"it could not be narrowed: {str(error).splitlines()[0]}"
    if divergence is None:
        note = "no operation differs where its value is kept: the difference is in how they are combined"
    else:
        note = "" if without else "it differs whatever pass is left out: it is in the code of the kernel"
    agrees = f"it agrees without {without}: --mpmd_disable_passes={without}" if without else ""
    return divergence, "\n".join(filter(None, (note, agrees)))


def _not_compared(executable: Executable, mesh: Any) -> str:
    """Why a fragment is not compared; "" if it is."""
    if executable.fragment.callbacks:
        return "they call back to Python, which would happen twice"
    if executable.backend == "zeros":
        return "they only fill zeros"
    if executable.backend == "xla":
        return "XLA compiles them"
    several = len({device.process_index for device in mesh.devices.flat}) > 1
    return "their mesh is over several processes" if several else ""


class _ModelPlaces:
    """The places in the model of what a fragment computes."""

    def __init__(self, module: ir.Module, fragment: str) -> None:
        with ir.context():
            main = ir.symbol_table(module)[fragment]
            self._ops = [_place(op) for op in ir.ops(main.body)]
            producers = [ir.producer(value) for value in main.returned]
            self._results = ["" if op is None else _place(op) for op in producers]

    def of_operation(self, number: int) -> str:
        return self._ops[number] if number < len(self._ops) else ""

    def of_result(self, number: int) -> str:
        return self._results[number] if number < len(self._results) else ""


def _place(op: Any) -> str:
    frames = frames_of(op)
    return "" if not frames else f"{frames[0]}" + (f"\n    {frames[0].source}" if frames[0].source else "")
