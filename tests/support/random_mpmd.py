"""Random valid modules, at two moments: traced (names, plain tensors) and imported (fragments, transfers).

Values are integers, so that order and grouping do not change them.  Same seed, same module.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from tests.support.random_ops import SCALAR, VECTOR, RandomValue, Writer, listed, names_of, types_of


def _topology(meshes: Sequence[str]) -> str:
    entries = ", ".join(f'<"{mesh}" : <["x"=2]>>' for mesh in meshes)
    return f"topology = #mpmd.topology<{entries}>"


def imported(seed: int, calls: bool = False, shardings: bool = False, effects: bool = False) -> str:
    """A module whose entry point has fragments and transfers on several meshes; with `calls`, a callee.

    With `effects` some ops have effects, each another one.
    """
    rng = random.Random(seed)
    meshes = [f"m{i + 1}" for i in range(rng.randint(2, 4))]
    if rng.random() < 0.4:
        meshes.append("m1/cpu")
    topology = _topology(meshes)
    parts = ['sdy.mesh @mesh = <["x"=2]>'] if shardings else []
    callee = None
    if calls:
        callee = _Imported(rng, meshes, effects).function(
            "body", "private", topology, rng.randint(2, 6), None, False
        )
    main = _Imported(rng, meshes, effects).function(
        "main", "public", topology, rng.randint(4, 12), callee, shardings
    )
    parts += [main.text] + ([callee.text] if callee else [])
    return "\n".join(parts)


@dataclasses.dataclass(frozen=True)
class RandomFunction:
    """A function's text, arguments and results."""

    name: str
    text: str
    args: list[RandomValue]
    results: list[RandomValue]


class _Imported:
    """Writes a function of fragments, transfers and calls."""

    def __init__(self, rng: random.Random, meshes: list[str], effects: bool = False) -> None:
        self.w = Writer(rng, effects=effects, count=rng.randrange(1, 10**6) if effects else 0)
        self.rng = rng
        self.meshes = meshes
        self.pool: list[RandomValue] = []

    def function(
        self,
        name: str,
        visibility: str,
        topology: str,
        size: int,
        callee: RandomFunction | None,
        shardings: bool,
    ) -> RandomFunction:
        """A function of `size` ops between meshes."""
        count = self.rng.randint(1, 4)
        args = [self.w.new(self._tensor(), self.rng.choice(self.meshes)) for _ in range(count)]
        self.pool = list(args)
        for i in range(size):
            roll = self.rng.random()
            if callee is not None and roll < 0.4:
                self._call(callee, i)
            elif roll < 0.45:
                self._crossing()
            elif roll < 0.52:
                self._microbatches()
            elif roll < 0.56:
                self._accumulators()
            elif roll < 0.75:
                self._fragment()
            else:
                self._transfer()
        results = self.w.some(self.pool[len(args) :] or self.pool, 1, 4)
        results += self.w.some(self.pool, 0, 1)
        signature = ", ".join(f"{a.name}: {a.type}{self._sharding(a) if shardings else ''}" for a in args)
        body = "\n  ".join([*self.w.lines, f"return {names_of(results)} : {listed(results)}"])
        text = (
            f"func.func {visibility} @{name}({signature}) -> {types_of(results)} "
            f"attributes {{{topology}}} {{\n  {body}\n}}"
        )
        return RandomFunction(name, text, args, results)

    def _tensor(self) -> str:
        return VECTOR if self.rng.random() < 0.6 else SCALAR

    def _sharding(self, value: RandomValue) -> str:
        if value.tensor != VECTOR or self.rng.random() < 0.5:
            return ""
        return ' {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}'

    def _fragment(
        self, inputs: list[RandomValue] | None = None, marks: tuple[str, str, str] | None = None
    ) -> list[RandomValue]:
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
            f": ({listed(inputs)}) -> {types_of(made)}"
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

    def _accumulators(self) -> None:
        """Microbatches that hand on two sums, which begin with one value."""
        mesh = self.rng.choice([v.mesh for v in self.pool])
        made = self._constant(VECTOR, mesh)
        carried = [made, made]
        for i in range(2):
            args = [self.w.new(VECTOR), self.w.new(VECTOR)]
            sums = [self.w.new(VECTOR), self.w.new(VECTOR)]
            results = [self.w.new(VECTOR, mesh), self.w.new(VECTOR, mesh)]
            body = "\n  ".join(
                f"{s.name} = stablehlo.{op} {a.name}, {args[0].name} : {VECTOR}"
                for s, a, op in zip(sums, args, ("add", "subtract"))
            )
            self.w.lines.append(
                f'{names_of(results)} = mpmd.fragment<mesh="{mesh}", origin=["h"(1)]> ({names_of(carried)}) '
                f"{{call_counter = {i} : ui32}} ({args[0].name}: {VECTOR}, {args[1].name}: {VECTOR}) {{\n"
                f"  {body}\n  mpmd.return {names_of(sums)} : {listed(sums)}\n  }} "
                f": ({listed(carried)}) -> {types_of(results)}"
            )
            carried = results
        self.pool += carried

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

    def _sent(self, value: RandomValue, mesh: str | None, kind: str | None) -> RandomValue:
        made = self.w.new(value.tensor, mesh, kind)
        self.w.lines.append(f"{made.name} = mpmd.transfer {value.name} : ({value.type}) -> {made.type}")
        self.pool.append(made)
        return made

    def _call(self, callee: RandomFunction, counter: int) -> None:
        inputs = []
        for arg in callee.args:
            fitting = [v for v in self.pool if v.type == arg.type]
            inputs.append(self.rng.choice(fitting) if fitting else self._moved_to(arg))
        made = [self.w.new(v.tensor, v.mesh, v.kind) for v in callee.results]
        self.w.lines.append(
            f"{names_of(made)} = mpmd.call @{callee.name}({names_of(inputs)}) "
            f"{{call_counter = {counter} : ui32}} "
            f": ({listed(inputs)}) -> {types_of(made)}"
        )
        self.pool += made

    def _moved_to(self, arg: RandomValue) -> RandomValue:
        """A value of the type of `arg`, by a transfer, or by a fragment where there is no such tensor."""
        same = [v for v in self.pool if v.tensor == arg.tensor]
        if not same:
            return self._constant(arg.tensor, arg.mesh)
        return self._sent(self.rng.choice(same), arg.mesh, arg.kind)

    def _constant(self, tensor: str, mesh: str | None) -> RandomValue:
        """A fragment that computes a constant."""
        constant, made = self.w.new(tensor), self.w.new(tensor, mesh)
        self.w.lines.append(
            f'{made.name} = mpmd.fragment<mesh="{mesh}", origin=[]> () '
            f'{{mpmd.inferred_by = ["wrap"]}} () {{\n'
            f"  {constant.name} = stablehlo.constant dense<2> : {tensor}\n"
            f"  mpmd.return {constant.name} : {tensor}\n  }} : () -> {made.type}"
        )
        self.pool.append(made)
        return made


NAMES = ("f", "g", "h", "t")


def traced(seed: int, effects: bool = False) -> str:
    """A module as tracing leaves it: named computations and tensors, microbatches as calls or a loop.

    With `effects` some ops have effects, each another one.
    """
    rng = random.Random(seed)
    meshes = [f"m{i + 1}" for i in range(rng.randint(2, 3))]
    topology = _topology(meshes)
    parts = []
    helper = _Traced(rng, effects).function("helper", "private", "", 2, None, None)
    callee = None
    if rng.random() < 0.7:
        own = rng.choice([topology, ""])
        callee = _Traced(rng, effects).function("body", "private", own, rng.randint(2, 4), None, helper)
    main = _Traced(rng, effects).function("main", "public", topology, rng.randint(3, 7), callee, helper)
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

    def __init__(self, rng: random.Random, effects: bool = False) -> None:
        self.w = Writer(rng, effects=effects, count=rng.randrange(1, 10**6) if effects else 0)
        self.rng = rng
        self.pool: list[RandomValue] = []

    def function(
        self,
        name: str,
        visibility: str,
        topology: str,
        size: int,
        callee: RandomFunction | None,
        helper: RandomFunction | None,
    ) -> RandomFunction:
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
        body = "\n  ".join([*self.w.lines, f"return {names_of(results)} : {listed(results)}"])
        attributes = f" attributes {{{topology}}}" if topology else ""
        head = f"func.func {visibility} @{name}({signature}) -> {types_of(results)}{attributes}"
        text = f"{head} {{\n  {body}\n}}"
        return RandomFunction(name, text, args, results)

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
            f"{names_of(made)} = mpmd.named_computation<{origin}> ({names_of(inputs)}) "
            f"({args}) {{\n  {body}\n  }} "
            f": ({listed(inputs)}) -> {types_of(made)}"
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

    def _negated(self, a: RandomValue, name: str) -> RandomValue:
        """A named computation of one op."""
        made, arg, inner = self.w.new(a.tensor), self.w.new(a.tensor), self.w.new(a.tensor)
        self.w.lines += [
            f'{made.name} = mpmd.named_computation<"{name}"> ({a.name}) ({arg.name}: {a.tensor}) {{',
            f"  {inner.name} = stablehlo.negate {arg.name} : {a.tensor}",
            f"  mpmd.return {inner.name} : {a.tensor}",
            f"}} : ({a.tensor}) -> {a.tensor}",
        ]
        return made

    def _calls(self, callee: RandomFunction, counter: int) -> None:
        """Some calls, of which one may use what another gave; every other time all have one constant."""
        if self.rng.random() < 0.3 and types_of(callee.args) == types_of(callee.results):
            self._loop(callee)
            return
        first = self._constant(callee.args[0].tensor) if counter % 2 else None
        for k in range(self.rng.randint(1, 3)):
            self._call("mpmd.call", callee, f" {{call_counter = {4 * counter + k} : ui32}}", first)

    def _constant(self, tensor: str) -> RandomValue:
        made = self.w.new(tensor)
        self.w.lines.append(f"{made.name} = stablehlo.constant dense<3> : {tensor}")
        return made

    def _inputs(self, callee: RandomFunction) -> list[RandomValue]:
        inputs = []
        for arg in callee.args:
            fitting = [v for v in self.pool if v.tensor == arg.tensor]
            inputs.append(self.rng.choice(fitting or [self._constant(arg.tensor)]))
        return inputs

    def _call(
        self, op: str, callee: RandomFunction, attributes: str, first: RandomValue | None = None
    ) -> None:
        inputs = self._inputs(callee)
        inputs[:1] = [first or inputs[0]]
        made = [self.w.new(v.tensor) for v in callee.results]
        self.w.lines.append(
            f"{names_of(made)} = {op} @{callee.name}({names_of(inputs)}){attributes} "
            f": ({listed(inputs)}) -> {types_of(made)}"
        )
        self.pool += made

    def _loop(self, callee: RandomFunction) -> None:
        inputs = self._inputs(callee)
        args = [self.w.new(v.tensor) for v in inputs]
        index, made = self.w.new("tensor<ui32>"), [self.w.new(v.tensor) for v in inputs]
        inner = [self.w.new(v.tensor) for v in callee.results]
        types = listed(inputs)
        self.w.lines.append(
            f"{names_of(made)} = mpmd.for ({names_of(inputs)}) "
            "{iterations = 2 : ui32, unroll_factor = 2 : ui32} "
            f"({', '.join(f'{a.name}: {a.tensor}' for a in args)}, {index.name}: tensor<ui32>) {{\n"
            f"  {names_of(inner)} = mpmd.call @{callee.name}({names_of(args)}) "
            f": ({types}) -> {types_of(inner)}\n"
            f"  mpmd.return {names_of(inner)} : {types}\n  }} : {types}"
        )
        self.pool += made
