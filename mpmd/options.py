"""The options of the pipelines, as one frozen record with a text form."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Mapping

from mpmd.brief import brief
from mpmd.errors import ConfigError, collect


@dataclasses.dataclass(frozen=True)
class PlacementOptions:
    """Where values are computed.

    Attributes:
        name_to_mesh_assignment: where named computations and tensors go: `"encode@m1"`, `"f@m1/0"` with a
            stage, `"t@m1#pinned_host"` in host memory.
        mirrored_names: names with a copy for the second half of the microbatches, called `encode_mirror`
            in the assignment; for schedules with two copies of every stage.
        input_assignment: where flat arguments go: `"0@m1"`, `"2@m2#pinned_host"`.
        output_assignment: likewise for flat results.
        copy_scalar_results: meshes, one of each process, that compute scalars instead of receiving them.
        constraints: `"i:o"`: argument i and result o live on one mesh.
        infer_transfers: insert transfers where the program needs them, instead of failing.
        infer_cross_mesh_reductions: let a sum of values of several meshes be reduced across meshes.
        max_clones: the maximum number of fragments to which an op without a name may be copied.
        error_limit: how many errors of mesh inference are shown; -1 for all.
        heterogeneous_meshes: the meshes of the topology have different axes or device counts.
    """

    name_to_mesh_assignment: tuple[str, ...] = ()
    mirrored_names: tuple[str, ...] = ()
    input_assignment: tuple[str, ...] = ()
    output_assignment: tuple[str, ...] = ()
    copy_scalar_results: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    infer_transfers: bool = True
    infer_cross_mesh_reductions: bool = True
    max_clones: int = 1
    error_limit: int = 5
    heterogeneous_meshes: bool = False


@dataclasses.dataclass(frozen=True)
class OrderOptions:
    """The order of work on each mesh.

    Attributes:
        pipeline_schedule: the order of the microbatches on every mesh by the dialect's own rules, such as
            `"GPipe"` or `"1F1B"`; `"none"` leaves it to the schedule of the configuration.
        task_orders: for each mesh its tasks in order, `"m1:0F0,0F1+0B0,0B1;m2:1F0,1B0"`, with a `+` between
            two that are one program; replaces `pipeline_schedule`.
        schedule_rules: `FragmentScheduleRule(ordered_fragments=[a->b])`; replace `pipeline_schedule`.
        fail_on_impossible_order: an order of tasks that the data flow forbids is an error; otherwise tasks
            are in that order as far as the data flow allows, and there is a warning.
        verify_schedule_units: warn if a mesh does not have one forward and one backward unit per microbatch.
        one_fragment_per_task: more than one fragment for a stage, microbatch and phase on a mesh is an error;
            otherwise they are ordered together.
    """

    pipeline_schedule: str = "none"
    task_orders: str = ""
    schedule_rules: tuple[str, ...] = ()
    fail_on_impossible_order: bool = False
    verify_schedule_units: bool = False
    one_fragment_per_task: bool = False


@dataclasses.dataclass(frozen=True)
class FragmentOptions:
    """What becomes one fragment, and what a fragment computes instead of receiving it.

    Attributes:
        split_bwd_fragments: split backward work so that the results for other meshes are computed first; the
            zero-bubble schedules need it.
        merge_rules: `FragmentMergeRule(sources=[...],target=...)`, each one a string.
        merge_after_scheduling: merge unnamed work after the order of the named is known, not before.
        merge_forward_with_backward: one program for forward and backward where they are adjacent.
        absorb_inferred_fragments_on_entry_point_function: absorb unnamed work outside of microbatches too.
        keep_microbatches_equal: keep unnamed work around the microbatches out of their fragments, so that
            all microbatches run the same programs.
        fragment_remat: compute forward fragments again right before their backward fragments.
        merge_remat_fragments: merge such a clone with its backward fragment.
        recompute_cheap_residuals: let backward fragments recompute residuals where that costs less than
            keeping them.
        copy_constants: compute constants where they are used instead of sending them.
        carry_sums: add up in each microbatch values that are otherwise summed after all of them.
        split_accumulators: accumulate values of several meshes on each of them.
        merge_transfers: send scalars that travel together as one value.
        swap_transposed_dots: compute a transposed matrix product with its factors swapped.
    """

    split_bwd_fragments: bool = False
    merge_rules: tuple[str, ...] = ()
    merge_after_scheduling: bool = False
    merge_forward_with_backward: bool = True
    absorb_inferred_fragments_on_entry_point_function: bool = False
    keep_microbatches_equal: bool = True
    fragment_remat: bool = False
    merge_remat_fragments: bool = False
    recompute_cheap_residuals: bool = True
    copy_constants: bool = False
    carry_sums: bool = True
    split_accumulators: bool = True
    merge_transfers: bool = False
    swap_transposed_dots: bool = True


@dataclasses.dataclass(frozen=True)
class ShardingOptions:
    """What devices of a mesh exchange, and when.

    Attributes:
        jax_shardings: let only whole axes of its own mesh shard what goes from fragment to fragment, as JAX
            arrays require.
        reduce_gradients: `once`: what each device adds up over microbatches, such as gradients where a batch
            is split over devices, is added between devices when the last microbatch is done;
            `per_microbatch`: in each microbatch, which needs less memory where weights are split (FSDP);
            `{"replica": "once", "fsdp": "per_microbatch"}`, in text `replica:once,fsdp:per_microbatch`: over
            each axis of the meshes in its own way, over those left out once; `auto`: once, unless a device
            would then hold more than `device_memory_bytes`: then over axes that split weights or optimizer
            state in each microbatch, and if that is not enough over all.  With `once` a warning names sums
            that are still taken in each microbatch, and why.
        gather_weights: `once`: a weight that is split over devices (FSDP), and that the fragments of a stage
            need whole, is gathered before the first of them, and freed after the last; `per_use`: in each
            fragment, which needs less memory; `auto`: once, with the same limit.  With `once` a
            warning names weights that are still gathered in each.
    """

    jax_shardings: bool = True
    reduce_gradients: str | Mapping[str, str] = "auto"
    gather_weights: str = "auto"


@dataclasses.dataclass(frozen=True)
class CheckOptions:
    """Programs that are refused although they can run.

    Attributes:
        fail_on_inferred_fragments: unnamed work that stays a program of its own is an error.
        fail_on_reshard_only_fragments: a program that only reshards is an error.
        fail_on_backward_deps: data that flows against the pipeline's direction is an error.
        fail_on_param_transfers: a transfer of a parameter between meshes is an error.
        param_transfer_pattern: part of an argument's name by which a parameter is known.
    """

    fail_on_inferred_fragments: bool = False
    fail_on_reshard_only_fragments: bool = False
    fail_on_backward_deps: bool = False
    fail_on_param_transfers: bool = False
    param_transfer_pattern: str = "params['transformer"


@dataclasses.dataclass(frozen=True)
class BackendOptions:
    """How fragments are compiled.

    Attributes:
        backend: the compile backend: `native`, `xla`, `auto`: native code on CPUs, XLA's elsewhere, or
            `reference`: the program of `native`, run by NumPy, to find errors of generated code.
        compare: `xla`: in the first call of a step XLA computes every fragment, too, and what differs beyond
            rounding is reported, as by `compiled.compare`; empty: it does not.
        device_memory_bytes: memory of a device, for the native backend: a fragment that would need more than
            is left beside the live buffers rematerialises values; 0: no limit.
        attention_stitching: `auto` lets native code compute attention, forward and backward, in one kernel
            each that keeps scores in the cache, skips everything that a causal mask hides, and computes
            scores again in the backward fragment instead of keeping them; `off` computes product by
            product.
        command_buffers: on GPUs, capture the launches of a native fragment as a CUDA graph, and replay it
            while the addresses of its arrays are the same, unless it waits for a number of the GPU.
        compile_cache_dir: folder that keeps native code between runs; empty: a folder in JAX's own
            compilation cache, if that is set; `off`: no folder.
        compile_cache_bytes: size limit of that folder.
        kernel_overrides: folder with kernels in LLVM's assembly, `FRAGMENT/KERNEL.ll`, that replace
            the native backend's; `dump_to` writes these.
        float_jitter: regular expression on opcodes, names and sources of values whose floats the native
            backend perturbs slightly, such as `dot|exponential`: to find numerically fragile programs.
    """

    backend: str = "auto"
    compare: str = ""
    device_memory_bytes: int = 0
    attention_stitching: str = "auto"
    command_buffers: bool = True
    compile_cache_dir: str = ""
    compile_cache_bytes: int = 1 << 30
    kernel_overrides: str = ""
    float_jitter: str = ""


@dataclasses.dataclass(frozen=True)
class PassRunOptions:
    """Which passes run, and what they write.

    Attributes:
        pass_options: options of single passes, `"mpmd-remat-fragment{merge-remat-fragments=true}"`; they
            override the options of the pipeline.
        disable_passes: names of passes to leave out.
        verify_each: verify the program after every pass.
        dump_to: folder for the program after each pass that changed it; has a folder for each pipeline.
        dump_passes: regular expression on the names of the passes to dump.
        verbose_logging: say how programs were grouped and named.
    """

    pass_options: tuple[str, ...] = ()
    disable_passes: tuple[str, ...] = ()
    verify_each: bool = False
    dump_to: str = ""
    dump_passes: str = ".*"
    verbose_logging: bool = False


@dataclasses.dataclass(frozen=True)
class PipelineOptions(  # the fields of a record are in the reverse order of its bases
    PassRunOptions,
    BackendOptions,
    CheckOptions,
    ShardingOptions,
    FragmentOptions,
    OrderOptions,
    PlacementOptions,
):
    """How a step is partitioned.  Every field is an option of a pass, or says whether a pass runs at all.

    The fields are in groups, one for each base, and all are given by name to this record alone.

    Two equal records give the same program: `str` of one is the options that differ from the defaults,
    and part of every cache key.  Lists hold the text of their entries, as on the command line.

    Raises:
        ConfigError: a value is of another kind or cannot be used; all problems at once.
    """

    __repr__ = brief

    def __post_init__(self) -> None:
        if isinstance(self.reduce_gradients, Mapping):
            by_axis = ",".join(f"{axis}:{way}" for axis, way in self.reduce_gradients.items())
            object.__setattr__(self, "reduce_gradients", by_axis or "once")
        problems = option_problems(self)
        if problems:
            raise collect(ConfigError, problems, "the options cannot be used:")

    def __str__(self) -> str:
        changed = (
            (field.name, getattr(self, field.name))
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )
        return " ".join(f"{name.replace('_', '-')}={_text(value)}" for name, value in changed)


PIPELINE_SCHEDULES = (
    "none", "GPipe", "1F1B", "GPipeBut1F1BForLastMesh", "ZeroBubbleH1", "ZeroBubbleH2ZeroTxLatency",
    "ZeroBubbleH2HalfTxLatency", "ZeroBubbleH2FullTxLatency", "ParallelPipelinesWithWrapAround", "Circular",
    "CircularWithReversedBackward",
)  # fmt: skip
BACKENDS = ("auto", "native", "reference", "xla")
_CHOICES = {
    "attention_stitching": ("auto", "off"),
    "backend": BACKENDS,
    "compare": ("", "xla"),
    "gather_weights": ("auto", "once", "per_use"),
}
_WAYS = ("once", "per_microbatch")
_PATTERNS = ("dump_passes", "float_jitter")
_FROM = {"error_limit": -1, "max_clones": 0, "compile_cache_bytes": 0, "device_memory_bytes": 0}


def ordered_by(o: OrderOptions) -> str:
    """The option that orders the tasks instead of a schedule; "" if none does."""
    given = {
        "schedule_rules": o.schedule_rules,
        "task_orders": o.task_orders,
        "pipeline_schedule": o.pipeline_schedule.lower() != "none",
    }
    return next((name for name, value in given.items() if value), "")


def ways_to_reduce(o: ShardingOptions) -> dict[str, str]:
    """For each axis that `reduce_gradients` names how values are reduced over it."""
    pairs = (entry.partition(":") for entry in str(o.reduce_gradients).split(","))
    return {axis.strip(): way.strip() for axis, colon, way in pairs if colon}


def option_problems(o: PipelineOptions) -> list[str]:
    """Problems of the values of options, one sentence each."""
    problems = []
    for name, kind in typing.get_type_hints(PipelineOptions).items():
        value = getattr(o, name)
        if name == "reduce_gradients":
            problems += _reduction_problems(o)
            continue
        if kind is tuple or typing.get_origin(kind) is tuple:
            fits = isinstance(value, tuple) and all(isinstance(entry, str) for entry in value)
            wanted = "a tuple of texts"
        else:
            fits, wanted = type(value) is kind, f"of type {kind.__name__}"
        if not fits:
            problems.append(f"{name} is {value!r}; it must be {wanted}")
        elif name in _CHOICES and value not in _CHOICES[name]:
            problems.append(f"{name} is {value!r}; there are {', '.join(map(repr, _CHOICES[name]))}")
        elif name == "pipeline_schedule" and value.lower() not in map(str.lower, PIPELINE_SCHEDULES):
            problems.append(f"{name} is {value!r}; there are {', '.join(map(repr, PIPELINE_SCHEDULES))}")
        elif name in _FROM and value < _FROM[name]:
            problems.append(f"{name} is {value}; it must be at least {_FROM[name]}")
        elif name in _PATTERNS:
            problems += _pattern_problems(name, value)
    return problems


def _reduction_problems(o: ShardingOptions) -> list[str]:
    value = o.reduce_gradients
    by_axis = ways_to_reduce(o)
    words = ", ".join(map(repr, ("auto", *_WAYS)))
    if not by_axis and value not in ("auto", *_WAYS):
        return [f"reduce_gradients is {value!r}; there are {words}, or one of the last two for each axis"]
    return [
        f"reduce_gradients is {way!r} over the axis {axis!r}; there are {', '.join(map(repr, _WAYS))}"
        for axis, way in by_axis.items()
        if way not in _WAYS
    ]


def _pattern_problems(name: str, pattern: str) -> list[str]:
    try:
        re.compile(pattern)
    except re.error as error:
        return [f"{name} is {pattern!r}, which is not a regular expression: {error}"]
    return []


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(value) if isinstance(value, tuple) else str(value)


USER_DEFAULTS = PipelineOptions()
"""The defaults of `mpmd.jit`, also for a configuration with options."""

DIALECT_DEFAULTS = PipelineOptions(
    infer_transfers=False,
    infer_cross_mesh_reductions=False,
    fail_on_inferred_fragments=True,
    one_fragment_per_task=True,
    pipeline_schedule="GPipe",
    merge_forward_with_backward=False,
    keep_microbatches_equal=False,
    jax_shardings=False,
    carry_sums=False,
    split_accumulators=False,
    reduce_gradients="per_microbatch",
    gather_weights="per_use",
    recompute_cheap_residuals=False,
    fail_on_impossible_order=True,
    swap_transposed_dots=False,
)
"""The defaults of `mpmd-opt`: the passes that the dialect's own test files expect."""


def _defaults() -> PipelineOptions:
    return USER_DEFAULTS


_source: Callable[[], PipelineOptions] = _defaults


def set_options_source(source: Callable[[], PipelineOptions]) -> None:
    """Sets the source of options for configurations without any: the flags, once they are imported."""
    global _source
    _source = source


def current_options() -> PipelineOptions:
    """The options for a function that is traced now."""
    return _source()
