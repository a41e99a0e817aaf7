"""Each operation spelled out for a kernel, against the one that it stands for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from xform.lowering.mosaic_gpu._ops import OPS, evaluate

X = jnp.concatenate(
    [jnp.linspace(-9, 9, 181), jnp.array([0.0, 1e-5, -1e-5, 0.3, -0.7, 30.0, -30.0])]
).astype(jnp.float32)
POSITIVE = jnp.abs(X) + 1e-3


def run(f, *args):
    """`f`'s equations by the rules, elementwise on arrays."""
    scalars = [jax.ShapeDtypeStruct((), x.dtype) for x in args]
    (out,) = evaluate(jax.make_jaxpr(f)(*scalars), list(args), lambda xs: _spread(xs, args[0]))
    return out


def _spread(values, like):
    return [jnp.broadcast_to(jnp.asarray(x), like.shape) for x in values]


@pytest.mark.parametrize(
    ("f", "x", "tolerance"),
    [
        (jnp.tanh, X, 6e-7),
        (lambda x: lax.tanh(x, accuracy=lax.Tolerance(rtol=1e-5)), X, 6e-7),
        (lambda x: lax.tanh(x, accuracy=lax.Tolerance(atol=1e-6)), X, 6e-7),
        (jnp.sin, X * 50, 4e-6),
        (jnp.cos, X * 50, 4e-6),
        (jnp.floor, X, 0),
        (jnp.ceil, X, 0),
        (lax.logistic, X, 1e-6),
        (jnp.log1p, POSITIVE, 1e-6),
        (jnp.expm1, X, 1e-6),
        (lax.erfc, X, 1e-6),
        (lambda x: x**2.5, POSITIVE, 1e-5),
        (lambda x: x**3, X, 1e-6),
        (jnp.arctan, X, 1e-6),
        (jnp.arcsin, X / 30, 1e-6),
        (jnp.arccos, X / 30, 1e-6),
        (jnp.sinh, X, 2e-6),
        (jnp.cosh, X, 2e-6),
        (jnp.arcsinh, X * 1e6, 2e-6),
        (jnp.arcsinh, X, 2e-6),
        (lax.acosh, 1 + POSITIVE, 2e-6),
        (jnp.arctanh, X / 31, 2e-6),
        (jnp.cbrt, X, 2e-6),
        (lambda x: x**-2, POSITIVE, 1e-6),
        (lambda x: x / 30.0, X, 1e-6),
        (lambda x: lax.reduce_precision(x, 8, 7), X, 0),
        (lambda x: lax.select_n((x > 0).astype(jnp.int32), x, x * x), X, 0),
    ],
)
def test_agrees_with_what_it_stands_for(f, x, tolerance):
    expected = np.asarray(jax.vmap(f)(x), np.float64)
    found = np.asarray(run(f, x), np.float64)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


NARROW = (
    jnp.tanh, jnp.sin, jnp.cos, jnp.tan, jnp.exp, jnp.expm1, jnp.log1p, lax.erfc, lax.logistic,
    jnp.sinh, jnp.cosh, jnp.arcsinh, jnp.arctan, jnp.cbrt, lambda x: x**5, lambda x: abs(x) ** 2.5,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_of_16_bits_a_function_is_rounded_once(dtype):
    """Off by half a unit in the last place, and by what float32 is off."""
    x = jnp.linspace(-3, 3, 121).astype(dtype)
    half = float(jnp.finfo(dtype).eps) / 2
    for f in NARROW:
        found = run(f, x)
        assert found.dtype == dtype
        wanted = np.asarray(f(x.astype(jnp.float32)), np.float64)
        np.testing.assert_allclose(np.float64(found), wanted, rtol=1.02 * half, atol=1e-6)


def test_the_hardware_s_own_tanh_is_for_those_who_allow_its_error():
    def program(rtol):
        f = lambda x: lax.tanh(x, accuracy=lax.Tolerance(rtol=rtol))
        return str(jax.make_jaxpr(lambda x: run(f, x))(X))

    assert "tanh" in program(5e-4)
    assert "tanh" not in program(4e-4)


def test_tanh_by_an_exponential_keeps_signs_and_ends():
    x = jnp.array([-jnp.inf, -100, -1e-30, 0, 1e-30, 100, jnp.inf, jnp.nan], jnp.float32)
    found = run(lambda x: lax.tanh(x, accuracy=lax.Tolerance(atol=1e-6)), x)
    np.testing.assert_allclose(found, np.tanh(x), rtol=0, atol=6e-7)


def test_powers_of_negative_numbers():
    x, y = (jnp.array(v, jnp.float32) for v in ([-2, -2, -2, 0, 0, 3], [3, 2, 0.5, 0, 2, -1]))
    found = run(lambda x, y: lax.pow(x, y), x, y)
    np.testing.assert_allclose(found, [-8, 4, np.nan, 1, 0, 1 / 3], rtol=1e-6)


def test_whole_numbers():
    x = jnp.array([0, 1, 7, -1, -12345, 2**31 - 1], jnp.int32)
    np.testing.assert_array_equal(run(lax.population_count, x), lax.population_count(x))
    np.testing.assert_array_equal(run(lax.clz, x), lax.clz(x))
    np.testing.assert_array_equal(run(lambda x: ~x, x), ~x)
    np.testing.assert_array_equal(run(lambda x: jnp.logical_not(x > 3), x), x <= 3)


def test_every_rule_is_of_a_primitive():
    names = {p.name for p in vars(lax).values() if isinstance(p, Primitive)}
    renamed = {"bitwise_and", "bitwise_or", "bitwise_xor", "add_any", "copy_p", "stop_gradient"}
    assert set(OPS) - names <= renamed
