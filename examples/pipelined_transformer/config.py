"""The options of a run, in one frozen record; `main` defines a flag for each field."""

from __future__ import annotations

import dataclasses
from typing import Any

from mpmd.errors import ConfigError, collect


def _field(default: Any, help_text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text})


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Raises:
        ConfigError: values that do not fit together; all of them at once.
    """

    steps: int = _field(400, "train until this step")
    schedule: str = _field("1f1b", "pipeline schedule: gpipe or 1f1b")
    stages: str = _field("", "names: by names in the model; layers: by its parameters; auto: by cost")
    scan: bool = _field(False, "a model whose blocks are one scan over stacked parameters")
    num_stages: int = _field(4, "pipeline stages, each on a mesh of its own")
    num_microbatches: int = _field(8, "slices of a batch that go through the pipeline")
    devices_per_mesh: int = _field(1, "devices of each mesh; the batch is split over them")
    backend: str = _field("", "what compiles the fragments: native or xla; empty for the library's choice")
    dtype: str = _field("float32", "float32 or bfloat16: what the layers compute in")
    data: str = _field("", "text file or folder; empty for the sources of Python's standard library")
    max_megabytes: int = _field(8, "read at most this much text")
    check: bool = _field(True, "compare the first steps with plain jax.jit")
    check_steps: int = _field(5, "how many steps to compare")
    compare_steps: int = _field(5, "steps by each compile backend at the end, to compare their speed; or 0")
    checkpoint_dir: str = _field("", "where checkpoints go; empty for OUTPUT_DIR/checkpoints")
    checkpoint_every: int = _field(100, "steps between checkpoints; 0 for the last step only")
    resume: bool = _field(False, "go on from the newest checkpoint")
    output_dir: str = _field("out", "where pictures and traces go")
    seed: int = _field(0, "seed of the parameters, the batches and the sample")
    layers: int = _field(4, "transformer blocks")
    d_model: int = _field(128, "width of the model")
    heads: int = _field(4, "attention heads")
    seq_len: int = _field(128, "tokens that the model sees")
    batch_size: int = _field(32, "sequences per step, over all microbatches")
    vocab_size: int = _field(512, "tokens: 256 bytes, and the most frequent pairs")
    learning_rate: float = _field(4e-3, "highest learning rate")
    warmup_steps: int = _field(20, "steps until the learning rate is highest")
    weight_decay: float = _field(0.1, "weight decay of matrices")
    clip_norm: float = _field(1.0, "gradients are scaled down to this global norm")
    sample_tokens: int = _field(200, "length of the text written at the end")

    def __post_init__(self) -> None:
        problems = [
            f"--{name} is {getattr(self, name)}; it must be at least {least}"
            for name, least in _AT_LEAST.items()
            if getattr(self, name) < least
        ]
        if self.stages not in ("", "names", "layers", "auto"):
            problems.append(f"--stages is {self.stages!r}; use names, layers or auto")
        elif self.scan and self.stages == "names":
            problems.append("--stages is names, but with --scan the blocks have none; use layers or auto")
        if self.dtype not in ("float32", "bfloat16"):
            problems.append(f"--dtype is {self.dtype!r}; use float32 or bfloat16")
        if not problems:
            problems = self._misfits()
        if problems:
            raise collect(ConfigError, problems, "these flags cannot be used:")

    def _misfits(self) -> list[str]:
        problems = []
        if self.layers < self.num_stages:
            problems.append(f"--layers is {self.layers}; each of --num_stages={self.num_stages} needs one")
        if self.d_model % self.heads:
            problems.append(f"--d_model is {self.d_model}, which --heads={self.heads} does not divide")
        if self.batch_size % self.num_microbatches:
            problems.append(
                f"--batch_size is {self.batch_size}, which --num_microbatches={self.num_microbatches} "
                "does not divide"
            )
        elif self.batch_size // self.num_microbatches % self.devices_per_mesh:
            problems.append(
                f"a microbatch has {self.batch_size // self.num_microbatches} sequences, which "
                f"--devices_per_mesh={self.devices_per_mesh} does not divide"
            )
        return problems

    @property
    def has_names(self) -> bool:
        """Whether the stages are those that the model names."""
        return self.stages == "names" or not (self.stages or self.scan)

    @property
    def meshes(self) -> tuple[str, ...]:
        """Names of the meshes, in pipeline order."""
        return tuple(f"m{index}" for index in range(self.num_stages))

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step learns from."""
        return self.batch_size * self.seq_len

    def blocks_of(self, stage: int) -> range:
        """The transformer blocks of a stage; the first stages take one more if it does not come out even."""
        each, more = divmod(self.layers, self.num_stages)
        first = stage * each + min(stage, more)
        return range(first, first + each + (stage < more))


_AT_LEAST = {
    "steps": 1, "num_stages": 1, "num_microbatches": 1, "devices_per_mesh": 1, "max_megabytes": 1,
    "check_steps": 1, "compare_steps": 0, "checkpoint_every": 0, "layers": 1, "d_model": 1, "heads": 1,
    "seq_len": 2, "batch_size": 1, "vocab_size": 256, "warmup_steps": 0, "sample_tokens": 0,
}  # fmt: skip
