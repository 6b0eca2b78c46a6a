"""The meshes that a step runs on."""

from __future__ import annotations

import functools
import logging
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, TypeAlias, cast, get_args

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from mpmd import ir, jax_compat
from mpmd.brief import clipped, few
from mpmd.errors import ConfigError, collect
from mpmd.jax_distributed import world_devices
from mpmd.runtime.processes.placing import placed
from mpmd.runtime.processes.world import world
from mpmd.runtime.program.streams import processes_text
from mpmd.runtime.run.clients import Pinning, divided, is_made, mesh_devices

log = logging.getLogger("mpmd.devices")

MeshLike: TypeAlias = int | Mesh | Mapping[str, int] | Sequence[Any]


class Topology(Mapping[str, Mesh]):
    """Mesh name -> `jax.sharding.Mesh`, in pipeline order.  Built by `make_topology`.

    Attributes:
        explicit_axes: names of the axes that were explicit in the meshes that it was built from.
    """

    def __init__(self, meshes: Mapping[str, Mesh], explicit_axes: Sequence[str] = ()) -> None:
        self._meshes = dict(meshes)
        self.explicit_axes = tuple(explicit_axes)

    def __getitem__(self, name: str) -> Mesh:
        return self._meshes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._meshes)

    def __len__(self) -> int:
        return len(self._meshes)

    def __repr__(self) -> str:
        def shape(mesh: Mesh) -> str:
            return "x".join(f"{name}={size}" for name, size in mesh.shape.items())

        text = clipped(f"Topology({few(f'{name}: {shape(mesh)}' for name, mesh in self.items())})")
        made = [device for mesh in self.values() for device in mesh.devices.flat if is_made(device)]
        if not made:
            return text
        return f"{text}\n  on made devices, as JAX has {len(jax.devices('cpu'))} on CPU: {_names(made, 3)}"

    def __str__(self) -> str:
        """In a world of several processes a table: mesh, process, host, devices."""
        if not self.processes:
            return repr(self)
        joined = world()
        hosts = joined.known_hosts() if joined is not None else {}
        rows = [("mesh", "process", "host", "devices")]
        for name, mesh in self.items():
            of_mesh = self.processes[name]
            places = ", ".join(dict.fromkeys(hosts.get(process, "?") for process in of_mesh))
            rows.append((name, ", ".join(map(str, of_mesh)), places, _names(list(mesh.devices.flat))))
        widths = [max(len(row[k]) for row in rows) for k in range(3)]
        return "\n".join(
            "  ".join([*(f"{text:{width}}" for text, width in zip(row, widths)), row[3]]) for row in rows
        )

    def _repr_html_(self) -> str:
        """A table of meshes with their axes and devices, for notebooks."""
        heads = ("mesh", "axes", "devices", *(("processes",) if self.processes else ()))
        rows = ["".join(f"<th>{head}</th>" for head in heads)]
        for name, mesh in self.items():
            axes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
            texts = (name, axes, _names(list(mesh.devices.flat)), *(map(str, self.processes.get(name, ()))))
            rows.append("".join(f"<td>{escape(text)}</td>" for text in texts))
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"

    def __deepcopy__(self, memo: Any) -> Topology:
        return self  # devices are of this process, and nothing in it changes

    def __reduce__(self) -> tuple[Any, ...]:
        """By sizes, and numbers of devices in `jax.devices()`: None for made ones."""
        numbers = {device: number for number, device in enumerate(jax.devices())}
        meshes = {
            name: (dict(mesh.shape), [numbers.get(device) for device in mesh.devices.flat])
            for name, mesh in self.items()
        }
        return topology_again, (meshes, self.explicit_axes)

    @functools.cached_property
    def processes(self) -> dict[str, tuple[int, ...]]:
        """For each mesh the indices of its processes, in pipeline order; empty if there is one process."""
        if jax.process_count() == 1:
            return {}
        return {
            name: tuple(sorted({device.process_index for device in mesh.devices.flat}))
            for name, mesh in self.items()
        }

    def ir(self) -> ir.TopologyAttr:
        """The topology as an attribute of the IR."""
        return ir.TopologyAttr.from_axes({name: dict(mesh.shape) for name, mesh in self.items()})

    @property
    def axes(self) -> dict[str, int]:
        """The axes of all meshes; one that meshes have in several sizes has the largest."""
        sizes: dict[str, int] = {}
        for mesh in self.values():
            sizes |= {name: max(size, sizes.get(name, 1)) for name, size in mesh.shape.items()}
        return sizes

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """A mesh with the axes of all meshes, under which a step is traced."""
        types = {name: kind for mesh in self.values() for name, kind in zip(mesh.axis_names, mesh.axis_types)}
        kinds = {mesh.abstract_mesh.abstract_device for mesh in self.values()}
        return AbstractMesh(
            tuple(self.axes.values()),
            tuple(self.axes),
            axis_types=tuple(types.values()),
            abstract_device=kinds.pop() if len(kinds) == 1 else None,  # `jax.shard_map` compares it
        )

    @property
    def shared_devices(self) -> dict[str, list[str]]:
        """Device -> names of its meshes, for devices in more than one."""
        users: dict[tuple[int, str], list[str]] = {}
        for name, mesh in self.items():
            for device in mesh.devices.flat:
                users.setdefault((id(device.client), str(device)), []).append(name)
        return {device: names for (_, device), names in users.items() if len(names) > 1}


_MAX_DEVICES = 8
"""Devices that are named one by one."""


def _names(devices: Sequence[Any], most: int = _MAX_DEVICES) -> str:
    names = [repr(device) for device in devices]
    return ", ".join(names) if len(names) <= most else f"{len(names)}: {names[0]} to {names[-1]}"


def make_topology(
    meshes: Mapping[str, MeshLike], *, devices: Sequence[Any] | None = None, pinning: Pinning = "auto"
) -> Topology:
    """The meshes of a program, in pipeline order.

    Args:
        meshes: for each name a `jax.sharding.Mesh`, whose axes become `AxisType.Auto`, a list of devices, a
            number of devices (one axis called `"data"`), or axis sizes such as `{"data": 2, "model": 2}`.
            Numbers take devices in order from `devices`.
        devices: where numbers take devices from; by default from `jax.devices()`, in order.  In several
            processes a mesh lies in one process where it fits, and is over whole processes where it does not.
        pinning: in one process on CPU, who has the devices.  `"auto"`: JAX where it has enough; else they are
            made, with threads and numbers of their own (2048, 4096, ...), as the topology's repr says.
            `"never"`: JAX alone.  `"always"`: made ones, with cores of their own for each mesh.

    Raises:
        ConfigError: no mesh, a bad name or size, or too few devices; all problems at once.
    """
    if not isinstance(meshes, Mapping) or not meshes:
        got = "" if isinstance(meshes, Mapping) else f": got {meshes!r}"
        raise ConfigError(
            f"a topology needs at least one mesh, such as make_topology({{'m0': 1, 'm1': 1}}){got}"
        )
    problems = [
        p for name, spec in meshes.items() for p in (*_name_problems(name), *_mesh_problems(name, spec))
    ]
    if pinning not in get_args(Pinning):
        problems.append(f"pinning is {pinning!r}; there are {', '.join(map(repr, get_args(Pinning)))}")
    if devices is not None and not _are_devices(devices):
        problems.append(f"devices is {devices!r}; it must be a list of devices, such as jax.devices()")
    if problems:
        raise collect(ConfigError, problems, "the topology cannot be built:")
    sizes = {name: _axes(spec) for name, spec in meshes.items()}
    counts = {name: math.prod(axes.values()) for name, axes in sizes.items() if axes}
    chosen = _devices(counts, devices, pinning)
    jax_meshes = {name: _mesh(spec, sizes[name], chosen.get(name, [])) for name, spec in meshes.items()}
    explicit = dict.fromkeys(axis for spec in meshes.values() for axis in _explicit_axes(spec))
    topology = Topology(jax_meshes, list(explicit))
    if jax.process_count() > 1:
        check_processes(topology)
    if (joined := world()) is not None:
        joined.pin()
    log.info(
        "meshes: %s",
        "; ".join(f"{name} on {_names(list(mesh.devices.flat))}" for name, mesh in topology.items()),
    )
    _mesh_of_device.update({d: name for name, mesh in topology.items() for d in mesh.devices.flat})
    jax_compat.explain_mixed_devices(_explain_mixed)
    for device, names in topology.shared_devices.items() if jax.process_index() == 0 else ():
        warnings.warn(
            f"meshes {', '.join(names)} share {device}: their fragments take turns on it", stacklevel=2
        )
        break
    return topology


def topology_again(
    meshes: Mapping[str, tuple[dict[str, int], list[int | None]]], explicit_axes: Sequence[str]
) -> Topology:
    """A topology that was pickled, in another process perhaps: on the devices with the same numbers.

    Where these are the first of all, or were made, meshes are as `make_topology` makes them of their sizes.

    Args:
        meshes: for each the sizes of its axes, and the numbers of its devices.
        explicit_axes: see `Topology`.

    Raises:
        ConfigError: there are too few devices.
    """
    numbers = [number for _, of_mesh in meshes.values() for number in of_mesh]
    devices = jax.devices()
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers) or known == list(range(len(known))):
        sizes = {name: axes for name, (axes, _) in meshes.items()}
        return Topology(make_topology(sizes), explicit_axes)
    if max(known) >= len(devices):
        raise ConfigError(
            f"the pickled topology of {', '.join(meshes)} uses device {max(known)} of jax.devices(), and "
            f"this process has {len(devices)}"
            "\n  start it with as many devices, or make a topology here: mpmd.make_topology"
        )
    again = {}
    for name, (axes, of_mesh) in meshes.items():
        own = np.array([devices[number] for number in of_mesh if number is not None])
        again[name] = Mesh(own.reshape(tuple(axes.values())), tuple(axes))
    return Topology(again, explicit_axes)


_mesh_of_device: dict[Any, str] = {}
"""The mesh that has a device in the last topology with it."""


def _explain_mixed(lists: Sequence[Sequence[Any]]) -> str:
    """For arrays on different devices: which are on meshes, and how to combine them."""
    names = [repr(_mesh_of_device[devices[0]]) for devices in lists if devices[0] in _mesh_of_device]
    if not names:
        return ""
    on = f"they are on meshes {' and '.join(names)}" if len(names) > 1 else f"one is on mesh {names[0]}"
    return (
        f"\n  {on} of a topology: the results of a step stay where they were computed"
        "\n  mpmd.fetch(tree) puts the arrays of a pytree on one device; mpmd.jit runs functions of arrays "
        "on several meshes"
    )


def check_processes(topology: Topology) -> None:
    """Refuses processes without a mesh.

    Raises:
        ConfigError: there are some.
    """
    used = {device.process_index for mesh in topology.values() for device in mesh.devices.flat}
    idle = [index for index in range(jax.process_count()) if index not in used]
    if idle:
        raise ConfigError(
            f"the topology does not fit the processes: {processes_text(idle)} of {jax.process_count()} "
            f"would have no mesh; this process has {jax.local_device_count()} devices\n"
            "  start fewer processes, or use more or larger meshes; with virtual devices, do not set "
            "jax_num_cpu_devices, which is of each process"
        )


# Characters that the text of programs can hold: XLA ends the process on axes with others.
_WRITABLE = re.compile(r"[!-~]+")
_MESH_NAME = re.compile(r'[^\s@"#;:,/\\]+(/cpu)?|[^\s@"\\]+#(pinned_host|device)')


def _name_problems(name: Any) -> list[str]:
    if not isinstance(name, str) or not _WRITABLE.fullmatch(name) or not _MESH_NAME.fullmatch(name):
        return [
            f"{name!r} is not a mesh name: it must be a text of ASCII letters, digits and signs, not empty,"
            " without spaces, quotes, backslashes and any of @ # / ; : ,"
        ]
    if name.endswith(("#pinned_host", "#device")):
        return [f"{name!r} is not a mesh name: a memory kind belongs to an assignment, not to a mesh"]
    return []


def _mesh_problems(name: Any, spec: Any) -> list[str]:
    """Why a value does not describe a mesh."""
    if isinstance(spec, Mesh):
        return _axis_problems(name, spec.axis_names)
    if isinstance(spec, (int, np.integer)) and not isinstance(spec, bool):
        spec = {"data": int(spec)}
    if isinstance(spec, Mapping) and spec:
        return _axis_problems(name, spec) + [
            f"mesh {name!r}: axis {axis!r} has size {size!r}; it must be a positive whole number"
            for axis, size in spec.items()
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1
        ]
    if not _are_devices(spec) or not len(spec):
        return [
            f"mesh {name!r} is {spec!r}; it must be a number of devices, sizes of axes such as "
            "{'data': 2}, a list of devices, or a jax.sharding.Mesh"
        ]
    twice = [str(device) for device in dict.fromkeys(spec) if list(spec).count(device) > 1]
    return [f"mesh {name!r} has {device} more than once" for device in twice]


def _axis_problems(name: Any, axes: Iterable[Any]) -> list[str]:
    """Why axis names of a mesh are not allowed."""
    return [
        f"mesh {name!r}: {axis!r} is not an axis name: it must be a text of ASCII letters, digits and signs"
        " without spaces, quotes and backslashes"
        for axis in axes
        if not isinstance(axis, str) or not _WRITABLE.fullmatch(axis) or '"' in axis or "\\" in axis
    ]


def _are_devices(value: Any) -> bool:
    """Whether something is a sequence of devices."""
    if not isinstance(value, (Sequence, np.ndarray)) or isinstance(value, str) or np.ndim(value) > 1:
        return False
    return all(isinstance(device, jax.Device) for device in value)


def _axes(spec: MeshLike) -> dict[str, int]:
    """Axis sizes of meshes that are given by size; none for those given by devices."""
    if isinstance(spec, Mesh):
        return {}
    if isinstance(spec, (int, np.integer)):
        return {"data": int(spec)}
    return {axis: int(size) for axis, size in spec.items()} if isinstance(spec, Mapping) else {}


def _explicit_axes(spec: MeshLike) -> list[str]:
    if not isinstance(spec, Mesh):
        return []
    return [str(axis) for axis, kind in zip(spec.axis_names, spec.axis_types) if kind is AxisType.Explicit]


def _mesh(spec: MeshLike, axes: dict[str, int], devices: list[Any]) -> Mesh:
    if isinstance(spec, Mesh):  # shardings within a mesh are Shardy's, so explicit axes are not kept
        return Mesh(spec.devices, spec.axis_names)
    if axes:
        return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))
    return Mesh(np.array(list(cast("Sequence[Any]", spec))), ("data",))


def _devices(counts: dict[str, int], devices: Sequence[Any] | None, pinning: Pinning) -> dict[str, list[Any]]:
    if not counts:
        return {}
    if devices is None and jax.process_count() == 1:
        return mesh_devices(counts, pinning=pinning)
    if devices is None:
        return placed(world_devices(jax.default_backend()), counts)
    advice = "give more devices, smaller meshes, or lists of devices, which meshes may share"
    return divided(devices, counts, f"{len(devices)} were given\n  {advice}")
