"""In decoding, masks and scores mean the rows of one forward pass over the whole text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import once
from xform.primitives import inference
from xform.primitives._objects import in_text
from xform.primitives.attention import flex_attention
from xform.primitives.inference import decode_attention, paged_attention
from xform.primitives.masks import (
    bigbird,
    block_diagonal,
    block_sparse,
    block_window,
    causal,
    causal_lower_right,
    dilated,
    documents,
    full,
    global_tokens,
    graph,
    lengths,
    neighborhood,
    prefix,
    sliding_window,
    strided,
    tree,
)
from xform.primitives.scores import alibi, pair_bias, relative_bias, t5_bias

S, PAGE, H = 24, 4, 2
LENGTHS = jnp.array([24, 17])
NEW = 6
RNG = np.random.default_rng(0)
RELATED = jnp.asarray(RNG.random((S, S)) < 0.4)
PARENTS = jnp.asarray([-1, 0, 0, 1, 1, 3])
TREE = tree(PARENTS, context=LENGTHS - NEW)
AT = tree(PARENTS, context=LENGTHS - NEW, first=LENGTHS - NEW)

# A mask as decoding takes it, and as the forward pass over the whole text does, if that is another.
MASKS = {
    "full": (full(), None),
    "causal": (causal(), None),
    "causal_lower_right of a square": (causal_lower_right(S, S), None),
    "sliding_window": (causal() & sliding_window(5), None),
    "two-sided window": (sliding_window(3, right=2), None),
    "dilated": (dilated(3), None),
    "strided": (strided(4), None),
    "block_diagonal": (block_diagonal(5), None),
    "global_tokens": (causal() & (global_tokens(2) | sliding_window(3)), None),
    "prefix": (prefix(jnp.array([3, 9])) | causal(), None),
    "lengths": (causal() & lengths(jnp.array([20, 15]), jnp.array([22, 14])), None),
    "documents": (causal() & documents(jnp.arange(S) // 7), None),
    "graph": (graph.of(RELATED), None),
    "block_sparse": (block_sparse(RELATED[:8, :8], 3), None),
    "block_window": (block_window(4, 1), None),
    "bigbird": (bigbird(jax.random.key(0), S, block=4, heads=H), None),
    "neighborhood": (neighborhood((4, 6), 3), None),
    "shifted": (causal().shift(k=2), None),
    "shifted queries": (causal().shift(q=-2), None),
    "negated": (~causal() & ~sliding_window(2), None),
    "tree": (TREE, AT),
    "tree in a combination": (~(~TREE & full()), AT),
    "tree in a function": (lambda b, h, q, k: TREE(b, h, q, k), AT),
    "tree at other heads": (TREE.shift(h=1), AT),
    "tree that says where it begins": (AT, AT),
    "tree with one beginning": (tree(PARENTS, context=11, first=11), None),
    # Who moves the queries says where they are counted from.
    "tree that is moved": (tree(PARENTS, context=11).shift(q=-11) & (lambda b, h, q, k: q > 10),
                           tree(PARENTS, context=11, first=11) & (lambda b, h, q, k: q > 10)),
}  # fmt: skip


def rows(mask, b, h):
    """What the new queries of a text see of its keys, `[NEW,S]`."""
    by_key = jax.vmap(mask, (None, None, None, 0))
    first = int(LENGTHS[b]) - NEW
    places = jnp.arange(first, first + NEW)
    seen = jax.vmap(by_key, (None, None, 0, None))(b, h, places, jnp.arange(S))
    return np.asarray(seen) & (np.arange(S) < int(LENGTHS[b]))


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    """The mask that decoding asks is the rows of the whole one."""
    mask, whole = MASKS[name]
    seen = functools.partial(inference._seen, LENGTHS, NEW, mask)
    for b in range(2):
        expected = rows(mask if whole is None else whole, b, 1)
        by_key = jax.vmap(seen, (None, None, None, 0))
        found = jax.vmap(by_key, (None, None, 0, None))(b, 1, jnp.arange(NEW), jnp.arange(S))
        there = np.arange(S) < int(LENGTHS[b])
        np.testing.assert_array_equal(np.asarray(found) & there, expected)
        assert expected.any()


SCORES = {
    "alibi": alibi(jnp.array([0.5, 0.1])),
    "relative_bias": relative_bias(jnp.asarray(RNG.normal(size=(H, 9)), jnp.float32)),
    "t5_bias": t5_bias(jnp.asarray(RNG.normal(size=(H, 8)), jnp.float32), max_distance=12),
    "pair_bias": pair_bias(jnp.asarray(RNG.normal(size=(2, H, S, S)), jnp.float32)),
}
QUICK = {"tree": "pair_bias", "prefix": "t5_bias"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in MASKS]
)
@pytest.mark.parametrize("how", ["decode", "pages"])
def test_attention(name, how):
    """With a score that reads positions too, over caches and over pages."""
    mask, whole = MASKS[name]
    score = SCORES[QUICK.get(name) or list(SCORES)[len(name) % 4]]
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(2, S, H, 4)), jnp.float32) for _ in range(3))
    there = lambda b, h, i, j: j < LENGTHS[b]
    true = flex_attention(
        q, k, v, score_mod=score, mask_mod=there & (full() & (mask if whole is None else whole)),
        implementation="reference",
    )  # fmt: skip
    new = jnp.stack([q[b, n - NEW : n] for b, n in enumerate((24, 17))])
    true = jnp.stack([true[b, n - NEW : n] for b, n in enumerate((24, 17))])
    mods = {"score_mod": score, "mask_mod": mask}
    if how == "decode":
        found = once(lambda *x: decode_attention(*x, **mods), new, k, v, LENGTHS)
    else:
        k, v = (x.reshape(-1, PAGE, *x.shape[2:]) for x in (k, v))
        table = jnp.arange(len(k)).reshape(2, -1)
        found = once(lambda *x: paged_attention(*x, **mods), new, k, v, table, LENGTHS)
    np.testing.assert_allclose(found, true, atol=3e-6)


@pytest.mark.parametrize(
    "mask",
    [
        causal(offset=S - NEW),
        causal_lower_right(NEW, S),
        sliding_window(5) & causal(offset=jnp.int32(2)),
        lambda *index: causal(offset=3)(*index),
    ],
    ids=["offset", "lower right", "traced", "in a function"],
)
def test_an_offset_that_would_count_twice_is_refused(mask):
    q, k = jnp.ones((1, NEW, H, 4)), jnp.ones((1, S, H, 4))
    with pytest.raises(ValueError, match=r"counted from the beginning .* write `causal\(\)`"):
        decode_attention(q, k, k, S, mask_mod=mask)


def test_a_tree_stands_where_its_call_says():
    """By itself its queries are its nodes, in a text they are positions, moved they are neither."""
    parents = jnp.array([-1, 0])
    mask = tree(parents, context=3)
    at = lambda mask: [[bool(mask(0, 0, q, k)) for k in range(5)] for q in range(5)]
    alone = at(mask)
    assert alone[:2] == [[True, True, True, True, False], [True] * 5]
    with in_text():
        assert at(mask)[3:] == alone[:2]
        assert at(mask)[:3] == np.tri(3, 5, dtype=bool).tolist(), "tokens of the text are causal"
        assert at(mask.shift(q=-3))[3:] == alone[:2]
        assert at(mask.slice(q=jnp.array([0, 1, 0, 1, 1])))[:2] == alone[:2]
    assert at(mask) == alone


@pytest.mark.parametrize("how", ["decode", pytest.param("pages", marks=pytest.mark.slow)])
def test_a_tree_may_be_moved_to_where_its_queries_stand(how):
    """What decoding says by itself, `first` and a shift say too: all three are one mask."""
    length, start = 17, 11
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.normal(size=(2, n, H, 4)), jnp.float32) for n in (NEW, S, S))
    if how == "decode":
        attend = lambda mask: decode_attention(q, k, v, length, mask_mod=mask)
    else:
        k_pages, v_pages = (x.reshape(-1, PAGE, *x.shape[2:]) for x in (k, v))
        table = jnp.arange(2 * S // PAGE).reshape(2, -1)
        attend = lambda mask: paged_attention(q, k_pages, v_pages, table, length, mask_mod=mask)
    mask = tree(PARENTS, context=start)
    own = flex_attention(q, k[:, :length], v[:, :length], mask_mod=mask)
    for same in (
        mask,
        mask.shift(q=-start),
        mask.shift(q=-start + 1).shift(q=-1) & full(),
        tree(PARENTS, context=start, first=start),
    ):
        np.testing.assert_allclose(attend(same), own, atol=3e-6)


def test_a_tree_that_is_moved_has_the_parents_that_rows_need():
    q, k = jnp.ones((1, NEW + 1, H, 4)), jnp.ones((1, S, H, 4))
    with pytest.raises(ValueError, match=r"`tree\(parents\)` has shape \[6\]; .* \[at least 9\]"):
        flex_attention(q, k, k, mask_mod=tree(PARENTS).shift(q=2))
