"""Devices for the meshes of one process: JAX's where there are enough, else, on CPU, made ones.

The rule, in this order:

* an accelerator: the devices of `jax.devices()`, in order;
* a CPU for which JAX has enough devices: these, in order, unless `pinning="always"`;
* else a client per mesh, whose devices have numbers of their own: 2048, 4096, and so on.  With at least one
  core per mesh, the cores are divided evenly in contiguous runs; with fewer, each client has the threads of
  one core, which may run on any core.  A fragment then runs on as many threads as it has devices at most, and
  the system schedules them.

One CPU client runs executions of several devices one after another, whatever their meshes, and shares one
thread pool among its devices.  A client per mesh lets meshes of several devices overlap, and keeps a mesh on
its own cores, so that a fragment takes as long in the pipeline as it takes alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mpmd import jax_compat
from mpmd.errors import ConfigError
from mpmd.support.resources import keep_past_exit, on_cores

Pinning = Literal["auto", "always", "never"]


MAX_MADE = 2048
"""Devices of one client that have numbers of their own."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeshPlace:
    """The client that is made for a mesh, on `cores`; with `floats` its threads may leave them later."""

    mesh: str
    num_devices: int
    cores: tuple[int, ...]
    floats: bool = False


def plan_places(
    counts: Mapping[str, int], cores: Sequence[int], pinning: Pinning = "auto"
) -> tuple[MeshPlace, ...]:
    """The clients that are made for meshes, by the rule of this module, on a CPU with the given cores.

    Raises:
        ConfigError: a mesh has no or too many devices, or `pinning` requires more cores than there are.
    """
    for mesh, count in counts.items():
        if not 1 <= count <= MAX_MADE:
            raise ConfigError(f"mesh {mesh!r} has {count} devices; a mesh on CPU has 1 to {MAX_MADE}")
    if pinning == "always" and len(cores) < len(counts):
        raise ConfigError(
            f"{len(counts)} meshes cannot be pinned to {len(cores)} cores; use fewer meshes or pinning='auto'"
        )
    if len(cores) >= len(counts):
        shares = _shares(tuple(sorted(cores)), len(counts))
        return tuple(MeshPlace(m, n, share) for (m, n), share in zip(counts.items(), shares, strict=True))
    return tuple(MeshPlace(m, n, tuple(sorted(cores))[:1], True) for m, n in counts.items())


def _shares(cores: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    """Contiguous, disjoint runs of cores; the first ones are longer if the division has a remainder."""
    size, longer = divmod(len(cores), parts)
    shares, start = [], 0
    for part in range(parts):
        end = start + size + (part < longer)
        shares.append(cores[start:end])
        start = end
    return shares


_clients: dict[tuple[int, tuple[int, ...], int], Any] = {}
_clients_lock = threading.Lock()


def mesh_devices(counts: Mapping[str, int], *, pinning: Pinning = "auto") -> dict[str, list[Any]]:
    """Devices of JAX's default platform for each mesh.

    Clients are made once per process and used again for an equal topology: a client cannot be ended.

    Args:
        counts: devices per mesh, by name.
        pinning: "auto" for the rule of this module; "never" for devices of `jax.devices()` alone;
            "always" for a client per mesh with cores of its own, to fail where there are too few.

    Raises:
        ConfigError: there are not enough devices, or cores.
    """
    platform = jax_compat.default_platform()
    if pinning == "always" and platform != "cpu":
        raise ConfigError(f"only meshes on CPU can be pinned to cores; the platform is {platform!r}")
    devices = jax_compat.devices(platform)
    needed = sum(counts.values())
    makes = pinning == "always" or (pinning == "auto" and needed > len(devices))
    made = made_devices(counts, pinning) if platform == "cpu" and makes else {}
    if made:
        return made
    advice = "use fewer meshes, or smaller ones"
    if platform == "cpu":
        advice = f"request virtual ones before JAX starts: jax.config.update('jax_num_cpu_devices', {needed})"
    return divided(devices, counts, f"there are {len(devices)} {platform} devices\n  {advice}")


def made_devices(counts: Mapping[str, int], pinning: Pinning = "auto") -> dict[str, list[Any]]:
    """CPU devices for each mesh from a client of its own; none where jaxlib cannot make clients.

    Raises:
        ConfigError: `pinning` requires more cores than there are, or a feature that this jaxlib lacks.
    """
    places = plan_places(counts, available_cores(), pinning)
    clients = {place.mesh: _client(place, number) for number, place in enumerate(places)}
    if all(client is not None for client in clients.values()):
        return {mesh: list(client.devices()) for mesh, client in clients.items() if client is not None}
    if pinning == "always":
        raise ConfigError("this jaxlib cannot create a CPU client per mesh; use pinning='auto'")
    return {}


def is_made(device: Any) -> bool:
    """Whether `made_devices` made a device."""
    with _clients_lock:
        return any(client is device.client for client in _clients.values())


def divided(devices: Sequence[Any], counts: Mapping[str, int], problem: str) -> dict[str, list[Any]]:
    """The devices of each mesh, in order.

    Raises:
        ConfigError: there are too few: `problem` says how many, and what to do.
    """
    needed = sum(counts.values())
    if len(devices) < needed:
        rows = ", ".join(f"{mesh}: {count}" for mesh, count in counts.items())
        raise ConfigError(f"the topology needs {needed} devices ({rows}), but {problem}")
    left = iter(devices)
    return {mesh: [next(left) for _ in range(count)] for mesh, count in counts.items()}


def cores_of(device: Any, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The cores of the client of a CPU device: as many as its threads.

    Of a client whose threads may run on any core it is an arbitrary one; of the default client it is
    `default`, or all cores of this process.
    """
    with _clients_lock:
        for (_, cores, _), client in _clients.items():
            if client is device.client:
                return cores
    return default or available_cores()


def cores_of_meshes(topology: Mapping[str, Any], own: tuple[int, ...] = ()) -> dict[str, tuple[int, ...]]:
    """The cores of each mesh of CPU devices; meshes of one client divide its cores.

    Args:
        topology: the meshes.
        own: cores of the default client; empty for all of this process.
    """
    sharing: dict[int, list[str]] = {}
    for name, mesh in topology.items():
        if mesh.devices.flat[0].platform == "cpu":
            sharing.setdefault(id(mesh.devices.flat[0].client), []).append(name)
    by_mesh: dict[str, tuple[int, ...]] = {}
    for names in sharing.values():
        cores = cores_of(topology[names[0]].devices.flat[0], own)
        for number, name in enumerate(names):
            by_mesh[name] = cores[number :: len(names)] or cores[:1]
    return by_mesh


def available_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _client(place: MeshPlace, number: int) -> Any | None:
    """The client of a mesh; `number` separates meshes that share all cores."""
    key = (place.num_devices, place.cores, number)
    with _clients_lock:
        if key not in _clients:
            # The default client first, on all cores: it serves calls without a device.
            jax_compat.devices("cpu")
            before = _threads()
            with on_cores(place.cores):
                client = jax_compat.make_cpu_client(place.num_devices, len(_clients) + 1)
            if place.floats:
                _let_float(_threads() - before)
            if client is None:
                return None
            keep_past_exit(client)  # one that is destroyed does not wait for copies to others
            _clients[key] = client
        return _clients[key]


def _threads() -> set[int]:
    """The threads of this process; none where the system does not report them."""
    tasks = Path("/proc/self/task")
    return {int(task.name) for task in tasks.iterdir()} if tasks.is_dir() else set()


def _let_float(threads: set[int]) -> None:
    """Lets threads run on every core of this process; their own threads may too."""
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, available_cores())
