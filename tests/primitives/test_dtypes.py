"""Dtypes: scales that a narrow one has no room for, captures wider and narrower than the inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import once
from xform.primitives.attention import flex_attention
from xform.primitives.cross_entropy import linear_cross_entropy
from xform.primitives.inference import decode_attention
from xform.primitives.masks import causal

RNG = np.random.default_rng(0)
HOW = (None, "reference")


@pytest.fixture(autouse=True)
def _same_numbers():
    """Each test draws the same numbers, whichever ran before it."""
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


def normal(*shape, dtype="float32", times=1.0):
    return jnp.asarray(times * RNG.normal(size=shape), dtype)


# Of queries and keys, whose product is as large as ever.
SCALES = {
    "no room above": ("float16", 100.0, 1e-3, 4096.0),
    "no room below": ("float16", 1e-2, 1e3, 2.0**-20),
    "the default, of large queries": ("float16", 1e4, 1e-4, 0.25),
    "no room above in float32": ("float32", 1e30, 1e-30, 2.0**40),
    "no room below in bfloat16": ("bfloat16", 1e-30, 1e30, 2.0**-40),
}


@pytest.mark.parametrize("attend", ["flex_attention", "decode_attention"])
@pytest.mark.parametrize("name", SCALES)
def test_a_scale_leads_out_of_no_range(name, attend):
    dtype, large, small, scale = SCALES[name]
    q, k = normal(1, 8, 1, 16, dtype=dtype, times=large), normal(1, 8, 1, 16, times=small)
    k, v = k.astype(dtype), normal(1, 8, 1, 16, dtype=dtype)
    to_one = lambda s, *_: s / (10 * scale)

    def f(how):
        options = {"scale": scale, "score_mod": to_one, "implementation": how}
        if attend == "decode_attention" and how is None:
            return decode_attention(q, k, v, 8, **options)
        return flex_attention(q, k, v, **options)

    found, true = once(lambda: [f(how) for how in HOW])
    atol = 4 * float(jnp.finfo(dtype).eps)
    assert np.isfinite(np.asarray(true, np.float32)).all()
    found, true = (np.asarray(x, np.float32) for x in (found, true))
    np.testing.assert_allclose(found, true, atol=atol)


def _times(c):
    """Their differences are of the size of scores, and lost in float32."""
    return lambda s, b, h, q, k: s - jnp.abs(c[q] - c[k])


def _narrow(c):
    """A product that is rounded to the dtype of what is read, before it meets the score."""
    return lambda s, b, h, q, k: s + jax.lax.optimization_barrier(c[q] * c[k]).astype(s.dtype)


CAPTURES = {
    "float64 of float32 inputs": ("float32", 1.7e9 + 0.37 * np.arange(12.0), _times),
    "float64 of bfloat16 inputs": ("bfloat16", 1.7e9 + 0.37 * np.arange(12.0), _times),
    "float64 in a loop": (
        "float32", 1.7e9 + 0.37 * np.arange(12.0),
        lambda c: lambda s, b, h, q, k: jax.lax.fori_loop(
            0, 2, lambda i, s: s - jnp.abs(c[q] - c[jnp.minimum(k + i, 11)]), s.astype(c.dtype)
        ),
    ),
    "float32 of float64 inputs": ("float64", np.linspace(-3, 3, 12, dtype=np.float32), _narrow),
    "bfloat16": ("float32", jnp.linspace(-3, 3, 12, dtype=jnp.bfloat16), _narrow),
    "float16 of bfloat16 inputs": ("bfloat16", np.linspace(-3, 3, 12, dtype=np.float16), _narrow),
}  # fmt: skip


def some(names, quick):
    """Parameters of which all but the `quick` are slow."""
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", some(CAPTURES, {"float64 of float32 inputs", "bfloat16"}))
def test_a_mod_computes_in_the_dtypes_of_what_it_reads(name):
    """Its gradient comes in that dtype, too; of other inputs, the mod's own roundings stay."""
    dtype, captured, mod = CAPTURES[name]

    def run(c, q, how):
        f = lambda c, q: flex_attention(
            q, q, q, score_mod=mod(c), mask_mod=causal(), implementation=how
        )
        square = lambda c, q: (jnp.sin(3 * f(c, q).astype("float32")) ** 2).sum()
        return f(c, q), jax.grad(square)(c, q)

    with jax.enable_x64(True):
        c, q = jnp.asarray(captured), normal(1, 12, 2, 8, dtype=dtype)
        found, judge = once(lambda c, q: [run(c, q, how) for how in HOW], c, q)
        true = once(lambda c, q: run(c, q, "reference"), c, q.astype("float64"))
    assert found[1].dtype == c.dtype
    for a, b, t, d in zip(
        found, judge, true, (dtype, min(dtype, str(c.dtype), key=_bits)), strict=True
    ):
        a, b, t = (np.asarray(x, np.float64) for x in (a, b, t))
        bound = max(8 * float(jnp.finfo(d).eps), 1e-6 * (_bits(dtype) < 8))
        atol = max(bound * np.abs(t).max(), 2 * np.abs(b - t).max())
        np.testing.assert_allclose(a, t, rtol=0, atol=atol)


def _bits(dtype) -> int:
    return jnp.dtype(dtype).itemsize


@pytest.mark.parametrize(
    "dtype", some(["bfloat16", "float16", "float32", "float64"], {"bfloat16", "float64"})
)
def test_no_dtype_is_promoted_behind_a_users_back(dtype):
    """Whole programs are traced and lowered where JAX is told to refuse implicit promotion."""

    def attend(q, t, how):
        out, aux = flex_attention(
            q, q, q, score_mod=lambda s, b, h, i, j: s * t[j].astype(s.dtype), sinks=q[0, 0, :, 0],
            mask_mod=causal(), aux=("lse", "max"), dropout_rate=0.1, implementation=how,
            dropout_key=jax.random.key(0),
        )  # fmt: skip
        return out.astype(t.dtype).sum() + (aux.lse[...] + aux.max[...]).astype(t.dtype).sum()

    def tokens(hidden, weight, labels):
        return linear_cross_entropy(hidden, weight, labels, z_loss=0.1, softcap=3.0)[0].sum()

    with jax.enable_x64(dtype == "float64"), jax.numpy_dtype_promotion("strict"):
        x = lambda *shape, d=dtype: jax.ShapeDtypeStruct(shape, d)
        q, t = x(1, 300, 2, 8), x(300, d="float32")
        for how in HOW:
            f = jax.grad(lambda q, t, how=how: attend(q, t, how), (0, 1))
            jax.jit(f).lower(q, t)
        jax.jit(lambda q: decode_attention(q[:, :1], q, q, 9)).lower(q)
        for labels in (x(12, d="int8"), x(12, d="uint8"), x(12, d="int32")):
            jax.jit(jax.grad(tokens, (0, 1))).lower(x(12, 16), x(16, 40), labels)


@pytest.mark.parametrize("scale", [np.complex64(1 + 1j), 1j])
def test_a_complex_scale_is_refused(scale):
    q = normal(1, 4, 1, 8)
    with pytest.raises(TypeError, match=r"`scale` is .*1j.*; needed is a"):
        flex_attention(q, q, q, scale=scale)
    with pytest.raises(TypeError, match="needed is a real number"):
        flex_attention(q, q, q, scale=jnp.complex64(1j))
