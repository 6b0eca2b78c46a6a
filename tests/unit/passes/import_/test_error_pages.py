"""What mesh inference says when it cannot go on: in the user's words, with the user's lines."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import mpmd
from mpmd import ir
from mpmd.errors import ConfigError, PassError
from mpmd.passes import make_pass

HERE = Path(__file__).name


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def encode(w: jax.Array, x: jax.Array) -> jax.Array:
    return mpmd.named_computation(layer, name="encode")(w, x)


def decode(w: jax.Array, x: jax.Array) -> jax.Array:
    return mpmd.named_computation(layer, name="decode")(w, x)


def page_of(step: object, infer: bool = False) -> str:
    """What lowering a step says, with `encode` on m1 and `decode` on m2."""
    options = mpmd.PipelineOptions(infer_transfers=infer, infer_cross_mesh_reductions=infer)
    config = mpmd.make_config(
        mpmd.make_topology({"m1": 1, "m2": 1}), {"encode": "m1", "decode": "m2"}, options=options
    )
    params = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))}
    with pytest.raises(PassError) as caught:
        mpmd.jit(step, config).lower(params, jnp.ones((2, 4)))
    return str(caught.value)


def test_operands_on_conflicting_meshes() -> None:
    def step(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return encode(params["a"], x) / decode(params["b"], x)

    lines = page_of(step).splitlines()
    assert lines[0] == "Mesh assignment is not possible for op as its operands are on conflicting meshes."
    text = "\n".join(lines)
    assert "Operand 0 can be on {m1}" in text
    assert 'named_computation "encode": m1[encode] (' in text
    assert 'named_computation "decode": m2[decode] (' in text
    assert 'return encode(params["a"], x) / decode(params["b"], x)' in text
    assert "infer_transfers=True" in lines[-1]


def test_needed_where_it_cannot_be() -> None:
    def step(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        tripled = encode(params["a"], x) * 3
        return decode(params["b"], tripled)

    text = page_of(step)
    assert "it is used in {m2} but it can only be placed on {m1}" in text
    assert HERE in text
    assert 'tripled = encode(params["a"], x) * 3' in text
    assert "site-packages" not in text
    assert "mpmd/tracing" not in text


def test_reductions_say_what_to_do() -> None:
    def step(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return encode(params["a"], x) + decode(params["b"], x)

    assert "infer_cross_mesh_reductions=True" in page_of(step)


def test_an_unknown_limit_of_errors() -> None:
    with pytest.raises(ConfigError, match="error-limit=0: must be positive, or -1"):
        made = make_pass("mpmd-infer-mesh-validate-src-set-not-empty", "error-limit=0")
        made.run(ir.parse(""))
