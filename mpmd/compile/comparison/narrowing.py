"""Where a difference begins: the first operation whose value differs, and the pass without which it does not.

The fragment is compiled again with the values of its operations as results, some at a time and in program
order.  The first that differs beyond rounding was computed from values that do not.  `widened` gives the
third opinion, which decides between two results: the same fragment in f64.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mpmd import ir
from mpmd.brief import brief
from mpmd.compile.backends.jax_function import array_types, named_sharding, numpy_dtype
from mpmd.compile.backends.xla import XlaBackend
from mpmd.compile.comparison.rounding import NARROW_FLOATS, Difference, Rounding
from mpmd.compile.compiler import FallbackBackend, PlatformBackend, get_backend
from mpmd.compile.driver import lowered
from mpmd.compile.fragment import FragmentModule, ValueSpec
from mpmd.compile.options import CompileOptions
from mpmd.compile.passes.hlo_pass import Fixpoint
from mpmd.compile.pipelines import configured, watched
from mpmd.errors import CompileError, IRError

_TYPE = re.compile(rf"(?<=[x<])({NARROW_FLOATS})(?=>)")
_CONSTANT = re.compile(rf"dense<(?P<value>[^>]*)> : tensor<(?:[\dx]*x)?(?P<type>{NARROW_FLOATS})>")
_BITCAST = re.compile(
    r"^(?P<indent> *)(?P<to>%\w+) = stablehlo\.bitcast_convert (?P<of>%[\w#]+) : "
    r"\((?P<given>tensor<[^>]*>)\) -> (?P<result>tensor<[^>]*>)(?P<rest>.*)$",
    re.M,
)
_OPAQUE = re.compile(r"stablehlo\.custom_call @(?!Sharding\b|SPMD)|stablehlo\.composite")


def widened(fragment: FragmentModule) -> FragmentModule | None:
    """The fragment in f64; None if it calls code that exists for its own types only."""
    if _OPAQUE.search(fragment.text):
        return None
    text = _BITCAST.sub(_with_own_bits, _CONSTANT.sub(_constant, fragment.text))
    return dataclasses.replace(
        fragment,
        text=_TYPE.sub("f64", text).replace("narrow!", ""),
        arguments=tuple(map(_value, fragment.arguments)),
        results=tuple(map(_value, fragment.results)),
    )


def _value(value: ValueSpec) -> ValueSpec:
    if value.dtype == "complex<f32>":
        return dataclasses.replace(value, dtype="complex<f64>")
    return dataclasses.replace(value, dtype="f64") if re.fullmatch(NARROW_FLOATS, value.dtype) else value


def _constant(match: re.Match[str]) -> str:
    """A constant whose elements are written as bits, of which f64 has others."""
    dtype = numpy_dtype(match["type"])

    def wider(bits: re.Match[str]) -> str:
        number = np.array(int(bits[0], 16), f"u{dtype.itemsize}").view(dtype).astype(np.float64)
        return f"0x{int(number.view(np.uint64)):016X}"

    value = match["value"]
    if value.startswith('"0x'):
        elements = np.frombuffer(bytes.fromhex(value[3:-1]), dtype).astype(np.float64)
        value = f'"0x{elements.tobytes().hex().upper()}"'
    else:
        value = re.sub(r"0x[0-9A-Fa-f]+", wider, value)
    return f"dense<{value}>{match[0][match[0].index('> : ') + 1 :]}"


def _with_own_bits(match: re.Match[str]) -> str:
    """A cast of bits sees the bits of the narrow float: it is rounded first, or widened afterwards."""
    indent, to, of, given, result, rest = match.groups()
    own_given, own_result = (_TYPE.sub(r"narrow!\1", kind) for kind in (given, result))
    own = f"%bits_{to[1:]}"
    if own_result != result:
        return (
            f"{indent}{own} = stablehlo.bitcast_convert {of} : ({own_given}) -> {own_result}{rest}\n"
            f"{indent}{to} = stablehlo.convert {own} : ({own_result}) -> {result}"
        )
    if own_given != given:
        return (
            f"{indent}{own} = stablehlo.convert {of} : ({given}) -> {own_given}\n"
            f"{indent}{to} = stablehlo.bitcast_convert {own} : ({own_given}) -> {result}{rest}"
        )
    return match[0]


Arrays = Sequence[np.ndarray]

_AT_A_TIME = 64
"""How many values are kept as results together: more would be more memory than the fragment itself takes."""


class Opinions:
    """A fragment's results by two compilers, and by XLA in f64 where these two differ.

    Attributes:
        got, expected: by the compiler in question, and by XLA.
        rounding: what it does to the fragment's values.
    """

    def __init__(
        self, got: Arrays, expected: Arrays, rounding: Rounding, third: Callable[[], Arrays | None]
    ) -> None:
        """Takes what computes the results in f64; None where that is not possible."""
        self.got, self.expected, self.rounding, self._third = got, expected, rounding, third

    @functools.cached_property
    def exact(self) -> Arrays | None:
        """The results in f64."""
        return self._third()

    def by_another(self, got: Arrays) -> Opinions:
        """With the results of another program in place of those in question."""
        return Opinions(got, self.expected, self.rounding, lambda: self.exact)

    def difference(self, k: int) -> Difference:
        """Of result `k`."""
        return self.rounding.difference(self.got[k], self.expected[k])

    def largest(self) -> Difference:
        return self.rounding.largest(self.got, self.expected)

    @property
    def wrong(self) -> list[int]:
        """The results that differ beyond rounding, but for those in which only XLA's error is so large."""
        return [k for k in range(len(self.got)) if self.verdict(k) not in ("", "expected")]

    @property
    def less_exact(self) -> list[int]:
        """The results in which only XLA's error against f64 is larger than rounding explains."""
        return [k for k in range(len(self.got)) if self.verdict(k) == "expected"]

    def verdict(self, k: int) -> str:
        """Whose result `k` differs beyond rounding: `"got"`, `"expected"`, `"unknown"`, or ""."""
        if self.rounding.explains(self.difference(k)):
            return ""
        if self.exact is None:
            return "unknown"
        got, expected, exact = self.got[k], self.expected[k], self.exact[k]
        if self.rounding.is_beyond(got, expected, exact):
            return "got"
        return "expected" if self.rounding.is_beyond(expected, got, exact) else ""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Where a difference begins.

    Attributes:
        number: of the operation in the fragment.
        operation: its text.
        difference: of its value.
        kernel: the kernel that computes it, as in a listing of thunks.
        without: the pass over HLO without which it does not differ; "" if there is none.
    """

    number: int
    operation: str
    difference: Difference
    kernel: str = ""
    without: str = ""

    __repr__ = brief


@dataclasses.dataclass(frozen=True)
class Compilers:
    """The two compilers of a fragment's mesh.

    Attributes:
        mesh: its devices.
        backend: the name of the one in question.
        options: its options.
    """

    mesh: Mesh
    backend: str
    options: CompileOptions

    def opinions(self, fragment: FragmentModule, inputs: Arrays) -> Opinions:
        """The results of a fragment by both, and in f64.

        Raises:
            CompileError: one of them does not compile it.
        """
        expected = _run(XlaBackend().compile(fragment, self.mesh), fragment, self.mesh, inputs)
        got, _ = self.run(fragment, inputs)
        return opinions_of(fragment, self.mesh, got, expected, lambda: inputs)

    def run(self, fragment: FragmentModule, inputs: Arrays, *without: str) -> tuple[list[np.ndarray], str]:
        """The results by the compiler in question, without some passes, and the kernel of the last result.

        Raises:
            CompileError: it does not compile that.
        """
        disabled = (*self.options.disable_passes, *without)
        options = dataclasses.replace(self.options, disable_passes=disabled, dump=None)
        executable = get_backend(self.backend, options).compile(fragment, self.mesh)
        if executable.backend == "xla":
            raise CompileError("XLA compiles it instead")
        kernels = [
            line for line in executable.as_text("thunks").splitlines() if line[:1] not in ("", " ", "/")
        ]
        return _run(executable, fragment, self.mesh, inputs), kernels[-1] if kernels else ""

    def divergence(self, fragment: FragmentModule, inputs: Arrays) -> Divergence | None:
        """The first operation that differs; None if none does once its value is kept."""
        for values in _chunks(fragment):
            kept = keeping(fragment, values)
            opinions = self.opinions(kept, inputs)
            if opinions.wrong:
                first = opinions.wrong[0]
                number, _ = values[first]
                divergence = Divergence(number, _text(fragment, number), opinions.difference(first))
                return self._explained(fragment, divergence, values[first], inputs)
        return None

    def _explained(
        self, fragment: FragmentModule, divergence: Divergence, value: tuple[int, int], inputs: Arrays
    ) -> Divergence:
        """With the kernel and the pass, from the program of this value alone if that shows the difference."""
        alone = keeping(fragment, [value])
        opinions = self.opinions(alone, inputs)
        if not opinions.wrong:
            return divergence
        _, kernel = self.run(alone, inputs)
        return dataclasses.replace(divergence, kernel=kernel, without=self.guilty_pass(alone, inputs))

    def guilty_pass(self, fragment: FragmentModule, inputs: Arrays) -> str:
        """The pass without which nothing differs; "" if there is none."""
        opinions = self.opinions(fragment, inputs)
        for name in self._changing_passes(fragment):
            try:
                got, _ = self.run(fragment, inputs, name)
            except CompileError:  # nothing is compiled without it
                continue
            if not opinions.by_another(got).wrong:
                return name
        return ""

    def _changing_passes(self, fragment: FragmentModule) -> list[str]:
        """The passes over HLO that change a fragment, in the order in which they first do."""
        backend = get_backend(self.backend, self.options)
        of_mesh = backend.of(self.mesh) if isinstance(backend, PlatformBackend) else backend
        if not isinstance(of_mesh, FallbackBackend):
            return []
        names: dict[str, None] = {}
        passes = configured(of_mesh.first.target.passes(self.mesh.size, self.options), self.options)
        module = lowered(fragment, dict(self.mesh.shape))
        for pass_ in watched(passes, lambda _, inner, __: names.setdefault(inner.name)):
            if pass_.run(module) and not isinstance(pass_, Fixpoint):
                names[pass_.name] = None
        return list(names)


def opinions_of(
    fragment: FragmentModule,
    mesh: Mesh,
    got: Arrays,
    expected: Arrays,
    inputs: Callable[[], Arrays],
) -> Opinions:
    """Opinions about known results; `inputs` is called where they differ."""
    rounding = Rounding.of(fragment.text)
    return Opinions(got, expected, rounding, lambda: _exact_results(fragment, mesh, inputs()))


def _exact_results(fragment: FragmentModule, mesh: Mesh, inputs: Arrays) -> Arrays | None:
    """The results of a fragment by XLA in f64; None if it has operations that are not defined for it."""
    wide = widened(fragment)
    if wide is None:
        return None
    given = [
        array.astype(kind.dtype)
        for array, kind in zip(inputs, array_types(mesh, wide.arguments), strict=True)
    ]
    try:
        return _run(XlaBackend().compile(wide, mesh), wide, mesh, given)
    except (CompileError, IRError):
        return None


def host_copy(array: Any) -> np.ndarray:
    """The elements of an array in memory of their own: a view would keep the array from being donated."""
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            whole[shard.index] = np.asarray(shard.data)
    return whole


def _run(executable: Any, fragment: FragmentModule, mesh: Mesh, inputs: Arrays) -> list[np.ndarray]:
    with jax.enable_x64(True):
        placed = [
            jax.device_put(array, named_sharding(mesh, value))
            for array, value in zip(inputs, fragment.arguments, strict=True)
        ]
    return [host_copy(result) for result in executable(*placed)[: len(fragment.results)]]


# -- fragments that keep values


def _chunks(fragment: FragmentModule) -> Iterator[list[tuple[int, int]]]:
    """The values that operations compute, some at a time: the operation's number, and the result's."""
    with ir.context():
        ops = ir.ops(ir.symbol_table(ir.parse(fragment.text))["main"].body)
        values = [
            (number, k)
            for number, op in enumerate(ops)
            if not ir.is_constant(op) and op.operation.name != "stablehlo.iota"
            for k, result in enumerate(op.results)
            if isinstance(result.type, ir.RankedTensorType)
        ]
    for start in range(0, len(values), _AT_A_TIME):
        yield values[start : start + _AT_A_TIME]


def keeping(fragment: FragmentModule, values: Sequence[tuple[int, int]]) -> FragmentModule:
    """The fragment with values of its operations as its only results, whole on every device."""
    module = ir.parse(fragment.text)
    with ir.context(), ir.Location.unknown():
        main = ir.symbol_table(module)["main"]
        ops = ir.ops(main.body)
        kept = [ops[number].results[k] for number, k in values]
        old = main.terminator
        ir.create("func.return", kept, [], ir.before(old), location=old.location)
        ir.erase(old)
        ir.return_types_changed(main)
        specs = tuple(
            ValueSpec(tuple(v.type.shape), str(v.type.element_type), ((),) * len(v.type.shape)) for v in kept
        )
        return dataclasses.replace(
            fragment, text=ir.to_text(module), results=specs, donated=(), token=False, reserved_bytes=0
        )


def _text(fragment: FragmentModule, number: int) -> str:
    with ir.context():
        op = ir.ops(ir.symbol_table(ir.parse(fragment.text))["main"].body)[number]
        return ir.op_text(op).splitlines()[0]
