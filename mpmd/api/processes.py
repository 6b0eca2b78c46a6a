"""A step in a world of several processes: what each compiles, runs and returns."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import jax

from mpmd import ir
from mpmd.compile.llvm.engine import unmap_compiler_code
from mpmd.config.topology import Topology
from mpmd.errors import AbsentValueError
from mpmd.estimate.program_timeline import Scratch
from mpmd.jax_distributed import explain_absent_arrays
from mpmd.partition.lowering import Partitioned
from mpmd.runtime.channels.links import links
from mpmd.runtime.channels.mesh_devices import MeshDevices
from mpmd.runtime.channels.remote import WorldDevices
from mpmd.runtime.processes.exchange import Alike, WorldExchange, settings_text
from mpmd.runtime.processes.meeting import with_meetings
from mpmd.runtime.processes.part import Part
from mpmd.runtime.processes.placing import own_cores
from mpmd.runtime.processes.world import world
from mpmd.runtime.program.streams import Program, processes_text
from mpmd.runtime.run.clients import cores_of_meshes
from mpmd.runtime.run.executor import Executor, RuntimeOptions
from mpmd.runtime.run.interpreter import FragmentExecutable
from mpmd.support.user_code import PendingWarning

T = TypeVar("T")

log = logging.getLogger("mpmd.processes")


def own_meshes(topology: Topology) -> dict[str, Any]:
    """The meshes with devices of this process: all of them where there is one process."""
    here = jax.process_index()
    return {name: mesh for name, mesh in topology.items() if here in topology.processes.get(name, (here,))}


def cores_of_own(meshes: Mapping[str, Any], exchange: WorldExchange | None) -> dict[str, tuple[int, ...]]:
    """The cores of the meshes of this process; processes of one host divide its cores."""
    return cores_of_meshes(meshes, own_cores(exchange) if exchange is not None else ())


@contextlib.contextmanager
def compiling(partitioned: Partitioned, topology: Topology) -> Iterator[WorldExchange | None]:
    """The compilation of a program, which all processes do alike, in one order; None where there is one.

    Raises:
        PeerError: another process has another program, settings or versions, or failed meanwhile.
    """
    joined = world()
    if joined is None:
        yield None
        return
    for name, of_mesh in topology.processes.items():
        for process in of_mesh:
            meshes = joined.meshes.setdefault(process, [])
            meshes += [] if name in meshes else [name]
    options = f"backend {partitioned.backend}, processes {topology.processes}\n"
    options += f"options {partitioned.compile_options.key}\n"
    program = partitioned.program.as_text() + ir.to_text(partitioned.module)
    alike = Alike("runs another program", settings_text() + options + program, _SAME_SCRIPT)
    with joined.exchange("the compilation of a program", alike) as exchange:
        yield exchange


_SAME_SCRIPT = "run the same script with the same arguments, options and versions in every process"


def together(exchange: WorldExchange | None, act: Callable[[], T]) -> T:
    """What `act` returns here, if it fails in no process.

    Raises:
        PeerError: it failed in another process.
    """
    results: list[T] = []
    if exchange is None:
        return act()
    exchange.together(lambda: results.append(act()))
    return results[0]


def devices_of(topology: Topology, exchange: WorldExchange | None, transfers: str = "auto") -> MeshDevices:
    """The devices of the meshes, which move arrays between processes where there are several.

    Args:
        topology: the meshes.
        exchange: about the program.
        transfers: see `RuntimeOptions`.
    """
    if exchange is None or not topology.processes:
        return MeshDevices(dict(topology))
    explain_absent_arrays(absent_value)
    return WorldDevices(dict(topology), topology.processes, links(exchange), transfers)


def executor_of(
    program: Program,
    executables: Mapping[tuple[str, str], FragmentExecutable],
    devices: MeshDevices,
    options: RuntimeOptions,
    workspace: Mapping[tuple[str, str], int],
    exchange: WorldExchange | None,
) -> Executor | Part:
    """Runs the program, or this process's part of it."""
    if exchange is None:
        return Executor(program, executables, devices, options, workspace)
    exchange.world.peer_timeout = options.peer_timeout
    assert isinstance(devices, WorldDevices)
    unmap_compiler_code()
    executables = with_meetings(program, executables, devices.meshes, exchange)
    part = Part(program, executables, devices, options, workspace, exchange)
    if log.isEnabledFor(logging.INFO):
        sent = sum(len(program.channels[number].types) for number in program.between_processes)
        log.info("%d messages of a step are between processes, %d of them direct", sent, len(part.pairs))
    if part.pairs:
        # all fragments are compiled, everywhere, before the first message: to load one may wait for its
        # device, which waits for the other end of a message
        exchange.compare(Alike("sends other arrays directly", "\n".join(map(str, part.pairs)), _SAME_SCRIPT))
    return part


def merged(executor: Executor | Part, what: str, figures: Mapping[str, int]) -> dict[str, int]:
    """Figures of the meshes of this process and of all others, which must call it too."""
    if not isinstance(executor, Part):
        return dict(figures)
    return {mesh: figure for of in executor.gathered(what, dict(figures)) for mesh, figure in of.items()}


def merged_scratch(scratch: Scratch, exchange: WorldExchange | None) -> Scratch:
    if exchange is None:
        return scratch
    scratches = exchange.gather_json(
        [
            [(*key, size) for key, size in scratch.workspace.items()],
            [(mesh, owner, size) for mesh, of in scratch.owned.items() for owner, size in of.items()],
        ]
    )
    workspace = {(mesh, name): size for of, _ in scratches for mesh, name, size in of}
    owned: dict[str, dict[Any, int]] = {}
    for process, (_, of_process) in enumerate(scratches):
        for mesh, owner, size in of_process:
            owned.setdefault(mesh, {})[process, owner] = size
    return Scratch(workspace, owned)


def shared_warning(own: PendingWarning, exchange: WorldExchange | None) -> PendingWarning:
    """The warnings of all processes, in process 0, which shows them; none in the others."""
    if exchange is None:
        return own
    texts = dict.fromkeys(text for text in exchange.gather(own.text) if text)
    return PendingWarning("\n".join(texts) if exchange.world.index == 0 else "")


def absent_results(
    program: Program, devices: MeshDevices, weak: Collection[int]
) -> dict[int, Callable[[], jax.Array]]:
    """For each result that this process may not have, what makes an array without data in its place."""
    if not isinstance(devices, WorldDevices):
        return {}
    makers = {k: devices.absent(type_, k in weak) for k, (_, type_) in program.results.items()}
    return {k: _kept(make) for k, make in makers.items()}


def _kept(make: Callable[[], jax.Array]) -> Callable[[], jax.Array]:
    """The same array in every step: it has no data here, and making one takes as long as moving a scalar."""
    known: list[jax.Array] = []

    def again() -> jax.Array:
        if not known or known[0].is_deleted():
            known[:] = [make()]
        return known[0]

    return again


def record_results(executor: Executor | Part, leaves: list[Any]) -> None:
    """Notes which results of a step these are: `mpmd.fetch` compares them with other processes'."""
    if isinstance(executor, Part):
        executor.record(leaves)


def with_absent(leaves: list[Any], absent: Mapping[int, Callable[[], jax.Array]]) -> list[Any]:
    """Flat results; other processes' are arrays without data here."""
    return [absent[k]() if leaf is None else leaf for k, leaf in enumerate(leaves)] if absent else leaves


def absent_value(array: jax.Array) -> AbsentValueError:
    """The error of reading an array that is in other processes, or some of it."""
    here, shape = jax.process_index(), ",".join(map(str, array.shape))
    processes = sorted({device.process_index for device in array.sharding.device_set})
    ours = f", of which process {here} has a part" if here in processes else f", not in process {here}"
    return AbsentValueError(
        f"the value of an array {array.dtype}[{shape}] is in {processes_text(processes)}{ours}\n"
        "  mpmd.fetch(tree) brings arrays to every process, if all processes call it\n"
        "  scalar results of a step are in every process"
    )
