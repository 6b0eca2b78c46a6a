"""A table of tasks: for every mesh, its tasks in order."""

from __future__ import annotations

import dataclasses
import re

from mpmd.errors import ConfigError

PHASES = "FBIW"
_TASK = re.compile(rf"(\d+)([{PHASES}])(\d+)")


@dataclasses.dataclass(frozen=True)
class TableTask:
    """One phase of one stage on one microbatch; written `1B0`: stage, phase, microbatch.

    `F` is the forward, `B` the backward, `I` and `W` are its halves if it is split: the half for which other
    meshes wait, and the rest.
    """

    stage: int
    microbatch: int
    phase: str

    @staticmethod
    def parse(text: str) -> TableTask:
        """The task in a text.

        Raises:
            ConfigError: the text is not a task.
        """
        found = _TASK.fullmatch(text.strip())
        if found is None:
            raise ConfigError(
                f"{text.strip()!r} is not a task: expected stage, one of the phases {' '.join(PHASES)}, "
                "microbatch; for example 0F0 or 1B3"
            )
        return TableTask(int(found[1]), int(found[3]), found[2])

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.microbatch}"


@dataclasses.dataclass(frozen=True)
class TaskOrders:
    """Mesh -> its tasks in order.  Text: `m1:0F0,0F1,0B0,0B1;m2:1F0,1B0,1F1,1B1`."""

    of_mesh: tuple[tuple[str, tuple[TableTask, ...]], ...] = ()

    @staticmethod
    def parse(text: str) -> TaskOrders:
        """The table in a text.

        Raises:
            ConfigError: the text is not a table, or has a task twice.
        """
        of_mesh = []
        for part in filter(None, (p.strip() for p in text.split(";"))):
            mesh, colon, tasks = part.rpartition(":")
            if not colon or not mesh:
                raise ConfigError(f"{part!r} is not an order of a mesh: expected MESH:TASK,TASK")
            names = [t for t in tasks.split(",") if t.strip()]
            of_mesh.append((mesh.strip(), tuple(TableTask.parse(t) for t in names)))
        found = TaskOrders(tuple(of_mesh))
        found._check()
        return found

    def __str__(self) -> str:
        return ";".join(f"{mesh}:{','.join(map(str, tasks))}" for mesh, tasks in self.of_mesh)

    def _check(self) -> None:
        seen: dict[TableTask, str] = {}
        for mesh, tasks in self.of_mesh:
            for task in tasks:
                if task in seen:
                    raise ConfigError(
                        f"task {task} occurs twice: on mesh {seen[task]!r} and on {mesh!r}\n"
                        "  a task runs once: leave one of them out"
                    )
                seen[task] = mesh
        meshes = [mesh for mesh, _ in self.of_mesh]
        for mesh in dict.fromkeys(m for m in meshes if meshes.count(m) > 1):
            raise ConfigError(f"mesh {mesh!r} has two orders\n  join them: '{mesh}:0F0,1F0'")
