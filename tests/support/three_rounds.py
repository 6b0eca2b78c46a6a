"""HLO text of a loop of three rounds over one vector, for tests of orders and memory."""

_CONDITION = """condition {
  s = (s32[], f32[1000]) parameter(0)
  k = s32[] constant(3)
  i = s32[] get-tuple-element(s), index=0
  ROOT r = pred[] compare(i, k), direction=LT
}
"""
_BODY = """body {{
  s = (s32[], f32[1000]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  v = f32[1000] get-tuple-element(s), index=1
  one = s32[] constant(1)
  j = s32[] add(i, one)
{lines}
  ROOT t = (s32[], f32[1000]) tuple(j, w)
}}
"""


def three_rounds(lines: str) -> str:
    """The computations `condition` and `body` of a loop over `(s32[], f32[1000])`: lines make `w` of `v`."""
    return _CONDITION + _BODY.format(lines=lines.strip("\n"))
