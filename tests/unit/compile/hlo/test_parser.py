"""Reading HLO text: every written form, and errors that show the place."""

import numpy as np
import pytest

from mpmd.compile.hlo import fingerprint, parse_module, print_module, verify
from mpmd.compile.hlo.attributes import (
    DotDims,
    GatherDims,
    InputOutputAlias,
    PadDim,
    ScatterDims,
    WindowDim,
)
from mpmd.compile.hlo.codecs import DOT, GATHER, SCATTER
from mpmd.errors import HloError


def entry(*lines: str, header: str = "HloModule m") -> str:
    return "\n".join([header, "", "ENTRY main {", *(f"  {line}" for line in lines), "}", ""])


def root_of(*lines: str):
    return parse_module(entry(*lines)).entry.root


def test_sigils_comments_operand_shapes_and_layouts_are_optional():
    plain = parse_module(
        """HloModule m
ENTRY main {
  a = f32[2]{0} parameter(0)
  b = f32[2]{0} parameter(1)
  ROOT c = (f32[2]{0}, f32[2]{0}) tuple(a, b)
}"""
    )
    decorated = parse_module(
        """HloModule m, entry_computation_layout={(f32[2]{0}, /*index=1*/f32[2]{0})->(f32[2]{0}, f32[2]{0})}

// a line of its own
ENTRY %main.7 (a: f32[2], b: f32[2]) -> (f32[2], f32[2]) {
  %a = f32[2]{0} parameter(0), metadata={op_name="x {y\\" }" source_line=3}
  %b = f32[2]{0} parameter(1)
  ROOT %c = (f32[2]{0}, /*index=1*/f32[2]{0}) tuple(f32[2]{0} %a, /*index=1*/f32[2]{0} %b)
}
"""
    )
    assert fingerprint(plain) == fingerprint(decorated)
    assert decorated.entry.parameters[0].metadata == '{op_name="x {y\\" }" source_line=3}'


def test_instructions_may_share_lines_with_braces_and_span_lines():
    module = parse_module(
        """HloModule m
f { p = f32[] parameter(0)
  ROOT t = f32[] tanh(p) }
ENTRY e { q = f32[] parameter(0)
  ROOT c = f32[] call(
    q),
    to_apply=f }"""
    )
    assert module.entry.root.to_apply is module.computation("f")


def test_the_last_instruction_is_the_root_unless_one_is_marked():
    assert root_of("a = f32[] parameter(0)", "b = f32[] negate(a)").name == "b"
    assert root_of("ROOT a = f32[] parameter(0)", "b = f32[] negate(a)").name == "a"


def test_header():
    text = entry(
        "a = f32[2]{0} parameter(0)",
        "ROOT r = (f32[2]{0}) tuple(a)",
        header="HloModule m, is_scheduled=true, input_output_alias={ {0}: (0, {}, must-alias) }, "
        "buffer_donor={ (0, {}) }, entry_computation_layout={(f32[2]{0})->(f32[2]{0})}, num_partitions=8, "
        "allow_spmd_sharding_propagation_to_output={true}",
    )
    module = parse_module(text)
    assert module.is_scheduled and module.num_partitions == 8
    assert module.input_output_alias == (InputOutputAlias((0,), 0, (), "must-alias"),)
    assert module.header == {"allow_spmd_sharding_propagation_to_output": "{true}"}
    assert print_module(module) == text


def test_source_tables_are_kept_for_metadata():
    text = """HloModule m

FileNames
1 "a.py"

StackFrames
1 {file_location_id=1}

ENTRY e {
  ROOT a = f32[] parameter(0), metadata={stack_frame_id=1}
}"""
    tables = parse_module(text).tables.splitlines()
    assert tables == ["FileNames", '1 "a.py"', "", "StackFrames", "1 {file_location_id=1}"]


def test_typed_attributes():
    dot = root_of(
        "a = f32[2,3,4]{2,1,0} parameter(0)",
        "b = f32[2,4,5]{2,1,0} parameter(1)",
        "ROOT d = f32[2,3,5]{2,1,0} dot(a, b), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
        "rhs_batch_dims={0}, "
        "rhs_contracting_dims={1}, operand_precision={highest,default}",
    )
    assert dot.dot_dims == DotDims((2,), (1,), (0,), (0,))
    assert dot.attributes["operand_precision"] == ("highest", "default")
    pad = root_of(
        "a = f32[2,3]{1,0} parameter(0)",
        "v = f32[] constant(0)",
        "p = f32[4,5]{1,0} pad(a, v), padding=0_1_1x2_0_0",
    )
    assert pad.padding == (PadDim(0, 1, 1), PadDim(2, 0, 0))
    cut = root_of("a = f32[9,9]{1,0} parameter(0)", "s = f32[2,4]{1,0} slice(a), slice={[1:3], [0:8:2]}")
    assert (cut.slice_dims.starts, cut.slice_dims.limits, cut.slice_dims.strides) == ((1, 0), (3, 8), (1, 2))
    conv = root_of(
        "a = f32[1,8,8,3]{3,2,1,0} parameter(0)",
        "k = f32[3,3,3,4]{3,2,1,0} parameter(1)",
        "c = f32[1,8,8,4]{3,2,1,0} convolution(a, k), window={size=3x3 pad=1_1x1_1 rhs_reversal=1x0}, "
        "dim_labels=b01f_01io->b01f",
    )
    assert conv.window.dims[0] == WindowDim(3, 1, 1, 1, 1, 1, True)
    assert str(conv.conv_dims) == "b01f_01io->b01f"


@pytest.mark.parametrize(
    ("codec", "value"),
    [
        (DOT, DotDims((1,), (2,), (3,), (4, 5))),
        (GATHER, GatherDims((1,), (2,), (3,), 4, (5,), (6, 7))),
        (SCATTER, ScatterDims((1,), (2,), (3,), 4, (5,), (6, 7))),
        (GATHER, GatherDims((1,), (2,), (3,), 4)),
        (SCATTER, ScatterDims((1,), (2,), (3,), 4)),
    ],
)
def test_dimension_numbers_are_read_as_they_were_written(codec, value):
    written = dict(codec.write(value))
    assert codec.read(tuple(written.pop(key, None) for key in codec.keys)) == value
    assert not written, "keys that are not read"


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3),)),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2]{'b'}", ((0, 1), (2, 3))),
    ],
)
def test_replica_groups_have_three_forms(text, groups):
    module = parse_module(
        f"""HloModule m
sum {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}}
ENTRY e {{
  p = f32[4]{{0}} parameter(0)
  ROOT r = f32[4]{{0}} all-reduce(p), channel_id=1, replica_groups={text}, use_global_device_ids=true,
  to_apply=sum
}}"""
    )
    assert module.entry.root.replica_groups.groups(4) == groups
    assert fingerprint(parse_module(print_module(module))) == fingerprint(module)


@pytest.mark.parametrize(
    ("shape", "text", "value"),
    [
        ("f32[]", "-inf", -np.inf),
        ("f32[2,2]", "{ { 1, 2.5 }, { -0, nan } }", [[1, 2.5], [-0.0, np.nan]]),
        ("s32[3]", "{1,-2,3}", [1, -2, 3]),
        ("pred[2]", "{true, false}", [True, False]),
        ("c64[2]", "{(1, -2), (0, inf)}", [1 - 2j, complex(0, np.inf)]),
        ("u64[]", "18446744073709551615", 18446744073709551615),
        ("f32[2,0]", "{ { }, { } }", np.zeros((2, 0))),
        ("bf16[2]", "{0.1, 3e38}", [0.1, 3e38]),
        ("s4[2]", "{-8, 7}", [-8, 7]),
    ],
)
def test_literals(shape, text, value):
    literal = root_of(f"ROOT c = {shape} constant({text})").literal
    expected = np.asarray(value).astype(literal.dtype)
    assert literal.shape == expected.shape
    np.testing.assert_array_equal(literal.astype(np.complex128), expected.astype(np.complex128))


def test_nan_payloads_keep_their_bits():
    root = root_of("ROOT c = f32[3]{0} constant({nan, -nan, nan(0x200001)})")
    assert [hex(b) for b in root.literal.view(np.uint32)] == ["0x7fc00000", "0xffc00000", "0x7fa00001"]
    assert "{nan, -nan, nan(0x200001)}" in print_module(root.parent.module)


def test_tuple_literal():
    root = root_of("ROOT c = (f32[2], s32[]) constant(({1, 2}, 7))")
    np.testing.assert_array_equal(root.literal[0], [1, 2])
    assert root.literal[1] == 7 and "constant(({1, 2}, 7))" in print_module(root.parent.module)


def test_short_form_of_asynchronous_operations():
    module = parse_module(
        """HloModule m, num_partitions=2
sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
ENTRY e {
  p = f32[4]{0} parameter(0)
  s = ((f32[4]{0}), f32[2]{0}) reduce-scatter-start(p), channel_id=1, replica_groups={{0,1}},
    use_global_device_ids=true, dimensions={0}, to_apply=sum
  ROOT d = f32[2]{0} reduce-scatter-done(s)
}"""
    )
    verify(module)
    start = module.entry.root.operands[0]
    assert start.opcode == "async-start" and start.to_apply.root.opcode == "reduce-scatter"
    assert fingerprint(parse_module(print_module(module))) == fingerprint(module)


def test_fresh_names_never_meet_parsed_ones():
    module = parse_module(entry("a.5 = f32[] parameter(0)", "ROOT negate.9 = f32[] negate(a.5)"))
    made = module.entry.add(module.entry.root.clone([module.entry.root]))
    assert made.name == "negate.10"


ERRORS = [
    ("", "expected `HloModule name`"),
    ("HloModule m", "the module has no computation"),
    ("HloModule m\nENTRY e {\n  a = f32[] parameter(0)\n", "computation e is never closed"),
    ("HloModule m\nENTRY e {\n}", "computation e has no instructions"),
    (entry("a = f32[] parameter(0)", "b = f32[] negate(c)"), "no instruction 'c' is defined above in this"),
    (
        entry("a = f32[] parameter(0)", "a = f32[] negate(a)"),
        "instruction 'a' is defined twice in computation main",
    ),
    (entry("a = f32[] parameter(x)"), "expected the parameter's number, got 'x'"),
    (entry("a = f32[] parameter(0)", "b = f32[] frobnicate(a)"), "unknown opcode 'frobnicate'"),
    (
        entry("a = f32[] parameter(0)", "b = f32[] neggate(a)"),
        "unknown opcode 'neggate'; did you mean 'negate'?",
    ),
    (entry("a = f32[] parameter(0)", "b = f32[] add(a)"), "add takes 2 operands, got 1"),
    (entry("a = f32[2] parameter(0)", "b = f32[2] reverse(a)"), r"reverse b needs the attribute dimensions="),
    (
        entry("a = f32[2] parameter(0)", "b = f32[2] reverse(a), dimensions={x}"),
        "expected a list of integers",
    ),
    (
        entry("a = f32[2] parameter(0)", "b = f32[2] reverse(a), dimensions="),
        "attribute 'dimensions' has no value",
    ),
    (entry("a = f32[2] parameter(0)", "b = pred[2] compare(a, a), direction=XX"), "expected one of EQ, NE"),
    (
        entry("a = f32[2] parameter(0)", "b = f32[2] call(a), to_apply=g"),
        "b calls computation 'g', which the module",
    ),
    (entry("a = f32[2] constant({1})"), r"the constant has 1 values, its shape f32\[2\] has 2"),
    (entry("a = f32[2,2] constant({{1,2,3,4}})"), "the braces of the constant do not nest as its shape"),
    (entry("a = s8[] constant(300)"), "300 is outside -128..127"),
    (entry("a = f32[] constant(abc)"), "a value of the constant is no f32"),
    (entry("a = f32[9] constant({...})"), "was left out of the text; print the module with large constants"),
    (entry("a = f32[2 parameter(0)"), "expected a shape"),
    (entry("ROOT a = f32[] parameter(0)", "ROOT b = f32[] negate(a)"), "computation main has two roots"),
    (entry("a f32[] parameter(0)"), "expected an instruction such as"),
    (entry("a = f32[] parameter(0), x=1, x=2"), "attribute 'x' is given twice"),
    (entry('a = f32[] parameter(0), x="open'), "this string never ends"),
    (
        "HloModule m, replica_count=x\nENTRY e {\n a = f32[] parameter(0)\n}",
        "expected a positive number of 32 bits, got 'x'",
    ),
    (entry("a = f32[9223372036854775807] parameter(0)"), "more bytes than 63 bits count"),
    (entry("a = f32[2] parameter(0)", "b = f32[2] reverse(a), dimensions={18446744073709551616}"), "64 bits"),
    (entry("a = f32[2] parameter(-1)"), "expected the parameter's number, got '-1'"),
    ("HloModule m\nf -> f32[] {\n}", "expected `{` and the computation's instructions"),
]


@pytest.mark.parametrize(("text", "problem"), ERRORS)
def test_malformed_text(text, problem):
    with pytest.raises(HloError, match=problem):
        parse_module(text)


def test_errors_show_file_line_and_caret():
    text = entry("a = f32[2]{0} parameter(0)", "b = f32[2]{0} add(a, missing)")
    with pytest.raises(HloError) as error:
        parse_module(text, "step.hlo")
    first, source, caret = str(error.value).splitlines()
    assert first.startswith("step.hlo:5:24: no instruction 'missing' is defined above")
    assert source[caret.index("^") :].startswith("missing")
