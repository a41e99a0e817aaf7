"""A Llama-style language model: pure functions over a plain dict of arrays.

The model is written once. On one device it is called as it stands. Inside `jax.shard_map`, with the
parameters split as `SPECS` says and `tp` saying how, each device holds some of the heads, of the
feed-forward units and of the vocabulary. A block opens with the columns of its matrices and closes
with their rows: there, and nowhere else, devices talk. A token may have a few feed-forward blocks
of many, `experts` that `ep` deals out. With a `Cache`, the layers `extend` a text token by token.

Shapes are the suffixes of names:

    B  rows in the batch     H  query heads            M  width of the residual stream
    T  positions in a row    K  key and value heads    F  feed-forward units
    C  codes (vocabulary)    D  size of a head         L  layers
    E  experts
"""

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import between
import rope
from cache import Cache, Pages
from xform import causal, documents
from xform.sharding import TensorParallel
from xform.sharding.context import ContextParallel
from xform.sharding.experts import ExpertParallel, Load, Routing, auxiliary
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
    rope_scaling: rope.Scaling = ()
    norm_eps: float = 1e-5
    experts: int = 0  # of a layer, each of `hidden` units; 0: one block, and no router
    top_k: int = 2  # of them, for each token
    shared: int = 0  # units of one more, for every token
    router: Literal["softmax", "sigmoid"] = "softmax"
    capacity: float | None = None  # times an even share of a device's part of a row; drops the rest
    balance: float = 0.01  # what uneven use of experts counts in the loss
    router_z: float = 0.001  # what large logits of routers count
    fuse: bool | None = None  # kernels between products; None: where there are some for the device

    @property
    def routing(self) -> Routing:
        """How tokens find their experts; of several, weights sum to 1."""
        return Routing(self.experts, self.top_k, self.router, capacity=self.capacity)


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
HERE = ExpertParallel()
MASK = causal()  # who sees whom within a document: put your own in its place


def specs_of(config: Config) -> dict:
    """Returns `SPECS`; with experts, which `ep` deals out, those of their parameters too."""
    layers = SPECS["layers"]
    if not config.experts:
        return SPECS
    block = {name: layers[name] for name in ("gate", "up", "down")}
    layers = layers | {name: P(None, "ep", *spec[1:]) for name, spec in block.items()}
    layers |= {f"shared_{name}": spec for name, spec in block.items() if config.shared}
    return {**SPECS, "layers": {**layers, "router": P()}}


def init(config: Config, key: jax.Array) -> dict:
    """Returns fresh float32 parameters, the same for every layout of devices."""
    c, L = config, config.layers
    keys = iter(jax.random.split(key, 13 if c.experts else 9))

    def matrix(*shape: int, gain: float = 1.0) -> jax.Array:
        return jax.random.normal(next(keys), shape) * (gain * shape[-2] ** -0.5)

    # 2L blocks add to the residual stream; this keeps its variance at the end near that of one.
    closing = (2 * L) ** -0.5

    def block(*lead: int, prefix: str = "") -> dict:
        up = lambda: matrix(*lead[:-1], c.width, lead[-1])
        down = lambda: matrix(*lead, c.width, gain=closing)
        return {f"{prefix}gate": up(), f"{prefix}up": up(), f"{prefix}down": down()}

    each = (c.experts,) if c.experts else ()
    return {
        "embed": matrix(c.codes, c.width),
        "layers": {
            "attention_norm": jnp.ones((L, c.width)),
            "query": matrix(L, c.width, c.heads * c.head_size),
            "key": matrix(L, c.width, c.kv_heads * c.head_size),
            "value": matrix(L, c.width, c.kv_heads * c.head_size),
            "out": matrix(L, c.heads * c.head_size, c.width, gain=closing),
            "hidden_norm": jnp.ones((L, c.width)),
            **block(L, *each, c.hidden),
            **(block(L, c.shared, prefix="shared_") if c.shared else {}),
            **({"router": matrix(L, c.width, c.experts)} if c.experts else {}),
        },
        "norm": jnp.ones(c.width),
        "unembed": matrix(c.width, c.codes, gain=0.5),
    }


# ---- model ---------------------------------------------------------------------------------------


def logits(params: dict, tokens_BT, ids_BT, config: Config, tp: TensorParallel = ONE):
    """Returns the logits [B, T, C] of the token that follows each position; see `stream`."""
    x_BTM, _ = stream(params, tokens_BT, ids_BT, config, tp)
    return tp.column(x_BTM, params["unembed"])[0]


def one_by_one(step, x, stack):
    """Returns `x` after `x = step(x, params)` for the parameters of each layer in the stack."""
    return jax.lax.scan(lambda x, p: (step(x, p), None), x, stack)[0]


def stream(
    params: dict, tokens_BT, ids_BT, config: Config,
    tp: TensorParallel = ONE, scan=one_by_one, cp: ContextParallel = WHOLE, ep=HERE,
):  # fmt: skip
    """Returns what the model makes of each position, [B, T, M], and how experts were used, if any.

    Args:
      params: Parameters as `init` makes them, or this device's part of them.
      tokens_BT: Tokens.
      ids_BT: The document of each token; attention stays inside a document.
      config: Sizes of the whole model.
      tp: How blocks are split over devices.
      scan: What applies the layers, as `one_by_one` does.
      cp: How the sequence is split over devices.
      ep: How experts are dealt out over devices.
    """
    x_BTM = tp.embed(params["embed"], tokens_BT)
    x_BTM, load = through(params["layers"], x_BTM, ids_BT, config, tp, scan, cp, ep)
    return between.norm(config.norm_eps, config.fuse)(x_BTM, params["norm"]), load


def through(
    layers: dict, x_BTM, ids_BT, config: Config,
    tp: TensorParallel = ONE, scan=one_by_one, cp: ContextParallel = WHOLE, ep=HERE,
):  # fmt: skip
    """Returns `stream` after some layers, stacked along their leading dimension."""
    mask = MASK & documents(cp.whole(ids_BT))
    # Positions run on over the row: RoPE sees differences alone, and those never leave a document.
    rotation = rotations(cp.positions(ids_BT.shape[1]), config)
    load = Load.none(x_BTM, config.experts, config.layers) if config.experts else None

    def step(carry, p):
        x_BTM, load = carry
        x_BTM, _, of_layer = layer(x_BTM, p, mask, rotation, config, tp, cp, ep=ep)
        return x_BTM, load and load.then(of_layer)

    return scan(step, (x_BTM, load), layers)


def layer(
    x_BTM, p: dict, mask, rotation, config: Config,
    tp: TensorParallel = ONE, cp: ContextParallel = WHOLE, cache=None, ep: ExpertParallel = HERE,
):  # fmt: skip
    """One layer: attention, then a feed-forward block, each added to the stream."""
    normed_BTM = between.norm(config.norm_eps, config.fuse)(x_BTM, p["attention_norm"])
    q, k, v = tp.column(normed_BTM, p["query"], p["key"], p["value"])
    out, cache = attention(q, k, v, mask, rotation, config, cp, cache)
    x_BTM, normed_BTM = between.add_and_norm(config.norm_eps, config.fuse)(
        x_BTM, tp.row(out, p["out"]), p["hidden_norm"]
    )
    made_BTM, load = feed_forward(normed_BTM, p, config, tp, ep)
    return x_BTM + made_BTM, cache, load


def feed_forward(x_BTM, p: dict, config: Config, tp: TensorParallel, ep: ExpertParallel):
    """A gated block, or a few of many such for each token; and how these were used."""
    gate = between.gate(config.fuse)
    if not config.experts:
        return tp.row(gate(*tp.column(x_BTM, p["gate"], p["up"])), p["down"]), None

    def gated(x, dot, prefix=""):
        opening, up, down = (p[prefix + name] for name in ("gate", "up", "down"))
        return dot(gate(dot(x, opening), dot(x, up)), down)

    shared = (lambda x: gated(x, jnp.matmul, "shared_")) if config.shared else None
    return ep.routed(x_BTM, p["router"], gated, config.routing, shared=shared)


def attention(q, k, v, mask, rotation, config: Config, cp: ContextParallel, cache):
    """Grouped-query attention: each key/value head serves H/K query heads.

    With a cache, this layer's part of one, queries see the keys and values in it as well.
    """
    B, T, _ = q.shape
    q_BTHD, k_BTKD, v_BTKD = (x.reshape(B, T, -1, config.head_size) for x in (q, k, v))
    rotate = between.one_kernel(rope.rotate, config.fuse)
    q_BTHD, k_BTKD = rotate(q_BTHD, rotation), rotate(k_BTKD, rotation)
    if cache is None:
        out_BTHD = cp.attention(q_BTHD, k_BTKD, v_BTKD, mask_mod=mask)
    else:
        cache = cache.append(k_BTKD, v_BTKD)
        out_BTHD = cache.attend(q_BTHD, mask)
    return out_BTHD.reshape(B, T, -1), cache


def rotations(positions_T, config: Config):
    """Returns the cosines and sines of RoPE's angles, each [T, 1, D/2]."""
    return rope.rotations(positions_T, config.head_size, config.rope_base, config.rope_scaling)


# ---- what it is trained on -----------------------------------------------------------------------


def loss(
    params: dict, rows, config: Config,
    tp: TensorParallel = ONE, scan=one_by_one, cp: ContextParallel = WHOLE, ep=HERE,
):  # fmt: skip
    """Returns the summed negative log-likelihood of all labels, in nats, and their number.

    A sum and a count, not a mean: devices that hold different numbers of labels add up theirs, and
    the quotient is then exactly what one device would find. The sum has the losses of routers too.
    """
    x_BTM, load = stream(params, rows.tokens, rows.ids, config, tp, scan, cp, ep)
    total, labels = surprise(params, x_BTM, rows.labels, tp)
    if load:
        total += auxiliary(load, labels, balance=config.balance, z=config.router_z)
    return total, labels


def surprise(params: dict, x_BTM, labels_BT, tp: TensorParallel = ONE):
    """Returns that of a finished stream; see `loss`."""
    loss_BT, _ = cross_entropy(x_BTM, params["unembed"], labels_BT, tp, ignore_label=NO_LABEL)
    return jnp.sum(loss_BT), jnp.sum(labels_BT != NO_LABEL)


def flops_per_token(config: Config, T: int) -> int:
    """Returns the model's floating-point operations, forward and backward, for one token.

    This is MFU's convention: 6 for each weight that it meets in a matrix product, and attention
    over half of the row (causal), whatever documents hide of it.
    """
    c = config
    units = c.top_k * c.hidden + c.shared if c.experts else c.hidden
    per_layer = 2 * (c.heads + c.kv_heads) * c.head_size + 3 * units + c.experts
    return 6 * (c.width * (c.layers * per_layer + c.codes) + c.layers * T * c.heads * c.head_size)


# ---- text that goes on ---------------------------------------------------------------------------


def extend(params: dict, tokens_BT, cache: Cache | Pages, config: Config):
    """Returns the logits [B, T, C] of tokens that come after those in the cache, and both as one.

    They are what `logits` gives for the whole text at these positions; no expert drops a token.
    """
    config = replace(config, capacity=None)
    rotation = rotations(cache.length_L[0] + jnp.arange(tokens_BT.shape[1]), config)

    def step(x_BTM, of_layer):
        p, before = of_layer
        return layer(x_BTM, p, MASK, rotation, config, cache=before)[:2]

    x_BTM, after = jax.lax.scan(step, params["embed"][tokens_BT], (params["layers"], cache))
    normed_BTM = between.norm(config.norm_eps, config.fuse)(x_BTM, params["norm"])
    return normed_BTM @ params["unembed"], after
