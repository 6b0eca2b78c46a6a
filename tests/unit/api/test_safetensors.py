"""Files of safetensors: what is written is read back anywhere, and what is damaged is said to be so."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mpmd
from mpmd.api.checkpoints import tensor_files
from mpmd.errors import CheckpointError
from tests.support.safetensors_files import parse, write
from tests.support.stacked_training import assert_equal

Stored = mpmd.safetensors.Stored
LAYERS, WIDTH, WIDE, EXPERTS = 3, 4, 6, 2
NAMES = {
    "['embed']": "model.embed_tokens.weight",
    "['layers']['q']": Stored("model.layers.{k}.self_attn.q_proj.weight", axes=(1, 0)),
    "['layers']['norm']": "model.layers.{k}.input_layernorm.weight",
    "['layers']['experts']": Stored("model.layers.{k}.mlp.experts.{e}.up_proj.weight", (1, 0)),
    "['conv']": Stored("conv.weight", axes=(2, 3, 1, 0)),
    "['blocks'][{k}]['b']": "blocks.{k}.bias",
    "['scale']": "scale",
}


def published():
    """Arrays as another library lays them out."""
    random = np.random.default_rng(0)
    arrays = {
        "model.embed_tokens.weight": random.normal(size=(8, WIDTH)).astype(ml_dtypes.bfloat16),
        "conv.weight": random.normal(size=(5, 4, 3, 2)).astype(np.float32),
        "blocks.0.bias": np.arange(3, dtype=np.int64),
        "blocks.1.bias": np.arange(3, 6, dtype=np.int64),
        "scale": np.float16(0.5),
    }
    for k in range(LAYERS):
        layer = f"model.layers.{k}"
        arrays[f"{layer}.self_attn.q_proj.weight"] = random.normal(size=(WIDE, WIDTH)).astype(np.float32)
        arrays[f"{layer}.input_layernorm.weight"] = random.normal(size=WIDTH).astype(np.float32)
        for e in range(EXPERTS):
            up = random.normal(size=(WIDE, WIDTH)).astype(ml_dtypes.float8_e4m3fn)
            arrays[f"{layer}.mlp.experts.{e}.up_proj.weight"] = up
    return arrays


def expected(arrays):
    def stack(name):
        return np.stack([arrays[name.format(k)] for k in range(LAYERS)])

    experts = [
        [arrays[f"model.layers.{k}.mlp.experts.{e}.up_proj.weight"].T for e in range(EXPERTS)]
        for k in range(LAYERS)
    ]
    return {
        "embed": arrays["model.embed_tokens.weight"].astype(np.float32),
        "layers": {
            "q": stack("model.layers.{}.self_attn.q_proj.weight").transpose(0, 2, 1),
            "norm": stack("model.layers.{}.input_layernorm.weight"),
            "experts": np.array(experts).astype(ml_dtypes.bfloat16),
        },
        "conv": arrays["conv.weight"].transpose(2, 3, 1, 0),
        "blocks": [{"b": arrays[f"blocks.{k}.bias"].astype(np.int32)} for k in range(2)],
        "scale": np.asarray(arrays["scale"]),
    }


def struct(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def test_arrays_are_transposed_stacked_and_numbered_onto_meshes(tmp_path):
    arrays = published()
    write(tmp_path / "model.safetensors", arrays)
    want = expected(arrays)
    like = struct(want)
    assert_equal(mpmd.safetensors.restore(tmp_path, like, NAMES), want)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    columns = NamedSharding(mesh, PartitionSpec(None, None, "x"))
    parts = [jax.ShapeDtypeStruct((n, WIDTH, WIDE), jnp.float32, sharding=columns) for n in (2, 1)]
    like["layers"]["q"] = mpmd.Stacked(parts)
    found = mpmd.safetensors.restore(tmp_path / "model.safetensors", like, NAMES)
    assert [part.sharding for part in found["layers"]["q"].parts] == [columns, columns]
    assert_equal(found, want)


def test_what_is_exported_is_what_was_imported(tmp_path):
    arrays = published()
    write(tmp_path / "model.safetensors", arrays, {"format": "pt"})
    like = struct(expected(arrays))
    like["embed"] = jax.ShapeDtypeStruct((8, WIDTH), jnp.bfloat16)
    like["layers"]["experts"] = jax.ShapeDtypeStruct((LAYERS, EXPERTS, WIDTH, WIDE), jnp.float8_e4m3fn)
    like["blocks"] = [{"b": jax.ShapeDtypeStruct((3,), np.int64)} for _ in range(2)]
    state = mpmd.safetensors.restore(tmp_path, like, NAMES)
    state["layers"]["norm"] = mpmd.Stacked([state["layers"]["norm"][:1], state["layers"]["norm"][1:]])
    mpmd.safetensors.save(tmp_path / "one", state, NAMES)
    metadata, back = parse(tmp_path / "one" / "model.safetensors")
    assert metadata == {"format": "pt"} and back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype, name
        np.testing.assert_array_equal(back[name], array, err_msg=name)

    mpmd.safetensors.save(tmp_path / "many", state, NAMES, metadata={}, max_file_bytes=300)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == arrays.keys() and len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    for where in (tmp_path / "many", tmp_path / "many" / "model.safetensors.index.json"):
        assert_equal(mpmd.safetensors.restore(where, like, NAMES), state)
    assert not list(tmp_path.rglob("*.unfinished"))
    with pytest.raises(CheckpointError, match=r"has other weights: model-00001-of.*give another folder"):
        mpmd.safetensors.save(tmp_path / "many", state, NAMES)


def test_only_the_part_that_is_needed_is_read(tmp_path):
    """The file has a terabyte, of which the disk holds no byte but the last row's."""
    rows, width = 1 << 28, 1 << 10
    header = {"w": {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, 4 * rows * width]}}
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + 4 * rows * width)
        opened.seek(-4 * width, 2)
        opened.write(np.arange(width, dtype=np.float32).tobytes())
    tensor = tensor_files.opened(tmp_path)["w"]
    assert tensor.mapped("r")[rows - 2 :, 5:7].tolist() == [[0, 0], [5, 6]]
    assert tensor.mapped("r").T[5:7, rows - 1].tolist() == [5, 6]
    assert file.stat().st_blocks < 1 << 10


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"['embed']": "absent"}, "['embed']: float32[8,4] needs 'absent', which is not there"),
        (
            {"['layers']['q']": "model.layers.{k}.self_attn.q_proj.weight"},
            "give it as Stored(...) with axes=(1, 0)",
        ),
        (
            {"['layers']['q']": Stored("conv.weight", (1, 0))},
            "['layers']['q']: float32[3,4,6] has other dims than",
        ),
        (
            {"['layers']['q']": Stored("x", (1, 1))},
            "axes (1, 1) of ['layers']['q'] are not each of 0 to 1 once",
        ),
        (
            {"['scale']": "blocks.0.bias"},
            "['scale']: float16[] needs 'blocks.0.bias' as [], which is int64[3]",
        ),
        ({"['blocks'][{k}]['b']": "blocks.0.bias"}, "lacks {k}, which is in ['blocks'][{k}]['b']"),
        (
            {"['blocks'][{k}]['b']": "model.layers.{k}.norm"},
            "['blocks'][1]['b']: int32[3] needs 'model.layers.1.norm'",
        ),
        ({"['scale']": None}, "['scale']: float16[] has no name"),
        ({"['scale']": "scale.{}"}, "'scale.{}' has braces without a word, such as {k}"),
        ({"['scale']": "scale.{0}"}, "'scale.{0}' has braces without a word, such as {k}"),
        ({"['scale']": 7}, "7 is given for \"['scale']\"; give texts, or a Stored"),
    ],
)
def test_names_that_do_not_fit_are_errors_before_anything_is_read(change, says, tmp_path):
    arrays = published()
    write(tmp_path / "model.safetensors", arrays)
    names = {path: name for path, name in {**NAMES, **change}.items() if name is not None}
    with pytest.raises(CheckpointError, match=re.escape(says)):
        mpmd.safetensors.restore(tmp_path, struct(expected(arrays)), names)


def test_values_and_stacks_that_would_be_lost_are_errors_and_unnamed_arrays_a_warning(tmp_path):
    arrays = {
        "a": np.array([1 << 40]),
        "l.0": np.ones(2, np.float32),
        "l.1": np.ones(2, np.float32),
        "key": np.ones(1),
    }
    write(tmp_path / "w.safetensors", arrays)
    names = {"['a']": "a", "['l']": "l.{k}", "['key']": "key"}

    def restore(**like):
        return mpmd.safetensors.restore(tmp_path, like, names)

    with pytest.raises(
        CheckpointError, match=r"\['a'\]: int32\[1\] cannot hold the values of 'a', which is int64"
    ):
        restore(a=np.zeros(1, np.int32))
    with pytest.raises(CheckpointError, match=r"has no place for 'l.1': its stack is longer"):
        restore(l=np.zeros((1, 2), np.float32))
    with pytest.raises(CheckpointError, match=r"float32\[1\] cannot be made of 'a', which is int64"):
        restore(a=np.zeros(1, np.float32))
    with pytest.raises(CheckpointError, match=r"\['key'\]: key<fry>\[1\] cannot be made of 'key'"):
        restore(key=jax.random.split(jax.random.key(0), 1))
    with pytest.warns(UserWarning, match="arrays without a place in the state: l.0, l.1"):
        mpmd.safetensors.restore(tmp_path, {"key": np.zeros(1)}, {"['key']": "key", "['a']": "a"})


def test_a_state_that_files_cannot_hold_is_refused_and_leaves_nothing(tmp_path):
    state = {"a": np.zeros(2), "b": np.zeros(2), "c": np.zeros(2, ml_dtypes.int4), "d": np.zeros(1)}
    names = {"['a']": "same", "['b']": "same", "['c']": "c"}
    with pytest.raises(CheckpointError) as raised:
        mpmd.safetensors.save(tmp_path / "out", state, names)
    for says in (
        "['d']: float64[1] has no name",
        "['b']: float64[2] is 'same', as",
        "['c']: int4[2] cannot be written",
    ):
        assert says in str(raised.value)
    assert not (tmp_path / "out").exists()


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def entry(**changes):
    return {"a": {**GOOD["a"], **changes}}


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b"", None, "it has 3 bytes"),
        (b"{", 8, "its header is not JSON"),
        (b"[]", 0, "its header is not a JSON object"),
        (b'{"a": 1, "a": 2}', 8, "'a' is there twice"),
        (GOOD, 7, "bytes 0 to 8 are not in the file, which has 7 after its header"),
        (GOOD, 9, "no array has the 1 bytes after 'a'"),
        (entry(dtype="F5"), 8, "'a': dtype 'F5' is not known; known are BOOL, I8"),
        (entry(dtype=["F32"]), 8, "dtype ['F32'] is not known"),
        (entry(shape=[3]), 8, "F32[3] takes 12 bytes, and has 8"),
        (entry(shape=[1 << 62, 1 << 62]), 8, "bytes, and has 8"),
        (entry(shape=[-2]), 8, "has no dtype, shape and data_offsets"),
        (entry(shape=[True, 2]), 8, "has no dtype, shape and data_offsets"),
        (entry(data_offsets=[8, 0]), 8, "bytes 8 to 0 are not in the file"),
        (entry(data_offsets=[0]), 8, "has no dtype, shape and data_offsets"),
        (entry(data_offsets=[4, 12]), 12, "no array has the 4 bytes between the header and 'a'"),
        (
            {**GOOD, "b": {**GOOD["a"], "data_offsets": [4, 12]}},
            12,
            "'b' begins 4 bytes before the end of 'a'",
        ),
        ({**GOOD, "b": GOOD["a"]}, 8, "'b' begins 8 bytes before the end of 'a'"),
        ({**GOOD, "__metadata__": {"n": 1}}, 8, "its __metadata__ is not an object of texts"),
    ],
)
def test_a_damaged_file_is_refused(header, data, says, tmp_path):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"abc" if data is None else len(text).to_bytes(8, "little") + text + bytes(data))
    with pytest.raises(CheckpointError, match=re.escape(says)) as raised:
        mpmd.safetensors.restore(tmp_path, {"a": np.zeros(2, np.float32)}, {"['a']": "a"})
    assert f"{file} is damaged, or no file of safetensors" in str(raised.value)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({}, "it has no 'weight_map'"),
        ({"weight_map": {"a": "../w.safetensors"}}, "is not the name of a file beside it"),
        ({"weight_map": {"a": "w.safetensors", "b": "w.safetensors"}}, "'b' is not in w.safetensors"),
        ({"weight_map": {"a": "gone.safetensors"}}, "No such file or directory"),
        ({"weight_map": {"a": "w.safetensors"}}, ""),
    ],
)
def test_an_index_names_files_beside_it(index, says, tmp_path):
    write(tmp_path / "w.safetensors", {"a": np.ones(2, np.float32)})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    like = {"a": np.zeros(2, np.float32)}
    if not says:
        assert mpmd.safetensors.restore(tmp_path, like, {"['a']": "a"})["a"].tolist() == [1, 1]
        return
    with pytest.raises(CheckpointError, match=re.escape(says)):
        mpmd.safetensors.restore(tmp_path, like, {"['a']": "a"})


def test_a_folder_without_one_file_is_refused(tmp_path):
    like = {"a": np.zeros(2, np.float32)}
    with pytest.raises(CheckpointError, match="but no file of safetensors"):
        mpmd.safetensors.restore(tmp_path, like, {"['a']": "a"})
    for name in ("x", "y"):
        write(tmp_path / f"{name}.safetensors", like)
    with pytest.raises(CheckpointError, match=r"but x.safetensors, y.safetensors"):
        mpmd.safetensors.restore(tmp_path, like, {"['a']": "a"})
    with pytest.raises(CheckpointError, match="cannot read .*: No such file"):
        mpmd.safetensors.restore(tmp_path / "none.safetensors", like, {"['a']": "a"})
