"""The newer variants, those of attention-gym among them, in at most five lines of user code each.

Each stands beside what it means: matrices of who is seen and of what is added, written with loops
or NumPy, under dense attention in float64.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import once
from xform.primitives.attention import flex_attention
from xform.primitives.inference import decode_attention
from xform.primitives.masks import (
    block_diagonal,
    block_sparse,
    causal,
    documents,
    global_tokens,
    graph,
    neighborhood,
    prefix,
    sliding_window,
    tiled,
    tree,
)

B, T, H, D, R = 2, 24, 2, 4, 6
RNG = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(RNG.normal(size=shape), jnp.float32)
q, k, v = normal(B, T, H, D), normal(B, T, H, D), normal(B, T, H, D)
ROPE_Q, ROPE_K = normal(B, T, H, R), normal(B, T, 1, R)
LATENT = normal(B, T, 1, D)
HOPS = jnp.asarray(RNG.integers(0, 5, (B, T, T)))
BY_HOPS = normal(H, 5)
PATHS, BY_EDGE = jnp.asarray(RNG.integers(0, 4, (B, T, T, 3))), normal(H, 3, 4)
IMAGE_OF = jnp.asarray(np.sort(RNG.integers(-1, 3, T)))
CLS = jnp.asarray(RNG.random(T) < 0.15)
PARENTS = jnp.asarray([-1, 0, 1, 1, 3, 3, 0])
CHOSEN = jnp.asarray(RNG.random((B, T, T)) < 0.3)

# ---- The gallery ---------------------------------------------------------------------------------


def mla_with_a_rope_split():
    rope = jnp.broadcast_to(ROPE_K, (B, T, H, R))
    q_all, k_all = jnp.concatenate([q, ROPE_Q], -1), jnp.concatenate([k, rope], -1)
    return flex_attention(q_all, k_all, v, mask_mod=causal())


def latent_attention():
    scale = (D + R) ** -0.5
    rope = lambda s, b, h, i, j: s + scale * (ROPE_Q[b, i, h] @ ROPE_K[b, j, 0])
    return flex_attention(q, LATENT, LATENT, score_mod=rope, mask_mod=causal(), scale=scale)


def graphormer():
    spatial = lambda s, b, h, i, j: s + BY_HOPS[h, HOPS[b, i, j]]
    return flex_attention(q, k, v, score_mod=spatial)


def graphormer_edges():
    edge = lambda n, b, h, i, j: BY_EDGE[h, n, PATHS[b, i, j, n]]
    mean = lambda s, *at: s + sum(edge(n, *at) for n in range(3)) / 3
    return flex_attention(q, k, v, score_mod=mean)


def sandwich():
    waves = 1e4 ** (-jnp.arange(8) / 8)
    table = jnp.cos(jnp.outer(jnp.arange(T), waves)).sum(-1)
    bias = lambda s, b, h, i, j: s + table[jnp.abs(i - j)] * H / (8 * (h + 1))
    return flex_attention(q, k, v, score_mod=bias, mask_mod=causal())


def block_diffusion():
    noisy, block = lambda i: i < T // 2, lambda i: i % (T // 2) // 4
    own = lambda b, h, i, j: (block(i) == block(j)) & (noisy(i) == noisy(j))
    past = lambda b, h, i, j: ~noisy(j) & (block(j) < block(i))
    return flex_attention(q, k, v, mask_mod=documents(jnp.zeros(T, int)) & own | past)


def sliding_tiles():
    order, near = tiled((4, 6), (2, 2)), neighborhood((2, 3), (1, 3))  # of tiles
    mask = lambda b, h, i, j: near(b, h, i // 4, j // 4)
    out = flex_attention(q[:, order], k[:, order], v[:, order], mask_mod=mask)
    return out[:, jnp.argsort(order)]


def sparse_video_gen():
    text, frame = 4, 5  # tokens of the prompt, and of each of four frames
    spatial = sliding_window(2 * frame, right=2 * frame - 1)
    temporal = lambda b, h, i, j: jnp.abs((i - text) % frame - (j - text) % frame) < 2
    per_head = lambda *at: jnp.where(at[1] == 0, spatial(*at), temporal(*at))
    return flex_attention(q, k, v, mask_mod=global_tokens(text) | per_head)


def video_sparse():
    mean = lambda x: x.reshape(B, 6, 4, H, D).mean(2)
    coarse = jnp.einsum("bnhd,bmhd->bhnm", mean(q), mean(k))
    top = coarse >= jax.lax.top_k(coarse, 2)[0][..., -1:]
    return flex_attention(q, k, v, mask_mod=lambda b, h, i, j: top[b, h, i // 4, j // 4])


def block_sparse_of_heads():
    layout = jnp.stack([jnp.eye(6), jnp.tri(6)]) > 0
    return flex_attention(q, k, v, mask_mod=block_sparse(layout, 4) & causal())


def shared_prefix():
    rollout = documents((jnp.arange(T) - 6) // 6)  # after six tokens that all have
    return flex_attention(q, k, v, mask_mod=causal() & (rollout | prefix(6)))


def global_sliding_window():
    heard = lambda b, h, i, j: CLS[i] | CLS[j]
    return flex_attention(q, k, v, mask_mod=sliding_window(4, right=3) | heard)


def exclusive():
    return flex_attention(q, k, v, mask_mod=causal() & ~sliding_window(1))


def batchify():
    one = lambda x: x.reshape(1, B * T, H, D)
    mask = block_diagonal(T) & (lambda b, h, i, j: i >= j)
    return flex_attention(one(q), one(k), one(v), mask_mod=mask).reshape(q.shape)


def flamingo():
    images = documents(IMAGE_OF, jnp.arange(12) // 4)  # the tokens of three
    return flex_attention(q, k[:, :12], v[:, :12], mask_mod=images)


def transfusion():
    return flex_attention(q, k, v, mask_mod=causal() | documents(IMAGE_OF))


def jetspec_tree():
    return decode_attention(q[:, -7:], k, v, T, mask_mod=tree(PARENTS, context=T - 7))


def jetspec_training():
    block = (block_diagonal(4) & causal()).shift(k=-8)  # after a prefix of eight
    mask = prefix(8) | ((lambda b, h, i, j: j >= 8) & block)
    return flex_attention(q[:, :16], k, v, mask_mod=mask)


def streaming():
    return flex_attention(q, k, v, mask_mod=causal() & (sliding_window(5) | prefix(2)))


def activation():
    score = lambda s, *at: jnp.log(jax.nn.gelu(s) + 1)
    out, aux = flex_attention(q, k, v, score_mod=score, mask_mod=causal(), aux="lse")
    return out * jnp.exp(jnp.asarray(aux.lse))[..., None] - jnp.cumsum(v, 1)


def differential():
    attend = lambda h: flex_attention(q[:, :, h], k[:, :, h], v, mask_mod=causal())
    return attend(jnp.array([0, 0])) - 0.3 * attend(jnp.array([1, 1]))


def selected_keys():
    return flex_attention(q, k, v, mask_mod=graph.of(CHOSEN) | sliding_window(1))


# ---- What they mean ------------------------------------------------------------------------------

Q_AT, K_AT = np.arange(T)[:, None], np.arange(T)[None]
PAST = Q_AT >= K_AT
wide = lambda x: np.asarray(x, np.float64)


def dense(see: Any = True, bias: Any = 0.0, q=q, k=k, v=v, scale=D**-0.5, weigh=None):
    """Attention `[B,T,H,V]` in float64; `see` and `bias` broadcast to `[B,H,T,S]`."""
    q, k, v = map(wide, (q, k, v))
    k, v = (np.broadcast_to(x, (*x.shape[:2], q.shape[2], x.shape[3])) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) * scale + bias
    see = np.broadcast_to(see, scores.shape)
    if weigh is not None:
        return np.einsum("bhts,bshd->bthd", np.where(see, weigh(scores), 0), v)
    top = np.where(see, scores, -np.inf).max(-1, keepdims=True)
    p = np.where(see, np.exp(scores - np.where(np.isfinite(top), top, 0)), 0)
    total = p.sum(-1, keepdims=True)
    return np.einsum("bhts,bshd->bthd", p / np.where(total == 0, 1, total), v)


def pairs(f, t=T, s=T):
    """A matrix by a plain function of two numbers."""
    return np.array([[bool(f(i, j)) for j in range(s)] for i in range(t)])


def rope(scale):
    return scale * np.einsum("bthr,bsr->bhts", wide(ROPE_Q), wide(ROPE_K)[:, :, 0])


def edges():
    at = np.arange(B)[:, None, None], np.arange(T)[None, :, None], np.arange(T)[None, None]
    steps = [wide(BY_EDGE)[:, n][:, np.asarray(PATHS)[*at, n]] for n in range(3)]
    return np.moveaxis(np.mean(steps, 0), 0, 1)


def waves():
    angles = (Q_AT - K_AT)[..., None] * 1e4 ** (-np.arange(8) / 8)
    return np.cos(angles).sum(-1) * (H / (8 * np.arange(1, H + 1)))[:, None, None]


def diffusion(i, j):
    n = T // 2
    (clean_i, at_i), (clean_j, at_j) = divmod(i, n), divmod(j, n)
    if clean_i == clean_j and at_i // 4 == at_j // 4:
        return True
    return clean_j and at_j // 4 < at_i // 4


def tiles(i, j):
    (y, x), (v, u) = ((divmod(n, 6)[0] // 2, n % 6 // 2) for n in (i, j))
    del x, u  # a window of three tiles reaches all of a row of three
    return y == v


def of_video(i, j, spatial):
    if i < 4 or j < 4:
        return True
    return abs(i - j) < 10 if spatial else abs((i - 4) % 5 - (j - 4) % 5) < 2


def top_blocks():
    mean = lambda x: wide(x).reshape(B, 6, 4, H, D).mean(2)
    coarse = np.einsum("bnhd,bmhd->bhnm", mean(q), mean(k))
    best = np.argsort(-coarse, -1)[..., :2]
    keep = np.zeros(coarse.shape, bool)
    np.put_along_axis(keep, best, True, -1)
    return keep.repeat(4, 2).repeat(4, 3)


def paths():
    see = np.zeros((7, T), bool)
    see[:, : T - 7] = True
    for n in range(7):
        at = n
        while at >= 0:
            see[n, T - 7 + at] = True
            at = int(PARENTS[at])
    return see


def gelu(s):
    return 0.5 * s * (1 + np.tanh(np.sqrt(2 / np.pi) * (s + 0.044715 * s**3)))


def two_maps():
    one = lambda h: dense(PAST, q=q[:, :, [h, h]], k=k[:, :, [h, h]])
    return one(0) - 0.3 * one(1)


IMAGES = np.asarray(IMAGE_OF)
MEANT = {
    mla_with_a_rope_split: lambda: dense(
        PAST, rope((D + R) ** -0.5), scale=(D + R) ** -0.5),
    latent_attention: lambda: dense(
        PAST, rope((D + R) ** -0.5), k=LATENT, v=LATENT, scale=(D + R) ** -0.5),
    graphormer: lambda: dense(
        bias=np.moveaxis(wide(BY_HOPS)[:, np.asarray(HOPS)], 0, 1)),
    graphormer_edges: lambda: dense(bias=edges()),
    sandwich: lambda: dense(PAST, waves()),
    block_diffusion: lambda: dense(pairs(diffusion)),
    sliding_tiles: lambda: dense(pairs(tiles)),
    sparse_video_gen: lambda: dense(np.stack(
        [pairs(lambda i, j, s=s: of_video(i, j, s)) for s in (True, False)])),
    video_sparse: lambda: dense(top_blocks()),
    block_sparse_of_heads: lambda: dense(PAST & np.stack([Q_AT // 4 == K_AT // 4, PAST])),
    shared_prefix: lambda: dense(PAST & ((K_AT < 6) | ((Q_AT - 6) // 6 == (K_AT - 6) // 6))),
    global_sliding_window: lambda: dense(
        (np.abs(Q_AT - K_AT) <= 3) | np.asarray(CLS)[:, None] | np.asarray(CLS)),
    exclusive: lambda: dense(Q_AT > K_AT),
    batchify: lambda: dense(PAST),
    flamingo: lambda: dense(
        (IMAGES[:, None] == np.arange(12) // 4) & (IMAGES[:, None] >= 0), k=k[:, :12], v=v[:, :12]),
    transfusion: lambda: dense(PAST | ((IMAGES[:, None] == IMAGES) & (IMAGES >= 0))),
    jetspec_tree: lambda: dense(paths(), q=q[:, -7:]),
    jetspec_training: lambda: dense(
        pairs(lambda i, j: j < 8 or (i // 4 == (j - 8) // 4 and j - 8 <= i), 16), q=q[:, :16]),
    streaming: lambda: dense(PAST & ((Q_AT - K_AT < 5) | (K_AT < 2))),
    activation: lambda: dense(PAST, weigh=gelu),
    differential: two_maps,
    selected_keys: lambda: dense((np.asarray(CHOSEN) | (Q_AT == K_AT))[:, None]),
}  # fmt: skip


@pytest.mark.parametrize("variant", MEANT, ids=lambda f: f.__name__)
def test_at_most_five_lines(variant):
    head, *body = inspect.getsource(variant).rstrip().splitlines()
    assert head.startswith("def ")
    assert 1 <= len(body) <= 5


@pytest.mark.parametrize("variant", MEANT, ids=lambda f: f.__name__)
def test_what_it_means(variant):
    with jax.numpy_rank_promotion("allow"):
        found = once(variant)
    expected = MEANT[variant]()
    np.testing.assert_allclose(found, expected, atol=2e-5)
    plain = dense(q=q[:, : expected.shape[1]])
    assert plain.shape != expected.shape or np.abs(expected - plain).max() > 0.05
