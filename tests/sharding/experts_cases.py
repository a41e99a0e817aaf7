"""Experts on a mesh beside a plain loop over all of them, on one device, in `jax.numpy`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tests.sharding.equal import mesh_of, values
from xform.sharding import TensorParallel, data, parity
from xform.sharding.experts import ExpertParallel, Routing, auxiliary

B, T, M, E, F = 8, 8, 6, 8, 8
OPTIONS = {"xla_backend_optimization_level": 0}
BALANCE, Z = 0.5, 0.25
DROPLESS = Routing(E, 2)


@dataclass(frozen=True)
class Case:
    """A mesh, how tokens are routed, and what is split how."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    routing: Routing = DROPLESS
    sequence: bool = False
    shared: bool = False
    both: bool = False
    """Whether experts are dealt out over `ep` and `tp` alike."""

    def __str__(self):
        axes = "".join(f"{a}{n}" for a in ("dp", "cp", "tp", "ep") if (n := getattr(self, a)) > 1)
        r = self.routing
        how = "dropless" if r.capacity is None else f"capacity{r.capacity:g}"
        parts = [axes, how, f"k{r.top_k}", r.score, "sequence" * self.sequence]
        return "-".join(filter(None, [*parts, "shared" * self.shared, "both" * self.both]))


def params_of(shared: bool = False) -> dict:
    shapes = {
        "scale": (M,),
        "router": (M, E),
        "gate": (E, M, F),
        "up": (E, M, F),
        "down": (E, F, M),
        "bias": (E,),
    }
    shapes |= {"in": (M, 2 * F), "out": (2 * F, M)} if shared else {}
    return values(5, **shapes)


def batch_of() -> dict:
    """Tokens of which some are alike, so that experts are not used evenly; some have no label."""
    rng = np.random.default_rng(6)
    x = rng.normal(size=(B, T, M)) + 0.7 * np.arange(B)[:, None, None] / B
    return {"x": x, "y": rng.normal(size=(B, T, M)), "labels": rng.random((B, T)) < 0.7}


# ---- one device: every expert on every token, and a sum ------------------------------------------


def kept(experts, routing: Routing, positions: int):
    """Which choices find a place: counted one by one, choice by choice and token by token."""
    if routing.capacity is None:
        return np.ones(experts.shape, bool)
    g = routing.group or positions
    places = int(np.ceil(routing.capacity * routing.top_k * g / routing.experts))
    by_group = np.asarray(experts).reshape(-1, g, routing.top_k)
    found = np.zeros(by_group.shape, bool)
    for group, mask in zip(by_group, found, strict=True):
        taken = np.zeros(routing.experts, int)
        for j in range(routing.top_k):
            for t in range(g):
                mask[t, j] = taken[group[t, j]] < places
                taken[group[t, j]] += 1
    return found.reshape(experts.shape)


def dense(x, router, expert: Callable, routing: Routing, positions: int, bias=0.0, wide=None):
    """Returns the sum of `expert(e, x)` that are chosen, and what was said of all."""
    wide = wide or x.dtype
    logits = x.astype(wide) @ router.astype(wide)
    scores = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[routing.score](logits)
    order = jnp.argsort(-(scores + jnp.broadcast_to(bias, scores.shape)), -1, stable=True)
    chosen = jax.lax.stop_gradient(order[..., : routing.top_k])
    weights = jnp.take_along_axis(scores, chosen, -1)
    if routing.normalised:
        weights /= weights.sum(-1, keepdims=True)
    shape = jax.ShapeDtypeStruct(chosen.shape, bool)
    find = lambda experts: kept(experts, routing, positions)
    has_place = jax.pure_callback(find, shape, chosen)
    y = 0 * x
    for e in range(routing.experts):
        weight = jnp.where((chosen == e) & has_place, routing.scale * weights, 0).sum(-1)
        y += weight[..., None].astype(x.dtype) * expert(e, x)
    return y, (logits, scores, chosen), jnp.sum(~has_place)


def gated(p: dict) -> Callable:
    """The e-th expert on all tokens."""
    return lambda e, x: (jax.nn.silu(x @ p["gate"][e]) * (x @ p["up"][e])) @ p["down"][e]


def penalties(logits, scores, chosen):
    """What uneven use of experts and large logits add to a mean loss."""
    experts = logits.shape[-1]
    flat = chosen.reshape(-1)
    share = jnp.stack([jnp.mean(flat == e, dtype=scores.dtype) for e in range(experts)])
    scores = (scores / scores.sum(-1, keepdims=True)).reshape(-1, experts)
    balance = experts * jnp.sum(share * scores.mean(0))
    return BALANCE * balance + Z * jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)


@lru_cache
def reference_of(routing: Routing, positions: int) -> Callable:
    """The mean loss of all labels, where so many positions of a row are a group."""

    def mean(p, batch):
        with jax.numpy_rank_promotion("allow"):
            x = batch["x"] * p["scale"]
            y, of_router, _ = dense(x, p["router"], gated(p), routing, positions, p["bias"])
            y += jnp.tanh(x @ p["in"]) @ p["out"] if "in" in p else 0
            each = jnp.where(batch["labels"], ((y - batch["y"]) ** 2).sum(-1), 0)
            return each.sum() / batch["labels"].sum() + penalties(*of_router)

    return mean


# ---- many devices: by the rules ------------------------------------------------------------------


def specs_of(case: Case) -> tuple[dict, dict]:
    of = ("ep", "tp") if case.both else "ep"
    tp = None if case.both else "tp"
    specs = {"scale": P(), "router": P(), "bias": P()}
    specs |= {"gate": P(of, None, tp), "up": P(of, None, tp), "down": P(of, tp)}
    specs |= {"in": P(None, "tp"), "out": P("tp")} if case.shared else {}
    rows = P(("dp", "ep"), "cp")
    return specs, {"x": rows, "y": rows, "labels": rows}


def swiglu(p: dict) -> Callable:
    return lambda rows, dot: dot(jax.nn.silu(dot(rows, p["gate"])) * dot(rows, p["up"]), p["down"])


def layer_of(case: Case) -> Callable:
    """A function of parameters and this device's stream."""
    tp = TensorParallel("tp", case.sequence)
    ep = ExpertParallel(("ep", "tp")) if case.both else ExpertParallel("ep", tp)

    def layer(p, x):
        shared = (lambda x: jnp.tanh(x @ p["in"]) @ p["out"]) if case.shared else None
        if case.both and shared is not None:
            y, load = ep.routed(x, p["router"], swiglu(p), case.routing, bias=p["bias"])
            return y + tp.leave(shared(tp.enter(x))), load
        experts = swiglu(p)
        return ep.routed(x, p["router"], experts, case.routing, bias=p["bias"], shared=shared)

    return layer


def mean_and_grads(case: Case) -> Callable:
    tp, layer = TensorParallel("tp", case.sequence), layer_of(case)
    axes = ("dp", "ep", "cp")

    def enter(p):
        shared = {"scale", "router", "bias"} if case.sequence else ()
        over = lambda path: (*axes, "tp") if path[0].key in shared else axes
        return jax.tree.map_with_path(lambda path, x: data.per_device(x, over(path)), p)

    def loss(p, rows):
        cut = lambda x: tp.positions(x, 1)
        x = cut(rows["x"]) * jnp.broadcast_to(p["scale"], cut(rows["x"]).shape)
        y, load = layer(p, x)
        each = ((y - cut(rows["y"])) ** 2).sum(-1)
        nll, count = jnp.where(cut(rows["labels"]), each, 0).sum(), rows["labels"].sum()
        nll = jax.lax.psum(nll, "tp") if case.sequence else nll
        return nll + auxiliary(load, count, balance=BALANCE, z=Z), count

    return data.value_and_grad(loss, enter, axes)


def compared(case: Case):
    """Loss and every gradient beside those of one device."""
    mesh = mesh_of(dp=case.dp, cp=case.cp, tp=case.tp, ep=case.ep)
    check = parity(
        mean_and_grads(case),
        mesh,
        specs_of(case),
        reference=reference_of(case.routing, T // case.cp),
        gives_gradients=True,
        rtol=1e-10,
        compiler_options=OPTIONS,
    )
    return check(params_of(case.shared), batch_of())
