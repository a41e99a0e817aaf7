"""Scores are the papers' formulas, chain in the order written, and have exact gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.primitives.cases import Case, check
from xform.primitives.attention import flex_attention
from xform.primitives.masks import causal, sliding_window
from xform.primitives.scores import (
    alibi,
    as_score,
    pair_bias,
    relative_bias,
    softcap,
    t5_bias,
    temperature,
)

B, H, T, S = 2, 3, 9, 11
RNG = np.random.default_rng(0)
SCORES = RNG.normal(size=(B, H, T, S)).astype(np.float32)
Q, K = np.arange(T)[:, None], np.arange(S)[None]
PER_HEAD = RNG.uniform(0.5, 2, H).astype(np.float32)
TABLE = RNG.normal(size=(H, 7)).astype(np.float32)
PAIRS = RNG.normal(size=(B, H, T, S)).astype(np.float32)


def everywhere(score):
    """The score at all pairs, `[B,H,T,S]`."""
    f = score
    for dim in range(4):
        f = jax.vmap(f, (0, *(0 if 3 - dim == d else None for d in range(4))))
    return np.asarray(f(jnp.asarray(SCORES), *map(jnp.arange, (B, H, T, S))))


def bucket(distance: int, buckets: int, bidirectional: bool, most: int) -> int:
    """T5's own words, on one number, in float64."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = -min(distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    far = exact + int(math.log(distance / exact) / math.log(most / exact) * (buckets - exact))
    return first + min(far, buckets - 1)


BY_HEAD = PER_HEAD[:, None, None]


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (softcap(1.5), 1.5 * np.tanh(SCORES / 1.5)),
        (softcap(PER_HEAD), BY_HEAD * np.tanh(SCORES / BY_HEAD)),
        (temperature(PER_HEAD), SCORES / BY_HEAD),
        (temperature(jnp.float32(2)), SCORES / 2),
        (alibi(PER_HEAD), SCORES - BY_HEAD * np.abs(Q - K)),
        (relative_bias(TABLE[0]), SCORES + TABLE[0][np.clip(K - Q, -3, 3) + 3]),
        (relative_bias(TABLE), SCORES + TABLE[:, np.clip(K - Q, -3, 3) + 3]),
        (pair_bias(PAIRS), SCORES + PAIRS),
        (pair_bias(PAIRS[0]), SCORES + PAIRS[:1]),
        (pair_bias(PAIRS[0, 1]), SCORES + PAIRS[0, 1]),
        (pair_bias(PAIRS[:, :1]), SCORES + PAIRS[:, :1]),
        (pair_bias(PAIRS[:1]), SCORES + PAIRS[:1]),
        (softcap(2.0) >> alibi(PER_HEAD), 2 * np.tanh(SCORES / 2) - BY_HEAD * np.abs(Q - K)),
        (alibi(PER_HEAD) >> softcap(2.0), 2 * np.tanh((SCORES - BY_HEAD * np.abs(Q - K)) / 2)),
        ((lambda s, b, h, q, k: s * s) >> temperature(4.0) >> (lambda s, *_: s + 1),
         SCORES**2 / 4 + 1),
        (alibi(PER_HEAD).shift(q=5, k=2), SCORES - BY_HEAD * np.abs(Q + 3 - K)),
        (pair_bias(PAIRS[0]).slice(q=slice(2, None), k=np.arange(S)[::-1]).slice(q=slice(0, 7)),
         None),
    ],
    ids=lambda x: repr(x) if callable(x) else "",
)  # fmt: skip
def test_formulas(score, expected):
    if expected is None:  # places beyond an array are its last
        expected = SCORES + PAIRS[0][:, np.minimum(np.arange(T) + 2, T - 1)][:, :, ::-1]
    np.testing.assert_allclose(everywhere(score), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (16, 50), (8, 20)])
def test_the_buckets_of_t5(buckets, most, bidirectional):
    distances = np.arange(-400, 401)
    bias = t5_bias(np.arange(float(buckets)), bidirectional=bidirectional, max_distance=most)
    found = jax.vmap(lambda k: bias(0.0, 0, 0, 400, k))(jnp.asarray(distances + 400))
    expected = [bucket(int(d), buckets, bidirectional, most) for d in distances]
    np.testing.assert_array_equal(found, expected)
    assert len(set(expected)) == buckets - bidirectional


def test_the_slopes_of_alibi():
    np.testing.assert_allclose(alibi.of(8).slopes, [2.0**-n for n in range(1, 9)])
    twelve = [2.0**-n for n in range(1, 9)] + [2.0 ** -(n + 0.5) for n in range(4)]
    np.testing.assert_allclose(alibi.of(12).slopes, twelve, rtol=1e-6)
    assert np.shape(alibi.of(1).slopes) == (1,)


def double(s, b, h, q_idx, kv_idx):
    return 2 * s


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (softcap(30.0), "softcap(30.0)"),
        (t5_bias(TABLE, max_distance=64), "t5_bias(table: float32[3,7], max_distance=64)"),
        (double >> softcap(2.0) >> double, "double >> softcap(2.0) >> double"),
        (
            (double >> alibi(PER_HEAD)).shift(q=4),
            "(double >> alibi(slopes: float32[3])).shift(q=4)",
        ),
    ],
)
def test_scores_print_as_written(score, text):
    assert repr(score) == text


GRADIENTS = {
    "temperature, soft cap and slopes": Case(
        (2, 19, 19, 4, 2, 8, 8), captures=((4,), (), (4,)), mask=lambda c: causal(),
        score=lambda c: (
            temperature(jnp.exp(c[0])) >> softcap(3 + c[1] ** 2) >> alibi(c[2])
        ),
    ),
    "a table of distances": Case(
        (1, 40, 33, 2, 2, 8, 8), "bfloat16", captures=((2, 21),), aux=("lse", "max"),
        score=lambda c: relative_bias(c[0]),
    ),
    "buckets": Case(
        (1, 140, 140, 2, 1, 8, 8), captures=((2, 16),), mask=lambda c: sliding_window(90, right=50),
        score=lambda c: t5_bias(c[0], max_distance=40), options={"scale": 1.0},
    ),
    "a bias of pairs, one for all of the batch": Case(
        (3, 12, 17, 4, 2, 8, 8), captures=((1, 4, 12, 17),), score=lambda c: pair_bias(c[0]),
    ),
}  # fmt: skip


QUICK = {"temperature, soft cap and slopes", "a table of distances"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in GRADIENTS]
)
def test_gradients(name):
    """Over sixteen draws, since one gradient is a single number."""
    check(GRADIENTS[name], "blockwise", draws=16)


def test_a_score_is_a_parameter():
    """The gradient of a score is a score: of the same kind, with an array for each array."""
    q = jnp.asarray(RNG.normal(size=(1, 12, 3, 8)), jnp.float32)
    score = temperature(jnp.ones(3)) >> relative_bias(jnp.zeros((3, 7))) >> softcap(5.0)
    loss = lambda score: jnp.sin(flex_attention(q, q, q, score_mod=score)).sum()
    grads = jax.jit(jax.grad(loss))(score)
    assert repr(grads) == repr(score)
    step = 1e-2
    moved = jax.tree.map(lambda x, g: x + step * g, score, grads)
    gain = step * sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads))
    np.testing.assert_allclose(loss(moved) - loss(score), gain, rtol=0.1)
    assert gain > 0


def test_layers_are_scanned_over():
    q = jnp.asarray(RNG.normal(size=(1, 8, 3, 4)), jnp.float32)
    layers = alibi(jnp.asarray(RNG.uniform(size=(2, 3)), jnp.float32)) >> softcap(4.0)
    step = lambda x, score: (flex_attention(x, x, x, score_mod=score), None)
    found, _ = jax.lax.scan(step, q, layers)
    expected = q
    for n in range(2):
        expected, _ = step(expected, jax.tree.map(lambda x, n=n: x[n], layers))
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (alibi(PER_HEAD[:2]), r"`alibi\(slopes\)` has shape \[2\]; .* needs \[3\]"),
        (softcap(PER_HEAD[:1]) >> double, r"`softcap\(cap\)` has shape \[1\]; .* needs \[3\]"),
        (temperature(np.ones(4)), r"`temperature\(t\)` has shape \[4\]; .* needs \[3\]"),
        (t5_bias(TABLE[:2]), r"`t5_bias\(table\)` has shape \[2, 7\]; .* needs \[3, 7\]"),
        (relative_bias(TABLE[:, 1:]), r"has 6 entries, which must be 2 R \+ 1"),
        (relative_bias(TABLE[:2]), r"shape \[2, 7\]; .* needs \[3, 7\]"),
        (
            pair_bias(PAIRS[0, 0, 1:]),
            r"pair_bias\(bias\)` has shape \[8, 11\]; .* \[9, 11\]",
        ),
        (pair_bias(PAIRS[:, :2]), r"shape \[2, 2, 9, 11\]; .* needs \[2, 3, 9, 11\]"),
        (pair_bias(PAIRS[..., :1]), r"shape \[2, 3, 9, 1\]; .* needs \[2, 3, 9, 11\]"),
        (pair_bias(np.ones(4)), r"has shape \[4\]; it must be \[T,S\], \[H,T,S\]"),
        (alibi(np.ones((2, 3))), r"`alibi\(slopes\)` has shape \[2, 3\]; it must be a scalar or"),
        (t5_bias(np.ones(())), r"`t5_bias\(table\)` has shape \[\]; it must be \[N\] or \[H,N\]"),
    ],
)
def test_a_score_of_another_call_is_refused(score, message):
    q, k = jnp.ones((B, T, H, 4)), jnp.ones((B, S, H, 4))
    with pytest.raises(ValueError, match=message):
        flex_attention(q, k, k, score_mod=score)


@pytest.mark.usefixtures("unchecked")
def test_only_functions_chain():
    with pytest.raises(TypeError, match=r"not with ndarray: .* `pair_bias\(array\)`"):
        softcap(2.0).__rshift__(PAIRS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"`softcap` is a class: call it"):
        as_score(softcap)  # pyright: ignore[reportArgumentType]


def test_a_moved_score_takes_its_indices_by_name():
    moved = alibi(jnp.array([0.5])).shift(k=3)
    assert float(moved(1.0, b=0, h=0, kv_idx=1, q_idx=0)) == -1.0
    assert float(moved(s=1.0, b=0, h=0, q_idx=0, kv_idx=1)) == -1.0
