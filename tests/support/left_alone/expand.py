"""For expanders."""

from __future__ import annotations

from tests.support.left_alone.text import MAXIMUM, SUM, entry, scalars

_PAIRS = (
    "f {{\n  a = {t}[] parameter(0)\n  i = s32[] parameter(1)\n  b = {t}[] parameter(2)\n"
    "  j = s32[] parameter(3)\n"
    "{body}\n}}\n"
)
_BEST = """  more = pred[] compare(a, b), direction=GT{total}
  same = pred[] compare(a, b), direction=EQ
  before = pred[] compare(i, j), direction={before}
  tie = pred[] and(same, before)
  first = pred[] or(more, tie)
  v = {t}[] select(first, a, b)
  k = s32[] select(first, i, j)
  ROOT r = ({t}[], s32[]) tuple(v, k)"""
_SQUARED = """  more = pred[] compare(a, b), direction=GT
  same = pred[] compare(a, b), direction=EQ
  before = pred[] compare(i, j), direction=LT
  tie = pred[] and(same, before)
  first = pred[] or(more, tie)
  c = s32[] multiply(a, a)
  d = s32[] multiply(b, b)
  v = s32[] select(first, c, d)
  k = s32[] select(first, i, j)
  ROOT r = (s32[], s32[]) tuple(v, k)"""


def _argmax(dtype: str, body: str) -> tuple[str, str]:
    lines = (
        f"  x = {dtype}[3,5] parameter(0)\n  p = s32[3,5] iota(), iota_dimension=1\n"
        f"  m = {dtype}[] constant(-1)\n  z = s32[] constant(0)\n"
        f"  ROOT r = ({dtype}[3], s32[3]) reduce(x, p, m, z), dimensions={{1}}, to_apply=f"
    )
    return "hlo-argmax-rewriter", entry(lines, _PAIRS.format(t=dtype, body=body))


def _best(dtype: str, before: str = "LT", total: str = "") -> str:
    return _BEST.format(t=dtype, before=before, total=total)


def _window(
    window: str, dims: str = "6", out: str = "6", init: str = "0", by: str = "sum"
) -> tuple[str, str]:
    return "hlo-reduce-window-rewriter", entry(
        f"  x = f32[{dims}] parameter(0)\n  z = f32[] constant({init})\n"
        f"  ROOT r = f32[{out}] reduce-window(x, z), window={{{window}}}, to_apply={by}",
        SUM + MAXIMUM + scalars("other", "f32", "add(b, b)"),
    )


def _pooled(window: str, out: str, by: str = "sum", options: str = "") -> tuple[str, str]:
    return "hlo-select-and-scatter-expander" + options, entry(
        f"  x = f32[8] parameter(0)\n  s = f32[{out}] parameter(1)\n  z = f32[] constant(0)\n"
        f"  ROOT r = f32[8] select-and-scatter(x, s, z), window={{{window}}}, select=ge, scatter={by}",
        SUM + MAXIMUM + scalars("ge", "f32", "compare(a, b), direction=GE", "pred"),
    )


def _convolution(
    image: str, kernel: str, out: str, window: str, more: str = "", labels: str = "b0f_0io->b0f"
) -> str:
    return entry(
        f"  x = f32[{image}] parameter(0)\n  k = f32[{kernel}] parameter(1)\n"
        f"  ROOT r = f32[{out}] convolution(x, k), window={{{window}}}, dim_labels={labels}{more}"
    )


_TO_DOT = "hlo-convolution-to-dot"
_UPDATES = (
    "HloModule m\n\nboth {{\n  a = {2}[] parameter(0)\n  b = {2}[] parameter(1)\n"
    "  ROOT c = {2}[] {0}(a, b)\n}}\n\n"
    "ENTRY main {{\n  x = {2}[9] parameter(0)\n  i = s32[6,1] parameter(1)\n  u = {2}[6] parameter(2)\n"
    "  ROOT r = {2}[9] scatter(x, i, u), update_window_dims={{}}, inserted_window_dims={{0}}, "
    "scatter_dims_to_operand_dims={{0}}, index_vector_dim=1, {1}to_apply=both\n}}\n"
)

LEFT = {
    "the last of equal values": _argmax("s32", _best("s32", "GT")),
    "a maximum that knows no NaN": _argmax("f32", _best("f32")),
    "a maximum in total order": _argmax("f32", _best("f32", total=", type=TOTALORDER")),
    "the square of a maximum": _argmax("s32", _SQUARED),
    "a running sum from one": _window("size=6 pad=5_0", init="1"),
    "a running double": _window("size=6 pad=5_0", by="other"),
    "windows that are not all before": _window("size=4 pad=5_0", out="8"),
    "windows at every other place of spread elements": _window("size=6 pad=5_0 stride=2 lhs_dilate=2"),
    "running sums along two dims": _window("size=6x4 pad=5_0x3_0", "6,4", "6,4"),
    "windows that reach to both sides": _window("size=6 pad=3_2"),
    "the gradient of pooling with holes": _pooled("size=2 rhs_dilate=2", "6"),
    "the gradient of pooling of a part": _pooled("size=2 pad=-1_0", "6"),
    "a largest gradient of pooling": _pooled("size=2 stride=2", "4", "largest"),
    "pooling with large windows": _pooled("size=4 stride=4", "2", options=" most=2"),
    "a map by a reduction": (
        "hlo-map-inliner",
        entry(
            "  x = f32[4] parameter(0)\n  ROOT r = f32[4] map(x), dimensions={0}, to_apply=f",
            SUM + "f {\n  p = f32[] parameter(0)\n  w = f32[3] broadcast(p), dimensions={}\n"
            "  ROOT s = f32[] reduce(w, p), dimensions={0}, to_apply=sum\n}\n",
        ),
    ),
    "a comparison of numbers": (
        "hlo-comparison-expander",
        entry("  x = f32[4] parameter(0)\n  ROOT r = pred[4] compare(x, x), direction=LE"),
    ),
    "bits of complex numbers": (
        "hlo-bitcast-convert-expander",
        entry("  x = c64[4] parameter(0)\n  ROOT r = f32[4,2] bitcast-convert(x)"),
    ),
    "bits of as many bits": (
        "hlo-bitcast-convert-expander",
        entry("  x = f32[4] parameter(0)\n  ROOT r = s32[4] bitcast-convert(x)"),
    ),
    "rounding of eight bits": (
        "hlo-reduce-precision-expander",
        entry(
            "  x = f8e5m2[4] parameter(0)\n"
            "  ROOT r = f8e5m2[4] reduce-precision(x), exponent_bits=4, mantissa_bits=1"
        ),
    ),
    "random rounding to floats": (
        "hlo-stochastic-convert-expander",
        entry(
            "  x = f32[4] parameter(0)\n  n = u32[4] parameter(1)\n"
            "  ROOT r = bf16[4] stochastic-convert(x, n)"
        ),
    ),
    "a product by another algorithm": (
        "hlo-dot-algorithm-rewriter",
        entry(
            "  x = f32[2,3] parameter(0)\n  y = f32[3,4] parameter(1)\n"
            "  ROOT r = f32[2,4] dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
            "algorithm=dot_f32_f32_f32"
        ),
    ),
    "windows of a convolution that overlap": (
        _TO_DOT,
        _convolution("2,8,3", "3,3,4", "2,3,4", "size=3 stride=2"),
    ),
    "a convolution of padding": (_TO_DOT, _convolution("2,8,3", "2,3,4", "2,5,4", "size=2 stride=2 pad=2_0")),
    "a convolution of padding behind": (
        _TO_DOT,
        _convolution("2,8,3", "2,3,4", "2,5,4", "size=2 stride=2 pad=0_2"),
    ),
    "a convolution of spread elements": (
        _TO_DOT,
        _convolution("2,4,3", "2,3,4", "2,3,4", "size=2 stride=2 lhs_dilate=2"),
    ),
    "a convolution backwards": (
        _TO_DOT,
        _convolution("2,8,3", "2,3,4", "2,4,4", "size=2 stride=2 rhs_reversal=1"),
    ),
    "a convolution of groups": (
        _TO_DOT,
        _convolution("2,8,4", "2,2,4", "2,4,4", "size=2 stride=2", ", feature_group_count=2"),
    ),
    "a convolution of groups of the batch": (
        _TO_DOT,
        _convolution("2,8,4", "2,4,4", "1,4,4", "size=2 stride=2", ", batch_group_count=2"),
    ),
    "a start that others read": (
        "hlo-async-expander",
        entry(
            "  x = f32[4] parameter(0)\n  s = (f32[4], f32[4], u32[]) copy-start(x)\n"
            "  d = f32[4] copy-done(s)\n  o = f32[4] get-tuple-element(s), index=0\n"
            "  ROOT r = (f32[4], f32[4]) tuple(d, o)"
        ),
    ),
    "products of neighbouring dims": (
        "hlo-dot-decomposer",
        entry(
            "  x = f32[2,3,4] parameter(0)\n  y = f32[3,4,5] parameter(1)\n"
            "  ROOT r = f32[2,5] dot(x, y), lhs_contracting_dims={1,2}, rhs_contracting_dims={0,1}"
        ),
    ),
    "a large product that has an order": (
        "hlo-dot-padding",
        entry(
            "  x = bf16[256,250] parameter(0)\n  y = bf16[250,128] parameter(1)\n"
            "  n = bf16[256,250] negate(x)\n"
            "  d = bf16[256,128] dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
            "control-predecessors={n}\n  ROOT r = (bf16[256,250], bf16[256,128]) tuple(n, d)"
        ),
    ),
    "updates at different places": (
        "hlo-scatter-widener",
        _UPDATES.format("add", "unique_indices=true, ", "bf16"),
    ),
    "updates of four bytes": ("hlo-scatter-widener", _UPDATES.format("add", "", "f32")),
    "updates that are multiplied": ("hlo-scatter-widener", _UPDATES.format("multiply", "", "bf16")),
    "narrow numbers that only move": (
        "hlo-narrow-type-expander",
        entry("  x = s4[4,2] parameter(0)\n  ROOT r = s4[2,4] transpose(x), dimensions={1,0}"),
    ),
}
