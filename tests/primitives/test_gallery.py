"""Every variant that the field names, in at most five lines of user code.

Each is judged by the list of visible pairs (`cases.py`), values and gradients.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import once
from tests.primitives.cases import Case, check
from xform.primitives.attention import flex_attention
from xform.primitives.inference import decode_attention, paged_attention
from xform.primitives.masks import (
    bigbird,
    block_diagonal,
    causal,
    dilated,
    documents,
    full,
    graph,
    lengths,
    neighborhood,
    prefix,
    sliding_window,
    strided,
    tiled,
    tree,
)
from xform.primitives.scores import (
    alibi,
    pair_bias,
    relative_bias,
    softcap,
    t5_bias,
    temperature,
)

B, T, H, D = 2, 36, 4, 8
RNG = np.random.default_rng(0)
q, k, v = (jnp.asarray(RNG.normal(size=(B, T, H, D)), jnp.float32) for _ in range(3))
OFFSETS = jnp.array([0, 5, 17, 30])
BONDS = jnp.asarray(RNG.integers(-1, T, (2, B, 60)))
PARENTS = jnp.asarray([-1, *(int(RNG.integers(0, n)) for n in range(1, T))])
BIAS = jnp.asarray(RNG.normal(size=(B, H, T, T)), jnp.float32)
TABLE = jnp.asarray(RNG.normal(size=(H, 2 * T + 1)), jnp.float32)


# ---- The gallery: `(score, mask)` of each ------------------------------------------------------


def full_attention():
    return None, full()


def causal_attention():
    return None, causal()


def window():
    return None, sliding_window(7)


def local_window():
    return None, sliding_window(4, right=3)


def prefix_language_model():
    return None, prefix(jnp.array([3, 9])) | causal()


def documents_packed():
    return None, causal() & documents.from_offsets(OFFSETS, T)


def jagged():
    return None, lengths(jnp.array([20, 36]), jnp.array([20, 36]))


def dilated_window():
    return None, sliding_window(12) & dilated(3)


def strided_sparse():
    return None, strided(6)


def blocks_of_llama_4():
    return None, causal() & block_diagonal(8)


def big_bird():
    return None, bigbird(jax.random.key(0), T, block=4, random=2, heads=H)


def neighborhood_of_an_image():
    return None, neighborhood((6, 6), 3)


def neighborhood_in_patches():
    order = tiled((6, 6), 3)
    return None, neighborhood((6, 6), 3, dilation=2, order=order)


def neighborhood_of_a_video():
    return None, neighborhood((3, 3, 4), (2, 3, 3), causal=(True, False, False))


def molecules():
    bonds = graph.from_edges(BONDS[0], BONDS[1], T) | graph.from_edges(BONDS[1], BONDS[0], T)
    return None, bonds | sliding_window(1)


def speculative_tree():
    return None, tree(PARENTS)


def slopes_of_alibi():
    return alibi.of(H), causal()


def soft_cap():
    return softcap(2.0), causal()


def tanh_of_ones_own():
    return (lambda s, b, h, q_idx, kv_idx: jnp.tanh(s)), None


def relative_positions():
    return relative_bias(TABLE), None


def buckets_of_t5():
    return t5_bias(TABLE[:, :16], bidirectional=False, max_distance=30), causal()


def pairs_of_alphafold():
    return pair_bias(BIAS), lengths(jnp.array([30, 36]))


def learned_temperature_with_a_cap():
    return temperature(jnp.exp(TABLE[:, 0])) >> softcap(5.0) >> alibi.of(H), causal()


def gemma_2():
    return softcap(50.0), causal() & sliding_window(16)


MODS = [
    full_attention, causal_attention, window, local_window, prefix_language_model,
    documents_packed, jagged, dilated_window, strided_sparse, blocks_of_llama_4, big_bird,
    neighborhood_of_an_image, neighborhood_in_patches, neighborhood_of_a_video, molecules,
    speculative_tree, slopes_of_alibi, soft_cap, tanh_of_ones_own, relative_positions,
    buckets_of_t5, pairs_of_alphafold, learned_temperature_with_a_cap, gemma_2,
]  # fmt: skip


def decoding():
    mask, position = causal() & sliding_window(9), 21
    return decode_attention(q[:, position, None], k, v, position + 1, mask_mod=mask)


def paging():
    k_pages, v_pages = (x.reshape(B * T // 4, 4, H, D) for x in (k, v))
    table, mask, n = jnp.arange(B * T // 4).reshape(B, -1), causal() & sliding_window(9), 21
    return paged_attention(q[:, n, None], k_pages, v_pages, table, n + 1, mask_mod=mask)


@pytest.mark.parametrize("variant", [*MODS, decoding, paging], ids=lambda f: f.__name__)
def test_at_most_five_lines(variant):
    head, *body = inspect.getsource(variant).splitlines()
    assert head.startswith("def ")
    assert 1 <= len(body) <= 5


QUICK = {"big_bird", "gemma_2"}


@pytest.mark.parametrize(
    "variant",
    [pytest.param(f, marks=[] if f.__name__ in QUICK else pytest.mark.slow) for f in MODS],
    ids=lambda f: f.__name__,
)
def test_values_and_gradients(variant):
    score, mask = variant()
    check(
        Case((B, T, T, H, H, D, D), score=lambda c: score, mask=lambda c: mask, aux=("lse",)),
        "blockwise",
    )


@pytest.mark.parametrize("variant", MODS, ids=lambda f: f.__name__)
def test_values(variant):
    score, mask = variant()
    attend = lambda how, mask: flex_attention(
        q, k, v, score_mod=score, mask_mod=mask, implementation=how
    )
    found, true, unmasked = once(
        lambda: (attend(None, mask), attend("reference", mask), attend("reference", None))
    )
    np.testing.assert_allclose(found, true, atol=3e-6)
    assert mask is None or "full" in repr(mask) or not np.allclose(found, unmasked, atol=1e-2)


@pytest.mark.parametrize("variant", [decoding, paging], ids=lambda f: f.__name__)
def test_values_of_inference(variant):
    mask = causal() & sliding_window(9)
    whole = flex_attention(q, k, v, mask_mod=mask, implementation="reference")
    np.testing.assert_allclose(once(variant)[:, 0], whole[:, 21], atol=3e-6)
