"""For passes of simplification."""

from __future__ import annotations

from tests.support.left_alone.text import ALL, FIRST, LOOP, MAXIMUM, SUM, entry, loop, scalars

_EFFECT = 'custom-call(w), custom_call_target="print", custom_call_has_side_effect=true'
_COUNTED = (
    "  l = (s32[], f32[4], f32[4], f32[4]) while(init), condition=less, body=step, "
    'backend_config={"known_trip_count":{"n":"5"}}\n'
)


def _loop(body: str, returned: str, after: str, counted: bool = True, **options: object) -> str:
    """A program with one loop; `counted` if its number of iterations is written down."""
    lines = LOOP if not counted else LOOP[: LOOP.index("  l = ")] + _COUNTED
    return entry(lines + after, loop(body, returned, **options))  # type: ignore[arg-type]


def _branches(first: str, second: str, lines: str) -> str:
    called = ""
    for name, operation in (("one", first), ("two", second)):
        called += f"{name} {{\n  p = f32[4] parameter(0)\n  n = f32[4] {operation}\n"
        called += "  ROOT t = (f32[4], f32[4]) tuple(n, p)\n}\n\n"
    start = "  q = pred[] parameter(0)\n  x = f32[4] parameter(1)\n  y = f32[4] parameter(2)\n"
    return entry(start + lines, called)


_CHOICE = "  c = (f32[4], f32[4]) conditional(q, x, {}), true_computation=one, false_computation=two\n"
_BOTH = (
    "  a = f32[4] get-tuple-element(c), index=0\n  b = f32[4] get-tuple-element(c), index=1\n"
    "  ROOT r = (f32[4], f32[4]) tuple(a, b)"
)


def _labels(rows: int, columns: int, dtype: str, x: str = "exponential(p)") -> str:
    """One element of each row."""
    return entry(
        f"  p = f32[{rows},{columns}] parameter(0)\n  x = f32[{rows},{columns}] {x}\n"
        f"  l = {dtype}[{rows},1] parameter(1)\n  i = {dtype}[{rows},1] iota(), iota_dimension=0\n"
        f"  c = {dtype}[{rows},2] concatenate(i, l), dimensions={{1}}\n"
        f"  ROOT r = f32[{rows}] gather(x, c), offset_dims={{}}, collapsed_slice_dims={{0,1}}, "
        "start_index_map={0,1}, index_vector_dim=1, slice_sizes={1,1}"
    )


def _added(combination: str, start: str = "0", dtype: str = "s32", columns: int = 9) -> str:
    """An update of one element of each row."""
    return entry(
        f"  z = f32[] constant({start})\n  x = f32[5,{columns}] broadcast(z), dimensions={{}}\n"
        f"  u = f32[5] parameter(0)\n  l = {dtype}[5,1] parameter(1)\n"
        f"  i = {dtype}[5,1] iota(), iota_dimension=0\n"
        f"  c = {dtype}[5,2] concatenate(i, l), dimensions={{1}}\n"
        f"  ROOT r = f32[5,{columns}] scatter(x, c, u), update_window_dims={{}}, "
        "inserted_window_dims={0,1}, scatter_dims_to_operand_dims={0,1}, index_vector_dim=1, to_apply=f",
        scalars("f", "f32", combination),
    )


_SORTED = (
    "before {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  c = s32[] parameter(2)\n"
    "  d = s32[] parameter(3)\n  ROOT l = pred[] compare(c, d), direction=LT\n}\n"
)
_SORT = (
    "  x = f32[4] parameter(0)\n  k = s32[4] parameter(1)\n"
    "  s = (f32[4], s32[4]) sort(x, k), dimensions={0}, to_apply=before\n"
)

_ACCUMULATES = "  y = f32[4] add(x, w)"
_LOOPS = {
    "state of a loop that changes, though it begins with a constant": (
        "hlo-while-simplifier",
        _loop("  y = f32[4] add(x, w)\n  v = f32[4] add(w, d)", "y, v, d", ALL).replace(
            "w = f32[4] parameter(1)\n  d = f32[4] parameter(2)",
            "k = f32[] constant(2)\n  w = f32[4] broadcast(k), dimensions={}\n  d = f32[4] parameter(1)",
        ),
    ),
    "state that an effect reads": (
        "hlo-while-simplifier",
        _loop(f"  y = f32[4] add(x, d)\n  e = f32[4] {_EFFECT}", "y, w, d", FIRST),
    ),
    "state that needed state reads": (
        "hlo-while-simplifier",
        _loop(
            "  y = f32[4] add(x, w)\n  v = f32[4] multiply(w, d)\n  q = f32[4] add(d, w)", "y, v, q", FIRST
        ),
    ),
    "unused state of loops that share their body": (
        "hlo-while-simplifier",
        entry(
            LOOP + "  k = (s32[], f32[4], f32[4], f32[4]) while(init), condition=less, body=step\n"
            "  a = f32[4] get-tuple-element(l), index=1\n  b = f32[4] get-tuple-element(k), index=2\n"
            "  ROOT r = f32[4] add(a, b)",
            loop(_ACCUMULATES, "y, w, d"),
        ),
    ),
    "unused state of a loop whose order is fixed": (
        "hlo-while-simplifier",
        entry(
            LOOP.replace("body=step", "body=step, control-predecessors={early}").replace(
                "  zero", "  early = f32[4] negate(w)\n  zero"
            )
            + FIRST,
            loop(_ACCUMULATES, "y, w, d"),
        ),
    ),
    "state that is a result as a whole": (
        "hlo-while-simplifier",
        entry(LOOP.replace("  l =", "  ROOT l ="), loop(_ACCUMULATES, "y, w, d")),
    ),
    "a single iteration whose condition has an effect": (
        "hlo-while-simplifier",
        _loop(
            "  y = f32[4] add(x, w)\n  v = f32[4] add(w, d)\n  q = f32[4] add(d, x)",
            "y, v, q",
            ALL,
            condition="  e = s32[] custom-call(i), "
            'custom_call_target="ask", custom_call_has_side_effect=true\n'
            "  ROOT c = pred[] compare(i, n), direction=LT",
            trips=1,
        ).replace('"n":"5"', '"n":"1"'),
    ),
    "an effect of what does not change": (
        "hlo-while-invariant-code-motion",
        _loop(f"  e = f32[4] {_EFFECT}\n  y = f32[4] add(x, d)", "y, w, d", ALL),
    ),
    "an effect for each element of what does not change": (
        "hlo-while-invariant-code-motion",
        _loop(
            "  e = f32[4] map(w), dimensions={0}, to_apply=f\n  y = f32[4] add(x, e)", "y, w, d", ALL
        ).replace(
            "less {",
            "f {\n  w = f32[] parameter(0)\n  ROOT e = f32[] " + _EFFECT + "\n}\n\nless {",
            1,
        ),
    ),
    "a sum over devices of what does not change": (
        "hlo-while-invariant-code-motion",
        _loop(
            "  e = f32[4] all-reduce(w), replica_groups={}, to_apply=sum\n  y = f32[4] add(x, e)",
            "y, w, d",
            ALL,
        ).replace("less {", SUM + "\nless {", 1),
    ),
    "work on what changes": (
        "hlo-while-invariant-code-motion",
        _loop("  e = f32[4] tanh(w)\n  y = f32[4] add(x, e)\n  v = f32[4] add(w, d)", "y, v, d", ALL),
    ),
    "work whose order in the body is fixed": (
        "hlo-while-invariant-code-motion",
        _loop(
            "  g = f32[4] negate(x)\n  e = f32[4] tanh(w), control-predecessors={g}\n  y = f32[4] add(g, e)",
            "y, w, d",
            ALL,
        ),
    ),
    "work of loops that share their body": (
        "hlo-while-invariant-code-motion",
        entry(
            LOOP + "  k = (s32[], f32[4], f32[4], f32[4]) while(init), condition=less, body=step\n"
            "  a = f32[4] get-tuple-element(l), index=1\n  b = f32[4] get-tuple-element(k), index=2\n"
            "  ROOT r = f32[4] add(a, b)",
            loop("  e = f32[4] tanh(w)\n  y = f32[4] add(x, e)", "y, w, d"),
        ),
    ),
    "a few iterations with an effect": (
        "hlo-while-loop-unroller",
        _loop(f"  e = f32[4] {_EFFECT}\n  y = f32[4] add(x, e)", "y, w, d", ALL),
    ),
    "a few iterations whose order is fixed": (
        "hlo-while-loop-unroller",
        entry(
            LOOP.replace("body=step", "body=step, control-predecessors={early}").replace(
                "  zero", "  early = f32[4] negate(w)\n  zero"
            )
            + ALL,
            loop(_ACCUMULATES, "y, w, d"),
        ),
    ),
    "a counter that another element counts": (
        "hlo-while-loop-unroller",
        entry(
            LOOP + ALL,
            loop(_ACCUMULATES, "y, w, d")
            .replace("next = s32[] add(i, one)", "next = s32[] add(j, one)")
            .replace("  one =", "  f = f32[] constant(0)\n  j = s32[] convert(f)\n  one ="),
        ),
    ),
    "a limit that is computed": (
        "hlo-while-loop-unroller",
        entry(
            LOOP + ALL,
            loop(
                _ACCUMULATES,
                "y, w, d",
                condition="  m = s32[] negate(i)\n  ROOT c = pred[] compare(i, m), direction=LT",
            ),
        ),
    ),
    "equal branches on different operands": (
        "hlo-conditional-simplifier",
        _branches("negate(p)", "negate(p)", _CHOICE.format("y") + _BOTH),
    ),
    "different branches on one operand": (
        "hlo-conditional-simplifier",
        _branches("negate(p)", "abs(p)", _CHOICE.format("x") + _BOTH),
    ),
    "unused results of a branch whose order is fixed": (
        "hlo-conditional-simplifier",
        _branches(
            "negate(p)",
            "abs(p)",
            "  e = f32[4] negate(y)\n"
            + _CHOICE.format("y").replace("=two\n", "=two, control-predecessors={e}\n")
            + "  ROOT r = f32[4] get-tuple-element(c), index=0",
        ),
    ),
    "unused results of branches that others call": (
        "hlo-conditional-simplifier",
        _branches(
            "negate(p)",
            "abs(p)",
            _CHOICE.format("y")
            + "  k = (f32[4], f32[4]) conditional(q, y, x), true_computation=one, false_computation=two\n"
            "  a = f32[4] get-tuple-element(c), index=0\n  b = f32[4] get-tuple-element(k), index=1\n"
            "  ROOT r = f32[4] add(a, b)",
        ),
    ),
    "results of a branch that are read as a whole": (
        "hlo-conditional-simplifier",
        _branches(
            "negate(p)",
            "abs(p)",
            _CHOICE.format("y")
            + "  k = (f32[4], f32[4]) opt-barrier(c)\n  ROOT r = f32[4] get-tuple-element(k), index=0",
        ),
    ),
}

_EQUAL = "  x = f32[4] parameter(0)\n  y = f32[4] parameter(1)\n"
_SHARED = {
    "differences, which do not commute": (
        "hlo-cse",
        entry(
            _EQUAL + "  a = f32[4] subtract(x, y)\n  b = f32[4] subtract(y, x)\n"
            "  ROOT r = (f32[4], f32[4]) tuple(a, b)"
        ),
    ),
    "zeros of both signs": (
        "hlo-cse",
        entry(
            "  x = f32[] parameter(0)\n  z = f32[] constant(0)\n  m = f32[] constant(-0)\n"
            "  a = f32[] atan2(z, x)\n  b = f32[] atan2(m, x)\n  ROOT r = (f32[], f32[]) tuple(a, b)"
        ),
    ),
    "an effect twice": (
        "hlo-cse",
        entry(
            "  w = f32[4] parameter(0)\n"
            f"  a = f32[4] {_EFFECT}\n  b = f32[4] {_EFFECT}\n  ROOT r = (f32[4], f32[4]) tuple(a, b)"
        ),
    ),
    "equal work, one in a fixed order": (
        "hlo-cse",
        entry(
            _EQUAL + "  n = f32[4] negate(y)\n  a = f32[4] add(x, y)\n"
            "  b = f32[4] add(x, y), control-predecessors={n}\n"
            "  ROOT r = (f32[4], f32[4], f32[4]) tuple(a, b, n)"
        ),
    ),
    "values on both sides of a barrier": (
        "hlo-cse",
        entry(
            "  x = f32[4] parameter(0)\n  p = f32[4] opt-barrier(x)\n  q = f32[4] opt-barrier(x)\n"
            "  ROOT r = (f32[4], f32[4]) tuple(p, q)"
        ),
    ),
    "reductions by different computations": (
        "hlo-cse",
        entry(
            "  x = f32[4] parameter(0)\n  z = f32[] constant(0)\n"
            "  a = f32[] reduce(x, z), dimensions={0}, to_apply=sum\n"
            "  b = f32[] reduce(x, z), dimensions={0}, to_apply=largest\n"
            "  ROOT r = (f32[], f32[]) tuple(a, b)",
            SUM + MAXIMUM,
        ),
    ),
    "comparisons in different directions": (
        "hlo-cse",
        entry(
            _EQUAL + "  a = pred[4] compare(x, y), direction=LT\n  b = pred[4] compare(x, y), direction=LE\n"
            "  ROOT r = (pred[4], pred[4]) tuple(a, b)"
        ),
    ),
    "conversions to different types": (
        "hlo-cse",
        entry(
            "  x = f32[4] parameter(0)\n  a = s8[4] convert(x)\n  b = u8[4] convert(x)\n"
            "  ROOT r = (s8[4], u8[4]) tuple(a, b)"
        ),
    ),
    "random numbers twice": (
        "hlo-cse",
        entry(
            "  z = f32[] constant(0)\n  o = f32[] constant(1)\n"
            "  a = f32[4] rng(z, o), distribution=rng_uniform\n"
            "  b = f32[4] rng(z, o), distribution=rng_uniform\n"
            "  ROOT r = (f32[4], f32[4]) tuple(a, b)"
        ),
    ),
    "sums over devices by different channels": (
        "hlo-cse",
        entry(
            "  x = f32[4] parameter(0)\n"
            "  a = f32[4] all-reduce(x), channel_id=1, replica_groups={{0,1}}, to_apply=sum\n"
            "  b = f32[4] all-reduce(x), channel_id=2, replica_groups={{0},{1}}, to_apply=sum\n"
            "  ROOT r = (f32[4], f32[4]) tuple(a, b)",
            SUM,
            ", num_partitions=2",
        ),
    ),
}

_REST = {
    "an unused effect": (
        "hlo-dce",
        entry(f"  w = f32[4] parameter(0)\n  e = f32[4] {_EFFECT}\n  ROOT r = f32[4] negate(w)"),
    ),
    "an unused parameter": (
        "hlo-dce",
        entry("  w = f32[4] parameter(0)\n  u = f32[4] parameter(1)\n  ROOT r = f32[4] negate(w)"),
    ),
    "an unused loop with an effect": (
        "hlo-dce",
        _loop(f"  e = f32[4] {_EFFECT}\n  y = f32[4] add(x, e)", "y, w, d", "  ROOT r = f32[4] negate(x)"),
    ),
    "work between two that it orders": (
        "hlo-dce",
        entry(
            "  w = f32[4] parameter(0)\n  e = f32[4] negate(w)\n"
            "  u = f32[4] abs(w), control-predecessors={e}\n"
            "  v = f32[4] tanh(w), control-predecessors={u}\n  ROOT r = f32[4] add(e, v)"
        ),
    ),
    "a constant expression whose order is fixed": (
        "hlo-constant-folding",
        entry(
            "  x = f32[] parameter(0)\n  n = f32[] negate(x)\n  k = f32[] constant(2)\n"
            "  m = f32[] multiply(k, k), control-predecessors={n}\n  ROOT r = f32[] add(n, m)"
        ),
    ),
    "a key that is compared and not used": (
        "hlo-sort-simplifier",
        entry(_SORT + "  ROOT r = f32[4] get-tuple-element(s), index=0", _SORTED),
    ),
    "a sort that is a result": (
        "hlo-sort-simplifier",
        entry(_SORT.replace("  s =", "  ROOT s ="), _SORTED),
    ),
    "sorted values that are read as a whole": (
        "hlo-sort-simplifier",
        entry(
            _SORT.replace("f32[4] parameter", "f32[4] parameter")
            + "  b = (f32[4], s32[4]) opt-barrier(s)\n  ROOT r = s32[4] get-tuple-element(b), index=1",
            _SORTED,
        ),
    ),
    "labels whose type cannot count the columns": ("hlo-one-per-row-rewriter", _labels(5, 200, "s8")),
    "labels whose type cannot count the rows": ("hlo-one-per-row-rewriter", _labels(300, 5, "u8")),
    "updates whose type cannot count the columns": (
        "hlo-one-per-row-rewriter",
        _added("add(a, b)", dtype="u8", columns=300),
    ),
    "an update that is added to itself": ("hlo-one-per-row-rewriter", _added("add(b, b)")),
    "a largest update": ("hlo-one-per-row-rewriter", _added("maximum(a, b)")),
    "updates of ones": ("hlo-one-per-row-rewriter", _added("add(a, b)", start="1")),
    "rows in an order that is read": (
        "hlo-one-per-row-rewriter",
        _labels(5, 9, "s32").replace("i = s32[5,1] iota(), iota_dimension=0", "i = s32[5,1] parameter(2)"),
    ),
    "fewer rows than the array has": (
        "hlo-one-per-row-rewriter",
        _labels(5, 9, "s32").replace("f32[5,9]", "f32[7,9]"),
    ),
    "a dim of one that bits add": (
        "hlo-unit-dim-removal",
        entry("  x = f32[1,4] parameter(0)\n  ROOT r = u8[1,4,4] bitcast-convert(x)"),
    ),
    "unit dims of work whose order is fixed": (
        "hlo-unit-dim-removal",
        entry(
            "  x = f32[1,4] parameter(0)\n  y = f32[4] parameter(1)\n  n = f32[4] negate(y)\n"
            "  a = f32[1,4] abs(x), control-predecessors={n}\n  ROOT r = (f32[1,4], f32[4]) tuple(a, n)"
        ),
    ),
    "a reduction over a dim of one": (
        "hlo-unit-dim-removal",
        entry(
            "  x = f32[1,4] parameter(0)\n  k = f32[] constant(2)\n"
            "  ROOT r = f32[4] reduce(x, k), dimensions={0}, to_apply=sum",
            SUM,
        ),
    ),
    "an empty array that a library makes": (
        "hlo-zero-sized-removal",
        entry(f"  w = f32[4] parameter(0)\n  e = f32[0] {_EFFECT}\n  ROOT r = (f32[0], f32[4]) tuple(e, w)"),
    ),
    "an empty result of a call with an effect": (
        "hlo-zero-sized-removal",
        entry(
            "  w = f32[4] parameter(0)\n  c = f32[0] call(w), to_apply=f\n"
            "  ROOT r = (f32[0], f32[4]) tuple(c, w)",
            f"f {{\n  w = f32[4] parameter(0)\n  e = f32[4] {_EFFECT}\n"
            f"  ROOT k = f32[0] constant({{}})\n}}\n",
        ),
    ),
    "an empty argument": (
        "hlo-zero-sized-removal",
        entry(
            "  x = f32[0] parameter(0)\n  w = f32[4] parameter(1)\n  ROOT r = (f32[0], f32[4]) tuple(x, w)"
        ),
    ),
    "an empty sum over devices": (
        "hlo-zero-sized-removal",
        entry(
            "  x = f32[0] parameter(0)\n  ROOT r = f32[0] all-reduce(x), replica_groups={}, to_apply=sum", SUM
        ),
    ),
    "a call that must stay": (
        "hlo-call-inliner",
        entry(
            "  x = f32[] parameter(0)\n  ROOT r = f32[] call(x, x), to_apply=sum, "
            'frontend_attributes={inlineable="false"}',
            SUM,
        ),
    ),
}

LEFT = {**_LOOPS, **_SHARED, **_REST}
