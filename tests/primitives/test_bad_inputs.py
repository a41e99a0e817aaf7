"""What is wrong with an argument is said: what was found, what is needed, what to write instead."""

# pyright: reportArgumentType=false

import jax.numpy as jnp
import numpy as np
import pytest

from xform.primitives.attention import flex_attention
from xform.primitives.drop_in import dot_product_attention, flash_attention
from xform.primitives.inference import decode_attention, paged_attention
from xform.primitives.masks import (
    block_diagonal,
    block_sparse,
    block_window,
    causal,
    dilated,
    documents,
    global_tokens,
    graph,
    morton,
    neighborhood,
    random_blocks,
    show,
    sliding_window,
    tiled,
    tree,
)
from xform.primitives.scores import alibi, pair_bias, relative_bias, softcap, t5_bias, temperature

pytestmark = pytest.mark.usefixtures("unchecked")

B, T, H, D = 2, 8, 2, 4
q = jnp.ones((B, T, H, D))
pages, table = jnp.ones((6, 4, H, D)), jnp.zeros((B, 3), jnp.int32)
WORDS = jnp.ones((T, 1), jnp.float32)
flash = lambda **options: flash_attention(q, q, q, **options)
jax_like = lambda **options: dot_product_attention(q, q, q, **options)
decode = lambda **options: decode_attention(q[:, :1], q, q, 5, **options)
masked = lambda mask: flex_attention(q, q, q, mask_mod=mask)
scored = lambda score: flex_attention(q, q, q, score_mod=score)


def paged(**other):
    args = {"q": q[:, :1], "k_pages": pages, "v_pages": pages, "page_table": table, "lengths": 5}
    return paged_attention(*(args | other).values())


# ---- Numbers of masks ----------------------------------------------------------------------------

MASKS = {
    "a window of two": (lambda: sliding_window((3, 1)),
        r"`sliding_window\(size\)` is \(3, 1\), a tuple; it must be a whole number"),
    "half a window": (lambda: sliding_window(2.5),
        r"`sliding_window\(size\)` is 2.5, a float; it must be a whole number"),
    "no window": (lambda: sliding_window(None), r"is None, a NoneType; it must be a whole number"),
    "a floating array": (lambda: sliding_window(jnp.float32(3)),
        r"`sliding_window\(size\)` is float32\[\]; it must be a whole number, .* traced array"),
    "a window for each head": (lambda: masked(sliding_window(jnp.array([3, 4]))),
        r"`sliding_window\(size\)` has shape \[2\]; it must be a scalar: .* `scan` or `vmap`"),
    "an offset in words": (lambda: causal(offset="3"), r"`causal\(offset\)` is '3', a str"),
    "an offset for each text": (lambda: masked(causal(offset=jnp.array([1, 2]))),
        r"`causal\(offset\)` has shape \[2\]; it must be a scalar"),
    "no step": (lambda: dilated(0), r"`dilated\(step\)` is 0; it must be a positive whole number"),
    "blocks of nothing": (lambda: block_diagonal(0), r"`block_diagonal\(size\)` is 0"),
    "a list of sizes": (lambda: block_diagonal([3, 5]), r"is \[3, 5\], a list; .* positive whole"),
    "blocks of less": (lambda: block_window(-1, 2), r"`block_window\(size\)` is -1"),
    "a mask of global tokens": (lambda: global_tokens(jnp.ones(8, bool)),
        r"`global_tokens\(n\)` is bool\[8\]; it must be a whole number"),
    "a shift by a list": (lambda: causal().shift(q=[1, 2]), r"`shift\(q\)` is \[1, 2\], a list"),
    "a shift by text": (lambda: masked(causal().shift(q=jnp.array([1, 2]))),
        r"moves q by an array of shape \[2\]; it must be a scalar: `slice` takes a list"),
    "documents of floats": (lambda: masked(documents(jnp.ones(T))),
        r"`documents\(ids\)` has dtype float32; it needs integers"),
    "offsets of a batch": (lambda: documents.from_offsets(jnp.ones((2, 3), int), 8),
        r"is int32\[2, 3\]; needed are integers \[N \+ 1\].*`jnp.append\(0, jnp.cumsum\(lengths"),
    "floating offsets": (lambda: documents.from_offsets(jnp.ones(3), 8), r"is float32\[3\]; need"),
    "a matrix for words": (lambda: masked(graph(jnp.ones((T, T), bool))),
        r"`graph\(words\)` has dtype bool; it must be uint32.* write `graph.of\(matrix\)`"),
    "one end of an edge": (lambda: graph.from_edges(jnp.ones(3, int), jnp.ones(4, int), 9),
        r"senders \[3\] and receivers \[4\]; needed are as many"),
    "floating parents": (lambda: masked(tree(jnp.ones(T))),
        r"`tree\(parents\)` has dtype float32; it needs integers"),
    "parents of another tree": (lambda: masked(tree(jnp.zeros(5, int))),
        r"`tree\(parents\)` has shape \[5\]; with these q and k it needs \[8\]"),
    "a layout of numbers": (lambda: masked(block_sparse(jnp.ones((2, 2)), 4)),
        r"`block_sparse\(layout\)` is float32\[2, 2\]; it must be booleans \[N,M\] or \[H,N,M\]"),
    "a layout without blocks": (lambda: masked(block_sparse(jnp.ones(2, bool), 4)),
        r"`block_sparse\(layout\)` is bool\[2\]; it must be booleans"),
    "blocks of no size": (lambda: random_blocks(None, 8, 8, size=0, count=1),
        r"`random_blocks\(size\)` is 0; it must be at least 1"),
    "a grid of four": (lambda: neighborhood((2, 2, 2, 2), 3),
        r"`neighborhood\(shape\)` is \(2, 2, 2, 2\); a grid has one to three dimensions"),
    "half a grid": (lambda: neighborhood((2.5, 2), 3),
        r"`neighborhood\(shape\)` is 2.5, a float; it must be a whole number"),
    "windows of other grids": (lambda: neighborhood((4, 4), (3, 3, 3)),
        r"`window=\(3, 3, 3\)` of a neighborhood on a grid \(4, 4\): .* a tuple of 2, each at"),
    "an array of windows": (lambda: masked(neighborhood((2, 4), jnp.array([3, 3, 3]))),
        r"of a neighborhood on a grid \(2, 4\): needed is one for all dimensions or a tuple of 2"),
    "a window in words": (lambda: neighborhood((4, 4), "3"),
        r"`window='3'` of a neighborhood: needed is a number for all dimensions or one for each"),
    "a patch of another grid": (lambda: tiled((4, 4), (2, 2, 2)),
        r"`tile=\(2, 2, 2\)` of a grid \(4, 4\): needed are 2 positive numbers"),
    "a patch of nothing": (lambda: tiled((4, 4), 0), r"`tiled\(tile\)` is 0; it must be at least"),
    "a curve of nothing": (lambda: morton(()), r"`morton\(shape\)` is \(\); a grid has one to"),
    "a picture of halves": (lambda: show(causal(), 2.5), r"`show\(queries\)` is 2.5, a float"),
    "tiles of nothing": (lambda: show(causal(), 8, tile=0), r"`show\(tile\)` is 0; it must be at"),
}  # fmt: skip

# ---- Scores --------------------------------------------------------------------------------------

SCORES = {
    "no cap": (lambda: softcap(0.0), r"`softcap\(cap\)` is 0.0; it must be a positive number"),
    "a list of caps": (lambda: softcap([1.0, 2.0]), r"is \[1.0, 2.0\], a list; .* positive number"),
    "cold": (lambda: temperature(-1), r"`temperature\(t\)` is -1; it must be a positive number"),
    "a table of one": (lambda: scored(relative_bias(jnp.ones(()))),
        r"`relative_bias\(table\)` has shape \[\]; it must be \[N\] or \[H,N\]"),
    "a table of a batch": (lambda: scored(t5_bias(jnp.ones((B, H, 8)))),
        r"`t5_bias\(table\)` has shape \[2, 2, 8\]; it must be \[N\] or \[H,N\]"),
    "all buckets exact": (lambda: scored(t5_bias(jnp.ones(32), max_distance=8)),
        r"`t5_bias\(max_distance=8\)`, of whose buckets the first 8 of a direction are exact"),
    "one bucket": (lambda: scored(t5_bias(jnp.ones(1))), r"two buckets at least for each dir"),
    "slopes of other heads": (lambda: scored(alibi(jnp.ones(3))), r"`alibi\(slopes\)` has shape"),
    "a bias of other keys": (lambda: scored(pair_bias(jnp.ones((T, T + 1)))),
        r"`pair_bias\(bias\)` has shape \[8, 9\]; with these q and k it needs \[8, 8\]"),
    "an array": (lambda: softcap(2.0).__rshift__(jnp.ones(3)),
        r"not with ArrayImpl: of an array of biases, make one: `pair_bias\(array\)`"),
}  # fmt: skip

# ---- Inference -----------------------------------------------------------------------------------

INFERENCE = {
    "no splits": (lambda: decode(splits=0), r"`splits` is 0; it must be at least 1"),
    "half a split": (lambda: decode(splits=1.5), r"`splits` is 1.5, a float"),
    "floating pages": (lambda: paged(page_table=table * 1.0),
        r"`page_table` has dtype float32; needed are integers, page numbers"),
    "a table of one text": (lambda: paged(page_table=table[0]),
        r"`page_table` has shape \(3,\); with q \(2, 1, 2, 4\) needed is \[2, M\]"),
    "tables of other texts": (lambda: paged(page_table=table[:1]),
        r"`page_table` has shape \(1, 3\); with q \(2, 1, 2, 4\) needed is \[2, M\]"),
    "pages of a batch": (lambda: paged(k_pages=pages[None]),
        r"`k_pages` has shape \(1, 6, 4, 2, 4\) and `v_pages` \(6, 4, 2, 4\); needed are \[P, N"),
    "pages of two sizes": (lambda: paged(v_pages=pages[:, :2]),
        r"`k_pages` has shape \(6, 4, 2, 4\) and `v_pages` \(6, 2, 2, 4\); needed are \[P, N"),
    "pages of nothing": (lambda: paged(k_pages=pages[:, :0], v_pages=pages[:, :0]),
        r"P pages of N > 0 keys"),
    "all at once": (lambda: paged(page_table=table[:1] * 1.0, v_pages=pages[:2]),
        r"`page_table` has shape .*; `page_table` has dtype .*; `k_pages` has shape"),
    "lengths in halves": (lambda: paged(lengths=2.5), r"`lengths` is float32\[\]; needed are int"),
}  # fmt: skip

# ---- Drop-ins ------------------------------------------------------------------------------------

DROP_INS = {
    "three sides": (lambda: flash(window=(1, 2, 3)),
        r"flash_attention: `window` is \(1, 2, 3\); needed is a whole number for both sides or a"),
    "an array of sides": (lambda: flash(window=jnp.array([1, 2])),
        r"flash_attention: `window` is an array of shape \[2\]; needed .* a pair `\(left, r"),
    "sides in words": (lambda: flash(window="12"), r"`window` is '12'; needed is a whole number"),
    "half a side": (lambda: flash(window=(1.5, 0)), r"`window` is \(1.5, 0\); needed is a whole"),
    "causal by an array": (lambda: flash(causal=jnp.array(True)), r"`causal` is .* True or False"),
    "flash-attn's names": (lambda: flash(window_size=(3, 0), softmax_scale=1.0, dropout_p=0.1),
        r"`window_size` is `window`; `softmax_scale` is `scale`; `dropout_p` is `dropout_rate`"),
    "a mask": (lambda: flash(mask_mod=causal()), r"`mask_mod` is an argument of `flex_attention`"),
    "negative cap": (lambda: flash(softcap=-1.0), r"`softcap\(cap\)` is -1.0; it must be a positi"),
    "slopes of other heads": (lambda: flash(alibi_slopes=jnp.ones(3)),
        r"`alibi_slopes` has shape \(3,\); needed is \[H\] or \[B,H\]"),
    "slopes of other texts": (lambda: flash(alibi_slopes=jnp.ones((3, H))),
        r"`alibi_slopes` has shape \(3, 2\); needed is \[H\] or \[B,H\], here \[2\] or \[2, 2\]"),
    "queries of three dimensions": (lambda: flash_attention(q[0], q, q),
        r"flash_attention: `q` has shape \(8, 2, 4\); needed are 4 dimensions"),
    "keys of another batch": (lambda: dot_product_attention(q, q[:1], q),
        r"dot_product_attention: `k` has shape \(1, 8, 2, 4\); .* needs batch 2"),
    "a window of three": (lambda: jax_like(local_window_size=(1, 2, 3)),
        r"dot_product_attention: `local_window_size` is \(1, 2, 3\); needed"),
    "floating lengths": (lambda: jax_like(query_seq_lengths=jnp.ones(B)),
        r"`query_seq_lengths` is float32\[2\]; needed are integers, \[2\] or a scalar"),
    "lengths of other texts": (lambda: jax_like(key_value_seq_lengths=jnp.ones(3, int)),
        r"`key_value_seq_lengths` is int32\[3\]; needed are integers, \[2\] or a scalar"),
    "JAX's implementation": (lambda: jax_like(implementation="xla"),
        r"`implementation` is 'xla'; there is \[None, 'blockwise'"),
}  # fmt: skip

CASES = MASKS | SCORES | INFERENCE | {f"{name}, drop-in": x for name, x in DROP_INS.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_message(name):
    call, message = CASES[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_lists_are_what_they_say():
    """Where a list can mean one thing only, it is taken."""
    points = np.array_equal(neighborhood([4, 4], [3, 1])(0, 0, 5, 6), False)
    assert points
    assert repr(neighborhood([4, 4], [3, 1])) == "neighborhood((4, 4), (3, 1))"
    np.testing.assert_array_equal(tiled([4, 4], [2, 2]), tiled((4, 4), 2))
    np.testing.assert_array_equal(morton([4, 4]), morton((4, 4)))
    window = flash(window=[1, 0])
    np.testing.assert_array_equal(window, flash(window=(1, 0)))
