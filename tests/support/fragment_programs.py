"""Fragments to build small programs of, and running one pass on them."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes import make_pass
from mpmd.support.diagnostics import Diagnostics, collecting


def fragment(
    name: str, inputs: str, attributes: str = "", mesh: str = "m1", origin: str | None = None
) -> str:
    """A fragment with one result, `%name`; its origin is the name, or none if that begins with a capital."""
    values = [v.strip() for v in inputs.split(",")]
    if origin is None:
        origin = f'"{name}"' if name[0].islower() else ""
    args = ", ".join(f"%p{i}: tensor<4xf32>" for i in range(len(values)))
    return (
        f'%{name} = mpmd.fragment<mesh="{mesh}", origin=[{origin}]> ({inputs}) {attributes} ({args}) {{\n'
        f"  %x = stablehlo.negate %p0 : tensor<4xf32>\n  mpmd.return %x : tensor<4xf32>\n"
        f"}} : ({', '.join(['!' + mesh] * len(values))}) -> !{mesh}"
    )


def run(text: str, name: str, options: str = "") -> tuple[ir.Module, Diagnostics]:
    """What a pass makes of a program, and what it reports."""
    module = ir.parse(text)
    with collecting() as found:
        make_pass(name, options).run(module)
    return module, found
