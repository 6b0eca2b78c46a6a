"""Programs in clusters: no part waits for a later one, and all parts together compute what the whole does."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from mpmd.compile.backends.mixed import MixedBackend, MixedExecutable
from mpmd.compile.backends.mixed import clusters as mixed_loops
from mpmd.compile.backends.mixed.backend import prepared
from mpmd.compile.backends.mixed.clusters import split
from mpmd.compile.backends.native_cpu.backend import NativeCpuBackend
from mpmd.compile.backends.native_cpu.target import NativeCpu
from mpmd.compile.compiler import FallbackBackend
from mpmd.compile.hlo import parse_module, verify
from mpmd.compile.thunks.emission import refusals
from mpmd.errors import CompileError
from tests.support.hlo_meaning import evaluate
from tests.support.native_fragments import fragment_of
from tests.support.random_hlo import random_case
from tests.support.random_hlo.comparison import differences

RNG = np.random.default_rng(5)
SQUARE = RNG.standard_normal((8, 8)).astype(np.float32)


def run_parts(found, arguments):
    """The clusters' results, one after the other, by the evaluator; no memory is read once taken."""
    known, taken = {}, set()

    def at(position):
        made, _ = position
        assert position not in taken
        if made.opcode == "parameter":
            return arguments[made.parameter_number]
        return made.literal if made.opcode == "constant" else known[position]

    for part in found.parts:
        verify(part.module)
        made = jax.tree.leaves(evaluate(part.module, [at(p) for p in part.inputs]))
        known.update(zip(part.outputs, made, strict=True))
        taken.update(part.inputs[k] for k in part.last_reads)
    return [at(p) for p in found.results]


@pytest.mark.parametrize("family", ["graph", "while", "conditional", "sort", "call"])
def test_parts_compute_what_the_whole_does(family):
    for seed in range(12):
        case = random_case(family, seed)
        rng = np.random.default_rng([seed, 9])
        refused = {i: "by chance" for i in case.module.entry if rng.random() < 0.4 and i.operands}
        refused = {i: why for i, why in refused.items() if i.opcode not in ("tuple", "get-tuple-element")}
        before = str(case.module)
        found = split(case.module, refused)
        assert str(case.module) == before
        assert all(not (part.native and part.reasons) for part in found.parts)
        assert sum(len(part.reasons) for part in found.parts) <= len(refused)
        got, want = run_parts(found, case.arguments), jax.tree.leaves(evaluate(case.module, case.arguments))
        assert not differences(got, want, case), case.name


CHAIN = """
HloModule chain

ENTRY main {
  x = f32[4,4] parameter(0)
  one = f32[] constant(1)
  ones = f32[4,4] broadcast(one), dimensions={}
  a = f32[4,4] add(x, ones)
  b = f32[4,4] multiply(a, a)
  c = f32[4,4] tanh(b)
  d = f32[4,4] subtract(c, a)
  e = f32[4,4] cholesky(d), lower=true
  f = f32[4,4] add(e, ones)
  g = f32[4,4] multiply(f, b)
  h = f32[4,4] tanh(g)
  i = f32[4,4] subtract(h, f)
  ROOT result = (f32[4,4], f32[4,4], f32[4,4]) tuple(i, x, c)
}
"""


def chain(*refused):
    module = parse_module(CHAIN)
    return split(module, {i: "not today" for i in module.entry if i.name in refused})


def test_clusters_alternate_and_read_what_they_need():
    found = chain("e")
    assert [part.native for part in found.parts] == [True, False, True]
    first, second, third = found.parts
    assert [p[0].name for p in first.outputs] == ["b", "c", "d"]
    assert [p[0].name for p in second.inputs] == ["d"] and second.reasons == {"e": "not today"}
    assert [p[0].name for p in third.inputs] == ["e", "b"]
    assert [p[0].name for p in found.results] == ["i", "x", "c"]
    assert "cluster 1: XLA, 1 instructions, 1 inputs, 1 outputs\n  e: not today" in found.text()


def test_constants_are_copied_to_their_readers():
    found = chain("e")
    for part in (found.parts[0], found.parts[2]):
        assert [i.opcode for i in part.module.entry].count("constant") == 1
        assert all(p[0].opcode not in ("constant", "broadcast") for p in part.inputs)


COPIED = """
HloModule copied

ENTRY main {
  x = bf16[4,4] parameter(0)
  rows = s32[4,4] iota(), iota_dimension=0
  columns = s32[4,4] iota(), iota_dimension=1
  mask = pred[4,4] compare(rows, columns), direction=GE
  wide = f32[4,4] convert(x)
  a = f32[4,4] select(mask, wide, wide)
  b = f32[4,4] dot(a, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  narrow = bf16[4,4] convert(b)
  e = f32[4,4] cholesky(b), lower=true
  f = f32[4,4] select(mask, e, wide)
  g = f32[4,4] dot(f, f), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT result = (f32[4,4], bf16[4,4]) tuple(g, narrow)
}
"""


def test_masks_and_wider_copies_of_an_array_are_made_by_each_reader():
    """So attention finds its mask, and half as many bytes lie between parts."""
    module = parse_module(COPIED)
    first, second, third = split(module, {i: "not today" for i in module.entry if i.name == "e"}).parts
    assert [made.name for made, _ in first.outputs] == ["b", "narrow"] and not second.native
    assert sorted(made.name for made, _ in third.inputs) == ["e", "x"]
    opcodes = [i.opcode for i in third.module.entry]
    assert opcodes.count("iota") == 2 and opcodes.count("compare") == opcodes.count("convert") == 1


def test_refused_instructions_are_in_no_native_part():
    """Although they are larger than their operand."""
    module = parse_module(COPIED)
    parts = split(module, {i: "not today" for i in module.entry if i.name in ("e", "wide")}).parts
    native = [part for part in parts if part.native]
    assert all("wide" in {made.name for made, _ in part.inputs} for part in native) and len(native) == 2


def test_what_takes_more_to_make_again_is_an_array_between_parts():
    """Each line of this chain doubles what it is made of."""
    chain = ["s0 = s32[4,4] iota(), iota_dimension=0"]
    chain += [f"s{n + 1} = s32[4,4] add(s{n}, s{n})" for n in range(30)]
    text = COPIED.replace("rows = s32[4,4] iota(), iota_dimension=0", "\n".join(chain))
    module = parse_module(text.replace("compare(rows", "compare(s30"))
    first, _, third = split(module, {i: "not today" for i in module.entry if i.name == "e"}).parts
    members = {m.name for m in first.members}
    assert "s3" not in members and "s4" in members
    assert sorted(made.name for made, _ in third.inputs) == ["e", "mask", "x"]


def test_clusters_too_small_for_a_call_are_of_xla():
    assert [part.native for part in chain("c", "e", "g").parts] == [False]


def test_cheap_work_that_only_xla_reads_is_of_xla():
    text = CHAIN.replace(
        "e = f32[4,4] cholesky(d)", "t = f32[4,4] transpose(d), dimensions={1,0}\n e = f32[4,4] cholesky(t)"
    )
    module = parse_module(text)
    found = split(module, {i: "not today" for i in module.entry if i.name == "e"})
    assert [m.name for m in found.parts[1].members] == ["t", "e"]


def eigenvectors(x):
    return jnp.linalg.eigh(x @ x.T)[1] @ x


def test_a_loop_is_refused_for_what_it_holds():
    def loop(x):
        return jax.lax.fori_loop(0, 3, lambda _, v: eigenvectors(v), x)

    refused = refusals(prepared(fragment_of(loop, SQUARE)).entry, NativeCpu().refuses)
    assert [i.opcode for i in refused] == ["while"]
    assert "it holds" in next(iter(refused.values()))
    assert refusals(prepared(fragment_of(lambda x: jnp.tanh(x) @ x, SQUARE)).entry, NativeCpu().refuses) == {}


# -- through JAX --------------------------------------------------------------------------------------


def loops(x):
    inner = jax.lax.fori_loop(0, 2, lambda i, v: jnp.cos(v) + i, x)
    return jax.lax.fori_loop(0, 3, lambda i, v: jnp.tanh(v @ x), inner), inner


def systems(x):
    factor = jnp.linalg.cholesky(x @ x.T + jnp.eye(8))
    y = jax.lax.linalg.triangular_solve(factor, jnp.tanh(x) @ x, left_side=True, lower=True)
    return y @ jnp.linalg.solve(factor @ factor.T, y) * jnp.linalg.slogdet(factor)[1]


def places(x):
    best = jnp.argmax(jnp.abs(jnp.fft.fft(x @ x)), axis=1)
    return jnp.take(jnp.cos(x), best, axis=0).sum(0), best, x + 1


def without_cosines(computation, refuses):
    """As if cosines were no kernels: native code has everything that JAX says without a call."""
    found = refusals(computation, refuses)
    for instruction in computation:
        inside = (
            [i for c in instruction.called for i in c] if instruction.opcode == "while" else [instruction]
        )
        if any(i.opcode == "cosine" for i in inside):
            found[instruction] = "not today"
    return found


@pytest.mark.parametrize("function", [eigenvectors, loops, places, systems])
@pytest.mark.parametrize("token", [False, True])
def test_mixed_fragments_compute_the_same(function, token, monkeypatch):
    monkeypatch.setattr(mixed_loops, "refusals", without_cosines)
    mesh, backend = Mesh(np.array(jax.devices()[:1]), ("d",)), MixedBackend(NativeCpuBackend())
    fragment = fragment_of(function, SQUARE)
    made = backend.compile(type(fragment)(**{**vars(fragment), "token": token}), mesh)
    assert isinstance(made, MixedExecutable) and made.reasons
    calls = function in (eigenvectors, systems)
    assert made.asynchronous != calls  # what a call does XLA does not count
    want = jax.tree.leaves(jax.jit(function)(SQUARE))
    again = backend.relocate(made, fragment, mesh)
    for executable, extra in ((made, token), (again, False)):
        got = executable(SQUARE)
        assert len(got) == len(want) + extra
        for a, b in zip(got, want):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_donated_arguments_are_taken():
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    made = FallbackBackend(NativeCpuBackend()).compile(fragment_of(eigenvectors, SQUARE, donated=(0,)), mesh)
    given = jax.device_put(SQUARE)
    np.testing.assert_allclose(made(given)[0], eigenvectors(SQUARE), rtol=1e-4, atol=1e-5)
    assert isinstance(made, MixedExecutable) and given.is_deleted()


def beside(x, g):
    read = (jnp.tanh(x) * g - x / 3).sum(0)
    scale = jnp.cos(g[0])
    return (scale * g + scale / 3 + scale * scale - 1) / 5, read


def in_place(x, g):
    made = jnp.tanh(x * g - x / 3) + g
    return jnp.exp(made * jnp.cos(made[0]) + made) / 3 - 1, g.sum(0)


@pytest.mark.parametrize("function, over", [(beside, 0), (in_place, 2)])
def test_results_are_put_over_arrays_that_were_read_and_xla_copies_none(function, over, monkeypatch):
    """`beside`: one cluster reads the donated argument, another computes the result that takes its memory."""
    monkeypatch.setattr(mixed_loops, "refusals", without_cosines)
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    fragment = fragment_of(function, SQUARE, SQUARE + 1, donated=(0,))
    made = MixedBackend(NativeCpuBackend()).compile(fragment, mesh)
    text = made.compiled.as_text()
    assert text.count('custom_call_target="mpmd_native"') == 2 and "input_output_alias={ {0}: (0" in text
    assert text.count("output_to_operand_aliasing") == over
    assert not re.findall(r"f32\[8,8\]\S* copy\(", text)
    for a, b in zip(made(jax.device_put(SQUARE), SQUARE + 1), function(SQUARE, SQUARE + 1), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_fragment_with_nothing_native_says_every_reason():
    def both(x):
        return [jax.ffi.ffi_call(name, jax.typeof(x))(x) for name in ("first", "second")]

    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    with pytest.raises(CompileError, match=r"(?s)no kernel calls first.*no kernel calls second"):
        MixedBackend(NativeCpuBackend()).compile(fragment_of(both, SQUARE), mesh)


def test_elements_of_less_than_a_byte_pass_between_parts():
    """XLA's arrays have them packed, native code one to a byte."""

    def function(x, narrow):
        values = jnp.linalg.eigvalsh(jnp.tanh(x @ x.T) + narrow.astype(jnp.float32))
        return values, (values * jnp.ones((8, 1))).astype(jnp.int4)

    narrow = jnp.asarray(np.arange(64).reshape(8, 8) % 15 - 7, jnp.int4)
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    made = FallbackBackend(NativeCpuBackend()).compile(fragment_of(function, SQUARE, narrow), mesh)
    assert isinstance(made, MixedExecutable)
    for got, wanted in zip(made(SQUARE, narrow), function(SQUARE, narrow), strict=True):
        got, wanted = (np.asarray(a, np.float32) for a in (got, wanted))
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


SINKING = """
HloModule sinking

ENTRY main {
  x = f32[8,4] parameter(0)
  w = f32[4,4] parameter(1)
  a = f32[8,4] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  t = f32[4,4] transpose(w), dimensions={1,0}
  wide = f32[8,4] tanh(a)
  sums = f32[8] custom-call(a), custom_call_target="elsewhere"
  rows = f32[8,4] broadcast(sums), dimensions={0}
  b = f32[8,4] dot(rows, t), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  kept = f32[8,4] sine(a)
  more = f32[8] custom-call(b), custom_call_target="elsewhere"
  again = f32[8,4] broadcast(more), dimensions={0}
  c = f32[8,4] dot(again, t), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT result = (f32[8,4], f32[8,4], f32[8,4], f32[8,4]) tuple(b, c, kept, wide)
}
"""


def test_native_work_waits_for_its_first_reader_if_it_then_reads_no_more():
    """The transposed weight is no array between parts; what is a result is made as soon as it can be."""
    module = parse_module(SINKING)
    refused = {i: "elsewhere" for i in module.entry if i.opcode == "custom-call"}
    first, second, last = (part for part in split(module, refused).parts if part.native)
    assert {m.name for m in first.members} == {"a", "wide", "kept"}
    assert {m.name for m in second.members} == {"t", "b"}
    assert {m.name for m in last.members} == {"c"}
    assert sorted(made.name for made, _ in second.inputs) == ["sums", "w"]


DERIVATIVE = """
HloModule derivative

ENTRY main {
  x = f32[8,4] parameter(0)
  w = f32[4,4] parameter(1)
  one = f32[] constant(1)
  ones = f32[8,4] broadcast(one), dimensions={}
  a = f32[8,4] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  k = f32[8,4] tanh(a)
  b = f32[8,4] dot(k, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  more = f32[8,4] add(ones, k)
  less = f32[8,4] subtract(ones, k)
  slope = f32[8,4] multiply(more, less)
  sums = f32[8] custom-call(b), custom_call_target="elsewhere"
  rows = f32[8,4] broadcast(sums), dimensions={0}
  c = f32[8,4] dot(rows, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  d = f32[8,4] multiply(c, slope)
  ROOT result = (f32[8,4], f32[8,4]) tuple(k, d)
}
"""


def test_work_moves_to_its_reader_with_what_it_alone_reads():
    """Of a function and its derivative the function passes between parts."""
    module = parse_module(DERIVATIVE)
    refused = {i: "elsewhere" for i in module.entry if i.opcode == "custom-call"}
    first, second = (part for part in split(module, refused).parts if part.native)
    assert {m.name for m in first.members} == {"a", "k", "b"}
    assert sorted(made.name for made, _ in second.inputs) == ["k", "sums", "w"]
    text = DERIVATIVE.replace("tuple(k, d)", "tuple(more, d)")  # a result is made as soon as it can be
    module = parse_module(text)
    refused = {i: "elsewhere" for i in module.entry if i.opcode == "custom-call"}
    first, _ = (part for part in split(module, refused).parts if part.native)
    assert "more" in {m.name for m in first.members}


GRADIENTS = """
HloModule gradients, num_partitions=2

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

ENTRY main {
  x = f32[8,4] parameter(0)
  dy = f32[8,6] parameter(1)
  w = f32[4,6] parameter(2)
  scaled = f32[8,6] negate(dy)
  dx = f32[8,4] dot(scaled, w), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  dw = f32[4,6] dot(x, scaled), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  sum = f32[8,4] all-reduce(dx), to_apply=add, replica_groups={}
  before = f32[8,6] dot(sum, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  total = f32[4,6] all-reduce(dw), to_apply=add, replica_groups={}
  ROOT result = (f32[8,6], f32[4,6]) tuple(before, total)
}
"""


@pytest.mark.parametrize("opcode", ["all-reduce", "negate"])
def test_products_that_a_collective_does_not_wait_for_are_a_part_of_their_own(opcode):
    """As the gradient of a weight beside the sum of its input's; beside other work nothing is gained."""
    text = GRADIENTS if opcode == "all-reduce" else re.sub(r"all-reduce(\(\w+\)).*", r"negate\1", GRADIENTS)
    module = parse_module(text)
    parts = split(module, {i: "" for i in module.entry if i.name in ("sum", "total")}).parts
    members = [[m.name for m in part.members] for part in parts if part.native]
    if opcode == "all-reduce":
        assert members == [["scaled", "dx"], ["dw"], ["before"]]
        assert [part.native for part in parts] == [True, True, False, True]
        assert [made.name for made, _ in parts[1].inputs] == ["x", "scaled"]
    else:
        assert sorted(members[0]) == ["dw", "dx", "scaled"]
