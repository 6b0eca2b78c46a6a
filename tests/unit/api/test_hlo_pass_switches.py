"""Options and dumps of passes over HLO, through the options of a configuration and through flags."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

import mpmd
import mpmd.flags
from mpmd.compile.passes import PASSES
from mpmd.errors import ConfigError
from mpmd.flags import options_from_flags, pass_flag
from mpmd.options import USER_DEFAULTS

X = np.linspace(0, 1, 32, dtype=np.float32).reshape(4, 8)


def compiled(function=jax.nn.softmax, **options):
    named = mpmd.named_computation(function, name="f")
    config = mpmd.make_config(
        mpmd.make_topology({"m0": 1}),
        {"f": "m0"},
        options=dataclasses.replace(USER_DEFAULTS, backend="native", **options),
    )
    return mpmd.jit(lambda x: named(x), config).compiled(X)


def test_a_pass_over_hlo_can_be_left_out():
    assert "fusion(" in compiled().as_text("hlo")
    without = compiled(disable_passes=("hlo-fusion",))
    assert "fusion(" not in without.as_text("hlo")
    np.testing.assert_allclose(without(X), jax.nn.softmax(X), rtol=1e-6)


def test_passes_inside_of_groups_can_be_left_out_and_given_options():
    def function(x):
        return x + jax.lax.pad(jnp.array([1.0, 3, 5, 7]), 2.0, [(1, 3, 0)])

    folded = compiled(function).as_text("hlo")
    plain = compiled(function, disable_passes=("hlo-constant-folding", "hlo-algebraic-simplifier"))
    assert " pad(" in plain.as_text("hlo") and " pad(" not in folded
    kept = compiled(function, pass_options=("hlo-constant-folding{max-bytes=4}",)).as_text("hlo")
    assert " pad(" in kept


def test_wrong_names_are_an_error_with_all_of_them():
    with pytest.raises(ConfigError, match=r"(?s)hlo-fusio'; did you mean .hlo-fusion..*no option 'speed'"):
        compiled(disable_passes=("hlo-fusio",), pass_options=("hlo-dce{speed=1}",))


def test_flags_of_passes_over_hlo(monkeypatch):
    name = pass_flag(PASSES["hlo-constant-folding"], "max_bytes")
    assert name == "hlo_constant_folding_max_bytes" and flags.FLAGS[name].default is None
    monkeypatch.setattr(flags.FLAGS[name], "value", "12")
    monkeypatch.setattr(type(flags.FLAGS), "is_parsed", lambda _: True)
    assert options_from_flags().pass_options == ("hlo-constant-folding{max-bytes=12}",)


def test_dumps_after_every_pass_that_changed_something(tmp_path):
    compiled(dump_to=str(tmp_path))
    (folder,) = (tmp_path / "fragments").iterdir()
    names = {path.name for path in folder.iterdir()}
    assert {"memory.svg", "module.ll", "module.s", "thunk_sequence.txt", "buffer-assignment.txt"} <= names
    inner = sorted(name for name in names if ".simplification." in name)
    assert inner and all(name.split(".")[3].startswith("hlo-") for name in inner)
    assert any(name.endswith(".hlo-fusion.txt") for name in names)
    picture = ElementTree.fromstring((folder / "memory.svg").read_text())
    assert picture.tag.endswith("svg") and len(picture) > 0
    assert ".globl" in (folder / "module.s").read_text()


def test_a_pattern_chooses_the_passes(tmp_path):
    compiled(dump_to=str(tmp_path), dump_passes="hlo-cse|hlo-fusion")
    (folder,) = (tmp_path / "fragments").iterdir()
    passes = {path.name.split(".")[-2] for path in folder.iterdir() if path.name[:3].isdigit()}
    assert "hlo-fusion" in passes and passes <= {"hlo-cse", "hlo-fusion"}


def test_jitter_makes_chosen_values_a_little_wrong():
    exact, plain = np.asarray(jax.nn.softmax(X)), np.asarray(compiled()(X))
    wrong = np.asarray(compiled(float_jitter="divide")(X))
    assert np.abs(plain / exact - 1).max() < 1e-5
    np.testing.assert_allclose(wrong, exact * (1 + 1e-4), rtol=1e-5)
    more = compiled(float_jitter="divide", pass_options=("hlo-float-jitter{relative=5000}",))
    np.testing.assert_allclose(more(X), exact * (1 + 5e-3), rtol=1e-5)
    np.testing.assert_array_equal(compiled(float_jitter="sqrt")(X), plain)


def test_kernels_come_from_a_folder_that_a_dump_shows(tmp_path, unpoisoned):
    compiled(jnp.tanh, dump_to=str(tmp_path / "dump"))
    (folder,) = (tmp_path / "dump" / "fragments").iterdir()
    text = (folder / "module.ll").read_text()
    start = text.index("define void @kernel0(")
    kernel = text[start : text.index("\n}", start) + 3]
    begin = kernel.index("{") + 1
    mine = tmp_path / "mine" / folder.name
    mine.mkdir(parents=True)
    (mine / "kernel0.ll").write_text(f"{kernel[:begin]}\n  ret void\n}}\n")
    made = compiled(jnp.tanh, kernel_overrides=str(tmp_path / "mine"))
    assert "define void @kernel0" in made.as_text("llvm")
    assert made.as_text("llvm").count("fma") < text.count("fma")


def test_all_that_is_wrong_with_choices_is_said_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)attention_stitching is 'guessed'.*float_jitter is '\('"):
        compiled(attention_stitching="guessed", float_jitter="(", kernel_overrides=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="no such folder"):
        compiled(kernel_overrides=str(tmp_path / "nowhere"))
