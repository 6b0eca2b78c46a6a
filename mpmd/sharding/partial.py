"""Partial values: sums whose terms lie on the devices along some axes of a mesh, not yet added.

A value that is such a sum has a *partial form* with one more dim, in front: its entry `i` is the term of
device `i` along these axes.  Split along that dim, every device holds its own term, and the sum over the dim
is the value.  The form is an ordinary array, so that any compiler can be given it:

    w = dot x y, contracting rows, which lie over "data"
    ->  x', y' = reshape x, y to [2, rows / 2, ...];  w' = dot x' y' for each of 2;  w = sum of w' over dim 0

A partial form passes through every op that is linear in the value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from mpmd import ir
from mpmd.sharding.device_program import partly_reduced
from mpmd.sharding.shardings import Split, axes_without, without


@dataclasses.dataclass(frozen=True)
class Partial:
    """How to compute the partial form of a value.

    Attributes:
        axes: along them lie the terms, the outermost first.
        build: inserts the ops, next to the value's own.
        needs: the arguments of the body that have to be in partial form for it.
        is_reduced: values with terms along more axes are added to it, and reduced over these axes.
    """

    axes: tuple[str, ...]
    build: Callable[[], ir.Value]
    needs: frozenset[ir.Value] = frozenset()
    is_reduced: bool = False


def _as_given(arg: ir.Value, axes: tuple[str, ...]) -> Partial:
    return Partial(axes, lambda: arg, frozenset({arg}))


class PartialForms:
    """The partial forms of the values in one body: find all before the first is built.

    Args:
        splits: how its values are split; see `mpmd.sharding.inside`.
        sizes: the axes of the mesh and their sizes.
        given: the arguments that come in partial form, and the axes of their terms.
        per_microbatch: axes over which an addend is reduced, if the other one has no terms along them.
        mesh: how shardings refer to the mesh.
    """

    def __init__(
        self,
        splits: Mapping[ir.Value, Split],
        sizes: Mapping[str, int],
        given: Mapping[ir.Value, tuple[str, ...]] | None = None,
        per_microbatch: frozenset[str] = frozenset(),
        mesh: str = "",
    ) -> None:
        self.splits = splits
        self.sizes = sizes
        self.per_microbatch = per_microbatch
        self.mesh = mesh
        self._known: dict[ir.Value, Partial | None] = {
            arg: _as_given(arg, axes) for arg, axes in (given or {}).items()
        }
        self._built: dict[ir.Value, ir.Value] = {}
        self.loops: dict[ir.Op, _LoopResults] = {}

    def of(self, value: ir.Value) -> Partial | None:
        """The partial form of a value; None if it has none."""
        if value not in self._known:
            op = ir.producer(value)
            rule = None if op is None else _RULES.get(op.operation.name)
            form = None
            if op is not None and _is_float(value.type):
                of_loop = op.operation.name == "stablehlo.while"
                form = _of_loop(op, self, value) if of_loop else None if rule is None else rule(op, self)
            self._known[value] = None if form is None else self._once(value, form)
        return self._known[value]

    def _once(self, value: ir.Value, partial: Partial) -> Partial:
        def build() -> ir.Value:
            if value not in self._built:
                self._built[value] = partial.build()
            return self._built[value]

        return dataclasses.replace(partial, build=build)

    def count(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def axes(self, value: ir.Value, dims: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """For each of some dims of a value the axes that split it."""
        split = self.splits.get(value) or ((),) * len(value.type.shape)
        return tuple(split[d] for d in dims)

    def mentions(self, value: ir.Value, axes: Sequence[str]) -> bool:
        """Whether some of the axes split a value."""
        return any(axis in axes for dim in self.splits.get(value, ()) for axis in dim)


Rule = Callable[[ir.Op, PartialForms], Partial | None]


def _is_float(kind: ir.Type) -> bool:
    """Whether a sum of its values does not wrap around."""
    return str(kind.element_type).startswith(("f", "bf"))


def tensor(shape: Sequence[int], like: ir.Type) -> ir.Type:
    return ir.RankedTensorType.get(list(shape), like.element_type, loc=ir.Location.unknown(ir.context()))


def numbers(values: Sequence[int]) -> ir.Attribute:
    """An array attribute of 64-bit numbers."""
    return ir.DenseI64ArrayAttr.get(list(values), ir.context())


_OF_ZERO = frozenset(
    {
        "stablehlo.broadcast_in_dim",
        "stablehlo.convert",
        "stablehlo.optimization_barrier",
        "stablehlo.reshape",
    }
)


def is_zero(value: ir.Value) -> bool:
    """Whether all elements of a value are zero, by the ops that make it."""
    op = ir.producer(value)
    if op is None:
        return False
    if op.operation.name in _OF_ZERO and len(op.operands) == 1:
        return is_zero(op.operands[0])
    if not ir.is_constant(op) or isinstance(value.type.element_type, ir.ComplexType):
        return False
    text = str(op.attributes["value"]).removeprefix("dense<").partition(">")[0]
    try:
        return float(text) == 0
    except ValueError:
        return False


def is_sum(op: ir.Op) -> bool:
    """Whether a reduction or scatter of one operand adds."""
    (region,) = op.operation.regions
    (block,) = region.blocks
    inner = list(block.operations)
    if len(inner) != 2 or inner[0].operation.name != "stablehlo.add":
        return False
    args = list(block.arguments)
    return (
        len(args) == 2
        and set(inner[0].operands) == set(args)
        and list(inner[1].operands) == [inner[0].results[0]]
    )


def _copy(
    op: ir.Op, operands: Sequence[ir.Value], shape: Sequence[int], **attributes: ir.Attribute
) -> ir.Value:
    """The op right before itself, with other operands, another shape of its result, and some attributes."""
    source = ir.clone(op, ir.before(op))
    rebuilt = ir.rebuild(source, operands, [tensor(shape, op.results[0].type)])
    ir.erase(source)
    ir.put(rebuilt, "sdy.sharding", None)
    for name, attribute in attributes.items():
        ir.put(rebuilt, name, attribute)
    return rebuilt.results[0]


def _reshape(value: ir.Value, shape: Sequence[int], op: ir.Op) -> ir.Value:
    if list(value.type.shape) == list(shape):
        return value
    kind = tensor(shape, value.type)
    return ir.create("stablehlo.reshape", [value], [kind], ir.before(op), location=op.location).results[0]


def _apart(value: ir.Value, counts: Mapping[int, int], op: ir.Op) -> ir.Value:
    """A value whose dim `d` has become two: `counts[d]` blocks, and a block."""
    shape: list[int] = []
    for dim, size in enumerate(value.type.shape):
        shape += [counts[dim], size // counts[dim]] if dim in counts else [size]
    return _reshape(value, shape, op)


def _places(rank: int, apart: Sequence[int]) -> list[int]:
    """For each dim where it is (its inner half) once the dims `apart` have become two."""
    return [dim + sum(1 for a in apart if a <= dim) for dim in range(rank)]


def _divides(value: ir.Value, counts: Mapping[int, int]) -> bool:
    return all(value.type.shape[dim] % count == 0 for dim, count in counts.items())


def _known_axes(axes: Sequence[str], forms: PartialForms) -> bool:
    """Whether they are whole axes of the mesh, each once, and of more than one device."""
    whole = len(set(axes)) == len(axes) and all(axis in forms.sizes for axis in axes)
    return whole and forms.count(axes) > 1


# -- where partial values begin ---------------------------------------------------------------------------


def _dot_general(op: ir.Op, forms: PartialForms) -> Partial | None:
    lhs, rhs = op.operands
    dims = ir.stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    contracted = list(zip(dims.lhs_contracting_dimensions, dims.rhs_contracting_dimensions))
    of_lhs = forms.axes(lhs, [i for i, _ in contracted])
    of_rhs = forms.axes(rhs, [j for _, j in contracted])
    if any(a and b and a != b for a, b in zip(of_lhs, of_rhs)):
        return None
    of_dims = [a or b for a, b in zip(of_lhs, of_rhs)]
    axes = tuple(axis for dim in of_dims for axis in dim)
    parts = (
        [(i, j, forms.count(a)) for (i, j), a in zip(contracted, of_dims) if a]
        if set(axes) <= set(forms.sizes)
        else []
    )
    lhs_counts, rhs_counts = {i: n for i, _, n in parts}, {j: n for _, j, n in parts}
    if not parts or not _known_axes(axes, forms) or not _divides(lhs, lhs_counts):
        return None

    def build() -> ir.Value:
        lhs, rhs = op.operands
        left, right = _apart(lhs, lhs_counts, op), _apart(rhs, rhs_counts, op)
        of_left = _places(len(lhs.type.shape), list(lhs_counts))
        of_right = _places(len(rhs.type.shape), list(rhs_counts))
        attribute = ir.stablehlo.DotDimensionNumbers.get(
            lhs_batching_dimensions=[
                *(of_left[i] - 1 for i, _, _ in parts),
                *(of_left[i] for i in dims.lhs_batching_dimensions),
            ],
            rhs_batching_dimensions=[
                *(of_right[j] - 1 for _, j, _ in parts),
                *(of_right[j] for j in dims.rhs_batching_dimensions),
            ],
            lhs_contracting_dimensions=[of_left[i] for i, _ in contracted],
            rhs_contracting_dimensions=[of_right[j] for _, j in contracted],
            context=ir.context(),
        )
        counts, rest = [n for _, _, n in parts], list(op.results[0].type.shape)
        product = _copy(op, [left, right], counts + rest, dot_dimension_numbers=attribute)
        return _reshape(product, [math.prod(counts), *rest], op)

    return Partial(axes, build)


def _reduce(op: ir.Op, forms: PartialForms) -> Partial | None:
    """A sum over split dims: each device adds what it has.  Or one over whole dims of a partial value."""
    if len(op.operands) != 2 or not is_sum(op) or not is_zero(op.operands[1]):
        return None
    value = op.operands[0]
    dims = [int(d) for d in ir.DenseI64ArrayAttr(op.attributes["dimensions"])]
    rest = list(op.results[0].type.shape)
    inner = forms.of(value)
    of_dims = forms.axes(value, dims)
    axes = tuple(axis for dim in of_dims for axis in dim)
    if inner is not None and not axes:

        def build_inner() -> ir.Value:
            source = inner.build()
            shape = [source.type.shape[0], *rest]
            return _copy(op, [source, op.operands[1]], shape, dimensions=numbers([d + 1 for d in dims]))

        return Partial(inner.axes, build_inner, inner.needs)
    if not _known_axes(axes, forms):
        return None
    counts = {d: forms.count(a) for d, a in zip(dims, of_dims) if a}
    if not _divides(value, counts):
        return None

    def build() -> ir.Value:
        value, init = op.operands
        source = _apart(value, counts, op)
        places = _places(len(value.type.shape), list(counts))
        kept = [
            (place, size)
            for place, size in enumerate(source.type.shape)
            if place not in {places[d] for d in dims}
        ]
        reduced = _copy(
            op, [source, init], [size for _, size in kept], dimensions=numbers([places[d] for d in dims])
        )
        outer = {places[d] - 1 for d in counts}
        # `_apart` put a dim over devices in front of each split dim.  These dims go first, in the order of
        # their axes, and become the one dim of terms.
        in_order = [places[d] - 1 for d in counts]
        position = {place: i for i, (place, _) in enumerate(kept)}
        order = [position[p] for p in in_order] + [i for i, (p, _) in enumerate(kept) if p not in outer]
        if order != sorted(order):
            shape = [kept[i][1] for i in order]
            reduced = ir.create(
                "stablehlo.transpose", [reduced], [tensor(shape, reduced.type)], ir.before(op),
                {"permutation": numbers(order)}, op.location,
            ).results[0]  # fmt: skip
        return _reshape(reduced, [math.prod(counts.values()), *rest], op)

    return Partial(axes, build)


def _scatter(op: ir.Op, forms: PartialForms) -> Partial | None:
    """Additions into zeros, of updates that are split: each device adds its own."""
    if len(op.operands) != 3 or not is_sum(op) or not is_zero(op.operands[0]):
        return None
    _, indices, updates = op.operands
    dims = ir.stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    if dims.input_batching_dims or dims.scatter_indices_batching_dims:
        return None
    window, vector = list(dims.update_window_dims), dims.index_vector_dim
    of_updates = [d for d in range(len(updates.type.shape)) if d not in window]
    of_indices = [d for d in range(len(indices.type.shape)) if d != vector]
    split = [
        (i, u, a or b)
        for i, u, (a,), (b,) in zip(
            of_indices,
            of_updates,
            [forms.axes(indices, [i]) for i in of_indices],
            [forms.axes(updates, [u]) for u in of_updates],
        )
        if a or b
    ]
    if len(split) != 1:
        return None
    ((i, u, axes),) = split
    if not _known_axes(axes, forms):
        return None
    count = forms.count(axes)
    if not _divides(updates, {u: count}):
        return None

    def build() -> ir.Value:
        target, indices, updates = op.operands
        at, new = _apart(indices, {i: count}, op), _apart(updates, {u: count}, op)
        shape = [count, *target.type.shape]
        zeros = ir.create(
            "stablehlo.broadcast_in_dim", [target], [tensor(shape, target.type)], ir.before(op),
            {"broadcast_dimensions": numbers(range(1, len(shape)))}, op.location,
        ).results[0]  # fmt: skip
        attribute = ir.stablehlo.ScatterDimensionNumbers.get(
            update_window_dims=[d + (d > u) for d in window],
            inserted_window_dims=[d + 1 for d in dims.inserted_window_dims],
            input_batching_dims=[0],
            scatter_indices_batching_dims=[i],
            scattered_dims_to_operand_dims=[d + 1 for d in dims.scattered_dims_to_operand_dims],
            index_vector_dim=vector + (vector > i),
            context=ir.context(),
        )
        return _copy(op, [zeros, at, new], shape, scatter_dimension_numbers=attribute)

    return Partial(axes, build)


# -- what they pass through -------------------------------------------------------------------------------


def _elementwise(op: ir.Op, forms: PartialForms) -> Partial | None:
    """A linear function of each element: the same one of each term."""
    (value,) = op.operands
    inner = forms.of(value)
    if inner is None:
        return None

    def build() -> ir.Value:
        source = inner.build()
        return _copy(op, [source], source.type.shape)

    return Partial(inner.axes, build, inner.needs)


def _add(op: ir.Op, forms: PartialForms) -> Partial | None:
    """A sum or difference of two values with terms along the same axes, or fewer of one."""
    a, b = (forms.of(v) for v in op.operands)
    if a is None or b is None:
        return None
    axes = min(a.axes, b.axes, key=len)
    if any(x.axes != axes and axes_without(x.axes, forms.per_microbatch) != axes for x in (a, b)):
        return None

    # Now, as an argument has one more dim when sums are built.
    rests = [forms.axes(v, range(len(v.type.shape))) for v in op.operands]

    def build() -> ir.Value:
        sides = [_along(axes, form, rest, op, forms) for form, rest in zip((a, b), rests)]
        return _copy(op, sides, sides[0].type.shape)

    return Partial(axes, build, a.needs | b.needs, a.axes != b.axes or a.is_reduced or b.is_reduced)


def _along(axes: tuple[str, ...], form: Partial, split: Split, op: ir.Op, forms: PartialForms) -> ir.Value:
    """The partial form, along some axes, of an operand of an op that is split so: reduced over the others."""
    built = form.build()
    if form.axes == axes:
        return built
    rest = without(split, form.axes)
    return partly_reduced(built, form.axes, axes, rest, forms.sizes, forms.mesh, ir.before(op))


def _scaled(op: ir.Op, forms: PartialForms) -> Partial | None:
    """A product, or a quotient, of a value with terms and one that is whole along their axes."""
    of_operands = [forms.of(v) for v in op.operands]
    at = next((i for i, form in enumerate(of_operands) if form is not None), None)
    if at is None or (op.operation.name == "stablehlo.divide" and at == 1):
        return None
    inner, other = of_operands[at], op.operands[1 - at]
    assert inner is not None
    if of_operands[1 - at] is not None or forms.mentions(other, inner.axes):
        return None

    def build() -> ir.Value:
        source, other = inner.build(), op.operands[1 - at]
        shape = list(source.type.shape)
        factor = ir.create(
            "stablehlo.broadcast_in_dim", [other], [tensor(shape, other.type)], ir.before(op),
            {"broadcast_dimensions": numbers(range(1, len(shape)))}, op.location,
        ).results[0]  # fmt: skip
        return _copy(op, [source, factor] if at == 0 else [factor, source], shape)

    return Partial(inner.axes, build, inner.needs)


def _moved(attributes: Callable[[ir.Op, int], dict[str, ir.Attribute]]) -> Rule:
    """Elements that go elsewhere, or repeat; the attributes for one more dim in front, given its size."""

    def rule(op: ir.Op, forms: PartialForms) -> Partial | None:
        inner = forms.of(op.operands[0])
        if inner is None or (op.operation.name == "stablehlo.pad" and not is_zero(op.operands[1])):
            return None

        def build() -> ir.Value:
            source = inner.build()
            count = source.type.shape[0]
            shape = [count, *op.results[0].type.shape]
            return _copy(op, [source, *list(op.operands)[1:]], shape, **attributes(op, count))

        return Partial(inner.axes, build, inner.needs)

    return rule


def _list(op: ir.Op, name: str) -> list[int]:
    return [int(n) for n in ir.DenseI64ArrayAttr(op.attributes[name])]


def _with_first(op: ir.Op, **first: int) -> dict[str, ir.Attribute]:
    return {name: numbers([value, *_list(op, name)]) for name, value in first.items()}


def _concatenate(op: ir.Op, forms: PartialForms) -> Partial | None:
    terms = [forms.of(v) for v in op.operands]
    if any(form is None for form in terms) or len({form.axes for form in terms if form is not None}) != 1:
        return None
    parts = [form for form in terms if form is not None]

    def build() -> ir.Value:
        sources = [form.build() for form in parts]
        shape = [sources[0].type.shape[0], *op.results[0].type.shape]
        dimension = int(ir.IntegerAttr(op.attributes["dimension"]).value)
        return _copy(op, sources, shape, dimension=ir.i64(dimension + 1))

    return Partial(parts[0].axes, build, frozenset().union(*(form.needs for form in parts)))


class _LoopResults:
    """A loop, and its results that are built up, from zeros, of values with partial forms.

    A result that is one more slice in each iteration, or one more term, is carried in partial form.
    """

    def __init__(self, op: ir.Op) -> None:
        self.op = op
        self.steps: dict[int, tuple[ir.Op, Partial]] = {}
        self._made: dict[int, ir.Value] = {}

    def result(self, number: int) -> ir.Value:
        """The partial form of a result.  The loop is rewritten once, for all of them."""
        if not self._made:
            self._rewrite()
        return self._made[number]

    def _rewrite(self) -> None:
        op, operands, types = self.op, list(self.op.operands), [r.type for r in self.op.results]
        condition, body = (region.blocks[0] for region in op.operation.regions)
        last = list(body.operations)[-1]
        for number, (step, inner) in self.steps.items():
            value = inner.build()
            kind = tensor([value.type.shape[0], *types[number].shape], types[number])
            total = body.arguments[number]
            ir.set_type(total, kind)
            ir.set_type(condition.arguments[number], kind)
            types[number] = kind
            # The total begins with zeros, so each of its terms does.
            operands[number] = _constant(f"dense<0.0> : {kind}", kind, op)
            if step.operation.name == "stablehlo.add":
                parts = [total, value]
            else:
                at = list(step.operands)[2:]
                parts = [total, value, _constant(f"dense<0> : {at[0].type}", at[0].type, step), *at]
            joined = ir.create(step.operation.name, parts, [kind], ir.before(step), location=step.location)
            ir.set_operand(last, number, joined.results[0])
            ir.erase(step)
        loop = ir.rebuild(op, operands, types)
        ir.put(loop, "sdy.sharding", None)
        for number, (old, new) in enumerate(zip(op.results, loop.results)):
            if number in self.steps:
                self._made[number] = new
                if ir.is_unused(old):
                    continue
                new = total_of(new, old.type, ir.after(loop))
            ir.replace_uses(old, new)
        ir.erase(op)


def _of_loop(op: ir.Op, forms: PartialForms, value: ir.Value) -> Partial | None:
    number = ir.result_index(value)
    condition, body = (region.blocks[0] for region in op.operation.regions)
    total = body.arguments[number]
    step = ir.producer(list(body.operations)[-1].operands[number])
    if step is None or not is_zero(op.operands[number]) or not ir.is_unused(condition.arguments[number]):
        return None
    # Any other reader, of the running total or of its next value, would need it whole in each iteration.
    if len(ir.uses(total)) != 1 or len(ir.uses(step.results[0])) != 1:
        return None
    parts = list(step.operands)
    if step.operation.name == "stablehlo.dynamic_update_slice" and parts[0] == total:
        inner = forms.of(parts[1])
    elif step.operation.name == "stablehlo.add" and total in parts:
        inner = forms.of(parts[1 - parts.index(total)])
    else:
        return None
    if inner is None:
        return None
    loop = forms.loops.setdefault(op, _LoopResults(op))
    loop.steps[number] = step, inner
    return Partial(inner.axes, lambda: loop.result(number), inner.needs)


def _constant(text: str, kind: ir.Type, before: ir.Op) -> ir.Value:
    value = {"value": ir.Attribute.parse(text, ir.context())}
    return ir.create("stablehlo.constant", [], [kind], ir.before(before), value, before.location).results[0]


def total_of(value: ir.Value, kind: ir.Type, where: ir.InsertionPoint) -> ir.Value:
    scalar = f"tensor<{kind.element_type}>"
    text = (
        f"func.func @sum(%x: {value.type}) -> {kind} {{\n"
        f"  %zero = stablehlo.constant dense<0.0> : {scalar}\n"
        "  %sum = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : "
        f"({value.type}, {scalar}) -> {kind}\n"
        f"  return %sum : {kind}\n}}"
    )
    (program,) = ir.funcs(ir.parse(text))
    return ir.clone_body(program.body, {program.args[0]: value}, where)[1][0]


def _passed_on(op: ir.Op, forms: PartialForms) -> Partial | None:
    """A constraint on a sharding: it says nothing about terms."""
    return forms.of(op.operands[0])


_RULES: dict[str, Rule] = {
    "stablehlo.dot_general": _dot_general,
    "stablehlo.reduce": _reduce,
    "stablehlo.scatter": _scatter,
    "stablehlo.negate": _elementwise,
    "stablehlo.convert": _elementwise,
    "stablehlo.add": _add,
    "stablehlo.subtract": _add,
    "stablehlo.multiply": _scaled,
    "stablehlo.divide": _scaled,
    "stablehlo.reshape": _moved(lambda op, count: {}),
    "stablehlo.transpose": _moved(
        lambda op, count: {"permutation": numbers([0, *(d + 1 for d in _list(op, "permutation"))])}
    ),
    "stablehlo.broadcast_in_dim": _moved(
        lambda op, count: {
            "broadcast_dimensions": numbers([0, *(d + 1 for d in _list(op, "broadcast_dimensions"))])
        }
    ),
    "stablehlo.slice": _moved(
        lambda op, count: _with_first(op, start_indices=0, limit_indices=count, strides=1)
    ),
    "stablehlo.pad": _moved(
        lambda op, count: _with_first(op, edge_padding_low=0, edge_padding_high=0, interior_padding=0)
    ),
    "stablehlo.reverse": _moved(
        lambda op, count: {"dimensions": numbers([d + 1 for d in _list(op, "dimensions")])}
    ),
    "stablehlo.concatenate": _concatenate,
    "sdy.sharding_constraint": _passed_on,
}
