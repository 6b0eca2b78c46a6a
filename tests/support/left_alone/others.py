"""For passes over communication, layouts and fusions."""

from __future__ import annotations

from tests.support.left_alone.text import MAXIMUM, SUM, entry

_FOUR = ", replica_count=4"
_GROUPS = "replica_groups={{0,1},{2,3}}"
_XY = "  x = f32[4] parameter(0)\n  y = f32[4] parameter(1)\n"


def _devices(lines: str, called: str = SUM) -> str:
    return entry(lines, called, _FOUR)


def _joined(first: str, second: str, called: str = SUM, after: str = "add(p, q)") -> str:
    """Two sums over devices, and one more of both."""
    return _devices(
        _XY + f"  p = f32[4] all-reduce(x), {first}\n  q = f32[4] all-reduce(y), {second}\n"
        f"  ROOT r = f32[4] {after}",
        called,
    )


def _part(start: str, sizes: str = "2", after: str = "", out: str = "2", reduced: str = "") -> str:
    """A part of a sum over devices."""
    return _devices(
        "  x = f32[4] parameter(0)\n  i = s32[] parameter(1)\n  k = s32[4] constant({0, 1, 0, 1})\n"
        "  id = u32[] replica-id()\n  place = s32[1] dynamic-slice(k, id), dynamic_slice_sizes={1}\n"
        "  number = s32[] reshape(place)\n  two = s32[] constant(2)\n"
        f"  start = s32[] {start}\n  e = f32[4] negate(x)\n"
        f"  all = f32[4] all-reduce(x), {_GROUPS}, to_apply=sum{reduced}\n"
        f"  {'' if after else 'ROOT '}r = f32[{out}] dynamic-slice(all, start), "
        f"dynamic_slice_sizes={{{sizes}}}\n{after}"
    )


_ALL = f"{_GROUPS}, to_apply=sum"
_OWN = "multiply(number, two)"

_COMMUNICATION = {
    "sums over other groups": (
        "hlo-all-reduce-reassociate",
        _joined(_ALL, "replica_groups={{0,2},{1,3}}, to_apply=sum"),
    ),
    "a sum of a sum and a maximum": (
        "hlo-all-reduce-reassociate",
        _joined(_ALL, f"{_GROUPS}, to_apply=largest", SUM + MAXIMUM),
    ),
    "a maximum of sums": ("hlo-all-reduce-reassociate", _joined(_ALL, _ALL, after="maximum(p, q)")),
    "a sum over devices that is read twice": (
        "hlo-all-reduce-reassociate",
        _devices(
            _XY + f"  p = f32[4] all-reduce(x), {_ALL}\n  q = f32[4] all-reduce(y), {_ALL}\n"
            "  s = f32[4] add(p, q)\n  ROOT r = (f32[4], f32[4]) tuple(s, p)"
        ),
    ),
    "sums over devices in a fixed order": (
        "hlo-all-reduce-reassociate",
        _joined(_ALL, _ALL + ", control-predecessors={p}"),
    ),
    "sums by a channel and without": (
        "hlo-all-reduce-reassociate",
        _joined("channel_id=1, " + _ALL, _ALL),
    ),
    "a part that begins at an argument": ("hlo-reduce-scatter-creator", _part("add(i, two)")),
    "a part of another device": ("hlo-reduce-scatter-creator", _part("subtract(two, number)")),
    "half of a part": ("hlo-reduce-scatter-creator", _part("abs(number)", "1", out="1")),
    "a part of a sum that is read as a whole, too": (
        "hlo-reduce-scatter-creator",
        _part(_OWN, after="  ROOT t = (f32[2], f32[4]) tuple(r, all)"),
    ),
    "a part of a sum in a fixed order": (
        "hlo-reduce-scatter-creator",
        _part(_OWN, reduced=", control-predecessors={e}"),
    ),
    "a transpose of a sum that is read as it is, too": (
        "hlo-all-reduce-mover",
        _devices(
            f"  x = f32[4,4] parameter(0)\n  p = f32[4,4] all-reduce(x), {_ALL}\n"
            "  t = f32[4,4] transpose(p), dimensions={1,0}\n  ROOT r = f32[4,4] add(p, t)"
        ),
    ),
    "a transpose of a sum in a fixed order": (
        "hlo-all-reduce-mover",
        _devices(
            f"  x = f32[4,4] parameter(0)\n  e = f32[4,4] negate(x)\n"
            f"  p = f32[4,4] all-reduce(x), {_ALL}, control-predecessors={{e}}\n"
            "  t = f32[4,4] transpose(p), dimensions={1,0}\n  ROOT r = (f32[4,4], f32[4,4]) tuple(e, t)"
        ),
    ),
    "gathers of different types": (
        "hlo-all-gather-combiner",
        _devices(
            f"  x = f32[4] parameter(0)\n  y = s32[4] parameter(1)\n"
            f"  p = f32[8] all-gather(x), {_GROUPS}, dimensions={{0}}\n"
            f"  q = s32[8] all-gather(y), {_GROUPS}, dimensions={{0}}\n"
            "  ROOT r = (f32[8], s32[8]) tuple(p, q)"
        ),
    ),
    "gathers in different groups": (
        "hlo-all-gather-combiner",
        _devices(
            _XY + f"  p = f32[8] all-gather(x), {_GROUPS}, dimensions={{0}}\n"
            "  q = f32[8] all-gather(y), replica_groups={{0,2},{1,3}}, dimensions={0}\n"
            "  ROOT r = (f32[8], f32[8]) tuple(p, q)"
        ),
    ),
    "gathers that depend on each other": (
        "hlo-all-gather-combiner",
        _devices(
            f"  x = f32[4] parameter(0)\n  p = f32[8] all-gather(x), {_GROUPS}, dimensions={{0}}\n"
            "  s = f32[4] slice(p), slice={[0:4]}\n"
            f"  q = f32[8] all-gather(s), {_GROUPS}, dimensions={{0}}\n"
            "  ROOT r = (f32[8], f32[8]) tuple(p, q)"
        ),
    ),
    "gathers in a fixed order": (
        "hlo-all-gather-combiner",
        _devices(
            _XY + f"  e = f32[4] negate(x)\n  p = f32[8] all-gather(x), {_GROUPS}, dimensions={{0}}\n"
            f"  q = f32[8] all-gather(y), {_GROUPS}, dimensions={{0}}, control-predecessors={{e}}\n"
            "  ROOT r = (f32[4], f32[8], f32[8]) tuple(e, p, q)"
        ),
    ),
    "a sum and a maximum over devices": (
        "hlo-all-reduce-combiner",
        _devices(
            _XY
            + f"  p = f32[4] all-reduce(x), {_ALL}\n  q = f32[4] all-reduce(y), {_GROUPS}, to_apply=largest\n"
            "  ROOT r = (f32[4], f32[4]) tuple(p, q)",
            SUM + MAXIMUM,
        ),
    ),
}

_LAYOUTS = {
    "a transpose into another order": (
        "hlo-algebraic-simplifier layout-sensitive=true",
        entry(
            "  x = f32[2,3]{1,0} parameter(0)\n  t = f32[2,3]{0,1} transpose(x), dimensions={0,1}\n"
            "  ROOT r = f32[2,3]{0,1} negate(t)"
        ),
    ),
    "a size that is known at run time": (
        "hlo-algebraic-simplifier",
        entry(
            "  x = f32[<=4] parameter(0)\n  one = f32[] constant(1)\n"
            "  ones = f32[<=4] broadcast(one), dimensions={}\n  ROOT r = f32[<=4] multiply(x, ones)"
        ),
    ),
    "a sum of arrays in different orders": (
        "hlo-layout-normalization",
        entry(
            "  x = f32[4,6]{1,0} parameter(0)\n  y = f32[4,6]{0,1} parameter(1)\n"
            "  ROOT r = f32[4,6]{0,1} add(x, y)"
        ),
    ),
    "bits along a new dim of an array in another order": (
        "hlo-layout-normalization",
        entry("  x = f32[4,6]{0,1} parameter(0)\n  ROOT r = u8[4,6,4]{2,0,1} bitcast-convert(x)"),
    ),
    "arrays in different orders, joined": (
        "hlo-layout-normalization",
        entry(
            "  x = f32[4,6]{1,0} parameter(0)\n  y = f32[4,6]{0,1} parameter(1)\n"
            "  ROOT r = f32[8,6]{0,1} concatenate(x, y), dimensions={0}"
        ),
    ),
    "a broadcast in order": (
        "hlo-broadcast-canonicalizer",
        entry("  x = f32[2,3] parameter(0)\n  ROOT r = f32[2,4,3] broadcast(x), dimensions={0,2}"),
    ),
}

_PRINT = 'custom_call_target="print", custom_call_has_side_effect=true'
_SORT = (
    "before {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  c = s32[] parameter(2)\n"
    "  d = s32[] parameter(3)\n  ROOT l = pred[] compare(a, b), direction=GT\n}\n"
)


def _prefix(lines: str, sort: str = "") -> str:
    return entry(
        "  x = f32[2,64] parameter(0)\n  e = f32[2,64] negate(x)\n  i = s32[2,64] iota(), iota_dimension=1\n"
        f"  s = (f32[2,64], s32[2,64]) sort(x, i), dimensions={{1}}, is_stable=true, to_apply=before{sort}\n"
        "  v = f32[2,64] get-tuple-element(s), index=0\n" + lines,
        _SORT,
    )


_FUSIONS = {
    "work that needs the call between": (
        "hlo-fusion",
        entry(
            f"  x = f32[4096] parameter(0)\n  a = f32[4096] negate(x)\n"
            f"  k = f32[4096] custom-call(a), {_PRINT}\n"
            "  ROOT c = f32[4096] add(a, k)"
        ),
    ),
    "work between which an order leads": (
        "hlo-fusion",
        entry(
            f"  x = f32[4096] parameter(0)\n  a = f32[4096] negate(x)\n"
            f"  k = f32[4096] custom-call(a), {_PRINT}\n"
            f"  m = f32[4096] custom-call(x), {_PRINT}, control-predecessors={{k}}\n"
            "  ROOT c = f32[4096] add(a, m)"
        ),
    ),
    "work whose order is fixed, beside other work": (
        "hlo-fusion",
        entry(
            "  x = f32[4096] parameter(0)\n  y = f32[4096] parameter(1)\n  a = f32[4096] negate(x)\n"
            "  b = f32[4096] abs(y), control-predecessors={a}\n  ROOT r = f32[4096] add(a, b)"
        ),
    ),
    "work on arrays without elements": (
        "hlo-fusion",
        entry("  x = f32[0] parameter(0)\n  a = f32[0] negate(x)\n  ROOT r = f32[0] abs(a)"),
    ),
    "sorted values that are all read": (
        "hlo-sort-prefix",
        _prefix(
            "  f = f32[2,8] slice(v), slice={[0:2], [0:8]}\n  n = f32[2,64] negate(v)\n"
            "  ROOT r = (f32[2,8], f32[2,64], f32[2,64]) tuple(f, n, e)"
        ),
    ),
    "the last of sorted values": (
        "hlo-sort-prefix",
        _prefix(
            "  f = f32[2,8] slice(v), slice={[0:2], [56:64]}\n  ROOT r = (f32[2,8], f32[2,64]) tuple(f, e)"
        ),
    ),
    "the first of values that are sorted in a fixed order": (
        "hlo-sort-prefix",
        _prefix(
            "  f = f32[2,8] slice(v), slice={[0:2], [0:8]}\n  ROOT r = (f32[2,8], f32[2,64]) tuple(f, e)",
            ", control-predecessors={e}",
        ),
    ),
    "sorted values that are a result": (
        "hlo-sort-prefix",
        _prefix(
            f"  f = f32[2,8] slice(v), slice={{[0:2], [0:8]}}\n  k = f32[2,8] custom-call(f, e), {_PRINT}\n"
        ).replace("  v = f32[2,64] get", "  ROOT v = f32[2,64] get"),
    ),
}

LEFT: dict[str, tuple[str, str]] = {**_COMMUNICATION, **_LAYOUTS, **_FUSIONS}
