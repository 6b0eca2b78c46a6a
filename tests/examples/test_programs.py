"""The example needs no more than a forward, a backward, an update and an accumulation for each stage."""

import jax
import numpy as np
import pytest

from examples.pipelined_transformer.train_step import make_state, make_train_step
from mpmd.compile.compiler import programs


@pytest.mark.fast_cases("2")
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_four_programs_a_stage_and_a_norm_are_enough(tiny, num_stages):
    """With tied embeddings, and the norm of all gradients: one that all meshes wait for is a program.

    Of four stages the two in the middle share theirs.
    """
    config = tiny(layers=num_stages + 1, num_stages=num_stages)
    state = jax.eval_shape(lambda: make_state(config))
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.seq_len + 1), np.int32)
    lowered = make_train_step(config).lower(state, tokens)
    assert len(programs(lowered.fragments, lowered.config.topology)) <= min(4 * num_stages + 1, 13)
