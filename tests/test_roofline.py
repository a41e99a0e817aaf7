"""Utilisation and rooflines: by stated conventions, against stated peaks."""

import jax
import jax.numpy as jnp
import pytest

from xform import Device, causal, cost, device, flex_attention, hfu, mfu, roofline
from xform._devices import DEVICES

S = jax.ShapeDtypeStruct
x = S((4096, 4096), jnp.bfloat16)
product = cost(lambda x: x @ x)(x)


def test_mfu_is_the_share_of_the_peak():
    found = mfu(product, 1e-3, "H200")
    assert found == pytest.approx(2 * 4096**3 / 1e-3 / 989.4e12)
    assert str(found).startswith("MFU 13.9% (model FLOPs")
    assert f"{found:.0%}" == "14%"


def test_more_than_the_device_can_do_raises():
    with pytest.raises(ValueError, match=r"MFU would be 139%.*block_until_ready"):
        mfu(product, 1e-4, "H200")


def test_hfu_counts_recompute_and_mfu_does_not():
    def loss(w, x):
        return (jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w)))(x, w) ** 2).sum()

    w, x = S((64, 64), jnp.float32), S((32, 64), jnp.float32)
    costs = cost(jax.grad(loss))(w, x)
    one = 2 * 32 * 64 * 64
    assert mfu(costs, 1.0, "H200") == pytest.approx(2 * one / 494.7e12)
    assert hfu(costs, 1.0, "H200") == pytest.approx(3 * one / 494.7e12)


def test_mfu_counts_half_of_causal_attention():
    q = S((1, 4096, 2, 64), jnp.bfloat16)
    costs = cost(lambda q: flex_attention(q, q, q, mask_mod=causal()))(q)
    assert mfu(costs, 1.0, "H200") == pytest.approx(2 * 4096**2 * 64 * 2 / 989.4e12)
    assert hfu(costs, 1.0, "H200") > mfu(costs, 1.0, "H200")


def test_kinds_have_their_own_peaks():
    f = lambda x, y: (x @ x, jnp.matmul(y, y, precision="highest"))
    y = S((512, 512), jnp.float32)
    expected = 2 * 4096**3 / 312e12 + 2 * 512**3 / 19.5e12
    assert mfu(cost(f)(x, y), 1.0, "A100") == pytest.approx(expected)


def test_unknown_kind_and_unknown_device_raise():
    y = S((8, 8), jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="no peak is known of A100 for products of float8_e4m3fn"):
        mfu(cost(lambda y: jax.lax.dot(y, y))(y), 1.0, "A100")
    with pytest.raises(
        ValueError, match="knows A100, H100, H200, B200, TPU v5p and cpu; found 'T4'"
    ):
        device("T4")


@pytest.mark.parametrize("name", DEVICES)
def test_every_number_has_a_source(name):
    found = device(name)
    assert found.source
    assert found.peak["bfloat16"] > found.peak["float32@highest"] > found.bandwidth
    assert device(f"NVIDIA {name}" if "TPU" not in name else name) is found


def test_this_cpu_is_measured():
    found = device("cpu")
    assert found is device()
    assert "measured here" in found.source
    assert 1e9 < found.peak["float32"] < 1e14
    assert 1e8 < found.bandwidth < 1e12


def test_roofline_says_what_bounds_each_line():
    def f(x, v):
        y = x @ x
        return y, jnp.tanh(v) + 1

    costs = cost(f)(S((8192, 8192), jnp.bfloat16), S((2**28,), jnp.float32))
    compute, memory = roofline(costs, "H200").lines[:2][::-1]
    compute, memory = sorted((compute, memory), key=lambda b: b.by)
    assert (compute.by, memory.by) == ("compute", "memory")
    assert compute.seconds == pytest.approx(2 * 8192**3 / 989.4e12)
    assert memory.seconds == pytest.approx(2 * 2**30 / 4.8e12)
    assert compute.intensity == pytest.approx(2 * 8192**3 / (2 * 2 * 8192**2))


def test_roofline_of_a_device_of_ones_own():
    mine = Device("mine", {"bfloat16": 1e12, "float32@highest": 1e12}, 1e9, 1e9, 1e9, "a guess")
    (line,) = roofline(product, mine).lines
    assert line.seconds == pytest.approx(2 * 4096**3 / 1e12)


@pytest.mark.parametrize("report", [mfu, hfu, roofline])
def test_a_function_in_the_place_of_its_costs_is_refused(report):
    plain = getattr(report, "__wrapped__", report)  # without the checker of the tests
    with pytest.raises(TypeError, match=rf"Call `{report.__name__}\(cost\(f\)"):
        plain(lambda x: x, 1.0)


def test_no_time_is_refused():
    with pytest.raises(ValueError, match="a positive time"):
        mfu(product, 0.0, "H200")


def test_roofline_asks_for_trip_counts():
    f = lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ x, x)
    costs = cost(f)(S((8, 8), jnp.float32))
    with pytest.raises(ValueError, match=r"how often T1 runs"):
        roofline(costs, "H200")
    assert roofline(costs.at(T1=3), "H200").seconds > 0
