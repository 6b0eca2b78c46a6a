"""The steps of all test models, and HLO text that goes to XLA and back."""

from __future__ import annotations

import jax
import pytest

from examples.workloads.flax_models import FLAX_MODELS
from examples.workloads.models import MODELS
from mpmd.compile.hlo import fingerprint, parse_module, print_module, verify
from tests.support.xla_hlo import XlaWorker

EVERY = {**MODELS, **FLAX_MODELS}
QUICK = ("skip", "custom_gradient")
NAMES = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in EVERY]


def step_of(name: str):
    """A model's loss and gradients, and their arguments."""
    params, loss, batch = EVERY[name].build(2)
    return jax.jit(jax.value_and_grad(loss), keep_unused=True), (params, *batch)


def round_trips(text: str, xla: XlaWorker, name: str) -> None:
    """The text reads, prints and reads again; XLA reads our print, and we read XLA's print of it."""
    module = parse_module(text, name)
    verify(module)
    printed = print_module(module)
    again = parse_module(printed)
    assert print_module(again) == printed
    assert fingerprint(again) == fingerprint(module)
    assert fingerprint(parse_module(xla.parse(printed))) == fingerprint(module)
