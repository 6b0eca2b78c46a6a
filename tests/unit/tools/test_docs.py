"""The generated pages say what the code says."""

from __future__ import annotations

import dataclasses
import re

import pytest
from absl import flags

from mpmd.compile.passes import PASSES as HLO_PASSES
from mpmd.flags import option_docs, options_from_flags, pass_flag, pipeline_flag
from mpmd.options import USER_DEFAULTS, PipelineOptions
from mpmd.passes import PASSES
from mpmd.tools.docs import ROOT, flags_page, hlo_passes_page, passes_page, stale


def test_the_generated_pages_are_current():
    assert [str(path.relative_to(ROOT)) for path in stale()] == [], "run `make docs`"


@pytest.mark.parametrize("page", [passes_page, hlo_passes_page])
def test_a_pass_has_its_contract_as_a_list_and_its_example_as_code(page):
    text = page()
    entries = [entry for entry in text.split("\n### ") if entry.partition("\n")[0] in {*PASSES, *HLO_PASSES}]
    assert len(entries) >= 50
    for entry in entries:
        prose = "".join(entry.split("```")[::2])
        assert {"Requires", "Ensures", "Cost", "Source"} <= set(
            re.findall(r"^\* \*\*(\w+):\*\* \S", prose, re.MULTILINE)
        )
        assert "Attributes:" not in entry and " -> " not in re.sub(r"`[^`]*`", "", prose)


def test_every_option_of_the_pipelines_is_documented():
    docs = option_docs(PipelineOptions)
    missing = [f.name for f in dataclasses.fields(PipelineOptions) if not docs.get(f.name)]
    assert missing == []


@pytest.mark.parametrize("name", [*PASSES, *HLO_PASSES])
def test_every_option_of_a_pass_has_a_flag_and_a_meaning(name):
    kind = PASSES.get(name) or HLO_PASSES[name]
    docs = option_docs(kind)
    for field in dataclasses.fields(kind):
        assert pass_flag(kind, field.name) in flags.FLAGS
        assert docs.get(field.name), f"no {field.name} under Attributes"


def test_the_page_lists_the_flags_that_there_are():
    rows = re.findall(r"^\| `--(\w+)` \|", flags_page(), re.MULTILINE)
    ours = flags.FLAGS.flags_by_module_dict()["mpmd.flags"]
    assert sorted(rows) == sorted(flag.name for flag in ours)


def test_flags_reach_the_options():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    remat = pass_flag(PASSES["mpmd-remat-fragment"], "merge_remat_fragments")
    flags.FLAGS[pipeline_flag("max_clones")].value = 7
    flags.FLAGS[remat].value = "true"
    try:
        options = options_from_flags()
    finally:
        flags.FLAGS[pipeline_flag("max_clones")].value = 1
        flags.FLAGS[remat].value = None
    assert options.max_clones == 7
    assert options.pass_options == ("mpmd-remat-fragment{merge-remat-fragments=true}",)
    assert options_from_flags() == USER_DEFAULTS
