"""Every number of a mask or a score may be a traced array: under `jit`, under `vmap`, in a scan.

What sets the size of an array may not, and says so.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import once
from xform.primitives import masks, scores
from xform.primitives.attention import flex_attention
from xform.primitives.drop_in import dot_product_attention, flash_attention
from xform.primitives.masks import (
    Mask,
    bigbird,
    block_diagonal,
    block_sparse,
    block_window,
    causal,
    causal_lower_right,
    dilated,
    documents,
    global_tokens,
    graph,
    lengths,
    morton,
    neighborhood,
    prefix,
    random_blocks,
    sliding_window,
    strided,
    tiled,
    tree,
)
from xform.primitives.scores import Score, alibi, softcap, t5_bias, temperature

T = 24
KEY = jax.random.key(0)
IDS = jnp.arange(T) // 5
LAYOUT = jnp.asarray(np.random.default_rng(0).random((T, T)) < 0.4)
PARENTS = jnp.asarray([-1, 0, 0, 1, 2, 2])

# Of each, how it is made of its numbers, and those of two members of a batch.
MASKS = {
    "causal": (lambda n: causal(offset=n), [(2,), (-3,)]),
    "causal_lower_right": (causal_lower_right, [(3, 9), (9, 3)]),
    "sliding_window": (lambda n, m: sliding_window(n, right=m), [(3, 2), (5, 0)]),
    "dilated": (dilated, [(3,), (4,)]),
    "strided": (strided, [(3,), (4,)]),
    "block_diagonal": (block_diagonal, [(4,), (7,)]),
    "global_tokens": (global_tokens, [(1,), (5,)]),
    "prefix": (prefix, [(1,), (5,)]),
    "lengths": (lengths, [(9, 20), (20, 9)]),
    "documents": (lambda n: documents(IDS, padding=n), [(1,), (4,)]),
    "graph": (lambda n: graph.of(LAYOUT).shift(q=n), [(0,), (3,)]),
    "tree": (lambda n, m: tree(PARENTS, context=n, first=m), [(3, 0), (8, 8)]),
    "block_sparse": (lambda n: block_sparse(LAYOUT, n), [(2,), (5,)]),
    "block_window": (block_window, [(3, 1), (2, 4)]),
    "random_blocks": (lambda n: random_blocks(KEY, T, T, size=4, count=n), [(1,), (3,)]),
    "bigbird": (
        lambda w, r, g: bigbird(KEY, T, block=4, window=w, random=r, globals=g),
        [(1, 2, 0), (3, 1, 1)],
    ),
    "neighborhood": (
        lambda w, d, c: neighborhood((4, 6), w, dilation=d, causal=c),
        [(3, 1, False), (2, 2, True)],
    ),
    "neighborhood, one for each dimension": (
        lambda w, u, d, e, c: neighborhood((4, 6), (w, u), dilation=(d, e), causal=(c, False)),
        [(3, 2, 1, 2, False), (2, 4, 2, 1, True)],
    ),
    "places": (
        lambda n, m, s: causal().shift(k=n).slice(q=slice(m, None, s)),
        [(1, 2, 1), (4, 0, 2)],
    ),
}  # fmt: skip
SCORES = {
    "softcap": (softcap, [(2.0,), (5.0,)]),
    "temperature": (temperature, [(2.0,), (0.5,)]),
    "t5_bias": (
        lambda both, far: t5_bias(jnp.arange(8.0), bidirectional=both, max_distance=far),
        [(True, 12), (False, 9)],
    ),
    "alibi": (lambda n: alibi.of(2).shift(q=n), [(0,), (7,)]),
}  # fmt: skip
# Those of which no field is a number: all that they have are arrays.
ARRAYS = {"alibi", "relative_bias", "pair_bias", "full"}


def everywhere(mod):
    """A mask or a score at all pairs."""
    index = (1, 1, jnp.arange(T), jnp.arange(T))
    if isinstance(mod, Score):
        at = lambda q, k: mod(jnp.float32(3), 1, 1, q, k)
    else:
        at = lambda q, k: mod(0, 0, q, k)
    return jax.vmap(jax.vmap(at, (None, 0)), (0, None))(*index[2:])


@pytest.mark.parametrize("name", [*MASKS, *SCORES])
def test_numbers_may_be_traced(name):
    make, members = (MASKS | SCORES)[name]
    expected = np.stack([everywhere(make(*numbers)) for numbers in members])
    assert not np.array_equal(*expected)
    every = tuple(map(jnp.array, zip(*members, strict=True)))
    at = lambda *numbers: everywhere(make(*numbers))
    found = [once(at, *(n[i] for n in every)) for i in range(2)]
    same = np.testing.assert_array_equal
    if name in SCORES:
        same = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    same(np.stack(found), expected)
    same(once(jax.vmap(at), *every), expected)
    # As the layers of a scan: the object itself is a pytree of the stacked numbers.
    layers = jax.vmap(lambda *numbers: jax.tree.map(jnp.asarray, make(*numbers)))(*every)
    same(once(lambda m: jax.lax.map(everywhere, m), layers), expected)


def test_none_is_forgotten():
    """The table above has every mask and score of the public modules."""
    public = {
        name: x for module in (masks, scores) for name, x in vars(module).items()
        if isinstance(x, type) and issubclass(x, Mask | Score) and name not in ("Mask", "Score")
    }  # fmt: skip
    listed = {n for name in public for n in (*MASKS, *SCORES) if n == name}
    assert {n for n in public if not n.startswith("_")} - listed - ARRAYS == set()


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (lambda w, d: neighborhood((4, 6), w, dilation=d), [(3, 1), (2, 2)]),
        (lambda n, d: block_sparse(LAYOUT[:8, :8], n) & ~dilated(d), [(3, 2), (3, 5)]),
    ],
    ids=["neighborhood", "block_sparse"],
)
def test_block_maps_of_traced_numbers_are_exact(make, numbers):
    """Through the block map, whose tiles depend on the numbers, and under vmap."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, T, 1, 4)), jnp.float32) for _ in range(3))
    every = tuple(map(jnp.array, zip(*numbers, strict=True)))
    attend = lambda *n: flex_attention(q, k, v, mask_mod=make(*n))
    found = once(jax.vmap(attend), *every)
    for i, n in enumerate(numbers):
        true = flex_attention(q, k, v, mask_mod=make(*n), implementation="reference")
        np.testing.assert_allclose(found[i], true, atol=2e-6)


def test_windows_of_the_drop_ins_may_be_traced():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 9, 2, 4)), jnp.float32) for _ in range(3))
    for attend in (
        lambda left, right: flash_attention(q, k, v, window=(left, right)),
        lambda left, right: dot_product_attention(q, k, v, local_window_size=(left, right)),
    ):
        for sides in ((2, 1), (0, 3)):
            np.testing.assert_allclose(once(attend, *sides), attend(*sides), atol=1e-6)
    free = lambda left: flash_attention(q, k, v, window=(left, 1))
    np.testing.assert_allclose(once(free, -1), free(None), atol=1e-6)


SHAPES = {
    r"`documents.from_offsets\(length\)`": lambda n: documents.from_offsets(jnp.array([0, 3]), n),
    r"`graph.from_edges\(nodes\)`": lambda n: graph.from_edges(PARENTS, PARENTS, n),
    r"`random_blocks\(queries\)`": lambda n: random_blocks(KEY, n, 8, size=4, count=1),
    r"`random_blocks\(size\)`": lambda n: random_blocks(KEY, 8, 8, size=n, count=1),
    r"`random_blocks\(heads\)`": lambda n: random_blocks(KEY, 8, 8, size=4, count=1, heads=n),
    r"`random_blocks\(queries\)` ": lambda n: bigbird(KEY, n, block=4),
    r"`neighborhood\(shape\)`": lambda n: neighborhood((n, 3), 2),
    r"`tiled\(shape\)`": lambda n: tiled((4, n), 2),
    r"`tiled\(tile\)`": lambda n: tiled((4, 4), (n, 2)),
    r"`morton\(shape\)`": lambda n: morton((4, n)),
    r"`alibi.of\(heads\)`": alibi.of,
    r"`show\(queries\)`": lambda n: causal().show(n),
    r"`show\(tile\)`": lambda n: causal().show(8, tile=n),
}  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", SHAPES)
def test_what_sets_a_shape_may_not_be_traced(name):
    message = rf"{name.strip()} is traced, int32\[\], and it sets the size of an array"
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(lambda n: SHAPES[name](n) and None, jnp.int32(8))


def test_a_picture_needs_values():
    with pytest.raises(TypeError, match=r"sliding_window\(size: int32\[\]\)` reads traced arrays"):
        jax.eval_shape(lambda n: sliding_window(n).show(8) and None, jnp.int32(3))
