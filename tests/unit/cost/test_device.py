"""Seconds of products and messages by the descriptions of devices, in numbers."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from mpmd.cost.device import H200, HOST, Device, device_of
from mpmd.errors import ConfigError


def test_rates_of_a_core():
    assert HOST.products_seconds(101.2e9) == pytest.approx(1.0)  # 92 % of its peak
    assert HOST.products_seconds(202.4e9, jnp.dtype("bfloat16")) == pytest.approx(1.0)
    assert HOST.products_seconds(50.6e9, "f64") == pytest.approx(1.0)
    assert HOST.products_seconds(101.2e9, jnp.dtype("int8")) == pytest.approx(
        1.0
    )  # without a rate of its own
    assert HOST.element_rate == pytest.approx(55e9)
    assert HOST.bandwidth == 12e9


def test_rates_of_a_gpu():
    assert H200.products_seconds(62e12) == pytest.approx(1.0)
    assert H200.products_seconds(798e12, jnp.dtype("float16")) == pytest.approx(1.0)
    assert H200.element_rate == pytest.approx(132 * 1.98e9 * 128)


@pytest.mark.parametrize(("device", "seconds"), [(HOST, 2e-5 + 0.5), (H200, 1e-5 + 0.08)])
def test_messages(device: Device, seconds: float):
    assert device.message_seconds(4e9) == pytest.approx(seconds)
    latency = device.message_seconds(0)
    assert device.message_seconds(4e9, messages=3) == pytest.approx(seconds + 2 * latency)


def test_products_of_one_rate():
    slow = H200.with_products(1e9)
    assert slow.products_seconds(2e9) == slow.products_seconds(2e9, "bf16") == 2.0
    assert slow.bandwidth == H200.bandwidth


def test_devices_by_platform_and_name():
    assert device_of("cpu") is device_of("something else") is HOST
    assert device_of("gpu") is Device.parse("H200") is H200
    with pytest.raises(ConfigError, match="there is no description of a device 'H201'"):
        Device.parse("H201")
