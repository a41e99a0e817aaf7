"""Attention over a split sequence beside that of one device, for masks and scores of the field.

A model here is queries, keys and values as they are, and what its mods read; so every gradient that
attention has is a leaf. The order of chunks is data, so that one compiled program serves for all
layouts. Document ids and biases of a key lie on the devices as the sequence does; what is read by
head or distance is whole. Some positions are padding that nothing sees, and hold NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.oracle import UNOPTIMISED
from xform import causal, documents, flex_attention, sliding_window
from xform.primitives.masks import neighborhood
from xform.primitives.scores import alibi, relative_bias, softcap
from xform.sharding import Parity, context, declare, make_mesh, parity

B, T, H, K, D = 2, 32, 8, 2, 4
CHUNKS = 4
"""Of each device, in every layout: with eight devices, each is one position."""
PADDING = slice(T - T // 4, T)
"""Nothing sees these, and they see nothing; with four devices or eight, a shard is all of them."""


@dataclass(frozen=True)
class Case:
    """A name in `KINDS`, a method, how many devices share the sequence, and those of other axes."""

    kind: str
    method: Any
    cp: int
    dp: int = 1
    tp: int = 1


def ids_of() -> np.ndarray:
    """Documents of lengths that differ by entry; the padding is none."""
    ids = np.stack([np.repeat([0, 1, 2], [5, 16, 11]), np.repeat([7, 3, 7], [20, 1, 11])])
    ids[:, PADDING] = -1
    return ids.astype(np.int32)


def layers_of(kind: str) -> Callable:
    """Returns `mods(params, batch)`: of each layer, a score mod and a mask mod."""
    same = lambda **made: lambda p, x: [(made["score"](p), made["mask"](x))]
    plain = lambda mask: same(score=lambda p: None, mask=mask)
    scored = lambda score: same(score=score, mask=lambda x: causal())
    packed = lambda x: causal() & documents(x["ids"])
    return {
        "causal": plain(lambda x: causal()),
        "window": plain(lambda x: causal() & sliding_window(6)),
        "documents": plain(packed),
        "alternating": lambda p, x: [(None, packed(x)), (None, causal() & sliding_window(3))],
        "neighborhood": plain(lambda x: neighborhood((4, 8), 3)),
        "alibi": scored(lambda p: alibi(p["slopes"])),
        "alibi in a window": same(
            score=lambda p: alibi(p["slopes"]), mask=lambda x: causal() & sliding_window(6)
        ),
        "softcap": scored(lambda p: softcap(p["cap"])),
        "table": scored(lambda p: relative_bias(p["table"])),
        # A plain function that reads what lies with the keys, by entry and position.
        "bias": scored(lambda p: softcap(p["cap"]) >> (lambda s, b, h, i, j: s + p["bias"][b, j])),
    }[kind]


KINDS = ("causal", "window", "documents", "alternating", "neighborhood", "alibi", "softcap",
         "table", "bias")  # fmt: skip
METHODS = ("ring", "all_gather", "ulysses")
READS = {
    "alibi": ("slopes",),
    "alibi in a window": ("slopes",),
    "softcap": ("cap",),
    "table": ("table",),
    "bias": ("cap", "bias"),
}
SHAPES = {"slopes": (H,), "cap": (H,), "table": (H, 13), "bias": (B, T)}
SPECS = {"slopes": P("tp"), "cap": P("tp"), "table": P("tp"), "bias": P("dp", "cp")}
SPLIT = ("q", "k", "v", "bias", "ids", "weight", "of_lse")
"""What is split along the sequence."""


def params_of(kind: str, seed: int = 0) -> dict:
    """Random queries, keys and values, sinks, and what the kind's score reads."""
    rng = np.random.default_rng(seed)
    shapes = {"q": (B, T, H, D), "k": (B, T, K, D), "v": (B, T, K, D), "sinks": (H,)}
    shapes |= {name: SHAPES[name] for name in READS.get(kind, ())}
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return params | ({"cap": 1 + np.abs(params["cap"])} if "cap" in params else {})


def batch_of(seed: int = 0) -> dict:
    """What is the same for all kinds."""
    rng = np.random.default_rng(seed + 1)
    draw = lambda *shape: rng.normal(size=shape)
    return {"ids": ids_of(), "weight": draw(B, T, H, D), "of_lse": draw(B, T, H)}


def total(attend: Callable, kind: str, params: dict, batch: dict) -> jax.Array:
    """A sum that every element of output and log-sum-exp has a part in."""
    x, k, v = (params[name] for name in "qkv")
    if kind == "documents":  # what is hidden is not finite
        hole = (batch["own_ids"] < 0)[..., None, None]
        k, v = (jnp.where(hole, jnp.nan, y) for y in (k, v))
    sums = jnp.float32(0)
    for score_mod, mask_mod in layers_of(kind)(params, batch):
        x, aux = attend(
            x, k, v, score_mod=score_mod, mask_mod=mask_mod, sinks=params["sinks"], aux=("lse",)
        )
        sums += jnp.sum(aux.lse * batch["of_lse"])
    return sums + jnp.sum(jnp.sin(x) * batch["weight"])


@lru_cache
def reference_of(kind: str) -> Callable:
    """The sum of one device, of arrays that lie as a layout says."""

    def run(params, batch):
        layout = context.Layout(batch["order"], T // batch["order"].size)
        back = lambda tree: {n: layout.join(x) if n in SPLIT else x for n, x in tree.items()}
        batch = back(batch)
        return total(flex_attention, kind, back(params), batch | {"own_ids": batch["ids"]})

    return allowing(run)


def allowing(f):
    """`f`, in which arrays of different ranks may meet."""

    def call(*args):
        with jax.numpy_rank_promotion("allow"):
            return f(*args)

    return call


@lru_cache(maxsize=2)
def program(case: Case, static: context.Layout | None = None) -> Callable:
    """A function of parameters and a batch that compares with one device."""
    mesh = make_mesh(
        dp=case.dp, cp=case.cp, tp=case.tp,
        devices=jax.devices("cpu")[: case.dp * case.cp * case.tp],
    )  # fmt: skip
    over = ("dp", "cp", "tp")

    def sharded(params, batch):
        layout = static or context.Layout(batch["order"], T // batch["order"].size)
        whole = lambda x: context.whole(x, axis="cp", layout=layout)
        own = {"own_ids": batch["ids"], "ids": whole(batch["ids"])}
        params = params | ({"bias": whole(params["bias"])} if "bias" in params else {})

        def attend(q, k, v, **options):
            return context.attention(
                q, k, v, axis="cp", method=case.method, layout=layout, **options
            )

        found = total(attend, case.kind, params, batch | own)
        with declare("total", *over):
            return lax.psum(found, over)

    heads = P("dp", "cp", "tp")
    params = {"q": heads, "k": heads, "v": heads, "sinks": P("tp")}
    params |= {name: SPECS[name] for name in READS.get(case.kind, ())}
    batch = {"ids": P("dp", "cp"), "weight": heads, "of_lse": heads, "order": P()}
    return parity(
        allowing(sharded), mesh, (params, batch), reference=reference_of(case.kind), strict=False,
        compiler_options=UNOPTIMISED,
    )  # fmt: skip


def compared(case: Case, layout: context.Layout, *, known: bool = False, seed: int = 0) -> Parity:
    """The case beside one device; `known` has the layout be known when the program is traced."""
    split = lambda tree: {n: layout.split(x) if n in SPLIT else x for n, x in tree.items()}
    batch = split(batch_of(seed)) | {"order": np.asarray(layout.order, np.int32)}
    return program(case, layout if known else None)(split(params_of(case.kind, seed)), batch)


def layouts_of(cp: int) -> list[context.Layout]:
    """In order, zigzag as far as chunks go, and dealt out at random."""
    n, chunk = cp * CHUNKS, T // (cp * CHUNKS)
    in_order = np.arange(n).reshape(cp, CHUNKS)
    folded = np.concatenate([in_order[:, :2].ravel(), in_order[:, 2:].ravel()[::-1]])
    pairs = np.concatenate([folded[: n // 2].reshape(cp, 2), folded[n // 2 :].reshape(cp, 2)], 1)
    mixed = np.random.default_rng(cp).permutation(n).reshape(cp, CHUNKS)
    return [context.Layout(order.astype(np.int32), chunk) for order in (in_order, pairs, mixed)]
