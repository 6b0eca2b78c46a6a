"""Stacked leaves in parts, each on the mesh of its stage, and loops in which each stage takes its rows."""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey, register_pytree_with_keys_class

from mpmd.errors import ConfigError, PlacementError
from mpmd.jax_compat import scope_of
from mpmd.tracing.stages.items import FlatFunction, Item
from mpmd.tracing.stages.select.selectors import Selector


def over_axis(parts: Sequence[Any], dim: int, axis: str) -> jax.Array:
    """One array of parts of equal shapes, split along a dim over a new axis of a mesh.

    Raises:
        PlacementError: the parts differ in shape or sharding, or their meshes share devices or no client.
    """
    shardings = [_named(part) for part in parts]
    problem = _problem(parts, shardings, dim, axis)
    if problem:
        raise PlacementError(
            f"the parts of a stack cannot be one array over an axis {axis!r}: {problem}\n"
            "  use .whole(), which joins them on the host, or the parts"
        )
    first = shardings[0]
    devices = np.stack([sharding.mesh.devices for sharding in shardings])
    mesh = Mesh(devices, (axis, *first.mesh.axis_names))
    spec = list(first.spec) + [None] * (parts[0].ndim - len(first.spec))
    spec[dim] = axis
    whole = list(parts[0].shape)
    whole[dim] *= len(parts)
    shards = {shard.device: shard.data for part in parts for shard in part.addressable_shards}
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    ordered = [shards[device] for device in devices.flat]
    return jax.make_array_from_single_device_arrays(tuple(whole), sharding, ordered)


def of_axis(array: Any, dim: int, count: int) -> list[jax.Array] | None:
    """The parts of an array that an axis of its mesh splits along a dim into so many; None if none does."""
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) <= dim:
        return None
    axis = sharding.spec[dim]
    mesh = sharding.mesh
    if not isinstance(axis, str) or mesh.shape[axis] != count or count == 1:
        return None
    position = mesh.axis_names.index(axis)
    others = tuple(name for name in mesh.axis_names if name != axis)
    spec = [None if at == dim else entry for at, entry in enumerate(sharding.spec)]
    shape = list(array.shape)
    shape[dim] //= count
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    parts_of_axis = []
    for number in range(count):
        devices = np.take(mesh.devices, number, position)
        own = Mesh(devices, others) if others else Mesh(devices.reshape(1), (_ALONE,))
        ordered = [shards[device] for device in devices.flat]
        target = NamedSharding(own, PartitionSpec(*spec))
        parts_of_axis.append(jax.make_array_from_single_device_arrays(tuple(shape), target, ordered))
    return parts_of_axis


_ALONE = "device"
"""The axis of the mesh of a part that is on one device."""


def _named(part: Any) -> Any:
    """The sharding of a part over the axes of a mesh."""
    sharding = getattr(part, "sharding", None)
    if isinstance(sharding, NamedSharding) or sharding is None or len(sharding.device_set) != 1:
        return sharding
    return NamedSharding(Mesh(np.array(list(sharding.device_set)), (_ALONE,)), PartitionSpec())


def _problem(parts: Sequence[Any], shardings: Sequence[Any], dim: int, axis: str) -> str:
    if not all(isinstance(sharding, NamedSharding) for sharding in shardings):
        return "they are not arrays on meshes"
    first = shardings[0]
    shapes = list(dict.fromkeys(str(tuple(part.shape)) for part in parts))
    if len(shapes) > 1:
        return f"they have different shapes, {' and '.join(shapes)}"
    if any(s.spec != first.spec or s.mesh.shape != first.mesh.shape for s in shardings):
        return "they are sharded differently"
    if axis in first.mesh.axis_names or (len(first.spec) > dim and first.spec[dim] is not None):
        return f"dim {dim} is sharded already, or the meshes have such an axis"
    devices = [device for sharding in shardings for device in sharding.mesh.devices.flat]
    if len({id(device.client) for device in devices}) > 1:
        enough = f"jax.config.update('jax_num_cpu_devices', {len(set(devices))})"
        return f"each mesh has made devices of its own; JAX's can be combined: {enough}, before JAX starts"
    return "" if len(set(devices)) == len(devices) else "their meshes share devices"


def _elementwise(op: Callable[[Any, Any], Any]) -> Callable[[Stacked, Any], Any]:
    return lambda self, other: self._combined(op, other)


def _reflected(op: Callable[[Any, Any], Any]) -> Callable[[Stacked, Any], Any]:
    return lambda self, other: self._combined(lambda a, b: op(b, a), other)


@register_pytree_with_keys_class
class Stacked:
    """An array in parts along one dim, each on the mesh of its stage.

    `mpmd.split` returns stacked parameters, and their optimizer state, so; they are passed to the next step
    as they are.  It is a pytree of its parts: `jax.tree.map` and `jax.device_get` go into it.

    Operators and indices are the whole array's.  Elementwise operators with numbers, and with stacks of the
    same division, compute each part on its mesh; others join the parts on JAX's default device.  Functions of
    JAX go into the parts, as into any pytree: give them whole arrays, which `mpmd.fetch` returns.

    Attributes:
        parts: the arrays, such as two of `f32[4,16,64]` for `f32[8,16,64]`.
        dim: along which dim they follow one another.
        rank: how many dims the parts had when they were put together.
    """

    __slots__ = ("dim", "parts", "rank")
    __array_priority__ = 100.0  # operators of NumPy arrays leave the operation to the stack

    def __init__(self, parts: Sequence[Any], dim: int = 0, rank: int | None = None) -> None:
        self.parts, self.dim = tuple(parts), dim
        self.rank = getattr(self.parts[0], "ndim", None) if rank is None else rank
        _register_with_flax()

    @property
    def lengths(self) -> tuple[int, ...]:
        """The size of each part along the dim."""
        return tuple(part.shape[self.dim] for part in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        first = self.parts[0].shape
        return (*first[: self.dim], sum(self.lengths), *first[self.dim + 1 :])

    @property
    def dtype(self) -> Any:
        """The dtype of the whole array."""
        return self.parts[0].dtype

    @property
    def ndim(self) -> int:
        """How many dims the whole array has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements the whole array has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return self.size * int(self.dtype.itemsize)

    def astype(self, dtype: Any) -> Stacked:
        """The stack with another dtype; each part is converted where it is."""
        return self._of_each(lambda part: part.astype(dtype))

    def reshape(self, *shape: Any) -> jax.Array:
        """The whole array with another shape."""
        return self.__jax_array__().reshape(*shape)

    def whole(self) -> Any:
        """The parts in one array: of NumPy, because meshes share no memory; traced where they are.

        Raises:
            TypeError: inside of a `scan` or `vmap` over the parts, which hold other rows each.
        """
        self._check()
        if all(isinstance(part, jax.ShapeDtypeStruct) for part in self.parts):
            weak = all(getattr(part, "weak_type", False) for part in self.parts)
            return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=weak)
        if any(isinstance(part, jax.core.Tracer) for part in self.parts):
            return jax.lax.concatenate(self.parts, self.dim)
        return np.concatenate([np.asarray(part) for part in self.parts], self.dim)

    def over_axis(self, axis: str = "stage") -> jax.Array:
        """The parts as one `jax.Array`, split along the dim over an axis of stages; nothing is copied.

        A step takes such an array as it takes the parts.

        Raises:
            PlacementError: parts differ in shape or sharding, or meshes have a client each, as on CPUs by
                default.
        """
        return over_axis(self.parts, self.dim, axis)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.whole(), dtype)

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.whole())

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[jax.Array]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, index: Any) -> jax.Array:
        """As of the whole array; a row of a stack of rows stays on its mesh."""
        self._check()
        if self.dim != 0 or isinstance(index, bool) or not isinstance(index, int | np.integer):
            return self.__jax_array__()[index]
        row = operator.index(index) + (len(self) if index < 0 else 0)
        for part, end in zip(self.parts, itertools.accumulate(self.lengths)):
            if 0 <= row < end:
                return part[row - end + part.shape[0]]
        raise IndexError(f"row {index} of {self!r}")

    def _check(self) -> None:
        """Refuses parts without their dim: in the body of a scan each would be a row of another layer."""
        if any(isinstance(part, jax.core.Tracer) and part.ndim != self.rank for part in self.parts):
            raise TypeError(
                f"{self!r} is not an array: a scan or a vmap went into its parts: each has other rows\n"
                "  give it the whole array: mpmd.fetch(params)"
            )

    def _of_each(self, compute: Callable[[Any], Any]) -> Stacked:
        self._check()
        return Stacked([compute(part) for part in self.parts], self.dim)

    def _combined(self, op: Callable[[Any, Any], Any], other: Any) -> Any:
        """`op(self, other)`: of each part, if the other operand is a number or has such parts."""
        self._check()
        if isinstance(other, int | float | complex | np.number):
            return self._of_each(lambda part: op(part, other))
        if not isinstance(other, Stacked):
            return op(self.__jax_array__(), other)
        if (other.dim, other.lengths, other.shape) != (self.dim, self.lengths, self.shape):
            return op(self.__jax_array__(), other.__jax_array__())
        return Stacked([op(a, b) for a, b in zip(self.parts, other.parts)], self.dim)

    __add__ = _elementwise(operator.add)
    __radd__ = _reflected(operator.add)
    __sub__ = _elementwise(operator.sub)
    __rsub__ = _reflected(operator.sub)
    __mul__ = _elementwise(operator.mul)
    __rmul__ = _reflected(operator.mul)
    __truediv__ = _elementwise(operator.truediv)
    __rtruediv__ = _reflected(operator.truediv)
    __floordiv__ = _elementwise(operator.floordiv)
    __rfloordiv__ = _reflected(operator.floordiv)
    __mod__ = _elementwise(operator.mod)
    __rmod__ = _reflected(operator.mod)
    __pow__ = _elementwise(operator.pow)
    __rpow__ = _reflected(operator.pow)
    __lt__ = _elementwise(operator.lt)
    __le__ = _elementwise(operator.le)
    __gt__ = _elementwise(operator.gt)
    __ge__ = _elementwise(operator.ge)

    def __neg__(self) -> Stacked:
        return self._of_each(operator.neg)

    def __abs__(self) -> Stacked:
        return self._of_each(operator.abs)

    def __matmul__(self, other: Any) -> jax.Array:
        return jnp.matmul(self.__jax_array__(), jnp.asarray(other))

    def __rmatmul__(self, other: Any) -> jax.Array:
        return jnp.matmul(jnp.asarray(other), self.__jax_array__())

    def __repr__(self) -> str:
        if not all(hasattr(part, "shape") for part in self.parts):  # JAX puts placeholders into pytrees
            return f"Stacked({list(self.parts)}, dim {self.dim})"
        sizes = ",".join(map(str, self.shape))
        along = " + ".join(map(str, self.lengths))
        return f"Stacked({self.dtype}[{sizes}] in {len(self.parts)} parts, {along} along dim {self.dim})"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[int, int | None]]:
        """The parts with their names, for JAX."""
        return [(GetAttrKey(f"parts[{i}]"), part) for i, part in enumerate(self.parts)], (self.dim, self.rank)

    @classmethod
    def tree_unflatten(cls, aux: tuple[int, int | None], parts: Sequence[Any]) -> Stacked:
        """From its parts, for JAX."""
        return cls(parts, *aux)


_registered: list[Any] = []


def _register_with_flax() -> None:
    """Makes flax's serialization write whole arrays, once flax has been imported; it is not imported here."""
    flax = sys.modules.get("flax.serialization")
    if flax is not None and not _registered:
        _registered.append(flax)
        flax.register_serialization_state(Stacked, Stacked.whole, _restored)


def _restored(stack: Stacked, array: Any) -> Stacked:
    """The rows of an array, where the parts of a stack are."""
    parts = in_parts(np.asarray(array), stack.lengths, stack.dim).parts
    return Stacked([jax.device_put(new, old.sharding) for new, old in zip(parts, stack.parts)], stack.dim)


def is_stacked(value: Any) -> bool:
    """Whether a value is `Stacked`: for `is_leaf=`."""
    return isinstance(value, Stacked)


def in_parts(array: Any, lengths: Sequence[int], dim: int = 0) -> Stacked:
    """An array, traced or not, or a `jax.ShapeDtypeStruct`, in parts of these lengths."""
    ends = list(itertools.accumulate(lengths))
    if isinstance(array, jax.ShapeDtypeStruct):
        shapes = [(*array.shape[:dim], n, *array.shape[dim + 1 :]) for n in lengths]
        return Stacked([jax.ShapeDtypeStruct(s, array.dtype, weak_type=array.weak_type) for s in shapes], dim)
    if isinstance(array, np.ndarray):
        return Stacked(np.split(array, ends[:-1], dim), dim)
    return Stacked([jax.lax.slice_in_dim(array, e - n, e, axis=dim) for n, e in zip(lengths, ends)], dim)


_ROWS = "mpmd_rows_of_stage"
"""The scope of slices that take the rows of a stage, and of what joins such rows."""


def rows_of(array: Any, begin: int, end: int) -> Any:
    """The rows of a stack that a stage reads; `is_of_rows` knows the slice, differentiated or not."""
    with jax.named_scope(_ROWS):
        return jax.lax.slice_in_dim(array, begin, end)


def joined_rows(*parts: Any) -> Any:
    """The rows of all stages in one array; `is_of_rows` knows the concatenation."""
    with jax.named_scope(_ROWS):
        return jax.lax.concatenate(parts, 0)


def is_of_rows(equation: Any) -> bool:
    """Whether an operation takes or joins rows of stages; others may have the same sizes."""
    return _ROWS in scope_of(equation)


Range = tuple[int, int, int]
"""(first row, end, stage)."""


class SlicedStacks:
    """Slices of rows of stacks.

    Attributes:
        slices: the items that take rows, with the first and the end.
        stacks: the parameters that they take rows of.
        length: rows of each stack.
    """

    def __init__(
        self, flat: FlatFunction, sources: Mapping[int, set[int]], computed: Collection[Item]
    ) -> None:
        """Finds them.

        Args:
            flat: a function before it is divided.
            sources: values that are stacks, or have their rows → the stacks.
            computed: the items that compute of stacks alone.
        """
        self.flat, self.sources, self.computed = flat, sources, computed
        _split_unstacked(flat, sources)
        self.slices: dict[Item, tuple[int, int]] = {}
        for item in flat.items:
            if item.equation.primitive.name in _TAKES_ROWS and item.reads and item.reads[0] in sources:
                rows = _rows_of(item)
                if rows is not None and rows[1] - rows[0] < flat.avals[item.reads[0]].shape[0]:
                    self.slices[item] = rows
        self.stacks = set[int]().union(*(sources[item.reads[0]] for item in self.slices))
        self.length = max((flat.avals[item.reads[0]].shape[0] for item in self.slices), default=0)

    def divide(self, selector: Selector) -> tuple[list[Range], dict[int, int], set[Item]]:
        """Lets each stage slice its own part of the stacks.

        Returns:
            The ranges of the rows, in order; the stage of each part; the items that compute of parts alone.

        Raises:
            ConfigError: the rows of a stage are not next to each other, or a slice has rows of several.
        """
        ranges = self._ranges(selector)
        part_numbers: dict[tuple[int, int], int] = {}  # a stack and a stage → the part
        parts: dict[int, int] = {}
        for item, (begin, end) in self.slices.items():
            inside = [of for of in ranges if of[0] <= begin and end <= of[1]]
            if not inside:
                raise ConfigError(
                    f"{item.where} takes rows {begin} to {end - 1} of a stack, which are of several stages\n"
                    "  use lengths= to keep them together"
                )
            first, last, stage = inside[0]
            stack = item.reads[0]
            if (stack, stage) not in part_numbers:
                part_numbers[stack, stage] = self._part(item, stack, first, last)
                parts[part_numbers[stack, stage]] = stage
            item.inputs = [part_numbers[stack, stage]]
            item.compute = _taking(item.equation, begin - first, end - first)
        return ranges, parts, self._of_parts(parts)

    def _ranges(self, selector: Selector) -> list[Range]:
        first_use = self._first_uses()
        # Stages divide the rows in the order in which the loss uses them; unused rows come last.
        order = sorted(range(self.length), key=lambda row: (first_use.get(row, math.inf), row))
        stages = dict(zip(order, selector.stages_of(self.length), strict=True))
        ranges, begin = [], 0
        for stage, run in itertools.groupby(range(self.length), key=stages.__getitem__):
            end = begin + len(list(run))
            ranges.append((begin, end, stage))
            begin = end
        if len({stage for _, _, stage in ranges}) < len(ranges):
            raise ConfigError(
                f"{selector} needs layers whose rows are next to each other in the stack, but they run in "
                f"the order {', '.join(map(str, order))}"
            )
        return ranges

    def _first_uses(self) -> dict[int, int]:
        """The position of the first item that reads data, and values of each row."""
        rows_of: dict[int, set[int]] = {}
        first: dict[int, int] = {}
        for position, item in enumerate(self.flat.items):
            if item in self.slices:
                rows_of[item.outputs[0]] = set(range(*self.slices[item]))
                continue
            read = set[int]().union(*(rows_of.get(v, ()) for v in item.reads))
            if item in self.computed:
                rows_of.update(dict.fromkeys(item.outputs, read))
            else:
                for row in read:
                    first.setdefault(row, position)
        return first

    def _part(self, item: Item, stack: int, begin: int, end: int) -> int:
        """The value of the rows of a stage, sliced before the item."""
        aval = self.flat.avals[stack]
        part = self.flat.value(aval.update(shape=(end - begin, *aval.shape[1:])))
        compute = lambda rows: [rows_of(rows, begin, end)]  # noqa: E731
        own = Item(compute, [stack], [part], item.equation, stays_out=True, rows=(begin, end))
        self.flat.items.insert(self.flat.items.index(item), own)
        return part

    def _of_parts(self, parts: Mapping[int, int]) -> set[Item]:
        values, items_of_parts = set(parts), set[Item]()
        for item in self.flat.items:
            made_part = not values.isdisjoint(item.outputs)
            if made_part or (item in self.computed and not values.isdisjoint(item.reads)):
                values.update(item.outputs)
                items_of_parts.add(item)
        return items_of_parts


_TAKES_ROWS = ("slice", "unstack")


def _rows_of(item: Item) -> tuple[int, int] | None:
    """The first row and the end that a slice takes; None if it leaves rows out between."""
    params = item.equation.params
    if item.equation.primitive.name == "unstack":
        return item.rows
    if params["strides"] is not None and params["strides"][0] != 1:
        return None
    return params["start_indices"][0], params["limit_indices"][0]


def _split_unstacked(flat: FlatFunction, sources: Mapping[int, set[int]]) -> None:
    """An item for each row of a stack that `jnp.unstack` returns."""
    for item in list(flat.items):
        equation = item.equation
        if equation.primitive.name != "unstack" or equation.params["axis"] or item.reads[0] not in sources:
            continue
        rows = [
            Item(
                _taking(equation, row, row + 1),
                item.inputs,
                [v],
                equation,
                item.checkpoints,
                rows=(row, row + 1),
            )
            for row, v in enumerate(item.outputs)
        ]
        at = flat.items.index(item)
        flat.items[at : at + 1] = rows


def _taking(equation: Any, begin: int, end: int) -> Callable[..., Sequence[Any]]:
    """Takes rows of a part, and the same of other dims."""
    if equation.primitive.name == "unstack":
        return lambda rows: [rows[begin]]
    params = equation.params
    starts, limits = params["start_indices"][1:], params["limit_indices"][1:]
    return lambda rows: [jax.lax.slice(rows, (begin, *starts), (end, *limits), params["strides"])]
