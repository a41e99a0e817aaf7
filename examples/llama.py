"""A Llama-style language model: pure functions over a plain dict of arrays.

The model is written once. On one device it is called as it stands. Inside `jax.shard_map`, with the
parameters split as `SPECS` says and `tp` saying how, each device holds some of the heads, of the
feed-forward units and of the vocabulary. A block opens with the columns of its matrices and closes
with their rows: there, and nowhere else, devices talk. With a `Cache`, the same layers `extend` a
text token by token.

Shapes are the suffixes of names:

    B  rows in the batch     H  query heads            M  width of the residual stream
    T  positions in a row    K  key and value heads    F  feed-forward units
    C  codes (vocabulary)    D  size of a head         L  layers
    S  positions in a cache
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from xform import causal, decode_attention, documents, paged_attention
from xform.sharding import TensorParallel
from xform.sharding.context import ContextParallel
from xform.sharding.loss import cross_entropy
from xform.train.data import NO_LABEL


@dataclass(frozen=True)
class Config:
    """Sizes of the model. The defaults make 0.75 million parameters."""

    codes: int = 256
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    hidden: int = 320
    rope_base: float = 10_000.0


# ---- parameters ----------------------------------------------------------------------------------

# Layers are stacked along the leading dimension L. Over `tp` we split the columns of the matrices
# that open a block (whole heads, whole units), and the rows of those that close it.
SPECS = {
    "embed": P("tp"),  # C M
    "layers": {
        "attention_norm": P(),  # L M
        "query": P(None, None, "tp"),  # L M H·D
        "key": P(None, None, "tp"),  # L M K·D
        "value": P(None, None, "tp"),  # L M K·D
        "out": P(None, "tp", None),  # L H·D M
        "hidden_norm": P(),  # L M
        "gate": P(None, None, "tp"),  # L M F
        "up": P(None, None, "tp"),  # L M F
        "down": P(None, "tp", None),  # L F M
    },
    "norm": P(),  # M
    "unembed": P(None, "tp"),  # M C
}
ONE = TensorParallel()
WHOLE = ContextParallel()


def init(config: Config, key: jax.Array) -> dict:
    """Returns fresh float32 parameters, the same for every layout of devices."""
    c, L = config, config.layers
    keys = iter(jax.random.split(key, 9))

    def matrix(*shape: int, gain: float = 1.0) -> jax.Array:
        return jax.random.normal(next(keys), shape) * (gain * shape[-2] ** -0.5)

    # 2L blocks add to the residual stream; this keeps its variance at the end near that of one.
    closing = (2 * L) ** -0.5
    return {
        "embed": matrix(c.codes, c.width),
        "layers": {
            "attention_norm": jnp.ones((L, c.width)),
            "query": matrix(L, c.width, c.heads * c.head_size),
            "key": matrix(L, c.width, c.kv_heads * c.head_size),
            "value": matrix(L, c.width, c.kv_heads * c.head_size),
            "out": matrix(L, c.heads * c.head_size, c.width, gain=closing),
            "hidden_norm": jnp.ones((L, c.width)),
            "gate": matrix(L, c.width, c.hidden),
            "up": matrix(L, c.width, c.hidden),
            "down": matrix(L, c.hidden, c.width, gain=closing),
        },
        "norm": jnp.ones(c.width),
        "unembed": matrix(c.width, c.codes, gain=0.5),
    }


# ---- model ---------------------------------------------------------------------------------------


def logits(params: dict, tokens_BT, ids_BT, config: Config, tp: TensorParallel = ONE):
    """Returns the logits [B, T, C] of the token that follows each position; see `stream`."""
    (logits_BTC,) = tp.column(stream(params, tokens_BT, ids_BT, config, tp), params["unembed"])
    return logits_BTC


def one_by_one(step, x, stack):
    """Returns `x` after `x = step(x, params)` for the parameters of each layer in the stack."""
    return jax.lax.scan(lambda x, p: (step(x, p), None), x, stack)[0]


def stream(
    params: dict, tokens_BT, ids_BT, config: Config,
    tp: TensorParallel = ONE, scan=one_by_one, cp: ContextParallel = WHOLE,
):  # fmt: skip
    """Returns what the model makes of each position, [B, T, M], for `unembed` to turn into logits.

    Args:
      params: Parameters as `init` makes them, or this device's part of them.
      tokens_BT: Tokens.
      ids_BT: The document of each token; attention stays inside a document.
      config: Sizes of the whole model.
      tp: How blocks are split over devices.
      scan: What applies the layers, as `one_by_one` does.
      cp: How the sequence is split over devices.
    """
    x_BTM = tp.embed(params["embed"], tokens_BT)
    x_BTM = through(params["layers"], x_BTM, ids_BT, config, tp, scan, cp)
    return rms_norm(x_BTM, params["norm"])


def through(
    layers: dict, x_BTM, ids_BT, config: Config,
    tp: TensorParallel = ONE, scan=one_by_one, cp: ContextParallel = WHOLE,
):  # fmt: skip
    """Returns the stream after some layers, stacked along their leading dimension; see `stream`."""
    mask = causal() & documents(cp.whole(ids_BT))
    # Positions run on over the row: RoPE sees differences alone, and those never leave a document.
    rotation = rotations(cp.positions(ids_BT.shape[1]), config)
    step = lambda x_BTM, p: layer(x_BTM, p, mask, rotation, config, tp, cp)[0]
    return scan(step, x_BTM, layers)


def layer(
    x_BTM, p: dict, mask, rotation, config: Config,
    tp: TensorParallel = ONE, cp: ContextParallel = WHOLE, cache=None,
):  # fmt: skip
    """One layer: attention, then a gated feed-forward block, each added to the stream."""
    normed_BTM = rms_norm(x_BTM, p["attention_norm"])
    q, k, v = tp.column(normed_BTM, p["query"], p["key"], p["value"])
    out, cache = attention(q, k, v, mask, rotation, config, cp, cache)
    x_BTM += tp.row(out, p["out"])
    gate_BTF, up_BTF = tp.column(rms_norm(x_BTM, p["hidden_norm"]), p["gate"], p["up"])
    return x_BTM + tp.row(jax.nn.silu(gate_BTF) * up_BTF, p["down"]), cache


def attention(q, k, v, mask, rotation, config: Config, cp: ContextParallel, cache):
    """Grouped-query attention: each key/value head serves H/K query heads.

    With a cache, this layer's part of one, queries see the keys and values in it as well.
    """
    B, T, _ = q.shape
    q_BTHD, k_BTKD, v_BTKD = (x.reshape(B, T, -1, config.head_size) for x in (q, k, v))
    q_BTHD, k_BTKD = rotate(q_BTHD, rotation), rotate(k_BTKD, rotation)
    if cache is None:
        out_BTHD = cp.attention(q_BTHD, k_BTKD, v_BTKD, mask_mod=mask)
    else:
        cache = cache.append(k_BTKD, v_BTKD)
        out_BTHD = cache.attend(q_BTHD, mask)
    return out_BTHD.reshape(B, T, -1), cache


def rms_norm(x_BTM, scale_M):
    """Rows of unit mean square, times a learned scale."""
    return x_BTM * jax.lax.rsqrt(jnp.mean(x_BTM**2, -1, keepdims=True) + 1e-5) * scale_M


def rotations(positions_T, config: Config):
    """Returns the cosines and sines of RoPE's angles, each [T, 1, D/2]."""
    frequencies = config.rope_base ** -jnp.linspace(0, 1, config.head_size // 2, endpoint=False)
    angles = positions_T[:, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTHD, rotation):
    """Turns the pairs (i, i + D/2) of each head by an angle that grows with the position."""
    cos, sin = rotation
    a, b = jnp.split(x_BTHD, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


# ---- what it is trained on -----------------------------------------------------------------------


def loss(
    params: dict, rows, config: Config,
    tp: TensorParallel = ONE, scan=one_by_one, cp: ContextParallel = WHOLE,
):  # fmt: skip
    """Returns the summed negative log-likelihood of all labels, in nats, and their number.

    A sum and a count, not a mean: devices that hold different numbers of labels add up theirs, and
    the quotient is then exactly what one device would find.
    """
    x_BTM = stream(params, rows.tokens, rows.ids, config, tp, scan, cp)
    return surprise(params, x_BTM, rows.labels, tp)


def surprise(params: dict, x_BTM, labels_BT, tp: TensorParallel = ONE):
    """Returns that of a finished stream; see `loss`."""
    loss_BT, _ = cross_entropy(x_BTM, params["unembed"], labels_BT, tp, ignore_label=NO_LABEL)
    return jnp.sum(loss_BT), jnp.sum(labels_BT != NO_LABEL)


def flops_per_token(config: Config, T: int) -> int:
    """Returns the model's floating-point operations, forward and backward, for one token.

    This is MFU's convention: 6 for each weight in a matrix product, and attention over half of the
    row (causal), whatever documents hide of it.
    """
    c = config
    weights = c.layers * c.width * (2 * (c.heads + c.kv_heads) * c.head_size + 3 * c.hidden)
    products = 6 * (weights + c.width * c.codes)
    return products + 6 * c.layers * T * c.heads * c.head_size


# ---- text that goes on ---------------------------------------------------------------------------


class Cache(NamedTuple):
    """The keys and values of what was read so far, so that no token is computed twice."""

    k_LBSKD: jax.Array
    v_LBSKD: jax.Array
    length_L: jax.Array
    """How many of the S positions are taken: the same number in every layer."""

    def append(self, k_BTKD, v_BTKD) -> "Cache":
        """Puts keys and values behind those of one layer, which must have room for them."""
        k_BSKD, v_BSKD, length = self
        put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, length, axis=1)
        return Cache(put(k_BSKD, k_BTKD), put(v_BSKD, v_BTKD), length + k_BTKD.shape[1])

    def attend(self, q_BTHD, mask):
        """Attention of the newest tokens over all that are kept of one layer."""
        return decode_attention(q_BTHD, *self, mask_mod=mask)


class Pages(NamedTuple):
    """The same in pages of N positions, of which rows can have as many as they need."""

    k_LPNKD: jax.Array
    v_LPNKD: jax.Array
    table_LBM: jax.Array
    """The pages of each row: the same in every layer."""
    length_L: jax.Array

    def append(self, k_BTKD, v_BTKD) -> "Pages":
        """Puts keys and values behind those of one layer, whose rows must have pages for them."""
        k_PNKD, v_PNKD, table_BM, length = self
        at_T = length + jnp.arange(k_BTKD.shape[1])
        page_BT, place_T = table_BM[:, at_T // k_PNKD.shape[1]], at_T % k_PNKD.shape[1]
        put = lambda old, new: old.at[page_BT, place_T[None]].set(new)
        return Pages(put(k_PNKD, k_BTKD), put(v_PNKD, v_BTKD), table_BM, length + len(at_T))

    def attend(self, q_BTHD, mask):
        """Attention of the newest tokens over all that are kept of one layer."""
        return paged_attention(q_BTHD, *self, mask_mod=mask)


def empty_cache(config: Config, B: int, S: int, page_size: int | None = None) -> Cache | Pages:
    """Returns a cache with room for S positions, in one piece or in pages."""
    L, N = config.layers, page_size
    none = jnp.zeros(L, jnp.int32)
    tail = (config.kv_heads, config.head_size)
    if N is None:
        zeros = jnp.zeros((L, B, S, *tail))
        return Cache(zeros, zeros, none)
    M = -(-S // N)
    zeros = jnp.zeros((L, B * M, N, *tail))
    table_BM = jnp.arange(B * M, dtype=jnp.int32).reshape(M, B).T  # rows take turns
    return Pages(zeros, zeros, jnp.tile(table_BM, (L, 1, 1)), none)


def extend(params: dict, tokens_BT, cache: Cache | Pages, config: Config):
    """Returns the logits [B, T, C] of tokens that come after those in the cache, and both as one.

    They are what `logits` gives for the whole text at these positions.
    """
    rotation = rotations(cache.length_L[0] + jnp.arange(tokens_BT.shape[1]), config)

    def step(x_BTM, of_layer):
        p, before = of_layer
        return layer(x_BTM, p, causal(), rotation, config, cache=before)

    x_BTM, after = jax.lax.scan(step, params["embed"][tokens_BT], (params["layers"], cache))
    return rms_norm(x_BTM, params["norm"]) @ params["unembed"], after
