"""Random valid modules in which certain passes find something to do, which other modules rarely have.

Values are integers, so that order and grouping do not change them.  Same seed, same module.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.support.random_ops import VECTOR, RandomValue, Writer, listed, names_of, types_of

SQUARE = "tensor<8x8xi32>"
TOKEN = "!stablehlo.token"
_MESHES = ("m1", "m2", "m3")
_TOPOLOGY = ", ".join(f'<"{mesh}" : <["x"=2]>>' for mesh in _MESHES)


def _function(
    name: str, args: list[RandomValue], w: Writer, results: list[RandomValue], topology: str = _TOPOLOGY
) -> str:
    signature = ", ".join(f"{a.name}: {a.type}" for a in args)
    body = "\n  ".join([*w.lines, f"return {names_of(results)} : {listed(results)}"])
    visibility = "public" if name == "main" else "private"
    return (
        f"func.func {visibility} @{name}({signature}) -> {types_of(results)} "
        f"attributes {{topology = #mpmd.topology<{topology}>}} {{\n  {body}\n}}"
    )


def _call(
    w: Writer, inputs: list[RandomValue], results: list[RandomValue], counter: int
) -> list[RandomValue]:
    made = [w.new(v.tensor, v.mesh) for v in results]
    names = names_of(made)
    w.lines.append(
        f"{names} = mpmd.call @body({names_of(inputs)}) {{call_counter = {counter} : ui32}} "
        f": ({listed(inputs)}) -> {types_of(made)}"
    )
    return made


def _added(w: Writer, a: RandomValue, b: RandomValue) -> RandomValue:
    made = w.new(a.tensor)
    first, second = w.rng.sample([a, b], 2)
    w.lines.append(f"{made.name} = stablehlo.add {first.name}, {second.name} : {made.tensor}")
    return made


def sums_over_meshes(seed: int) -> str:
    """Calls that hand on sums, whose terms are unassigned from one or several meshes."""
    rng = random.Random(seed)
    body = Writer(rng)
    inputs = [body.new(VECTOR, mesh) for mesh in _MESHES]
    sums = [body.new(VECTOR) for _ in range(rng.randint(1, 3))]
    results = []
    for carried in sums:
        terms = [carried]
        for value in rng.choices(inputs, k=rng.randint(1, 4)):
            made, term = body.new(VECTOR, value.mesh), body.new(VECTOR)
            args, text, returned = body.region([value], rng.randint(1, 3), 1)
            if returned[0].tensor != VECTOR:
                returned = [RandomValue(args.partition(":")[0].strip(), VECTOR)]
                text = f"mpmd.return {returned[0].name} : {VECTOR}"
            body.lines.append(
                f'{made.name} = mpmd.fragment<mesh="{value.mesh}", origin=["f"]> ({value.name}) ({args}) {{\n'
                f"  {text}\n  }} : ({value.type}) -> {made.type}"
            )
            body.lines.append(f"{term.name} = mpmd.unassign {made.name} : ({made.type}) -> {VECTOR}")
            terms.append(term)
        while len(terms) > 1:
            a, b = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
            terms.append(_added(body, a, b))
        results.append(terms[0])
    if rng.random() < 0.2:
        results.append(sums[0])  # the sum before has another use: it must stay
    main = Writer(rng)
    args = [main.new(v.tensor, v.mesh) for v in [*inputs, *sums]]
    given, carried = args[: len(inputs)], args[len(inputs) :]
    for i in range(rng.randint(1, 4)):
        carried = _call(main, [*given, *carried], results, i)[: len(sums)]
    return "\n".join(
        [_function("main", args, main, carried), _function("body", [*inputs, *sums], body, results)]
    )


def sums_behind_calls(seed: int) -> str:
    """Calls whose results are added up behind all of them, some in order, some not, some with other uses."""
    rng = random.Random(seed)
    body, main = Writer(rng), Writer(rng)
    inputs = [body.new(VECTOR) for _ in range(2)]
    pool = [v for v in body.computed(inputs, rng.randint(2, 6)) if v.tensor == VECTOR]
    results = rng.choices(pool, k=rng.randint(1, 3))
    args = [main.new(VECTOR) for _ in range(3)]
    calls = [_call(main, rng.choices(args, k=2), results, i) for i in range(rng.randint(2, 4))]
    returned = []
    for i in range(len(results)):
        terms = [made[i] for made in calls]
        if rng.random() < 0.2:
            rng.shuffle(terms)
        total = _added(main, args[0], terms[0]) if rng.random() < 0.5 else terms[0]
        for term in terms[1:]:
            total = _added(main, total, term)
        returned.append(total)
    if rng.random() < 0.2:
        returned.append(calls[0][0])
    return "\n".join([_function("main", args, main, returned), _function("body", inputs, body, results)])


def tokens(seed: int) -> str:
    """Fragments that hand each other tokens."""
    rng = random.Random(seed)
    w = Writer(rng)
    args = [w.new(VECTOR, mesh) for mesh in _MESHES[:2]]
    pool, made_tokens = list(args), list[RandomValue]()
    for _ in range(rng.randint(2, 6)):
        mesh = rng.choice(_MESHES[:2])
        values = rng.choices([v for v in pool if v.mesh == mesh], k=rng.randint(1, 2))
        used = rng.sample(made_tokens, min(len(made_tokens), rng.randint(0, 2)))
        inputs = [*values, *used]
        rng.shuffle(inputs)
        inner = [w.new(v.tensor) for v in inputs]
        result, token = w.new(VECTOR), w.new(TOKEN)
        plain = next(v for v in inner if v.tensor == VECTOR)
        given = [v.name for v in inner if v.tensor == TOKEN]
        made = f"after_all {', '.join(given)}" if given else "create_token"
        outer = [w.new(VECTOR, mesh), w.new(TOKEN)]
        returned = [result, token]
        if rng.random() < 0.5:
            outer, returned = outer[::-1], returned[::-1]
        arguments = ", ".join(f"{a.name}: {a.tensor}" for a in inner)
        w.lines.append(
            f'{names_of(outer)} = mpmd.fragment<mesh="{mesh}", origin=["f"]> ({names_of(inputs)}) '
            f"({arguments}) {{\n"
            f"    {token.name} = stablehlo.{made} : {TOKEN}\n"
            f"    {result.name} = stablehlo.negate {plain.name} : {VECTOR}\n"
            f"    mpmd.return {names_of(returned)} : {listed(returned)}\n"
            f"  }} : ({listed(inputs)}) -> {types_of(outer)}"
        )
        pool += [v for v in outer if v.tensor == VECTOR]
        made_tokens += [v for v in outer if v.tensor == TOKEN]
    return _function("main", args, w, pool[2:])


_AXES = {"m1": {"x": 4, "y": 2}, "m2": {"x": 4, "y": 2}, "m3": {"x": 2}}
_DIMS = ['{"x"}', '{"y"}', '{"x":(1)2}', '{"x":(2)2}', '{"y", "x":(1)2}', "{}", "{}"]


def _sharding(rng: random.Random) -> str:
    """A sharding of a square, in which no part of an axis comes twice."""
    first, second = rng.choice([(a, b) for a in _DIMS for b in _DIMS if not (set("xy") & set(a) & set(b))])
    return f"<@mesh, [{first}, {second}]>"


def sharded_by_hand(seed: int, others: tuple[str, ...] = ("m2", "m3")) -> str:
    """Fragments and transfers with shardings over parts of axes, and sums left open; meshes may differ."""
    rng = random.Random(seed)
    meshes = ("m1", rng.choice(others))
    topology = ", ".join(
        f'<"{m}" : <[{", ".join(f"{chr(34)}{a}{chr(34)}={n}" for a, n in _AXES[m].items())}]>>'
        for m in meshes
    )
    w = Writer(rng)
    args = [w.new(SQUARE, mesh) for mesh in meshes]
    pool = list(args)
    for _ in range(rng.randint(2, 6)):
        value = rng.choice(pool)
        if rng.random() < 0.4:
            made = w.new(SQUARE, rng.choice(meshes))
            marks = (
                f"{{sdy.sharding = #sdy.sharding_per_value<[{_sharding(rng)}]>}} "
                if rng.random() < 0.7
                else ""
            )
            w.lines.append(f"{made.name} = mpmd.transfer {marks}{value.name} : ({value.type}) -> {made.type}")
            pool.append(made)
            continue
        arg, inner, open_, made = w.new(SQUARE), w.new(SQUARE), w.new(SQUARE), w.new(SQUARE, value.mesh)
        ins = f", in_shardings=[{_sharding(rng)}]" if rng.random() < 0.7 else ""
        outs = ", out_shardings=[<@mesh, [{}, {}]>]" if rng.random() < 0.5 else ""
        op = rng.choice(["sharding_constraint", "reshard"])
        unreduced = rng.choice(['unreduced={"y"}', 'unreduced={"x"}', ""])
        constraint = f"<@mesh, [{{}}, {{}}]{', ' * bool(unreduced)}{unreduced}>"
        w.lines.append(
            f'{made.name} = mpmd.fragment<mesh="{value.mesh}", origin=["f"]{ins}{outs}> ({value.name}) '
            f"({arg.name}: {SQUARE}) {{\n"
            f"    {inner.name} = stablehlo.add {arg.name}, {arg.name} : {SQUARE}\n"
            f"    {open_.name} = sdy.{op} {inner.name} {constraint} : {SQUARE}\n"
            f"    mpmd.return {open_.name} : {SQUARE}\n  }} : ({value.type}) -> {made.type}"
        )
        pool.append(made)
    return 'sdy.mesh @mesh = <["x"=4, "y"=2]>\n' + _function("main", args, w, pool[2:], topology)


MOMENTS: dict[str, Callable[[int], str]] = {
    "mpmd-carry-sums-through-calls": sums_behind_calls,
    "mpmd-drop-sub-axes": sharded_by_hand,
    "mpmd-fit-shardings-to-meshes": sharded_by_hand,
    "mpmd-populate-unreduced-out-sharding": sharded_by_hand,
    "mpmd-sink-create-token-into-fragments": tokens,
    "mpmd-split-accumulators-by-mesh": sums_over_meshes,
}
"""For passes that modules of `random_mpmd` give nothing to do: modules that do."""
