"""Steps that a test watches: the executor of a compiled step, with observers of the test's own."""

from __future__ import annotations

from mpmd.runtime.channels.mesh_devices import MeshDevices
from mpmd.runtime.run.executor import Executor


def executor_of(compiled) -> tuple[Executor, MeshDevices]:
    """Runs the streams of a compiled step of one process once more, on the same devices."""
    devices = MeshDevices(dict(compiled.lowered.config.topology))
    table = {(e.fragment.mesh, name): e for name, e in compiled.executables.items()}
    return Executor(compiled.program, table, devices), devices
