"""The HLO of fragments, as it is lowered and as our pipeline leaves it, read by XLA and back by us."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from examples.pipelined_transformer.config import TrainConfig
from examples.pipelined_transformer.model import init_params, loss_of
from mpmd.compile.backends.native_cpu.target import NativeCpu
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import fingerprint, parse_module, print_module, verify
from mpmd.compile.lowering import lower
from tests.support.hlo_round_trips import NAMES, round_trips, step_of
from tests.support.native_fragments import fragment_of
from tests.support.native_meshes import OnMesh, mesh_of


def of_step(name: str) -> FragmentModule:
    step, arguments = step_of(name)
    return fragment_of(step, *arguments)


def prepared(fragment: FragmentModule, axes=None):
    """The module that kernels are made of: fusions, one order, aliases."""
    return prepare_fragment(fragment, NativeCpu(), axes=axes).module


def exchange(module, xla) -> None:
    """XLA reads what we print, prints it, and we read the same; its passes need not like it."""
    verify(module)
    text = print_module(module)
    again = parse_module(text)
    assert fingerprint(again) == fingerprint(module)
    settled = print_module(again)  # reading may put computations in another order, once
    assert print_module(parse_module(settled)) == settled
    assert fingerprint(parse_module(xla.parse(text))) == fingerprint(module)


@pytest.mark.parametrize("name", NAMES)
def test_fragments_with_fusions_in_one_order(name, xla):
    fragment = of_step(name)
    exchange(lower(fragment.text), xla)
    module = prepared(fragment)
    assert module.is_scheduled and any(i.opcode == "fusion" for i in module.instructions())
    exchange(module, xla)


def reductions(x, w):
    y = jax.lax.all_gather(x, "d", axis=0, tiled=True) @ w
    y = jax.lax.psum_scatter(y, "d", scatter_dimension=0, tiled=True)
    y = jax.lax.all_to_all(y, "d", split_axis=1, concat_axis=0, tiled=True)
    return jax.lax.ppermute(y, "d", [(0, 1), (1, 0)]) + jax.lax.axis_index("d"), jax.lax.pmax(y.max(), "d")


def test_fragments_with_collectives(xla):
    x, w = np.ones((8, 6), np.float32), np.ones((6, 4), np.float32)
    mesh = mesh_of({"d": 2})
    fragment = OnMesh(reductions, [x, w], mesh, [P("d"), P()], (P("d"), P())).fragment
    module = prepared(fragment, {"d": 2})
    found = {i.opcode.removesuffix("-start") for i in module.instructions()}
    assert {"all-to-all", "collective-permute", "reduce-scatter", "all-gather", "all-reduce"} <= found
    exchange(module, xla)


def test_layouts_that_are_not_row_major(xla):
    text = """HloModule m

ENTRY main {
  a = f32[4,6,8]{0,2,1} parameter(0)
  b = f32[8,4,6]{1,0,2} copy(a)
  c = bf16[8,4,6]{1,0,2} convert(b)
  ROOT t = (bf16[8,4,6]{1,0,2}, f32[4,6,8]{0,2,1}) tuple(c, a)
}
""".replace("copy(a)", "transpose(a), dimensions={2,0,1}")
    round_trips(text, xla, "layouts")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_example(dtype, xla):
    config = TrainConfig(layers=2, d_model=16, heads=2, seq_len=16, vocab_size=270, num_stages=2, dtype=dtype)
    params = jax.jit(lambda: init_params(config, 0))()
    batch = np.zeros((2, config.seq_len + 1), np.int32)
    optimizer = optax.adamw(1e-3)

    def step(params, state, batch):
        value, gradients = jax.value_and_grad(functools.partial(loss_of, config))(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    arguments = (params, optimizer.init(params), batch)
    lowered = jax.jit(step).lower(*arguments)
    round_trips(lowered.compiler_ir("hlo").as_hlo_module().to_string(), xla, "before")
    round_trips(lowered.compile().as_text(), xla, "after")
    exchange(prepared(fragment_of(step, *jax.tree.map(jnp.asarray, arguments))), xla)
