"""MPMD pipeline parallelism for JAX: one train step in, one program per device group out."""

import importlib
from typing import TYPE_CHECKING, Any

from mpmd import errors
from mpmd.api import checkpoint, safetensors
from mpmd.api.fetch import fetch
from mpmd.api.jit import Jitted, jit
from mpmd.config.config import Config, make_config
from mpmd.config.topology import Topology, make_topology
from mpmd.errors import PeerError
from mpmd.options import PipelineOptions
from mpmd.runtime.run.executor import RuntimeOptions
from mpmd.support.other_libraries import equivalent
from mpmd.tracing.microbatch_loops import accumulate_gradients, fori_loop, microbatch_loop, split_microbatches
from mpmd.tracing.names import broadcast, call, named_computation, named_tensor, reduce
from mpmd.tracing.stages.select.automatic import by_cost
from mpmd.tracing.stages.select.selectors import by_parameters, by_scopes, split
from mpmd.tracing.stages.stacked.stacked import Stacked
from mpmd.tracing.stages.staged import staged
from mpmd.version import __version__

if TYPE_CHECKING:
    from mpmd.api.aot import Compiled, Lowered, Traced
    from mpmd.planning.plan import plan
    from mpmd.planning.result import Plan

_LAZY = {
    "Compiled": "mpmd.api.aot",
    "Lowered": "mpmd.api.aot",
    "Plan": "mpmd.planning.result",
    "Traced": "mpmd.api.aot",
    "plan": "mpmd.planning.plan",
}
"""What imports the compiler, and where it is."""

__all__ = [
    "Compiled",
    "Config",
    "Jitted",
    "Lowered",
    "PeerError",
    "PipelineOptions",
    "Plan",
    "RuntimeOptions",
    "Stacked",
    "Topology",
    "Traced",
    "__version__",
    "accumulate_gradients",
    "broadcast",
    "by_cost",
    "by_parameters",
    "by_scopes",
    "call",
    "checkpoint",
    "errors",
    "fetch",
    "fori_loop",
    "jit",
    "make_config",
    "make_topology",
    "microbatch_loop",
    "named_computation",
    "named_tensor",
    "plan",
    "reduce",
    "safetensors",
    "split",
    "split_microbatches",
    "staged",
]


def __dir__() -> list[str]:
    """The public names: what begins here with a module's name is of the implementation."""
    return __all__


if not TYPE_CHECKING:  # a type checker would take any name for one of the module

    def __getattr__(name: str) -> Any:
        """What imports the compiler: imported on first access."""
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{equivalent(name)}")
        return getattr(importlib.import_module(_LAZY[name]), name)
