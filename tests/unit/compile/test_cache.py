"""What compilation keeps on disk: found again by text and by program, and made again where it is no use."""

import dataclasses
import os
import re
import resource
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import mpmd
from mpmd.compile.artefact import Artefact
from mpmd.compile.backends.native_cpu.backend import NativeCpuBackend
from mpmd.compile.backends.native_cpu.target import NativeCpu
from mpmd.compile.cache import DiskCache, compiler_version, key_of
from mpmd.compile.options import CompileOptions, Dump
from mpmd.errors import CompileError
from mpmd.options import PipelineOptions
from mpmd.partition.lowering import compile_options
from tests.support.native_fragments import fragment_of

KEY = key_of("entry")
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
W = np.linspace(0, 1, 128, dtype=np.float32).reshape(8, 16)


def function(x, w):
    return jax.nn.softmax(x @ w)


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()[:1]), ("d",))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kept"


def backend(folder, **options):
    return NativeCpuBackend(options=CompileOptions(cache=DiskCache(folder), **options))


def entries(folder):
    return sorted(folder.glob("*.kept"), key=lambda path: path.stat().st_size)


# -- the folder ---------------------------------------------------------------------------------------


def test_bytes_come_back(folder):
    cache = DiskCache(folder)
    assert cache.get(KEY) is None
    cache.put(KEY, b"content")
    assert DiskCache(folder).get(KEY) == b"content"
    assert (cache.counts.misses, cache.counts.hits) == (1, 0)
    assert os.listdir(folder) == [f"{KEY}.kept"]


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "foreign", "other key"])
def test_what_is_damaged_is_removed(folder, damage):
    cache = DiskCache(folder)
    cache.put(KEY, b"content" * 10)
    path = cache.path_of(KEY)
    data = path.read_bytes()
    if damage == "other key":
        cache.put(key_of("another"), b"content")
        data = cache.path_of(key_of("another")).read_bytes()
    changed = {
        "bit": data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
        "cut": data[:-5],
        "empty": b"",
        "foreign": b"something else altogether",
        "other key": data,
    }[damage]
    path.write_bytes(changed)
    assert cache.get(KEY) is None
    assert cache.counts.damaged == 1 and not path.exists()
    cache.put(KEY, b"again")
    assert cache.get(KEY) == b"again"


def replaced_by_link(path, monkeypatch):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def replaced_by_pipe(path, monkeypatch):
    path.unlink()
    os.mkfifo(path)


def of_another_user(path, monkeypatch):
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)


@pytest.mark.parametrize(
    "change, told",
    [
        (replaced_by_link, "is a symbolic link"),
        (replaced_by_pipe, "is not a regular file"),
        (lambda path, _: path.chmod(0o620), r"others may write to .*\.kept"),
        (lambda path, _: path.parent.chmod(0o770), "others may write to .*kept"),
        (lambda path, _: path.parent.parent.chmod(0o777), "others may write to "),
        (of_another_user, "belongs to another user"),
    ],
)
def test_what_others_may_have_written_is_not_used(folder, change, told, monkeypatch, caplog):
    """The content is whole, with its digest: only who may have written it differs."""
    cache = DiskCache(folder)
    cache.put(KEY, b"content")
    change(cache.path_of(KEY), monkeypatch)
    assert cache.get(KEY) is None and cache.get(KEY) is None
    assert (cache.counts.refused, cache.counts.hits, cache.counts.damaged) == (2, 0, 0)
    (record,) = caplog.records
    assert re.search(told, record.getMessage())


def test_what_was_refused_is_compiled_and_put_in_its_place(folder):
    cache = DiskCache(folder)
    cache.put(KEY, b"content")
    replaced_by_link(cache.path_of(KEY), None)
    assert cache.get(KEY) is None
    cache.put(KEY, b"again")
    assert cache.get(KEY) == b"again" and (folder / "elsewhere").read_bytes() != b"again"


def test_the_limit_takes_what_was_not_read_for_longest(folder):
    cache = DiskCache(folder, limit=2500)
    keys = [key_of(n) for n in range(4)]
    for age, key in enumerate(keys[:2]):
        cache.put(key, bytes(1000))
        os.utime(cache.path_of(key), (age, age))
    cache.get(keys[0])
    cache.put(keys[2], bytes(1000))
    assert [cache.get(k) is not None for k in keys[:3]] == [True, False, True]
    assert cache.counts.evicted == 1


def test_what_cannot_be_written_is_not_kept(tmp_path):
    (tmp_path / "file").write_text("no folder")
    cache = DiskCache(tmp_path / "file")
    cache.put(KEY, b"content")
    assert cache.counts.failed == 1 and cache.get(KEY) is None


def test_readers_and_writers_at_the_same_time_see_whole_entries(folder):
    contents = [bytes([n]) * 200_000 for n in range(3)]
    seen = []

    def work(content):
        cache = DiskCache(folder)
        for _ in range(10):
            cache.put(KEY, content)
            seen.append(cache.get(KEY))
            assert cache.counts.damaged == 0

    threads = [threading.Thread(target=work, args=(c,)) for c in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 30 and all(data in contents for data in seen)
    assert [path.suffix for path in folder.iterdir()] == [".kept"]


def test_a_full_disk_keeps_what_was_there(folder):
    """A limit on the size of files stands for a disk without room: writing begins, and fails."""
    cache = DiskCache(folder)
    cache.put(KEY, b"small")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        cache.put(KEY, bytes(1 << 20))
        cache.put(key_of("another"), bytes(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert cache.counts.failed == 2
    assert cache.get(KEY) == b"small"
    assert [path.suffix for path in folder.iterdir()] == [".kept"]


WRITING = """
import sys
from pathlib import Path
from mpmd.compile.cache import DiskCache, key_of
cache, mine = DiskCache(Path(sys.argv[1]), limit=200_000), sys.argv[2].encode()
sys.stdin.readline()  # both begin together
for number in range(150):
    key = key_of("entry", number % 7)
    cache.put(key, mine * 9000)
    found = cache.get(key)
    assert found is None or found in (b"a" * 9000, b"b" * 9000), found[:20]
assert not cache.counts.damaged and not cache.counts.failed, cache.counts
print("whole")
"""


@pytest.mark.slow
def test_two_processes_write_the_same_entries_at_once(folder):
    command = [sys.executable, "-c", WRITING, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([*command, letter], **pipes) for letter in "ab"]
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate()[0].split() for process in both] == [["whole"], ["whole"]]
    assert {path.suffix for path in folder.iterdir()} == {".kept"}


def test_another_compiler_has_other_keys(monkeypatch):
    assert "llvmlite" in compiler_version()
    monkeypatch.setattr("mpmd.compile.cache.compiler_version", lambda: "another")
    assert key_of("entry") != KEY


# -- fragments ----------------------------------------------------------------------------------------


def test_a_second_run_takes_the_code_from_the_folder(folder, mesh):
    fragment = fragment_of(function, X, W)
    first = backend(folder).compile(fragment, mesh)
    second = backend(folder).compile(fragment, mesh)
    assert (first.kept, second.kept) == (False, True)
    np.testing.assert_array_equal(second(X, W)[0], first(X, W)[0])
    np.testing.assert_allclose(second(X, W)[0], function(X, W), rtol=1e-6)
    for word in ("hlo", "buffers", "thunks", "kernels", "llvm", "assembly"):
        assert first.as_text(word) == second.as_text(word) != ""
    assert first.cost_analysis() == second.cost_analysis()
    assert first.memory_analysis() == second.memory_analysis()


def test_an_equal_program_with_another_text_is_found(folder, mesh):
    fragment = fragment_of(function, X, W)
    renamed = dataclasses.replace(fragment, text=fragment.text.replace("%arg", "%given"))
    assert renamed.text != fragment.text
    backend(folder).compile(fragment, mesh)
    assert backend(folder).compile(renamed, mesh).kept
    cache = DiskCache(folder)
    again = NativeCpuBackend(options=CompileOptions(cache=cache)).compile(renamed, mesh)
    assert again.kept and cache.counts.misses == 0


def test_what_differs_is_compiled(folder, mesh):
    fragment = fragment_of(function, X, W)
    backend(folder).compile(fragment, mesh)
    for other in (
        fragment_of(lambda x, w: jax.nn.softmax(x @ w + 1), X, W),
        fragment_of(function, X[:2], W),
        fragment_of(lambda x, y: x + y, X, X, donated=(0,)),
        dataclasses.replace(fragment, reserved_bytes=64),
    ):
        assert not backend(folder).compile(other, mesh).kept
    assert not backend(folder, disable_passes=("hlo-fusion",)).compile(fragment, mesh).kept


def test_a_dump_is_of_a_compilation(folder, mesh, tmp_path):
    fragment = fragment_of(function, X, W)
    backend(folder).compile(fragment, mesh)
    assert not backend(folder, dump=Dump(tmp_path / "dump")).compile(fragment, mesh).kept


def test_a_name_that_is_none_is_no_use(folder, mesh):
    fragment = fragment_of(function, X, W)
    backend(folder).compile(fragment, mesh)
    names = [path for path in entries(folder) if path.stat().st_size < 250]
    for path in names:
        DiskCache(folder).put(path.stem, b"\xff../../elsewhere")
    cache = DiskCache(folder)
    assert NativeCpuBackend(options=CompileOptions(cache=cache)).compile(fragment, mesh).kept
    assert cache.counts.damaged == len(names) == 1


@pytest.mark.parametrize("damage", ["bit", "cut", "another artefact"])
def test_damaged_code_is_compiled_again(folder, mesh, damage):
    fragment = fragment_of(function, X, W)
    first = backend(folder).compile(fragment, mesh)
    path = entries(folder)[-1]
    data = path.read_bytes()
    if damage == "another artefact":
        DiskCache(folder).put(path.stem, b"whole, and no artefact")
    else:
        path.write_bytes(data[:-9] if damage == "cut" else data[:900] + bytes([data[900] ^ 1]) + data[901:])
    cache = DiskCache(folder)
    again = NativeCpuBackend(options=CompileOptions(cache=cache)).compile(fragment, mesh)
    assert not again.kept and cache.counts.damaged == 1
    np.testing.assert_array_equal(again(X, W)[0], first(X, W)[0])
    assert backend(folder).compile(fragment, mesh).kept


def test_bytes_that_are_no_artefact():
    for data in (b"", b"x" * 100, bytes(40)):
        with pytest.raises(CompileError, match="these bytes are not a compiled fragment"):
            Artefact.from_bytes(data, NativeCpu())


def test_artefacts_keep_every_field(mesh):
    made = (
        NativeCpuBackend()
        .compile(fragment_of(lambda x, y: (x + y, x * 2), X, X, donated=(0,)), mesh)
        .artefact
    )
    again = Artefact.from_bytes(made.to_bytes(), NativeCpu())
    assert again == dataclasses.replace(made, texts=dict(made.texts))
    assert again.aliases and again.code.llvm == made.code.llvm != ""
    assert again.to_bytes() == made.to_bytes()


# -- the user's options -------------------------------------------------------------------------------


def step(folder):
    options = dataclasses.replace(PipelineOptions(), backend="native", compile_cache_dir=str(folder))
    topology = mpmd.make_topology({"m0": 1})
    config = mpmd.make_config(topology, {"f": "m0"}, options=options)
    return mpmd.jit(lambda *a: mpmd.named_computation(jnp.dot, name="f")(*a), config)


def test_an_option_names_the_folder(folder):
    (made,) = step(folder).compiled(X, W).executables.values()
    (again,) = step(folder).compiled(X, W).executables.values()
    assert (made.kept, again.kept) == (False, True)


def test_the_folder_of_jax_is_used_where_it_has_one(tmp_path):
    assert compile_options(PipelineOptions()).cache is None
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        cache = compile_options(PipelineOptions(compile_cache_bytes=5)).cache
        assert (cache.folder, cache.limit) == (tmp_path / "mpmd", 5)
        assert compile_options(PipelineOptions(compile_cache_dir="off")).cache is None
        jax.config.update("jax_compilation_cache_dir", "gs://bucket")
        assert compile_options(PipelineOptions()).cache is None
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


OTHER_PROCESS = """
import sys
from pathlib import Path
import jax, numpy as np
from mpmd.compile.backends.native_cpu.backend import NativeCpuBackend
from mpmd.compile.cache import DiskCache
from mpmd.compile.options import CompileOptions
from tests.support.native_fragments import fragment_of

def function(x, w):
    return jax.nn.softmax(x @ w)

x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
w = np.linspace(0, 1, 128, dtype=np.float32).reshape(8, 16)
mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
backend = NativeCpuBackend(options=CompileOptions(cache=DiskCache(Path(sys.argv[1]))))
made = backend.compile(fragment_of(function, x, w), mesh)
np.testing.assert_allclose(made(x, w)[0], function(x, w), rtol=1e-6)
print(made.kept)
"""


def test_another_process_finds_the_code(folder, mesh):
    backend(folder).compile(fragment_of(function, X, W), mesh)
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["True"], done.stderr
