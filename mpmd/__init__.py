"""MPMD pipeline parallelism for JAX: one train step in, one program per device group out."""

from mpmd import errors
from mpmd.api.config import Config, make_config
from mpmd.api.fetch import fetch
from mpmd.api.jit import Jitted, jit
from mpmd.api.stages import Compiled, Lowered, Traced
from mpmd.api.topology import Topology, make_topology
from mpmd.options import PipelineOptions
from mpmd.runtime.executor import RuntimeOptions
from mpmd.tracing.loops import accumulate_gradients, fori_loop, microbatch_loop, split_microbatches
from mpmd.tracing.names import broadcast, call, named_computation, named_tensor, reduce
