"""What users of other attention libraries met: each fault once more, on ours.

Wrong values, NaN, gradients that fail, shapes and combinations that are refused; the names say what
each checks. Those that fit the table of `cases.py` are judged by it; others follow.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import once
from tests.primitives.cases import Case, check
from xform.primitives.attention import flex_attention
from xform.primitives.block_map import block_map
from xform.primitives.masks import Mask, causal, documents, prefix, sliding_window

RNG = np.random.default_rng(3)
IDS = jnp.asarray(np.sort(RNG.integers(0, 5, 4096)))
BLOCKS = jnp.asarray(np.tril(RNG.random((4, 4)) < 0.6) | np.eye(4, dtype=bool))
MASKS = jnp.asarray(RNG.random((2, 4, 20, 20)) < 0.4)
PADDED = jnp.asarray(np.arange(24) < np.array([[24], [0], [13], [1]]))


def scaled(**factors):
    """Operands multiplied by numbers."""
    return lambda x: x | {n: (f * x[n]).astype(x[n].dtype) for n, f in factors.items()}


def bucket(distance):
    """T5's: exact near, logarithmic far."""
    far = 4 + (jnp.log(jnp.maximum(distance, 1) / 4) / np.log(8) * 4).astype(jnp.int32)
    return jnp.where(distance < 4, distance, jnp.minimum(far, 7))


def beside(width, radius):
    """A square neighbourhood of pixels that are numbered row by row."""
    near = lambda x, y: jnp.abs(x - y) <= radius
    return lambda c: lambda b, h, q, k: near(q % width, k % width) & near(q // width, k // width)


WRONG_VALUES = {
    "a block-diagonal mask of four small heads": Case(
        (1, 256, 256, 4, 4, 16, 16), mask=lambda c: lambda b, h, q, k: q // 64 == k // 64
    ),
    "float32 is multiplied as float32": Case((1, 512, 512, 1, 1, 16, 16)),
    "keys fewer than a tile, one query": Case((2, 1, 64, 2, 2, 16, 16), mask=lambda c: prefix(50)),
    "values wider than keys, with groups": Case((1, 70, 33, 8, 4, 24, 40)),
    "a table of blocks and a mask that is always true": Case(
        (1, 256, 256, 2, 1, 16, 16),
        mask=lambda c: lambda b, h, q, k: BLOCKS[q // 64, k // 64] & (k >= 0),
    ),
    "a mask made for 4,096 positions used at 100": Case(
        (2, 100, 100, 2, 2, 16, 16), mask=lambda c: lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k)
    ),
    "a mask that each batch entry has of its own, for all heads": Case(
        (4, 20, 20, 8, 4, 8, 8), mask=lambda c: lambda b, h, q, k: (k < 5 * b + 2) | (q == k)
    ),
    "an array of masks, one for each batch entry and head": Case(
        (2, 20, 20, 4, 2, 8, 8), mask=lambda c: lambda b, h, q, k: MASKS[b, h, q, k]
    ),
    "an array of masks, one for each batch entry and all heads": Case(
        (2, 20, 20, 4, 2, 8, 8), mask=lambda c: lambda b, h, q, k: MASKS[:, :1][b, 0, q, k]
    ),
    "an array that is one mask for all batches and heads": Case(
        (2, 20, 20, 4, 2, 8, 8), mask=lambda c: lambda b, h, q, k: MASKS[0, 0][q, k]
    ),
    "a window in 2,048 positions": Case(
        (1, 2048, 2048, 1, 1, 16, 16), mask=lambda c: sliding_window(128)
    ),
    "float32 with heads of 128": Case((1, 200, 200, 2, 1, 128, 128), mask=lambda c: causal()),
    "a neighbourhood by absolute differences, dq too": Case(
        (1, 576, 576, 1, 1, 16, 16), "float16", mask=beside(24, 2)
    ),
    "heads of 96, one query": Case((1, 1, 77, 4, 2, 96, 96)),
    "heads of 192 with values of 128": Case((1, 40, 40, 2, 1, 192, 128), mask=lambda c: causal()),
    "a window that is open to the left only": Case(
        (1, 256, 256, 1, 1, 16, 16), mask=lambda c: sliding_window(17)
    ),
    "lengths that no tile divides, queries fewer than keys": Case(
        (1, 130, 517, 2, 1, 32, 32), mask=lambda c: causal(offset=387)
    ),
    "a mask by head with groups": Case(
        (1, 50, 50, 8, 2, 16, 16), mask=lambda c: lambda b, h, q, k: (k >= 3 * h) & (k <= q)
    ),
    "more queries than keys, causal from the end": Case(
        (1, 200, 100, 2, 2, 16, 16), mask=lambda c: causal(offset=-100)
    ),
}  # fmt: skip

BAD_GRADIENTS = {
    "log-sum-exp under a mask that is longer than the sequence": Case(
        (1, 100, 100, 2, 2, 16, 16), mask=lambda c: causal() & sliding_window(4096)
    ),
    "32 tokens in bfloat16": Case((1, 32, 32, 2, 2, 64, 64), "bfloat16", mask=lambda c: causal()),
    "16 tokens in bfloat16": Case((2, 16, 16, 2, 2, 64, 64), "bfloat16"),
    "log-sum-exp below -88.7 and a length of 64 modulo 128": Case(
        (1, 704, 704, 1, 1, 16, 16), mask=lambda c: causal(), score=lambda c: _lower
    ),
    "padding of a whole batch row": Case(
        (4, 24, 24, 2, 1, 8, 8), mask=lambda c: lambda b, h, q, k: PADDED[b, k]
    ),
    "large inputs": Case(
        (1, 200, 200, 1, 1, 64, 64), "bfloat16", mask=lambda c: causal(),
        alter=scaled(q=3, k=3, v=3),
    ),
    "a float32 bias of bfloat16 inputs": Case(
        (2, 32, 32, 4, 4, 32, 32), "bfloat16", captures=((4, 32, 32),),
        score=lambda c: lambda s, b, h, q, k: s + c[0][h, q, k],
    ),
    "a bias shared by the batch": Case(
        (4, 20, 20, 2, 2, 8, 8), captures=((1, 2, 20, 20),),
        score=lambda c: lambda s, b, h, q, k: s + c[0][0, h, q, k],
    ),
    "a learnable number for each head": Case(
        (2, 16, 16, 4, 4, 16, 16), captures=((4,),),
        score=lambda c: lambda s, b, h, q, k: s * c[0][h] + c[0][h],
    ),
    "a table of relative positions": Case(
        (1, 60, 60, 2, 2, 16, 16), captures=((120,),),
        score=lambda c: lambda s, b, h, q, k: s + c[0][q - k + 60],
    ),
    "buckets of distances, as in T5": Case(
        (1, 60, 60, 4, 4, 16, 16), captures=((4, 8),), mask=lambda c: causal(),
        score=lambda c: lambda s, b, h, q, k: s + c[0][h, bucket(q - k)],
    ),
    # One token, whose gradients cancel, is judged by its own bound in `test_attention.py`.
    "two tokens": Case((3, 2, 2, 2, 1, 16, 16)),
}  # fmt: skip

COMBINATIONS = {
    "a mask by key, broadcast along every other dimension": Case(
        (4, 24, 24, 2, 2, 8, 8), mask=lambda c: lambda b, h, q, k: PADDED[b % 4, k] | (k == 0)
    ),
    **{
        f"heads of {d}": Case((1, 20, 20, 2, 1, d, d), "bfloat16", mask=lambda c: causal())
        for d in (24, 40, 72)
    },
}  # fmt: skip


def _lower(s, b, h, q, k):
    return s - 100


CASES = WRONG_VALUES | BAD_GRADIENTS | COMBINATIONS
QUICK = {
    "a mask made for 4,096 positions used at 100",
    "lengths that no tile divides, queries fewer than keys",
    "log-sum-exp below -88.7 and a length of 64 modulo 128",
    "padding of a whole batch row",
    "a float32 bias of bfloat16 inputs",
    "an array of masks, one for each batch entry and head",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES]
)
def test_the_report(name):
    check(CASES[name], "blockwise")


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


@pytest.mark.parametrize("length", [90, pytest.param(512, marks=pytest.mark.slow)])
def test_two_calls_merged_by_their_log_sum_exps_are_one_call_with_both_masks(length):
    """A window, and tokens that all see, apart and together; values and gradients."""
    x = tuple(normal(1, length, 2, 8) for _ in range(3))
    window, rest = sliding_window(9, right=8), prefix(4) & ~sliding_window(9, right=8)

    def merged(q, k, v):
        parts = [flex_attention(q, k, v, mask_mod=m, aux="lse") for m in (window, rest)]
        lses = [aux.lse[...] for _, aux in parts]
        weights = [jnp.exp(lse - jnp.logaddexp(*lses))[..., None] for lse in lses]
        return jnp.sin(sum(out * w for (out, _), w in zip(parts, weights, strict=True))).sum()

    together = lambda q, k, v: jnp.sin(flex_attention(q, k, v, mask_mod=window | prefix(4))).sum()
    found, true = once(
        lambda *x: [jax.value_and_grad(f, (0, 1, 2))(*x) for f in (merged, together)], *x
    )
    for a, b in zip(*map(jax.tree.leaves, (found, true)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_a_captured_table_of_more_than_two_to_the_31_entries():
    """Flat positions beyond int32: the last rows and columns of a square table of bytes."""
    n = 46_400
    table = np.zeros((n, n), np.int8)
    table[-8:, -16:] = RNG.integers(0, 2, (8, 16))
    table[:, -16] = 1
    q, k, v = normal(1, 8, 1, 8), normal(1, 16, 1, 8), normal(1, 16, 1, 8)

    def f(q, k, v, table, offsets):
        mask = lambda b, h, i, j: table[i + offsets[0], j + offsets[1]] > 0
        return flex_attention(q, k, v, mask_mod=mask)

    found = once(f, q, k, v, table, jnp.array([n - 8, n - 16]))
    np.testing.assert_allclose(
        found, once(f, q, k, v, table[-8:, -16:], jnp.array([0, 0])), rtol=1e-6
    )


@pytest.mark.slow
def test_keys_of_more_than_two_to_the_31_numbers():
    """Flat positions beyond int32: a cache of 4.3 GB is seen at its ends and around number 2^31."""
    length, size = 2**24 + 1024, 128
    starts = [0, 2**24 - 8, 2**24 + 200, length - 100]
    block = np.asarray(normal(8192, size).astype(jnp.bfloat16))
    cache = np.empty((1, length, 1, size), block.dtype)
    for n, start in enumerate(range(0, length, 8192)):
        cache[0, start : start + 8192, 0] = np.roll(block, n, axis=1)[: length - start]
    assert cache.size > 2**31
    q, cache = normal(1, 8, 2, size).astype(jnp.bfloat16), jnp.asarray(cache)
    seen = jnp.array(starts)
    mask = lambda b, h, i, j: ((j >= seen) & (j < seen + 100)).any() & (j % 3 != i % 3)
    place = jnp.concatenate([start + jnp.arange(100) for start in starts])

    def values(q, k, mask):
        f = lambda q: flex_attention(q, k, k, mask_mod=mask).astype(jnp.float32)
        return jax.value_and_grad(lambda q: jnp.sin(3 * f(q)).sum())(q)

    found = jax.jit(lambda q, k: values(q, k, mask))(q, cache)
    some = lambda b, h, i, j: mask(b, h, i, place[j])
    true = jax.jit(lambda q, k: values(q, k, some))(q, cache[:, place])
    for x, y in zip(*(jax.tree.map(np.float32, tree) for tree in (found, true)), strict=True):
        assert np.abs(y).max() > 0.01
        np.testing.assert_allclose(x, y, rtol=0.02, atol=0.01 * np.abs(y).max())


def test_gradients_of_tokens_beyond_the_last_document_are_zero():
    ids = jnp.array([0, 0, 0, 1, 1, -1, -1, -1])
    x = normal(1, 8, 2, 8), normal(1, 8, 2, 8), normal(1, 8, 2, 8)
    packed = lambda b, h, q, k: (ids[q] >= 0) & (ids[q] == ids[k])
    grads = once(jax.grad(lambda *x: flex_attention(*x, mask_mod=packed).sum(), (0, 1, 2)), *x)
    for grad in grads:
        assert not grad[:, 5:].any()
    assert grads[2][:, :5].all()


def test_a_captured_number_may_be_traced():
    q = normal(1, 12, 2, 8)
    f = lambda cap: flex_attention(q, q, q, score_mod=lambda s, *_: cap * jnp.tanh(s / cap)).sum()
    many = once(lambda caps: jax.lax.map(f, caps), jnp.array([1.0, 2.0, 30.0]))
    np.testing.assert_allclose(many, [f(cap) for cap in (1.0, 2.0, 30.0)], rtol=1e-5)


@dataclasses.dataclass
class Wrapped(Mask):
    """A user's own mask around another."""

    inner: Mask

    def __call__(self, b, h, q_idx, kv_idx):
        return self.inner(b, h, q_idx, kv_idx) & (kv_idx != 1)


def test_a_document_mask_may_be_wrapped_and_passed_through_transforms():
    """As an argument of jit, mapped by vmap, carried by scan, and inside a mask of the user's."""
    ids = jnp.array([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 2]])
    q = normal(1, 6, 2, 8)
    attend = lambda mask: flex_attention(q, q, q, mask_mod=Wrapped(mask & causal()))
    one_by_one = jnp.stack([attend(documents(row)) for row in ids])
    np.testing.assert_allclose(jax.jit(attend)(documents(ids[0])), one_by_one[0], atol=1e-6)
    np.testing.assert_allclose(once(jax.vmap(attend), documents(ids)), one_by_one, atol=1e-6)
    scanned = once(lambda m: jax.lax.scan(lambda c, m: (c, attend(m)), 0, m)[1], documents(ids))
    np.testing.assert_allclose(scanned, one_by_one, atol=1e-6)


@pytest.mark.slow
def test_a_block_map_of_as_many_keys_as_there_may_be():
    """The last tiles of 2^30 positions, one query: no index of a tile or a pair wraps."""
    i, n, tile = jnp.int32(0), 2**30, 512
    mask = jax.make_jaxpr(lambda b, h, q, k: (k >= n - tile - 3) | (k == 5))(i, i, i, i).jaxpr
    build = lambda: block_map(mask, (), b=0, h=0, q_len=1, kv_len=n, q_tile=1, kv_tile=tile)
    kinds = np.asarray(jax.jit(build)())
    assert kinds.shape == (1, n // tile)
    assert np.flatnonzero(kinds).tolist() == [0, n // tile - 2, n // tile - 1]
    assert kinds[0, -2:].tolist() == [1, 2]


def test_a_block_map_of_a_million_tokens():
    i = jnp.int32(0)
    mask = jax.make_jaxpr(lambda b, h, q, k: q >= k)(i, i, i, i).jaxpr
    n = 2**20
    build = lambda: block_map(mask, (), b=0, h=0, q_len=n, kv_len=n, q_tile=1024, kv_tile=1024)
    kinds = jax.jit(build)()
    assert np.array_equal(kinds, np.tri(1024, k=-1) * 2 + np.eye(1024))
