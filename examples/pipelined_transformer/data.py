"""Real text, as batches that are addressed by step: the same step gives the same batch, resumed or not."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from examples.pipelined_transformer.tokenizer import Tokenizer, learn
from mpmd.errors import DataError


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A text as tokens.

    Attributes:
        tokens: `i32[n]`, the files one after the other.
        tokenizer: what made them.
        source: where the text came from.
        fingerprint: equal for equal tokens.
    """

    tokens: np.ndarray
    tokenizer: Tokenizer
    source: str

    @property
    def fingerprint(self) -> str:
        """A short hash of the tokens and of what they mean."""
        digest = hashlib.sha256(self.tokens.tobytes())
        digest.update(repr(self.tokenizer.merges).encode())
        return digest.hexdigest()[:16]

    def batch(self, step: int, batch_size: int, seq_len: int, seed: int) -> np.ndarray:
        """Windows of the text for one step: `i32[batch_size, seq_len + 1]`, inputs and next tokens."""
        places = np.random.default_rng((seed, step)).integers(0, len(self.tokens) - seq_len, batch_size)
        return self.tokens[places[:, None] + np.arange(seq_len + 1)]


def load(path: str, vocab_size: int, seq_len: int, max_bytes: int) -> Dataset:
    """Reads a text file, or every text file below a folder, and learns a tokenizer from it.

    Args:
        path: empty for the modules of Python's standard library, which every machine has.
        vocab_size: most tokens to learn, at least 256.
        seq_len: the text must have more tokens than this.
        max_bytes: where reading stops.

    Raises:
        DataError: nothing there, nothing readable, no text, or too little of it.
    """
    source = Path(path) if path else Path(sysconfig.get_paths()["stdlib"])
    files = _files(source, pattern="*" if path else "*.py", below=bool(path))
    text = b"\n".join(_limited(files, max_bytes))
    if not text.strip():
        raise DataError(f"no text in {source}\n  expected: a file, or a folder with files, in UTF-8")
    tokenizer = learn(text, vocab_size)
    tokens = tokenizer.encode(text)
    if len(tokens) <= seq_len + 1:
        raise DataError(
            f"too little text in {source}: {len(tokens)} tokens\n"
            f"  expected: more than {seq_len + 1}, for one sequence; give more text, or a smaller --seq_len"
        )
    return Dataset(tokens, tokenizer, str(source))


def _files(source: Path, pattern: str, below: bool) -> Iterator[bytes]:
    """The contents of the text files, in order of their paths."""
    if not source.exists():
        raise DataError(
            f"cannot read the data: {source} does not exist\n  give --data a text file or a folder"
        )
    if source.is_file():
        yield _read(source)
        return
    found = source.rglob(pattern) if below else source.glob(pattern)
    for file in sorted(found):
        inside = file.relative_to(source).parts
        if file.is_file() and not any(part.startswith(".") for part in inside):
            content = _read(file)
            if _is_text(content):
                yield content


def _limited(contents: Iterator[bytes], max_bytes: int) -> Iterator[bytes]:
    """Contents up to a number of bytes altogether; the last one may be truncated."""
    left = max_bytes
    for content in contents:
        yield content[:left]
        left -= len(content)
        if left <= 0:
            return


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read the data: {file}: {error.strerror}\n  give --data something that you may read"
        ) from error


def _is_text(content: bytes) -> bool:
    """Whether bytes are UTF-8 without zeros, which text does not hold."""
    if b"\0" in content:
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
