"""The user's options of XLA: read and checked, with the defaults for meshes of GPUs."""

from __future__ import annotations

import collections
import dataclasses
import enum
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from mpmd import ir, jax_compat
from mpmd.compile.fragment import FragmentModule
from mpmd.config.ambient import without_ambient_mesh
from mpmd.errors import ConfigError, close_to, collect
from mpmd.passes.calls.carried_sums import SUFFIX
from mpmd.passes.export.programs import names_of, put_rows
from mpmd.support import diagnostics
from mpmd.support.option_texts import (
    FragmentOptions,
    OptionsRow,
    OptionValue,
    option_pair,
    options_of,
    with_options,
)

_LEVELS = ("memory_fitting_level", "optimization_level")
_OVERLAP = ("exec_time_optimization_effort", "xla_gpu_enable_latency_hiding_scheduler")
"""Options that say themselves whether XLA hides the latency of collectives: a level would override them."""
_COMMAND_BUFFERS = "xla_gpu_enable_command_buffer"


def read_rows(
    given: Any, topology: Mapping[str, Mesh], names: Mapping[str, str]
) -> tuple[tuple[OptionsRow, ...], list[str]]:
    """The options in a configuration, in the order in which they count; and their problems.

    Args:
        given: options for all fragments; under the name of a mesh or of a computation such for its own.
        topology: the meshes.
        names: the assigned names and the mesh of each.
    """
    if given is None:
        return (), []
    if not isinstance(given, Mapping):
        return (), [
            f"compiler_options is {given!r}; it must map options of XLA to values: {{'xla_...': True}}"
        ]
    problems: list[str] = []
    of_all = {key: value for key, value in given.items() if not isinstance(value, Mapping)}
    rows = [OptionsRow(_checked(of_all, "compiler_options", topology.values(), problems))]
    for scope, options in given.items():
        if isinstance(options, Mapping):
            where = f"compiler_options of {scope!r}"
            if scope in topology and scope in names:
                problems.append(f"{where}: a mesh and a computation have this name; rename one")
            elif scope in topology:
                rows.append(OptionsRow(_checked(options, where, [topology[scope]], problems), mesh=scope))
            elif scope in names:
                own = [topology[names[scope]]]
                rows.append(OptionsRow(_checked(options, where, own, problems), name=scope))
            else:
                problems.append(f"{where}: neither a mesh nor a name{_known(scope, [*topology, *names])}")
    return tuple(row for row in sorted(rows, key=lambda row: row.name != "") if row.options), problems


def with_compiler_options(
    fragments: Mapping[str, FragmentModule], given: Any, topology: Mapping[str, Mesh]
) -> dict[str, FragmentModule]:
    """The fragments of a step with the options that `Lowered.compile` was given.

    Args:
        fragments: by name.
        given: options for all fragments; under the name of a mesh or of a fragment its own.
        topology: the meshes.

    Raises:
        ConfigError: there is no such option, mesh or fragment, or XLA does not take a value.
    """
    rows, problems = read_rows(given, topology, {name: f.mesh for name, f in fragments.items()})
    if problems:
        raise collect(ConfigError, problems, "the compiler options cannot be used:")
    configured = {}
    for name, fragment in fragments.items():
        options = with_options(fragment.compiler_options, dict(options_of(rows, fragment.mesh, (name,))))
        configured[name] = dataclasses.replace(fragment, compiler_options=options)
    return configured


def default_rows(topology: Mapping[str, Mesh]) -> list[OptionsRow]:
    """The options of meshes of several GPUs, which the user's override, in `XLA_FLAGS` and in JAX too.

    The first level of optimization lets XLA hide the latency of collectives and pipeline them in loops; it
    takes longer to compile.  Command buffers that hold collectives of several communicators can wait for
    each other without end.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    own_level = any(f"--{name}" in flags for name in _OVERLAP) or jax_compat.has_effort()
    crowded = set() if f"--{_COMMAND_BUFFERS}" in flags else _with_several_communicators(topology)
    rows = []
    for name, mesh in topology.items():
        if mesh.size > 1 and mesh.devices.flat[0].platform == "gpu":
            if not own_level:
                level = ("optimization_level", jax_compat.effort_levels()["O1"])
                rows.append(OptionsRow((level,), mesh=name, unless=_OVERLAP))
            if name in crowded:
                rows.append(OptionsRow(((_COMMAND_BUFFERS, ""),), mesh=name))
    return rows


def _known(scope: Any, known: Collection[str]) -> str:
    return close_to(str(scope), known) or f"; there are {', '.join(map(repr, known))}"


def put_options(
    module: ir.Module, topology: Mapping[str, Mesh], rows: Sequence[OptionsRow], mirrored: Collection[str]
) -> None:
    """Writes the defaults and the user's options into a step.

    Args:
        module: the step.
        topology: its meshes.
        rows: the user's options.
        mirrored: names with a second copy, which has the same options.
    """
    copies = [dataclasses.replace(row, name=f"{row.name}{SUFFIX}") for row in rows if row.name in mirrored]
    put_rows(module, [*default_rows(topology), *rows, *copies])


def warn_of_unused_options(module: ir.Module, rows: Iterable[OptionsRow]) -> None:
    """Warns of options of names that no fragment of the exported step holds."""
    calls = [call for f in ir.funcs(module) for call in ir.ops(f, ir.FragmentCall)]
    held = {name.removesuffix(SUFFIX) for call in calls for name in names_of(call)}
    for name in dict.fromkeys(row.name for row in rows if row.name and row.name not in held):
        diagnostics.warning(
            f"the compiler options of {name!r} have no effect: no fragment holds a computation of this name"
        )


def _with_several_communicators(topology: Mapping[str, Mesh]) -> set[str]:
    """The meshes of processes whose devices are in several groups: along axes, or of meshes."""
    groups: collections.Counter[int] = collections.Counter()
    processes = {
        name: {device.process_index for device in mesh.devices.flat} for name, mesh in topology.items()
    }
    for name, mesh in topology.items():
        for process in processes[name]:
            groups[process] += sum(size > 1 for size in mesh.shape.values())
    return {name for name, of_mesh in processes.items() if any(groups[p] > 1 for p in of_mesh)}


def _checked(
    options: Mapping[Any, Any], where: str, meshes: Iterable[Mesh], problems: list[str]
) -> FragmentOptions:
    values: dict[str, OptionValue] = {}
    before = len(problems)
    for name, value in options.items():
        read = _value(name, value)
        if read is None:
            problems.append(f"{where}: {_value_problem(name, value)}")
        else:
            values[name] = read
    if values and len(problems) == before:
        of_platform = {mesh.devices.flat[0].platform: mesh for mesh in meshes}
        for mesh in of_platform.values():
            problems += [f"{where}: {problem}" for problem in _refused(values, mesh)]
    return with_options((), values)


def _value(name: Any, value: Any) -> OptionValue | None:
    """A value as XLA takes it; None if this option cannot have it."""
    if not isinstance(name, str) or not name:
        return None
    if name in _LEVELS:
        levels = jax_compat.effort_levels()
        value = levels.get(value, value) if isinstance(value, str) else value
        value = value.value if isinstance(value, enum.Enum) else value
        return value if type(value) is int and value in levels.values() else None
    if type(value) is int and not -(2**63) <= value < 2**63:
        return None
    return value if isinstance(value, (bool, int, float, str)) else None


def _value_problem(name: Any, value: Any) -> str:
    if not isinstance(name, str) or not name:
        return f"{name!r} is not an option, which is a text such as 'xla_gpu_enable_latency_hiding_scheduler'"
    if name in _LEVELS:
        return f"{name} is {value!r}; there are {', '.join(map(repr, jax_compat.effort_levels()))}"
    return f"{name} is {value!r}; it must be True, False, a number of at most 64 bits or a text"


def _refused(options: Mapping[str, OptionValue], mesh: Mesh) -> list[str]:
    """The message of a mesh's compiler on options that it refuses."""
    here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    device = here[0] if here else jax.local_devices()[0]
    said = _said_of(options, device)
    if not said:
        return []
    alone = {name: _said_of({name: value}, device) for name, value in options.items()}
    refused = [f"{option_pair(name, options[name])}: {why}" for name, why in alone.items() if why]
    return refused or [f"{', '.join(options)}: {said}"]


@without_ambient_mesh
def _said_of(options: Mapping[str, OptionValue], device: Any) -> str:
    """The error with which a device's compiler refuses options; "" if it takes them.

    Only a compilation reads them, so a program of one addition is compiled.
    """
    on_device = jax.ShapeDtypeStruct((), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        jax.jit(_of_options).lower(on_device).compile(dict(options))
    except (jax.errors.JaxRuntimeError, TypeError) as error:
        return str(error).partition("\n")[0].removeprefix("INVALID_ARGUMENT: ")
    return ""


def _of_options(x: jax.Array) -> jax.Array:
    return x + 1
