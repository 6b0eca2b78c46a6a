"""A scheduled loop over an array: `a` is made of the state, and the next state by BODY."""

LOOP = """
less {
  s = (s32[], f32[1000]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] constant(3)
  ROOT c = pred[] compare(i, n), direction=LT
}
step {
  t = (s32[], f32[1000]) parameter(0)
  j = s32[] get-tuple-element(t), index=0
  one = s32[] constant(1)
  k = s32[] add(j, one)
  x = f32[1000] get-tuple-element(t), index=1
  a = f32[1000] tanh(x)
  b = f32[1000] BODY
  ROOT u = (s32[], f32[1000]) tuple(k, b)
}
ENTRY main {
  p = f32[1000] parameter(0)
  zero = s32[] constant(0)
  q = f32[1000] exponential(p)
  init = (s32[], f32[1000]) tuple(zero, q)
  l = (s32[], f32[1000]) while(init), condition=less, body=step
  y = f32[1000] get-tuple-element(l), index=1
  ROOT r = f32[1000] negate(y)
}
"""
