"""Random programs of slices, updates, reshapes and index arithmetic compute the same after simplification."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.mlir import ir as mlir
from jax.extend.mlir.dialects import stablehlo

from mpmd import ir
from mpmd.passes import make_pass
from mpmd.passes.verify import verify

SHAPES = [(4, 6), (6, 4), (2, 3), (1, 6), (4, 1), (24,), (6,)]
DTYPES = {"i32": np.int32, "i8": np.int8, "ui8": np.uint8}


class RandomProgram:
    """A random program: lines of text and the values made so far, with their shapes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.tensors = [("%a", (4, 6)), ("%b", (6,))]
        self.indices = ["%i"]
        self.scalars: dict[str, list[str]] = {kind: [] for kind in DTYPES}
        self.count = 0
        for _ in range(self.random.randint(4, 20)):
            often = [self.slice, self.read, self.write, self.pieces]
            step = self.random.choice([self.index, self.scalar, self.join, self.shape, self.nothing, *often])
            step()

    def make(self, text: str) -> str:
        self.count += 1
        self.lines.append(f"%v{self.count} = {text}")
        return f"%v{self.count}"

    def pick(self) -> tuple[str, tuple[int, ...]]:
        return self.random.choice(self.tensors[-2:])

    def index(self) -> None:
        if self.random.random() < 0.7:
            value = self.random.randint(-2, 7)
            self.indices.append(self.make(f"stablehlo.constant dense<{value}> : tensor<i32>"))
        else:
            a, b = (self.random.choice(self.indices) for _ in range(2))
            name = self.random.choice(["add", "subtract", "multiply", "maximum"])
            self.indices.append(self.make(f"stablehlo.{name} {a}, {b} : tensor<i32>"))

    def scalar(self) -> None:
        kind = self.random.choice(list(DTYPES))
        known, low = self.scalars[kind], 0 if kind.startswith("u") else -100
        tensor = f"tensor<{kind}>"
        if len(known) < 2:
            known.append(self.make(f"stablehlo.constant dense<{self.random.randint(low, 100)}> : {tensor}"))
            return
        a, b = (self.random.choice(known) for _ in range(2))
        if self.random.random() < 0.3:
            less = self.make(f"stablehlo.compare LT, {a}, {b} : ({tensor}, {tensor}) -> tensor<i1>")
            known.append(self.make(f"stablehlo.select {less}, {a}, {b} : tensor<i1>, {tensor}"))
        elif self.random.random() < 0.3:
            other = self.random.choice(list(DTYPES))
            text = f"stablehlo.convert {a} : ({tensor}) -> tensor<{other}>"
            self.scalars[other].append(self.make(text))
        else:
            name = self.random.choice(["add", "subtract", "multiply", "minimum", "and", "or", "xor"])
            known.append(self.make(f"stablehlo.{name} {a}, {b} : {tensor}"))

    def slice(self) -> None:
        value, shape = self.pick()
        parts, result = [], []
        for size in shape:
            start = self.random.randint(0, size - 1)
            limit, stride = self.random.randint(start + 1, size), self.random.randint(1, 2)
            parts.append(f"{start}:{limit}:{stride}")
            result.append(-(-(limit - start) // stride))
        text = f"stablehlo.slice {value} [{', '.join(parts)}] : ({_type(shape)}) -> {_type(result)}"
        self.tensors.append((self.make(text), tuple(result)))

    def read(self) -> None:
        value, shape = self.pick()
        sizes = [self.random.choice([1, size]) for size in shape]
        starts = [self.random.choice(self.indices) for _ in shape]
        kinds = ", ".join([_type(shape), *["tensor<i32>"] * len(shape)])
        text = f"stablehlo.dynamic_slice {value}, {', '.join(starts)}, sizes = {sizes}"
        self.tensors.append((self.make(f"{text} : ({kinds}) -> {_type(sizes)}"), tuple(sizes)))

    def write(self) -> None:
        value, shape = self.pick()
        fitting = [
            (v, s) for v, s in self.tensors if len(s) == len(shape) and all(x <= y for x, y in zip(s, shape))
        ]
        update, inner = self.random.choice(fitting)
        starts = [self.random.choice(self.indices) for _ in shape]
        kinds = ", ".join([_type(shape), _type(inner), *["tensor<i32>"] * len(shape)])
        text = f"stablehlo.dynamic_update_slice {value}, {update}, {', '.join(starts)}"
        self.tensors.append((self.make(f"{text} : ({kinds}) -> {_type(shape)}"), shape))

    def pieces(self) -> None:
        """What a loop leaves behind: a buffer written piece by piece, then read in part."""
        buffer, size = "%b", 6
        width = self.random.choice([1, 2, 3])
        for start in self.random.sample(range(7 - width), self.random.randint(1, 7 - width)):
            piece = self.make(
                f"stablehlo.slice %b [{width}:{2 * width}] : ({_type([6])}) -> {_type([width])}"
            )
            piece = self.make(f"stablehlo.negate {piece} : {_type([width])}")
            at = self.make(f"stablehlo.constant dense<{start}> : tensor<i32>")
            kinds = f"({_type([size])}, {_type([width])}, tensor<i32>) -> {_type([size])}"
            buffer = self.make(f"stablehlo.dynamic_update_slice {buffer}, {piece}, {at} : {kinds}")
        self.tensors.append((buffer, (size,)))
        self.slice()

    def join(self) -> None:
        _, shape = self.pick()
        dim = self.random.randrange(len(shape))
        rest = shape[:dim] + shape[dim + 1 :]
        fitting = [(v, s) for v, s in self.tensors if len(s) == len(shape) and s[:dim] + s[dim + 1 :] == rest]
        chosen = [self.random.choice(fitting) for _ in range(self.random.randint(1, 3))]
        result = (*shape[:dim], sum(s[dim] for _, s in chosen), *shape[dim + 1 :])
        kinds = ", ".join(_type(s) for _, s in chosen)
        names = ", ".join(v for v, _ in chosen)
        self.tensors.append(
            (self.make(f"stablehlo.concatenate {names}, dim = {dim} : ({kinds}) -> {_type(result)}"), result)
        )

    def shape(self) -> None:
        value, shape = self.pick()
        count = int(np.prod(shape))
        if len(shape) == 2 and self.random.random() < 0.4:
            result = shape[::-1]
            text = f"stablehlo.transpose {value}, dims = [1, 0] : ({_type(shape)}) -> {_type(result)}"
        elif len(shape) == 1 and self.random.random() < 0.5:
            result = (self.random.choice([1, 3]), *shape)
            text = f"stablehlo.broadcast_in_dim {value}, dims = [1] : ({_type(shape)}) -> {_type(result)}"
        else:
            result = self.random.choice([s for s in SHAPES if np.prod(s) == count] or [shape])
            text = f"stablehlo.reshape {value} : ({_type(shape)}) -> {_type(result)}"
        self.tensors.append((self.make(text), tuple(result)))

    def nothing(self) -> None:
        value, shape = self.pick()
        name, number = self.random.choice(
            [("add", "0.0"), ("add", "-0.0"), ("subtract", "0.0"), ("multiply", "1.0"), ("divide", "1.0")]
        )
        kind = _type(shape)
        other = self.make(f"stablehlo.constant dense<{number}> : {kind}")
        self.tensors.append((self.make(f"stablehlo.{name} {value}, {other} : {kind}"), shape))

    def text(self) -> str:
        results = [(v, _type(s)) for v, s in self.tensors[-3:]]
        results += [(names[-1], f"tensor<{kind}>") for kind, names in self.scalars.items() if names]
        values, kinds = ", ".join(v for v, _ in results), ", ".join(k for _, k in results)
        lines = "\n  ".join([*self.lines, f"return {values} : {kinds}"])
        return (
            f"func.func @main(%a: {_type((4, 6))}, %b: {_type((6,))}, %i: tensor<i32>) -> ({kinds}) "
            f"{{\n  {lines}\n}}"
        )


def _type(shape: list[int] | tuple[int, ...]) -> str:
    return f"tensor<{'x'.join(map(str, shape))}xf32>"


def _evaluated(module: mlir.Module) -> list[bytes]:
    values = np.linspace(-1, 1, 24, dtype=np.float32)
    values[::5] = -0.0
    args = [values.reshape(4, 6), np.arange(6, dtype=np.float32), np.array(2, dtype=np.int32)]
    made = [mlir.DenseElementsAttr.get(a, context=ir.context()) for a in args]
    # `x + 0` becomes `x`, which is the only change that a zero's sign shows: + 0 takes the sign away.
    return [(np.array(r) + 0).tobytes() for r in stablehlo.eval_module(module, made)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_same_values_and_no_larger(seed: int) -> None:
    text = RandomProgram(seed).text()
    module = ir.parse(text)
    before, size = _evaluated(module), len(ir.ops(ir.funcs(module)[0]))
    simplify = make_pass("mpmd-simplify-stablehlo")
    simplify.run(module)
    verify(module)
    assert _evaluated(module) == before, text
    assert len(ir.ops(ir.funcs(module)[0])) <= size, text
    again = ir.to_text(module)
    assert not simplify.run(module), again
