"""A small text, and a model that compiles fast."""

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from examples.pipelined_transformer.config import TrainConfig

WORDS = ("def", "return", "self", "class", "if", "for", "in", "value", "=", "(", "):", "0", "None")


@pytest.fixture(scope="session")
def compiled_before(tmp_path_factory):
    """A folder for what was compiled: most runs of these tests are of the same few programs."""
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module", autouse=True)
def compile_each_program_once(compiled_before):
    wanted = {
        "jax_compilation_cache_dir": compiled_before,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """About 8 kB of lines in which every word is followed by one of two."""
    lines = (" ".join(WORDS[(n * k + k * k) % len(WORDS)] for k in range(9)) for n in range(200))
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text("\n".join(lines))
    return file


@pytest.fixture(scope="session")
def tiny(text_file, tmp_path_factory):
    """Makes configurations of a two-stage model that trains in a second, each with an output folder."""

    def make(**changes):
        small = {
            "steps": 6, "num_stages": 2, "num_microbatches": 2, "layers": 2, "d_model": 16, "heads": 2,
            "seq_len": 16, "batch_size": 4, "vocab_size": 270, "warmup_steps": 2, "sample_tokens": 4,
            "check": False, "compare_steps": 0, "checkpoint_every": 0, "data": str(text_file),
        }  # fmt: skip
        changes.setdefault("output_dir", str(tmp_path_factory.mktemp("out")))
        return TrainConfig(**{**small, **changes})

    return make
