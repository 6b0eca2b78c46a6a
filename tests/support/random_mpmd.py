"""Random valid modules, at two moments: traced (names, plain tensors) and imported (fragments, transfers).

Values are integers, so that order and grouping do not change them.  Same seed, same module.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

VECTOR, SCALAR = "tensor<4xi32>", "tensor<i32>"
_UNARY = ("negate", "abs", "sign")
_BINARY = ("add", "subtract", "multiply", "maximum", "minimum")


@dataclasses.dataclass(frozen=True)
class Value:
    """An SSA value: its name, its tensor type, and where it is (None: on no mesh)."""

    name: str
    tensor: str
    mesh: str | None = None
    kind: str | None = None

    @property
    def type(self) -> str:
        """Its MLIR type."""
        if self.mesh is None:
            return self.tensor
        memory = f', memory_kind="{self.kind}"' if self.kind else ""
        return f'!mpmd.mesh_tensor<"{self.mesh}", {self.tensor}{memory}>'


def types_of(values: Sequence[Value]) -> str:
    """The types, as behind an arrow."""
    joined = ", ".join(v.type for v in values)
    return joined if len(values) == 1 else f"({joined})"


def names_of(values: Sequence[Value]) -> str:
    """The names, separated by commas."""
    return ", ".join(v.name for v in values)


@dataclasses.dataclass
class Writer:
    """Writes ops, each value under a name of its own."""

    rng: random.Random
    lines: list[str] = dataclasses.field(default_factory=list)
    count: int = 0
    names: tuple[str, ...] = ()

    def new(self, tensor: str, mesh: str | None = None, kind: str | None = None) -> Value:
        """A value that a line to come defines."""
        self.count += 1
        return Value(f"%v{self.count}", tensor, mesh, kind)

    def computed(self, values: Sequence[Value], count: int) -> list[Value]:
        """Writes `count` random StableHLO ops on plain values; all values then at hand, old ones first."""
        pool = list(values)
        for _ in range(count):
            pool.append(self._op(pool))
        return pool

    def _op(self, pool: list[Value]) -> Value:
        if not pool or self.rng.random() < 0.15:
            made = self.new(self.rng.choice([VECTOR, SCALAR]))
            self.lines.append(
                f"{made.name} = stablehlo.constant dense<{self.rng.randrange(-3, 9)}> : {made.tensor}"
            )
            return made
        a = self.rng.choice(pool)
        made = self.new(a.tensor)
        others = [v for v in pool if v.tensor == a.tensor]
        roll = self.rng.random()
        if self.names and roll < 0.2:
            self._nested_name(a, made)
        elif roll < 0.25:
            self.lines.append(f"{made.name} = stablehlo.{self.rng.choice(_UNARY)} {a.name} : {a.tensor}")
        elif roll < 0.85:
            b = self.rng.choice(others)
            op = self.rng.choice(_BINARY)
            self.lines.append(f"{made.name} = stablehlo.{op} {a.name}, {b.name} : {a.tensor}")
        elif roll < 0.92:
            self.lines.append(f"{made.name} = stablehlo.optimization_barrier {a.name} : {a.tensor}")
        else:
            self._branch(pool, a, self.rng.choice(others), made)
        return made

    def _nested_name(self, a: Value, made: Value) -> None:
        """A name inside of a named computation."""
        name = self.rng.choice(self.names)
        if self.rng.random() < 0.5:
            self.lines.append(f'{made.name} = mpmd.named_tensor {a.name} name="{name}" : {a.tensor}')
            return
        arg, inner = self.new(a.tensor), self.new(a.tensor)
        self.lines += [
            f'{made.name} = mpmd.named_computation<"{name}"> ({a.name}) ({arg.name}: {a.tensor}) {{',
            f"  {inner.name} = stablehlo.negate {arg.name} : {a.tensor}",
            f"  mpmd.return {inner.name} : {a.tensor}",
            f"}} : ({a.tensor}) -> {a.tensor}",
        ]

    def _branch(self, pool: list[Value], a: Value, b: Value, made: Value) -> None:
        """An op with regions, which capture values."""
        scalars = [v for v in pool if v.tensor == SCALAR]
        zero, flag, inner = self.new(SCALAR), self.new("tensor<i1>"), self.new(a.tensor)
        self.lines.append(f"{zero.name} = stablehlo.constant dense<1> : {SCALAR}")
        test = self.rng.choice([*scalars, zero])
        self.lines += [
            f"{flag.name} = stablehlo.compare LT, {test.name}, {zero.name} "
            f": ({SCALAR}, {SCALAR}) -> tensor<i1>",
            f'{made.name} = "stablehlo.if"({flag.name}) ({{',
            f"  {inner.name} = stablehlo.add {a.name}, {b.name} : {a.tensor}",
            f"  stablehlo.return {inner.name} : {a.tensor}",
            f"}}, {{ stablehlo.return {b.name} : {a.tensor} }}) : (tensor<i1>) -> {a.tensor}",
        ]

    def some(self, pool: Sequence[Value], low: int, high: int) -> list[Value]:
        """Some values of a pool; one may come several times."""
        return [self.rng.choice(pool) for _ in range(self.rng.randint(low, high))] if pool else []

    def region(self, inputs: Sequence[Value], ops: int, results: int) -> tuple[str, str, list[Value]]:
        """Block arguments, body, and what it returns, for an op on `inputs`."""
        outer, self.lines = self.lines, []
        args = [self.new(v.tensor) for v in inputs]
        pool = self.computed(args, ops if args else max(ops, 1))
        made = pool[len(args) :]
        returned = [self.rng.choice(made if made and self.rng.random() < 0.85 else pool) for _ in range(results)]
        self.lines.append(f"mpmd.return {names_of(returned)} : {', '.join(v.tensor for v in returned)}")
        body, self.lines = "\n  ".join(self.lines), outer
        return ", ".join(f"{a.name}: {a.tensor}" for a in args), body, returned


def _topology(meshes: Sequence[str]) -> str:
    entries = ", ".join(f'<"{mesh}" : <["x"=2]>>' for mesh in meshes)
    return f"topology = #mpmd.topology<{entries}>"


def imported(seed: int, calls: bool = False, shardings: bool = False) -> str:
    """A module whose entry point has fragments and transfers on two to four meshes; with `calls`, a callee."""
    rng = random.Random(seed)
    meshes = [f"m{i + 1}" for i in range(rng.randint(2, 4))]
    if rng.random() < 0.4:
        meshes.append("m1/cpu")
    topology = _topology(meshes)
    parts = ['sdy.mesh @mesh = <["x"=2]>'] if shardings else []
    callee = None
    if calls:
        callee = _Imported(rng, meshes).function("body", "private", topology, rng.randint(2, 6), None, False)
    main = _Imported(rng, meshes).function("main", "public", topology, rng.randint(4, 12), callee, shardings)
    parts += [main.text] + ([callee.text] if callee else [])
    return "\n".join(parts)


@dataclasses.dataclass(frozen=True)
class Function:
    """A function's text, arguments and results."""

    name: str
    text: str
    args: list[Value]
    results: list[Value]


class _Imported:
    """Writes a function of fragments, transfers and calls."""

    def __init__(self, rng: random.Random, meshes: list[str]) -> None:
        self.w = Writer(rng)
        self.rng = rng
        self.meshes = meshes
        self.pool: list[Value] = []

    def function(
        self,
        name: str,
        visibility: str,
        topology: str,
        size: int,
        callee: Function | None,
        shardings: bool,
    ) -> Function:
        """A function of `size` ops between meshes."""
        args = [self.w.new(self._tensor(), self.rng.choice(self.meshes)) for _ in range(self.rng.randint(1, 4))]
        self.pool = list(args)
        for i in range(size):
            roll = self.rng.random()
            if callee is not None and roll < 0.4:
                self._call(callee, i)
            elif roll < 0.45:
                self._crossing()
            elif roll < 0.55:
                self._microbatches()
            elif roll < 0.75:
                self._fragment()
            else:
                self._transfer()
        results = self.w.some(self.pool[len(args) :] or self.pool, 1, 4)
        results += self.w.some(self.pool, 0, 1)
        signature = ", ".join(f"{a.name}: {a.type}{self._sharding(a) if shardings else ''}" for a in args)
        body = "\n  ".join([*self.w.lines, f"return {names_of(results)} : {', '.join(v.type for v in results)}"])
        text = (
            f"func.func {visibility} @{name}({signature}) -> {types_of(results)} "
            f"attributes {{{topology}}} {{\n  {body}\n}}"
        )
        return Function(name, text, args, results)

    def _tensor(self) -> str:
        return VECTOR if self.rng.random() < 0.6 else SCALAR

    def _sharding(self, value: Value) -> str:
        if value.tensor != VECTOR or self.rng.random() < 0.5:
            return ""
        return ' {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}'

    def _fragment(
        self, inputs: list[Value] | None = None, marks: tuple[str, str, str] | None = None
    ) -> list[Value]:
        """A fragment, its inputs and attributes at random unless given; its results."""
        mesh = inputs[0].mesh if inputs else self.rng.choice([v.mesh for v in self.pool])
        if inputs is None:
            inputs = self.w.some([v for v in self.pool if v.mesh == mesh], 0, 3)
        args, body, returned = self.w.region(inputs, self.rng.randint(0, 5), self.rng.randint(1, 3))
        origin, stage, attributes = marks or self._marks()
        made = [self.w.new(v.tensor, mesh) for v in returned]
        self.w.lines.append(
            f'{names_of(made)} = mpmd.fragment<mesh="{mesh}", origin=[{origin}]{stage}> '
            f"({names_of(inputs)}) {attributes}({args}) {{\n  {body}\n  }} "
            f": ({', '.join(v.type for v in inputs)}) -> {types_of(made)}"
        )
        self.pool += made
        return made

    def _crossing(self) -> None:
        """A fragment, some of whose results all go to another one on another mesh."""
        self._fragment()
        made = self.pool[-self.rng.randint(2, 3) :]
        mesh = self.rng.choice(self.meshes)
        sent = [self._sent(v, mesh, self.rng.choice([None, None, "pinned_host"])) for v in made if not v.kind]
        self._fragment([v for v in sent if v.mesh == mesh] or None)

    def _microbatches(self) -> None:
        """Forward work of some microbatches on one mesh, then their backward work, in any order."""
        mesh = self.rng.choice([v.mesh for v in self.pool])
        values = [v for v in self.pool if v.mesh == mesh]
        counters = list(range(self.rng.randint(2, 3)))
        self.rng.shuffle(counters)
        forward = {}
        for i in counters:
            entries = f"{{call_counter = {i} : ui32}} "
            forward[i] = self._fragment([self.rng.choice(values)], ('"f"', "", entries))
        for i in counters:
            entries = f"{{call_counter = {i} : ui32}} "
            self._fragment([forward[i][0], self.rng.choice(values)], ('"f"(1)', "", entries))

    def _marks(self) -> tuple[str, str, str]:
        """Origins, stage and attributes: of a named fragment, or of one that some pass made."""
        entries = []
        if self.rng.random() < 0.55:
            entries.append(f"call_counter = {self.rng.randrange(3)} : ui32")
        if self.rng.random() < 0.4:
            makers = ", ".join(f'"{m}"' for m in self.rng.sample(["uniquify", "wrap", "reduce"], 2))
            entries.append(f"mpmd.inferred_by = [{makers}]")
            return "", "", f"{{{', '.join(entries)}}} "
        count = self.rng.choice(["", "", "(1)"])
        names = self.rng.sample(["f", "g", "h"], self.rng.choice([1, 1, 1, 2]))
        stage = f", stage={self.rng.randrange(2)}" if self.rng.random() < 0.2 else ""
        if self.rng.random() < 0.1:
            entries.append(self.rng.choice(["split_keep_transferred", "split_drop_transferred", "remat"]))
        origin = ", ".join(f'"{name}"{count}' for name in names)
        return origin, stage, f"{{{', '.join(entries)}}} " if entries else ""

    def _transfer(self) -> None:
        value = self.rng.choice(self.pool)
        kind = self.rng.choice([None, None, None, None, "pinned_host", "device"])
        same = value.kind == "pinned_host" and kind == "pinned_host"
        self._sent(value, value.mesh if same else self.rng.choice(self.meshes), kind)

    def _sent(self, value: Value, mesh: str | None, kind: str | None) -> Value:
        made = self.w.new(value.tensor, mesh, kind)
        self.w.lines.append(f"{made.name} = mpmd.transfer {value.name} : ({value.type}) -> {made.type}")
        self.pool.append(made)
        return made

    def _call(self, callee: Function, counter: int) -> None:
        inputs = []
        for arg in callee.args:
            fitting = [v for v in self.pool if v.type == arg.type]
            inputs.append(self.rng.choice(fitting) if fitting else self._moved_to(arg))
        made = [self.w.new(v.tensor, v.mesh, v.kind) for v in callee.results]
        self.w.lines.append(
            f"{names_of(made)} = mpmd.call @{callee.name}({names_of(inputs)}) {{call_counter = {counter} : ui32}} "
            f": ({', '.join(v.type for v in inputs)}) -> {types_of(made)}"
        )
        self.pool += made

    def _moved_to(self, arg: Value) -> Value:
        """A value of the type of `arg`, by a transfer, or by a fragment where there is no such tensor."""
        made = self.w.new(arg.tensor, arg.mesh, arg.kind)
        same = [v for v in self.pool if v.tensor == arg.tensor]
        if same:
            value = self.rng.choice(same)
            self.w.lines.append(f"{made.name} = mpmd.transfer {value.name} : ({value.type}) -> {made.type}")
        else:
            constant = self.w.new(arg.tensor)
            body = (
                f"{constant.name} = stablehlo.constant dense<2> : {arg.tensor}\n  "
                f"mpmd.return {constant.name} : {arg.tensor}"
            )
            self.w.lines.append(
                f'{made.name} = mpmd.fragment<mesh="{arg.mesh}", origin=[]> () '
                f'{{mpmd.inferred_by = ["wrap"]}} () {{\n  {body}\n  }} : () -> {made.type}'
            )
        self.pool.append(made)
        return made


NAMES = ("f", "g", "h", "t")


def traced(seed: int) -> str:
    """A module as tracing leaves it: named computations and tensors, microbatches as calls or a loop."""
    rng = random.Random(seed)
    meshes = [f"m{i + 1}" for i in range(rng.randint(2, 3))]
    topology = _topology(meshes)
    parts = []
    helper = _Traced(rng).function("helper", "private", "", 2, None, None)
    callee = None
    if rng.random() < 0.7:
        own = rng.choice([topology, ""])
        callee = _Traced(rng).function("body", "private", own, rng.randint(2, 4), None, helper)
    main = _Traced(rng).function("main", "public", topology, rng.randint(3, 7), callee, helper)
    parts = [main.text, helper.text] + ([callee.text] if callee else [])
    return "\n".join(parts)


def assignment(seed: int) -> tuple[str, ...]:
    """Meshes for all names of `traced(seed)`."""
    rng = random.Random(seed)
    count = rng.randint(2, 3)
    first = rng.randrange(count)
    return tuple(f"{name}@m{(first + i) % count + 1}" for i, name in enumerate(NAMES))


class _Traced:
    """Writes a function of names, calls and plain ops."""

    def __init__(self, rng: random.Random) -> None:
        self.w = Writer(rng)
        self.rng = rng
        self.pool: list[Value] = []

    def function(
        self,
        name: str,
        visibility: str,
        topology: str,
        size: int,
        callee: Function | None,
        helper: Function | None,
    ) -> Function:
        """A function of `size` statements; of two callees one can be the body of a loop."""
        args = [self.w.new(VECTOR), self.w.new(self.rng.choice([VECTOR, SCALAR]))]
        self.pool = list(args)
        kinds = ["plain", "licence"] + ["named", "named", "named", "helper"] * (helper is not None)
        for i in range(size):
            kind = self.rng.choice(kinds + ["calls", "calls"] * (callee is not None))
            if kind == "calls" and callee is not None:
                self._calls(callee, i)
            elif kind == "helper" and helper is not None:
                self._call("func.call", helper, "")
            elif kind == "licence":
                self._licence()
            elif kind == "named":
                self._named()
            else:
                self.pool = self.w.computed(self.pool, self.rng.randint(1, 3))
        results = self.w.some(self.pool, 1, 3)
        if visibility == "private" and self.rng.random() < 0.6:
            results = [self.rng.choice([v for v in self.pool if v.tensor == a.tensor]) for a in args]
        signature = ", ".join(f"{a.name}: {a.type}" for a in args)
        body = "\n  ".join([*self.w.lines, f"return {names_of(results)} : {', '.join(v.type for v in results)}"])
        attributes = f" attributes {{{topology}}}" if topology else ""
        text = f"func.func {visibility} @{name}({signature}) -> {types_of(results)}{attributes} {{\n  {body}\n}}"
        return Function(name, text, args, results)

    def _named(self) -> None:
        if self.rng.random() < 0.2:
            value = self.rng.choice(self.pool)
            made = self.w.new(value.tensor)
            self.w.lines.append(f'{made.name} = mpmd.named_tensor {value.name} name="t" : {value.tensor}')
            self.pool.append(made)
            return
        inputs = self.w.some(self.pool, 1, 3)
        name = self.rng.choice(NAMES[:3])
        self.w.names = (name, "without a mesh") if self.rng.random() < 0.5 else ()
        args, body, returned = self.w.region(inputs, self.rng.randint(1, 4), self.rng.randint(1, 2))
        self.w.names = ()
        made = [self.w.new(v.tensor) for v in returned]
        origin = f'"{name}"' + self.rng.choice(["", "", "(1)"])
        self.w.lines.append(
            f"{names_of(made)} = mpmd.named_computation<{origin}> ({names_of(inputs)}) ({args}) {{\n  {body}\n  }} "
            f": ({', '.join(v.type for v in inputs)}) -> {types_of(made)}"
        )
        self.pool += made

    def _licence(self) -> None:
        """A broadcast, or a sum of what two named computations give that may be reduced across meshes."""
        a = self.rng.choice(self.pool)
        made = self.w.new(a.tensor)
        if self.rng.random() < 0.3:
            self.w.lines.append(f"{made.name} = mpmd.broadcast {a.name} : {a.tensor}")
        else:
            first, second = (self._negated(a, name) for name in self.rng.sample(NAMES[:3], 2))
            total = self.w.new(a.tensor)
            self.w.lines += [
                f"{total.name} = stablehlo.add {first.name}, {second.name} : {a.tensor}",
                f"{made.name} = mpmd.reduce<none> {total.name} : ({a.tensor}) -> {a.tensor}",
            ]
        self.pool.append(made)

    def _negated(self, a: Value, name: str) -> Value:
        """A named computation of one op."""
        made, arg, inner = self.w.new(a.tensor), self.w.new(a.tensor), self.w.new(a.tensor)
        self.w.lines += [
            f'{made.name} = mpmd.named_computation<"{name}"> ({a.name}) ({arg.name}: {a.tensor}) {{',
            f"  {inner.name} = stablehlo.negate {arg.name} : {a.tensor}",
            f"  mpmd.return {inner.name} : {a.tensor}",
            f"}} : ({a.tensor}) -> {a.tensor}",
        ]
        return made

    def _calls(self, callee: Function, counter: int) -> None:
        """Some calls, of which one may use what another gave."""
        if self.rng.random() < 0.3 and types_of(callee.args) == types_of(callee.results):
            self._loop(callee)
            return
        for k in range(self.rng.randint(1, 3)):
            self._call("mpmd.call", callee, f" {{call_counter = {4 * counter + k} : ui32}}")

    def _inputs(self, callee: Function) -> list[Value]:
        inputs = []
        for arg in callee.args:
            fitting = [v for v in self.pool if v.tensor == arg.tensor]
            if not fitting:
                fitting = [self.w.new(arg.tensor)]
                self.w.lines.append(f"{fitting[0].name} = stablehlo.constant dense<3> : {arg.tensor}")
            inputs.append(self.rng.choice(fitting))
        return inputs

    def _call(self, op: str, callee: Function, attributes: str) -> None:
        inputs = self._inputs(callee)
        made = [self.w.new(v.tensor) for v in callee.results]
        self.w.lines.append(
            f"{names_of(made)} = {op} @{callee.name}({names_of(inputs)}){attributes} "
            f": ({', '.join(v.type for v in inputs)}) -> {types_of(made)}"
        )
        self.pool += made

    def _loop(self, callee: Function) -> None:
        inputs = self._inputs(callee)
        args = [self.w.new(v.tensor) for v in inputs]
        index, made = self.w.new("tensor<ui32>"), [self.w.new(v.tensor) for v in inputs]
        inner = [self.w.new(v.tensor) for v in callee.results]
        types = ", ".join(v.type for v in inputs)
        self.w.lines.append(
            f"{names_of(made)} = mpmd.for ({names_of(inputs)}) {{iterations = 2 : ui32, unroll_factor = 2 : ui32}} "
            f"({', '.join(f'{a.name}: {a.tensor}' for a in args)}, {index.name}: tensor<ui32>) {{\n"
            f"  {names_of(inner)} = mpmd.call @{callee.name}({names_of(args)}) : ({types}) -> {types_of(inner)}\n"
            f"  mpmd.return {names_of(inner)} : {types}\n  }} : {types}"
        )
        self.pool += made
