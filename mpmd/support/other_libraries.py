"""What users of other libraries write, and how it is written here: docs/guides/migrate.md for messages."""

from __future__ import annotations

JIT_KEYWORDS: dict[str, tuple[object, str]] = {
    "keep_unused": (False, "an argument that the step does not read stays where it is: leave it out"),
    "inline": (False, "a step is never a part of another program: leave it out"),
    "device": (
        None,
        "devices are in the topology: mpmd.make_topology({'m0': jax.sharding.Mesh([device], 'data'), ...})",
    ),
    "backend": (
        None,
        "the platform is the devices', in the topology; the compiler is chosen in the configuration: "
        "mpmd.make_config(..., backend='xla')",
    ),
    "abstracted_axes": (
        None,
        "a step is compiled for shapes: pad rows to a few lengths, each of which is compiled once",
    ),
    "fun": (None, "the function comes first, without a keyword: mpmd.jit(step, config)"),
    "num_microbatches": (
        None,
        "the step says how often it divides its batch: mpmd.accumulate_gradients(loss, num_microbatches)",
    ),
}
"""Keywords of `jax.jit` and of steps elsewhere → a value that says nothing, and where to say the others."""

_NAMES_AND_STAGES = (
    "mpmd.named_computation(f, name=...) around each stage, or no names and "
    "mpmd.make_config(..., stages=mpmd.by_parameters(...))"
)
_TOPOLOGY = "mpmd.make_topology({'m0': ..., 'm1': ...}): separate meshes, which may differ in size"
_OWN_SCHEDULE = (
    "mpmd.make_config(..., schedule=...) with a name such as '1f1b', or with from_table of "
    "mpmd.scheduling.catalogue"
)
_LOOP = "mpmd.accumulate_gradients(loss, M), with the schedule in mpmd.make_config(..., schedule='1f1b')"

_SCHEDULES = {
    "1f1b": ("Std1F1B", "Schedule1F1B"),
    "gpipe": ("ScheduleGPipe",),
    "eager_1f1b": ("Eager1F1B",),
    "interleaved_1f1b": ("Interleaved1F1B", "ScheduleInterleaved1F1B"),
    "looped_bfs": ("ScheduleLoopedBFS", "InterleavedGPipe"),
    "zb_h1": ("ZeroBubble",),
    "interleaved_zb": ("ScheduleInterleavedZeroBubble",),
    "zb_v": ("ScheduleZBVZeroBubble",),
    "dualpipe_v": ("ScheduleDualPipeV", "DualPipeV"),
}
_SCHEDULE_OF = {theirs: ours for ours, names in _SCHEDULES.items() for theirs in names}

NAMES: dict[str, str] = {
    **{name: f"mpmd.make_config(..., schedule={ours!r})" for name, ours in _SCHEDULE_OF.items()},
    # JaxPP
    "treduce": _LOOP,
    "treduce_i": "mpmd.fori_loop(M, body, init), or " + _LOOP,
    "mark_stage_end": _NAMES_AND_STAGES,
    "pipeline_enter_stage": _NAMES_AND_STAGES,
    "pipeline_yield": _NAMES_AND_STAGES,
    "mpmd_jit_with_loop": "mpmd.jit(step, config)",
    "mpmd_jit_by_yield": "mpmd.jit(step, config)",
    "MpmdMesh": _TOPOLOGY,
    "RemoteMpmdMesh": _TOPOLOGY,
    "MpmdArray": "a jax.Array on the mesh that uses it; mpmd.fetch(tree) puts a pytree on one device",
    "MpmdSharding": "a NamedSharding over a mesh of the topology, as in in_shardings=",
    "cross_mpmd_all_reduce": "+ of values on several meshes, which mpmd.reduce may mark",
    "BaseSchedule": _OWN_SCHEDULE,
    # torch.distributed.pipelining
    "PipelineStage": _NAMES_AND_STAGES + "; one program makes all stages",
    "pipe_split": _NAMES_AND_STAGES,
    "SplitPoint": _NAMES_AND_STAGES,
    "pipeline": "mpmd.jit(step, config)",
    # Shardy's MPMD
    "PartitioningOptions": "mpmd.PipelineOptions(...)",
    "partitioning_options": "mpmd.PipelineOptions(...)",
    "enumerated_for": "mpmd.fori_loop(M, body, init), or mpmd.microbatch_loop",
    "get_pipeline_schedule": "mpmd.make_config(..., schedule='1f1b')",
    "PipelineSchedule": _OWN_SCHEDULE,
    "MpmdConfig": "mpmd.make_config(topology, assignment)",
    "mesh_names": "mpmd.make_config(..., input_meshes=, output_meshes=), or in_shardings= over meshes",
    # JAX
    "make_mesh": _TOPOLOGY,
    "Mesh": _TOPOLOGY,
    "value_and_grad": "mpmd.accumulate_gradients(loss, M), or jax.value_and_grad(mpmd.staged(loss))",
    "grad": "mpmd.accumulate_gradients(loss, M), or jax.grad(mpmd.staged(loss))",
}
"""A name of another library → what it is here."""


GUIDE = 'the guide "Coming from another library" has a table of such names'


def equivalent(name: str) -> str:
    """The end of a sentence about a name of another library: its equivalent; "" for an unknown name."""
    found = NAMES.get(name, "")
    return found and f"\n  here it is {found}\n  {GUIDE}"


def schedule_elsewhere(name: str) -> str | None:
    """The schedule that another library calls so; None if none does."""
    return _SCHEDULE_OF.get(name)
