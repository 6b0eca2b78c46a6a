"""Short forms of HLO text."""

from __future__ import annotations


def entry(lines: str, called: str = "", header: str = "") -> str:
    """A module whose entry has these lines."""
    return f"HloModule m{header}\n\n{called}\n\nENTRY main {{\n{lines}\n}}\n"


def scalars(name: str, dtype: str, operation: str, result: str = "") -> str:
    """A computation of two scalars `a` and `b`."""
    return (
        f"{name} {{\n  a = {dtype}[] parameter(0)\n  b = {dtype}[] parameter(1)\n"
        f"  ROOT r = {result or dtype}[] {operation}\n}}\n"
    )


SUM = scalars("sum", "f32", "add(a, b)")
MAXIMUM = scalars("largest", "f32", "maximum(a, b)")


def loop(
    body: str,
    returned: str,
    *,
    condition: str = "  ROOT c = pred[] compare(i, n), direction=LT",
    trips: int = 5,
) -> str:
    """The condition and body of a loop with a counter, `x`, `w` and `d` of f32[4].

    Args:
        body: lines that read `x`, `w`, `d`.
        returned: what the body returns after the counter.
        condition: its last lines.
        trips: the counter's limit.
    """
    state = "(s32[], f32[4], f32[4], f32[4])"
    return f"""less {{
  s = {state} parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] constant({trips})
{condition}
}}

step {{
  t = {state} parameter(0)
  i = s32[] get-tuple-element(t), index=0
  x = f32[4] get-tuple-element(t), index=1
  w = f32[4] get-tuple-element(t), index=2
  d = f32[4] get-tuple-element(t), index=3
  one = s32[] constant(1)
  next = s32[] add(i, one)
{body}
  ROOT u = {state} tuple(next, {returned})
}}
"""


LOOP = """  x = f32[4] parameter(0)
  w = f32[4] parameter(1)
  d = f32[4] parameter(2)
  zero = s32[] constant(0)
  init = (s32[], f32[4], f32[4], f32[4]) tuple(zero, x, w, d)
  l = (s32[], f32[4], f32[4], f32[4]) while(init), condition=less, body=step
"""
ALL = """  i = s32[] get-tuple-element(l), index=0
  a = f32[4] get-tuple-element(l), index=1
  b = f32[4] get-tuple-element(l), index=2
  c = f32[4] get-tuple-element(l), index=3
  ROOT r = (s32[], f32[4], f32[4], f32[4]) tuple(i, a, b, c)"""
FIRST = "  ROOT r = f32[4] get-tuple-element(l), index=1"
