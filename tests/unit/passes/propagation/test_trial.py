"""Which values count as rows of the batch, and which as weights."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.propagation.trial import arguments_of_rows

W, X = '!mpmd.mesh_tensor<"m1", tensor<4xf32>>', '!mpmd.mesh_tensor<"m1", tensor<2xf32>>'


def _use(name: str, microbatch: int, rows: str, weight: str) -> str:
    return f"""
    %{name}{microbatch} = mpmd.fragment<mesh="m1", origin=["{name}"]> ({rows}, {weight})
        {{call_counter = {microbatch} : ui32}} (%p: tensor<2xf32>, %q: tensor<4xf32>) {{
      %0 = stablehlo.slice %q [0:2] : (tensor<4xf32>) -> tensor<2xf32>
      %1 = stablehlo.add %p, %0 : tensor<2xf32>
      mpmd.return %1 : tensor<2xf32>
    }} : ({X}, {W}) -> {X}"""


def _computed(name: str, of: str) -> str:
    return f"""
    %{name} = mpmd.fragment<mesh="m1", origin=[]> ({of}) (%p: tensor<4xf32>) {{
      mpmd.return %p : tensor<4xf32>
    }} : ({W}) -> {W}"""


def test_weights_of_equal_stages_are_no_rows():
    """Each stage reads its own, which is computed for all of its microbatches."""
    uses = [
        _use(stage, microbatch, f"%x{microbatch}" if stage == "f" else f"%f{microbatch}", f"%{weight}")
        for microbatch in (0, 1)
        for stage, weight in (("f", "v1"), ("g", "w1"))
    ]
    module = ir.parse(
        'module { sdy.mesh @mesh = <["x"=1]>\n'
        f"func.func public @main(%x0: {X}, %x1: {X}, %v: {W}, %w: {W}) -> ({X}, {X}) "
        'attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {'
        f"{_computed('v1', '%v')}{_computed('w1', '%w')}{''.join(uses)}\n"
        f"return %g0, %g1 : {X}, {X} }} }}"
    )
    (main,) = ir.funcs(module)
    assert arguments_of_rows(main) == {0, 1}
