"""Small programs for the tests of the IR's vocabulary."""

from __future__ import annotations

import textwrap

HEAD = """
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>
"""

TWO_FRAGMENTS = (
    HEAD
    + """
func.func public @main(%a: !m1, %b: !m1) -> (!m1, !m2) attributes {topology = #topology} {
  %0:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%a, %b) {call_counter = 1 : ui32}
      (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %3 = stablehlo.add %p, %q : tensor<4xf32>
    %4 = stablehlo.negate %3 : tensor<4xf32>
    mpmd.return %3, %4 : tensor<4xf32>, tensor<4xf32>
  } : (!m1, !m1) -> (!m1, !m1)
  %1 = mpmd.transfer %0#1 : (!m1) -> !m2
  %2 = mpmd.fragment<mesh="m1", origin=["g"(1)], stage=3> (%0#0) (%p: tensor<4xf32>) {
    %3 = stablehlo.abs %p : tensor<4xf32>
    mpmd.return %3 : tensor<4xf32>
  } : (!m1) -> !m1
  return %2, %1 : !m1, !m2
}
"""
)


def main_with(body: str, results: str = "!m1", returned: str = "return %a : !m1") -> str:
    """A module whose entry point takes %a on m1 and %b on m2."""
    text = textwrap.indent(textwrap.dedent(body).strip(), "  ")
    return (
        f"{HEAD}\nfunc.func public @main(%a: !m1, %b: !m2) -> {results} "
        f"attributes {{topology = #topology}} {{\n{text}\n  {returned}\n}}\n"
    )
