"""Programs at which Shardy's propagation ends the process: the tool refuses them, and says why."""

import subprocess
import sys
from pathlib import Path

T = "tensor<4xf32>"
ROWS = '<@mesh, [{"x"}]>'
TOPOLOGY = 'attributes {topology = #mpmd.topology<<"m" : <["x"=2]>>>}'
NEGATE = f"func.func private @g(%a: {T}) -> {T} {{ %0 = stablehlo.negate %a : {T} return %0 : {T} }}\n"
CALL = f"func.call @g(%q) : ({T}) -> {T}"

RUNNER = """
import sys
from mpmd.tools.opt import main
for name in sys.argv[1:]:
    print(name, main([name, "-sdy-propagation-pipeline"]), flush=True)
    print("--", name, file=sys.stderr, flush=True)
"""


def program(inner: str, functions: str = NEGATE) -> str:
    """A named computation that holds one op."""
    return (
        f'sdy.mesh @mesh = <["x"=2]>\n{functions}'
        f"func.func public @main(%a: {T}) -> {T} {TOPOLOGY} {{\n"
        f'  %0 = mpmd.named_computation<"stage"> (%a) (%q: {T}) {{\n'
        f"    %1 = {inner}\n    mpmd.return %1 : {T}\n  }} : ({T}) -> {T}\n  return %0 : {T}\n}}\n"
    )


SHARDED = f"#sdy.sharding_per_value<[{ROWS}]>"
LOOP = NEGATE.replace(f"stablehlo.negate %a : {T}", f"func.call @g(%a) : ({T}) -> {T}")
HOLDS = 'the named computation "stage" in @main contains a sharding'
REFUSED = {
    "op": (program(f"stablehlo.negate %q {{sdy.sharding = {SHARDED}}} : {T}"), HOLDS),
    "constraint": (program(f"sdy.sharding_constraint %q {ROWS} : {T}"), HOLDS),
    "call": (program(CALL.replace(" :", f" {{sdy.sharding = {SHARDED}}} :")), HOLDS),
    "callee": (program(CALL, NEGATE.replace("%a : ", f"%a {{sdy.sharding = {SHARDED}}} : ")), HOLDS),
    "argument": (
        program(CALL, NEGATE.replace(f"%a: {T}", f"%a: {T} {{sdy.sharding = #sdy.sharding{ROWS}}}")),
        HOLDS,
    ),
    "declared": (program(CALL, f"func.func private @g({T}) -> {T}\n"), "@g is called and has no body"),
    "recursive": (program(CALL, LOOP), "@g calls itself"),
}
ALLOWED = {"plain": program(CALL)}


def test_no_program_ends_the_process(tmp_path: Path) -> None:
    texts = {name: text for name, (text, _) in REFUSED.items()} | ALLOWED
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    ran = subprocess.run(
        [sys.executable, "-c", RUNNER, *texts],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"the process ended with {ran.returncode}\n{ran.stdout}{ran.stderr[-2000:]}"
    said = dict(zip(texts, ran.stderr.split("-- ")))
    for name, (_, message) in REFUSED.items():
        assert f"{name} 1\n" in ran.stdout, name
        assert message in said[name], ran.stderr
    assert "plain 0\n" in ran.stdout
