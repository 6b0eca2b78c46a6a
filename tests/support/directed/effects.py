"""For each pass over fragments and names, modules in which it finds something to do, among ops with effects.

A *motif* is the pattern that a pass looks for.  A module has one or more of them between other fragments,
which may have effects, and whose values the motifs share.  Values are integers: order does not change them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpmd import ir
from mpmd.passes import make_pass
from mpmd.support.passes import Pass
from tests.support import pass_programs
from tests.support.directed.effects_on_meshes import MOTIFS
from tests.support.directed.effects_writer import EFFECT, FragmentWriter, NameWriter
from tests.support.random_moments import MOMENTS, sharded_by_hand
from tests.support.random_ops import SCALAR, VECTOR


def _fresh(m: FragmentWriter) -> str:
    return f"c{m.w.count}"


def ordinary_calls(m: NameWriter) -> None:
    """Calls of one function, twice."""
    name = _fresh(m)
    m.callee(name, 1, m.ops("negate", "add"), topology=False)
    for _ in range(2):
        m.results.append(m.call(name, [m.value()], "", "func.call"))


def foreign_callees(m: NameWriter) -> None:
    """A callee that has no topology."""
    name = _fresh(m)
    m.callee(name, 2, m.ops("add"), topology=False)
    m.results.append(m.call(name, [m.value(), m.value()], "{call_counter = 0 : ui32} "))


def passed_on(m: NameWriter) -> None:
    """A callee that returns an argument, and may show another one."""
    name, shown = _fresh(m), m.rng.random() < 0.5

    def body(args: list[str]) -> list[str]:
        effect = f"stablehlo.custom_call @effect{m.w.count}({args[0]}) {EFFECT} : ({VECTOR}) -> ()"
        return [*([effect] if shown else []), args[1]]

    m.callee(name, 2, body)
    x = m.value()
    for i in range(2):
        x = m.call(name, [m.value(), x], f"{{call_counter = {i} : ui32}} ")
    m.results.append(x)


def sums_of_microbatches(m: NameWriter) -> None:
    """Microbatches that add to a sum, which is perhaps read in between."""
    name = _fresh(m)

    def body(args: list[str]) -> list[str]:
        inner, g, s = (m.w.new(VECTOR).name for _ in range(3))
        lines = m.ops("negate", "abs")([inner])
        computed = "\n    ".join([*lines[:-1], f"mpmd.return {lines[-1]} : {VECTOR}"])
        return [
            f'{g} = mpmd.named_computation<"f"> ({args[1]}) ({inner}: {VECTOR}) {{\n    {computed}\n  }} '
            f": ({VECTOR}) -> {VECTOR}",
            f"{s} = stablehlo.add {args[0]}, {g} : {VECTOR}",
            s,
        ]

    m.callee(name, 2, body)
    total = m.value()
    for i in range(m.rng.randint(2, 5)):
        total = m.call(name, [total, m.value()], f"{{call_counter = {i} : ui32}} ")
        if m.rng.random() < 0.3:
            m.results.append(total)
    m.results.append(total)


def constants_of_calls(m: NameWriter) -> None:
    """A constant that all calls are given, and a value from outside that they are given, too."""
    name = _fresh(m)
    m.callee(name, 3, m.ops("add", "multiply"))
    c = m.line(f"stablehlo.constant dense<5> : {VECTOR}")
    e = m.line(f"stablehlo.custom_call @effect{m.w.count}() {EFFECT} : () -> {VECTOR}")
    for i in range(2):
        m.results.append(m.call(name, [m.value(), e, c], f"{{call_counter = {i} : ui32}} "))


def loops(m: NameWriter) -> None:
    """A loop with an effect in it."""
    x, made, arg, inner, index = m.value(), *(m.w.new(VECTOR) for _ in range(3)), m.w.new("tensor<ui32>")
    count = m.rng.randint(1, 3)
    call = f"stablehlo.custom_call @effect{m.w.count}({arg.name}) {EFFECT} : ({VECTOR}) -> {VECTOR}"
    m.w.lines.append(
        f"{made.name} = mpmd.for ({x.name}) {{iterations = {count} : ui32, unroll_factor = {count} : ui32}} "
        f"({arg.name}: {VECTOR}, {index.name}: tensor<ui32>) {{\n    {inner.name} = {call}\n"
        f"    mpmd.return {inner.name} : {VECTOR}\n  }} : {VECTOR}"
    )
    m.results.append(made)


def unrolled_calls(m: NameWriter) -> None:
    """Calls of an unrolled loop."""
    name = _fresh(m)
    m.callee(name, 1, m.ops("negate"))
    for i in range(2):
        m.results.append(m.call(name, [m.value()], f"{{unroll_counter = {i} : ui32}} "))


def names_in_names(m: NameWriter) -> None:
    """A named tensor in a named computation."""

    def body(args: list[str]) -> list[str]:
        t = m.w.new(VECTOR).name
        *lines, y = m.ops("negate")([t])
        return [f'{t} = mpmd.named_tensor {args[0]} name="t" : {VECTOR}', *lines, y]

    m.results += m.named('"n"', [m.value()], body)


def constants_of_names(m: NameWriter) -> None:
    """A named computation that returns a constant, and what it draws without operands."""

    def body(args: list[str]) -> list[str]:
        c, e = m.w.new(VECTOR).name, m.w.new(VECTOR).name
        return [
            f"{c} = stablehlo.constant dense<7> : {VECTOR}",
            f"{e} = stablehlo.custom_call @effect{m.w.count}() {EFFECT} : () -> {VECTOR}",
            f"{c}, {e}",
        ]

    for v in m.named('"n"', [m.value()], body, 2):
        m.results.append(m.line(f"stablehlo.add {v.name}, {m.value().name} : {VECTOR}"))


def known_branches(m: NameWriter) -> None:
    """A conditional over names whose index is known, perhaps out of range, with an effect in each branch."""
    x, made = m.value(), m.w.new(VECTOR)
    index = m.line(f"stablehlo.constant dense<{m.rng.randint(-1, 3)}> : {SCALAR}", SCALAR)
    branches = []
    for i in range(3):
        arg, e, r = (m.w.new(VECTOR).name for _ in range(3))
        branches.append(
            f'{{\n    {r} = mpmd.named_computation<"n"> ({x.name}) ({arg}: {VECTOR}) {{\n'
            f"      {e} = stablehlo.multiply {arg}, {arg} : {VECTOR}\n      mpmd.return {e} : {VECTOR}\n"
            f"    }} : ({VECTOR}) -> {VECTOR}\n"
            + "".join(f"    %s{e[1:]}_{k} = stablehlo.negate {r} : {VECTOR}\n" for k in range(i))
            + f"    stablehlo.return {r if not i else f'%s{e[1:]}_{i - 1}'} : {VECTOR}\n  }}"
        )
    m.w.lines.append(
        f'{made.name} = "stablehlo.case"({index.name}) ({", ".join(branches)}) : ({SCALAR}) -> {VECTOR}'
    )
    m.pool.append(made)
    m.results.append(made)


TRACED: dict[str, Callable[[NameWriter], None]] = {
    "copy-topology-from-main": foreign_callees,
    "erase-unused-callee-block-arguments": passed_on,
    "fold-constant-branches": known_branches,
    "from-unroll-to-call-counter": unrolled_calls,
    "inline": ordinary_calls,
    "inline-nested-user-exposed-ops": names_in_names,
    "insert-nameless-clone-of-negligible-ops": constants_of_names,
    "mirror-stages": sums_of_microbatches,
    "call-inline": constants_of_calls,
    "sink-negligible-ops-into-call-op": constants_of_calls,
    "unroll-for-loops": loops,
}
_ASSIGNED = {"inline-nested-user-exposed-ops": "assignment=n@m1", "mirror-stages": "names=f"}


_INFO = 'FragmentInfo(origins=["f"],call_counter={},mesh_name="m1")'
_ORDERED = f"rules=FragmentScheduleRule(ordered_fragments=[{_INFO}->{_INFO}])"
# Meshes besides m1; some passes are about meshes that differ.
_EQUAL, _ANY = ("m2",), ("m2", "m3")
SHARDED = {
    "drop-sub-axes": _ANY,
    "extract-reshards-from-inter-mesh-transfers": _EQUAL,
    "fit-shardings-to-meshes": ("m3",),
    "populate-unreduced-out-sharding": _ANY,
    "reshards-to-constraints": _ANY,
}


_FROM_PIPELINES = """
    infer-mesh-assign-mesh-func-leaves infer-mesh-finalize infer-mesh-rewrite-using-analysis
    introduce-transfers lower-to-fragment-calls map-input-output-to-mesh map-named-ops-to-mpmd-ops
    mark-aliasing-and-donation propagate-shardings rule-based-merge simplify-named-computations
    simplify-program simplify-stablehlo
"""
_PLACED = ("input-assignment=0@m1", "output-assignment=0@m2", "input-assignment=0@m1 output-assignment=0@m2")
_ALONE = """
    carry-sums-through-calls forget-carried-starts rule-based-schedule sink-create-token-into-fragments
"""
DIRECTED = tuple(
    f"mpmd-{short}"
    for short in sorted({*TRACED, *MOTIFS, *SHARDED, *_FROM_PIPELINES.split(), *_ALONE.split()})
)
"""The passes with programs of which they change at least half."""


def program(name: str, seed: int) -> tuple[ir.Module, list[Pass]] | None:
    """A module for a pass, and the pass; None if it is refused on its way to the pass."""
    short = name.removeprefix("mpmd-")
    if short in TRACED:
        traced = NameWriter(seed)
        _write(traced, TRACED[short])
        return ir.parse(traced.text()), [make_pass(name, _ASSIGNED.get(short, ""))]
    if short in SHARDED:
        return ir.parse(sharded_by_hand(seed, SHARDED[short])), [make_pass(name)]
    if short == "forget-carried-starts":
        module, _ = _on_meshes("uniquify-carried-values", seed)
        make_pass("mpmd-uniquify-carried-values").run(module)
        return module, [make_pass(name)]
    if short == "rule-based-schedule":
        m = FragmentWriter(seed)
        MOTIFS["pipeline-scheduler"][0](m)
        module = ir.parse(m.text())
        first, second = m.rng.sample(range(3), 2)
        return module, [make_pass(name, _ORDERED.format(min(first, second), max(first, second)))]
    if short == "infer-mesh-convert-reduce-ops":
        module, passes = _on_meshes(short, seed)
        for before in ("use", "src"):
            make_pass(f"mpmd-infer-mesh-populate-{before}-set").run(module)
        return module, passes
    if short in MOTIFS:
        return _on_meshes(short, seed)
    if name in MOMENTS:
        return ir.parse(MOMENTS[name](seed)), [make_pass(name)]
    if short == "simplify-stablehlo" and seed % 4:  # behind the passes before it there is little to simplify
        seed = 2 * seed + 1
    found = pass_programs.prepared(name, seed, effects=True)
    if short == "map-input-output-to-mesh" and found:
        return found[0], [make_pass(name, _PLACED[seed % 3])]
    return found


def _on_meshes(short: str, seed: int) -> tuple[ir.Module, list[Pass]]:
    """A module with the motif of a pass, and the pass."""
    motif, options = MOTIFS[short]
    m = FragmentWriter(seed)
    _write(m, motif)
    return ir.parse(m.text()), [make_pass(f"mpmd-{short}", options)]


def _write(m: Any, motif: Callable[[Any], None]) -> None:
    """The motif once or twice, between other things."""
    for _ in range(m.rng.randint(1, 2)):
        for _ in range(m.rng.randint(0, 2)):
            m.noise()
        motif(m)
    if m.rng.random() < 0.5:
        m.noise()
