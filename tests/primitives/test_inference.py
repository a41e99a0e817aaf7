"""Decoding and paging are attention over the keys that there are, wherever they are kept."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import assert_as_right_as, in_float64, plain
from xform.primitives import _kept, inference
from xform.primitives.attention import flex_attention
from xform.primitives.inference import decode_attention, merge, paged_attention
from xform.primitives.masks import (
    block_sparse,
    causal,
    documents,
    global_tokens,
    graph,
    lengths,
    neighborhood,
    sliding_window,
)
from xform.primitives.scores import alibi, pair_bias, softcap

B, H, K, D, V, S, PAGE = 3, 4, 2, 8, 6, 70, 7
LENGTHS = jnp.array([5, 70, 33])
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parts of 16 keys, so that 70 are many."""
    monkeypatch.setattr(_kept, "_KEYS", 16)


def normal(*shape, dtype="float32"):
    return jnp.asarray(RNG.normal(size=shape), dtype)


def problem(new=1, dtype="float32"):
    """Queries, and a cache whose unused places are NaN."""
    there = (jnp.arange(S)[None] < LENGTHS[:, None])[..., None, None]
    k, v = (jnp.where(there, normal(B, S, K, d), jnp.nan).astype(dtype) for d in (D, V))
    return normal(B, new, H, D, dtype=dtype), k, v


def paged(k, v) -> tuple[Any, Any, Any]:
    """The same keys in pages: shuffled, among others full of NaN, whole pages of none as holes."""
    count = S // PAGE
    where = RNG.permutation(B * count + 5)[: B * count].reshape(B, count)
    pages = [np.full((B * count + 5, PAGE, *x.shape[2:]), np.nan, x.dtype) for x in (k, v)]
    for pool, x in zip(pages, (k, v), strict=True):
        pool[where] = np.asarray(x).reshape(B, count, PAGE, *x.shape[2:])
    used = np.arange(count) * PAGE < np.asarray(LENGTHS)[:, None]
    free = np.where(np.arange(count) % 2, -1, 10**6)
    k_pages, v_pages = map(jnp.asarray, pages)
    return k_pages, v_pages, jnp.asarray(np.where(used, where, free))


def expected(q, k, v, lengths=LENGTHS, score=None, mask=None, **options):
    """Dense attention at the true positions, hidden keys cleaned away."""
    new = q.shape[1]
    there = (jnp.arange(k.shape[1])[None] < lengths[:, None])[..., None, None]
    place = lambda b, t: lengths[b] - new + t

    def seen(b, h, t, j):
        inside = (j < lengths[b]) & (place(b, t) >= 0)
        return inside & (True if mask is None else mask(b, h, place(b, t), j))

    return flex_attention(
        q, jnp.where(there, k, 0), jnp.where(there, v, 0), mask_mod=seen,
        score_mod=score and (lambda s, b, h, t, j: score(s, b, h, place(b, t), j)),
        implementation="reference", **options,
    )  # fmt: skip


SLOPES = jnp.asarray(RNG.uniform(0, 0.3, H), jnp.float32)
BY_BATCH = jnp.asarray(RNG.normal(size=(B, S)), jnp.float32)
MODS = {
    "nothing": {},
    "causal": {"mask": causal()},
    "window and first tokens": {
        "mask": causal() & (sliding_window(9) | global_tokens(2)),
        "score": softcap(3.0) >> alibi(SLOPES),
    },
    "arrays of batch, heads and positions": {
        "mask": lambda b, h, q, k: (k + h) % (b + 2) != 0,
        "score": lambda s, b, h, q, k: s + BY_BATCH[b, k] - 0.1 * SLOPES[h] * q,
    },
    "documents": {"mask": causal() & documents(jnp.arange(S) // 20)},
    "nothing is seen": {"mask": lambda b, h, q, k: k < 0},
}


def attend(how, q, k, v, splits=1, lengths=LENGTHS, mask=None, score=None, **options):
    mods = {"mask_mod": mask, "score_mod": score, "splits": splits}
    if how == "decode":
        return decode_attention(q, k, v, lengths, **mods, **options)
    return paged_attention(q, *paged(k, v), lengths, **mods, **options)


def once(f, *args):
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})(*args)


def two_ways(*quick):
    """Over a cache and over pages: what both share is compiled once in every run."""
    slow = [how for how in ("decode", "pages") if how not in quick]
    return [*quick, *(pytest.param(how, marks=pytest.mark.slow) for how in slow)]


# Each by one way in every run, and by both among the slow ones.
WAYS = [
    pytest.param(name, how, marks=[] if ("decode", "pages")[n % 2] == how else pytest.mark.slow)
    for n, name in enumerate(MODS)
    for how in ("decode", "pages")
]


@pytest.mark.parametrize(("name", "how"), WAYS)
def test_the_keys_that_there_are(name, how):
    new, splits = (1, 1) if name in ("nothing", "documents") else (6, 3)
    q, k, v = problem(new)
    run = functools.partial(attend, how, q, k, v, splits, **MODS[name], aux="lse")
    out, aux = once(run)
    true, true_aux = expected(q, k, v, **MODS[name], aux="lse")
    np.testing.assert_allclose(out, true, atol=2e-6)
    np.testing.assert_allclose(aux.lse, true_aux.lse, atol=2e-6)
    rows_without_keys = np.isneginf(true_aux.lse)
    assert not out[rows_without_keys].any()
    assert rows_without_keys.any() == (name == "nothing is seen" or new > 5)


@pytest.mark.parametrize("how", two_ways("pages"))
def test_bfloat16_is_as_right_as_a_plain_program(how):
    """Parts are merged before they are rounded."""
    k, v = (normal(B, S, K, D, dtype="bfloat16") for _ in range(2))
    q = normal(B, 1, H, D, dtype="bfloat16")
    full = jnp.full(B, S)
    k_pages, v_pages = (x.reshape(-1, PAGE, K, D) for x in (k, v))
    table = jnp.arange(B * S // PAGE).reshape(B, -1)
    found = once(
        lambda q, k, v: (
            decode_attention(q, k, v, full, splits=2)
            if how == "decode"
            else paged_attention(q, k_pages, v_pages, table, full, splits=2)
        ),
        q, k, v,
    )  # fmt: skip
    truth = in_float64(lambda q, k, v: plain(q, k, v), q, k, v)
    assert_as_right_as(found, plain(q, k, v), truth)


@pytest.mark.parametrize("how", two_ways("pages"))
def test_gradients(how):
    """Of queries, keys, values, sinks and what the mods read; zero where nothing is."""
    q, k, v = problem(2)
    sinks = normal(H)
    pages = paged(k, v)

    def mods(slopes):
        return {"score_mod": softcap(3.0) >> alibi(slopes), "mask_mod": causal()}

    def loss(results):
        out, aux = results
        return jnp.sin(out).sum() + jnp.where(jnp.isfinite(aux.lse), aux.lse, 0).sum()

    def found(q, k, v, sinks, slopes):
        options = {"aux": "lse", "sinks": sinks, **mods(slopes)}
        if how == "decode":
            return loss(decode_attention(q, k, v, LENGTHS, **options))
        return loss(paged_attention(q, k, v, pages[2], LENGTHS, **options))

    def true(q, k, v, sinks, slopes):
        score = softcap(3.0) >> alibi(slopes)
        return loss(expected(q, k, v, score=score, mask=causal(), sinks=sinks, aux="lse"))

    args = (q, k, v) if how == "decode" else (q, *pages[:2])
    grads = once(jax.grad(found, range(5)), *args, sinks, SLOPES)
    correct = once(jax.grad(true, range(5)), q, k, v, sinks, SLOPES)
    if how == "pages":
        table = np.asarray(pages[2])
        used = (table >= 0) & (table < len(pages[0]))
        for i in (1, 2):
            whole = np.zeros_like(pages[i - 1])
            whole[table[used]] = np.asarray(correct[i]).reshape(B, -1, PAGE, *whole.shape[2:])[used]
            correct = (*correct[:i], whole, *correct[i + 1 :])
    for a, b in zip(grads, correct, strict=True):
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, atol=3e-5)


def test_shared_pages_and_holes():
    """Two texts begin with one page, one names a page twice, and a page in the middle is gone."""
    pool_k, pool_v = normal(6, PAGE, K, D), normal(6, PAGE, K, V)
    table = jnp.array([[4, 1, 0], [4, -1, 3], [2, 2, 99]])
    lengths = jnp.array([18, 21, 14])
    q = normal(3, 2, H, D)
    k, v = (x[jnp.clip(table, 0, 5)].reshape(3, 21, *x.shape[2:]) for x in (pool_k, pool_v))
    hole = jnp.repeat((table < 0) | (table > 5), PAGE, 1)
    mask = lambda b, h, q, k: (q >= k) & ~hole[b, k]
    found = once(
        lambda *x: paged_attention(*x, mask_mod=causal(), splits=2),
        q,
        pool_k,
        pool_v,
        table,
        lengths,
    )
    np.testing.assert_allclose(found, expected(q, k, v, lengths, mask=mask), atol=2e-6)


@pytest.mark.parametrize("how", two_ways("pages"))
def test_under_vmap_and_scan(how):
    """Over windows that are traced, and over queries alone."""
    q, k, v = problem(2)
    k, v = jnp.nan_to_num(k), jnp.nan_to_num(v)
    pages = paged(k, v)

    def one(q, window):
        mask = causal() & sliding_window(window)
        if how == "decode":
            return decode_attention(q, k, v, LENGTHS, mask_mod=mask)
        return paged_attention(q, *pages, LENGTHS, mask_mod=mask)

    windows, qs = jnp.array([3, 40]), jnp.stack([q, 2 * q])
    mask = lambda n: causal() & sliding_window(windows[n])
    true = [expected(qs[n], k, v, mask=mask(n)) for n in range(2)]
    np.testing.assert_allclose(once(jax.vmap(one), qs, windows), true, atol=2e-6)
    scan = lambda qs, windows: jax.lax.map(lambda x: one(*x), (qs, windows))
    np.testing.assert_allclose(once(scan, qs, windows), true, atol=2e-6)


def test_only_parts_that_are_seen_are_read():
    q, k, v = problem(1)

    def live(lengths, mask):
        cache = _kept.Cache(k, v, lengths)
        seen = functools.partial(
            inference._there, cache, functools.partial(inference._seen, lengths, 1, mask)
        )
        return _kept._live(q.shape, cache, _kept.Parts(lambda n: (k, v, n), 16, 1), seen, 5)

    some, late = jnp.array([3, 35, 18]), jnp.array([70, 66, 68])
    found = once(
        lambda: (
            live(some, None),
            live(LENGTHS, sliding_window(20)),
            live(late, sliding_window(10)),
            live(late, lambda b, h, q, k: (k % 70 == 40) & (h == 3)),
        )
    )
    assert np.array(found).astype(int).tolist() == [
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1],
        [0, 0, 0, 1, 1],
        [0, 0, 1, 0, 0],
    ]


@pytest.mark.parametrize("how", two_ways("pages"))
def test_no_second_copy_of_the_keys(monkeypatch, how):
    monkeypatch.setattr(_kept, "_KEYS", 1024)
    struct = jax.ShapeDtypeStruct
    pool, table = struct((600, 64, 2, 64), jnp.float32), struct((2, 256), jnp.int32)
    q, lengths = struct((2, 1, 4, 64), jnp.float32), struct((2,), jnp.int32)
    cache = struct((2, 256 * 64, 2, 64), jnp.float32)
    whole = 2 * 2 * 256 * 64 * 2 * 64 * 4
    mask = causal() & sliding_window(4096)
    run, *args = {
        "pages": (functools.partial(paged_attention, mask_mod=mask), q, pool, pool, table, lengths),
        "decode": (functools.partial(decode_attention, mask_mod=mask), q, cache, cache, lengths),
    }[how]
    memory = jax.jit(run).lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < whole / 4


@pytest.mark.parametrize("how", ["decode", "pages"])
def test_nothing_to_attend_to(how):
    q, k, v = problem(2)
    none = jnp.zeros(B, jnp.int32)

    def run(q, k, v):
        yield attend(how, q, k, v, lengths=none)
        if how == "decode":
            yield decode_attention(q, k[:, :0], v[:, :0], none)
        else:
            pages = paged(k, v)
            yield paged_attention(q, *pages[:2], pages[2][:, :0], none)
            yield paged_attention(q, pages[0][:0], pages[1][:0], pages[2], LENGTHS)

    assert jax.eval_shape(lambda q: attend(how, q, k, v), q[:, :0]).shape == (B, 0, H, V)
    for out in once(lambda q: tuple(run(q, k, v)), q):
        assert out.shape == (B, 2, H, V)
        assert not out.any()


def test_one_length_for_all():
    q, k, v = normal(B, 2, H, D), normal(B, S, K, D), normal(B, S, K, V)
    found = once(lambda q, k, v: decode_attention(q, k, v, 41, mask_mod=causal()), q, k, v)
    np.testing.assert_allclose(found, expected(q, k, v, jnp.full(B, 41), mask=causal()), atol=2e-6)


def test_merge_has_exact_gradients():
    q, k, v = (normal(1, 12, 2, 4) for _ in range(3))
    parts = [lambda b, h, q, k, n=n: (q >= k) & (k % 3 == n) for n in range(3)]

    def merged(q, k, v):
        results = [flex_attention(q, k, v, mask_mod=part, aux="lse") for part in parts]
        out, lse = merge(*map(jnp.stack, zip(*((o, aux.lse) for o, aux in results), strict=True)))
        return jnp.sin(out).sum() + lse.sum()

    def whole(q, k, v):
        out, aux = flex_attention(q, k, v, mask_mod=causal(), aux="lse")
        return jnp.sin(out).sum() + aux.lse.sum()

    found, true = (once(jax.value_and_grad(f, (0, 1, 2)), q, k, v) for f in (merged, whole))
    for a, b in zip(*map(jax.tree.leaves, (found, true)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit_is_named():
    q, k, v = problem()
    pages = paged(k, v)
    for f, message in (
        (lambda: decode_attention(q, k[:2], v, LENGTHS), r"decode_attention: `k` has shape \(2, "),
        (lambda: decode_attention(q, k, v, LENGTHS[:2]), r"`lengths` is int32\[2\]; .*\[3\]"),
        (lambda: decode_attention(q, k, v, 2.0), r"`lengths` is float32\[\]; needed are integers"),
        (lambda: decode_attention(q, k, v, 5, aux="max"), r"`aux` asks for \['max'\]; there is"),
        (lambda: decode_attention(q, k, v, 5, mask_mod=causal), r"is the class `causal`: call it"),
        (lambda: decode_attention(q, k, v, 5, score_mod=alibi(jnp.ones(3))),
         r"decode_attention: `alibi\(slopes\)` has shape \[3\]"),
        (lambda: paged_attention(q, *pages[:2], pages[2][:2], LENGTHS), r"`page_table` has shape"),
        (lambda: paged_attention(q, pages[0], pages[1][:4], pages[2], 5), r"`v_pages` \(4, 7"),
        (lambda: paged_attention(q, pages[0][..., :4], *pages[1:], 5), r"paged_attention: `k` has"),
        (lambda: paged_attention(q, *pages[:2], pages[2][0], 5), r"`page_table` has shape \(10,\)"),
        (lambda: paged_attention(q, *pages[:2], pages[2] * 1.0, 5), r"dtype float32; .*integers"),
        (lambda: paged_attention(q, pages[0][0], *pages[1:], 5), r"`k_pages` .*\(7, 2, 8\)"),
        (lambda: paged_attention(q[0], *pages, 5), r"`page_table` has shape .* with q \(1, 4, 8\)"),
        (lambda: decode_attention(q[0], k, v, 5), r"decode_attention: `q` has shape \(1, 4, 8\)"),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=message):
            f()


def whole(b, h, q, k):
    return q - k


def nothing(*_):
    return None


def pairs(q, k):
    return q >= k


@pytest.mark.parametrize("how", ["decode", "pages"])
@pytest.mark.parametrize(
    ("mods", "message"),
    [
        ({"mask": whole}, r"`mask_mod` must return a bool, .*`whole` \(.*test_inference.py:\d+\)"),
        ({"mask": nothing}, r"`mask_mod` must return a bool, .*`nothing` .* returned None"),
        ({"score": nothing}, r"`score_mod` must return a floating-.*`nothing` .* returned None"),
        ({"mask": pairs}, r"`mask_mod\(b, h, q_idx, kv_idx\)`, and `pairs` .* takes \(q, k\)"),
        ({"score": pairs}, r"`score_mod\(score, b, h, q_idx, kv_idx\)`, and `pairs` .* takes"),
    ],
    ids=lambda x: "".join(f"{k} {v.__name__}" for k, v in x.items()) if isinstance(x, dict) else "",
)
def test_a_mod_that_cannot_be_is_named(how, mods, message):
    with pytest.raises((ValueError, TypeError), match=message):
        attend(how, *problem(), **mods)


OTHER = (np.zeros(S - 1, np.int32), np.zeros(S + 1, np.int32))


@pytest.mark.parametrize("how", ["decode", "pages"])
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (documents(OTHER[0]), r"`documents\(ids\)` has shape \[69\]; .* it needs \[70\]"),
        (causal() | ~documents(OTHER[1]), r"`documents\(ids\)` has shape \[71\]; .* \[70\]"),
        (documents(OTHER[0], np.zeros(S, int)), r"`documents\(ids\)` has shape \[69\]; .* \[70\]"),
        (documents(np.zeros(S, int), OTHER[1]), r"`documents\(kv_ids\)` has shape \[71\]"),
        (documents(np.zeros((2, S), int)), r"has shape \[2, 70\]; .* it needs \[3, 70\]"),
        (graph.of(np.eye(S - 1)), r"`graph\(words\)` has shape \[69, 3\]; .* it needs \[70, 3\]"),
        (block_sparse(np.eye(8, dtype=bool), 10), r"has shape \[8, 8\]; .* it needs \[7, 7\]"),
        (neighborhood((8, 9), 3), r"is of 72 points, and there are 70 queries"),
        (causal().slice(q=slice(0, 6)), r"has 6 places along q; .* it needs 70"),
        (documents(OTHER[1]).shift(q=3), r"`documents\(ids\)` has .*71\]; .* \[at least 73\]"),
        (lengths(jnp.ones(2, int)), r"`lengths\(kv\)` has shape \[2\]; .* it needs \[3\]"),
    ],
    ids=lambda x: None if isinstance(x, str) else repr(x).split(":")[0],
)  # fmt: skip
def test_a_mask_longer_or_shorter_than_the_keys_is_refused(how, mask, message):
    with pytest.raises(ValueError, match=message):
        attend(how, *problem(6), mask=mask)


@pytest.mark.parametrize("how", ["decode", "pages"])
def test_a_bias_longer_or_shorter_than_the_keys_is_refused(how):
    for shape in ((1, S), (S, S - 1), (H, S + 1, S)):
        with pytest.raises(ValueError, match=r"`pair_bias\(bias\)` has shape .* needs .*70, 70\]"):
            attend(how, *problem(), score=pair_bias(jnp.zeros(shape)))


@pytest.mark.parametrize("how", ["decode", "pages"])
def test_a_text_longer_than_there_is_room_for_is_refused(how):
    q, k, v = problem()
    many: list[Any] = [jnp.array([5, S + 1, 33]), np.array([S + 1, 0, -2]), S + 1]
    for n in many:
        with pytest.raises(ValueError, match=r"`lengths` has 71.*of 70 tokens: .* from 0 to 70"):
            attend(how, q, k, v, lengths=n)
    k, v = jnp.nan_to_num(k), jnp.nan_to_num(v)
    out, aux = once(lambda n: attend(how, q, k, v, lengths=n, aux="lse"), jnp.array([5, S + 1, S]))
    assert np.isnan(out).all((1, 2, 3)).tolist() == [False, True, False]
    assert np.isnan(aux.lse).all((1, 2)).tolist() == [False, True, False]
    assert np.isfinite(out[::2]).all()


@pytest.mark.parametrize("split", ["batch", pytest.param("heads", marks=pytest.mark.slow)])
def test_inside_shard_map(split):
    """Each device has some heads, or some texts with lengths of their own; types are checked."""
    q, k, v = problem(2)
    q, k, v, lengths = q[:2], jnp.nan_to_num(k[:2]), jnp.nan_to_num(v[:2]), LENGTHS[:2]
    run = lambda q, k, v, n: decode_attention(q, k, v, n, mask_mod=causal() & sliding_window(30))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    of = jax.P(None, None, "x") if split == "heads" else jax.P("x")
    specs = (of, of, of, jax.P() if split == "heads" else of)
    found = once(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=of), q, k, v, lengths)
    np.testing.assert_allclose(found, once(run, q, k, v, lengths), atol=1e-6)


@pytest.mark.usefixtures("unchecked")
def test_pages_may_be_numpy_arrays():
    q, k, v = problem()
    pages = paged(k, v)
    given: list[Any] = [np.asarray(x) for x in (q, *pages, LENGTHS)]
    found = paged_attention(*given)
    np.testing.assert_array_equal(found, paged_attention(q, *pages, LENGTHS))
