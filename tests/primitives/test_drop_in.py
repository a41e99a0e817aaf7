"""The field's names mean what they mean in the field."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import once
from xform.primitives.attention import flex_attention
from xform.primitives.drop_in import dot_product_attention, flash_attention

B, T, S, H, K, D = 2, 9, 13, 4, 2, 8
RNG = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(RNG.normal(size=shape), jnp.float32)
q, k, v = normal(B, T, H, D), normal(B, S, K, D), normal(B, S, K, D)
Q, KEYS = np.arange(T)[:, None] + S - T, np.arange(S)[None]
SLOPES = jnp.asarray(RNG.uniform(0, 1, H), jnp.float32)
DISTANCE = np.abs(Q - KEYS)


def dense(keep, change=lambda s: s):
    """Attention by a matrix of what is seen, `[T,S]`."""
    kk, vv = (jnp.repeat(x, H // K, 2) for x in (k, v))
    s = change(jnp.einsum("bthd,bshd->bhts", q, kk) * D**-0.5)
    s = jnp.where(np.broadcast_to(keep, s.shape), s, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, -1), vv)


@pytest.mark.parametrize(
    ("options", "true"),
    [
        ({}, lambda: dense(True)),
        ({"causal": True}, lambda: dense(Q >= KEYS)),
        ({"window": (3, -1)}, lambda: dense(KEYS >= Q - 3)),
        ({"window": (-1, 2)}, lambda: dense(KEYS <= Q + 2)),
        ({"window": (None, 1), "causal": True}, lambda: dense(Q >= KEYS)),
        ({"window": 2}, lambda: dense(DISTANCE <= 2)),
        ({"window": (4, 0), "causal": True, "softcap": 1.5, "alibi_slopes": SLOPES},
         lambda: dense((KEYS >= Q - 4) & (Q >= KEYS),
                       lambda s: 1.5 * jnp.tanh(s / 1.5) - SLOPES[None, :, None, None] * DISTANCE)),
        ({"alibi_slopes": SLOPES},
         lambda: dense(True, lambda s: s - SLOPES[None, :, None, None] * DISTANCE)),
        ({"softcap": 2.0, "scale": 1.0},
         lambda: dense(True, lambda s: 2 * jnp.tanh(s * D**0.5 / 2))),
    ],
    ids=lambda x: "-".join(x) or "plain" if isinstance(x, dict) else "",
)  # fmt: skip
def test_flash_attention(options, true):
    with jax.numpy_rank_promotion("allow"):
        expected = true()
    np.testing.assert_allclose(flash_attention(q, k, v, **options), expected, atol=2e-6)


def test_flash_attention_of_nothing_more_is_flex_attention():
    jaxpr = lambda f: str(jax.make_jaxpr(f)(q, k, v))
    assert jaxpr(flash_attention) == jaxpr(flex_attention)
    out, aux = flash_attention(q, k, v, causal=True, aux="lse", dropout_rate=0.0)
    assert aux.lse.shape == out.shape[:-1]


MASK = jnp.asarray(RNG.random((B, H, T, S)) < 0.7).at[..., 0].set(True)
BIAS = normal(B, H, T, S)
LENGTHS = jnp.array([4, 9], jnp.int32), jnp.array([7, 13], jnp.int32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "scale": 0.3},
        {"local_window_size": (3, 1)},
        {"local_window_size": 4, "is_causal": True, "bias": BIAS},
        {"query_seq_lengths": LENGTHS[0], "key_value_seq_lengths": LENGTHS[1]},
        {"key_value_seq_lengths": LENGTHS[1], "is_causal": True},
        {"query_seq_lengths": LENGTHS[0]},
        {"bias": BIAS[:1], "mask": MASK[:, :, :1]},
        {"bias": BIAS[:, :1, :, :1], "mask": MASK[:1, :1]},
        {"mask": MASK[:, :1, :1]},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_dot_product_attention_is_that_of_jax(options):
    """Values, log-sum-exp and gradients, for broadcast masks and biases too."""

    def run(f, q, k, v):
        out, lse = f(q, k, v, return_residual=True, **options)
        return jnp.sin(out).sum(), (out, lse)

    both = (dot_product_attention, jax.nn.dot_product_attention)
    grad = lambda f: jax.value_and_grad(functools.partial(run, f), (0, 1, 2), has_aux=True)
    found, true = once(lambda *x: [grad(f)(*x) for f in both], q, k, v)
    (_, (out, lse)), (_, (true_out, true_lse)) = found[0], true[0]
    np.testing.assert_allclose(out, true_out, atol=3e-6)
    seen = ~np.isneginf(lse)  # JAX gives rows without a key a number
    assert seen.all() == ("query_seq_lengths" not in options)
    np.testing.assert_allclose(lse[seen], true_lse[seen], atol=3e-6)
    for a, b in zip(found[1], true[1], strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6)


@pytest.mark.usefixtures("unchecked")
def test_dot_product_attention_takes_lists_and_arrays_as_jax_does():
    """Numbers in any form are the same numbers."""
    typed = {
        "query_seq_lengths": LENGTHS[0],
        "key_value_seq_lengths": LENGTHS[1],
        "local_window_size": (3, 1),
    }
    loose = {
        "query_seq_lengths": (4, 9),
        "key_value_seq_lengths": [7, 13],
        "local_window_size": np.array([3, 1]),
    }
    found = dot_product_attention(q, k, v, **loose)
    np.testing.assert_array_equal(found, dot_product_attention(q, k, v, **typed))
    windows = jax.jit(lambda n: dot_product_attention(q, k, v, local_window_size=n))
    true = jax.nn.dot_product_attention(q, k, v, local_window_size=(3, 1))
    np.testing.assert_allclose(windows(jnp.array([3, 1])), true, atol=3e-6)


def test_dot_product_attention_takes_what_jax_takes():
    ours, theirs = map(inspect.signature, (dot_product_attention, jax.nn.dot_product_attention))
    parts = lambda s: [(p.name, p.kind, p.default) for p in s.parameters.values()]
    assert parts(ours) == parts(theirs)
    without_batch = dot_product_attention(q[0], k[0], v[0], is_causal=True)
    np.testing.assert_allclose(
        without_batch, dot_product_attention(q, k, v, is_causal=True)[0], atol=1e-6
    )
    assert without_batch.shape == q.shape[1:]


SHAPES = {
    "without a batch": ((7, 4, 8), (5, 2, 8)),
    "keys of one text alone": ((1, 7, 4, 8), (5, 2, 8)),
    "queries without a batch": ((7, 4, 8), (1, 5, 2, 8)),
    "one head of keys": ((2, 7, 4, 8), (2, 5, 1, 8)),
    "more keys": ((2, 3, 2, 4), (2, 11, 2, 4)),
}


@pytest.mark.parametrize("seed", range(6))
def test_any_arguments_mean_what_they_mean_in_jax(seed):
    """Shapes, dtypes and all arguments at random, some of them NumPy's and lists."""
    rng = np.random.default_rng(seed)
    name = [*SHAPES, "without a batch"][seed]
    q_shape, k_shape = SHAPES[name]
    b, t, n = ((1,) * (4 - len(q_shape)) + q_shape)[:3]
    s = k_shape[-3]
    dtype = jnp.float32 if seed % 2 else jnp.bfloat16
    q, k, v = (jnp.asarray(rng.normal(size=x), dtype) for x in (q_shape, k_shape, k_shape))
    some = lambda: tuple(m if rng.random() < 0.6 else 1 for m in (b, n, t, s))[rng.integers(0, 2) :]
    pick = lambda x: x if rng.random() < 0.7 else None
    mask = rng.random(some()) < 0.8
    options = {
        "bias": pick(rng.normal(size=some()).astype(np.float32)),
        "mask": pick(np.where(np.arange(mask.shape[-1]) == 0, True, mask)),
        "scale": pick(0.7),
        "is_causal": bool(rng.random() < 0.5),
        "query_seq_lengths": pick(rng.integers(1, t + 1, b).astype(np.int32)),
        "key_value_seq_lengths": pick(rng.integers(1, s + 1, b).astype(np.int32)),
        "local_window_size": pick([(2, 1), 3, (t + s, 0)][seed % 3]),
        "return_residual": True,
    }
    run = lambda f: lambda *x: f(*x, **options)
    found, lse = once(run(dot_product_attention), q, k, v)
    true, true_lse = once(run(jax.nn.dot_product_attention), q, k, v)
    assert (found.shape, found.dtype, lse.shape) == (true.shape, true.dtype, true_lse.shape)
    lse = np.asarray(lse)
    seen = ~np.isneginf(lse)  # a row without a key gives 0, and in JAX a mean
    assert seen.any()
    narrow = lambda x: np.asarray(x, np.float32)
    atol = 3e-6 if dtype == jnp.float32 else 2**-6
    close = lambda a, b: np.testing.assert_allclose(narrow(a)[seen], narrow(b)[seen], atol=atol)
    close(found, true)
    assert not narrow(found)[~seen].any()
    np.testing.assert_allclose(lse[seen], narrow(true_lse)[seen], rtol=2**-7, atol=atol)


def test_slopes_of_each_text():
    slopes = jnp.asarray(RNG.uniform(0, 1, (B, H)), jnp.float32)
    distance = jnp.asarray(DISTANCE, jnp.float32)[None, None]
    expected = dense(True, lambda s: s - slopes[..., None, None] * distance)
    np.testing.assert_allclose(flash_attention(q, k, v, alibi_slopes=slopes), expected, atol=2e-6)


def test_the_log_sum_exp_has_a_gradient():
    f = lambda q: dot_product_attention(q, k, v, return_residual=True)[1].sum()
    assert np.abs(jax.grad(f)(q)).max() > 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": MASK[:, :3]}, r"`mask` has shape \(2, 3, 9, 13\); .* here \(2, 4, 9, 13\)"),
        ({"mask": jnp.ones((T, S))}, r"`mask` has dtype float32; it must be bool"),
        ({"bias": BIAS[..., :5]}, r"`bias` has shape \(2, 4, 9, 5\); it must broadcast"),
    ],
)
def test_what_does_not_fit_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        dot_product_attention(q, k, v, **options)
