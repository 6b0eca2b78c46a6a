"""Arguments of a call: their signature, and their leaves in the parts that a program takes."""

from __future__ import annotations

import dataclasses
import inspect
import reprlib
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, keystr, tree_leaves_with_path

from mpmd.brief import brief
from mpmd.config.ambient import refuse_tracer
from mpmd.errors import SignatureError, collect
from mpmd.jax_compat import explicit_sharding
from mpmd.partition.tree_differences import first_difference
from mpmd.tracing.model_leaves import other_than_array
from mpmd.tracing.stages.stacked.stacked import Stacked, in_parts, is_stacked, of_axis

Leaf = tuple[tuple[int, ...], Any, bool]


@dataclasses.dataclass(frozen=True)
class ArgumentRules:
    """Which arguments are static and which are donated, by position and by name."""

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    __repr__ = brief

    @staticmethod
    def of(
        fn: Callable[..., Any],
        static_argnums: int | Iterable[int],
        static_argnames: str | Iterable[str],
        donate_argnums: int | Iterable[int],
        donate_argnames: str | Iterable[str],
    ) -> ArgumentRules:
        """The rules for a function: positions and names imply each other.

        Raises:
            SignatureError: a position or name that the function does not have, or one that is both.
        """
        names = _positional_names(fn)
        static = _both_ways(fn, names, static_argnums, static_argnames, "static")
        donated = _both_ways(fn, names, donate_argnums, donate_argnames, "donate")
        for both in [*sorted({*static[1]} & {*donated[1]}), *sorted({*static[0]} & {*donated[0]})]:
            raise SignatureError(
                f"argument {both!r} of {_name(fn)} is both static and donated\n"
                "  a static argument is compiled in and has no memory to reuse: leave it out of one of them"
            )
        return ArgumentRules(*static, *donated, tuple(names))


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None


def _positional_names(fn: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in _parameters(fn) or () if p.kind in kinds]


def _both_ways(
    fn: Callable[..., Any], names: list[str], nums: Any, argnames: Any, what: str
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    numbers = _several(nums, int, f"{what}_argnums")
    words = _several(argnames, str, f"{what}_argnames")
    known = _all_names(fn)
    for word in words:
        if known is not None and word not in known:
            raise SignatureError(f"{what}_argnames names {word!r}, but {_name(fn)} takes {', '.join(known)}")
    for number in numbers:
        if names and not -len(names) <= number < len(names) and not _has_varargs(fn):
            raise SignatureError(
                f"{what}_argnums names argument {number}, but {_name(fn)} takes {len(names)} positional ones"
            )
    numbers = [n % len(names) if n < 0 else n for n in numbers]
    words += [names[n] for n in numbers if n < len(names)]
    numbers += [names.index(w) for w in words if w in names]
    return tuple(sorted(set(numbers))), tuple(sorted(set(words)))


def _several(given: Any, kind: type, what: str) -> list[Any]:
    """A position or name, or several of them, as a list; None is none, as for `jax.jit`.

    Raises:
        SignatureError: it is neither.
    """
    if given is None:
        return []
    values = [given] if isinstance(given, kind) or not isinstance(given, Iterable) else list(given)
    if not all(isinstance(one, kind) for one in values):
        wanted = "a position, or several" if kind is int else "a name, or several"
        raise SignatureError(f"{what} is {given!r}; it must be {wanted}")
    return values


def _all_names(fn: Callable[..., Any]) -> list[str] | None:
    parameters = _parameters(fn)
    if parameters is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters]


def _has_varargs(fn: Callable[..., Any]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in _parameters(fn) or ())


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", repr(fn))


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of one call, flattened.

    Attributes:
        leaves: the arrays, in the order of the flat arguments of the traced function.
        tree: their pytree: `(positional, keywords)` without the static ones.
        statics: position or name, and value, of each static argument.
        donated: positions in `leaves` of those that the call may consume.
    """

    leaves: list[Any]
    tree: Any
    statics: tuple[tuple[Any, Hashable], ...]
    donated: tuple[int, ...]

    __repr__ = brief

    def without_arrays(self) -> Arguments:
        """The same with shapes and dtypes for the arrays, which it then does not keep alive."""
        return dataclasses.replace(self, leaves=[abstract(leaf) for leaf in self.leaves])

    @property
    def key(self) -> Hashable:
        """Equal for calls that share one traced function: a static 1, 1.0 and True are three values."""
        statics = tuple((where, type(value), value) for where, value in self.statics)
        return self.tree, tuple(map(describe, self.leaves)), statics

    @property
    def types(self) -> tuple[Any, ...]:
        """For each leaf its sharding over explicit axes: steps with such axes are traced for it."""
        return tuple(map(explicit_sharding, self.leaves))

    @property
    def marks(self) -> list[Any]:
        """What describes each leaf: equal lists belong to equal descriptions.

        An array gives its own description, which the results of one program share: comparing the marks of two
        steps compares objects by identity.

        Raises:
            TypeError, OverflowError: see `describe`.
        """
        own = [getattr(leaf, "aval", None) for leaf in self.leaves]
        return [describe(leaf) if aval is None else aval for leaf, aval in zip(self.leaves, own, strict=True)]


def flatten(rules: ArgumentRules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a call by the rules of its function.

    Raises:
        SignatureError: a static argument has no hash, or an argument is not a pytree.
    """
    statics: list[tuple[Any, Hashable]] = [(i, args[i]) for i in rules.static_argnums if i < len(args)]
    statics += [(name, kwargs[name]) for name in rules.static_argnames if name in kwargs]
    for where, value in statics:
        try:
            hash(value)
        except TypeError:
            raise SignatureError(
                f"static argument {where!r} is {reprlib.repr(value)}, which has no hash\n"
                "  a program is compiled for each value of a static argument: pass a tuple instead of a "
                "list, or do not declare it static"
            ) from None
    dynamic = [a for i, a in enumerate(args) if i not in rules.static_argnums]
    donatable = [i in rules.donate_argnums for i in range(len(args)) if i not in rules.static_argnums]
    named = {name: value for name, value in kwargs.items() if name not in rules.static_argnames}
    donated: list[int] = []
    leaves: list[Any] = []
    for argument, may in [
        *zip(dynamic, donatable),
        *((named[k], k in rules.donate_argnames) for k in sorted(named)),
    ]:
        try:
            flat = jax.tree.leaves(argument)
        except (TypeError, ValueError) as error:
            raise SignatureError(f"an argument is not a pytree: {error}") from None
        donated += range(len(leaves), len(leaves) + len(flat)) if may else ()
        leaves += flat
    return Arguments(leaves, jax.tree.structure((tuple(dynamic), named)), tuple(statics), tuple(donated))


def check_leaves(arguments: Arguments, names: list[str]) -> None:
    """Checks that all arguments are array-like for JAX.

    Args:
        arguments: the arguments of a call.
        names: pytree path of each leaf.

    Raises:
        SignatureError: some are not; names them.
    """
    problems = []
    advice: dict[str, None] = {}
    for leaf, name in zip(arguments.leaves, names, strict=True):
        if isinstance(leaf, jax.core.Tracer):
            refuse_tracer(leaf)
        if isinstance(leaf, np.ma.MaskedArray):
            problems.append(f"{name} is a masked array, and masks would be lost: use its filled()")
            continue
        try:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                jax.typeof(leaf)
        except OverflowError:
            problems.append(f"{name} is {reprlib.repr(leaf)}, more than the integers of JAX hold here")
        except (TypeError, ValueError):
            kind, instead = other_than_array(leaf, jax.tree.unflatten(arguments.tree, arguments.leaves))
            problems.append(f"{name} is {kind}, which is not an array or a number")
            advice[instead] = None
    if problems:
        error = collect(SignatureError, problems[:_MAX_REPORTED], "the arguments cannot be used:")
        more = [f"and {len(problems) - _MAX_REPORTED} more"] if len(problems) > _MAX_REPORTED else []
        raise SignatureError("\n  ".join([str(error), *more, *filter(None, advice)]))


_MAX_REPORTED = 8


@dataclasses.dataclass(frozen=True)
class StepSignature:
    """The arguments that a step was traced for.

    Attributes:
        arguments: shapes and dtypes for the arrays.
        paths: pytree path of each flat argument.
        in_parts: whether stacked arguments are in parts, as `mpmd.split` makes them.
    """

    arguments: Arguments
    paths: list[str]
    in_parts: bool

    __repr__ = brief

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The flat arguments of a call.

        Raises:
            SignatureError: they do not match; names every leaf that differs.
        """
        expected = self.arguments
        if self.in_parts:
            args, kwargs = fitted(expected, args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != expected.tree:
            raise SignatureError(_structure_problem(tree, expected.tree, self.paths))
        self.check_arrays(leaves)
        problems = [
            f"{path}: got {_text(leaf)}, compiled for {_text(wanted)}"
            for path, leaf, wanted in zip(self.paths, leaves, expected.leaves, strict=True)
            if describe(leaf)[:2] != describe(wanted)[:2]
        ]
        if problems:
            raise SignatureError(
                "the arguments do not fit what this was compiled for:\n  "
                + "\n  ".join(problems)
                + "\n  call the jitted function instead: it compiles for every signature"
            )
        return leaves

    def check_arrays(self, leaves: list[Any]) -> None:
        """Checks that flat arguments are array-like; see `check_leaves`."""
        check_leaves(dataclasses.replace(self.arguments, leaves=leaves), self.paths)


def _text(leaf: Any) -> str:
    shape, dtype, _ = describe(leaf)
    return f"{dtype}[{','.join(map(str, shape))}]"


def _structure_problem(got: Any, expected: Any, names: list[str]) -> str:
    """The message for arguments with another pytree, `(positional, keywords)`, than expected."""
    known = dict(zip(_flat_paths(expected), names, strict=True))
    given = _flat_paths(got)
    arguments = {path[:2]: name.removesuffix(keystr(path[2:])) for path, name in known.items()}
    missing = [name for path, name in known.items() if path not in given]
    more = [_called(path, arguments) for path in given if path not in known]
    lines = ["the arguments have another structure than those compiled for"]
    lines += [f"missing: {_few(missing)}"] if missing else []
    lines += [f"not expected: {_few(more)}"] if more else []
    if not missing and not more:
        path, ours, theirs = first_difference(got, expected)
        lines.append(f"{_called(path, arguments)}: got {ours}, expected {theirs}")
    lines.append("give positions and keywords as when it was lowered, without static arguments")
    return "\n  ".join(lines)


def _flat_paths(tree: Any) -> dict[tuple[Any, ...], None]:
    full = jax.tree.unflatten(tree, range(tree.num_leaves))
    return {path: None for path, _ in tree_leaves_with_path(full)}


def _called(path: tuple[Any, ...], arguments: dict[tuple[Any, ...], str]) -> str:
    """A node of `(positional, keywords)`, by the name of its argument, where that is known."""
    if len(path) < 2:
        return "the keywords" if path and path[0].idx else "the positional arguments"
    _, argument, *inner = path
    if isinstance(argument, DictKey):
        return f"{argument.key}{keystr(tuple(inner))} by keyword"
    return arguments.get(path[:2], f"argument {argument.idx}") + keystr(tuple(inner))


def _few(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def paths(rules: ArgumentRules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Pytree path of each flat argument, such as `state['params']['w']`."""
    names = []
    for i, argument in enumerate(args):
        if i not in rules.static_argnums:
            name = rules.names[i] if i < len(rules.names) else f"argument {i}"
            names += [name + keystr(path) for path, _ in tree_leaves_with_path(argument)]
    for name in sorted(kwargs):
        if name not in rules.static_argnames:
            names += [name + keystr(path) for path, _ in tree_leaves_with_path(kwargs[name])]
    return names


def describe(leaf: Any) -> Leaf:
    """Shape, dtype and weakness of an array-like: what a program is compiled for.

    Raises:
        TypeError, OverflowError: it is not array-like; `check_leaves` reports that in the user's words.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError("a masked array")
    if isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        weak = bool(getattr(leaf, "weak_type", False))
        return tuple(leaf.shape), _canonical(leaf.dtype), weak
    kind = jax.typeof(leaf)
    return tuple(kind.shape), kind.dtype, bool(kind.weak_type)


def _canonical(dtype: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(dtype) if isinstance(dtype, np.dtype) else dtype


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """A leaf as `jax.jit` traces it, without any device."""
    shape, dtype, weak = describe(leaf)
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)


def in_wholes(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments with shapes and dtypes of whole arrays for those that are `Stacked`."""

    def whole(value: Any) -> Any:
        shapes = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in value.parts]
        return Stacked(shapes, value.dim).whole()

    given: tuple[Any, Any] = jax.tree.map(
        lambda v: whole(v) if is_stacked(v) else v, (args, kwargs), is_leaf=is_stacked
    )
    return given


def fitted(expected: Arguments, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call, `Stacked` where the program expects parts.

    A whole array that the call may consume is deleted: its parts are copies.

    Args:
        expected: those that a program was traced for.
        args: positional arguments that are not static.
        kwargs: likewise keywords.
    """
    wanted = jax.tree.unflatten(expected.tree, range(len(expected.leaves)))
    slots = jax.tree.leaves(wanted, is_leaf=is_stacked)
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_stacked)
    if len(leaves) != len(slots):
        return args, kwargs  # another structure, which is reported later
    donated = set(expected.donated)
    arguments: tuple[Any, Any] = jax.tree.unflatten(
        tree, [_fitted(value, slot, expected.leaves, donated) for value, slot in zip(leaves, slots)]
    )
    return arguments


def _fitted(value: Any, slot: Any, leaves: list[Any], donated: set[int]) -> Any:
    if not is_stacked(slot):
        return value.whole() if is_stacked(value) else value
    lengths = tuple(leaves[i].shape[slot.dim] for i in slot.parts)
    if is_stacked(value):
        if (value.dim, value.lengths) == (slot.dim, lengths):
            return value
        value = value.whole()
    if not hasattr(value, "shape") or value.shape[slot.dim : slot.dim + 1] != (sum(lengths),):
        return value  # reported later
    shards = of_axis(value, slot.dim, len(lengths)) if len(set(lengths)) == 1 else None
    if shards is not None:
        return Stacked(shards, slot.dim)
    parts = in_parts(value, lengths, slot.dim)
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    if is_array and len(lengths) > 1 and slot.parts[0] in donated:
        value.delete()
    return parts
