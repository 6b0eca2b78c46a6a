"""Motifs of `effects` on meshes: fragments and transfers."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.directed.effects_writer import EFFECT, MESHES, FragmentWriter
from tests.support.random_ops import SCALAR, VECTOR, listed, names_of

SQUARE, BATCH = "tensor<4x4xi32>", "tensor<2x4x4xi32>"


def _two(m: FragmentWriter) -> tuple[str, str]:
    first, second = m.rng.sample(MESHES, 2)
    return first, second


def scalars_sent(m: FragmentWriter) -> None:
    """Several scalars of one fragment for one reader on another mesh."""
    source, target = _two(m)
    count = m.rng.randint(2, 3)
    x = m.value(source)
    zero = m.w.new(SCALAR).name

    def sums(args: list[str]) -> list[str]:
        lines = [f"{zero} = stablehlo.constant dense<0> : {SCALAR}"]
        made = [m.w.new(SCALAR).name for _ in range(count)]
        for i, name in enumerate(made):
            kind = ("add", "maximum", "minimum")[i]
            lines.append(
                f"{name} = stablehlo.reduce({args[0]} init: {zero}) applies stablehlo.{kind} "
                f"across dimensions = [0] : ({VECTOR}, {SCALAR}) -> {SCALAR}"
            )
        return [*lines, ", ".join(made)]

    sent = [m.transfer(v, target) for v in m.fragment([x], sums, [SCALAR] * count, '"f"')]

    def scaled(args: list[str]) -> list[str]:
        spread, total = m.w.new(VECTOR).name, m.w.new(VECTOR).name
        each = [m.w.new(SCALAR).name for _ in args[2:]]
        lines, at = [], args[1]
        for name, arg in zip(each, args[2:]):
            lines.append(f"{name} = stablehlo.multiply {at}, {arg} : {SCALAR}")
            at = name
        lines.append(f"{spread} = stablehlo.broadcast_in_dim {at}, dims = [] : ({SCALAR}) -> {VECTOR}")
        return [*lines, f"{total} = stablehlo.add {args[0]}, {spread} : {VECTOR}", total]

    m.fragment([m.value(target), *sent], scaled, origin='"g"')


def there_and_back(m: FragmentWriter) -> None:
    """A value that is sent away, perhaps on, and back."""
    source, target = _two(m)
    value = m.transfer(m.value(source), target)
    if m.rng.random() < 0.5:
        value = m.transfer(value, next(x for x in MESHES if x not in (source, target)))
    m.results += m.fragment([m.transfer(value, source)], m.ops("negate"), origin='"f"')


def sums_of_sent(m: FragmentWriter) -> None:
    """Values of one mesh that are sent only to be added up."""
    source, target = _two(m)
    sent = [m.transfer(m.value(source), target) for _ in range(2)]
    fed = [v for v in m.pool if v not in sent]
    effects, m.w.effects = m.w.effects, False
    body = m.ops("add") if m.rng.random() < 0.2 else _plain(m, "add")
    m.w.effects = effects
    m.results += m.fragment(sent, body)
    m.pool = [v for v in m.pool if v in fed]


def _plain(m: FragmentWriter, name: str) -> Callable[[list[str]], list[str]]:
    def body(args: list[str]) -> list[str]:
        made = m.w.new(VECTOR).name
        return [f"{made} = stablehlo.{name} {args[0]}, {args[-1]} : {VECTOR}", made]

    return body


def _constant(m: FragmentWriter, number: int, tensor: str = VECTOR) -> Callable[[list[str]], list[str]]:
    def body(args: list[str]) -> list[str]:
        made = m.w.new(tensor).name
        return [f"{made} = stablehlo.constant dense<{number}> : {tensor}", made]

    return body


def carried_sums(m: FragmentWriter) -> None:
    """Microbatches that carry two sums, which begin with one value."""
    mesh = m.rng.choice(MESHES)
    (start,) = m.fragment([], _constant(m, 0), mesh=mesh)
    a = b = start
    for i in range(m.rng.randint(2, 3)):
        given = m.value(mesh)

        def both(args: list[str]) -> list[str]:
            x, y = m.w.new(VECTOR).name, m.w.new(VECTOR).name
            return [
                f"{x} = stablehlo.add {args[0]}, {args[2]} : {VECTOR}",
                f"{y} = stablehlo.subtract {args[1]}, {args[2]} : {VECTOR}",
                f"{x}, {y}",
            ]

        a, b = m.fragment([a, b, given], both, [VECTOR] * 2, '"f"(1)', f"{{call_counter = {i} : ui32}} ")
    m.results += [a, b]


def constants_passed(m: FragmentWriter) -> None:
    """A cheap function of a constant, made in one unnamed fragment and read in another."""
    mesh = m.rng.choice(MESHES)

    def spread(args: list[str]) -> list[str]:
        c, made = m.w.new(SCALAR).name, m.w.new(VECTOR).name
        return [
            f"{c} = stablehlo.constant dense<3> : {SCALAR}",
            f"{made} = stablehlo.broadcast_in_dim {c}, dims = [] : ({SCALAR}) -> {VECTOR}",
            made,
        ]

    def drawn(args: list[str]) -> list[str]:
        made = m.w.new(VECTOR).name
        return [f"{made} = stablehlo.custom_call @effect{m.w.count}() {EFFECT} : () -> {VECTOR}", made]

    made = [m.fragment([], body, mesh=mesh)[0] for body in (spread, drawn)]
    m.results += m.fragment([m.value(mesh), *made], m.ops("add", "multiply"))


def residuals(m: FragmentWriter, effects: float = 0.3) -> None:
    """A backward fragment that reads a cheap function of an argument, and one with an effect."""
    mesh = m.rng.choice(MESHES)
    x, counter = next(a for a in m.args if a.mesh == mesh), m.rng.randrange(3)

    def forward(args: list[str]) -> list[str]:
        y, e, t = (m.w.new(VECTOR).name for _ in range(3))
        return [
            f"{y} = stablehlo.negate {args[0]} : {VECTOR}",
            f"{e} = {middle.format(y)}",
            f"{t} = stablehlo.multiply {y}, {args[0]} : {VECTOR}",
            f"{y}, {e}, {t}",
        ]

    effect = f"stablehlo.custom_call @effect{m.w.count}a({{}}) {{{EFFECT}}} : ({VECTOR}) -> {VECTOR}"
    middle = effect if m.rng.random() < effects else f"stablehlo.abs {{}} : {VECTOR}"
    marks = f"{{call_counter = {counter} : ui32}} "
    made = m.fragment([x], forward, [VECTOR] * 3, '"f"', marks)
    m.fragment([x], m.ops("abs"), origin='"between"')
    m.results += m.fragment(
        [m.value(mesh), *made], m.ops("add", "multiply"), origin='"f"(1)', attributes=marks
    )


def scores(m: FragmentWriter) -> None:
    """A backward fragment that reads the product of two factors that it reads anyway."""
    mesh = m.rng.choice(MESHES)

    def factors(args: list[str]) -> list[str]:
        made = [m.w.new("tensor<2x4x2xi32>").name for _ in range(2)]
        lines = [
            f"{name} = stablehlo.broadcast_in_dim {args[0]}, dims = [1] : ({VECTOR}) -> tensor<2x4x2xi32>"
            for name in made
        ]
        return [*lines, ", ".join(made)]

    q, k = m.fragment([m.value(mesh)], factors, ["tensor<2x4x2xi32>"] * 2, '"in"')

    def forward(args: list[str]) -> list[str]:
        s, e = m.w.new(BATCH).name, m.w.new(BATCH).name
        return [
            f"{s} = stablehlo.dot_general {args[0]}, {args[1]}, batching_dims = [0] x [0], "
            f"contracting_dims = [2] x [2] : (tensor<2x4x2xi32>, tensor<2x4x2xi32>) -> {BATCH}",
            f"{e} = stablehlo.custom_call @effect{m.w.count}({s}) {EFFECT} : ({BATCH}) -> {BATCH}",
            f"{s}, {e}",
        ]

    marks = "{call_counter = 0 : ui32} "
    made = m.fragment([q, k], forward, [BATCH] * 2, '"f"', marks)

    def backward(args: list[str]) -> list[str]:
        made = m.w.new(BATCH).name
        return [f"{made} = stablehlo.multiply {args[0]}, {args[1]} : {BATCH}", made]

    m.results += m.fragment([*made, q, k], backward, [BATCH], '"f"(1)', marks)
    m.pool = [v for v in m.pool if v.tensor == VECTOR]


def transposed_products(m: FragmentWriter) -> None:
    """A product that is read transposed."""
    x = m.value()

    def product(args: list[str]) -> list[str]:
        d, t, s, c = (m.w.new(SQUARE).name for _ in range(4))
        return [
            f"{d} = stablehlo.dot_general {args[0]}, {args[1]}, contracting_dims = [] x [] "
            f": ({VECTOR}, {VECTOR}) -> {SQUARE}",
            f"{t} = stablehlo.transpose {d}, dims = [1, 0] : ({SQUARE}) -> {SQUARE}",
            f"{c} = stablehlo.constant dense<0> : {SCALAR}",
            f"{s} = stablehlo.reduce({t} init: {c}) applies stablehlo.add across dimensions = [0] "
            f": ({SQUARE}, {SCALAR}) -> {VECTOR}",
            s,
        ]

    m.results += m.fragment([x, m.value(x.mesh)], product, origin='"f"(1)')


def halves(m: FragmentWriter) -> None:
    """A backward fragment that sends some results and has effects in the rest."""
    source, target = _two(m)

    def both(args: list[str]) -> list[str]:
        *first, x = m.ops("negate", "multiply")(args)
        *second, y = m.ops("abs", "add")([x, args[-1]])
        shown = f"stablehlo.custom_call @effect{m.w.count}a({args[0]}) {EFFECT} : ({VECTOR}) -> ()"
        return [*first, shown, *second, f"{x}, {y}"]

    marks = "{call_counter = 1 : ui32} "
    x, y = m.fragment([m.value(source), m.value(source)], both, [VECTOR] * 2, '"f"(1)', marks)
    m.results += [m.transfer(x, target), y]


def waiting(m: FragmentWriter) -> None:
    """A fragment that waits for a transfer with a part of its work."""
    source, target = _two(m)
    late = m.transfer(m.value(source), target)

    def both(args: list[str]) -> list[str]:
        *first, x = m.ops("negate")(args[:1])
        *second, y = m.ops("add")([x, args[1]])
        return [*first, *second, f"{x}, {y}"]

    m.results += m.fragment([next(a for a in m.args if a.mesh == target), late], both, [VECTOR] * 2, '"f"')


def microbatches(m: FragmentWriter) -> None:
    """Forward and backward work of two stages, last microbatch first."""
    for i in reversed(range(3)):
        marks = f"{{call_counter = {i} : ui32}} "
        a = m.fragment([m.args[0]], m.ops("negate", "add"), origin='"f"', attributes=marks)[0]
        b = m.fragment([m.transfer(a, "m2")], m.ops("abs"), origin='"g"', attributes=marks)[0]
        c = m.fragment([b], m.ops("multiply"), origin='"g"(1)', attributes=marks)[0]
        back = m.transfer(c, "m1")
        m.results += m.fragment([back, a], m.ops("add"), origin='"f"(1)', attributes=marks)


def neighbours(m: FragmentWriter) -> None:
    """A forward fragment right before its backward."""
    x = m.value()
    m.fragment([x], m.ops("abs"), origin='"n"')
    marks = "{call_counter = 5 : ui32} "
    made = m.fragment([x], m.ops("negate", "add"), origin='"f"', attributes=marks)
    m.results += m.fragment(made, m.ops("multiply"), origin='"f"(1)', attributes=marks)


def rounds(m: FragmentWriter) -> None:
    """Unnamed work before and after microbatches."""
    microbatches(m)
    for v in m.results[-2:]:
        m.results += m.fragment([v], m.ops("add"))
    m.results += m.fragment([m.value("m1")], m.ops("abs"))


def early_work(m: FragmentWriter) -> None:
    """Unnamed work, and loads from the host, long before they are read."""
    mesh = m.rng.choice(MESHES)
    (made,) = m.fragment([m.value(mesh)], m.ops("negate"))
    stored = m.transfer(m.value("m1"), "m1/cpu")
    loaded = m.transfer(stored, "m1")
    m.pool = [v for v in m.pool if v.mesh != "m1/cpu"]
    m.noise()
    m.results += m.fragment([made, m.value(mesh)], m.ops("add"), origin='"late"')
    for _ in range(2):
        m.results += m.fragment([loaded], m.ops("abs"), origin='"late"')


def names_of_nothing(m: FragmentWriter) -> None:
    """A named fragment that only passes a value on."""
    m.results += m.fragment([m.value()], lambda args: [args[0]], origin='"f"')


def returned_twice(m: FragmentWriter) -> None:
    """An argument that is returned, and a result that is returned twice."""
    (made,) = m.fragment([m.value()], m.ops("negate"), origin='"f"')
    m.results += [made, made, m.args[0]]


def equal_values(m: FragmentWriter) -> None:
    """A fragment that reads one value twice, and returns one value twice."""
    x = m.value()

    def body(args: list[str]) -> list[str]:
        *lines, y = m.ops("add", "negate")(args)
        return [*lines, f"{y}, {y}"]

    made = m.fragment([x, x], body, [VECTOR] * 2, '"f"')
    m.results += m.fragment(made, m.ops("subtract"), origin='"g"')


def scalar_results(m: FragmentWriter) -> None:
    """A count of an argument, and another scalar from outside."""
    n = m.w.new(SCALAR, "m1")
    m.args.append(n)

    def counts(args: list[str]) -> list[str]:
        c, s, e = (m.w.new(SCALAR).name for _ in range(3))
        return [
            f"{c} = stablehlo.constant dense<1> : {SCALAR}",
            f"{s} = stablehlo.add {args[0]}, {c} : {SCALAR}",
            f"{e} = stablehlo.custom_call @effect{m.w.count}({s}) {EFFECT} : ({SCALAR}) -> {SCALAR}",
            f"{s}, {e}",
        ]

    m.results += m.fragment([n], counts, [SCALAR] * 2)
    m.pool = [v for v in m.pool if v.tensor == VECTOR]


def unnamed_next_to_named(m: FragmentWriter) -> None:
    """Unnamed work with one named reader, and behind a named fragment; and a copy for two readers."""
    x = m.value()
    (made,) = m.fragment([x], m.ops("negate"))
    (f,) = m.fragment([made], m.ops("add"), origin='"f"')
    m.results += m.fragment([f], m.ops("abs"))
    (one,) = m.fragment([m.value(x.mesh)], _single_op(m))
    m.results += [m.fragment([one], m.ops("add"), origin=f'"r{i}"')[0] for i in range(2)]


def _single_op(m: FragmentWriter) -> Callable[[list[str]], list[str]]:
    def body(args: list[str]) -> list[str]:
        made = m.w.new(VECTOR).name
        if m.rng.random() < 0.5:
            return [f"{made} = stablehlo.negate {args[0]} : {VECTOR}", made]
        call = f"stablehlo.custom_call @effect{m.w.count}({args[0]}) {EFFECT} : ({VECTOR}) -> {VECTOR}"
        return [f"{made} = {call}", made]

    return body


def same_stage(m: FragmentWriter) -> None:
    """Two named fragments of one microbatch, one of which reads the other."""
    marks = "{call_counter = 2 : ui32} "
    made = m.fragment([m.value()], m.ops("add"), origin='"f"', attributes=marks)
    m.results += m.fragment(made, m.ops("negate"), origin='"g"', attributes=marks)


def far_constants(m: FragmentWriter) -> None:
    """A constant, and a value from outside without operands, that a fragment on another mesh reads."""
    source, target = _two(m)
    (c,) = m.fragment([], _constant(m, 4), mesh=source)

    def drawn(args: list[str]) -> list[str]:
        made = m.w.new(VECTOR).name
        effect = f"stablehlo.custom_call @effect{m.w.count}() {EFFECT} : () -> {VECTOR}"
        return [f"{made} = {effect}", made]

    (d,) = m.fragment([], drawn, mesh=source)
    sent = [m.transfer(v, target) for v in (c, d)]
    m.results += m.fragment([m.value(target), *sent], m.ops("add", "multiply"), origin='"f"')


def shardy_constants(m: FragmentWriter) -> None:
    """A constant as Shardy writes it."""

    def body(args: list[str]) -> list[str]:
        c, s = m.w.new(VECTOR).name, m.w.new(VECTOR).name
        lines = [f"{c} = sdy.constant dense<2> : {VECTOR}", f"{s} = stablehlo.add {args[0]}, {c} : {VECTOR}"]
        return [*lines, s]

    m.results += m.fragment([m.value()], body, origin='"f"')


def reductions(m: FragmentWriter) -> None:
    """A sum of values from several meshes that may be reduced across them."""
    source, target = _two(m)
    terms = [m.w.new(VECTOR) for _ in range(m.rng.randint(2, 3))]
    for term, mesh in zip(terms, (source, target, source)):
        value = m.value(mesh)
        m.w.lines.append(f"{term.name} = mpmd.unassign {value.name} : ({value.type}) -> {VECTOR}")
    total, *rest = terms
    for term in rest:
        made = m.w.new(VECTOR)
        m.w.lines.append(f"{made.name} = stablehlo.add {total.name}, {term.name} : {VECTOR}")
        total = made
    reduced, there = m.w.new(VECTOR), m.w.new(VECTOR, target)
    m.w.lines += [
        f"{reduced.name} = mpmd.reduce<none> {total.name} : ({VECTOR}) -> {VECTOR}",
        f"{there.name} = mpmd.assign {reduced.name} : ({VECTOR}) -> {there.type}",
    ]
    m.pool.append(there)
    m.results.append(there)


def carried_over_meshes(m: FragmentWriter) -> None:
    """Calls that carry sums with terms of several meshes, which may change places or be read in between."""
    count, name = m.rng.randint(1, 2), f"c{m.w.count}"
    given = [m.w.new(VECTOR, mesh) for mesh in MESHES]
    sums, lines, returned = [m.w.new(VECTOR) for _ in range(count)], list[str](), list[str]()
    for carried in sums:
        at, terms = carried.name, m.rng.sample(given, m.rng.randint(2, 3))
        parts = []
        for value in terms:
            plain, term = m.w.new(VECTOR).name, m.w.new(VECTOR).name
            lines += [
                f"{plain} = mpmd.unassign {value.name} : ({value.type}) -> {VECTOR}",
                f"{term} = stablehlo.{m.rng.choice(['negate', 'abs'])} {plain} : {VECTOR}",
            ]
            parts.append(term)
        for part in parts:
            made = m.w.new(VECTOR).name
            lines.append(f"{made} = stablehlo.add {at}, {part} : {VECTOR}")
            at = made
        returned.append(at)
    types = ", ".join([VECTOR] * count)
    signature = ", ".join(f"{v.name}: {v.type}" for v in [*given, *sums])
    body = "\n  ".join([*lines, f"return {', '.join(returned)} : {types}"])
    m.callees.append(
        f"func.func private @{name}({signature}) -> ({types}) attributes "
        f"{{topology = #mpmd.topology<{m.topology}>}} {{\n  {body}\n}}"
    )
    at = [m.w.new(VECTOR) for _ in sums]
    m.args += at
    for i in range(m.rng.randint(2, 4)):
        made = [m.w.new(VECTOR) for _ in sums]
        inputs = [m.args[0], m.args[1], m.args[2], *at]
        m.w.lines.append(
            f"{names_of(made)} = mpmd.call @{name}({names_of(inputs)}) {{call_counter = {i} : ui32}} "
            f": ({listed(inputs)}) -> ({types})"
        )
        if m.rng.random() < 0.3:
            m.results.append(m.rng.choice(made))
        at = made if m.rng.random() < 0.8 else made[::-1]
    m.results += at


Motif = Callable[[FragmentWriter], None]
MOTIFS: dict[str, tuple[Motif, str]] = {
    "absorb-inferred-fragments": (unnamed_next_to_named, "absorb-on-entry-point-function=true"),
    "combine-before-transfer": (sums_of_sent, ""),
    "convert-sdy-constants": (shardy_constants, ""),
    "infer-mesh-convert-reduce-ops": (reductions, ""),
    "split-accumulators-by-mesh": (carried_over_meshes, ""),
    "copy-cheap-constants": (constants_passed, ""),
    "copy-constants": (far_constants, ""),
    "copy-scalar-results": (scalar_results, "meshes=m1,m2,m3 max-ops=4"),
    "delay-inferred-fragments": (early_work, ""),
    "delay-transfers-from-cpu": (early_work, ""),
    "forget-empty-computations": (names_of_nothing, ""),
    "fragment-dce": (unnamed_next_to_named, ""),
    "fragment-dedup": (equal_values, ""),
    "merge-forward-with-backward": (neighbours, ""),
    "merge-inferred-by-round": (rounds, ""),
    "merge-inferred-fragments": (unnamed_next_to_named, "clone-inferred-fragments=true"),
    "merge-transfers": (scalars_sent, ""),
    "merge-user-fragments-into-scheduling-units": (same_stage, ""),
    "move-transfers-to-producer": (early_work, ""),
    "order-by-tasks": (microbatches, "orders=m1:0F0,0F1,0F2,0B0,0B1,0B2;m2:1F0,1B0,1F1,1B1,1F2,1B2"),
    "pipeline-scheduler": (microbatches, "must-happen-before=1F1B"),
    "recompute-attention": (scores, ""),
    "recompute-cheap-residuals": (lambda m: residuals(m, 0.8), ""),
    "remat-fragment": (residuals, ""),
    "remove-transfer-cycles": (there_and_back, ""),
    "split-and-prioritize-transfer-independent-computations": (waiting, ""),
    "split-bwd-fragments": (halves, ""),
    "swap-transposed-dots": (transposed_products, ""),
    "uniquify-carried-values": (carried_sums, ""),
    "uniquify-function-inputs-outputs": (returned_twice, ""),
}
