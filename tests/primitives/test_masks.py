"""Masks say what they mean, combine, print as they are written, and travel through transforms."""

import subprocess
import sys
from dataclasses import FrozenInstanceError
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform.primitives.attention import flex_attention
from xform.primitives.masks import _view as views
from xform.primitives.masks import (
    bigbird,
    block_diagonal,
    block_sparse,
    causal,
    causal_lower_right,
    dilated,
    documents,
    full,
    global_tokens,
    graph,
    lengths,
    morton,
    neighborhood,
    prefix,
    show,
    sliding_window,
    strided,
    tiled,
    tree,
)


def dense(mask, t, s, b=0, h=0):
    """The mask over all pairs, `[t,s]`."""
    by_key = jax.vmap(mask, (None, None, None, 0))
    return np.asarray(jax.vmap(by_key, (None, None, 0, None))(b, h, jnp.arange(t), jnp.arange(s)))


Q, K = np.arange(7)[:, None], np.arange(9)[None]
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 3, (2, 9))
PADDED = np.where(np.arange(9) < 7, IDS, -1)
EDGES = np.stack([RNG.integers(-1, 11, 30), RNG.integers(-1, 9, 30)])
RELATED = RNG.random((2, 40, 70)) < 0.2
BLOCKS = np.array([[[1, 0, 1], [0, 1, 0]], [[0, 1, 1], [1, 0, 0]]]) > 0
"""Of two heads, whether each of two blocks of queries sees each of three blocks of keys."""


def edges(nodes):
    """The matrix of the edges whose ends exist."""
    out = np.zeros((nodes, nodes), bool)
    for sender, receiver in EDGES.T:
        if 0 <= sender < nodes and 0 <= receiver < nodes:
            out[receiver, sender] = True
    return out


PARENTS = np.array([-1, 0, 0, 2, -1, 3, 1])


def ancestors():
    """Each node's path to the root, walked."""
    out = np.eye(7, dtype=bool)
    for node in range(7):
        at = node
        while (at := PARENTS[at]) >= 0:
            out[node, at] = True
    return out


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (causal(), Q >= K),
        (causal(offset=2), Q + 2 >= K),
        (causal_lower_right(7, 9), Q + 2 >= K),
        (sliding_window(3), (Q - K >= 0) & (Q - K < 3)),
        (sliding_window(2, right=3), (Q - K > -4) & (Q - K < 2)),
        (dilated(3), np.isin(Q - K, [-9, -6, -3, 0, 3, 6, 9])),
        (strided(3), (Q >= K) & ((Q - K < 3) | np.isin(Q - K, [0, 3, 6]))),
        (block_diagonal(4), ((Q < 4) & (K < 4)) | ((Q > 3) & (K > 3) & (K < 8))),
        (block_diagonal(jnp.int32(6)), (Q < 6) == (K < 6)),
        (global_tokens(2), (Q < 2) | (K < 2)),
        (prefix(4), (K < 4) & (Q >= 0)),
        (prefix(jnp.array([4, 6])), (K < 6) & (Q >= 0)),
        (lengths(4), (K < 4) & (Q >= 0)),
        (lengths(jnp.array([4, 6]), jnp.array([7, 5])), (K < 6) & (Q < 5)),
        (documents(IDS[0]), IDS[0][:7, None] == IDS[0]),
        (documents(IDS), IDS[1][:7, None] == IDS[1]),
        (documents(IDS[:, :7], IDS[:, ::-1]), IDS[1][:7, None] == IDS[1, ::-1]),
        (documents(PADDED), (PADDED[1][:7, None] == PADDED[1]) & (K < 7)),
        (documents(PADDED, padding=None), PADDED[1][:7, None] == PADDED[1]),
        (documents(IDS, padding=0), (IDS[1][:7, None] == IDS[1]) & (IDS[1] > 0)),
        (documents.from_offsets(np.array([1, 4, 6]), 9), ((Q > 0) & (Q < 4) & (K > 0) & (K < 4))
         | ((Q > 3) & (Q < 6) & (K > 3) & (K < 6))),
        (graph.of(RELATED), RELATED[1, :7, :9]),
        (graph.of(RELATED[0]).slice(q=slice(30, 37), k=slice(60, 69)), RELATED[0, 30:37, 60:69]),
        (graph.from_edges(EDGES[0], EDGES[1], 9), edges(9)[:7]),
        (graph.from_edges(EDGES[::-1], EDGES[[1, 1]], 9), edges(9)[:7]),
        (tree(PARENTS, context=2), np.hstack([np.ones((7, 2), bool), ancestors()])),
        (tree(PARENTS), np.hstack([ancestors(), np.zeros((7, 2), bool)])),
        (tree(np.stack([PARENTS[::-1], PARENTS]), context=jnp.array([0, 2])),
         np.hstack([np.ones((7, 2), bool), ancestors()])),
        (block_sparse(BLOCKS, 4), np.where(Q < 4, (K >= 4), K < 4)),
        (block_sparse(BLOCKS[0], 4), np.where(Q < 4, (K < 4) | (K >= 8), (K >= 4) & (K < 8))),
    ],
    ids=lambda x: repr(x) if callable(x) else "",
)  # fmt: skip
def test_variants(mask, expected):
    expected = np.broadcast_to(expected, (7, 9))
    assert expected.any()
    assert not expected.all()
    np.testing.assert_array_equal(dense(mask, 7, 9, b=1, h=1), expected)


def natten(shape, window, dilation, causal):
    """NATTEN's neighborhoods, point by point: along each dimension a list of points."""
    axes = []
    for n, size, step, last in zip(shape, window, dilation, causal, strict=True):
        of = np.zeros((n, n), bool)
        for q in range(n):
            members = [k for k in range(n) if k % step == q % step]
            at = members.index(q)
            if last:
                first = at - size + 1
            else:
                first = min(max(at - size // 2, 0), max(len(members) - size, 0))
            of[q, [k for i, k in enumerate(members) if first <= i < first + size]] = True
        axes.append(of & (np.tri(n, dtype=bool) | (not last)))
    out = np.ones((1, 1), bool)
    for of in axes:
        out = np.kron(out, of)
    return out


@pytest.mark.parametrize("order", [None, tiled, morton])
@pytest.mark.parametrize(
    ("shape", "window", "options"),
    [
        ((17,), (5,), {}),
        ((6, 7), (3, 4), {}),
        ((9, 8), (2, 3), {"dilation": (3, 2)}),
        ((5, 6), (9, 2), {"causal": (True, False)}),
        ((3, 4, 5), (3, 1, 2), {"dilation": (1, 1, 2), "causal": (True, False, True)}),
    ],
)
def test_neighborhoods(shape, window, options, order):
    true = natten(
        shape, window, options.get("dilation", (1,) * 3)[: len(shape)],
        options.get("causal", (False,) * 3)[: len(shape)],
    )  # fmt: skip
    assert 0 < true.mean() < 0.7
    points = None
    if order is not None:
        points = order(shape, 2) if order is tiled else order(shape)
        assert sorted(points) == list(range(len(true)))
        assert not np.array_equal(points, np.arange(len(true))) or len(shape) == 1
        true = true[points][:, points]
    mask = neighborhood(shape, window, order=points, **options)
    np.testing.assert_array_equal(dense(mask, *true.shape), true)


@pytest.mark.slow
def test_tiles_and_curves_keep_a_neighborhood_in_fewer_tiles():
    rows, patches, curve = (
        show(neighborhood((64, 64), 17, order=order), 4096, tile=64).live
        for order in (None, tiled((64, 64), 8), morton((64, 64)))
    )
    assert patches == curve < 0.7 * rows


def test_bigbird_draws_what_it_says():
    mask = bigbird(jax.random.key(1), 60, block=4, window=3, random=2, globals=1, heads=3)
    heads = [dense(mask, 60, 60, h=h) for h in range(3)]
    block = np.arange(60) // 4
    near = np.abs(block[:, None] - block) <= 1
    always = near | (block == 0) | (block == 0)[:, None]
    for seen in heads:
        assert (seen & always == always).all()
        rest = seen & ~always
        assert 0 < rest[4:].sum(1).max() <= 8
    assert not np.array_equal(heads[0], heads[1])


@pytest.mark.parametrize("dim", "qk")
def test_places(dim):
    """A mask at other places is the same part of its matrix."""
    mask = (causal() & documents(IDS[0], padding=0)) | (lambda b, h, q, k: (q * k) % 5 == 1)
    whole = dense(mask, 9, 9)
    some = {"q": lambda i: (i, slice(None)), "k": lambda i: (slice(None), i)}[dim]
    for places in (slice(2, 7), slice(None, 5), slice(1, None, 3), slice(3, 8, 2), [5, 0, 8, 8]):
        part = mask.slice(**{dim: np.array(places) if isinstance(places, list) else places})
        expected = whole[some(places)]
        np.testing.assert_array_equal(dense(part, *expected.shape), expected)
    traced = jax.jit(lambda n: part_of(mask.shift(**{dim: n}), dim))(3)
    np.testing.assert_array_equal(traced, whole[some(slice(3, 7))])
    again = mask.shift(**{dim: 4}).slice(**{dim: slice(0, 3)}).shift(**{dim: -2})
    found = dense(again.slice(**{dim: slice(2, 5)}), *whole[some(slice(4, 7))].shape)
    np.testing.assert_array_equal(found, whole[some(slice(4, 7))])


def part_of(mask, dim):
    t, s = (4, 9) if dim == "q" else (9, 4)
    return jax.vmap(jax.vmap(mask, (None, None, None, 0)), (None, None, 0, None))(
        0, 0, jnp.arange(t), jnp.arange(s)
    )


def test_places_of_batch_and_heads():
    mask = documents(IDS) & (lambda b, h, q, k: k != h)
    np.testing.assert_array_equal(dense(mask.shift(b=1, h=3), 9, 9), dense(mask, 9, 9, b=1, h=3))
    other = mask.slice(b=jnp.array([1, 0]), h=slice(2, None, 2))
    np.testing.assert_array_equal(dense(other, 9, 9, b=0, h=1), dense(mask, 9, 9, b=1, h=4))


def test_places_print_as_written():
    mask = causal() & documents(IDS)
    text = "causal() & documents(ids: int64[2,9])"
    assert repr(mask.shift(q=3)) == f"({text}).shift(q=3)"
    assert repr((~causal()).shift(k=jnp.int32(3))) == "(~causal()).shift(k=3)"
    assert repr(mask.slice(q=slice(1, 5), k=np.arange(3))) == f"({text}).slice(q=1:5, k: int64[3])"
    assert (
        repr(causal().slice(k=slice(2, None, 4)).shift(h=1)) == "causal().slice(k=2::4).shift(h=1)"
    )
    assert repr(causal().shift(q=0, k=0)) == "causal()"


@pytest.mark.parametrize("bad", [slice(-3, None), slice(0, 5, 0), slice(4, -1), slice(5, 0, -1)])
def test_slices_that_count_from_the_end_are_refused(bad):
    with pytest.raises(ValueError, match=r"`slice\(q=.*nothing here knows the length"):
        causal().slice(q=bad)


def test_a_moved_mask_takes_its_indices_by_name():
    by_name = lambda mask: bool(mask(b=0, h=0, q_idx=0, kv_idx=1))
    assert by_name(causal().shift(q=1))
    assert not by_name(causal().shift(q=1).shift(q=-1))
    assert by_name(causal().slice(q=slice(4, 8)) & full())


@pytest.mark.usefixtures("unchecked")
def test_slices_by_anything_else_are_refused():
    with pytest.raises(ValueError, match=r"takes a slice or integers \[n\], found float32\[2\]"):
        causal().slice(k=jnp.ones(2))
    with pytest.raises(ValueError, match=r"write `shift\(q=n\)`"):
        causal().slice(q=3)


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
    assert repr(neighborhood((4, 4), 3, order=np.arange(16))) == (
        "neighborhood((4, 4), 3, order: int64[16])"
    )
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
        (lengths(jnp.ones(3, int)), r"`lengths\(kv\)` has shape \[3\]; .* \[2\]"),
        (lengths(3, jnp.ones(1, int)), r"`lengths\(q\)` has shape \[1\]; .* \[2\]"),
        (tree(PARENTS[:6]), r"`tree\(parents\)` has shape \[6\]; .* it needs \[7\]"),
        (graph.of(RELATED[0]), r"`graph\(words\)` has shape \[40, 3\]; .* it needs \[7, 1\]"),
        (graph.of(RELATED[:, :7, :9].repeat(2, 0)), r"has shape \[4, 7, 1\]; .* \[2, 7, 1\]"),
        (neighborhood((3, 3), 2), r"neighborhood\(\(3, 3\), 2\)` is of 9 points.* 7 queries"),
        (
            block_sparse(BLOCKS, 4),
            r"block_sparse\(layout\)` has .*\[2, 2, 3\]; .* \[1, 2, \d\]",
        ),
        (causal().slice(q=slice(0, 6)), r"`causal\(\).slice\(q=0:6\)` has 6 places along q; .* 7"),
        (documents(IDS).slice(q=slice(0, 7), b=np.array([0])), r"has 1 places along b; .* needs 2"),
        (documents(IDS[0, :8]).shift(q=2), r"`documents\(ids\)` .*\[8\]; .* \[at least 9\]"),
        (documents(IDS[0, :8]).shift(q=1), r"`documents\(ids\)` .*\[8\]; .* it needs \[9\]"),
        (graph.of(RELATED[0]).slice(q=slice(34, 48, 2)), r"\[40, 3\]; .* \[at least 47, 1\]"),
        (documents(IDS).slice(b=np.array([1, 2])), r"has shape \[2, 9\]; .* \[at least 3"),
    ],
)
def test_a_mask_of_another_sequence_is_refused(mask, message):
    x = jnp.ones((2, 9, 1, 4))
    with pytest.raises(ValueError, match=message):
        flex_attention(x[:, :7], x, x, mask_mod=mask)


def test_a_mask_of_this_sequence_is_not():
    x = jnp.ones((2, 9, 1, 4))
    for mask in (
        documents(IDS),
        documents(IDS[0]) & prefix(jnp.array([3, 4])) & even,
        documents(np.tile(IDS, 3)).slice(q=slice(9, 18), k=slice(3, 12)),
        documents(IDS).slice(b=np.array([1, 1])),
        neighborhood((3, 3), 2, order=tiled((3, 3), 2)),
        block_sparse(np.eye(3, dtype=bool), 3),
    ):
        jax.eval_shape(lambda x, mask=mask: flex_attention(x, x, x, mask_mod=mask), x)


@pytest.mark.usefixtures("unchecked")
def test_only_functions_combine():
    with pytest.raises(TypeError, match="not with ndarray: wrap an array"):
        causal().__and__(IDS)  # pyright: ignore[reportArgumentType]


def test_a_mask_has_no_truth_value():
    with pytest.raises(TypeError, match=r"causal\(\) is neither true nor false: .* with `&`"):
        bool(causal() and sliding_window(3))


# ---- Pictures ------------------------------------------------------------------------------------


def test_a_view_counts_what_the_mask_leaves():
    mask = (causal() | prefix(5)) & documents(np.arange(60) // 40)
    true = dense(mask, 60, 60)
    view = mask.show(60, tile=(8, 16), head_size=32)
    tiles = [true[i : i + 8, j : j + 16] for i in range(0, 60, 8) for j in range(0, 60, 16)]
    counts = {
        "full": sum(x.all() and x.size == 128 for x in tiles),
        "empty": sum(not x.any() for x in tiles),
    }
    assert view.counts == counts | {"partial": len(tiles) - sum(counts.values())}
    assert min(view.counts.values()) > 0
    assert view.pairs == true.sum()
    assert view.density == true.mean()
    assert view.flops == 4 * 32 * 128 * (len(tiles) - counts["empty"])
    np.testing.assert_allclose(view.shares.ravel(), [x.sum() / 128 for x in tiles])


def test_a_view_of_one_batch_entry_and_head():
    mask = documents(IDS) & (lambda b, h, q, k: k >= h)
    for b, h in ((0, 2), (1, 5)):
        assert mask.show(9, tile=4, b=b, h=h).pairs == dense(mask, 9, 9, b=b, h=h).sum()


def test_a_view_is_drawn_in_three_ways():
    view = (sliding_window(700) & ~prefix(3)).show(9000, 7000, tile=16)
    lines = repr(view).splitlines()
    assert lines[0].startswith("sliding_window(700) & ~prefix(3): 9,000 queries x 7,000 keys")
    assert len(lines[1:-3]) <= 64
    assert {"█", "▒", "·"} == {sign for line in lines[1:-3] for sign in line}
    for name, count in view.counts.items():
        assert f"{count:,} {name}" in repr(view)
        assert f"{count:,} {name}" in view._repr_html_()
    html = view._repr_html_()
    assert len(html) < 500_000
    assert "sliding_window(700) &amp; ~prefix(3)" in html
    ElementTree.fromstring(html.replace("<br>", "<br/>"))
    pytest.importorskip("matplotlib")
    ax = view.plot()
    assert ax.get_xlim() == (0, 7000)
    assert ax.get_ylim() == (9000, 0)
    colours = np.unique(ax.images[0].get_array().reshape(-1, 3), axis=0)
    assert len(colours) > 3, "partial tiles are shaded by what is seen of them"
    assert view.plot(ax) is ax


@pytest.fixture
def small_pictures(monkeypatch):
    """Pictures of at most 4 by 4 cells, made of strips of a few tiles."""
    monkeypatch.setattr(views, "_PIXELS", 4)
    monkeypatch.setattr(views, "_AT_ONCE", 40)


@pytest.mark.usefixtures("small_pictures")
def test_a_long_view_is_made_of_strips_and_cells():
    mask = (causal() | prefix(5)) & documents(np.arange(90) // 40)
    view = mask.show(90, tile=(4, 8))
    whole = tiles_of(dense(mask, 90, 90), 4, 8)
    assert view.group == (6, 3)
    kinds = np.array([[group_kind(whole, i, j) for j in range(4)] for i in range(4)])
    np.testing.assert_array_equal(view.kinds, kinds)
    assert len(np.unique(kinds)) == 2
    assert view.pairs == dense(mask, 90, 90).sum()
    assert view.counts == {"full": (whole == 2).sum(), "partial": (whole == 1).sum(),
                           "empty": (whole == 0).sum()}  # fmt: skip
    assert view.exact
    assert "6 x 3 a cell" in repr(view)


def tiles_of(seen, rows, cols):
    """The kind of each tile of a dense mask."""
    t, s = seen.shape
    kind = lambda x: 0 if not x.any() else 2 if x.all() and x.size == rows * cols else 1
    return np.array([[kind(seen[i : i + rows, j : j + cols]) for j in range(0, s, cols)]
                     for i in range(0, t, rows)])  # fmt: skip


def group_kind(tiles, i, j):
    kinds = np.unique(tiles[6 * i : 6 * i + 6, 3 * j : 3 * j + 3])
    return kinds[0] if len(kinds) == 1 else 1


@pytest.mark.usefixtures("small_pictures")
def test_of_many_partial_tiles_some_are_counted(monkeypatch):
    mask = dilated(3)
    monkeypatch.setattr(views, "_COUNTED", 30)
    view = mask.show(120, tile=4)
    assert not view.exact
    assert "for about 33" in repr(view)
    assert abs(view.pairs / dense(mask, 120, 120).sum() - 1) < 0.1
    monkeypatch.setattr(views, "_COUNTED", 900)
    assert mask.show(120, tile=4).pairs == dense(mask, 120, 120).sum()


def test_a_view_of_a_million_tokens_is_small():
    view = causal().show(2**20, tile=1024)
    assert view.kinds.nbytes + view.shares.nbytes < 6e6
    assert view.pairs == 2**20 * (2**20 + 1) // 2
    assert view.counts["partial"] == 1024


@pytest.mark.slow
def test_the_memory_of_a_view_of_a_million_tokens():
    program = """
import resource
from xform.primitives.masks import causal, sliding_window
top = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
causal().show(512)
before = top()
for mask in (causal(), sliding_window(4096)):
    view = mask.show(2**20)
    repr(view), view._repr_html_()
print(top() - before)
"""
    run = [sys.executable, "-c", program]
    found = subprocess.run(run, capture_output=True, text=True, check=True)
    assert float(found.stdout) < 100, f"{found.stdout} MB"


def test_a_view_of_nothing():
    assert causal().show(0, 5).density == 0
    assert "0 full" in repr(causal().show(5, 0))
    assert "<svg" in causal().show(0)._repr_html_()


def test_a_view_of_other_lengths_is_refused():
    with pytest.raises(ValueError, match=r"show: `documents\(ids\)` has shape \[2, 9\]"):
        documents(IDS).show(10)


def test_a_mask_does_not_change():
    mask = sliding_window(3)
    with pytest.raises(FrozenInstanceError, match=r"`sliding_window\(3\)` can't change"):
        mask.size = 4  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(FrozenInstanceError, match="can't change"):
        jax.tree.map(lambda x: x, causal() & mask).left = mask  # pyright: ignore[reportAttributeAccessIssue]
