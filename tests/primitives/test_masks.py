"""Masks say what they mean, combine, print as they are written, and travel through transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform.primitives.attention import flex_attention
from xform.primitives.masks import causal, documents, prefix, sliding_window


def dense(mask, t, s, b=0):
    """The mask over all pairs, `[t,s]`."""
    by_key = jax.vmap(mask, (None, None, None, 0))
    return np.asarray(jax.vmap(by_key, (None, None, 0, None))(b, 0, jnp.arange(t), jnp.arange(s)))


Q, K = np.arange(7)[:, None], np.arange(9)[None]
IDS = np.random.default_rng(0).integers(0, 3, (2, 9))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (causal(), Q >= K),
        (causal(offset=2), Q + 2 >= K),
        (sliding_window(3), (Q - K >= 0) & (Q - K < 3)),
        (sliding_window(2, right=3), (Q - K > -4) & (Q - K < 2)),
        (prefix(4), (K < 4) & (Q >= 0)),
        (prefix(jnp.array([4, 6])), (K < 6) & (Q >= 0)),
        (documents(IDS[0]), IDS[0][:7, None] == IDS[0]),
        (documents(IDS), IDS[1][:7, None] == IDS[1]),
        (documents(IDS[:, :7], IDS[:, ::-1]), IDS[1][:7, None] == IDS[1, ::-1]),
    ],
    ids=lambda x: repr(x) if callable(x) else "",
)
def test_variants(mask, expected):
    assert expected.any()
    assert not expected.all()
    np.testing.assert_array_equal(dense(mask, 7, 9, b=1), expected)


def even(b, h, q_idx, kv_idx):
    return kv_idx % 2 == 0


@pytest.mark.parametrize(
    ("mask", "expected", "text"),
    [
        (causal() & prefix(5), (Q >= K) & (K < 5), "causal() & prefix(5)"),
        (causal() | prefix(5), (Q >= K) | (K < 5), "causal() | prefix(5)"),
        (~causal(), Q < K, "~causal()"),
        (~(causal() | even), (Q < K) & (K % 2 == 1), "~(causal() | even)"),
        (even & causal(), (Q >= K) & (K % 2 == 0), "even & causal()"),
        (even | causal(), (Q >= K) | (K % 2 == 0), "even | causal()"),
        (causal() & even, (Q >= K) & (K % 2 == 0), "causal() & even"),
        (
            (causal() | prefix(2)) & ~sliding_window(3, right=1),
            ((Q >= K) | (K < 2)) & ((Q - K >= 3) | (Q - K < -1)),
            "(causal() | prefix(2)) & ~sliding_window(3, right=1)",
        ),
    ],
)
def test_combinations(mask, expected, text):
    np.testing.assert_array_equal(dense(mask, 7, 9), expected)
    assert repr(mask) == text


def test_repr_shows_arrays_by_type():
    ids = jnp.asarray(IDS)
    text = "causal(offset=2) & documents(ids: int32[2,9])"
    assert repr(causal(offset=jnp.int32(2)) & documents(ids)) == text
    seen = []
    jax.jit(lambda w: seen.append(repr(sliding_window(w))))(3)
    assert seen == ["sliding_window(size: int32[])"]


def test_windows_are_scanned_over():
    sizes = jnp.array([1, 4, 6])
    _, out = jax.lax.scan(lambda _, m: (None, m(0, 0, 5, 2)), None, sliding_window(sizes))
    assert out.tolist() == [False, True, True]


def test_batches_of_masks():
    masks = prefix(jnp.array([3, 5])) & causal() & even
    out = jax.vmap(lambda m: m(0, 0, 6, 4))(masks)
    assert out.tolist() == [False, True]


def test_masks_are_pytrees():
    mask = causal() & documents(jnp.asarray(IDS)) & even
    doubled = jax.tree.map(lambda x: x * 2, mask)
    np.testing.assert_array_equal(dense(doubled, 7, 9, b=1), dense(mask, 7, 9, b=1))
    out = jax.jit(lambda m, q, k: m(1, 0, q, k))(mask, 6, 4)
    assert bool(out) == dense(mask, 7, 9, b=1)[6, 4]


def test_other_dimensions_are_refused():
    with pytest.raises(ValueError, match=r"`documents\(ids\)` has shape \[1, 2, 9\].*\[B,T\]"):
        documents(IDS[None])(0, 0, 0, 0)
    with pytest.raises(ValueError, match=r"`prefix\(n\)` has shape \[2, 9\].*a scalar or \[B\]"):
        prefix(IDS)(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (documents(IDS[0, :6]), r"`documents\(ids\)` has shape \[6\]; .* it needs \[7\]"),
        (documents(IDS[0]), r"`documents\(ids\)` has shape \[9\]; .* it needs \[7\]"),
        (~(causal() | documents(IDS)), r"`documents\(ids\)` has shape \[2, 9\]; .* \[2, 7\]"),
        (documents(IDS[:1, :7]), r"`documents\(ids\)` has shape \[1, 7\]; .* \[2, 7\]"),
        (documents(IDS[:, :7], IDS[0, :7]), r"`documents\(kv_ids\)` has shape \[7\]; .* \[9\]"),
        (documents(IDS[0, :7]), r"the ids of 7 queries for those of 9 keys: give it `kv_ids`"),
        (prefix(jnp.ones(3, int)) & causal(), r"`prefix\(n\)` has shape \[3\]; .* \[2\]"),
    ],
)
def test_a_mask_of_another_sequence_is_refused(mask, message):
    x = jnp.ones((2, 9, 1, 4))
    with pytest.raises(ValueError, match=message):
        flex_attention(x[:, :7], x, x, mask_mod=mask)


def test_a_mask_of_this_sequence_is_not():
    x = jnp.ones((2, 9, 1, 4))
    for mask in (documents(IDS), documents(IDS[0]) & prefix(jnp.array([3, 4])) & even):
        jax.eval_shape(lambda x, mask=mask: flex_attention(x, x, x, mask_mod=mask), x)


@pytest.mark.usefixtures("unchecked")
def test_only_functions_combine():
    with pytest.raises(TypeError, match="not with ndarray: wrap an array"):
        causal().__and__(IDS)  # pyright: ignore[reportArgumentType]


def test_a_mask_has_no_truth_value():
    with pytest.raises(TypeError, match=r"causal\(\) is neither true nor false: .* with `&`"):
        bool(causal() and sliding_window(3))
