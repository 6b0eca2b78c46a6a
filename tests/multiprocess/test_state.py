"""State of several processes: created and restored by those that hold it, on any topology."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.launching import launch, output

PROGRAM = "tests.support.state_in_processes"


def run(processes, stages, devices, action, folder, program=PROGRAM):
    """What each process printed."""
    arguments = [str(stages), str(devices), action, str(folder)]
    if processes == 1:
        done = output([sys.executable, "-m", program, *arguments], 250)
        assert done.returncode == 0, done.stderr
        return [json.loads(done.stdout.splitlines()[-1])]
    code, found = launch(processes, program, *arguments, seconds=250, devices=stages * devices // processes)
    assert code == 0 and len(found) == processes
    return sorted(found, key=lambda line: line["process"])


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_other_processes_and_stages(tmp_path):
    """2 stages in one process, then in 2; 4 stages in 4 processes; and back: the same losses, bit by bit."""
    (alone,) = run(1, 2, 1, "save", tmp_path / "one")
    saved_by_two = run(2, 2, 1, "save", tmp_path / "two")
    for line in [
        *saved_by_two,
        *run(2, 2, 1, "load", tmp_path / "one"),
        *run(4, 4, 1, "load", tmp_path / "two"),
    ]:
        assert (line["losses"], line["sums"]) == (alone["losses"], alone["sums"])
    assert run(1, 1, 1, "load", tmp_path / "two")[0]["losses"] == alone["losses"]
    assert run(2, 4, 1, "load", tmp_path / "two")[0]["losses"] == alone["losses"]
    held = [line["held"] for line in saved_by_two]
    count = 4  # bytes of the optimizer's count, which both processes read
    assert sum(held) == alone["held"] + count and max(held) <= 0.52 * alone["held"]
    assert [line["used"] for line in saved_by_two] == [[True, False], [False, True]]
    pieces = json.loads((tmp_path / "two" / "3" / "manifest.json").read_text())["pieces"]
    assert {process for process, *_ in pieces} == {0, 1}
    boxes = [(leaf, str(box)) for _, leaf, box, *_ in pieces]
    assert len(set(boxes)) == len(boxes)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")
def test_no_more_memory_than_the_share_of_a_process_is_taken_to_create_it():
    """Random numbers have no temporaries, so that 16 MiB take no more beside them; compiling takes some."""
    done = output([sys.executable, "-m", "tests.support.initial_peak"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["share"] == 128 and 100 < found["peak"] < 128 + 28


@pytest.mark.slow
def test_sharded_leaves_are_saved_by_shards(tmp_path):
    found = run(2, 2, 2, "save", tmp_path)
    pieces = json.loads((tmp_path / "3" / "manifest.json").read_text())["pieces"]
    assert [[0, 8], [0, 16]] in [box for _, _, box, *_ in pieces]
    assert {line["losses"][0] for line in run(2, 2, 2, "load", tmp_path)} == {found[0]["losses"][0]}


@pytest.mark.slow
def test_state_of_meshes_over_several_processes(tmp_path):
    """Each of two meshes is over two of four processes; its shards go on in one process, and in two."""
    found = run(4, 2, 2, "save", tmp_path)
    assert all(line["losses"] == found[0]["losses"] for line in found)
    assert {line["held"] for line in found} == {3200, 3212}, "half of what a mesh holds"
    pieces = json.loads((tmp_path / "3" / "manifest.json").read_text())["pieces"]
    boxes = [(leaf, str(box)) for _, leaf, box, *_ in pieces]
    assert len(set(boxes)) == len(boxes) and {process for process, *_ in pieces} == {0, 1, 2, 3}
    for processes, stages, devices in [(4, 2, 2), (2, 1, 4), (2, 2, 2)]:
        for line in run(processes, stages, devices, "load", tmp_path):
            np.testing.assert_allclose(floats(line["losses"]), floats(found[0]["losses"]), rtol=1e-5)


@pytest.mark.slow
def test_arguments_and_results_of_a_mesh_over_two_processes():
    """Host arrays, rows of each process, arrays on the mesh; a result in parts."""
    code, found = launch(2, "tests.support.global_arrays", devices=2)
    assert code == 0 and sorted(line.pop("process") for line in found) == [0, 1]
    for process, line in enumerate(sorted(found, key=lambda line: line["page"])):
        assert len(line["totals"]) == 6 and len(set(line["totals"].values())) == 1
        first, *rest = line.pop("page").splitlines()
        assert first == (
            f"the value of an array float32[8,4] is in processes 0, 1, of which process {process} has a part"
        )
        assert "mpmd.fetch(tree)" in rest[0]
        assert "mpmd.fetch" in line["refused"] and line["spans"] and line["costs"]
        assert line["table"].splitlines()[1].split()[:3] == ["m0", "0,", "1"]
    assert found[0] == found[1], "timeline and costs cover both processes"


def floats(texts):
    return [float.fromhex(text) for text in texts]


@pytest.mark.slow
def test_weights_that_two_processes_export_are_imported_on_other_meshes(tmp_path):
    """In files of safetensors: two processes write a file together; all reads have other stages or shards."""
    module = "tests.support.weights_in_processes"
    first, second = run(2, 2, 2, "save", tmp_path, module)
    assert first["sums"] == second["sums"]
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    for processes, stages, devices in [(1, 1, 1), (4, 2, 2), (2, 4, 1)]:
        for line in run(processes, stages, devices, "load", tmp_path, module):
            assert line["sums"] == first["sums"]


@pytest.mark.slow
def test_a_folder_with_other_weights_is_refused_in_all_processes(tmp_path):
    (tmp_path / "x.safetensors").touch()
    arguments = ["-n", "2", "--grace", "5", "-m", "tests.support.weights_in_processes", "2", "1", "save"]
    done = output([sys.executable, "-m", "mpmd.tools.run", *arguments, str(tmp_path)])
    assert done.returncode == 1
    assert (
        "[0] mpmd.errors.CheckpointError" in done.stderr and "has other weights: x.safetensors" in done.stderr
    )
    assert "[1] mpmd.errors.CheckpointError: process 0" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]
