"""Calls that are wrong: a type checker finds an error in each line marked so, and in no other."""

import jax

import mpmd
from tests.support.typing.user_step import config, topology, train_step


def use(params: dict[str, jax.Array], x: jax.Array) -> None:
    train_step(params)  # error
    train_step(params, x, x)  # error
    train_step(params, "x")  # error
    train_step.lower(params, x).compiled()  # error
    train_step.lower(params, x).compile(runtime=4)  # error
    params, _loss, _more = train_step(params, x)  # error
    mpmd.jit(train_step, config, donate_argnum=0)  # error
    mpmd.make_config(topology, {"encode": "m0"}, scheduled="1f1b")  # error
    mpmd.fori_loop("4", lambda i, x: x, x)  # error
    mpmd.pmap(train_step)  # error
