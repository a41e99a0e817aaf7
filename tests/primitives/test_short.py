"""Arrays with fewer entries than a mod reads are refused; other reads are the user's own."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform.primitives._objects import variant
from xform.primitives.attention import flex_attention, which
from xform.primitives.inference import decode_attention, paged_attention
from xform.primitives.masks import Mask, causal, documents, prefix, tree
from xform.primitives.scores import alibi
from xform.sharding.mesh import make_mesh, shardings

B, T, H, D = 2, 12, 4, 4
X = jax.ShapeDtypeStruct((B, T, H, D), jnp.float32)
NEW, PAGES = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((B, 1, H, D), (6, 4, H, D)))
TABLE = jnp.arange(6).reshape(B, 3)
ENTRIES = {
    "flex_attention": (flex_attention, (X, X, X)),
    "reference": (partial(flex_attention, implementation="reference"), (X, X, X)),
    "decode_attention": (lambda q, k, v, **o: decode_attention(q, k, v, 9, **o), (NEW, X, X)),
    "paged_attention": (
        lambda q, k, v, **o: paged_attention(q, k, v, TABLE, 9, **o),
        (NEW, PAGES, PAGES),
    ),
}


def run(entry, **mods):
    attend, args = ENTRIES[entry]
    return jax.eval_shape(partial(attend, **mods), *args)


def mods_of(mod) -> dict:
    """A score mod takes five arguments."""
    count = getattr(getattr(mod, "__code__", None), "co_argcount", 4)
    return {"score_mod" if count == 5 else "mask_mod": mod}


ENDS = jnp.array([3, 4, 5])
SLOPES, VALID, BIAS = jnp.arange(3.0), jnp.ones(8, bool), jnp.ones((11, 11))
SHORT_BIAS, COUNT = jnp.ones(8), jnp.int32(9)
OF_HEADS, OF_TEXTS = jnp.ones((H, T, T - 1)), jnp.ones((1, T), bool)
SHORT_IDS, LONG_IDS = (documents(jnp.zeros((B, n), int)) for n in (8, 14))
IDS = documents(jnp.zeros((B, T), int))
MORE = jnp.arange(100.0)
BOTH = r"there are (12 queries and 12 keys|12 positions): make it \[12, 12\]"

SHORT = {
    "keys": (lambda b, h, i, j: VALID[j],
        r"`<lambda>` \(.*test_short.py:\d+\) reads bool\[8\] at kv_idx \(at .*short.py:\d+.*\), "
        r"and there are 12 (keys|positions): make it \[12\].*`x\[jnp.minimum\(kv_idx, 7\)\]`"),
    "queries": (lambda b, h, i, j: VALID[i] & (j <= i), "at q_idx .* 12 (queries|positions)"),
    "pairs": (lambda s, b, h, i, j: s + BIAS[i, j], "at q_idx and kv_idx .*" + BOTH),
    "one index after another": (lambda s, b, h, i, j: s + BIAS[i][j], r"\[11\] at kv_idx"),
    "heads": (lambda s, b, h, i, j: s * SLOPES[h], r"float32\[3\] at h .* 4 query heads: make .*4"),
    "one dimension of three": (lambda s, b, h, i, j: s + OF_HEADS[h, i, j],
        r"float32\[4, 12, 11\] at kv_idx .*make it \[4, 12, 12\]"),
    "one text for two": (lambda b, h, i, j: OF_TEXTS[b, j],
        r"bool\[1, 12\] at b .* 2 batch entries: make it \[2, 12\]; .*`x\[jnp.minimum\(b, 0\)\]`"),
    "what is computed of an array": (lambda s, b, h, i, j: s + jnp.exp(SLOPES)[h], "at h "),
    "under one that is too weak": (lambda b, h, i, j: (j < 9) & VALID[j], "at kv_idx "),
    "under one that is weaker yet": (lambda b, h, i, j: (j <= 8) & VALID[j], "at kv_idx "),
    "under one of another index": (lambda b, h, i, j: (i < 8) & VALID[j],
        r"at kv_idx .* if none is, `jnp.where\(kv_idx < 8, x\[kv_idx\], 0\)`"),
    "under one of both": (lambda b, h, i, j: (j <= i) & VALID[j], "at kv_idx "),
    "a jitted function": (jax.jit(lambda b, h, i, j: VALID[j]), "at kv_idx "),
    "a function in a mask object": (causal() & (lambda b, h, i, j: VALID[j]), "bool.8. at kv_idx"),
    "ids in a function": (lambda b, h, i, j: SHORT_IDS(b, h, i, j) & (j <= i),
        r"`documents\(ids\)` has shape \[2, 8\]; .* it needs \[2, 12\]"),
    "longer ids in a function": (lambda b, h, i, j: LONG_IDS(b, h, i, j) & (j <= i),
        r"`documents\(ids\)` has shape \[2, 14\]; .* it needs \[2, 12\]"),
    "ids at indices by name": (lambda b, h, i, j: LONG_IDS(b, h, kv_idx=j, q_idx=i) & (j <= i),
        r"`documents\(ids\)` has shape \[2, 14\]; .* it needs \[2, 12\]"),
    "ids in a score": (lambda s, b, h, i, j: jnp.where((causal() & LONG_IDS)(b, h, i, j), s, -1),
        r"`documents\(ids\)` has shape \[2, 14\]; .* it needs \[2, 12\]"),
    "ids in a function in a mask": (causal() & (lambda *at: LONG_IDS(*at)), r"\[2, 14\]; .*2, 12"),
}  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", SHORT)
def test_an_array_with_too_few_entries_is_refused(name, entry):
    mod, message = SHORT[name]
    start = "flex_attention" if entry == "reference" else entry
    with pytest.raises(ValueError, match=f"^{start}: .*{message}"):
        run(entry, **mods_of(mod))


def test_all_short_arrays_of_both_mods_are_named_at_once():
    def score(s, b, h, i, j):
        return s * SLOPES[h] + BIAS[i, j]

    with pytest.raises(ValueError, match="`score`") as caught:
        run("flex_attention", score_mod=score, mask_mod=lambda b, h, i, j: VALID[i] & VALID[j])
    found = re.findall(r"reads (\w+)\[([\d, ]+)\] at ([\w ]+) \(", str(caught.value))
    assert found == [
        ("float32", "3", "h"),
        ("float32", "11, 11", "q_idx and kv_idx"),
        ("bool", "8", "q_idx"),
        ("bool", "8", "kv_idx"),
    ]


FINE = {
    "entries for all": lambda s, b, h, i, j: s + jnp.ones((B, H, T, T))[b, h, i, j],
    "a table for the longest text": lambda s, b, h, i, j: s + MORE[i] * MORE[j] * MORE[h],
    "numbers of more texts": lambda b, h, i, j: j < ENDS[b],
    "a clipped difference": lambda s, b, h, i, j: s + SLOPES[jnp.clip(j - i, -1, 1) + 1],
    "all differences": lambda s, b, h, i, j: s + jnp.ones(2 * T - 1)[i - j + T - 1],
    "blocks": lambda b, h, i, j: jnp.ones((3, 3), bool)[i // 4, j // 4],
    "remainders": lambda b, h, i, j: VALID[j % 3],
    "pairs of heads": lambda s, b, h, i, j: s * jnp.ones(2)[h // 2],
    "the last entry for the rest": lambda b, h, i, j: VALID[jnp.minimum(j, 7)],
    "asked for": lambda b, h, i, j: jnp.take(VALID, j, mode="clip"),
    "filled": lambda b, h, i, j: VALID.at[j].get(mode="fill", fill_value=False),
    "a branch": lambda b, h, i, j: jax.lax.cond(j < 8, lambda: VALID[j], lambda: True),
    "under a comparison": lambda s, b, h, i, j: jnp.where(j < 8, s + SHORT_BIAS[j], s),
    "beside a comparison": lambda b, h, i, j: (j <= 7) & VALID[j],
    "beside its opposite": lambda b, h, i, j: (j > 7) | VALID[j],
    "with the number first": lambda b, h, i, j: ~(jnp.int32(8) <= j) & VALID[j],
    "under a number of an array": lambda b, h, i, j: jnp.where(j < COUNT - 1, VALID[j], False),
    "both under comparisons": lambda b, h, i, j: (i < 8) & (j < 8) & (VALID[i] == VALID[j]),
    "an array as a whole": lambda s, b, h, i, j: s + SLOPES.sum(),
    "ids that fit": lambda b, h, i, j: IDS(b, h, i, j) & (j <= i),
    "ids of a longer text": lambda b, h, i, j: LONG_IDS(b, h, i + 1, j + 2),
    "ids of one text": lambda b, h, i, j: documents(jnp.zeros((1, T), int))(0, h, i, j),
    "a shifted mask": IDS.shift(b=0) & causal().shift(q=3),
    "a part of a mask": documents(jnp.zeros((B, 2 * T), int)).slice(q=slice(T), k=slice(T)),
    "an object in a score": lambda s, b, h, i, j: alibi(jnp.ones(H))(s, b, h, i, j),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", FINE)
def test_reads_that_know_their_range_are_accepted(name, entry):
    if name == "a part of a mask" and entry not in ("flex_attention", "reference"):
        pytest.skip("there, the part would have to have places for all positions of a text")
    run(entry, **mods_of(FINE[name]))


def test_a_read_under_a_comparison_means_what_it_says():
    """Values behind the end of an array have no influence, whatever is read there."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, T, 2, D))
    found = flex_attention(
        q, k, v, score_mod=lambda s, b, h, i, j: jnp.where(j < 8, s + SHORT_BIAS[j], s)
    )
    bias = jnp.append(SHORT_BIAS, jnp.zeros(T - 8))
    true = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[j])
    np.testing.assert_allclose(found, true, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, T), (T, 0), (0, 0)])
def test_nothing_is_read_for_no_queries_or_no_keys(shape):
    q, k = (jax.ShapeDtypeStruct((B, n, H, D), jnp.float32) for n in shape)
    pairs = jnp.ones((max(1, shape[0]), max(1, shape[1])), bool)
    mask = lambda b, h, i, j: pairs[i, j]
    jax.eval_shape(partial(flex_attention, mask_mod=mask), q, k, k)


@pytest.mark.parametrize(
    "mods",
    [
        {"mask_mod": LONG_IDS},
        {"mask_mod": lambda b, h, i, j: VALID[j]},
        {"score_mod": lambda s, b, h, i, j: s * SLOPES[h]},
    ],
    ids=["ids", "a function", "a score"],
)
def test_which_refuses_what_attention_refuses(mods):
    """In the same words."""
    with pytest.raises(ValueError, match=r"^flex_attention: ") as refused:
        run("flex_attention", **mods)
    for gradient in (False, True):
        with pytest.raises(ValueError, match=f"^{re.escape(str(refused.value))}$"):
            which(
                jnp.ones(X.shape), jnp.ones(X.shape), jnp.ones(X.shape), gradient=gradient, **mods
            )


EMPTY_IDS = documents(jnp.zeros((B, T), int), jnp.zeros((B, 0), int))
NOTHING = {
    "no texts": ((0, T, T), documents(jnp.zeros((0, T), int)) | prefix(jnp.zeros(0, int))),
    "no keys": ((B, T, 0), EMPTY_IDS),
    "no queries": ((B, 0, T), tree(jnp.zeros(0, int))),
    "no keys for a function": ((B, T, 0), lambda b, h, i, j: jnp.zeros(0)[j] > 0),
    "no keys for a score": ((B, T, 0), lambda s, b, h, i, j: s + jnp.zeros(0)[j]),
}


@pytest.mark.parametrize("name", NOTHING)
def test_empty_arrays_are_not_read(name):
    (batch, t, s), mod = NOTHING[name]
    q, k = jnp.ones((batch, t, H, D)), jnp.ones((batch, s, H, D))
    for implementation in (None, "reference"):
        out = flex_attention(q, k, k, implementation=implementation, **mods_of(mod))
        np.testing.assert_array_equal(out, np.zeros(q.shape))


@pytest.mark.parametrize("sizes", [(0, 1, 4), (2, 1, 0), (2, 0, 4)], ids=str)
def test_empty_arrays_are_not_read_in_decoding(sizes):
    """No texts, no room for keys, no queries."""
    batch, t, s = sizes
    q, k = jnp.ones((batch, t, H, D)), jnp.ones((batch, s, H, D))
    mask = documents(jnp.zeros((batch, s), int)) & (
        lambda b, h, i, j: jnp.zeros((batch, s))[b, j] < 1
    )
    lengths = jnp.zeros(batch, int)
    out = decode_attention(q, k, k, lengths, mask_mod=mask)
    np.testing.assert_array_equal(out, np.zeros(q.shape))
    pages, table = jnp.ones((3, 2, H, D)), jnp.zeros((batch, s // 2), int)
    out = paged_attention(q, pages, pages, table, lengths, mask_mod=mask)
    np.testing.assert_array_equal(out, np.zeros(q.shape))


def test_what_a_mod_sees_of_a_vmap_is_one_member():
    def attend(valid, slopes, x):
        mask = lambda b, h, i, j: valid[j]
        return flex_attention(x, x, x, mask_mod=mask, score_mod=lambda s, b, h, i, j: s * slopes[h])

    struct = jax.ShapeDtypeStruct
    x = struct((3, *X.shape), X.dtype)
    run = lambda t, h: jax.eval_shape(
        jax.vmap(attend), struct((3, t), bool), struct((3, h), X.dtype), x
    )
    run(T, H)
    with pytest.raises(ValueError, match=r"float32\[3\] at h .*bool\[11\] at kv_idx"):
        run(T - 1, H - 1)


def test_in_a_shard_map_arrays_have_the_entries_of_the_device():
    mesh = make_mesh(tp=4, devices=jax.devices()[:4])

    def attend(x, slopes, own):
        return flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s * slopes[h] * own[b])

    def run(batch):
        specs = jax.P(None, None, "tp"), jax.P("tp"), jax.P()
        f = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=specs[0])
        put = jax.device_put((jnp.ones(H), jnp.ones(batch)), shardings(mesh, specs[1:]))
        x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=shardings(mesh, specs[0]))
        jax.eval_shape(f, x, *put)

    run(B)
    with pytest.raises(ValueError, match=r"float32\[1\] at b .* 2 batch entries"):
        run(B - 1)


def test_a_mask_object_is_named_by_its_own_call():
    @variant
    class own(Mask):
        def __call__(self, b, h, q_idx, kv_idx):
            return VALID[kv_idx]

    with pytest.raises(ValueError, match=r"`.*own.__call__` \(.*test_short.py:\d+\) reads bool"):
        run("flex_attention", mask_mod=own())


def test_a_length_that_is_a_number_is_known_under_jit():
    attend = lambda n: jax.eval_shape(lambda q, k: decode_attention(q, k, k, n), NEW, X)
    for n in (13, np.int32(13), np.array([3, 13])):
        with pytest.raises(ValueError, match=r"`lengths` has 13, and there is room for .* 12"):
            attend(n)
    attend(12)
