"""A Llama-style language model: pure functions over a plain dict of arrays.

The model is written once. On one device it is called as it stands. Inside `jax.shard_map`, with the
parameters split as `SPECS` says and `tp` naming the mesh axis, each device holds some of the heads
and some of the feed-forward units. Each block then begins where devices `part` ways, and ends where
they `join` what they computed.

Shapes are the suffixes of names:

    B  rows in the batch     H  query heads            M  width of the residual stream
    T  positions in a row    K  key and value heads    F  feed-forward units
    C  codes (vocabulary)    D  size of a head         L  layers
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from xform import causal, documents, flex_attention, linear_cross_entropy
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
    "embed": P(),  # C M
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
    "unembed": P(),  # M C
}


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


def logits(params: dict, tokens_BT, ids_BT, config: Config, *, tp: str | None = None):
    """Returns the logits [B, T, C] of the token that follows each position; see `stream`."""
    return stream(params, tokens_BT, ids_BT, config, tp=tp) @ params["unembed"]


def stream(params: dict, tokens_BT, ids_BT, config: Config, *, tp: str | None = None):
    """Returns what the model makes of each position, [B, T, M], for `unembed` to turn into logits.

    Args:
      params: Parameters as `init` makes them, or this device's part of them.
      tokens_BT: Tokens.
      ids_BT: The document of each token; attention stays inside a document.
      config: Sizes of the whole model.
      tp: The mesh axis that the parameters are split over, or None.
    """
    mask = causal() & documents(ids_BT)
    # Positions run on over the row: RoPE sees differences alone, and those never leave a document.
    rotation = rotations(tokens_BT.shape[1], config)

    def step(x_BTM, layer_params):
        return layer(x_BTM, layer_params, mask, rotation, config, tp), None

    x_BTM, _ = jax.lax.scan(step, params["embed"][tokens_BT], params["layers"])
    return rms_norm(x_BTM, params["norm"])


def layer(x_BTM, p: dict, mask, rotation, config: Config, tp: str | None):
    """One layer: attention, then a gated feed-forward block, each added to the stream."""
    normed_BTM = part(rms_norm(x_BTM, p["attention_norm"]), tp)
    x_BTM += join(attention(normed_BTM, p, mask, rotation, config), tp)
    normed_BTM = part(rms_norm(x_BTM, p["hidden_norm"]), tp)
    return x_BTM + join(swiglu(normed_BTM, p), tp)


def attention(x_BTM, p: dict, mask, rotation, config: Config):
    """Grouped-query attention: each key/value head serves H/K query heads."""
    B, T, _ = x_BTM.shape
    q_BTHD = rotate((x_BTM @ p["query"]).reshape(B, T, -1, config.head_size), rotation)
    k_BTKD = rotate((x_BTM @ p["key"]).reshape(B, T, -1, config.head_size), rotation)
    v_BTKD = (x_BTM @ p["value"]).reshape(B, T, -1, config.head_size)
    out_BTHD = flex_attention(q_BTHD, k_BTKD, v_BTKD, mask_mod=mask)
    return out_BTHD.reshape(B, T, -1) @ p["out"]


def swiglu(x_BTM, p: dict):
    """Feed-forward units that are multiplied by a gate."""
    return (jax.nn.silu(x_BTM @ p["gate"]) * (x_BTM @ p["up"])) @ p["down"]


def rms_norm(x_BTM, scale_M):
    """Rows of unit mean square, times a learned scale."""
    return x_BTM * jax.lax.rsqrt(jnp.mean(x_BTM**2, -1, keepdims=True) + 1e-5) * scale_M


def rotations(T: int, config: Config):
    """Returns the cosines and sines of RoPE's angles, each [T, 1, D/2]."""
    frequencies = config.rope_base ** -jnp.linspace(0, 1, config.head_size // 2, endpoint=False)
    angles = jnp.arange(T)[:, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTHD, rotation):
    """Turns the pairs (i, i + D/2) of each head by an angle that grows with the position."""
    cos, sin = rotation
    a, b = jnp.split(x_BTHD, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def part(x, axis: str | None):
    """Returns `x` for use in work split over the axis; its gradients are summed over it, once."""
    return x if axis is None else jax.lax.pcast(x, axis, to="varying")


def join(x, axis: str | None):
    """Returns the sum of the devices' `x` over the axis."""
    return x if axis is None else jax.lax.psum(x, axis)


# ---- what it is trained on -----------------------------------------------------------------------


def loss(params: dict, rows, config: Config, *, tp: str | None = None):
    """Returns the summed negative log-likelihood of all labels, in nats, and their number.

    A sum and a count, not a mean: devices that hold different numbers of labels add up theirs, and
    the quotient is then exactly what one device would find.
    """
    x_BTM = stream(params, rows.tokens, rows.ids, config, tp=tp)
    loss_BT, _ = linear_cross_entropy(x_BTM, params["unembed"], rows.labels, ignore_label=NO_LABEL)
    return jnp.sum(loss_BT), jnp.sum(rows.labels != NO_LABEL)


def flops_per_token(config: Config, T: int) -> int:
    """Returns the model's floating-point operations, forward and backward, for one token.

    This is MFU's convention: 6 for each weight in a matrix product, and attention over half of the
    row (causal), whatever documents hide of it.
    """
    c = config
    weights = c.layers * c.width * (2 * (c.heads + c.kv_heads) * c.head_size + 3 * c.hidden)
    products = 6 * (weights + c.width * c.codes)
    return products + 6 * c.layers * T * c.heads * c.head_size


# ---- what it is for ------------------------------------------------------------------------------


def generate(params: dict, prompt_T, config: Config, *, rows: int, length: int, key, temperature):
    """Returns rows of `length` tokens, which begin with the prompt and go on each in its own way.

    Every token costs a pass over whole rows. That is simple, and quick enough for a look.
    """
    tokens_BT = jnp.zeros((rows, length), jnp.int32).at[:, : len(prompt_T)].set(prompt_T)
    ids_BT = jnp.zeros_like(tokens_BT)

    def extend(t, tokens_BT):
        next_BC = logits(params, tokens_BT, ids_BT, config)[:, t - 1] / temperature
        chosen_B = jax.random.categorical(jax.random.fold_in(key, t), next_BC)
        return tokens_BT.at[:, t].set(chosen_B)

    return jax.lax.fori_loop(len(prompt_T), length, extend, tokens_BT)
