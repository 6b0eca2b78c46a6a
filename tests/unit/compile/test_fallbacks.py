"""Each program with a part that XLA compiles says so once, whatever the filters of warnings are meanwhile."""

import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd

X = np.linspace(-1, 1, 8, dtype=np.float32)
REASON = "native fragments do not call back to Python"


def step(meshes=("m0",)):
    """A step whose stages call back to Python."""

    def stage(x):
        return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x * 2)

    def run(x):
        for mesh in meshes:
            x = mpmd.named_computation(stage, name=f"on_{mesh}")(x)
        return x

    topology = mpmd.make_topology(dict.fromkeys(meshes, 1))
    assignment = {f"on_{mesh}": mesh for mesh in meshes}
    return mpmd.jit(run, mpmd.make_config(topology, assignment, backend="native"))


def said(caught):
    return [str(w.message) for w in caught if "compiled by XLA" in str(w.message)]


def test_a_fragment_that_calls_back_is_said_once_at_the_line_of_the_user():
    with pytest.warns(
        UserWarning, match=rf"^fragment .* on m0 is compiled by XLA as a whole:\n  {REASON}$"
    ) as caught:
        compiled = step().compiled(X)
        compiled(X)
        np.testing.assert_array_equal(compiled(X), X * 2)
    assert len(said(caught)) == 1
    assert caught[0].filename == __file__


def test_fragments_with_the_same_reason_are_said_together():
    with pytest.warns(UserWarning) as caught:
        step(("m0", "m1")).compiled(X)
    (text,) = said(caught)
    assert text.startswith("fragments ") and " on m0, " in text and " on m1 are compiled" in text
    assert text.count(REASON) == 1


def test_what_was_ignored_is_said_by_the_first_call_that_does_not_ignore_it():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jitted = step()
        jitted(X)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            jitted(X)
    assert len(said(caught)) == 1


def test_each_program_says_it_although_another_one_has():
    """The filter `default` shows the same text once for each line: here the line is the same one, too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            step().compiled(X)
    assert len(said(caught)) == 3


def test_programs_that_threads_compile_say_it_and_leave_the_filters():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        threads = [threading.Thread(target=lambda: step(("m0", "m1"))(X)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert warnings.filters == before
    assert len(said(caught)) == 3


def test_a_program_from_the_cache_says_it_again(tmp_path):
    def spectrum(x):
        return jnp.linalg.eigvalsh(jnp.tanh(x[:, None] * x)) @ jnp.tanh(x[:, None] * x)

    stage = mpmd.named_computation(spectrum, name="spectrum")
    options = mpmd.PipelineOptions(compile_cache_dir=str(tmp_path))
    config = mpmd.make_config(
        mpmd.make_topology({"m0": 1}), {"spectrum": "m0"}, options=options, backend="native"
    )
    for _ in range(2):
        with pytest.warns(UserWarning, match="is compiled by XLA in part:") as caught:
            mpmd.jit(stage, config)(X)
        assert len(said(caught)) == 1
    assert list(tmp_path.rglob("*.kept"))
