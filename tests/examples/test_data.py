"""Text becomes the same tokens and batches every time, and what cannot be read is said."""

from __future__ import annotations

import sysconfig

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.pipelined_transformer import data
from examples.pipelined_transformer.tokenizer import Tokenizer, learn
from mpmd.errors import DataError


def load(path, vocab_size=300, seq_len=16, max_bytes=1 << 20):
    return data.load(str(path), vocab_size, seq_len, max_bytes)


def test_batches_are_addressed_by_step(text_file):
    first, again = load(text_file), load(text_file)
    for step in (0, 7):
        assert np.array_equal(first.batch(step, 4, 16, seed=1), again.batch(step, 4, 16, seed=1))
    assert not np.array_equal(first.batch(0, 4, 16, seed=1), first.batch(1, 4, 16, seed=1))
    assert not np.array_equal(first.batch(0, 4, 16, seed=1), first.batch(0, 4, 16, seed=2))


def test_a_batch_holds_windows_of_the_text(text_file):
    dataset = load(text_file)
    batch = dataset.batch(0, 8, 16, seed=0)
    assert batch.shape == (8, 17) and batch.dtype == np.int32
    text = dataset.tokens.tobytes()
    assert all(row.tobytes() in text for row in batch)


def test_the_last_window_is_reached(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789")
    dataset = load(tmp_path / "a.txt", vocab_size=256, seq_len=8)
    rows = {row.tobytes() for row in dataset.batch(0, 100, 8, seed=0)}
    assert rows == {dataset.tokens[at : at + 9].tobytes() for at in (0, 1)}


def test_the_standard_library_is_read_by_default():
    dataset = load("", max_bytes=1 << 16)
    assert dataset.source == sysconfig.get_paths()["stdlib"]
    assert "def " in dataset.tokenizer.decode(dataset.tokens)


def test_a_folder_is_read_in_order_of_paths_without_what_is_no_text(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("second " * 9)
    (tmp_path / "a.txt").write_text("first " * 9)
    (tmp_path / "c.bin").write_bytes(b"\0\1\2" * 9)
    (tmp_path / "d.txt").write_bytes(b"\xff\xfe" * 9)
    (tmp_path / ".hidden").write_text("hidden " * 9)
    dataset = load(tmp_path)
    assert dataset.tokenizer.decode(dataset.tokens) == "first " * 9 + "\n" + "second " * 9


def test_reading_stops_at_the_limit(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name * 50)
    dataset = load(tmp_path, vocab_size=256, max_bytes=70)
    assert dataset.tokenizer.decode(dataset.tokens) == "a" * 50 + "\n" + "b" * 20


def test_equal_fingerprints_for_equal_tokens_only(tmp_path, text_file):
    assert load(text_file).fingerprint == load(text_file).fingerprint
    assert load(text_file).fingerprint != load(text_file, vocab_size=256).fingerprint


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_bytes_survive_the_tokenizer(content):
    tokenizer = learn(b"the cat and the hat, the end.\n" * 5 + content, 280)
    tokens = tokenizer.encode(content)
    assert tokenizer.decode(tokens) == content.decode("utf-8", "replace")
    assert tokenizer.decode(Tokenizer().encode(content)) == content.decode("utf-8", "replace")


def test_the_most_frequent_pair_is_learnt_first():
    assert learn(b"abab ab ab xy", 257).merges == ((ord("a"), ord("b")),)


def test_frequent_words_become_one_token():
    tokenizer = learn(b"return " * 50, 300)
    assert len(tokenizer.encode(b"return")) == 1


def test_a_path_that_does_not_exist(tmp_path):
    with pytest.raises(DataError, match=rf"^cannot read the data: {tmp_path}/none does not exist\n"):
        load(tmp_path / "none")


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    file = tmp_path / "secret.txt"
    file.write_text("secret")

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(file), "read_bytes", refuse)
    with pytest.raises(DataError, match=rf"^cannot read the data: {file}: Permission denied\n"):
        load(file)


def test_a_folder_without_text(tmp_path):
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(DataError, match=rf"^no text in {tmp_path}\n"):
        load(tmp_path)


def test_too_little_text(tmp_path):
    (tmp_path / "a.txt").write_text("tiny")
    with pytest.raises(DataError, match=rf"^too little text in {tmp_path}/a.txt: 4 tokens\n"):
        load(tmp_path / "a.txt")
