"""Input of the compiler: one fragment as a module of its own, and the placement of its values."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from mpmd import ir
from mpmd.brief import brief
from mpmd.errors import CompileError, ConfigError
from mpmd.passes.export.programs import ATTRIBUTE, read_options
from mpmd.sharding.shardings import axes_by_dim
from mpmd.support.option_texts import FragmentOptions


@dataclasses.dataclass(frozen=True)
class ValueSpec:
    """An argument or result of a fragment.

    Attributes:
        shape: global shape.
        dtype: element type in MLIR's notation, such as `f32`.
        spec: for each dim the mesh axes that shard it, `()` for none.
        memory_kind: `"pinned_host"`, or None for device memory.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...]
    memory_kind: str | None = None


@dataclasses.dataclass(frozen=True)
class FragmentModule:
    """The input of a backend.

    Attributes:
        name: the fragment's name, as in `p0_stage0_fwd.train_step`.
        mesh: name of the mesh it runs on.
        text: MLIR text of a module whose public `@main` is the fragment.
        arguments: its arguments, in order.
        results: its results, in order.
        donated: positions of arguments whose memory a result takes over.
        reserved_bytes: bytes that other values occupy on the mesh while it runs.
        token: whether its executable should return one more result, of one element, that is ready when it has
        ended: for fragments whose results are all consumed.
        callbacks: Python functions that its custom calls name by their position here.
        compiler_options: of XLA, for what XLA compiles of it.
    """

    name: str
    mesh: str
    text: str
    arguments: tuple[ValueSpec, ...]
    results: tuple[ValueSpec, ...]
    donated: tuple[int, ...] = ()
    reserved_bytes: int = 0
    token: bool = False
    callbacks: tuple[Any, ...] = ()
    compiler_options: FragmentOptions = ()

    __repr__ = brief

    @property
    def fingerprint(self) -> str:
        """Equal for fragments that compile to the same code; their names do not count."""
        content = (
            self.text,
            self.arguments,
            self.results,
            self.donated,
            self.token,
            self.compiler_options,
            *map(id, self.callbacks),
        )
        return hashlib.sha256(repr(content).encode()).hexdigest()


def fragment_modules(module: ir.Module, callbacks: tuple[Any, ...] | None) -> dict[str, FragmentModule]:
    """The distinct fragments of an exported module, by name, in the order of their first call.

    Args:
        module: after the export pipeline.
        callbacks: Python functions that custom calls of the module name by their position; None if they are
            unknown.

    Raises:
        ConfigError: a fragment calls back to Python, and the functions are unknown.
    """
    symbols = ir.symbol_table(module)
    modules: dict[str, FragmentModule] = {}
    for call in (call for f in symbols.values() if f.is_mpmd for call in ir.ops(f, ir.FragmentCall)):
        name = call.callee_name
        if name in modules:
            continue
        modules[name] = _extract(module, symbols, call)
        if "_callback" not in modules[name].text:
            continue
        if callbacks is None:
            raise ConfigError(
                f"fragment {name!r} calls back to Python, and this version of JAX hides the function\n"
                "  use another version of JAX, or take the callback out of the step"
            )
        modules[name] = dataclasses.replace(modules[name], callbacks=callbacks)
    return modules


def _extract(module: ir.Module, symbols: dict[str, ir.Func], call: ir.FragmentCall) -> FragmentModule:
    f = symbols[call.callee_name]
    with ir.context(), f.location:
        alone = ir.Module.create()
        for op in module.body.operations:
            if op.operation.name == "sdy.mesh":
                op.operation.clone(ir.InsertionPoint(alone.body))
        main = f.operation.clone(ir.InsertionPoint(alone.body)).opview
        for name in sorted(_used(f, symbols)):
            symbols[name].operation.clone(ir.InsertionPoint(alone.body))
        ir.put(main, "sym_name", ir.StringAttr.get("main"))
        ir.put(main, "sym_visibility", ir.StringAttr.get("public"))
        donated = tuple(
            i for i in range(len(main.args)) if main.arg_attribute(i, "tf.aliasing_output") is not None
        )
        reserved = f.attributes.get("reserved_hbm_bytes")
        for name in ("arg_attrs", "res_attrs", "mesh_shape", "reserved_hbm_bytes", ATTRIBUTE):
            ir.put(main, name, None)
        return FragmentModule(
            name=call.callee_name,
            mesh=call.mesh,
            text=ir.to_text(alone),
            arguments=tuple(value_spec(v.type) for v in call.operands),
            results=tuple(value_spec(v.type) for v in call.results),
            donated=donated,
            reserved_bytes=0 if reserved is None else ir.IntegerAttr(reserved).value,
            compiler_options=read_options(f),
        )


def _used(f: ir.Func, symbols: dict[str, ir.Func]) -> set[str]:
    """The transitive callees of a function, those of custom calls included."""
    reached: set[str] = set()
    todo = [f]
    while todo:
        op = todo.pop()
        names = {call.callee.value for call in ir.walk(op, ir.FuncCall)}
        for custom in ir.walk(op, ir.stablehlo.CustomCallOp):
            names |= {reference.value for reference in custom.called_computations or ()}
        todo += [symbols[name] for name in sorted(names - reached)]
        reached |= names
    return reached


def value_spec(kind: Any) -> ValueSpec:
    """The placement of a value of a mesh tensor type.

    Raises:
        CompileError: its sharding uses part of an axis, which devices of a mesh cannot express.
    """
    spec: tuple[tuple[str, ...], ...] = ((),) * len(kind.shape)
    if kind.sharding is not None:
        spec = tuple(tuple(_axis(a, kind) for a in dim) for dim in axes_by_dim(kind.sharding))
    return ValueSpec(
        tuple(kind.shape), str(kind.element_type), spec, kind.memory_kind if kind.on_host else None
    )


def _axis(axis: Any, kind: Any) -> str:
    if axis.sub_axis_info is not None:
        raise CompileError(
            f"a value of type {kind} is sharded over part of the axis {axis.name!r}\n"
            "  give the mesh an axis of that size instead"
        )
    return str(axis.name)
