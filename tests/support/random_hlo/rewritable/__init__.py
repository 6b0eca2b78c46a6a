"""Random programs full of what passes remove: every kind of redundancy, in random nesting.

Values are small numbers that all element types hold, so that rewriting keeps them bit for bit.
"""

from __future__ import annotations

import numpy as np

from tests.support.random_hlo.draft import Case, Draft, small_integers
from tests.support.random_hlo.rewritable import arithmetic, control, movement, products
from tests.support.random_hlo.rewritable.pool import Pool

PATTERNS = (*arithmetic.PATTERNS, *movement.PATTERNS, *products.PATTERNS, *control.PATTERNS)


def rewritable(seed: int, steps: int = 14) -> Case:
    """A program of random patterns: every other one in turn, so that a few programs have them all."""
    draft = Draft(np.random.default_rng([seed, 77]), f"rewritable#{seed}", seed)
    pool = Pool(draft)
    for dtype in ("f32", "f32", "s32"):
        for _ in range(2):
            dims = draft.dims(1, 3, zero=False)
            pool.values.append(draft.parameter(small_integers(draft.rng, dtype, dims), dtype))
    for number in range(steps):
        in_turn = PATTERNS[(seed * steps + number) // 2 % len(PATTERNS)]
        pool.grow(in_turn if number % 2 else draft.pick(PATTERNS))
    outputs = [v for v in pool.values if not v.users][-4:] or [pool.values[-1]]
    outputs += [pool.pick("f32"), pool.pick("s32")]
    draft.exact, draft.terms = False, 4
    return draft.finish(draft.builder.tuple(outputs))
