"""Reductions and gathers that still run in every microbatch, reported with the reason.

The user wanted them once per step; a warning says which op prevents it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.calls.bodies import put_back
from mpmd.sharding.gathers import uses_along
from mpmd.sharding.inside import splits_of_typed
from mpmd.sharding.partial import is_sum
from mpmd.sharding.shardings import Split, axes_of, split_axes, split_of
from mpmd.support import diagnostics
from mpmd.support.user_code import frames_of


class ValidateNoRepeatedCollectives(FunctionPass):
    """Warns of what devices add up, or gather, in each microbatch although the user wants it once.

        b1 = m1["f"(1)] cc=1 (x1<[{"data"}, {}]>, b0) { w = dot x1 x1 over rows; c = clamp w; s = add b0 c }
        ->  a warning: `w` is added over "data" in each microbatch, as `clamp` needs it whole

    It looks at one microbatch of the finished program, and so at what happens, whatever other passes
    intended: at sums over devices that reach a total over microbatches, and at weights that are split where
    they lie and read whole.

    Requires: shardings are part of types.  Ensures: the program does not change.
    Cost: a copy of the program, and one propagation in each fragment of a microbatch.  Source: ours.

    Attributes:
        reductions: look at sums over devices.
        gathers: look at weights.
    """

    runs_on = "mpmd"
    reductions: bool = False
    gathers: bool = False

    def rewrite_function(self, f: ir.Func) -> None:
        """Looks at the microbatch that ends last, whose totals are everyone's."""
        counters = [n for x in ir.fragments(f) if (n := x.call_counter) is not None]
        if len(set(counters)) < 2:
            return
        before = ir.edits()
        copy = ir.clone(ir.module_of(f))
        symbols = ir.symbol_table(copy)
        looked_at = [x for x in ir.fragments(symbols[f.symbol]) if x.call_counter in (counters[-1], None)]
        for fragment in looked_at:
            put_back(fragment, symbols)
        own = [x for x in looked_at if x.is_user and x.call_counter is not None]
        by_reason: dict[tuple[str, str, str], list[_Finding]] = {}
        for finding in (x for fragment in own for x in self._of_fragment(fragment, symbols[f.symbol])):
            by_reason.setdefault((finding.done, finding.axes, finding.why), []).append(finding)
        ir.forget_edits(before)  # of the copy
        for alike in by_reason.values():
            diagnostics.warning(_message(alike), alike[0].location)

    def _of_fragment(self, fragment: ir.Fragment, f: ir.Func) -> Iterator[_Finding]:
        splits = splits_of_typed(fragment)
        if self.reductions:
            for op in ir.walk(fragment):
                axes = _added_along(op, splits)
                if axes:
                    readers = _Readers.of(op.results[0], fragment)
                    total = next((x for x in (readers, *_of_terms(op, fragment)) if x.is_total), None)
                    if total is not None:
                        readers.results = total.results
                        yield _reduction(op, axes, readers, fragment, f)
        if self.gathers:
            for position, value in enumerate(fragment.inputs):
                if ir.producer(value) is None and len(_counters(value)) > 1:
                    yield from _gathers(fragment, position, splits)


def _counters(value: ir.Value) -> set[int]:
    return {
        op.call_counter
        for op in ir.users(value)
        if isinstance(op, ir.Fragment) and op.call_counter is not None
    }


def _added_along(op: ir.Op, splits: Mapping[ir.Value, Split]) -> list[str]:
    """The axes over whose devices the result of an op is a sum."""

    def axes(value: ir.Value, dims: Iterable[int]) -> list[str]:
        split = splits.get(value, ())
        return [axis for d in dims if d < len(split) for axis in split[d]]

    name, operands = op.operation.name, list(op.operands)
    if name == "stablehlo.dot_general":
        dims = ir.stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
        along = axes(operands[0], dims.lhs_contracting_dimensions)
        along += axes(operands[1], dims.rhs_contracting_dimensions)
    elif _adds(op):
        along = axes(operands[0], map(int, ir.DenseI64ArrayAttr(op.attributes["dimensions"])))
    elif name == "stablehlo.scatter" and len(operands) == 3 and is_sum(op):
        along = axes(operands[2], _scattered(op))
    else:
        return []
    return list(dict.fromkeys(along))


def _scattered(scatter: ir.Op) -> list[int]:
    """The dims of updates whose entries meet in one place; entries of a batch each have their own."""
    numbers = ir.stablehlo.ScatterDimensionNumbers(scatter.attributes["scatter_dimension_numbers"])
    indices, updates = (len(value.type.shape) for value in list(scatter.operands)[1:])
    of_indices = (d for d in range(indices) if d != numbers.index_vector_dim)
    of_updates = (d for d in range(updates) if d not in numbers.update_window_dims)
    return [u for i, u in zip(of_indices, of_updates) if i not in numbers.scatter_indices_batching_dims]


_LINEAR = frozenset(
    f"stablehlo.{name}"
    for name in (
        "add", "broadcast_in_dim", "concatenate", "convert", "divide", "dynamic_update_slice", "multiply",
        "negate", "optimization_barrier", "pad", "reshape", "reverse", "slice", "subtract", "transpose",
    )
) | {"sdy.sharding_constraint"}  # fmt: skip


@dataclasses.dataclass
class _Readers:
    """What reads a value in its microbatch, through ops that keep its elements.

    Attributes:
        fragment: where it is computed.
        curved: the first reader that is not linear.
        sent_to: the first mesh to which it is sent.
        constraint: the first constraint on its sharding.
        is_total: whether it is added to what comes from other microbatches, or goes to them.
        results: the step's results that it reaches.
    """

    fragment: ir.Fragment
    curved: ir.Op | None = None
    sent_to: str = ""
    constraint: ir.Op | None = None
    is_total: bool = False
    results: list[int] = dataclasses.field(default_factory=list)

    @staticmethod
    def of(value: ir.Value, fragment: ir.Fragment) -> _Readers:
        """What reads a value in the body of a fragment."""
        readers = _Readers(fragment)
        readers.follow(value)
        return readers

    def follow(self, value: ir.Value) -> None:
        """All readers, nearest first."""
        todo, seen = [(self.fragment, value)], set[ir.Value]()
        while todo:
            fragment, value = todo.pop(0)
            if value not in seen:
                seen.add(value)
                for op, position in sorted(ir.uses(value), key=lambda use: use[1]):
                    todo += self._read(fragment, value, op, position, seen)

    def _read(
        self, fragment: ir.Fragment, value: ir.Value, op: ir.Op, position: int, seen: set[ir.Value]
    ) -> list[tuple[ir.Fragment, ir.Value]]:
        """The values that an op makes of it, and the fragment in which each is."""
        name = op.operation.name
        if name == "mpmd.return":
            return self._outside(fragment.results[position])
        if name == "stablehlo.return":
            loop = op.operation.parent.opview
            return [(fragment, loop.results[position])] if loop.operation.name == "stablehlo.while" else []
        linear = keeps = name in _LINEAR or _drops_ones(op) or (fragment.call_counter is None and _adds(op))
        if linear and name in ("stablehlo.multiply", "stablehlo.divide"):
            other = op.operands[1 - position]
            linear = other not in seen and (name == "stablehlo.multiply" or position == 0)
        if name == "sdy.sharding_constraint":
            self.constraint = self.constraint or op
        if name == "stablehlo.add" and _is_of_another(op.operands[1 - position], fragment):
            self.is_total = True
        if not linear and fragment.call_counter is not None:
            self.curved = self.curved or op
        keeps = keeps or [list(r.type.shape) for r in op.results] == [list(value.type.shape)]
        return [(fragment, op.results[0])] if keeps else []

    def _outside(self, value: ir.Value) -> list[tuple[ir.Fragment, ir.Value]]:
        """A result of a fragment: the arguments of others that it is."""
        reasons = []
        for op, position in ir.uses(value):
            if isinstance(op, ir.Transfer):
                if any(_is_in(user, self.fragment.call_counter) for user in ir.users(op.result)):
                    self.sent_to = self.sent_to or op.result.type.mesh
                reasons += self._outside(op.result)
            elif isinstance(op, ir.Fragment):
                if op.call_counter in (self.fragment.call_counter, None):
                    reasons.append((op, op.args[position]))
                if op.call_counter is None:
                    self.is_total = self.is_total or _takes_several(op)
                elif op.call_counter != self.fragment.call_counter:
                    self.is_total = True
            elif position not in self.results:
                self.results.append(position)
        return reasons


def _adds(op: ir.Op) -> bool:
    return op.operation.name == "stablehlo.reduce" and len(op.operands) == 2 and is_sum(op)


def _drops_ones(op: ir.Op) -> bool:
    """Whether it is a sum over dims of size 1."""
    return _adds(op) and math.prod(op.operands[0].type.shape) == math.prod(op.results[0].type.shape)


def _of_terms(op: ir.Op, fragment: ir.Fragment) -> Iterator[_Readers]:
    """The readers of the terms of a sum, where those are added up although their sum is needed, too."""
    yield _Readers.of(op.operands[0], fragment)
    for apart in ir.users(op.operands[0]):
        if apart.operation.name == "stablehlo.reshape":
            for twin in ir.users(apart):
                if twin.operation.name == op.operation.name:
                    yield _Readers.of(twin.results[0], fragment)


def _is_in(op: ir.Op, counter: int | None) -> bool:
    return isinstance(op, ir.Fragment) and op.call_counter == counter


def _is_of_another(value: ir.Value, fragment: ir.Fragment) -> bool:
    """Whether a value in a fragment is an argument that another microbatch gives."""
    if ir.producer(value) is not None or value not in fragment.args:
        return False
    maker = ir.producer(fragment.inputs[ir.arg_index(value)])
    while isinstance(maker, ir.Transfer):
        maker = ir.producer(maker.tensor)
    return isinstance(maker, ir.Fragment) and maker.call_counter not in (fragment.call_counter, None)


def _takes_several(fragment: ir.Fragment) -> bool:
    makers = (ir.producer(value) for value in fragment.inputs)
    return len({x.call_counter for x in makers if isinstance(x, ir.Fragment)} - {None}) > 1


@dataclasses.dataclass(frozen=True)
class _Finding:
    """A collective in each microbatch: the option that forbids it, the values, and why."""

    done: str
    axes: str
    why: str
    what: str
    where: str
    location: ir.Location


def _reduction(
    op: ir.Op, axes: Iterable[str], readers: _Readers, fragment: ir.Fragment, f: ir.Func
) -> _Finding:
    meshes = [axes_of(mesh) for mesh in f.topology.values()]
    if readers.curved is not None:
        why = f"{_op(readers.curved)} needs the sum of each"
    elif any(sizes != meshes[0] for sizes in meshes):
        why = "the meshes of the topology have different axes"
    elif readers.sent_to:
        why = f"mesh {readers.sent_to!r} reads it in each"
    elif readers.constraint is not None:
        why = f"a constraint on its sharding{_place(readers.constraint)} is there in each"
    else:
        why = "no total is passed on from each fragment to the next"
    info = f.result_attribute(min(readers.results), "jax.result_info") if readers.results else None
    kind = op.results[0].type
    what = f"a value of type {kind}" if info is None else str(ir.StringAttr(info).value)
    return _Finding(
        "reduce_gradients is once, but devices add up terms of",
        _axes(axes),
        why,
        what,
        _names(fragment),
        op.location,
    )


def _gathers(fragment: ir.Fragment, position: int, splits: Mapping[ir.Value, Split]) -> Iterator[_Finding]:
    """The axes along which a weight is gathered in each microbatch."""
    value, inside = fragment.inputs[position], fragment.args[position]
    split = split_of(value.type.sharding, len(value.type.shape))
    for axis in sorted(split_axes(split)):
        uses = uses_along(inside, split, axis, splits)
        whole = [op for op, needs in uses if needs is True]
        parts = [op for op, needs in uses if needs is False]
        if whole:
            why = (
                f"{_op(parts[0])} reads its parts" if parts else "other fragments of the mesh read its parts"
            )
            what = ir.name_of(value.location) or f"a weight of type {inside.type}"
            done = "gather_weights is once, but devices gather"
            yield _Finding(done, _axes([axis]), why, what, _names(fragment), whole[0].location)


MAX_LISTED = 3
"""How many values one warning names."""


def _message(alike: Sequence[_Finding]) -> str:
    what = list(dict.fromkeys(finding.what for finding in alike))
    more = f" and {len(what) - MAX_LISTED} more" if len(what) > MAX_LISTED else ""
    where = ", ".join(dict.fromkeys(finding.where for finding in alike))
    listed, first = ", ".join(what[:MAX_LISTED]), alike[0]
    return f"{first.done} {listed}{more} over {first.axes} in each microbatch, in {where}: {first.why}"


def _op(op: ir.Op) -> str:
    return f"{op.operation.name.partition('.')[2]}{_place(op)}"


def _names(fragment: ir.Fragment) -> str:
    names = ", ".join(dict.fromkeys(repr(origin.name) for origin in fragment.origins))
    return f"{names} on mesh {fragment.mesh!r}"


def _axes(axes: Iterable[str]) -> str:
    return ", ".join(map(repr, axes))


def _place(op: ir.Op) -> str:
    frames = frames_of(op)
    return f" ({frames[0]})" if frames else ""
