"""Rules together, in a small model that has one of everything: equal to one device on every leaf.

Its parts, and what each would show: a table that embeds and makes logits (two uses of one split
leaf), norms between blocks (sums over `tp` where positions are split), a scale inside a block that
all devices share (a sum over `tp` in every mode), heads dealt out, layers that are gathered ahead,
and rows of which devices have from none to all of the labels.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.sharding.equal import assert_equal, mesh_of, on_one, run_on, values
from xform.sharding import TensorParallel, data, fsdp, loss, norm

B, T, M, H, D, F, C, L = 8, 8, 12, 4, 4, 16, 24, 3
SPECS = {
    "table": P("tp"),
    "layers": {
        "norm": P(),
        "qkv": P(None, None, None, "tp"),
        "scale": P(),
        "out": P(None, "tp"),
        "hidden_norm": P(),
        "up": P(None, None, "tp"),
        "down": P(None, "tp"),
    },
    "norm": P(),
}


def params() -> dict:
    shapes = {"norm": (L, M), "qkv": (L, 3, M, H * D), "scale": (L, D), "out": (L, H * D, M)}
    shapes |= {"hidden_norm": (L, M), "up": (L, M, F), "down": (L, F, M)}
    layers = {name: 0.5 * x for name, x in values(1, **shapes).items()}
    return {**values(2, table=(C, M)), "layers": layers, **values(3, norm=(M,))}


def rows() -> dict:
    rng = np.random.default_rng(4)
    tokens, labels = rng.integers(C, size=(2, B, T))
    keep = rng.random((B, T)) < np.linspace(0, 1, B)[:, None]
    return {"tokens": tokens, "labels": np.where(keep, labels, -1)}


def rms(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scale


def layer(tp, x, p):
    q, k, v = tp.column(rms(x, p["norm"][None, None]), *p["qkv"])
    heads = lambda x: x.reshape(*x.shape[:2], -1, D)
    scale = p["scale"][None, None, None]
    q, k, v = rms(heads(q), scale), rms(heads(k), scale), heads(v)
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k), -1)
    out = jnp.einsum("bhts,bshd->bthd", weights, v)
    x += tp.row(out.reshape(*out.shape[:2], -1), p["out"])
    (up,) = tp.column(rms(x, p["hidden_norm"][None, None]), p["up"])
    return x + tp.row(jnp.tanh(up), p["down"])


ONE = TensorParallel()


def model(p, rows, tp=ONE, scan=None):
    x = tp.embed(p["table"], rows["tokens"])
    scan = scan or (lambda f, x, ps: jax.lax.scan(lambda x, p: (f(x, p), None), x, ps)[0])
    x = rms(scan(partial(layer, tp), x, p["layers"]), p["norm"][None, None])
    each, _ = loss.cross_entropy(x, p["table"], rows["labels"], tp, vocab_dim=0, z_loss=0.1)
    return each.sum(), (rows["labels"] >= 0).sum()


@pytest.fixture(scope="module")
def one_device():
    def mean(p, rows):
        total, count = model(p, rows)
        return total / count

    found, grads = on_one(jax.value_and_grad(mean), params(), rows())
    squares = sum(np.square(g).sum() for g in jax.tree.leaves(grads))
    return found, grads, np.sqrt(squares)


def sharded(mesh, tp, *, zero=None, ahead=1, microbatches=1, late=False):
    """Loss, gradients and their norm. `zero`: None, 1 (gathered once) or 3 (layer by layer)."""
    specs = SPECS
    if zero:
        shapes = params()
        layers = fsdp.split(SPECS["layers"], shapes["layers"], mesh, skip=1)
        rest = {name: SPECS[name] for name in ("table", "norm")}
        specs = {**fsdp.split(rest, {n: shapes[n] for n in rest}, mesh), "layers": layers}
    of_layer = jax.tree.map(
        lambda s: P(*s[1:]), specs["layers"], is_leaf=lambda x: isinstance(x, P)
    )
    gather = lambda w: data.gather(w, of_layer, "dp")
    shared = {"norm", "hidden_norm", "scale"} if tp.sequence else {"scale"}
    axes = lambda path: ("dp", "tp") if path[-1].key in shared else ("dp",)

    def enter(p):
        rest = {name: data.gather(p[name], specs[name], "dp") for name in ("table", "norm")}
        if zero == 3:
            whole = partial(data.gather, specs=specs["layers"], axis="dp")
            p = {**rest, "layers": fsdp.late(p["layers"], whole) if late else p["layers"]}
        else:
            p = {**rest, "layers": data.gather(p["layers"], specs["layers"], "dp")}
        return jax.tree.map_with_path(lambda path, x: data.per_device(x, axes(path)), p)

    scan = None if zero != 3 else partial(fsdp.scan_layers, gather=gather, ahead=ahead)
    f = data.value_and_grad(
        partial(model, tp=tp, scan=scan), enter, "dp", microbatches=microbatches
    )

    def with_norm(p, rows):
        mean, grads = f(p, rows)
        return mean, grads, norm.global_norm(grads, specs)

    out = (P(), specs, P())
    return run_on(mesh, with_norm, (specs, P("dp")), out, (params(), rows()))


PLAIN = TensorParallel("tp")
SEQUENCE = TensorParallel("tp", sequence=True)
RING = TensorParallel("tp", sequence=True, overlap="ring")
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("axes", "tp", "how"),
    [
        ((4, 2), PLAIN, {"microbatches": 2}),
        ((2, 4), SEQUENCE, {"zero": 1, "microbatches": 4}),
        ((4, 2), RING, {"zero": 3}),
        slow((8, 1), PLAIN, {}),
        slow((1, 4), SEQUENCE, {}),
        slow((2, 4), RING, {"zero": 3, "ahead": 2, "microbatches": 4}),
        slow((4, 2), SEQUENCE, {"zero": 3, "ahead": 0}),
        slow((4, 2), RING, {"zero": 3, "late": True, "microbatches": 2}),
        slow((4, 2), SEQUENCE, {"zero": 1}),
    ],
    ids=str,
)
def test_loss_gradients_and_norm_equal_those_of_one_device(one_device, axes, tp, how):
    dp, n = axes
    labels = (rows()["labels"] >= 0).reshape(dp, -1).sum(1)
    assert dp == 1 or labels[-1] > 2 * labels[0], "devices must have different numbers of labels"
    found = sharded(mesh_of(dp=dp, tp=n), tp, **how)
    assert_equal(found, one_device)
