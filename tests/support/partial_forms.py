"""Bodies whose values are split, and the check that partial forms add up to values."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
from jax.extend.mlir import ir as mlir
from jax.extend.mlir.dialects import stablehlo

from mpmd import ir
from mpmd.sharding.partial import Partial, PartialForms
from mpmd.sharding.shardings import Split

SIZES = {"x": 2, "y": 3, "four": 4, "one": 1}


@dataclasses.dataclass
class Body:
    """A function, its values by name, and the forms of some."""

    module: ir.Module
    main: ir.Func
    forms: PartialForms

    def form(self, number: int = 0) -> Partial | None:
        """Of a result."""
        return self.forms.of(self.main.returned[number])


def body_of(text: str, **splits: str) -> Body:
    """A body, and how its values are split: `"x,y/"` is dim 0 over both axes, and dim 1 whole.

    `a` is argument `%a`, `dot_general` the results of all products.
    """
    names = re.findall(r"%(\w+): ", text.partition(")")[0])
    module = ir.parse("func.func @main" + text)
    (main,) = ir.funcs(module)
    found: dict[ir.Value, Split] = {}
    values = {name: [arg] for name, arg in zip(names, main.args)}
    for op in ir.walk(main):
        values.setdefault(op.operation.name.removeprefix("stablehlo."), []).extend(op.results)
    for name, split in splits.items():
        dims = tuple(tuple(filter(None, dim.split(","))) for dim in split.split("/"))
        for value in values[name]:
            found[value] = dims
    return Body(module, main, PartialForms(found, SIZES))


def arguments(main: ir.Func) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    found = []
    for arg in main.args:
        shape = arg.type.shape
        if "i32" in str(arg.type):
            found.append(rng.integers(0, 4, shape).astype(np.int32))
        else:
            found.append(rng.normal(size=shape).astype(np.float32))
    return found


def run(module: ir.Module, given: list[np.ndarray]) -> list[np.ndarray]:
    with ir.context(), mlir.Location.unknown():
        attributes = [mlir.DenseElementsAttr.get(a) for a in given]
        return [np.array(mlir.DenseElementsAttr(r)) for r in stablehlo.eval_module(module, attributes)]


def check(body: Body, *axes: str) -> list[np.ndarray]:
    """All results of a body have forms with terms along these axes, which add up to them; the forms."""
    module, main = body.module, body.main
    given = arguments(main)
    want = run(module, given)
    forms = [body.form(i) for i in range(len(main.returned))]
    assert all(form is not None and form.axes == axes for form in forms)
    main.returned = [form.build() for form in forms if form is not None]
    ir.return_types_changed(main)
    assert module.operation.verify()
    got = run(module, given)
    count = int(np.prod([SIZES[axis] for axis in axes]))
    for terms, value in zip(got, want, strict=True):
        assert terms.shape == (count, *value.shape)
        assert terms.dtype == value.dtype
        np.testing.assert_allclose(terms.sum(0), value, rtol=2e-5, atol=2e-5)
        assert not np.allclose(terms[1:], 0), "each device has a term"
    return got


A, B, T = "tensor<6x4xf32>", "tensor<6x5xf32>", "tensor<4x5xf32>"
DOT = f"%d = stablehlo.dot_general %a, %b, contracting_dims = [0] x [0] : ({A}, {B}) -> {T}"
