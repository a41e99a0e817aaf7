"""Values and first derivatives of attention, for every shape and mod, by the float64 oracle."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import UNOPTIMISED, assert_as_right_as, in_float64, once, plain
from xform.primitives.attention import flex_attention
from xform.primitives.masks import causal, documents, prefix, sliding_window


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes `B T S H K D V` and mods, made from captured arrays `captures(key)`."""

    shape: tuple[int, int, int, int, int, int, int]
    mask: Callable | None = None
    score: Callable | None = None
    captures: Callable = lambda rng: ()

    def inputs(self, dtype, seed: int = 0):
        b, t, s, h, kv, d, v = self.shape
        rng = np.random.default_rng(seed)
        q, k, v, ct = (
            x.astype(dtype)
            for x in normal(rng, (b, t, h, d), (b, s, kv, d), (b, s, kv, v), (b, t, h, v))
        )
        return (q, k, v, self.captures(rng)), ct

    def run(self, attention: Callable) -> Callable:
        """Output and gradients of q, k, v and captures, for a cotangent."""

        def f(args, ct):
            def out(q, k, v, captures):
                score = self.score and (lambda *index: self.score(captures, *index))
                return attention(q, k, v, score_mod=score, mask_mod=self.mask)

            value, pull = jax.vjp(out, *args)
            return value, pull(ct.astype(value.dtype))

        return f


def normal(rng, *shapes):
    """By NumPy: each shape that `jax.random` draws takes a second of compilation."""
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def ids(length, count):
    """Document numbers, sorted, of random lengths."""
    return jnp.asarray(np.sort(np.random.default_rng(7).integers(count, size=(2, length))))


CASES = {
    "one by one": Case((1, 1, 1, 1, 1, 16, 16)),
    "short": Case((2, 17, 17, 3, 1, 40, 16), mask=causal()),
    "one query": Case((2, 1, 257, 8, 1, 64, 64), mask=sliding_window(100, right=300)),
    "two keys": Case((1, 257, 2, 2, 2, 16, 40)),
    "eight to one": Case((1, 257, 257, 8, 1, 40, 16), mask=causal()),
    "no mask, ragged": Case((1, 257, 1025, 3, 3, 16, 16)),
    "causal, ragged": Case((1, 1025, 1025, 3, 1, 64, 40), mask=causal()),
    "documents": Case((2, 1025, 1025, 2, 2, 16, 16), mask=causal() & documents(ids(1025, 6))),
    "prefix or window": Case((1, 1025, 1025, 1, 1, 96, 128), mask=prefix(70) | sliding_window(33)),
    "not causal": Case((1, 257, 257, 1, 1, 128, 96), mask=~causal()),
    "wide heads": Case((1, 257, 257, 2, 2, 256, 256), mask=causal()),
    "mask by batch and head": Case(
        (2, 600, 600, 6, 2, 16, 16), mask=lambda b, h, q, k: q - k < 50 * (h + 1) + 100 * b
    ),
    "broken rows": Case((1, 1025, 1025, 2, 1, 16, 16), mask=lambda b, h, q, k: (q - k) % 400 < 30),
    "scalar and heads": Case(
        (1, 400, 400, 4, 2, 16, 16), mask=causal(),
        score=lambda c, s, b, h, q, k: jnp.tanh(s * c[0]) / c[0] - jnp.exp(c[1])[h] * (q - k) / 600,
        captures=lambda rng: (jnp.float32(0.7), *normal(rng, (4,))),
    ),
    "rows and columns": Case(
        (2, 600, 300, 2, 1, 16, 16),
        score=lambda c, s, b, h, q, k: s * c[0][b, q] + c[1][h, k],
        captures=lambda rng: normal(rng, (2, 600), (2, 300)),
    ),
    "table": Case(
        (1, 600, 600, 2, 2, 16, 16), mask=causal(),
        score=lambda c, s, b, h, q, k: s + c[0][h, jnp.minimum(q - k, 63)],
        captures=lambda rng: normal(rng, (2, 64)),
    ),
    "pair bias": Case(
        (2, 300, 300, 2, 2, 16, 16),
        score=lambda c, s, b, h, q, k: s + c[0][h, q, k],
        captures=lambda rng: normal(rng, (2, 300, 300)),
    ),
    "embeddings": Case(
        (1, 300, 300, 2, 2, 16, 16),
        score=lambda c, s, b, h, q, k: s + jnp.dot(c[0][q], c[1][k]),
        captures=lambda rng: normal(rng, (300, 4), (300, 4)),
    ),
    "derivative rule inside": Case(
        (1, 300, 300, 2, 2, 16, 16), mask=causal(),
        score=lambda c, s, b, h, q, k: jax.nn.silu(s) + jax.nn.relu(c[0][k]),
        captures=lambda rng: normal(rng, (300,)),
    ),
    "score ignored": Case(
        (1, 300, 300, 2, 2, 16, 16), score=lambda c, s, b, h, q, k: c[0][k - q],
        captures=lambda rng: normal(rng, (300,)),
    ),
}  # fmt: skip


def check(case: Case, dtype, seeds: Sequence[int] = (0,), options: dict | None = None) -> None:
    draws = [case.inputs(dtype, seed) for seed in seeds]
    inputs = jax.tree.map(lambda *xs: np.stack(xs), *draws)
    oracle = lambda *a, **mods: flex_attention(*a, **mods, implementation="reference")
    each = lambda attention: lambda x: jax.lax.map(lambda x: case.run(attention)(*x), x)
    found = jax.jit(each(flex_attention), compiler_options=options)(inputs)
    assert_as_right_as(found, once(each(plain), inputs), in_float64(each(oracle), inputs))


def some_slow(names, slow):
    """Parameters of which those named are left to the slow run."""
    marks = lambda name: pytest.mark.slow if name in slow else ()
    return [pytest.param(name, marks=marks(name)) for name in names]


SLOW = {
    "not causal", "prefix or window", "embeddings", "score ignored", "no mask, ragged", "table",
    "wide heads", "derivative rule inside", "two keys", "short", "one query", "rows and columns",
    "one by one", "pair bias", "documents", "eight to one",
}  # fmt: skip


# Optimised, as users run them; the others compile in half the time.
OPTIMISED = {"causal, ragged", "scalar and heads", *SLOW}


@pytest.mark.parametrize("name", some_slow(CASES, SLOW))
def test_output_and_gradients_are_as_right_as_a_dense_program(name):
    """Over sixteen draws, if a gradient is one number: how far that is off is a matter of luck."""
    options = None if name in OPTIMISED else UNOPTIMISED
    seeds = range(16) if name == "scalar and heads" else (0,)
    check(CASES[name], jnp.float32, seeds, options)


NARROW = [("scalar and heads", "bfloat16")]
NARROW_SLOW = [("documents", "bfloat16"), ("documents", "float16")]
NARROW_SLOW += [("table", "bfloat16"), ("table", "float16")]


@pytest.mark.parametrize("case", some_slow([*NARROW, *NARROW_SLOW], NARROW_SLOW))
def test_narrow_types_lose_no_more_than_a_dense_program(case):
    """Over as many draws, for the same reason."""
    name, dtype = case
    check(CASES[name], dtype, seeds=range(16 if name == "scalar and heads" else 4))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(3, 3), (3, 1), (8, 1)])
@pytest.mark.parametrize("size", [16, 40, 64, 96, 128, 256])
@pytest.mark.parametrize("length", [1, 17, 257, 1025])
def test_every_length_head_size_and_group(length, size, heads):
    """One query has one derivative by a score for each head: sixteen draws, as above."""
    kv_len = max(length, 2)  # for one key see the next test
    case = Case((1, length, kv_len, *heads, size, size), mask=causal(offset=kv_len - length))
    check(case, jnp.float32, seeds=range(16) if length == 1 else (length,))


@pytest.mark.parametrize("size", [16, 40, 256])
def test_the_softmax_over_one_key_is_one_and_has_no_derivative(size):
    """Two equal sums over V cancel in dq and dk; a dense program's cancel by construction."""
    case = Case((1, 1, 1, 3, 1, size, size))
    (q, k, v, _), ct = case.inputs(jnp.float32)
    out, (dq, dk, dv, _) = jax.jit(case.run(flex_attention))((q, k, v, ()), ct)
    assert np.array_equal(out, jnp.repeat(v, 3, axis=2))
    np.testing.assert_allclose(dv, ct.sum(2, keepdims=True), rtol=1e-6)
    largest = jnp.abs(ct).max() * jnp.abs(v).max() * size * jnp.finfo(jnp.float32).eps
    assert max(jnp.abs(dq).max(), jnp.abs(dk).max()) < largest


def test_a_row_without_keys_is_zero_and_moves_nothing():
    (q, k, v, _), ct = CASES["not causal"].inputs(jnp.float32)
    f = lambda q, k, v: flex_attention(q, k, v, mask_mod=~causal(), aux=("lse",))

    def run(q, k, v, ct):
        (out, aux), pull = jax.vjp(f, q, k, v)
        return out, aux.lse, pull((ct, jax.tree.map(jnp.ones_like, aux)))

    out, lse, (dq, dk, _) = map(jax.device_get, once(run, q, k, v, ct))
    assert not out[:, -1].any()
    assert out[:, 0].any()
    assert np.isneginf(lse[:, -1]).all()
    assert not dq[:, -1].any()
    assert not dk[:, 0].any()
    assert np.isfinite(dq).all()


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_empty_lengths_give_zeros_and_zero_gradients(lengths):
    case = Case((2, *lengths, 4, 2, 16, 8))
    (q, k, v, _), ct = case.inputs(jnp.float32)
    out, grads = jax.jit(case.run(flex_attention))((q, k, v, ()), ct)
    assert out.shape == (2, lengths[0], 4, 8)
    assert not out.any()
    for x, grad in zip((q, k, v), grads, strict=False):
        assert grad.shape == x.shape
        assert not grad.any()


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_what_a_mask_hides_has_no_influence(bad):
    """NaN in hidden keys, values, captures and in rows whose cotangent is NaN stays where it is."""
    case = Case((1, 300, 300, 4, 2, 16, 16))
    (q, k, v, _), ct = case.inputs(jnp.float32)
    (bias,) = normal(np.random.default_rng(3), (300,))
    hidden = jnp.zeros(300, bool).at[jnp.array([7, 250, 299])].set(True)
    mask = lambda b, h, q_idx, kv_idx: ~hidden[kv_idx] & (q_idx >= kv_idx)

    def f(q, k, v, bias):
        score = lambda s, b, h, q_idx, kv_idx: s * bias[kv_idx]
        return (flex_attention(q, k, v, score_mod=score, mask_mod=mask) * ct).sum()

    spoil = lambda x, dim: jnp.where(
        hidden.reshape([-1 if i == dim else 1 for i in range(x.ndim)]), bad, x
    )
    grad = jax.jit(jax.value_and_grad(f, (0, 1, 2, 3)))
    clean = grad(q, k, v, bias)
    spoilt = grad(q, spoil(k, 1), spoil(v, 1), spoil(bias, 0))
    for x, y in zip(*map(jax.tree.leaves, (clean, spoilt)), strict=True):
        assert np.array_equal(x, y)


def test_a_nan_that_is_seen_reaches_who_sees_it_and_nobody_else():
    (q, k, v, _), _ = Case((1, 300, 300, 2, 1, 16, 16)).inputs(jnp.float32)
    out = flex_attention(q, k, v.at[:, 200, :, 3].set(jnp.nan), mask_mod=causal())
    assert np.isfinite(out[:, :200]).all()
    assert np.isnan(out[:, 200:, :, 3]).all()
    assert np.isfinite(out[:, 200:, :, :3]).all()


def test_vmap_over_no_elements_gives_none():
    (q, k, v, _), _ = CASES["short"].inputs(jnp.float32)
    f = lambda q: flex_attention(q, k, v, mask_mod=causal())
    many = jax.vmap(jax.value_and_grad(lambda q: f(q).sum()))(jnp.zeros((0, *q.shape)))
    assert many[1].shape == (0, *q.shape)


def test_a_score_mod_may_return_a_python_number():
    (q, k, v, _), _ = Case((1, 12, 12, 2, 2, 8, 8)).inputs(jnp.float32)
    out = flex_attention(q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: 1.0)
    np.testing.assert_allclose(
        out, jnp.broadcast_to(v.mean(1, keepdims=True), out.shape), rtol=1e-5
    )


def test_sinks_take_part_in_the_softmax_and_have_a_gradient():
    (q, k, v, _), ct = CASES["short"].inputs(jnp.float32)
    (sinks,) = normal(np.random.default_rng(5), (3,))

    def with_sinks(q, k, v, sinks, **how):
        out, aux = flex_attention(q, k, v, sinks=sinks, mask_mod=causal(), aux=("lse",), **how)
        return (out * ct).sum() + aux.lse.sum()

    def by_hand(q, k, v, sinks):
        """One more key, the same for all, whose score is the sink and whose value is 0."""
        wide = jnp.concatenate([q, jnp.broadcast_to(sinks[:, None], (*q.shape[:3], 1))], -1)
        more = lambda x, last: jnp.pad(x, [(0, 0), (0, 1), (0, 0), (0, last)])
        k = more(k, 1).at[:, -1, :, -1].set(1 / q.shape[-1] ** -0.5)
        mask = lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) | (kv_idx == q.shape[1])
        out, aux = flex_attention(
            wide, k, more(v, 0), scale=q.shape[-1] ** -0.5, mask_mod=mask, aux=("lse",)
        )
        return (out * ct).sum() + aux.lse.sum()

    both = lambda *x: [jax.grad(f, (0, 1, 2, 3))(*x) for f in (with_sinks, by_hand)]
    for x, y in zip(*once(both, q, k, v, sinks), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


def test_dropout_drops_the_same_weights_in_both_directions_and_in_every_tiling():
    case = Case((1, 400, 400, 2, 1, 16, 16), mask=causal())
    (q, k, v, _), ct = case.inputs(jnp.float32)
    options = {"dropout_rate": 0.25, "dropout_key": jax.random.key(3), "mask_mod": causal()}

    def run(implementation, q, k, v):
        f = lambda q, k, v: flex_attention(q, k, v, implementation=implementation, **options)
        value, pull = jax.vjp(f, q, k, v)
        return value, pull(ct), jax.jvp(f, (q, k, v), (jnp.repeat(k, 2, 2), v, k))[1]

    run = jax.jit(run, static_argnums=0, compiler_options=UNOPTIMISED)
    found, dense = run("blockwise", q, k, v), run("reference", q, k, v)
    for x, y in zip(*map(jax.tree.leaves, (found, dense)), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
    # Values of one on all keys: what is left of a row's weights, whose mean is 1.
    left, *_ = run("blockwise", q, k, jnp.ones_like(v))
    assert abs(float(left.mean()) - 1) < 0.02
    assert float(left.std()) > 0.05


def test_a_sink_of_minus_infinity_is_none_and_has_no_gradient():
    (q, k, v, _), ct = CASES["short"].inputs(jnp.float32)
    attend = partial(flex_attention, q, k, v, mask_mod=~causal())

    def run(sinks):
        out, pull = jax.vjp(lambda sinks: attend(sinks=sinks), sinks)
        return out, attend(), *pull(ct)

    out, without, grad = once(run, jnp.full(3, -jnp.inf))
    np.testing.assert_allclose(out, without, rtol=1e-6)
    assert not grad.any()


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_another_dropout_key_drops_other_weights(kind):
    (q, k, v, _), _ = CASES["short"].inputs(jnp.float32)
    keys = [jax.random.key(seed, impl=kind) for seed in (1, 2)]
    f = lambda key: flex_attention(q, k, v, dropout_rate=0.5, dropout_key=key)
    one, two = map(jax.jit(f, compiler_options=UNOPTIMISED), keys)
    assert not np.allclose(one, two)


@pytest.mark.parametrize("platform", ["tpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_it_lowers_for_accelerators_on_a_host_without_one(platform):
    case = CASES["scalar and heads"]
    args, ct = case.inputs(jnp.bfloat16)
    traced = jax.jit(case.run(flex_attention)).trace(args, ct)
    # Forward and backward: two kernels and the careful one, or loops over tiles.
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert (text.count("@mosaic_gpu") == 3) if platform == "cuda" else ("stablehlo.while" in text)


def test_a_traced_scale_has_a_gradient():
    (q, k, v, _), _ = CASES["short"].inputs(jnp.float32)
    f = lambda scale, **how: flex_attention(q, k, v, scale=scale, mask_mod=causal(), **how).sum()
    found = jax.jit(jax.grad(f))(jnp.float32(0.3))
    step = 1e-2
    np.testing.assert_allclose(found, (f(0.3 + step) - f(0.3 - step)) / (2 * step), rtol=1e-2)


ERRORS = {
    "`q` has shape (4, 8, 16); needed are 4 dimensions": dict(q=(4, 8, 16)),
    "`k` has shape (2, 8, 2, 8); with q (2, 8, 4, 16) it needs batch 2 and head size 16": dict(
        k=(2, 8, 2, 8)
    ),
    "`v` has shape (2, 9, 2, 16)": dict(v=(2, 9, 2, 16)),
    "4 query heads are no multiple of 3 key/value heads": dict(k=(2, 8, 3, 16), v=(2, 8, 3, 16)),
    "`sinks` has shape (2,); needed is one per query head, (4,)": dict(sinks=(2,)),
}  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("message", ERRORS)
def test_a_wrong_shape_is_named(message):
    shapes = {"q": (2, 8, 4, 16), "k": (2, 8, 2, 16), "v": (2, 8, 2, 16)} | ERRORS[message]
    q, k, v = (jnp.ones(shapes[name]) for name in "qkv")
    sinks = jnp.ones(shapes["sinks"]) if "sinks" in shapes else None
    with pytest.raises(ValueError, match=re.escape(message)):
        flex_attention(q, k, v, sinks=sinks)


def test_all_that_is_wrong_is_named_at_once():
    x = jnp.ones((1, 8, 2, 16))
    with pytest.raises(
        ValueError, match=r"dtypes differ.*`aux` asks for \['max_score'\].*'triton'"
    ):
        flex_attention(x, x.astype("bfloat16"), x, aux=("max_score",), implementation="triton")


@pytest.mark.usefixtures("unchecked")
def test_what_is_not_a_function_is_named_with_its_cure():
    x = jnp.ones((1, 8, 2, 16))
    with pytest.raises(TypeError, match=r"`mask_mod` is the class `causal`: call it, `causal\(\)`"):
        flex_attention(x, x, x, mask_mod=causal)
    with pytest.raises(TypeError, match=r"`mask_mod` must be a function .*array\[q_idx, kv_idx\]"):
        flex_attention(x, x, x, mask_mod=jnp.ones((8, 8), bool))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"`scale` must be a scalar, found shape \(2,\)"):
        flex_attention(x, x, x, scale=jnp.ones(2))


def test_a_mod_that_returns_something_else_is_named():
    x = jnp.ones((1, 8, 2, 16))

    def by_row(score, b, h, q_idx, kv_idx):
        return jnp.full(8, score)

    with pytest.raises(
        ValueError, match=r"`score_mod` must return .*`by_row` .* returned float32\[8\]"
    ):
        flex_attention(x, x, x, score_mod=by_row)
    with pytest.raises(ValueError, match=r"`dropout_rate` is 1.5; .* there is no `dropout_key`"):
        flex_attention(x, x, x, dropout_rate=1.5)
    with pytest.raises(ValueError, match=r"`mask_mod` must return a bool.*returned int32\[\]"):
        flex_attention(x, x, x, mask_mod=lambda b, h, q_idx, kv_idx: q_idx - kv_idx)
