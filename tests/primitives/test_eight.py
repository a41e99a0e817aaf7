"""Attention in 8 bits: what is rounded, to the bit; errors beside bfloat16's; every transform."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from xform import Aux, causal, flex_attention, which
from xform.lowering import _eight as eight

B, T, S, H, K, D = 2, 70, 300, 4, 2, 32


def inputs(dtype=jnp.bfloat16):
    """Keys and values whose blocks of 128 differ in size, by head too."""
    q, k, v = (
        jax.random.normal(jax.random.key(n), (B, length, heads, D), dtype)
        for n, (length, heads) in enumerate(((T, H), (S, K), (S, K)))
    )
    blocks = np.where(np.arange(S) < 128, 1.0, 30.0)[:, None, None] * np.array([[[1.0], [0.1]]])
    return q, k, v * jnp.asarray(blocks, dtype)[None]


def error(found, true) -> float:
    found, true = (np.asarray(x, np.float64) for x in (found, true))
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


def oracle(q, k, v, **options):
    """Dense, in float64."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v)]
        return np.asarray(flex_attention(*wide, implementation="reference", **options))


def test_numbers_are_those_of_e4m3():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=10_000) * np.exp(4 * rng.normal(size=10_000))).clip(-448, 448)
    x = np.concatenate([x, 2.0 ** np.arange(-12, 9), 1.5 * 2.0 ** np.arange(-12, 8)])
    x = x.astype(np.float32)
    found = jax.jit(eight.to_e4m3)(x)
    np.testing.assert_array_equal(found, x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("size", [1e-6, 1.0, 100.0])
def test_what_is_rounded_is_in_the_dtype_and_stays(dtype, size):
    """Scales are powers of two, so that 16 bits hold it; a second rounding finds nothing to do."""
    arrays = [x * jnp.asarray(size, dtype) for x in inputs(dtype)]
    once = jax.jit(eight.rounded)(*arrays)
    for x, y in zip(arrays, once, strict=True):
        assert x.dtype == y.dtype
        assert 0.02 < error(y, x) < 0.035
    for x, y in zip(once, jax.jit(eight.rounded)(*once), strict=True):
        assert jnp.array_equal(x, y)


@pytest.mark.parametrize("size", [224.1, 448.0, 447.9, 1.76, 2.0**-20, 3e38])
def test_a_scale_leaves_the_largest_number_below_448(size):
    x = jnp.full((1, 1, 1, 1), size, jnp.float32)
    scaled = eight.of_queries(x).scaled
    assert 224 < float(scaled[0, 0, 0, 0]) <= 448


def test_not_finite_is_nan_and_moves_no_scale():
    q, k, v = inputs()
    values = (jnp.inf, jnp.nan, -jnp.inf)
    bad = [x.at[0, 5, 1, 3].set(y) for x, y in zip((q, k, v), values, strict=True)]
    for x, y in zip(eight.rounded(q, k, v), eight.rounded(*bad), strict=True):
        assert jnp.isnan(y[0, 5, 1, 3])
        own = jnp.zeros(x.shape, bool).at[0, 5, 1].set(True)
        if x.shape[1] == S:  # a block of keys may have lost its largest number
            own = own.at[0, :128, 1].set(True)
        assert jnp.array_equal(jnp.where(own, 0, x), jnp.where(own, 0, y))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask_mod": causal(), "score_mod": lambda s, b, h, q, k: 5 * jnp.tanh(s / 5)},
        pytest.param({"sinks": jnp.ones(H)}, marks=pytest.mark.slow),
        pytest.param(
            {"dropout_rate": 0.6, "dropout_key": jax.random.key(7)}, marks=pytest.mark.slow
        ),
    ],
    ids=["plain", "mods", "sinks", "dropout"],
)
def test_errors_beside_those_of_bfloat16(options):
    """Against float64: of the rounded arrays, what weights lose; of the arrays, all of it."""
    arrays = inputs()
    found = flex_attention(*arrays, format="e4m3", **options)
    true, near = oracle(*arrays, **options), oracle(*arrays, format="e4m3", **options)
    assert error(flex_attention(*arrays, **options), true) < 0.004
    assert error(found, near) < 0.03
    assert 0.03 < error(found, true) < 0.08


def test_log_sum_exp_is_that_of_the_rounded_arrays():
    arrays = inputs()
    _, aux = flex_attention(*arrays, format="e4m3", aux="lse")
    _, true = flex_attention(*eight.rounded(*arrays), aux="lse")
    assert isinstance(aux, Aux)
    assert aux.lse is not None
    assert true.lse is not None
    np.testing.assert_allclose(aux.lse, true.lse, rtol=0, atol=1e-5)


def test_hidden_values_have_no_influence_and_a_row_without_keys_is_0():
    q, k, v = inputs()
    hidden = lambda b, h, i, j: (j != 5) & (i > 0)
    run = partial(flex_attention, mask_mod=hidden, format="e4m3")
    spoilt = run(q, k.at[:, 5].set(jnp.nan), v.at[:, 5].set(jnp.inf))
    assert jnp.array_equal(spoilt, run(q, k.at[:, 5].set(0), v.at[:, 5].set(0)))
    assert not spoilt[:, 0].any()


@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_derivatives_are_those_at_the_rounded_arrays(wide):
    """Of any order, in both directions; nothing of them is rounded to 8 bits."""
    arrays = inputs(jnp.float32 if wide else jnp.bfloat16)
    ct = jax.random.normal(jax.random.key(9), (B, T, H, D), arrays[0].dtype)
    bias = jnp.linspace(0, 1, S)

    def loss(bias, *arrays, **options):
        mod = lambda s, b, h, q, k: s + bias[k]
        out, aux = flex_attention(*arrays, score_mod=mod, aux="lse", **options)
        return jnp.sum(out * ct, dtype=jnp.float32) + aux.lse.sum()

    every = (0, 1, 2, 3)
    found = jax.jit(jax.grad(partial(loss, format="e4m3"), every))(bias, *arrays)
    true = jax.jit(jax.grad(loss, every))(bias, *eight.rounded(*arrays))
    for x, y in zip(found, true, strict=True):
        assert error(x, y) < 1e-5
    if wide:
        along = lambda f: jax.jvp(jax.grad(f), (bias,), (jnp.ones_like(bias),))[1]
        second = along(lambda b: loss(b, *arrays, format="e4m3"))
        assert error(second, along(lambda b: loss(b, *eight.rounded(*arrays)))) < 1e-4


@pytest.mark.slow
def test_linear_in_values_alone():
    q, k, v = inputs()
    attend = lambda v: flex_attention(q, k, v, format="e4m3")
    ct = jax.random.normal(jax.random.key(9), (B, T, H, D), q.dtype)
    (turned,) = jax.linear_transpose(attend, v)(ct)
    assert jnp.array_equal(turned, jax.vjp(attend, v)[1](ct)[0])


def test_a_batch_of_calls_and_a_split_one():
    q, k, v = inputs()
    attend = partial(flex_attention, mask_mod=causal(), format="e4m3")
    one = attend(q, k, v)
    many = jax.vmap(attend, (0, None, 0))(jnp.stack([q, q[::-1]]), k, jnp.stack([v, v]))
    assert jnp.array_equal(many[0], one)
    assert jnp.array_equal(many[1], attend(q[::-1], k, v))
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = P("dp", None, "tp")
    split = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    assert jnp.array_equal(split(q, k, v), one)
    placed = jax.device_put((q, k, v), jax.NamedSharding(mesh, spec))
    assert jnp.array_equal(jax.jit(attend)(*placed), one)


def test_says_what_it_does_not_take():
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"`format` is 'e5m2'; there is \[None, 'e4m3'\]"):
        flex_attention(q, k, v, format="e5m2")
    with pytest.raises(ValueError, match="leave out one of `format` and `max`"):
        flex_attention(q, k, v, format="e4m3", aux=("lse", "max"))
    wide = jnp.ones((1, 8, 2, 256), jnp.bfloat16)
    message = "values with a head size of 256; products in 8 bits have registers for at most 128"
    with pytest.raises(NotImplementedError, match=message):
        flex_attention(wide, wide, wide, format="e4m3", implementation="mosaic_gpu")
    assert message in which(wide, wide, wide, format="e4m3").why
