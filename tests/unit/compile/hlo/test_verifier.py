"""The verifier and shape inference: each broken rule by its first line."""

import re

import pytest

from mpmd.compile.hlo import HloBuilder, HloInstruction, HloModule, array, parse_module, print_module, verify
from mpmd.errors import HloError


def problems_of(module, **options) -> str:
    with pytest.raises(HloError) as error:
        verify(module, **options)
    return str(error.value)


def entry(*lines: str, before: str = "", header: str = "HloModule m") -> str:
    return "\n".join([header, before, "ENTRY main {", *(f"  {line}" for line in lines), "}", ""])


REDUCER = """add {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT z = f32[] add(x, y)
}"""
A = "a = f32[2,3]{1,0} parameter(0)"
B = "b = f32[3,4]{1,0} parameter(1)"
I = "i = s32[2,1]{1,0} parameter(1)"
DOT = "ROOT d = f32[2,4]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"

WRONG = [
    ([A, "r = f32[3,2]{1,0} negate(a)"], r"its shape should be f32\[2,3\], but is f32\[3,2\]"),
    (
        [A, B, "r = f32[2,3]{1,0} add(a, b)"],
        r"operands of add must have equal shapes, got f32\[2,3\] and f32\[3,4\]",
    ),
    (
        [
            "x = f32[8]{0} parameter(0)",
            "o = f32[] constant(0)",
            "r = f32[4]{0} reduce-window(x, o), window={size=2 stride=0}, to_apply=add",
        ],
        "stride of the window of reduce-window must be positive in dim 0, got 0",
    ),
    (
        [A, "r = f32[2,3]{1,0} reduce-precision(a), exponent_bits=0, mantissa_bits=3"],
        "exponent_bits of reduce-precision must be at least 1, got 0",
    ),
    (
        ["x = c64[8]{0} parameter(0)", "r = c64[8]{0} fft(x), fft_type=FFT, fft_length={4}"],
        r"FFT of lengths \(4,\) takes last dims \(4,\), got c64\[8\]",
    ),
    (
        [
            "x = u64[2]{0} parameter(0)",
            "r = (u64[3]{0}, u32[4]{0}) rng-bit-generator(x), algorithm=rng_default",
        ],
        r"rng-bit-generator must give the new state as u64\[2\]",
    ),
    ([A, "r = f32[2,3]{1,0} and(a, a)"], r"and takes booleans or integers, got f32\[2,3\]"),
    ([I, "r = s32[2,1]{1,0} tanh(i)"], r"tanh takes floating-point or complex values, got s32\[2,1\]"),
    ([A, "r = f32[2,3]{1,0} shift-left(a, a)"], r"shift-left takes integers"),
    (
        [A, B, DOT.replace("rhs_contracting_dims={0}", "rhs_contracting_dims={1}")],
        "must have equal sizes, got 3 and 4",
    ),
    ([A, B, DOT.replace("{1}", "{7}")], "lhs contracting dims of dot names dim 7, but there are 2 dims"),
    ([A, "r = f32[7]{0} reshape(a)"], r"reshape from f32\[2,3\] to f32\[7\] changes the number of elements"),
    ([A, "r = f32[2,2]{1,0} transpose(a), dimensions={0,0}"], "must be a permutation of the 2 operand dims"),
    (
        [A, "r = f32[5,3]{1,0} broadcast(a), dimensions={0,1}"],
        "maps operand dim 0 .* to result dim 0 .*: sizes differ",
    ),
    (
        [A, "r = f32[2,3]{1,0} slice(a), slice={[0:2], [1:9]}"],
        r"slice \[1:9:1\] does not fit dim 1 of f32\[2,3\]",
    ),
    (
        [A, "v = s32[] constant(0)", "r = f32[2,3]{1,0} pad(a, v), padding=0_0x0_0"],
        r"padding value .* must be f32\[\]",
    ),
    (
        [A, "v = f32[] constant(0)", "r = f32[2,3]{1,0} pad(a, v), padding=0_0"],
        r"padding must name the 2 dims of f32\[2,3\], got 1",
    ),
    (
        [A, B, "r = f32[5,3]{1,0} concatenate(a, b), dimensions={0}"],
        r"must agree with f32\[2,3\] except in dim 0",
    ),
    ([A, "v = f32[] constant(0)", "r = f32[2]{0} reduce(a, v), dimensions={5}, to_apply=add"], "names dim 5"),
    (
        [A, "v = f32[2] constant({0,0})", "r = f32[2]{0} reduce(a, v), dimensions={1}, to_apply=add"],
        r"must be f32\[\]",
    ),
    ([A, "r = (f32[2,3], f32[2,3]) tuple(a)"], r"its shape should be \(f32\[2,3\]\)"),
    (
        [A, "t = (f32[2,3]) tuple(a)", "r = f32[2,3] get-tuple-element(t), index=3"],
        "get-tuple-element 3 does not exist",
    ),
    (
        [A, "r = f32[2,3] call(a), to_apply=add"],
        r"call calls add \(f32\[\], f32\[\]\) -> f32\[\] with \(f32\[2,3\]\)",
    ),
    ([A, "r = f32[2,3] select(a, a, a)"], r"the first operand of select must be pred"),
    ([A, "r = bf16[2,3] bitcast(a)"], r"bitcast .* changes the size from 192 to 96 bits"),
    (
        [A, "c = f32[2] constant({1,2})", "r = f32[2,3] clamp(c, a, c)"],
        r"bound 0 of clamp must be f32\[\] or f32\[2,3\]",
    ),
    ([A, "r = (f32[2,2], s32[2,2]) topk(a), k=9, largest=true"], r"topk cannot take 9 of f32\[2,3\]"),
    ([A, "r = f32[2,3] sort(a), dimensions={1}, to_apply=add"], "the comparator of sort must be"),
    ([A, "r = f32[2,3] while(a), condition=add, body=add"], "while calls add"),
    (
        ["a = f32[2,3] parameter(0)", "b = f32[2,3] parameter(2)", "r = f32[2,3] add(a, b)"],
        r"numbered \[0, 2\]",
    ),
    (
        [A, "r = f32[4,3] all-gather(a), dimensions={0}, replica_groups={{0,1},{2}}"],
        "groups of all-gather must have equal",
    ),
    (
        [A, "r = f32[4,3] all-gather(a), dimensions={0}, replica_groups={{0,1,2},{3,4,5}}"],
        "its shape should be f32.6,3.",
    ),
    (
        [A, "r = f32[2,3] all-reduce(a), replica_groups={{0,2}}, to_apply=add"],
        "replica_groups must name each of 0 to n-1 once",
    ),
    (
        [A, "r = f32[2,3] all-reduce(a), replica_groups={{0,0}}, to_apply=add"],
        "replica_groups must name each of 0 to n-1 once",
    ),
    (
        [A, "r = f32[2,3] all-reduce(a), replica_groups={{0,1},{}}, to_apply=add"],
        "groups that are not empty",
    ),
    (
        [A, "r = f32[2,3] all-reduce(a), replica_groups={{0}}, use_global_device_ids=true, to_apply=add"],
        "use_global_device_ids needs a channel_id",
    ),
    ([A, "d = f32[2,3] all-reduce-done(a)"], "all-reduce-done must take a all-reduce-start, got parameter a"),
    (
        [
            A,
            "c = c64[3,2] constant({...})".replace("...", "{0,0},{0,0},{0,0}"),
            "r = f32[2,2] dot(a, c), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        ],
        "dot takes two real or two complex operands",
    ),
    (
        ["t = token[] after-all()", "r = f32[2] infeed(t)"],
        "infeed must give a tuple of values and a token",
    ),
    (
        [A, 'r = f32[2,3] custom-call(a), custom_call_target="f", operand_layout_constraints={}'],
        "operand_layout_constraints must list 1 shapes",
    ),
    (
        [A, 'r = f32[] custom-call(a), custom_call_target="f", operand_layout_constraints={f32[3,2]{1,0}}'],
        r"operand_layout_constraints must list f32\[2,3\] for operand 0",
    ),
    (
        [A, "r = f32[2,3] collective-permute(a, a), source_target_pairs={{0,0}}, slice_sizes={{1,3}}"],
        "takes input, output and the starts in both, got 2 operands",
    ),
    (
        [
            A,
            "s = ((f32[2,3]), f32[2,3], s32[]) negate-start(a)",
            'r = f32[2,3] negate-done(s), async_execution_thread="t"',
        ],
        "s runs on the thread 'main'",
    ),
]


@pytest.mark.parametrize(("lines", "problem"), WRONG)
def test_broken_operations(lines, problem):
    module = parse_module(entry(*lines, before=REDUCER))
    assert re.search(problem, problems_of(module))


GROUPED = """HloModule m, {header}

ENTRY main {{
  a = f32[4,8]{{1,0}} parameter(0)
  ROOT g = f32[{dims}]{{1,0}} all-gather(a), dimensions={{0}}, {groups}
}}
"""


@pytest.mark.parametrize(
    ("header", "groups", "times"),
    [
        ("replica_count=2", "replica_groups={}", 2),
        ("replica_count=4", "replica_groups={{0,1},{2,3}}", 2),
        ("replica_count=2, num_partitions=4", "replica_groups={}, channel_id=1", 8),
        ("replica_count=2, num_partitions=4", "replica_groups={{0},{1}}, channel_id=1", 4),
        ("num_partitions=4", "replica_groups=[2,2]<=[4], channel_id=1, use_global_device_ids=true", 2),
    ],
)
def test_groups_fit_the_devices_and_the_shapes(header, groups, times):
    verify(parse_module(GROUPED.format(header=header, groups=groups, dims=f"{4 * times},8")))
    for wrong in {1, 3, 16} - {times}:
        problems_of(parse_module(GROUPED.format(header=header, groups=groups, dims=f"{4 * wrong},8")))


def test_groups_name_all_devices():
    text = GROUPED.format(header="replica_count=4", groups="replica_groups={{0,1}}", dims="8,8")
    assert "replica_groups must name 4 ids, got {{0,1}}" in problems_of(parse_module(text))


def test_a_computation_is_started_once():
    text = entry(
        A,
        "s = ((f32[2,3]), f32[2,3], s32[]) async-start(a), calls=body",
        "t = ((f32[2,3]), f32[2,3], s32[]) async-start(a), calls=body",
        before="body {\n  x = f32[2,3] parameter(0)\n  ROOT n = f32[2,3] negate(x)\n}\n",
    )
    assert "async-start t in main: s starts the same computation" in problems_of(parse_module(text))


def test_several_problems_are_reported_together():
    module = parse_module(entry(A, "x = f32[9]{0} negate(a)", "y = f32[8]{0} negate(a)"))
    text = problems_of(module)
    assert text.startswith(
        "module m breaks 2 rules:\n  1. HLO text:5:3: negate x in main: its shape should be f32[2,3], but is"
    )
    assert "x = f32[9]{0} negate(a)" in text and "2. HLO text:6:3: negate y in main" in text


def test_edges_are_counted_on_both_sides():
    module = parse_module(entry(A, "n = f32[2,3]{1,0} negate(a)", "ROOT r = f32[2,3]{1,0} add(n, n)"))
    n = module.entry.root.operands[0]
    n.users[module.entry.root] = 1
    assert "negate n in main: it counts r as a user 1 times, which reads it 2 times" in problems_of(module)
    n.users.clear()
    assert "add r in main: its operand n does not count it as a user" in problems_of(module)


def test_an_instruction_made_but_never_added_is_found():
    module = parse_module(entry(A, "ROOT n = f32[2,3]{1,0} negate(a)"))
    root = module.entry.root
    made = HloInstruction("abs", root.shape, [root])
    assert "its user abs.-1 is in another computation, was removed, or was never added" in problems_of(module)
    module.entry.add(made)
    verify(module)


def test_schedule_order():
    text = entry(
        A,
        "n = f32[2,3]{1,0} negate(a)",
        "ROOT r = f32[2,3]{1,0} abs(n)",
        header="HloModule m, is_scheduled=true",
    )
    module = parse_module(text)
    verify(module)
    module.entry.reorder(module.entry.instructions[::-1])
    assert "abs r in main: the schedule runs it before n, which it needs" in problems_of(module)


def test_layouts_are_required_only_after_layout_assignment():
    module = parse_module(entry("a = f32[2,3] parameter(0)", "ROOT n = f32[2,3] negate(a)"))
    verify(module)
    assert "negate n in main: f32[2,3] has no layout" in problems_of(module, layouts=True)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ("input_output_alias={ {}: (3, {}, may-alias) }", "names nothing: there is no parameter 3"),
        ("input_output_alias={ {1}: (0, {}, may-alias) }", "names nothing: shape"),
        ("buffer_donor={ (7, {}) }", "buffer donor (7, {}) names no parameter; there are 1"),
        (
            "entry_computation_layout={(f32[9]{0})->f32[2]{0}}",
            "its entry layouts do not fit the parameters",
        ),
    ],
)
def test_border(header, problem):
    module = parse_module(
        entry("a = f32[2]{0} parameter(0)", "ROOT n = f32[2]{0} negate(a)", header=f"HloModule m, {header}")
    )
    assert problem in problems_of(module)


def test_aliases_must_have_one_size():
    header = "HloModule m, input_output_alias={ {}: (0, {}, may-alias) }"
    module = parse_module(
        entry("a = f32[4]{0} parameter(0)", "ROOT n = f32[2]{0} slice(a), slice={[0:2]}", header=header)
    )
    assert "joins f32[4]{0} and f32[2]{0}, which differ in size" in problems_of(module)


def test_missing_parts():
    module = HloModule("m")
    assert problems_of(module) == "module m has no entry computation"
    module.set_entry(module.create_computation("main"))
    assert problems_of(module) == "computation main has no root"


def test_literal_must_fit():
    module = parse_module(entry("ROOT c = f32[2]{0} constant({1,2})"))
    module.entry.root.literal = module.entry.root.literal[:1]
    assert "the literal has shape f32[1]" in problems_of(module)
    module.entry.root.literal = module.source = None
    assert problems_of(module) == "constant c in main: it has no literal"
    with pytest.raises(HloError, match="constant c has no literal"):
        print_module(module)


# -- the builder ------------------------------------------------------------------------------------


@pytest.fixture
def builder():
    module = HloModule("m")
    made = HloBuilder.create(module, "main")
    module.set_entry(made.computation)
    return made


def test_builder_infers_shapes(builder):
    a, b = builder.parameter(array("f32", (2, 3, 4))), builder.parameter(array("f32", (4, 5)))
    assert builder.dot(a, b).shape is array("f32", (2, 3, 5))
    assert builder.compare(a, a, "LT").shape is array("pred", (2, 3, 4))
    assert builder.transpose(a, (2, 0, 1)).shape is array("f32", (4, 2, 3))
    assert builder.dynamic_slice(a, [builder.constant(0, "s32")] * 3, (1, 2, 3)).shape is array(
        "f32", (1, 2, 3)
    )
    assert builder.slice(a, (0, 0, 0), (2, 3, 4), (1, 2, 3)).shape is array("f32", (2, 2, 2))
    assert builder.element(builder.tuple([a, b]), 1) is b
    assert builder.full(1.5, "bf16", (3,)).shape is array("bf16", (3,))
    builder.build(builder.tuple([a]))
    verify(builder.computation.module)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda b, a: b.add("frobnicate", a), "unknown opcode 'frobnicate'"),
        (
            lambda b, a: b.add("negate", a, dimensions=(0,)),
            "negate has no attribute 'dimensions'; it has none",
        ),
        (lambda b, a: b.add("add", a, b.constant(1, "s32")), "operands of add must have equal shapes"),
        (
            lambda b, a: b.add("negate", a, shape=array("f32", (9,))),
            r"negate gives f32\[2,3\], not the stated f32\[9\]",
        ),
        (
            lambda b, a: b.add("convert", a),
            "the shape of convert does not follow from its operands: it must be stated",
        ),
    ],
)
def test_builder_refuses(builder, make, problem):
    a = builder.parameter(array("f32", (2, 3)))
    with pytest.raises(HloError, match=problem):
        make(builder, a)


def test_builder_refuses_operands_of_other_computations(builder):
    other = HloBuilder.create(builder.computation.module, "other")
    stranger = other.parameter(array("f32"))
    with pytest.raises(HloError, match=r"operand parameter.0 of negate is not in main"):
        builder.add("negate", stranger)
    assert not stranger.users


def test_a_broken_rule_shows_its_line_of_the_text():
    module = parse_module(
        entry(A, "n = f32[2,3]{1,0} negate(a)", "  ROOT r = f32[3,2] negate(n)"), "model.hlo"
    )
    with pytest.raises(HloError) as error:
        verify(module)
    assert str(error.value) == (
        "model.hlo:6:5: negate r in main: its shape should be f32[2,3], but is f32[3,2]\n"
        "      ROOT r = f32[3,2] negate(n)\n"
        "      ^"
    )


def test_what_was_in_no_text_is_printed():
    module = parse_module(entry(A, "ROOT r = f32[2,3]{1,0} negate(a)"))
    root = module.entry.root
    module.entry.set_root(module.entry.add(HloInstruction("negate", array("f32", (3, 2)), [root], {}, ())))
    assert re.search(
        r"^negate \S+ in main: its shape should be .*\n    negate.* negate.r.", problems_of(module)
    )
