"""Stochastic rounding, and the scale of a loss in float16."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xform import LossScale, all_finite, precision, stochastic_round

BF16 = ml_dtypes.bfloat16


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(0, 2**31))
def test_a_number_becomes_one_of_its_two_neighbours(x, seed):
    got = np.asarray(stochastic_round(jnp.full(8, x, jnp.float32), jax.random.key(seed)))
    near = np.float32(x).astype(BF16)
    near = near if np.isfinite(near.astype(np.float32)) else np.sign(x) * ml_dtypes.finfo(BF16).max
    wide = got.astype(np.float64)
    spacing = np.maximum(np.abs(float(near)) * 2.0**-7, 2.0**-133)
    assert (np.abs(wide - x) < spacing).all() or (wide == float(near)).all()
    if np.float32(near) == np.float32(x):
        assert (wide == x).all()


def test_the_mean_is_kept_and_small_updates_are_not_lost():
    x = jnp.asarray(np.random.default_rng(0).normal(size=100), jnp.float32)
    draws = jax.vmap(lambda key: stochastic_round(x, key))(
        jax.random.split(jax.random.key(1), 4000)
    )
    wide = np.asarray(draws).astype(np.float64)
    step = np.abs(x) * 2.0**-7
    assert (np.abs(wide.mean(0) - np.asarray(x)) < 5 * step / np.sqrt(4000)).all()
    assert (wide.std(0) > 0).mean() > 0.9

    def update(w, key):
        return stochastic_round(w.astype(jnp.float32) + 1e-4, key), None

    keys = jax.random.split(jax.random.key(2), 1000)
    w, _ = jax.lax.scan(update, jnp.ones(256, jnp.bfloat16), keys)
    assert abs(w.astype(jnp.float32).mean() - 1.1) < 0.01
    nearest = jax.lax.scan(lambda w, _: (w + jnp.bfloat16(1e-4), None), jnp.bfloat16(1), keys)[0]
    assert nearest == 1


def test_trees_and_what_is_not_finite():
    tree = {"w": jnp.array([jnp.nan, jnp.inf, -jnp.inf, 3.4e38, 0.0]), "n": jnp.arange(3)}
    got = stochastic_round(tree, jax.random.key(0))
    assert got["n"].dtype == jnp.int32
    w = np.asarray(got["w"]).astype(np.float32)
    assert np.isnan(w[0])
    np.testing.assert_array_equal(w[1:], [np.inf, -np.inf, float(jnp.finfo("bfloat16").max), 0])
    a, b = stochastic_round([jnp.full(99, 1.003)] * 2, jax.random.key(0))
    assert (a != b).any()


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def test_gradients_too_small_for_float16_survive():
    w, x = jnp.full((4, 2), 1e-3), jnp.full((8, 4), 1e-3)
    f = precision(loss, "f16")
    want = jax.grad(loss)(w, x)
    plain = jax.grad(f)(w, x)
    assert (plain == 0).all()
    value, grads, finite = jax.jit(lambda s, w, x: s.value_and_grad(f)(w, x))(LossScale(), w, x)
    assert finite
    assert grads.dtype == jnp.float32
    np.testing.assert_allclose(grads, want, rtol=5e-3)
    np.testing.assert_allclose(value, loss(w, x), rtol=5e-3)


def test_the_scale_halves_at_an_overflow_and_doubles_after_a_while():
    scale = LossScale(period=3)
    w, x = jnp.ones((4, 2)), jnp.full((8, 4), 30.0)
    step = jax.jit(lambda s, w, x: s.value_and_grad(precision(loss, "f16"))(w, x))
    seen = []
    for _ in range(30):
        _, _, finite = step(scale, w, x)
        scale = scale.adjust(finite)
        seen.append((bool(finite), float(scale.value)))
    assert seen[0] == (False, 2.0**14)
    first = next(i for i, (finite, _) in enumerate(seen) if finite)
    held = seen[first][1]
    assert [v for _, v in seen[first : first + 4]] == [held, held, 2 * held, held]
    assert not seen[first + 3][0]  # twice as much overflows again
    assert LossScale(jnp.float32(1.0)).adjust(jnp.bool_(False)).value == 1
    assert LossScale(jnp.float32(2.0**24), period=1).adjust(jnp.bool_(True)).value == 2**24


def test_all_finite():
    assert all_finite({})
    assert all_finite((jnp.ones(3), jnp.arange(3), 1.0))
    assert not all_finite((jnp.ones(3), jnp.array(jnp.nan, jnp.bfloat16)))
