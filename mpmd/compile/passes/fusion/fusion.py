"""hlo-fusion."""

from __future__ import annotations

import dataclasses

from mpmd.compile.hlo.module import HloModule
from mpmd.support.passes import Pass


@dataclasses.dataclass(frozen=True)
class Fusion(Pass):
    """Joins.

    Requires: nothing.
    Ensures: nothing.
    """

    name = "hlo-fusion"

    def run(self, module: HloModule) -> bool:
        return False
