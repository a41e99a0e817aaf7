"""Block maps against the mask itself, evaluated at every pair."""

import collections
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.core import eval_jaxpr

from tests.oracle import once
from xform.primitives._intervals import unknown
from xform.primitives.attention import flex_attention
from xform.primitives.block_map import EMPTY, FULL, PARTIAL, block_map, density
from xform.primitives.masks import causal, dilated, documents, prefix, sliding_window

B, H = 1, 2
block_maps = sys.modules[block_map.__module__]  # the function's name hides the module's
RNG = np.random.default_rng(0)


def trace(mask, *captures):
    i = jnp.int32(0)
    return jax.make_jaxpr(mask)(i, i, i, i, *captures)


def tiles_of(mask, t, s, q_tile, kv_tile):
    """What a dense mask `[t,s]` leaves of each tile."""
    rows, cols = -(-t // q_tile), -(-s // kv_tile)
    out = np.full((rows, cols), PARTIAL, np.int8)
    for i, j in np.ndindex(rows, cols):
        tile = mask[i * q_tile : (i + 1) * q_tile, j * kv_tile : (j + 1) * kv_tile]
        if not tile.any():
            out[i, j] = EMPTY
        elif tile.all() and tile.shape == (q_tile, kv_tile):
            out[i, j] = FULL
    return out


def dense(jaxpr, captures, t, s):
    at = lambda q, k: eval_jaxpr(jaxpr, (), jnp.int32(B), jnp.int32(H), q, k, *captures)[0]
    q, k = jnp.arange(t, dtype=jnp.int32), jnp.arange(s, dtype=jnp.int32)
    return jax.vmap(jax.vmap(at, (None, 0)), (0, None))(q, k)


def both(mask, captures, t, s, q_tile, kv_tile):
    """The map found and the true one."""
    jaxpr = trace(mask, *captures)
    sizes: dict[str, Any] = {"q_len": t, "kv_len": s, "q_tile": q_tile, "kv_tile": kv_tile}

    def run(*captures):
        return block_map(jaxpr, captures, b=B, h=H, **sizes), dense(jaxpr, captures, t, s)

    found, mask = map(np.asarray, once(run, *captures))
    assert found.dtype == np.int8
    return found, tiles_of(mask, t, s, q_tile, kv_tile)


# ---- Exact ---------------------------------------------------------------------------------------

IDS = jnp.asarray(RNG.integers(0, 30, 70), jnp.int32)
RUNS = jnp.asarray(np.repeat(RNG.permutation(12), 6)[:70] * 1000, jnp.int32)
SORTED = jnp.sort(RUNS)
BATCH = jnp.stack([IDS, SORTED])
HEADS = jnp.asarray(RNG.integers(2, 40, 4), jnp.int32)
COORDS = jnp.asarray(np.cumsum(RNG.integers(0, 2, (70, 2)), 0), jnp.int32)
PAIRS = jnp.asarray(np.kron(RNG.integers(0, 2, (9, 9)), np.ones((8, 8))) > 0)
PAIRS = PAIRS.at[3, 5].set(False).at[60, 10].set(True)
FLOATS = jnp.asarray(np.sort(RNG.normal(size=70)), jnp.float32)

EXACT = {
    "causal": (causal(),),
    "offset": (causal(offset=9),),
    "window": (sliding_window(11),),
    "two-sided window": (sliding_window(5, right=20),),
    "prefix": (prefix(20),),
    "prefix of batch": (lambda b, h, q, k, n: prefix(n)(b, h, q, k), HEADS[:3]),
    "prefix LM": (causal() | prefix(13),),
    "anticausal": (~causal() & ~prefix(9),),
    "few ids": (lambda b, h, q, k, x: documents(x)(b, h, q, k), IDS % 5),
    "any ids": (lambda b, h, q, k, x: documents(x)(b, h, q, k), IDS),
    "ids of batch": (lambda b, h, q, k, x: documents(x, x[:, ::-1])(b, h, q, k), BATCH),
    "causal documents": (lambda b, h, q, k, x: (causal() & documents(x))(b, h, q, k), SORTED),
    "not documents": (lambda b, h, q, k, x: (~documents(x))(b, h, q, k), SORTED),
    "padding": (lambda b, h, q, k, x: (x[q] == x[k]) & (x[q] != 0), SORTED),
    "neighbours": (lambda b, h, q, k, x: x[q + 1] >= x[k], SORTED),
    "per head": (lambda b, h, q, k, w: (q - k < w[h]) & (q >= k), HEADS),
    "blocks": (lambda b, h, q, k, c: q // c >= k // c, HEADS[0]),
    "same block": (lambda b, h, q, k: (q // 12 == k // 12) & (q >= k),),
    "stride": (lambda b, h, q, k: (q - k) % 16 == 0,),
    "phase": (lambda b, h, q, k: k % 32 < 8,),
    "bits": (lambda b, h, q, k: (k & 31) >= 16,),
    "shift": (lambda b, h, q, k: (q >> 3) == (k >> 3),),
    "abs": (lambda b, h, q, k: jnp.abs(q - k) <= 10,),
    "sign": (lambda b, h, q, k: jnp.sign(q - k) >= 0,),
    "clip": (lambda b, h, q, k: jnp.clip(k, 10, 30) <= 10,),
    "min, max": (lambda b, h, q, k: jnp.minimum(q, 30) >= jnp.maximum(k, 9),),
    "where": (lambda b, h, q, k: jnp.where(q < 16, k < 8, k >= 8),),
    "select": (lambda b, h, q, k: jnp.select([q < 16, q < 32], [k < 8, k < 16], k < 32),),
    "cond": (lambda b, h, q, k: jax.lax.cond(q < 16, lambda: k < 8, lambda: k >= 8),),
    "pairs": (lambda b, h, q, k, x: x[q, k], PAIRS),
    "coordinates": (lambda b, h, q, k, x: jnp.all(x[q] >= x[k]), COORDS[:, :1]),
    "floats": (lambda b, h, q, k, x: x[q] >= x[k], FLOATS),
    "take": (lambda b, h, q, k, x: jnp.take(x, k) >= jnp.take(x, q), SORTED),
    "fill": (
        lambda b, h, q, k, x: x.at[k + 40].get(mode="fill", fill_value=-1) >= 5000,
        SORTED,
    ),
    "heads alone": (lambda b, h, q, k: h > b,),
}


def quick(names, count):
    """Parameters of which the first `count` are in every run: each compiles for a second."""
    return [
        pytest.param(name, marks=[] if i < count else pytest.mark.slow)
        for i, name in enumerate(names)
    ]


QUICK = ("causal", "two-sided window", "prefix LM", "any ids", "causal documents", "not documents")
QUICK += ("per head", "same block", "stride", "abs", "where", "select", "pairs", "padding")


@pytest.mark.parametrize(
    "name", quick(sorted(EXACT, key=lambda name: name not in QUICK), len(QUICK))
)
def test_exact(name):
    mask, *captures = EXACT[name]
    found, truth = both(mask, captures, 37, 53, 8, 8)
    np.testing.assert_array_equal(found, truth)


@pytest.mark.parametrize("sizes", [(69, 13, 16, 4), (64, 64, 16, 16), (9, 11, 1, 1), (1, 1, 4, 4)])
@pytest.mark.parametrize("name", quick(["causal documents", "window", "phase"], 1))
def test_exact_at_other_sizes(name, sizes):
    mask, *captures = EXACT[name]
    found, truth = both(mask, captures, *sizes)
    np.testing.assert_array_equal(found, truth)


def test_no_mask_is_full_but_for_ragged_edges():
    found = block_map(None, (), b=0, h=0, q_len=10, kv_len=8, q_tile=4, kv_tile=4)
    np.testing.assert_array_equal(found, [[FULL, FULL], [FULL, FULL], [PARTIAL, PARTIAL]])
    assert density(found) == 1


@pytest.mark.parametrize(("t", "s"), [(0, 9), (9, 0), (0, 0)])
def test_no_queries_or_keys(t, s):
    found = block_map(trace(causal()), (), b=0, h=0, q_len=t, kv_len=s, q_tile=4, kv_tile=4)
    assert found.shape == (-(-t // 4), -(-s // 4))


# ---- Exact where the analysis is not -------------------------------------------------------------

NONFINITE = FLOATS.at[jnp.array([7, 30, 31])].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf]))
WORDS = jnp.asarray(RNG.integers(0, 2**32, (70, 3)), jnp.uint32)

UNPROVEN = {
    "nowhere": (lambda b, h, q, k: (q >= k) & (q < k),),
    "everywhere": (lambda b, h, q, k: q * q - k * k == (q - k) * (q + k),),
    "dilated window": (lambda b, h, q, k: (q >= k) & (q - k < 21) & ((q - k) % 7 == 0),),
    "loop": (lambda b, h, q, k: jax.lax.fori_loop(0, q, lambda _, x: x + k, 0) > 90,),
    "random": (
        lambda b, h, q, k: jax.random.bernoulli(
            jax.random.fold_in(jax.random.key(0), q * 99 + k), 0.02
        ),
    ),
    "sin": (lambda b, h, q, k: jnp.sin(q * 0.1) * 30 > k,),
    "complex": (lambda b, h, q, k: (q + 1j * k).real > 30,),
    "product": (lambda b, h, q, k, x: x[q] @ x[k] > 400, COORDS),
    "ball": (lambda b, h, q, k, x: jnp.sum((x[q] - x[k]) ** 2) < 30, COORDS),
    "wrapping product": (lambda b, h, q, k: (q * 100_000_000) * (k + 1) > 5,),
    "wrapping sum": (lambda b, h, q, k: q * 40_000_000 + k * 40_000_000 >= 0,),
    "wrapping square": (lambda b, h, q, k: (q * 10_000 + k) ** 2 >= 0,),
    "wrapping shift": (lambda b, h, q, k: (k << 26) >= (q << 3),),
    "narrow": (
        lambda b, h, q, k: (q * 5).astype(jnp.int8) >= k.astype(jnp.uint8).astype(jnp.int8),
    ),
    "float sum": (lambda b, h, q, k, x: x[q].sum() + x[k].mean() > 9.0, COORDS * 0.3),
    "norm": (lambda b, h, q, k, x: jnp.linalg.norm(x[q] - x[k]) > 3.0, COORDS * 0.3),
    "nan": (lambda b, h, q, k, x: x[q] < x[k], NONFINITE),
    "not nan": (lambda b, h, q, k, x: ~(x[q] >= x[k]), NONFINITE),
    "inf - inf": (lambda b, h, q, k, x: x[q] - x[k] <= 9, NONFINITE),
    "0 * inf": (lambda b, h, q, k, x: x[q] * (x[k] > 5) >= -99, NONFINITE),
    "nan to int": (lambda b, h, q, k, x: x[q].astype(jnp.int32) > -9, NONFINITE),
    "is finite": (lambda b, h, q, k, x: jnp.isfinite(x[q]) | jnp.isinf(x[k]), NONFINITE),
    "difference read": (lambda b, h, q, k, x: x[q - k] >= 5, IDS),
    "clamped": (lambda b, h, q, k, x: x[q + 50] == x[k * 3], SORTED),
    "taken": (lambda b, h, q, k, x: jnp.take(x, q - k + 40) >= 5, IDS),
    "chained": (lambda b, h, q, k, x, y: y[x[q]] >= y[x[k]], IDS, SORTED),
    "two rows": (lambda b, h, q, k, x: x[q // 8, q % 8] & x[k, q], PAIRS),
    "slice": (lambda b, h, q, k, x: jnp.any(jax.lax.dynamic_slice(x, (q,), (3,)) == k), IDS),
    "index array": (lambda b, h, q, k, x, o: jnp.sum(x[q + o] == x[k]) > 1, IDS, HEADS),
    "words": (lambda b, h, q, k, w: (w[q, k // 32] >> (k % 32).astype("uint32")) & 1 == 1, WORDS),
    "negative divisor": (lambda b, h, q, k, c: (q - 20) // (h - c) >= (k - 9) % (b - c), HEADS[0]),
    "zero divisor": (lambda b, h, q, k: q // (k - 5) >= (q % (k - 3)),),
    "truncated": (lambda b, h, q, k: jax.lax.div(q - k, 7) == jax.lax.rem(k - q, -5),),
    "slopes": (lambda b, h, q, k, x: x[h] * (q - k) > -3.0 * jnp.tanh(q / 9), FLOATS),
    "stack": (lambda b, h, q, k: jnp.max(jnp.stack([q, k, h])) > jnp.min(jnp.array([k, 9])),),
}


UNPROVEN_QUICK = ("nowhere", "everywhere", "dilated window", "random", "product", "nan", "clamped")
UNPROVEN_QUICK += ("float sum", "inf - inf", "zero divisor", "chained", "words", "slopes")


@pytest.mark.parametrize(
    "name", quick(sorted(UNPROVEN, key=lambda x: x not in UNPROVEN_QUICK), len(UNPROVEN_QUICK))
)
def test_exact_where_unproven(name):
    mask, *captures = UNPROVEN[name]
    found, truth = both(mask, captures, 37, 53, 8, 4)
    np.testing.assert_array_equal(found, truth)


def test_proofs_alone_are_sound_and_leave_these_undecided():
    sizes: dict[str, Any] = {"q_len": 37, "kv_len": 53, "q_tile": 8, "kv_tile": 4}
    masks = [trace(UNPROVEN[name][0]) for name in ("sin", "loop", "random", "nowhere")]
    maps = lambda: [block_map(mask, (), b=B, h=H, exact=False, **sizes) for mask in masks]
    wholes = lambda: [dense(mask, (), 37, 53) for mask in masks]
    for proven, whole in zip(*once(lambda: (maps(), wholes())), strict=True):
        truth, proven = tiles_of(np.asarray(whole), 37, 53, 8, 4), np.asarray(proven)
        np.testing.assert_array_equal(proven, np.where(proven == PARTIAL, PARTIAL, truth))
        assert (proven != truth).any()


def test_a_tile_that_sticks_out_is_decided_by_one_pair():
    """It is partial whatever the others say, and they are not asked."""
    sizes: dict[str, Any] = {"q_len": 10, "kv_len": 7, "q_tile": 4, "kv_tile": 4}
    for mask in (causal(), sliding_window(40, right=40), documents(jnp.zeros(10, int))):
        index = jax.ShapeDtypeStruct((), jnp.int32)
        jaxpr = jax.make_jaxpr(lambda b, h, q, k, m=mask: m(b, h, q, k))(*[index] * 4)
        find = lambda j=jaxpr: block_maps.undecided(j, (), b=0, h=0, **sizes)
        assert not once(find).any()


def test_what_a_tile_of_unknown_arrays_may_be():
    mask = trace(lambda b, h, q, k, x: (q >= k) & (x[q] == x[k]), IDS)
    sizes: dict[str, Any] = {"q_len": 8, "kv_len": 8, "q_tile": 4, "kv_tile": 4}
    found = once(lambda: block_map(mask, [unknown(IDS.shape, IDS.dtype)], b=0, h=0, **sizes))
    np.testing.assert_array_equal(found, [[PARTIAL, EMPTY], [PARTIAL, PARTIAL]])


NUMBERS = st.sampled_from(["q", "k", "b", "h"]) | st.sampled_from([-7, -1, 0, 1, 3, 8, 30, 2**30])
BINARY = st.sampled_from(
    [jnp.add, jnp.subtract, jnp.multiply, jnp.floor_divide, jnp.remainder, jnp.minimum, jnp.maximum]
    + [jax.lax.div, jax.lax.rem, jnp.bitwise_and, jnp.bitwise_xor, jnp.right_shift, jnp.left_shift]
)
UNARY = st.sampled_from(
    [jnp.abs, jnp.sign, jnp.negative, jnp.square, jnp.invert]
    + [lambda x: jnp.asarray(x).astype(jnp.int8).astype(jnp.int32)]
)
COMPARE = st.sampled_from(
    [jnp.equal, jnp.not_equal, jnp.less, jnp.less_equal, jnp.greater, jnp.greater_equal]
)
ARRAYS = st.sampled_from(["ids", "runs", "floats"])


def larger(terms):
    """Terms of the language of masks: a function and its operands."""
    return st.one_of(
        st.tuples(BINARY, terms, terms),
        st.tuples(UNARY, terms),
        st.tuples(st.just("read"), ARRAYS, terms),
        st.tuples(st.just(jnp.where), st.tuples(COMPARE, terms, terms), terms, terms),
    )


TERMS = st.recursive(NUMBERS, larger, max_leaves=6)
MASKS = st.recursive(
    st.tuples(COMPARE, TERMS, TERMS),
    lambda masks: st.one_of(
        st.tuples(st.sampled_from([jnp.logical_and, jnp.logical_or, jnp.not_equal]), masks, masks),
        st.tuples(st.just(jnp.logical_not), masks),
    ),
    max_leaves=3,
)


def evaluate(term, names):
    match term:
        case str():
            return names[term]
        case int():
            return jnp.int32(term)
        case ("read", "floats", index):
            return (names["floats"][evaluate(index, names)] * 9).astype(jnp.int32)
        case ("read", array, index):
            return names[array][evaluate(index, names)]
        case (f, *operands):
            return f(*(evaluate(x, names) for x in operands))


SHAPES = st.sampled_from([(13, 9, 4, 4), (6, 21, 1, 8)])


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(MASKS, SHAPES)
def test_any_mask_is_exact(term, sizes):
    check_any(term, sizes)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(MASKS, SHAPES)
def test_any_of_many_masks_is_exact(term, sizes):
    check_any(term, sizes)


def check_any(term, sizes):
    def mask(b, h, q, k, *captures):
        names = dict(zip(("ids", "runs", "floats"), captures, strict=True))
        return evaluate(term, {"b": b, "h": h, "q": q, "k": k, **names})

    found, truth = both(mask, (IDS, RUNS, NONFINITE), *sizes)
    np.testing.assert_array_equal(found, truth)


# ---- Under transforms, and large -----------------------------------------------------------------


def documents_map(ids, b, q_len, tile):
    jaxpr = trace(lambda b, h, q, k, x: (causal() & documents(x))(b, h, q, k), ids)
    sizes: dict[str, Any] = {"q_len": q_len, "kv_len": q_len, "q_tile": tile, "kv_tile": tile}
    return block_map(jaxpr, (ids,), b=b, h=0, **sizes)


@pytest.fixture
def blocks(monkeypatch):
    """All maps are made as those of hundreds of thousands of tokens are."""
    monkeypatch.setattr(block_maps, "_AT_ONCE", 0)
    monkeypatch.setattr(block_maps, "_SIDE", 4)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
    "name", ["causal documents", "few ids", "pairs", "nowhere", "dilated window", "product", "nan"]
)
def test_exact_by_blocks(name):
    mask, *captures = (EXACT | UNPROVEN)[name]
    found, truth = both(mask, captures, 70, 66, 3, 2)
    np.testing.assert_array_equal(found, truth)


def test_reads_of_a_long_array():
    # 40 blocks, so that ranges start and end in the middle of one and span many.
    x = jnp.asarray(RNG.normal(size=640), jnp.float32).at[300:].add(30).at[500:].add(-90)
    mask = lambda b, h, q, k, x: x[jnp.maximum(q * 37 - k * 5, 0)] > 2
    found, truth = both(mask, (x,), 17, 12, 3, 4)
    np.testing.assert_array_equal(found, truth)
    steps = lambda b, h, q, k, x: x[q * 37] > x[k * 5]
    np.testing.assert_array_equal(*both(steps, (x,), 17, 120, 3, 4))
    ranges = lambda b, h, q, k, x: x[q] > x[k + 3]
    found, truth = both(ranges, (x,), 640, 600, 100, 77)
    np.testing.assert_array_equal(found, truth)
    assert len(np.unique(truth)) == 3


@pytest.mark.slow
def test_vmap_and_map_agree():
    check_transforms(40)


@pytest.mark.usefixtures("blocks")
def test_vmap_and_map_agree_by_blocks():
    check_transforms(23)


def check_transforms(length):
    ids = jnp.asarray(np.sort(RNG.integers(0, 3, (3, length))), jnp.int32)
    one = lambda ids, b: documents_map(ids, b, length, 4)
    i = np.arange(length)
    dense = [(i[:, None] >= i) & (x[:, None] == x) for x in np.asarray(ids)]
    expected = np.stack([tiles_of(mask, length, length, 4, 4) for mask in dense])
    assert len(np.unique(expected)) == 3
    for run, *args in (
        (jax.vmap(one, (None, 0)), ids, jnp.arange(3)),
        (jax.vmap(one), ids[:, None], jnp.zeros(3, jnp.int32)),
        (lambda ids: jax.lax.map(lambda b: one(ids, b), jnp.arange(3)), ids),
    ):
        np.testing.assert_array_equal(once(run, *args), expected)


def test_maps_of_one_call_may_need_different_decisions():
    """Under vmap, one map has much to decide pair by pair and another nothing."""
    steps = jnp.array([1, 5, 40])
    mask = lambda b, h, q, k, n: (q >= k) & (q - k < 21) & ((q - k) % n[h] == 0)
    jaxpr = trace(mask, steps)
    sizes: dict[str, Any] = {"q_len": 64, "kv_len": 64, "q_tile": 4, "kv_tile": 4}
    one = lambda h: block_map(jaxpr, (steps,), b=0, h=h, **sizes)
    found = once(jax.vmap(one), jnp.arange(3))
    i = np.arange(64)
    for h, step in enumerate((1, 5, 40)):
        distance = i[:, None] - i
        seen = (distance >= 0) & (distance < 21) & (distance % step == 0)
        np.testing.assert_array_equal(found[h], tiles_of(seen, 64, 64, 4, 4))


def test_memory_of_long_sequences():
    """Documents in 2,048 x 2,048 tiles, whose map is 4 MiB, and a million causal tokens."""
    ids = jax.ShapeDtypeStruct((262_144,), jnp.int32)
    one = jax.jit(functools.partial(documents_map, b=0, q_len=262_144, tile=128))
    memory = one.lower(ids).compile().memory_analysis()
    assert memory.output_size_in_bytes == 2048**2
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 10e6
    sizes: dict[str, Any] = {"q_len": 2**20, "kv_len": 2**20, "q_tile": 128, "kv_tile": 128}
    million = jax.jit(lambda: block_map(trace(causal()).jaxpr, (), b=0, h=0, **sizes))
    memory = million.lower().compile().memory_analysis()
    assert memory.output_size_in_bytes == 8192**2
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 100e6


def test_fifty_masks_are_one_program():
    """Masks whose numbers are arrays, each with functions of its own, in one process."""
    count = collections.Counter()
    listen = lambda event, *_, **__: count.update({event.rpartition("/")[2]: 1})
    q = jnp.asarray(RNG.normal(size=(1, 520, 1, 4)), jnp.float32)
    outs = []

    def only(n):
        return lambda b, h, q_idx, kv_idx: kv_idx == n

    for n in range(50):
        tokens = only(jnp.int32(n))
        mask = (sliding_window(jnp.int32(2 + n)) & dilated(jnp.int32(1 + n % 3))) | tokens
        outs.append(flex_attention(q, q, q, mask_mod=mask))
        if n == 0:
            jax.monitoring.register_event_duration_secs_listener(listen)
    jax.monitoring.unregister_event_duration_listener(listen)
    assert not [event for event in count if "backend_compile" in event]
    assert len({np.asarray(out).tobytes() for out in outs}) == 50
