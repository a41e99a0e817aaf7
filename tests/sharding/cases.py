"""Random models on random meshes, with faults that are put in while they run.

A case is a model that has grouped queries, norms of queries and keys, attention sinks, embeddings
that are tied or not, experts or none, and labels of which some are ignored, in one of the layouts
that the rules know. A fault multiplies what a device brings to a sum over an axis by a number of
its own: 1 where all is right, `(1, 0, …)` where the sum is left out and the first device's part
stands for it, the size of the axis where the sum is done twice. So one compiled program serves for
right and wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.sharding import experts_cases
from xform import causal, flex_attention
from xform.sharding import Parity, TensorParallel, data, fsdp, loss, make_mesh, meshes, parity
from xform.sharding.experts import ExpertParallel, Load, Routing, auxiliary

B, T, D = 8, 8, 4
OPTIONS = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True)
class Model:
    """Sizes and parts; with `width` M, `heads` H, `groups` K, `units` F, `codes` C."""

    layers: int
    width: int
    heads: int
    groups: int
    units: int
    codes: int
    tied: bool
    sinks: bool
    norms: bool
    attention: str
    routing: Routing | None
    shared: bool


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh's axes, and how the model lies on it."""

    dp: int
    cp: int
    tp: int
    ep: int
    sequence: bool
    overlap: Any
    zero: int | None
    microbatches: int

    @property
    def rows(self) -> tuple[str, ...]:
        """The axes over which devices have different rows."""
        return ("dp", "cp", "ep")

    @property
    def devices_with_rows(self) -> int:
        """How many devices have different rows."""
        return self.dp * self.cp * self.ep


@dataclass(frozen=True)
class Case:
    """A model, where it lies, and the share of labels that is ignored."""

    model: Model
    layout: Layout
    ignored: float
    seed: int


def draw(seed: int) -> Case:
    """A case by number; two in a row share a program, and differ in numbers and ignored labels."""
    rng = np.random.default_rng(seed // 2)
    pick = lambda *options: options[rng.integers(len(options))]
    layout = pick(*meshes(8, ("dp", "cp", "tp")))
    tp = layout["tp"]
    overlap, zero = pick(None, "ring") if tp < 8 else None, pick(None, 1, 3)
    sequence = bool(overlap) or pick(True, False)
    microbatches = pick(1, 2) if layout["dp"] * layout["cp"] <= B // 2 else 1
    groups = tp * pick(1, 2) if tp < 8 else tp
    sizes: dict[str, Any] = dict(
        layers=2,
        width=16,
        heads=groups * pick(1, 2),
        groups=groups,
        units=8 * pick(1, 2),
        codes=8 * pick(2, 3),
        tied=pick(True, False),
        sinks=pick(True, False),
        norms=pick(True, False),
        attention=pick("dense", "dense", "dense", "flex"),
    )
    ignored = pick(0.3, 0.9)
    experts, rows = pick(True, False), layout["dp"] * layout["cp"]
    ep = pick(*(n for n in (1, 2, 4, 8) if rows % n == 0)) if experts else 1
    of_dp = gcd(layout["dp"], ep)  # `ep` is made of devices that have rows, of `dp` first
    layout = {"dp": layout["dp"] // of_dp, "cp": layout["cp"] // (ep // of_dp), "tp": tp, "ep": ep}
    routing = Routing(
        8,
        top_k := pick(1, 2, 3),
        pick("softmax", "sigmoid"),
        normalise=pick(True, False) and top_k > 1,
        capacity=pick(None, None, 1.0),
    )
    model = Model(**sizes, routing=routing if experts else None, shared=pick(True, False))
    lies = Layout(
        **layout, sequence=sequence, overlap=overlap, zero=zero, microbatches=microbatches
    )
    return Case(model, lies, ignored if seed % 2 else 0.0, seed)


# ---- parameters and rows -------------------------------------------------------------------------


def specs_of(m: Model) -> dict:
    """How parameters are split over tp."""
    layers = {
        "norm": P(),
        "query": P(None, None, "tp"),
        "keys": P(None, None, None, "tp"),
        "out": P(None, "tp"),
        "hidden_norm": P(),
        "up": P(None, None, "tp"),
        "down": P(None, "tp"),
    }
    layers |= {"query_norm": P(), "key_norm": P()} if m.norms else {}
    layers |= {"sinks": P(None, "tp")} if m.sinks else {}
    if m.routing:
        layers |= {"shared_up": layers["up"], "shared_down": layers["down"]} if m.shared else {}
        layers |= {"router": P(), "up": P(None, "ep", None, "tp"), "down": P(None, "ep", "tp")}
    specs = {"table": P("tp"), "layers": layers, "norm": P()}
    return specs if m.tied else {**specs, "unembed": P(None, "tp")}


def params_of(m: Model, seed: int = 0) -> dict:
    """Random parameters."""
    rng = np.random.default_rng(seed)
    L, M = m.layers, m.width
    shapes = {
        "norm": (L, M),
        "query": (L, M, m.heads * D),
        "keys": (L, 2, M, m.groups * D),
        "out": (L, m.heads * D, M),
        "hidden_norm": (L, M),
        "up": (L, M, m.units),
        "down": (L, m.units, M),
    }
    shapes |= {"query_norm": (L, D), "key_norm": (L, D)} if m.norms else {}
    shapes |= {"sinks": (L, m.heads)} if m.sinks else {}
    if m.routing:
        E = m.routing.experts
        shapes |= {"shared_up": shapes["up"], "shared_down": shapes["down"]} if m.shared else {}
        shapes |= {"router": (L, M, E), "up": (L, E, M, m.units), "down": (L, E, m.units, M)}
    layers = {name: 0.5 * rng.normal(size=shape) for name, shape in shapes.items()}
    params = {"table": rng.normal(size=(m.codes, M)), "layers": layers, "norm": rng.normal(size=M)}
    return params if m.tied else {**params, "unembed": rng.normal(size=(M, m.codes))}


def rows_of(case: Case) -> dict:
    """Random tokens and labels; row 0 has no label at all where some are ignored."""
    rng = np.random.default_rng(case.seed + 1)
    tokens, labels = rng.integers(case.model.codes, size=(2, B, T))
    keep = rng.random((B, T)) >= case.ignored
    keep[0] &= not case.ignored
    keep[-1, -1] = True
    return {"tokens": tokens, "labels": np.where(keep, labels, -1)}


# ---- one device: dense, and in nothing but jax.numpy ---------------------------------------------


def rms(x, scale):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scale


def dense_attention(q, k, v, sinks):
    q = q.reshape(*q.shape[:2], k.shape[2], -1, D)
    scores = jnp.einsum("btkgd,bskd->btkgs", q, k) / np.sqrt(D)
    scores = jnp.where(np.tri(T, dtype=bool)[None, :, None, None], scores, -jnp.inf)
    if sinks is not None:
        column = sinks.reshape(1, 1, k.shape[2], -1, 1)
        column = jnp.broadcast_to(column, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, column], -1)
    weights = jax.nn.softmax(scores, -1)[..., :T]
    return jnp.einsum("btkgs,bskd->btkgd", weights, v).reshape(*v.shape[:2], -1)


@lru_cache
def reference_of(m: Model, weight: float) -> Callable:
    """The mean loss of all labels, and of routers, which count so much."""

    def feed_forward(x, p):
        if not m.routing:
            return jnp.tanh(x @ p["up"]) @ p["down"], 0.0
        expert = lambda e, x: jnp.tanh(x @ p["up"][e]) @ p["down"][e]
        y, of_router, _ = experts_cases.dense(x, p["router"], expert, m.routing, T)
        if m.shared:
            y += jnp.tanh(x @ p["shared_up"]) @ p["shared_down"]
        return y, weight * experts_cases.penalties(*of_router)

    def layer(x, p):
        y = rms(x, p["norm"])
        split = lambda x: x.reshape(B, T, -1, D)
        q, k, v = (split(y @ w) for w in (p["query"], *p["keys"]))
        if m.norms:
            q, k = rms(q, p["query_norm"]), rms(k, p["key_norm"])
        x += dense_attention(q, k, v, p.get("sinks")) @ p["out"]
        y, penalty = feed_forward(rms(x, p["hidden_norm"]), p)
        return x + y, penalty

    def mean(params, batch):
        tokens, labels = batch["rows"]["tokens"], batch["rows"]["labels"]
        x, penalties = params["table"][tokens], 0.0
        for i in range(m.layers):
            x, penalty = layer(x, {name: p[i] for name, p in params["layers"].items()})
            penalties += penalty
        logits = rms(x, params["norm"]) @ (params["table"].T if m.tied else params["unembed"])
        picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        each = jax.nn.logsumexp(logits, -1) - picked
        each = jnp.sum(jnp.where(labels >= 0, each, 0)) / jnp.maximum(jnp.sum(labels >= 0), 1)
        return each + penalties

    return allowing(mean)


def allowing(f):
    """`f`, in which arrays of different ranks may meet."""

    def call(*args):
        with jax.numpy_rank_promotion("allow"):
            return f(*args)

    return call


# ---- many devices: by the rules ------------------------------------------------------------------

SITES = ("row", "experts", "shared", "rows", "routers", "total")
WIDEST = 8


def right() -> dict:
    """No fault: each device's part counts once."""
    return {site: np.ones(WIDEST) for site in SITES}


def faulty(site: str, kind: str, size: int) -> dict:
    """A sum over an axis of some size that is left out, or done twice."""
    first = np.arange(WIDEST) == 0
    return {**right(), site: {"dropped": 1.0 * first, "doubled": np.full(WIDEST, 1.0 * size)}[kind]}


def own(faults: dict, site: str, axes):
    """This device's number."""
    return faults[site][lax.axis_index(axes)]


def weighed(x, weight):
    """`x`, whose gradient counts `weight` times."""
    return lax.stop_gradient(x) + weight * (x - lax.stop_gradient(x))


def mean_and_grads(m: Model, lies: Layout) -> tuple[Callable, dict]:
    """What runs on each device, and how parameters are split."""
    tp = TensorParallel("tp", lies.sequence, lies.overlap)
    ep = ExpertParallel("ep", tp)
    specs, shapes, mesh = specs_of(m), params_of(m), mesh_of(lies)
    if lies.zero:
        layers = split(specs["layers"], shapes["layers"], mesh, skip=1)
        specs = {**split(without_layers(specs), shapes, mesh), "layers": layers}
    of_layer = {name: P(*spec[1:]) for name, spec in specs["layers"].items()}
    between = {"norm", "hidden_norm", "router"} if lies.sequence else set()
    shared = {"query_norm", "key_norm"} | between
    axes = lambda path: (*lies.rows, "tp") if path[-1].key in shared else lies.rows

    def enter(params):
        ready = data.gather(without_layers(params), without_layers(specs), "dp")
        layers = params["layers"]
        ready["layers"] = layers if lies.zero == 3 else data.gather(layers, specs["layers"], "dp")
        return jax.tree.map_with_path(lambda path, x: data.per_device(x, axes(path)), ready)

    flex = lambda q, k, v, sinks: flex_attention(q, k, v, mask_mod=causal(), sinks=sinks)
    attend = {"dense": dense_attention, "flex": flex}[m.attention]

    def feed_forward(faults, x, p):
        if not m.routing:
            (up,) = tp.column(x, p["up"])
            return tp.row(jnp.tanh(up), p["down"]), None
        here = own(faults, "experts", "tp")
        expert = lambda rows, dot: dot(jnp.tanh(dot(rows, p["up"])) * here, p["down"])
        every = lambda x: jnp.tanh(x @ p["shared_up"]) @ p["shared_down"]
        return ep.routed(x, p["router"], expert, m.routing, shared=every if m.shared else None)

    def layer(faults, carry, p):
        x, load = carry
        number = own(faults, "shared", "tp")
        p = {name: weighed(x, number) if name in shared else x for name, x in p.items()}
        q, k, v = tp.column(rms(x, p["norm"]), p["query"], *p["keys"])
        q, k, v = (x.reshape(*x.shape[:2], -1, D) for x in (q, k, v))
        if m.norms:
            q, k = rms(q, p["query_norm"]), rms(k, p["key_norm"])
        out = attend(q, k, v, p.get("sinks")).reshape(*q.shape[:2], -1)
        x += tp.row(out * own(faults, "row", "tp"), p["out"])
        y, of_layer = feed_forward(faults, rms(x, p["hidden_norm"]), p)
        return x + y, load and load.then(of_layer)

    once = routers_count(lies)

    def total(whole, rows, faults):
        step = partial(layer, faults)
        x = tp.embed(whole["table"], rows["tokens"])
        carry = x, Load.none(x, m.routing.experts, m.layers) if m.routing else None
        if lies.zero == 3:
            gather = partial(data.gather, specs=of_layer, axis="dp")
            x, load = fsdp.scan_layers(step, carry, whole["layers"], gather=gather)
        else:
            (x, load), _ = lax.scan(lambda x, p: (step(x, p), None), carry, whole["layers"])
        weight, dim = (whole["table"], 0) if m.tied else (whole["unembed"], 1)
        x = rms(x, whole["norm"])
        each, _ = loss.cross_entropy(x, weight, rows["labels"], tp, vocab_dim=dim)
        each, count = each.sum(), (rows["labels"] >= 0).sum()
        if load:
            options = dict(balance=experts_cases.BALANCE * once, z=experts_cases.Z * once)
            each += auxiliary(load, count, **options) * own(faults, "routers", lies.rows)
        return each * own(faults, "total", lies.rows), count

    def run(params, batch):
        faults = batch["faults"]

        def of_rows(whole, rows):
            number = own(faults, "rows", lies.rows)
            return total(jax.tree.map(lambda x: weighed(x, number), whole), rows, faults)

        f = data.value_and_grad(of_rows, enter, lies.rows, microbatches=lies.microbatches)
        return f(params, batch["rows"])

    return allowing(run), specs


def routers_count(lies: Layout) -> float:
    """What routers add: nothing over microbatches, of which each has a loss of its own."""
    return float(lies.microbatches == 1)


def split(specs: dict, shapes: dict, mesh, skip: int = 0) -> dict:
    """Specs in which dp splits the matrices; vectors stay whole."""
    large = {name: spec for name, spec in specs.items() if shapes[name].ndim > 1 + skip}
    return {**specs, **fsdp.split(large, {name: shapes[name] for name in large}, mesh, skip=skip)}


def without_layers(tree: dict) -> dict:
    return {name: x for name, x in tree.items() if name != "layers"}


def mesh_of(lies: Layout):
    return make_mesh(dp=lies.dp, cp=lies.cp, tp=lies.tp, ep=lies.ep, devices=jax.devices("cpu")[:8])


@lru_cache(maxsize=2)
def program(m: Model, lies: Layout) -> Callable:
    """A function of parameters and a batch, rows and faults, that compares with one device."""
    f, specs = mean_and_grads(m, lies)
    return parity(
        f,
        mesh_of(lies),
        (specs, {"rows": P(lies.rows), "faults": P()}),
        reference=reference_of(m, routers_count(lies)),
        gives_gradients=True,
        strict=False,
        compiler_options=OPTIONS,
    )


def checker(case: Case) -> Callable[[dict], Parity]:
    """Returns a function of faults that compares the case with one device."""
    check, params = program(case.model, case.layout), params_of(case.model, case.seed)
    return lambda faults: check(params, {"rows": rows_of(case), "faults": faults})
