"""The script and the commands of the guide on several processes, as they are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.repo.tree import ROOT

GUIDE = (ROOT / "docs" / "guides" / "several-hosts.md").read_text()
SCRIPT = "\n".join(re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL))
COMMANDS = [
    line.partition("#")[0].split()
    for block in re.findall(r"^```sh\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.startswith(("python train.py", "mpmd-run"))
]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_commands_of_the_guide_train_as_one_process(tmp_path):
    """Each goes on from the checkpoint of the one before, in other processes and on other meshes."""
    assert len(COMMANDS) == 4
    (alone := tmp_path / "alone").mkdir()
    want = steps_shown(COMMANDS[0], alone, 600)
    assert [line.split(":")[0] for line in want] == [f"step {step}" for step in range(100, 700, 100)]
    found = [steps_shown(command, tmp_path, 100 * k) for k, command in enumerate(COMMANDS, 3)]
    assert [len(lines) for lines in found] == [3, 1, 1, 1]
    assert [line for lines in found for line in lines] == want


def steps_shown(command, folder, steps):
    """What a command of the guide prints of so many steps."""
    script = SCRIPT.replace('folder, steps = "checkpoints", 300', f'folder, steps = "checkpoints", {steps}')
    assert str(steps) in script
    (folder / "train.py").write_text(script)
    tool = [sys.executable, *(["-m", "mpmd.tools.run"] if command[0] == "mpmd-run" else [])]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [*tool, *command[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.removeprefix("[0] ") for line in done.stdout.splitlines() if "step " in line]
