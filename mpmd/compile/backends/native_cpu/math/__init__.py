"""Elementary functions for vectors of any width, as emitters of LLVM IR.

Every function takes a builder and `float` or `double` values of any number of lanes and returns the result's
lanes.  `float` is computed in vector registers without branches (except for huge arguments of sine and
cosine); `double` calls libm lane by lane.  Narrower types are for the caller to widen.

Bounds, in units in the last place of the exact result, over all finite floats, as the tests check them:

    sqrt 0.5 · exp 1.1 · expm1 1.5 · log 1.0 · log1p 1.5 · logistic 3 · rsqrt 1.5 · sin 1.6 · cos 1.6
    tanh 6 · erf 6 · pow 0.7

NaN gives NaN; infinities, zeros of both signs and denormal results follow C99's Annex F, unless the calling
thread flushes denormals to zero.  Scalars and vectors of any width get the same number.

`functions.py` is the table by name.
"""
