"""Steps under `mpmd.jit` against the same steps under `jax.jit`."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.runtime.program.streams import Send

STEPS = 6


def messages(program) -> int:
    """How many values a step sends from mesh to mesh."""
    return sum(isinstance(op, Send) for stream in program.streams for op in stream.instructions)


def messages_by_route(program) -> dict[tuple[int, int], int]:
    """How many values a step sends from stage to stage, where stage `s` is mesh `m{s}`."""
    number = {stream.mesh: int(stream.mesh.removeprefix("m")) for stream in program.streams}
    found = Counter(
        (number[stream.mesh], number[program.channels[op.channel].target])
        for stream in program.streams
        for op in stream.instructions
        if isinstance(op, Send)
    )
    return dict(sorted(found.items()))


def programs_per_mesh(program) -> Counter[str]:
    """How many distinct programs each mesh runs."""
    return Counter(mesh for mesh, _ in program.executables)


def relative_difference(got, want) -> float:
    """The largest ‖a−b‖/‖b‖ over the leaves of two pytrees.

    Shapes and element types must be equal.  Leaves that are zero but for rounding, as the gradient of a key
    bias is, are judged against the norm of all leaves.
    """
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(got, want)]
    for a, b, (x, y) in zip(got, want, pairs):
        assert x.shape == y.shape
        assert jnp.result_type(a) == jnp.result_type(b), "element types differ"
    total = np.sqrt(sum(float((b**2).sum()) for _, b in pairs))
    worst = 0.0
    for a, b in pairs:
        norm = float(np.linalg.norm(b))
        scale = norm if norm > 1e-6 * total else total
        assert np.isfinite(b).all(), "what is compared with is not finite"
        if not np.isfinite(a).all():
            return float("inf")
        difference = float(np.linalg.norm(a - b))
        worst = max(worst, difference / scale if scale else difference)
    return worst


def run_steps(step, state, batches):
    """The states and losses of a few steps; `step(state, *batch) -> (state, loss)`."""
    losses = []
    for batch in batches:
        state, loss = step(state, *batch)
        losses.append(loss)
    return state, losses


def check_training(step, reference, state, batch, tolerance: float = 1e-5, steps: int = STEPS) -> None:
    """Gradients of the first step and what `steps` steps of SGD with momentum make of parameters and loss.

    After the first step the velocity is the gradient.
    """
    want_state, want_loss = reference(state, *batch)
    got_state, got_loss = step(copied(state), *batch)
    assert relative_difference(got_state[1], want_state[1]) <= tolerance, "gradients of the first step"
    rest = [batch] * (steps - 1)
    want = run_steps(reference, want_state, rest)
    got = run_steps(step, got_state, rest)
    assert np.isfinite(np.asarray(want[1])).all()
    assert relative_difference(got[0], want[0]) <= tolerance, f"state after {steps} steps"
    assert relative_difference([got_loss, *got[1]], [want_loss, *want[1]]) <= tolerance, "loss curve"


def copied(tree):
    """Fresh host copies of all arrays, so that donation cannot reach the originals."""
    return jax.tree.map(np.array, tree)
